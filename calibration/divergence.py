"""The Kullback-Leibler threshold search of S. Migacz, "8-bit inference with TensorRT", GTC 2017.

A candidate keeps the first i of n equal bins. The reference P is those bins, everything beyond in
the last of them. Q is the same bins without what is beyond, quantized: divided into ``levels``
groups whose sum is spread evenly over the group's bins that are not empty. The candidate with the
least KL(P || Q) wins. Exact zeros, which quantization represents without error and of which Relu
makes more than of everything else, are left out.

With h the counts, N their sum, o what lies beyond, C the kept ones, S and Z sum and number of
non-empty bins of a group, and g the last group,

    N KL = sum h log h (bins before the last) + (h_last + o) log(h_last + o)
           - sum S log(S / Z) - o log(S_g / Z_g) - N log(N / C),

where all sums are differences of running ones, so that every candidate is tried.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimctl.calibration.density import Array, Distribution, distribution, magnitudes
from slimctl.calibration.histogram import Bins
from slimctl.core.contract import Range

BINS = 2048
"""Equal bins per search, as in the paper."""

MOST_CUT_OFF = 1e-4
"""Largest share of the values that a candidate may cut off.

The divergence counts how many values are cut off, not how far off they are, and where values are
lumped (dead channels, Relu6 at 6) it prefers to resolve the lumps: without this bound it cuts off
0.3 % of some tensors of EfficientNet-lite0, which takes the logits from 26 to 18 dB.
"""

_BLOCK = 128  # candidates at a time: [128, 256] float64 stays in the second-level cache


def divergences(counts: Array, levels: int, first: int | None = None) -> Array:
    """KL(P || Q) for every candidate: the first ``first``, ``first`` + 1, ... all bins.

    Args:
        counts: Not negative, float64 [n] with n >= ``levels``.
        levels: Quantization levels of the kept bins.
        first: Bins of the smallest candidate, at least ``levels``, which is the default.

    Returns:
        float64 [n - first + 1]; infinite where the last kept bin is empty and something lies
        beyond it.
    """
    tried = slice((first or levels) - 1, None)
    total = float(counts.sum())
    kept = np.cumsum(counts)[tried]  # [candidates]
    # Summed up from the end, so that nothing beyond is exactly zero.
    beyond = np.append(np.cumsum(counts[:0:-1])[::-1], 0.0)[tried]
    last = counts[tried]
    entropy = np.cumsum(_xlogx(counts))[tried] - _xlogx(last) + _xlogx(last + beyond)
    quantized, level_of_last = _quantized(counts, levels, kept.size)
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = np.where(beyond > 0, beyond * np.log(level_of_last), 0.0)
        normalization = total * np.log(total / kept)
        result = (entropy - quantized - cost - normalization) / total
    # An empty last bin has Q = 0 where P > 0; with nothing kept there is no Q at all.
    return np.where((kept > 0) & ((beyond == 0) | (last > 0)), result, np.inf)


def _quantized(counts: Array, levels: int, candidates: int) -> tuple[Array, Array]:
    """Sum of S log(S / Z) over groups, and S / Z of the last group, for the last candidates."""
    sums = np.concatenate([[0.0], np.cumsum(counts)])
    filled = np.concatenate([[0], np.cumsum(counts > 0)])
    starts = _group_starts(counts.size, levels)
    total, last = np.empty(starts.shape[0]), np.empty(starts.shape[0])
    skipped = starts.shape[0] - candidates
    for first in range(skipped, starts.shape[0], _BLOCK):
        part = slice(first, first + _BLOCK)
        s = _differences(sums, starts[part])  # [candidates, levels]
        log_z = _log_filled(filled, levels, part)
        last[part] = s[:, -1] / np.exp(log_z[:, -1])
        # S log S - S log Z, where an empty group has S = 0 and adds nothing.
        log_s = np.log(np.maximum(s, np.finfo(np.float64).tiny))
        total[part] = np.einsum("ij,ij->i", s, log_s) - np.einsum("ij,ij->i", s, log_z)
    return total[skipped:], last[skipped:]


def _log_filled(filled: NDArray[np.int_], levels: int, part: slice) -> Array:
    """Logarithm of Z of each group of some candidates, [candidates, levels]; 0 for empty ones."""
    number = filled.size - 1
    if filled[-1] == number:  # nothing is empty: Z is the width of the group
        return _log_widths(number, levels)[part]
    z = _differences(filled, _group_starts(number, levels)[part])
    logarithms: Array = np.log(np.maximum(z, 1))
    return logarithms


def _differences(running: NDArray[Any], starts: NDArray[np.intp]) -> NDArray[Any]:
    # mode="clip" spares take a copy; no index is out of bounds.
    at: NDArray[Any] = np.take(running, starts, mode="clip")
    difference: NDArray[Any] = at[:, 1:] - at[:, :-1]
    return difference


@lru_cache(maxsize=4)
def _log_widths(number: int, levels: int) -> Array:
    logarithms: Array = np.log(np.diff(_group_starts(number, levels)))
    return logarithms


@lru_cache(maxsize=4)
def _group_starts(number: int, levels: int) -> NDArray[np.intp]:
    """First bin of each group, and the end: bin j of i belongs to group j * levels // i."""
    kept = np.arange(levels, number + 1)[:, np.newaxis]
    return -(-np.arange(levels + 1) * kept // levels)  # [candidates, levels + 1]


def _xlogx(x: Array) -> Array:
    return x * np.log(np.where(x > 0, x, 1.0))


def best_end(values: Distribution, low: float, high: float, levels: int) -> float:
    """Where to cut values off above; everything from ``low`` on is kept.

    Outliers a thousand times as large as the rest would leave equal bins no resolution for the
    rest. The bins therefore end where candidates would leave two bits unused by nearly all values.

    Args:
        values: The distribution of the tensor.
        low: The other end of the range, at most 0.
        high: Largest candidate, above 0.
        levels: Quantization levels of the range.
    """
    # Zero must stay representable, and so must nearly all values.
    least = max(values.quantile(1.0 - MOST_CUT_OFF), 0.0)
    width = (min(high, low + 4 * (least - low)) - low) / BINS
    first = min(max(levels, math.ceil((least - low) / width)), BINS)
    counts = values.uniform_counts(low, low + BINS * width, BINS)
    kept = first + int(np.argmin(divergences(counts, levels, first)))
    return low + width * kept


def _without_zeros(bins: Bins) -> Distribution:
    zero = (bins.low <= 0) & (bins.high >= 0)
    return distribution(Bins(bins.low, bins.high, np.where(zero, 0.0, bins.weight)))


def least_divergence_range(bins: Bins, levels: int) -> Range:
    """Ends of a range with zero in it.

    One-sided values: the search of the paper with all levels on that side. Two-sided values: the
    upper end with the lower one at the minimum, then the lower end with the upper one kept, then
    the upper end again. Each is a full search.

    Args:
        bins: At least one bin, not all at zero.
        levels: Quantization levels.
    """
    values = _without_zeros(bins)
    low, top = min(float(bins.low[0]), 0.0), max(float(bins.high[-1]), 0.0)
    high = best_end(values, low, top, levels) if top > 0 else 0.0
    if low < 0:
        low = -best_end(values.mirrored(), -high, -low, levels)
        if high > 0:
            high = best_end(values, low, top, levels)
    return Range(low, high)


def least_divergence_bound(bins: Bins, levels: int) -> Range:
    """A range symmetric about zero: the search of the paper on |x| with half of the levels."""
    folded = magnitudes(bins)
    bound = best_end(_without_zeros(folded), 0.0, float(folded.high[-1]), levels // 2)
    return Range(-bound, bound)
