"""Running sums and products along an axis."""

from __future__ import annotations

import numpy as np

from slimctl.runtime.floats import in_float32
from slimctl.runtime.registry import Array, operator


@operator("CumSum", since=11)
@in_float32
def cum_sum(x: Array, axis: Array, *, exclusive: int = 0, reverse: int = 0) -> Array:
    """Sum of the elements up to each, without itself if exclusive, from the end if reverse"""
    return _accumulated(np.add, x, axis.item(), exclusive, reverse)


@operator("CumProd", since=26)
@in_float32
def cum_prod(x: Array, axis: Array, *, exclusive: int = 0, reverse: int = 0) -> Array:
    """Product of the elements up to each, without itself if exclusive, from the end if reverse"""
    return _accumulated(np.multiply, x, axis.item(), exclusive, reverse)


def _accumulated(function: np.ufunc, x: Array, axis: int, exclusive: int, reverse: int) -> Array:
    """Floats are accumulated in float64: what is rounded at each step would add up."""
    kind = np.float64 if x.dtype.kind == "f" else x.dtype
    moved = np.moveaxis(x, axis, 0)  # [.., n, ..] -> [n, ..]
    moved = moved[::-1] if reverse else moved
    result = np.empty(moved.shape, kind)
    if exclusive:
        result[:1] = function.identity
        function.accumulate(moved[:-1], axis=0, dtype=kind, out=result[1:])
    else:
        function.accumulate(moved, axis=0, dtype=kind, out=result)
    result = result[::-1] if reverse else result
    return np.moveaxis(result, 0, axis).astype(x.dtype, copy=False)
