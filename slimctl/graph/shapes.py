"""Shape inference that survives unknown operators and models of any size."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from threading import Lock
from typing import NamedTuple

import onnx
import onnx_ir as ir

from slimctl.graph.edit import (
    NAMELESS,
    Dimension,
    all_graphs,
    all_nodes,
    clone_model,
    dimensions,
)
from slimctl.graph.save import MADE_UP, structure
from slimctl.graph.sizes import Entry, reshaped, shape_entries

Shape = tuple[Dimension, ...] | None


class _Known(NamedTuple):
    """What is known of one tensor."""

    type: ir.TypeProtocol | None
    shape: Shape


def infer_shapes(model: ir.Model) -> None:
    """Fills in types and shapes of intermediate tensors, in place, where they are known.

    What was stated before is not trusted: inference starts from the inputs and the weights. Only
    gaps that it leaves (behind custom operators, say) are filled from earlier statements, and only
    if none of these contradicts what was inferred. Inputs and outputs of the model stay as they
    are. Unknown operators leave gaps and are no error.
    """
    before = {value: _Known(value.type, dimensions(value.shape)) for value in _intermediate(model)}
    _forget(before)
    outputs = frozenset(model.graph.outputs)
    _infer(model, outputs)
    if not _contradictions(before) and _fill_gaps(before):
        _infer(model, outputs)


def with_sizes(model: ir.Model, sizes: Mapping[str, int]) -> ir.Model:
    """A clone whose inputs have these sizes, with the shapes that follow, outputs included.

    Args:
        model: Not changed; its weights are shared.
        sizes: By symbol, or by place for a nameless dimension: ``{"batch": 1, "input[2]": 224}``.
    """
    clone = clone_model(model)
    for value in clone.graph.inputs:
        shape = dimensions(value.shape)
        if shape is not None:
            named = [
                dim if isinstance(dim, int) else sizes.get(dim or f"{value.name}[{axis}]", dim)
                for axis, dim in enumerate(shape)
            ]
            value.shape = ir.Shape(named)
    for value in clone.graph.outputs:
        value.shape = None
    _forget(dict.fromkeys(_intermediate(clone), _Known(None, None)))
    _infer(clone, fixed=frozenset())
    return clone


def _intermediate(model: ir.Model) -> list[ir.Value]:
    """Outputs of nodes, except those of the model itself."""
    return [
        value
        for graph in all_graphs(model)
        for node in graph
        for value in node.outputs
        if value.name and not (graph is model.graph and value.is_graph_output())
    ]


def _forget(values: dict[ir.Value, _Known]) -> None:
    for value in values:
        value.type = None
        value.shape = None


_ROUNDS = 32
"""How often inference is run again because a Reshape gave it something to go on.

One round for each such Reshape behind another: a block of a transformer can have three.
"""


class _Memory:
    """What was inferred of the last few graphs.

    Each step of a pipeline infers the shapes of what it is given, and most of them leave the graph
    as it is but for its weights: of 20 inferences in one run 13 were of a graph seen before.
    """

    _GRAPHS = 8

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, tuple[_Known, ...]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: bytes) -> tuple[_Known, ...] | None:
        with self._lock:
            found = self._found.get(key)
            if found is not None:
                self._found.move_to_end(key)
            return found

    def put(self, key: bytes, found: tuple[_Known, ...]) -> None:
        with self._lock:
            self._found[key] = found
            if len(self._found) > self._GRAPHS:
                self._found.popitem(last=False)


_MEMORY = _Memory()


def _infer(model: ir.Model, fixed: frozenset[ir.Value]) -> None:
    """Runs onnx's inference; its results replace what the model states, but for ``fixed``."""
    values = [v for node in all_nodes(model) for v in node.outputs if v not in fixed]
    proto = structure(model)
    key = _key(proto, values)
    known = _MEMORY.get(key)
    if known is None:
        _infer_anew(model, proto, fixed)
        # Types are mutable, and belong to one value each.
        known = tuple(_Known(deepcopy(v.type), dimensions(v.shape)) for v in values)
        _MEMORY.put(key, known)
        return
    for value, (kind, shape) in zip(values, known, strict=True):
        value.type = deepcopy(kind)
        value.shape = None if shape is None else ir.Shape(shape)


def _key(proto: onnx.ModelProto, values: Sequence[ir.Value]) -> bytes:
    """Equal for graphs of which the same is inferred."""
    digest = hashlib.sha256(proto.SerializeToString(deterministic=True))
    # A shape without a type has no place in the message, nor has which values are not fixed.
    seen = [(v.name, dimensions(v.shape) if v.type is None else None) for v in values]
    digest.update(repr(seen).encode())
    return digest.digest()


def _infer_anew(model: ir.Model, proto: onnx.ModelProto, fixed: frozenset[ir.Value]) -> None:
    done: dict[ir.Value, Shape] = {}
    for _ in range(_ROUNDS):
        _infer_once(model, proto, fixed)
        if not _resolve(model, fixed, done):
            return
        proto = structure(model)


