"""What is known of codes of quantized tensors in a model that states no types in between."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

_PASS_ON: Final = frozenset(
    {
        *("Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Pad"),
        *("Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
    }
)
"""Operators whose outputs have the type of their first input: codes move through them."""


def code_type(codes: ir.Value) -> ir.DataType | None:
    """Type of codes: as stated, or what made them tells it; None where nothing does."""
    node = codes.producer()
    if codes.dtype is not None or node is None:
        return codes.dtype
    if node.op_type == "MaxPool" and codes.index():
        return ir.DataType.INT64  # places, not codes
    if node.op_type in _PASS_ON and node.inputs[0] is not None:
        return code_type(node.inputs[0])
    if node.op_type == "Cast":
        return ir.DataType(node.attributes.get_int("to", 0)) or None
    if node.op_type == "DynamicQuantizeLinear":
        return ir.DataType.FLOAT if codes.index() == 1 else ir.DataType.UINT8
    return _quantized_type(node) if node.op_type == "QuantizeLinear" else None


def code_rank(codes: ir.Value) -> int | None:
    """Number of axes: as stated, or that of the constant behind a Cast."""
    node = codes.producer()
    if codes.shape is None and node is not None and node.op_type == "Cast":
        codes = node.inputs[0] or codes
    return None if codes.shape is None else len(codes.shape)


def _quantized_type(node: ir.Node) -> ir.DataType | None:
    stated = node.attributes.get_int("output_dtype", 0)
    zero_point = node.inputs[2] if len(node.inputs) > 2 else None
    if zero_point is not None:
        return zero_point.dtype
    return ir.DataType(stated) if stated else ir.DataType.UINT8
