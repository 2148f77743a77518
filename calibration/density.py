"""Views of a histogram that the threshold searches share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slimctl.calibration.histogram import Bins

Array = NDArray[np.float64]


def magnitudes(bins: Bins) -> Bins:
    """The histogram of |x|: both signs on one axis, by ascending magnitude."""
    low = np.minimum(np.abs(bins.low), np.abs(bins.high))
    high = np.maximum(np.abs(bins.low), np.abs(bins.high))
    # The bins of x and -x have the same inner edge; only an outer edge may be cut off.
    edges, group = np.unique(low, return_inverse=True)
    upper = np.zeros(edges.size)
    np.maximum.at(upper, group, high)
    return Bins(edges, upper, np.bincount(group, bins.weight, edges.size).astype(np.float64))


class Distribution(NamedTuple):
    """How many values lie below a point, as a polygon.

    Within a bin values are taken as spread evenly; a bin of width zero is a jump.

    Attributes:
        at: Edges of the bins in ascending order, float64 [2 * bins].
        below: Values below each edge, float64 [2 * bins].
    """

    at: Array
    below: Array

    @property
    def total(self) -> float:
        """Number of values."""
        return float(self.below[-1])

    def mirrored(self) -> Distribution:
        """The distribution of -x."""
        return Distribution(-self.at[::-1], self.total - self.below[::-1])

    def quantile(self, share: float) -> float:
        """The point below which this share of the values lies."""
        return float(np.interp(share * self.total, self.below, self.at))

    def uniform_counts(self, low: float, high: float, number: int) -> Array:
        """Counts in bins of equal width; what lies beyond an end goes into the bin at that end.

        Returns:
            Not necessarily whole numbers, float64 [number].
        """
        below = np.interp(np.linspace(low, high, number + 1), self.at, self.below)
        below[0], below[-1] = 0.0, self.total
        return np.diff(below)


def distribution(bins: Bins) -> Distribution:
    """The distribution function of a histogram."""
    after = np.cumsum(bins.weight)
    at = np.column_stack([bins.low, bins.high]).reshape(-1)  # low 0, high 0, low 1, high 1 ...
    below = np.column_stack([after - bins.weight, after]).reshape(-1)
    return Distribution(at, below)
