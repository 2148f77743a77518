"""Where a tensor's values lie against the range that its codes represent, in constant memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 64

SHOWN = (-0.5, 1.5)
"""What the bins cover, in widths of the codes' range: the range itself is 0 to 1, and half of it on
both sides shows what is cut off."""


def count_values(steps: NDArray[Any], lowest: int, highest: int) -> NDArray[np.int64]:
    """How many values lie in each bin; counts of several runs add up.

    A value of v steps (``v = x / scale + zero_point``) lies at

        p = (v - lowest + 1/2) / (highest - lowest + 1)

    from 0 to 1 where rounding finds a code without cutting off. The bins have equal width, so the
    thresholds are edges of bins. The outermost bins hold all that lies further out; NaN is not
    counted.

    Args:
        steps: Real values in quantization steps, the zero point added; any shape.
        lowest: Least code of the type.
        highest: Largest code of the type.

    Returns:
        Counts [BINS].
    """
    width = (SHOWN[1] - SHOWN[0]) / BINS
    place = (steps.reshape(-1) - (lowest - 0.5)) / (highest - lowest + 1)
    index = np.clip(np.floor((place - SHOWN[0]) / width), 0, BINS - 1)
    known = index if not np.isnan(index).any() else index[~np.isnan(index)]
    return np.bincount(known.astype(np.int64), minlength=BINS)
