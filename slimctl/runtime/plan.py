"""From a graph to steps: every operator has its function, every tensor its last reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from slimctl.core.errors import UnsupportedModelError
from slimctl.runtime.casting import as_text, element_type, is_text
from slimctl.runtime.counts import Counts
from slimctl.runtime.device import EXACT, Device
from slimctl.runtime.engine import Engine
from slimctl.runtime.kernels.quantize import quantize_linear
from slimctl.runtime.regions import Region, find_region
from slimctl.runtime.registry import MICROSOFT, Array, Function, Kernel, Value, find_kernel


@dataclass(frozen=True)
class Step:
    """One call of a kernel.

    Attributes:
        name: The node's name.
        op_type: Its operator.
        kernel: What computes it.
        inputs: Names; empty for those left out.
        outputs: Names; empty for those left out.
        attributes: Plain values by name.
        bodies: Graphs inside the node, by attribute.
        engine: Integer arithmetic of this step.
        done: Tensors that nobody reads after this step.
    """

    name: str
    op_type: str
    kernel: Kernel
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    bodies: Mapping[str, Plan]
    engine: Engine
    done: tuple[str, ...] = ()


@dataclass(frozen=True)
class Declared:
    """What a graph says about one of its outputs.

    Attributes:
        kind: Type of the elements, None where it is unknown or there are none.
        sizes: Of the axes, None where they vary; () where the rank is unknown.
    """

    kind: np.dtype[Any] | None = None
    sizes: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A graph that is ready to run.

    Attributes:
        inputs: Names, in their order.
        outputs: Names, in their order.
        declared: What is known about each output before a run.
        captured: Tensors of the graphs around this one that it reads.
        constants: Initializers by name.
        steps: In the order in which they run.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    declared: tuple[Declared, ...] = ()
    captured: tuple[str, ...] = ()
    constants: Mapping[str, Value] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Settings:
    """How a graph is computed.

    Attributes:
        opsets: Versions of the operator sets.
        integers: Q/DQ regions run as integer operators; otherwise all nodes run as written.
        device: Whose integer arithmetic it is.
        counting: Whether codes are counted at the outputs of integer operators.
        tracing: Whether integer operators keep the values that they rounded last.
    """

    opsets: Mapping[str, int]
    integers: bool = True
    device: Device = EXACT
    counting: bool = False
    tracing: bool = False

    def engine(self, *, in_region: bool = False) -> Engine:
        """A new step's arithmetic."""
        return Engine(self.device, Counts() if self.counting else None, self.tracing, in_region)


def plan_graph(graph: ir.Graph, settings: Settings) -> Plan:
    """Plans a graph and the graphs inside its nodes.

    Args:
        graph: Normalized: sorted, every tensor with a name of its own.
        settings: How it is computed.

    Raises:
        UnsupportedModelError: There is no function for an operator; names it and the node.
    """
    outputs = _names(graph.outputs)
    steps = _needed(list(_steps(graph, settings)), outputs)
    own = {*_names(graph.inputs), *graph.initializers, *(n for s in steps for n in s.outputs)}
    read = [name for step in steps for name in _reads(step)] + list(outputs)
    return Plan(
        _names(graph.inputs),
        outputs,
        tuple(map(_declared, graph.outputs)),
        tuple(dict.fromkeys(name for name in read if name and name not in own)),
        {name: _constant(value) for name, value in graph.initializers.items()},
        tuple(_with_done(steps)),
    )


def _declared(value: ir.Value) -> Declared:
    kind = value.type.dtype if isinstance(value.type, ir.TensorType) else None
    dims = () if value.shape is None else value.shape.dims
    sizes = tuple(dim if isinstance(dim, int) else None for dim in dims)
    return Declared(None if kind is None else element_type(kind), sizes)


def _steps(graph: ir.Graph, settings: Settings) -> Iterator[Step]:
    regions = list(map(find_region, graph)) if settings.integers else []
    found = {region.last: region for region in regions if region is not None}
    inside = {region.core for region in found.values()}
    for node in graph:
        if node in found:
            yield _region_step(found[node], settings)
        elif node not in inside:  # a Relu in between stays, and is dropped if nobody reads it
            yield _step(node, settings)


def _needed(steps: list[Step], outputs: Sequence[str]) -> list[Step]:
    """Steps that an output depends on: regions leave Q/DQ nodes behind that nobody reads."""
    wanted = set(outputs)
    kept: list[Step] = []
    for step in reversed(steps):
        if wanted.intersection(step.outputs):
            wanted.update(_reads(step))
            kept.append(step)
    return kept[::-1]


