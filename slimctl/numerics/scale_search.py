"""Scales of symmetric weights with the least squared error.

With few levels the largest weight must not decide: a scale that clips it resolves all others finer.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from slimctl.numerics.affine import QuantizedType, symmetric_scales

_SHARES: Final = np.linspace(0.3, 1.0, 36)
"""Tried of the largest magnitude; a normal distribution in 15 levels wants 0.4 to 0.7 of it."""

_REFINEMENTS: Final = 3


def least_squares_scales(
    weight: NDArray[np.floating[Any]], axis: int | None, kind: QuantizedType
) -> NDArray[np.float32]:
    """Scales that minimize ``sum (w - s q)^2`` with ``q = saturate(rint(w / s))``.

    A grid is searched, and its best scale refined by turns: codes for the scale, then the scale
    that fits the codes best, ``<w, q> / <q, q>``. Neither step makes the error larger.

    Args:
        weight: Any shape.
        axis: Channel axis, or None for one scale.
        kind: Integer type whose zero point is 0.

    Returns:
        float32 [channels], or [] for ``axis=None``.
    """
    largest = symmetric_scales(weight, axis, kind)
    channels = 1 if axis is None else weight.shape[axis]
    moved = weight if axis is None else np.moveaxis(weight, axis, 0)
    rows = np.ascontiguousarray(moved.reshape(channels, -1), np.float32)  # [channels, n]
    start = largest.reshape(channels).astype(np.float32)
    best, error = start, _errors(rows, start, kind)
    for share in _SHARES[:-1]:
        best, error = _better(rows, best, error, (start * share).astype(np.float32), kind)
    for _ in range(_REFINEMENTS):
        codes = _codes(rows, best, kind)
        norm = np.sum(codes * codes, axis=1)
        fitted = np.sum(rows * codes, axis=1) / np.maximum(norm, 1.0)  # no code but 0: no better
        usable = np.where((norm > 0) & (fitted > 0), fitted, best).astype(np.float32)
        best, error = _better(rows, best, error, usable, kind)
    return best.reshape(largest.shape)


def _codes(
    rows: NDArray[np.float32], scale: NDArray[np.float32], kind: QuantizedType
) -> NDArray[np.float32]:
    return np.asarray(np.clip(np.rint(rows / scale[:, None]), kind.low, kind.high))


def _errors(
    rows: NDArray[np.float32], scale: NDArray[np.float32], kind: QuantizedType
) -> NDArray[np.float64]:
    difference = rows - _codes(rows, scale, kind) * scale[:, None]
    return np.asarray(np.sum(difference.astype(np.float64) ** 2, axis=1))


def _better(
    rows: NDArray[np.float32],
    best: NDArray[np.float32],
    error: NDArray[np.float64],
    scale: NDArray[np.float32],
    kind: QuantizedType,
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Of two scales the better, row by row, with its error."""
    tried = _errors(rows, scale, kind)
    return np.where(tried < error, scale, best), np.minimum(tried, error)
