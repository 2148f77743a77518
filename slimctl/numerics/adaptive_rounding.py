"""AdaRound: which weights to round up is learned, so that what a layer computes changes least.

Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", ICML 2020: every code
is ``floor(w / s) + h(v)``, with the rectified sigmoid ``h`` (equation 23), and the ``v`` minimize
``E||(W - s Q) x||^2 + lambda sum(1 - |2 h(v) - 1|^beta)`` (equations 21 and 24), by Adam, while
``beta`` falls and drives each ``h`` to 0 or 1. The expectation needs the second moments of the
inputs only, so every step sees all of the data and no layer is run.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Single = NDArray[np.float32]

_STRETCH: Final = (1.1, -0.1)
"""``zeta`` and ``gamma`` of the paper: the sigmoid reaches 0 and 1 within finite ``v``."""

_WEIGHT: Final = 1.0
"""``lambda``. The error is counted in steps of an average input: more changes nothing, a tenth lets
most weights end where they began, on the nearest code."""

_BETA: Final = (20.0, 2.0)
_WARM_UP: Final = 0.2
"""Share of the steps before the penalty counts."""

_RATE: Final = 0.03
_DECAY: Final = (0.9, 0.999)
_TINY: Final = 1e-8


def round_adaptive(
    matrix: Array, scale: Array, moments: Array, *, low: int, high: int, ridge: float, steps: int
) -> NDArray[np.int64]:
    """Codes with a small ``E||(W - s Q) x||^2``, each next to its weight.

    An output for which the search ends above rounding to nearest is rounded to nearest.

    Args:
        matrix: Weights ``W`` [groups, outputs, inputs].
        scale: Step ``s`` of each output [groups, outputs], positive.
        moments: ``E[x x^T]`` [groups, inputs, inputs], of the mean-free inputs where a bias takes
            up mean errors.
        low: Smallest code.
        high: Largest code.
        ridge: Added to the diagonal of the moments, as a share of it.
        steps: Of the search.

    Returns:
        [groups, outputs, inputs]
    """
    weights = (matrix / scale[:, :, None]).astype(np.float32)  # in steps
    floor = np.clip(np.floor(weights), low, high)
    free = (floor < high) & (weights > low)  # the others have one code only
    energy = _energy(moments, ridge)
    variable = _start(weights - floor)
    first, second = np.zeros_like(variable), np.zeros_like(variable)
    for step in range(1, steps + 1):
        raised, slope = _rectified(variable, free)
        gradient = -2.0 * ((weights - floor - raised) @ energy)
        done = step / steps
        if done > _WARM_UP:
            gradient += _WEIGHT * _penalty_slope(raised, (done - _WARM_UP) / (1.0 - _WARM_UP))
        gradient *= slope
        first += (1.0 - _DECAY[0]) * (gradient - first)
        second += (1.0 - _DECAY[1]) * (gradient * gradient - second)
        moved = first / (1.0 - _DECAY[0] ** step)
        variable -= _RATE * moved / (np.sqrt(second / (1.0 - _DECAY[1] ** step)) + _TINY)
    raised, _ = _rectified(variable, free)
    found, nearest = floor + (raised >= 0.5), np.clip(np.rint(weights), low, high)
    left, plain = (_errors(weights - codes, energy) for codes in (found, nearest))
    return np.where(left < plain, found, nearest).astype(np.int64)


def _errors(difference: Single, energy: Single) -> Single:
    """Of each output, [groups, outputs, 1]."""
    return np.asarray(((difference @ energy) * difference).sum(axis=2, keepdims=True), np.float32)


def _energy(moments: Array, ridge: float) -> Single:
    """Moments relative to an average input, [groups, inputs, inputs]."""
    found = moments.copy()
    index = np.arange(found.shape[1])
    found[:, index, index] *= 1.0 + ridge
    average = found[:, index, index].mean(axis=1)[:, None, None]
    relative: Single = (found / np.maximum(average, 1e-30)).astype(np.float32)
    return relative


def _start(fraction: Single) -> Single:
    """The ``v`` whose ``h`` is the fraction of a step that lies above the floor."""
    high, low = _STRETCH
    inner = (np.clip(fraction, 0.0, 1.0) - low) / (high - low)
    return np.asarray(np.log(inner / (1.0 - inner)), np.float32)


def _rectified(variable: Single, free: NDArray[np.bool_]) -> tuple[Single, Single]:
    """``h(v)`` and its slope; both 0 where nothing can be raised."""
    high, low = _STRETCH
    sigmoid = 1.0 / (1.0 + np.exp(-variable))
    stretched = sigmoid * (high - low) + low
    inside = free & (stretched > 0.0) & (stretched < 1.0)
    slope = np.where(inside, sigmoid * (1.0 - sigmoid) * (high - low), 0.0)
    return np.where(free, np.clip(stretched, 0.0, 1.0), 0.0).astype(variable.dtype), slope


def _penalty_slope(raised: Single, done: float) -> Single:
    """Slope of ``1 - |2 h - 1|^beta`` in ``h``; ``beta`` falls along half a cosine."""
    start, end = _BETA
    beta = end + 0.5 * (start - end) * (1.0 + np.cos(np.pi * done))
    away = 2.0 * raised - 1.0
    return np.asarray(-2.0 * beta * np.sign(away) * np.abs(away) ** (beta - 1.0), np.float32)
