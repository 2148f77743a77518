"""Gives quantized layers new biases, wherever and in whatever form they keep them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.edit import NameScope, add_initializer, const_array, set_provenance
from slimctl.passes._quantized_layers import QuantizedLayer, weight_dequantizer
from slimctl.passes._weights import BIAS_LIMIT, quantize_bias


def write_bias(
    candidate: QuantizedLayer, bias: NDArray[np.float64], names: NameScope, provenance: str
) -> str | None:
    """Stores a bias where the layer keeps it, as int32 in front of integer kernels.

    Args:
        candidate: The layer.
        bias: [outputs]; of a MatMul, what is added to the constant behind it.
        names: Scope of the model.
        provenance: Name of the pass that does it.

    Returns:
        A reason when there is no place for it.
    """
    node, graph = candidate.node, _graph(candidate.node)
    if node.op_type == "MatMul":
        return _write_following_add(candidate, bias, names)
    current = node.inputs[2] if len(node.inputs) > 2 else None
    label = f"{node.name}_corrected_bias"
    data = node.inputs[0].producer() if node.inputs[0] is not None else None
    if data is None or data.op_type != "DequantizeLinear":
        value = add_initializer(graph, names.fresh(label), bias.astype(np.float32))
        _set_bias(node, value)
        return None
    scale = _int32_scale(candidate, data, current)
    if np.any(np.abs(bias) > scale.astype(np.float64) * 2 * BIAS_LIMIT):
        return "the corrected bias does not fit into int32"
    codes = quantize_bias(bias, scale)
    stored = add_initializer(graph, names.fresh(label), codes)
    old = current.producer() if current is not None else None
    if old is not None and old.inputs[1] is not None:
        scale_value = old.inputs[1]
    else:
        scale_value = add_initializer(graph, names.fresh(f"{label}_scale"), scale)
    attributes = [ir.AttrInt64("axis", 0)] if scale.ndim else []
    restored = ir.Node(
        "",
        "DequantizeLinear",
        [stored, scale_value],
        attributes,
        name=names.fresh_node(f"{label}_dq"),
    )
    restored.outputs[0].name = names.fresh(f"{label}_dq")
    set_provenance(restored, provenance)
    graph.insert_before(node, restored)
    _set_bias(node, restored.outputs[0])
    if old is not None and not old.outputs[0].uses():
        graph.remove(old, safe=True)
    return None


def _graph(node: ir.Node) -> ir.Graph:
    assert isinstance(node.graph, ir.Graph), "a node of a model"
    return node.graph


def _set_bias(node: ir.Node, value: ir.Value) -> None:
    if len(node.inputs) < 3:
        node.resize_inputs(3)
    node.replace_input_with(2, value)


def _int32_scale(
    candidate: QuantizedLayer, data: ir.Node, current: ir.Value | None
) -> NDArray[np.float32]:
    """Scale of the int32 bias: the existing one, or input scale times weight scale."""
    old = current.producer() if current is not None else None
    stored = const_array(old.inputs[1]) if old is not None else None
    if stored is not None:
        return stored.astype(np.float32)
    input_scale = const_array(data.inputs[1])
    weight = weight_dequantizer(candidate.node)
    assert weight is not None and input_scale is not None
    weight_scale = const_array(weight.inputs[1])
    assert weight_scale is not None
    scale = np.float32(input_scale) * weight_scale.astype(np.float32)
    if weight_scale.ndim and candidate.node.op_type == "ConvTranspose":
        scale = np.tile(scale, candidate.original.groups)
    return np.asarray(scale, np.float32)


def _write_following_add(
    candidate: QuantizedLayer, bias: NDArray[np.float64], names: NameScope
) -> str | None:
    """Corrects the constant that is added right behind a MatMul."""
    users = list(candidate.node.outputs[0].uses())
    add = users[0].node if len(users) == 1 else None
    if (
        add is None
        or add.op_type not in ("Add", "Sum")
        or candidate.node.outputs[0].is_graph_output()
    ):
        return "a MatMul without an Add behind it has no bias to correct"
    index = 1 - users[0].idx
    constant = const_array(add.inputs[index])
    if constant is None or constant.size != bias.size or constant.shape[-1:] != bias.shape:
        return "the Add behind the MatMul adds no vector over its channels"
    corrected = (constant.astype(np.float64).reshape(-1) + bias).reshape(constant.shape)
    label = names.fresh(f"{candidate.node.name}_corrected_bias")
    value = add_initializer(_graph(add), label, corrected.astype(constant.dtype))
    add.replace_input_with(index, value)
    return None