def _region_step(region: Region, settings: Settings) -> Step:
    kernel = _kernel(region.domain, region.op_type, region.core, settings)
    inputs = region.inputs
    if region.clips:
        kernel = replace(kernel, run=_clipped(kernel.run, region.clips))
        inputs = (*inputs, *region.parameters)
    return Step(
        region.core.name or "",
        region.op_type,
        kernel,
        _names(inputs),
        _names([region.output]),
        _attributes(region.attributes),
        {},
        settings.engine(in_region=True),
    )


def _clipped(run: Function, clips: Sequence[tuple[float, float]]) -> Function:
    """Codes of the bounds clip the codes: quantization is monotone."""
    low, high = max(c[0] for c in clips), min(c[1] for c in clips)

    def clipped(*inputs: Value, **keywords: Any) -> Value:
        codes = run(*inputs[:-2], **keywords)
        scale, zero_point = (parameter.reshape(()) for parameter in inputs[-2:])
        ends = quantize_linear(np.array([low, high], np.float32), scale, zero_point)
        return np.clip(codes, ends[0], ends[1])

    return clipped


_UNDECLARED = {
    "LayerNormalization": ("", "LayerNormalization", 17),
    "SimplifiedLayerNormalization": (MICROSOFT, "SimplifiedLayerNormalization", 1),
}
"""What onnxruntime's optimizer writes in ONNX's domain, whatever its version has."""


def _kernel(domain: str, op_type: str, node: ir.Node, settings: Settings) -> Kernel:
    version = node.version or settings.opsets.get(node.domain, 1)
    if domain != node.domain:
        version = 1
    kernel = find_kernel(domain, op_type, version)
    if kernel is None and not domain and op_type in _UNDECLARED:
        kernel = find_kernel(*_UNDECLARED[op_type])
    if kernel is not None:
        return kernel
    named = f"{domain}::{op_type}" if domain else op_type
    raise UnsupportedModelError(
        f"The built-in runtime has no function for {named} in version {version} of its operator"
        " set",
        where=f"node '{node.name}'",
        fix="add one to slimctl/runtime/kernels: a plain function with the operator's schema",
    )


def _step(node: ir.Node, settings: Settings) -> Step:
    kernel = _kernel(node.domain, node.op_type, node, settings)
    graphs = {n: a for n, a in node.attributes.items() if a.type == ir.AttributeType.GRAPH}
    return Step(
        node.name or "",
        node.op_type,
        kernel,
        _names(node.inputs),
        _names(node.outputs),
        _attributes({n: a for n, a in node.attributes.items() if n not in graphs}),
        {name: plan_graph(a.as_graph(), settings) for name, a in graphs.items()},
        settings.engine(),
    )


def _attributes(attributes: Mapping[str, ir.Attr]) -> dict[str, Any]:
    """Plain values by the names of the kernels' parameters."""
    return {name.lower(): _plain(attribute) for name, attribute in attributes.items()}


def _names(values: Any) -> tuple[str, ...]:
    return tuple("" if value is None else value.name or "" for value in values)


def _plain(attribute: ir.Attr) -> Any:
    """An attribute as numbers, strings, tuples of them, or arrays."""
    kinds = ir.AttributeType
    if attribute.type == kinds.TENSOR:
        return _array(attribute.as_tensor())
    if attribute.type in (kinds.INTS, kinds.FLOATS, kinds.STRINGS):
        return tuple(attribute.value)
    return attribute.value


def _constant(value: ir.Value) -> Value:
    assert value.const_value is not None, "a loaded model has all its weights"
    array = _array(value.const_value)
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False  # shared by all runs
    return array


def _array(tensor: ir.TensorProtocol) -> Array:
    """The elements; strings as str, which are bytes in a file."""
    array = tensor.numpy()
    return as_text(array) if is_text(array) else array


def _reads(step: Step) -> Iterator[str]:
    """What a step reads, its bodies included."""
    yield from step.inputs
    for body in step.bodies.values():
        yield from body.captured


def _with_done(steps: list[Step]) -> Iterator[Step]:
    """Steps that know which tensors nobody reads after them, results that nobody reads included."""
    last = {name: i for i, step in enumerate(steps) for name in (*_reads(step), *step.outputs)}
    done: dict[int, list[str]] = {}
    for name, index in last.items():
        if name:
            done.setdefault(index, []).append(name)
    for index, step in enumerate(steps):
        yield replace(step, done=tuple(done.get(index, ())))
