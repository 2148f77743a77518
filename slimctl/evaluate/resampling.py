"""How far chance alone moves a metric: bootstrap intervals and tests of paired differences.

Efron and Tibshirani, An Introduction to the Bootstrap, 1993: samples are drawn from the data with
replacement, as many as there are, and the metric is computed of each draw; the 2.5th and 97.5th
percentiles of what comes out bound the 95 % interval (chapter 13). Two models on the same samples
are compared by drawing the same samples for both. Hit-or-miss metrics have an exact test: McNemar,
Note on the sampling error of the difference between correlated proportions, Psychometrika 12, 1947.

Percentile intervals instead of bias-corrected ones: those need the metric of the data without each
sample, which costs more than all resamples on large data sets and changes little there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
"""Draws: 50 of them lie beyond each end of the interval, which makes the ends steady."""

CONFIDENCE = 0.95

_CELLS = 1 << 21
"""Weights in memory at a time, 16 MB of them."""


def draws(count: int, resamples: int, seed: int) -> Iterator[NDArray[np.float64]]:
    """How often each of ``count`` records is drawn, a block [b, count] at a time."""
    generator = np.random.default_rng(seed)
    step = max(1, _CELLS // count)
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        chosen = generator.integers(0, count, size=(rows, count))
        chosen += np.arange(rows)[:, None] * count
        counts = np.bincount(chosen.reshape(-1), minlength=rows * count)
        yield counts.reshape(rows, count).astype(np.float64)


def bootstrap(
    value: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    count: int,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> NDArray[np.float64]:
    """A metric of resamples.

    Args:
        value: From weights [b, count] to values [b].
        count: Number of records, at least 1.
        resamples: Number of draws.
        seed: The same seed and count give the same draws.

    Returns:
        [resamples]
    """
    return np.concatenate([value(weights) for weights in draws(count, resamples, seed)])


def bounds(values: NDArray[np.float64], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The middle part of resampled values: percentiles on both sides."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def bootstrap_p(differences: NDArray[np.float64]) -> float:
    """How probable it is, without a true difference, to see one as large; two-sided.

    Twice the smaller share of resampled differences on either side of zero, the observed data being
    counted as one more resample so that it is never zero (Davison and Hinkley, Bootstrap Methods
    and their Application, 1997, chapter 4). It is below 5 % where zero lies outside the interval.
    """
    total = len(differences) + 1
    below = (np.count_nonzero(differences <= 0) + 1) / total
    above = (np.count_nonzero(differences >= 0) + 1) / total
    return float(min(1.0, 2 * min(below, above)))


def mcnemar_p(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    """Exact two-sided p-value that two models are right equally often, on the same samples [N].

    Of the n samples that only one of them has right, each is as likely to be the one's as the
    other's: ``2 sum over k <= min(b, c) of binomial(n, k) / 2^n``, at most 1.
    """
    only_one = int(np.count_nonzero(one & ~other))
    total = int(np.count_nonzero(one != other))
    fewer = min(only_one, total - only_one)
    logs = [_log_binomial(total, k) - total * math.log(2) for k in range(fewer + 1)]
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


def _log_binomial(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
