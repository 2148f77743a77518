"""Half-quadratic quantization: zero points that let a few weights be far off, and most be close.

Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023: weights are
heavy-tailed, so the error is measured in the norm ``l_p``, ``p < 1``, which outliers hardly move.
It is split into a sparse part and a quadratic rest, and these take turns: shrinking is the proximal
step of ``l_p``, and the zero point that then fits the rest best is a mean. Scales stay, so there is
more than one start: the scale of least squares and, as the authors have it, that of the extremes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from slimctl.numerics.blocks import (
    Grid,
    Matrix,
    Parameters,
    row_slices,
    spanning_parameters,
    storable,
)

NORM: Final = 0.7
"""The ``p`` that the authors use, as they do the next three."""

_BETA: Final = 10.0
_KAPPA: Final = 1.01
_STEPS: Final = 20
_SMALLEST: Final = np.float32(1e-8)
_EXACT: Final = 1e-6
"""Loss of a block, in units of the scale, below which no step can gain anything."""


class _Found(NamedTuple):
    """What one start leads to, [rows, 1] each.

    Attributes:
        scale: That of the start.
        zero_point: The best that was seen.
        error: ``sum (w - w')^2``.
    """

    scale: Matrix
    zero_point: Matrix
    error: Matrix


def half_quadratic(blocks: Matrix, start: Parameters, grid: Grid, *, whole: bool) -> Parameters:
    """Parameters with better zero points; of every block the best that was seen.

    Fractional zero points start from :func:`spanning_parameters` as well. Along the steps from one
    start ``l_p`` decides, as in the paper. Between the two ends squared error does, which is what
    outputs add up: ``l_p`` likes the scale of the extremes more than they do (MiniLM: outputs of
    12.92 dB instead of 13.07). Where the weights lie on a grid both are zero.

    Args:
        blocks: [outputs, blocks, block], finite.
        start: Each [outputs, blocks].
        grid: Not symmetric.
        whole: Whether zero points are whole numbers.
    """
    rows = blocks.reshape(-1, blocks.shape[-1])
    starts = [start] if whole else [start, spanning_parameters(blocks, grid)]
    flat = [Parameters(*(array.reshape(-1, 1) for array in one)) for one in starts]
    scale, zero_point = (np.empty((len(rows), 1), np.float32) for _ in range(2))
    for part in row_slices(rows.shape):
        first, *others = (
            _improve(rows[part], Parameters(one.scale[part], one.zero_point[part]), grid, whole)
            for one in flat
        )
        for other in others:
            first = _better(first, other)
        scale[part], zero_point[part] = first.scale, first.zero_point
    shape = start.scale.shape
    return Parameters(scale.reshape(shape), zero_point.reshape(shape))


def _better(one: _Found, other: _Found) -> _Found:
    """Of each row the one with the smaller error."""
    chosen = other.error < one.error
    return _Found(*(np.where(chosen, b, a) for a, b in zip(one, other, strict=True)))


def _improve(rows: Matrix, start: Parameters, grid: Grid, whole: bool) -> _Found:
    """Steps for each row, [rows, block], for as long as they lower its loss.

    That is where the authors stop, too; nearly all rows are done after a few steps.
    """
    units = rows / start.scale
    best, least = start.zero_point.copy(), np.full(start.scale.shape, np.inf, np.float32)
    going, tried, beta = np.arange(len(rows)), start.zero_point, _BETA
    for _ in range(_STEPS):
        used = np.clip(np.rint(tried), 0, grid.highest) if whole else storable(tried, grid)
        codes = np.clip(np.rint(units + used), 0, grid.highest)
        rest = units - (codes - used)
        sizes = np.abs(rest)
        slopes = _slopes(sizes)
        loss = np.einsum("rb,rb->r", sizes, slopes)[:, None]
        lower = (loss < least[going])[:, 0]
        best[going[lower]], least[going[lower]] = used[lower], loss[lower]
        lower &= loss[:, 0] > _EXACT
        if not lower.any():
            break
        going, units, codes = going[lower], units[lower], codes[lower]
        sparse = np.copysign(np.maximum(sizes - slopes / np.float32(beta), 0), rest)[lower]
        tried = np.mean(codes - (units - sparse), axis=1, keepdims=True)
        beta *= _KAPPA
    return _Found(start.scale, best, _squared_errors(rows, start.scale, best, grid))


def _squared_errors(rows: Matrix, scale: Matrix, zero_point: Matrix, grid: Grid) -> Matrix:
    """[rows, 1]"""
    codes = np.clip(np.rint(rows / scale + zero_point), 0, grid.highest)
    errors = (codes - zero_point) * scale - rows
    found: Matrix = np.einsum("rb,rb->r", errors, errors)[:, None]
    return found


def _slopes(sizes: Matrix) -> Matrix:
    """``sizes^(p - 1)``, by the logarithm: several times as fast as numpy's power."""
    found: Matrix = np.exp(np.float32(NORM - 1) * np.log(sizes + _SMALLEST))
    return found
