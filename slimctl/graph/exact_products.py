"""The same model with weights whose products are exact on every processor.

x86 processors without VNNI add pairs of uint8 x int8 products in 16 bits and saturate; products of
uint8 and uint8 they add in 32 bits (onnxruntime's MLAS kernels). Weights of int8 are therefore
written as uint8 with zero points that are 128 larger: ``(w + 128) - (z + 128) = w - z``. Nothing
else changes, so that such a processor shows what the model is worth on others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.codes import code_type
from slimctl.graph.edit import NameScope, add_initializer, all_nodes, clone_model, const_array


class _Slot(NamedTuple):
    """Where an operator has weights.

    Attributes:
        weights: Place of the codes among the inputs.
        scale: Place of their scale; a zero point that is missing has its shape. None: a scalar.
        zero_point: Place of their zero point.
        activation: Place of the codes that they are multiplied with, or of their zero point: what
            has the type. None: always uint8.
    """

    weights: int
    scale: int | None
    zero_point: int
    activation: int | None


_SLOTS: dict[str, tuple[_Slot, ...]] = {
    "QLinearConv": (_Slot(3, 4, 5, 2),),
    "QLinearMatMul": (_Slot(3, 4, 5, 2),),
    "QGemm": (_Slot(3, 4, 5, 2),),
    "MatMulInteger": (_Slot(1, None, 3, 0),),
    "MatMulIntegerToFloat": (_Slot(1, 3, 5, 0),),
    "DynamicQuantizeMatMul": (_Slot(1, 2, 3, None),),
    "DynamicQuantizeLSTM": (_Slot(1, 8, 9, None), _Slot(2, 10, 11, None)),
    "QAttention": (_Slot(1, 4, 7, 0),),
}
_RESTORED = _Slot(0, 1, 2, None)
"""Weights of a DequantizeLinear."""

_LAYERS = ("Conv", "Gemm", "MatMul")
_SIGNED = ir.DataType.INT8
_MIDDLE = 128


def with_exact_products(model: ir.Model) -> ir.Model | None:
    """A model that computes the same, its products exact; None where they are already.

    Args:
        model: Not changed.
    """
    if not any(True for node in all_nodes(model) for _ in _slots(node)):
        return None
    changed = clone_model(model)
    names = NameScope(changed)
    written: dict[ir.Value, ir.Value] = {}
    for node in all_nodes(changed):
        for slot in list(_slots(node)):
            _rewrite(node, slot, names, written)
    return changed


def has_int8_activations(model: ir.Model) -> bool:
    """Whether activations are quantized to int8."""
    for node in all_nodes(model):
        if node.op_type == "QuantizeLinear" and const_array(node.inputs[0]) is None:
            zero_point = node.inputs[2] if len(node.inputs) > 2 else None
            if zero_point is not None and zero_point.dtype == _SIGNED:
                return True
    return False


def _slots(node: ir.Node) -> list[_Slot]:
    """The int8 weights of a node that meet uint8 codes."""
    if node.op_type == "DequantizeLinear":
        return [_RESTORED] if _is_signed(node, 0) and _meets_unsigned(node) else []
    slots = _SLOTS.get(node.op_type, ())
    return [slot for slot in slots if _is_signed(node, slot.weights) and _is_met(node, slot)]


def _is_signed(node: ir.Node, place: int) -> bool:
    value = node.inputs[place] if place < len(node.inputs) else None
    return value is not None and value.is_initializer() and value.dtype == _SIGNED


def _is_met(node: ir.Node, slot: _Slot) -> bool:
    if slot.activation is None:
        return True
    value = node.inputs[slot.activation]
    return value is not None and code_type(value) == ir.DataType.UINT8


def _meets_unsigned(restore: ir.Node) -> bool:
    """Whether all readers are layers whose other input comes from uint8 codes."""
    uses = restore.outputs[0].uses()
    return bool(uses) and all(_is_layer_of_unsigned(use.node, use.idx) for use in uses)


def _is_layer_of_unsigned(layer: ir.Node, place: int) -> bool:
    if layer.op_type not in _LAYERS or layer.domain or place != 1:
        return False
    value = layer.inputs[0]
    maker = None if value is None else value.producer()
    if maker is None or maker.op_type != "DequantizeLinear" or maker.inputs[0] is None:
        return False
    return code_type(maker.inputs[0]) == ir.DataType.UINT8


def _rewrite(
    node: ir.Node,
    slot: _Slot,
    names: NameScope,
    written: dict[ir.Value, ir.Value],
) -> None:
    weights = node.inputs[slot.weights]
    assert weights is not None, "a slot has weights"
    place = slot.zero_point
    zero_point = node.inputs[place] if place < len(node.inputs) else None
    if zero_point is not None and const_array(zero_point) is None:
        return  # computed: nothing is known about it
    codes = _moved(weights, names, written)
    if zero_point is not None:
        moved = _moved(zero_point, names, written)
    else:
        shape = _shape(node, slot.scale)
        moved = add_initializer(
            _home(weights), names.fresh("zero_point"), np.full(shape, _MIDDLE, np.uint8)
        )
    node.replace_input_with(slot.weights, codes)
    if place >= len(node.inputs):
        node.resize_inputs(place + 1)
    node.replace_input_with(place, moved)


def _moved(value: ir.Value, names: NameScope, written: dict[ir.Value, ir.Value]) -> ir.Value:
    """The uint8 form of an int8 constant, made once."""
    if value not in written:
        array = const_array(value)
        assert array is not None, "it is a constant"
        codes: NDArray[np.uint8] = (array.astype(np.int16) + _MIDDLE).astype(np.uint8)
        written[value] = add_initializer(_home(value), names.fresh(f"{value.name}_uint8"), codes)
    return written[value]


def _home(value: ir.Value) -> ir.Graph:
    """The graph whose initializer a value is."""
    assert value.graph is not None and isinstance(value.graph, ir.Graph), "initializers have one"
    return value.graph


def _shape(node: ir.Node, place: int | None) -> tuple[int, ...]:
    scale = None if place is None else const_array(node.inputs[place])
    return () if scale is None else scale.shape
