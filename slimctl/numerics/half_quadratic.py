"""Half-quadratic quantization: zero points that let a few weights be far off, and most be close.

Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023: weights are
heavy-tailed, so the error is measured in the norm ``l_p``, ``p < 1``, which outliers hardly move.
It is split into a sparse part and a quadratic rest, and these take turns: shrinking is the proximal
step of ``l_p``, and the zero point that then fits the rest best is a mean. Scales stay.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from slimctl.numerics.blocks import Grid, Matrix, Parameters, row_slices

NORM: Final = 0.7
"""The ``p`` that the authors use, as they do the next three."""

_BETA: Final = 10.0
_KAPPA: Final = 1.01
_STEPS: Final = 20
_SMALLEST: Final = np.float32(1e-8)


def half_quadratic(blocks: Matrix, start: Parameters, grid: Grid, *, whole: bool) -> Parameters:
    """Parameters with better zero points; of every block the best that was seen.

    Args:
        blocks: [outputs, blocks, block], finite.
        start: Each [outputs, blocks].
        grid: Not symmetric.
        whole: Whether zero points are whole numbers.
    """
    rows = blocks.reshape(-1, blocks.shape[-1])
    scale, zero_point = start.scale.reshape(-1, 1), start.zero_point.reshape(-1, 1)
    found = np.empty_like(zero_point)
    for part in row_slices(rows.shape):
        found[part] = _improve(rows[part] / scale[part], zero_point[part], grid, whole)
    return Parameters(start.scale, found.reshape(start.zero_point.shape))


def _improve(units: Matrix, zero_point: Matrix, grid: Grid, whole: bool) -> Matrix:
    """[rows, block], in units of the scale -> [rows, 1]."""
    beta, tried, best = _BETA, zero_point, zero_point
    least = np.full(zero_point.shape, np.inf, np.float32)
    for _ in range(_STEPS):
        used = np.clip(np.rint(tried), 0, grid.highest) if whole else tried
        codes = np.clip(np.rint(units + used), 0, grid.highest)
        rest = units - (codes - used)
        sizes = np.abs(rest)
        loss = np.sum(sizes**NORM, axis=1, keepdims=True)
        best, least = np.where(loss < least, used, best), np.minimum(loss, least)
        sparse = np.sign(rest) * np.maximum(
            sizes - (sizes + _SMALLEST) ** np.float32(NORM - 1) / np.float32(beta), 0
        )
        tried = np.mean(codes - (units - sparse), axis=1, keepdims=True)
        beta *= _KAPPA
    return best
