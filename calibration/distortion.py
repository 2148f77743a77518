"""Expected error of quantizing a tensor, from its histogram, and the range that minimizes it.

For a range [low, high] with ``steps`` intervals of width d = (high - low) / steps, and zero on the
grid, a value x is off by

    x - high or low - x   where it is clipped,
    |x|                   where it rounds to zero, |x| < d / 2,
    d^2 / 12 on average   elsewhere, squared (it lies anywhere in its interval).

With the first two moments of the values below any point, each of the three costs one lookup, so
that all pairs of ends are tried at once. The best pairs are then measured on the histogram by
quantizing its bins, since values may be lumped (Relu6 at 6, pixels) and not lie just anywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from slimctl.calibration.density import Array
from slimctl.calibration.histogram import Bins
from slimctl.core.contract import Range

COHERENCE = 16.0
"""Weight of the squared mean clipping error against the mean squared error, for ``auto``.

A layer sums up K products. Rounding errors are as often positive as negative and add up to K times
their variance; clipping errors all point the same way, and their mean adds up to K^2 times the mean
weight squared times their mean squared. For K of some hundreds and a mean weight of a fifth of its
deviation, as in convolutions, the quotient K * (mean / deviation)^2 is near 16.
"""

_COARSE = 2.0 ** (-np.arange(0, 10, 1 / 3))  # candidates for an end: ten octaves, 26 % apart
_ZOOMS = (
    2.0 ** np.linspace(-1 / 3, 1 / 3, 9),  # then around the best pair, 6 % apart
    2.0 ** np.linspace(-1 / 12, 1 / 12, 7),  # then 2 %
)
_NUDGE = 2.0 ** np.array([-0.03, 0.0, 0.03])  # and the neighbors of the best, measured
_SCALES = 2.0 ** (np.arange(-30, 25) / 10)  # an eighth to five times the width, 7 % apart
_ENDS = 2.0 ** (np.arange(-3, 4) / 12)
_FINE = 8  # joined bins per step when errors are measured


class _Moments(NamedTuple):
    """Running sums over values by ascending order, each [bins + 1]."""

    at: Array
    number: Array
    first: Array
    second: Array

    def below(self, x: Array) -> tuple[Array, Array, Array]:
        """Count, sum and sum of squares of the values less than x."""
        i = np.searchsorted(self.at, x)
        return self.number[i], self.first[i], self.second[i]

    def above(self, x: Array) -> tuple[Array, Array, Array]:
        """Count, sum and sum of squares of the values of at least x."""
        count, first, second = self.below(x)
        return self.number[-1] - count, self.first[-1] - first, self.second[-1] - second

    def around_zero(self, x: Array) -> tuple[Array, Array]:
        """Count and sum of squares of the values from -x to x, x itself left out."""
        i, j = np.searchsorted(self.at, -x), np.searchsorted(self.at, x)
        return self.number[j] - self.number[i], self.second[j] - self.second[i]


def _moments(values: Array, count: Array) -> _Moments:
    sums = (
        np.concatenate([[0.0], np.cumsum(count * power)])
        for power in (np.ones_like(values), values, values * values)
    )
    return _Moments(values, *sums)


class Distortion:
    """Error of quantizing values with a given histogram.

    Args:
        bins: At least one bin.
        coherence: Weight of the squared mean clipping error; 0 gives the mean squared error.
        exponent: The error that :meth:`measure` takes the mean of is |e| to this power.
    """

    def __init__(self, bins: Bins, coherence: float = 0.0, exponent: float = 2.0) -> None:
        self._values = bins.center
        self._count = bins.weight
        self._total = float(bins.weight.sum())
        self._coherence = coherence
        self._exponent = exponent
        self._moments = _moments(self._values, bins.weight)

    def estimate(self, low: Array, high: Array, step: Array) -> Array:
        """Expected error per value for many ranges, by the three terms above.

        Args:
            low: At most 0, any shape.
            high: At least 0, as ``low``.
            step: Width of an interval, positive, as ``low``.
        """
        n0, s0, q0 = self._moments.below(low)
        n1, s1, q1 = self._moments.above(high)
        clipped = (low * low * n0 - 2 * low * s0 + q0) + (high * high * n1 - 2 * high * s1 + q1)
        mean = (low * n0 - s0) + (high * n1 - s1)
        near, square = self._moments.around_zero(step / 2)
        inside = np.maximum(self._total - n0 - n1 - near, 0.0)
        error = clipped + square + inside * step * step / 12
        return error / self._total + self._coherence * (mean / self._total) ** 2

    def measure(self, low: Array, high: Array, steps: int) -> Array:
        """Error per value for some similar ranges, found by quantizing the bins.

        Args:
            low: At most 0, [ranges].
            high: At least 0, above ``low``, [ranges].
            steps: Intervals of the range.
        """
        step = (high - low) / steps
        values, count, spread = self._joined(float(step.min()) / _FINE)
        ranges = zip(low, high, step, strict=True)
        spread = spread if self._exponent == 2.0 else 0.0  # joined finely: hardly matters
        return spread + np.array([self._measure(values, count, *ends) for ends in ranges])

    def _measure(self, values: Array, count: Array, low: float, high: float, step: float) -> float:
        level = np.rint(values / step)
        np.clip(level, np.rint(low / step), np.rint(high / step), out=level)
        error = level * step - values
        if self._exponent != 2.0:
            return float(count @ np.abs(error) ** self._exponent) / self._total
        weighted = count * error
        beyond = np.abs(error) > step / 2  # only what is clipped is off by more
        mean = float(weighted[beyond].sum()) / self._total
        return float(weighted @ error) / self._total + self._coherence * mean * mean

    def _joined(self, width: float) -> tuple[Array, Array, float]:
        """The values in intervals of ``width``: their means, counts, and variance about these."""
        key = np.floor(self._values / width)
        start = np.flatnonzero(np.diff(key, prepend=-np.inf))
        count = np.add.reduceat(self._count, start)
        mean = np.add.reduceat(self._count * self._values, start) / count
        squares = float(self._moments.second[-1] - count @ (mean * mean))
        return mean, count, max(squares, 0.0) / self._total


def least_error_range(bins: Bins, levels: int, coherence: float = 0.0) -> Range:
    """The range of ``levels`` levels, zero among them, with the least error.

    Args:
        bins: At least one bin, not all at zero.
        levels: Quantization levels.
        coherence: As in :class:`Distortion`.
    """
    steps = levels - 1
    bottom, top = min(float(bins.low[0]), 0.0), max(float(bins.high[-1]), 0.0)
    distortion = Distortion(bins, coherence)
    low, high = _best_pair(distortion, bottom * _COARSE, top * _COARSE, steps)
    for zoom in _ZOOMS:
        lows, highs = np.maximum(low * zoom, bottom), np.minimum(high * zoom, top)
        low, high = _best_pair(distortion, lows, highs, steps)
    lows, highs = np.maximum(low * _NUDGE, bottom), np.minimum(high * _NUDGE, top)
    pairs = _pairs(lows, highs)
    lows, highs = np.append(pairs[0], bottom), np.append(pairs[1], top)
    best = int(np.argmin(distortion.measure(lows, highs, steps)))
    return Range(float(lows[best]), float(highs[best]))


def least_power_range(bins: Bins, levels: int, exponent: float) -> Range:
    """The range with the least mean of |error| to a power.

    The less the power, the less do rare large errors weigh against common small ones, and the
    narrower is the range. It is looked for among ranges that are narrower or wider than that of the
    least squared error by a common factor, then end by end.

    Args:
        bins: At least one bin, not all at zero.
        levels: Quantization levels.
        exponent: The power, positive.
    """
    steps = levels - 1
    bottom, top = min(float(bins.low[0]), 0.0), max(float(bins.high[-1]), 0.0)
    start = least_error_range(bins, levels)
    distortion = Distortion(bins, exponent=exponent)
    lows, highs = np.maximum(start.low * _SCALES, bottom), np.minimum(start.high * _SCALES, top)
    best = int(np.argmin(distortion.measure(lows, highs, steps)))
    nudged = (np.maximum(lows[best] * _ENDS, bottom), np.minimum(highs[best] * _ENDS, top))
    lows, highs = _pairs(*nudged)
    best = int(np.argmin(distortion.measure(lows, highs, steps)))
    return Range(float(lows[best]), float(highs[best]))


def least_error_bound(bins: Bins, levels: int, coherence: float = 0.0) -> Range:
    """The range symmetric about zero with the least error; arguments as above.

    With 256 levels the bound is 127 steps away from zero.
    """
    side = max(levels // 2 - 1, 1)
    limit = max(-float(bins.low[0]), float(bins.high[-1]))
    distortion = Distortion(bins, coherence)
    bound = limit
    for zoom in (_COARSE, *_ZOOMS):
        bounds = np.minimum(bound * zoom, limit)
        bound = float(bounds[np.argmin(distortion.estimate(-bounds, bounds, bounds / side))])
    bounds = np.append(np.minimum(bound * _NUDGE, limit), limit)
    bound = float(bounds[np.argmin(distortion.measure(-bounds, bounds, 2 * side))])
    return Range(-bound, bound)


def _pairs(lows: Array, highs: Array) -> tuple[Array, Array]:
    low, high = np.meshgrid(np.unique(lows), np.unique(highs))
    return low.reshape(-1), high.reshape(-1)


def _best_pair(
    distortion: Distortion, lows: Array, highs: Array, steps: int
) -> tuple[float, float]:
    low, high = _pairs(lows, highs)
    best = np.argmin(distortion.estimate(low, high, (high - low) / steps))
    return float(low[best]), float(high[best])
