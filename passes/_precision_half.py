"""Layers in float16: computed so where the provider does that, stored so on processors.

onnxruntime's CPU provider has no float16 kernels on x86 that would save time: it casts to float32
in front of a layer and back behind it, in every run. What is left to gain there is the size. The
weights are stored in float16 with a Cast that onnxruntime computes when it loads the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import RangeRequest
from slimctl.core.target import Target
from slimctl.graph.bodies import observable_graphs
from slimctl.graph.edit import NameScope, add_initializer, const_array, remove_dead, set_provenance
from slimctl.passes._float_constants import Clamps, limits_of
from slimctl.passes._float_network import Network, Site, is_full_float, read_network
from slimctl.passes._float_ranges import RESERVE
from slimctl.passes._float_reasons import force_for_cpu
from slimctl.passes._float_rules import CPU, HALF_PROVIDERS, MOVEMENT, provider_block_list
from slimctl.passes._float_write import Writer
from slimctl.passes._layers import is_linear
from slimctl.passes._precision import Aim, Carrier, Kind, Layers

if TYPE_CHECKING:
    from slimctl.passes._attempt import Work

_PASS: Final = "quantize-static"
_HALF: Final = ir.DataType.FLOAT16
_LARGEST: Final = limits_of(_HALF).largest
_LOST: Final = 2.0**-9
"""Relative error of a whole weight, as where a model becomes float16: most of it is subnormal."""

_BETWEEN: Final = (MOVEMENT - {"Where"}) | {
    "Add",
    "AveragePool",
    "Clip",
    "HardSigmoid",
    "HardSwish",
    "LeakyRelu",
    "Max",
    "MaxPool",
    "Min",
    "PRelu",
    "Relu",
    "Sigmoid",
    "Sum",
    "Tanh",
}
"""Operators that become float16 with the layers around them where that saves Casts: what they write
is as large as what they read."""


class Fp16(Kind):
    """Weights and activations in float16; on processors weights only."""

    name: ClassVar[str] = "fp16"
    meaning: ClassVar[str] = "float16; on processors stored so, computed in float"
    stored_bits: ClassVar[float] = 16
    multiplied_bits: ClassVar[int] = 16 * 16
    carrier: ClassVar[Carrier] = "real"

    def against(self, layer: str, layers: Layers) -> str:
        """Where float16 would not hold what the layer sees, or nobody computes in it."""
        work, node = layers.work, layers.nodes[layer]
        target = work.context.target
        if "qat" in work.context.later:
            return "training computes in float32"
        weight = _weight(node)
        if target.provider == CPU:
            return _against_weight(weight) if weight else "it has no constant weights to store"
        if target.provider not in HALF_PROVIDERS:
            return f"{target.provider} does not compute in float16"
        if node.op_type in _full_operators(target):
            return f"{node.op_type} runs in float32 only on {target.name}"
        constants = [value for value in node.inputs if value and const_array(value) is not None]
        reasons = (*map(_against_weight, constants), _against_values(node, magnitudes(work)))
        return next(filter(None, reasons), "")

    def passed_over(self, layers: Layers, aim: Aim) -> str:
        """Not where time is measured: processors gain none, and others are not here."""
        target = layers.work.context.target
        if aim != "time":
            return ""
        if target.provider == CPU:
            return "onnxruntime computes it in float32 on processors; it saves bytes, no time"
        return f"it is computed in float32 here, which says nothing about {target.provider}"

    def keeps_itself(self, target: Target) -> bool:
        """Where it is float16 throughout."""
        return target.provider != CPU

    def write(self, model: ir.Model, layers: Collection[str], work: Work) -> None:
        """Converts layers and what stands between them, or stores their weights."""
        if work.context.target.provider == CPU:
            _store(model, layers)
        else:
            _convert(model, layers, _may_stand_between(work))


def _weight(node: ir.Node) -> ir.Value | None:
    """The constant factor of a layer, if it has one."""
    value = node.inputs[1] if len(node.inputs) > 1 else None
    return value if value is not None and const_array(value) is not None else None


def _against_weight(value: ir.Value) -> str:
    array = const_array(value)
    if array is None or array.dtype != np.float32:
        return "its weight is not float32" if array is not None else ""
    if not np.abs(array).max(initial=0.0) <= _LARGEST:  # NaN, too
        return f"float16 does not hold '{value.name}'"
    if np.linalg.norm(array - _narrowed(array)) > _LOST * np.linalg.norm(array):
        return f"'{value.name}' is too small for float16"
    return ""


def _narrowed(array: NDArray[Any]) -> NDArray[np.float16]:
    return array.astype(np.float16)


def _full_operators(target: Target) -> set[str]:
    """Operators that the provider does not run in float16."""
    always = (*provider_block_list(target.provider), *target.float32_only)
    return {*always, *target.without_type("float16")}


# what layers see


def magnitudes(work: Work) -> Mapping[str, float] | None:
    """Largest magnitude by tensor, around what may become float16; None without data."""
    if not work.context.has_data:
        return None
    if work.magnitudes is None:
        around = {
            value.name or ""
            for graph in _graphs(work.model)
            for node in graph
            if is_linear(node) or (node.op_type in _BETWEEN and not node.domain)
            for value in _floats(node)
        }
        found = work.context.ranges(work.model, RangeRequest(tuple(sorted(around)), "minmax"))
        work.magnitudes = {name: max(-low, high) for name, (low, high) in found.items()}
    return work.magnitudes


def _graphs(model: ir.Model) -> Iterator[ir.Graph]:
    return (place.graph for place in observable_graphs(model))


def _floats(node: ir.Node) -> list[ir.Value]:
    """The float tensors that a node reads and writes, constants apart."""
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    return [value for value in values if is_full_float(value) and const_array(value) is None]


def _against_values(node: ir.Node, known: Mapping[str, float] | None) -> str:
    if known is None:
        return ""
    for value in _floats(node):
        highest = known.get(value.name or "")
        if highest is None:
            return f"'{value.name}' never held a finite value on the data"
        if highest > _LARGEST / RESERVE:
            return (
                f"'{value.name}' reaches {highest:.3g} on the data, too close to the end of float16"
            )
    return ""


def _may_stand_between(work: Work) -> frozenset[str]:
    full, known = _full_operators(work.context.target), magnitudes(work)
    return frozenset(
        node.name or ""
        for graph in _graphs(work.model)
        for node in graph
        if node.op_type in _BETWEEN and not node.domain and node.op_type not in full
        if not _against_values(node, known)
    )


# writing


def _store(model: ir.Model, layers: Collection[str]) -> None:
    """The weights in float16, each behind a Cast."""
    names = NameScope(model)
    stored: dict[ir.Value, ir.Value] = {}
    for graph in list(_graphs(model)):
        for node in [node for node in graph if node.name in layers]:
            value = _weight(node)
            assert value is not None, "checked when it was chosen"
            if value not in stored:
                stored[value] = _restored(value, model.graph, names)
            node.replace_input_with(1, stored[value])
    remove_dead(model)  # the float32 weights


def _restored(value: ir.Value, graph: ir.Graph, names: NameScope) -> ir.Value:
    array = const_array(value)
    assert array is not None, "a constant"
    half = add_initializer(graph, names.fresh(f"{value.name}_float16"), _narrowed(array))
    cast = ir.Node(
        "",
        "Cast",
        [half],
        [ir.AttrInt64("to", int(ir.DataType.FLOAT))],
        name=names.fresh_node(f"{value.name}_Cast"),
    )
    output = cast.outputs[0]
    output.name = names.fresh(f"{value.name}_float32")
    output.type, output.shape = ir.TensorType(ir.DataType.FLOAT), value.shape
    set_provenance(cast, _PASS)
    graph.insert_before(graph[0], cast)
    return output


def _convert(model: ir.Model, layers: Collection[str], between: Collection[str]) -> None:
    """Float16 for layers, and for what is between them if there are fewer Casts then."""
    network = read_network(model, _HALF, keep_io=True)
    chosen = _reached(network, layers, between)
    for site in network.sites:
        if site not in chosen:
            site.force("another precision")
    force_for_cpu(network)  # where the result is tried out
    network.decide()
    # What stays float32 keeps its constants.
    Writer(model, network, Clamps(), _PASS).write(keep=network.reads.keys())


def _reached(network: Network, layers: Collection[str], between: Collection[str]) -> set[Site]:
    """Sites of layers, and of what is between or beside them without another node between."""
    found = {site for site, node in network.node_sites() if node.name in layers}
    able = {site for site, node in network.node_sites() if node.name in between}
    beside: dict[Site, set[Site]] = {}
    for value, reads in network.reads.items():
        writer = network.producers.get(value)
        if writer is not None:
            beside.setdefault(writer, set()).update(read.site for read in reads)
            for read in reads:
                beside.setdefault(read.site, set()).add(writer)
    pending = list(found)
    while pending:
        new = (beside.get(pending.pop(), set()) & able) - found
        found |= new
        pending += new
    return found
