"""Operations on the bits of integers, with numpy's broadcasting."""

from __future__ import annotations

from typing import Any

import numpy as np

from slimctl.runtime.pointwise import pointwise
from slimctl.runtime.registry import Array, operator


@operator("BitShift", since=11)
@pointwise
def bit_shift(x: Array, y: Array, *, direction: str) -> Any:
    """Bits of x moved by y; beyond the width only the sign is left, as numpy does it too"""
    if direction not in ("LEFT", "RIGHT"):
        raise ValueError(f"there is no direction '{direction}'")
    return np.left_shift(x, y) if direction == "LEFT" else np.right_shift(x, y)


@operator("BitwiseAnd", since=18)
@pointwise
def bitwise_and(a: Array, b: Array) -> Any:
    """Bits that are set in both"""
    return np.bitwise_and(a, b)


@operator("BitwiseOr", since=18)
@pointwise
def bitwise_or(a: Array, b: Array) -> Any:
    """Bits that are set in one or both"""
    return np.bitwise_or(a, b)


@operator("BitwiseXor", since=18)
@pointwise
def bitwise_xor(a: Array, b: Array) -> Any:
    """Bits that are set in exactly one"""
    return np.bitwise_xor(a, b)


@operator("BitwiseNot", since=18)
@pointwise
def bitwise_not(x: Array) -> Any:
    """Bits that are not set"""
    return np.bitwise_not(x)
