"""Changes of the element type."""

from __future__ import annotations

import onnx_ir as ir

from slimctl.runtime.casting import converted, element_type, is_text
from slimctl.runtime.registry import Array, operator


@operator("Cast", since=6)
def cast(input: Array, *, to: int, saturate: int = 1, round_mode: str = "up") -> Array:
    """The values in the type that ``to`` names"""
    return converted(input, element_type(to), saturate=bool(saturate), round_mode=round_mode)


@operator("CastLike", since=15)
def cast_like(
    input: Array, target_type: Array, *, saturate: int = 1, round_mode: str = "up"
) -> Array:
    """The values in the type of another tensor"""
    kind = element_type(ir.DataType.STRING) if is_text(target_type) else target_type.dtype
    return converted(input, kind, saturate=bool(saturate), round_mode=round_mode)


@operator("BitCast", since=26)
def bit_cast(input: Array, *, to: int) -> Array:
    """The bits, read as another type of the same width"""
    kind = element_type(to)
    width, wanted = (ir.DataType.from_numpy(d).bitwidth for d in (input.dtype, kind))
    if width != wanted:
        raise ValueError(f"{width} bits cannot be read as a type of {wanted} bits")
    # types of 4 and 2 bits have a byte of their own here, with zeros in the high bits
    return input.view(kind)
