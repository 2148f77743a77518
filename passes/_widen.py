"""Computes a float16 model in float32, so that integer kernels can be fused into it.

The CPU provider has no float16 kernels for most operators and inserts the same casts itself; and a
float16 scale underflows for small activations (a range of 1e-6 needs a scale of 4e-9, the smallest
float16 is 6e-8). Inputs and outputs keep their type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import onnx_ir as ir

from slimctl.graph.edit import NameScope, all_graphs, all_nodes, set_provenance
from slimctl.graph.shapes import infer_shapes

_HALF: Final = ir.DataType.FLOAT16
_FULL: Final = ir.DataType.FLOAT
_TYPE_ATTRIBUTES: Final = ("to", "dtype")


def widen(model: ir.Model, pass_name: str) -> bool:
    """Turns every float16 tensor inside the model into float32, in place.

    Args:
        model: Changed in place; its interface stays.
        pass_name: Who is named as the maker of the casts.

    Returns:
        Whether there was anything to widen.
    """
    if not any(value.dtype == _HALF for graph in all_graphs(model) for value in _values(graph)):
        return False
    for graph in all_graphs(model):
        for value in graph.initializers.values():
            _widen_constant(value)
    for node in all_nodes(model):
        _widen_attributes(node)
    _cast_interface(model, pass_name)
    for graph in all_graphs(model):
        for value in _values(graph):
            # Main inputs and outputs were cast above and keep their type.
            if value.dtype == _HALF and not (graph is model.graph and _is_interface(value)):
                value.type = ir.TensorType(_FULL)
    infer_shapes(model)
    return True


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _is_interface(value: ir.Value) -> bool:
    return value.is_graph_input() or value.is_graph_output()


def _widen_constant(value: ir.Value) -> None:
    if value.const_value is not None and value.const_value.dtype == _HALF:
        array = value.const_value.numpy().astype(np.float32)
        value.const_value = ir.Tensor(array, name=value.name)
        value.type = ir.TensorType(_FULL)


def _widen_attributes(node: ir.Node) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == _HALF:
            array = attribute.as_tensor().numpy().astype(np.float32)
            node.attributes[name] = ir.AttrTensor(name, ir.Tensor(array))
        elif _names_half(attribute):
            node.attributes[name] = ir.AttrInt64(name, int(_FULL))


def _names_half(attribute: ir.Attr) -> bool:
    is_type = attribute.name in _TYPE_ATTRIBUTES and attribute.type == ir.AttributeType.INT
    return is_type and attribute.as_int() == int(_HALF)


def _cast_interface(model: ir.Model, pass_name: str) -> None:
    graph, names = model.graph, NameScope(model)
    for value in graph.inputs:
        if value.dtype == _HALF and value.uses():
            uses = list(value.uses())
            cast = _cast(value, _FULL, names.fresh(f"{value.name}_float32"), pass_name)
            for use in uses:
                use.node.replace_input_with(use.idx, cast.outputs[0])
            graph.insert_before(graph[0], cast)
    for index, value in enumerate(graph.outputs):
        producer = value.producer()
        if value.dtype == _HALF and producer is not None:
            name = value.name or ""
            value.name = names.fresh(f"{name}_float32")
            cast = _cast(value, _HALF, name, pass_name)
            graph.append(cast)
            graph.outputs[index] = cast.outputs[0]


def _cast(value: ir.Value, to: ir.DataType, name: str, pass_name: str) -> ir.Node:
    node = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(to))], name=f"{name}_Cast")
    node.outputs[0].name = name
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(to), value.shape
    set_provenance(node, pass_name)
    return node
