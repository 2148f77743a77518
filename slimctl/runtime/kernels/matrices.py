"""Parts of a tensor that its own values or diagonals choose, and the determinant."""

from __future__ import annotations

from typing import Any

import numpy as np

from slimctl.runtime.pointwise import pointwise
from slimctl.runtime.registry import Array, operator


@operator("NonZero", since=9)
def non_zero(x: Array) -> Array:
    """Indices of what is not 0, a row for each axis; a scalar counts as a list of one element"""
    return np.array(np.nonzero(np.atleast_1d(x)), np.int64)  # [rank, count]


@operator("Trilu", since=14)
def trilu(input: Array, k: Array | None = None, *, upper: int = 1) -> Array:
    """The triangle above or below a diagonal, zeros elsewhere"""
    diagonal = 0 if k is None else int(k.item())
    return np.triu(input, diagonal) if upper else np.tril(input, diagonal)


@operator("Det", since=11)
@pointwise
def det(x: Array) -> Any:
    """Determinants of square matrices, [.., n, n] -> [..], computed in float64"""
    return np.asarray(np.linalg.det(x.astype(np.float64))).astype(x.dtype, copy=False)
