"""Shape inference that survives unknown operators and models of any size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
from slimctl.graph.save import structure
from slimctl.graph.sizes import reshaped, shape_entries

Shape = tuple[Dimension, ...] | None


@dataclass(frozen=True)
class _Known:
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


_ROUNDS = 4
"""How often inference is run again because a Reshape gave it something to go on."""


def _infer(model: ir.Model, fixed: frozenset[ir.Value]) -> None:
    """Runs onnx's inference; its results replace what the model states, but for ``fixed``."""
    for _ in range(_ROUNDS):
        _infer_once(model, fixed)
        if not _resolve_reshapes(model, fixed):
            return


def _resolve_reshapes(model: ir.Model, fixed: frozenset[ir.Value]) -> bool:
    """Finds shapes behind Reshape nodes that onnx does not. Returns whether there were any."""
    found = False
    for node in all_nodes(model):
        if node.op_type != "Reshape" or node.domain or len(node.inputs) < 2:
            continue
        before = dimensions(node.inputs[0].shape) if node.inputs[0] is not None else None
        output = node.outputs[0]
        if before is None or output in fixed or output.shape is not None:
            continue
        after = reshaped(before, None, shape_entries(node.inputs[1]))
        if after is not None:
            output.shape, found = ir.Shape(after), True
    return found


def _infer_once(model: ir.Model, fixed: frozenset[ir.Value]) -> None:
    proto = structure(model)
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
