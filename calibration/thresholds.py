"""From the histogram of a tensor to the range that its quantized form represents."""

from __future__ import annotations

import math

import numpy as np

from slimctl.calibration.density import distribution, magnitudes
from slimctl.calibration.distortion import (
    COHERENCE,
    least_error_bound,
    least_error_range,
    least_power_range,
)
from slimctl.calibration.divergence import BINS, least_divergence_bound, least_divergence_range
from slimctl.calibration.histogram import FloatHistogram
from slimctl.core.contract import CalibrationMethod, Range

SMALLEST_BOUND = 255 * float(np.finfo(np.float32).tiny)
"""Tensors within this bound get no search: their scale would not be a normal float32."""


def choose(
    histogram: FloatHistogram,
    method: CalibrationMethod,
    *,
    percentile: float = 99.999,
    levels: int = 256,
    symmetric: bool = False,
    exponent: float = 2.0,
) -> Range | None:
    """The range of a tensor by one of the methods.

    Args:
        histogram: Of the tensor's values.
        method: Its name.
        percentile: Share of values kept, in percent; for ``percentile`` alone.
        levels: Quantization levels.
        symmetric: The range is symmetric about zero.
        exponent: Power of the error that ``auto`` minimizes.

    Returns:
        A range with zero in it, or None where :func:`why_no_range` has an answer.
    """
    if why_no_range(histogram):
        return None
    if method == "minmax" or not _searchable(histogram):
        return minmax(histogram, symmetric=symmetric)
    if method == "percentile":
        return share_kept(histogram, percentile, symmetric=symmetric)
    if method == "kl":
        return kl(histogram, levels, symmetric=symmetric)
    if method == "mse":
        return mse(histogram, levels, symmetric=symmetric)
    return auto(histogram, levels, symmetric=symmetric, exponent=exponent)


def why_no_range(histogram: FloatHistogram) -> str:
    """Why a tensor has no range that represents it; empty when it has one."""
    if histogram.masked:
        return "it holds mask values (-inf or constants like -3.4e38) beside ordinary ones"
    if histogram.size == 0:
        return "it was always empty"
    if histogram.empty:
        return "it held no finite value"
    if 0 < max(abs(histogram.minimum), abs(histogram.maximum)) <= SMALLEST_BOUND:
        return "its values are too small: their scale would not be a normal float32"
    return ""


def _searchable(histogram: FloatHistogram) -> bool:
    # Constant and subnormal tensors: nothing to choose, and steps of width zero.
    bound = max(abs(histogram.minimum), abs(histogram.maximum))
    return histogram.minimum < histogram.maximum and bound > SMALLEST_BOUND


def minmax(histogram: FloatHistogram, *, symmetric: bool = False) -> Range:
    """The exact extremes, widened to hold zero."""
    return _around_zero(histogram.minimum, histogram.maximum, symmetric)


def _around_zero(low: float, high: float, symmetric: bool) -> Range:
    if symmetric:
        bound = max(abs(low), abs(high))
        return Range(-bound, bound)
    return Range(min(low, 0.0), max(high, 0.0))


def share_kept(histogram: FloatHistogram, percentile: float, *, symmetric: bool = False) -> Range:
    """The range that keeps ``percentile`` percent of the values.

    The rest is cut off half at each end, or all at the one end of one-sided values; with
    ``symmetric`` it is the rest of |x|.
    """
    bins = histogram.bins()
    rest = 1.0 - percentile / 100.0
    if symmetric:
        return _around_zero(0.0, distribution(magnitudes(bins)).quantile(1.0 - rest), True)
    values = distribution(bins)
    if histogram.minimum < 0 < histogram.maximum:
        rest /= 2
    return _around_zero(values.quantile(rest), values.quantile(1.0 - rest), False)


def kl(histogram: FloatHistogram, levels: int = 256, *, symmetric: bool = False) -> Range:
    """The range with the least Kullback-Leibler divergence; see ``divergence``.

    The search has 2048 bins. With half as many levels or more (16-bit types) there is nothing to be
    gained by cutting values off: the extremes.
    """
    if levels > BINS // 2:
        return minmax(histogram, symmetric=symmetric)
    search = least_divergence_bound if symmetric else least_divergence_range
    return search(histogram.bins(), levels)


def mse(histogram: FloatHistogram, levels: int = 256, *, symmetric: bool = False) -> Range:
    """The range with the least mean squared error; see ``distortion``."""
    search = least_error_bound if symmetric else least_error_range
    return search(histogram.bins(), levels)


def auto(
    histogram: FloatHistogram,
    levels: int = 256,
    *,
    symmetric: bool = False,
    exponent: float = 2.0,
) -> Range:
    """The range with the least mean of |error| to the power ``exponent``.

    With infinity these are the extremes. With 2, errors by clipping, which do not average out,
    weigh more than in :func:`mse`. Which power serves a network best is measured on its outputs;
    see the quantize pass.
    """
    if math.isinf(exponent):  # the largest error counts alone
        return minmax(histogram, symmetric=symmetric)
    if exponent == 2.0 or symmetric:
        search = least_error_bound if symmetric else least_error_range
        return search(histogram.bins(), levels, COHERENCE)
    return least_power_range(histogram.bins(), levels, exponent)
