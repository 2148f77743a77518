"""Which codes a quantized tensor may have. Imports no torch: graphs are made ready without it."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

RANGE: Final = "slimctl_range"
"""Attribute of a QuantizeLinear in a graph that is only trained: its least and largest code."""

RESTORED: Final = "slimctl_restored"
"""Attribute of a QuantizeLinear in such a graph that also does what its DequantizeLinear did: least
and largest code, without the zero point. Two nodes read and write whole tensors twice as often."""

_SIGNED = (ir.DataType.INT4, ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32)
_UNSIGNED = (ir.DataType.UINT4, ir.DataType.UINT8, ir.DataType.UINT16)

CODES: Final[dict[ir.DataType, tuple[int, int]]] = {
    **{kind: (-(2 ** (kind.bitwidth - 1)), 2 ** (kind.bitwidth - 1) - 1) for kind in _SIGNED},
    **{kind: (0, 2**kind.bitwidth - 1) for kind in _UNSIGNED},
}
"""All codes of a type, from the least to the largest."""