def _resolve(model: ir.Model, fixed: frozenset[ir.Value], done: dict[ir.Value, Shape]) -> bool:
    """Finds sizes behind Reshape and Slice nodes that onnx does not.

    Args:
        model: Its shapes are those that onnx inferred.
        fixed: Not to be changed.
        done: What was found before, and is now; onnx may have forgotten it.

    Returns:
        Whether anything was found that was not known before.
    """
    found = False
    for node in all_nodes(model):
        behind = _BEHIND.get(node.op_type)
        if behind is None or node.domain or len(node.inputs) < 2:
            continue
        before = dimensions(node.inputs[0].shape) if node.inputs[0] is not None else None
        output = node.outputs[0]
        if before is None or output in fixed:
            continue
        known = dimensions(output.shape)
        after = behind(node, before, known)
        if after is None or _certain(after) == _certain(known):
            continue
        output.shape = ir.Shape(after)
        found = found or done.get(output) != _certain(after)
        done[output] = _certain(after)
    return found


def _behind_reshape(
    node: ir.Node, before: Sequence[Dimension], known: Shape
) -> Sequence[Dimension] | None:
    zeros = node.attributes.get("allowzero")
    allow = zeros is not None and bool(zeros.as_int())
    return reshaped(before, known, shape_entries(node.inputs[1]), allow_zero=allow)


def _behind_slice(
    node: ir.Node, before: Sequence[Dimension], known: Shape
) -> Sequence[Dimension] | None:
    """Axes that are not cut keep their size; where others are cut may be computed from sizes."""
    starts, ends = shape_entries(node.inputs[1]), shape_entries(node.inputs[2])
    count = len(starts or ())
    axes = _entries(node, 3, list(range(count)))
    steps = _entries(node, 4, [1] * count)
    if starts is None or ends is None or axes is None or steps is None:
        return known
    after = list(before)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=False):
        if not isinstance(axis, int) or not -len(before) <= axis < len(before):
            return known
        size = _cut(before[axis], start, end, step)
        after[axis] = known[axis] if size is None and known is not None else size
    return after


def _entries(node: ir.Node, index: int, default: list[Entry]) -> list[Entry] | None:
    """What an input says, or what it means that it is not there."""
    there = index < len(node.inputs) and node.inputs[index] is not None
    return shape_entries(node.inputs[index]) if there else default


def _cut(size: Dimension, start: Entry, end: Entry, step: Entry) -> int | None:
    """How much is left of an axis."""
    if not isinstance(size, int) or not isinstance(step, int) or step == 0:
        return None
    if not isinstance(start, int) or not isinstance(end, int):
        return None
    return len(range(size)[start:end:step])


_BEHIND = {"Reshape": _behind_reshape, "Slice": _behind_slice}


def _certain(shape: Sequence[Dimension] | None) -> Shape:
    """A shape without the symbols that onnx makes up."""
    if shape is None:
        return None
    return tuple(None if str(dim).startswith(MADE_UP) else dim for dim in shape)


def _infer_once(model: ir.Model, proto: onnx.ModelProto, fixed: frozenset[ir.Value]) -> None:
    _forget_fillers(proto.graph)
    inferred = _inferred(proto)
    if inferred is not None:
        _take(model.graph, inferred.graph, fixed)


def _forget_fillers(proto: onnx.GraphProto) -> None:
    """Exporters write -1 or "?" for a size that is open; inference would calculate with them."""
    for info in (*proto.input, *proto.output, *proto.value_info):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_value < 0 or dim.dim_param == NAMELESS:
                dim.Clear()


def _inferred(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    # Propagating the values of shape tensors finds more, but fails as a whole on some graphs.
    for data_propagation in (True, False):
        try:
            return onnx.shape_inference.infer_shapes(proto, data_prop=data_propagation)
        except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
            continue
    return None  # nothing is known, and nothing wrong is stated


def _take(graph: ir.Graph, proto: onnx.GraphProto, fixed: frozenset[ir.Value]) -> None:
    """Copies inferred types and shapes; both graphs have the same nodes in the same order."""
    infos = {info.name: info for info in (*proto.value_info, *proto.output)}
    for node, node_proto in zip(graph, proto.node, strict=True):
        for value in node.outputs:
            if value.name in infos and value not in fixed:
                ir.serde.deserialize_value_info_proto(infos[value.name], value)
        protos = {attribute.name: attribute for attribute in node_proto.attribute}
        for name, attribute in node.attributes.items():
            if attribute.type == ir.AttributeType.GRAPH:
                _take(attribute.as_graph(), protos[name].g, fixed)


def _contradictions(before: dict[ir.Value, _Known]) -> bool:
    """Whether anything that was stated is not so; then nothing else that was stated counts."""
    return any(not _agree(known.shape, dimensions(value.shape)) for value, known in before.items())


def _agree(stated: Shape, inferred: Shape) -> bool:
    if stated is None or inferred is None:
        return True
    if len(stated) != len(inferred):
        return False
    pairs = zip(stated, inferred, strict=True)
    return all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))


def _fill_gaps(before: dict[ir.Value, _Known]) -> bool:
    """Restores statements where inference found nothing. Returns whether there were any."""
    filled = False
    for value, known in before.items():
        if value.type is None and known.type is not None:
            value.type, filled = known.type, True
        shape = _merged(known.shape, dimensions(value.shape))
        if shape is not None and shape != dimensions(value.shape):
            value.shape, filled = ir.Shape(shape), True
    return filled


def _merged(stated: Shape, inferred: Shape) -> Shape:
    """The inferred shape with sizes that only the statement knows."""
    if stated is None or inferred is None:
        return stated or inferred
    return tuple(
        a if b is None and isinstance(a, int) else b for a, b in zip(stated, inferred, strict=True)
    )
