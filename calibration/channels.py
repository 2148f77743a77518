"""How strong each channel of a tensor is: its mean square over samples and positions."""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slimctl.calibration.histogram import MASK_BOUND
from slimctl.calibration.sums import add_compensated


class ChannelAxis(NamedTuple):
    """An axis of a tensor whose indices are told apart."""

    tensor: str
    axis: int


class SquareAccumulator:
    """Sums of squares along an axis of one tensor. Safe to update from several threads.

    The order of the samples does not matter. Samples that hold NaN, infinite or mask values are
    left out.

    Args:
        axis: Not negative.
    """

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self._sums: NDArray[np.float64] | None = None  # [2, channels]
        self._count = 0
        self._lock = threading.Lock()

    def update(self, array: NDArray[Any]) -> None:
        """Adds the values of one run.

        Args:
            array: Of the same size along the axis in every run; samples lie along axis 0, unless
                that is the axis.
        """
        if array.size == 0:
            return
        rows = 1 if self._axis == 0 else array.shape[0]
        before = math.prod(array.shape[1 : self._axis])
        values = array.astype(np.float32, copy=False).reshape(
            rows, before, array.shape[self._axis], -1
        )
        with np.errstate(over="ignore", invalid="ignore"):
            # [rows, before, channels, after] -> [rows, channels]
            squares = np.einsum("nbca,nbca->nc", values, values).astype(np.float64)
        count = before * values.shape[3]
        usable = np.all(squares < MASK_BOUND, axis=1)  # false for NaN
        with self._lock:
            for row in squares[usable]:
                if self._sums is None:
                    self._sums = np.zeros((2, row.size))
                add_compensated(self._sums, row)
                self._count += count

    def mean(self) -> NDArray[np.float64] | None:
        """Mean squares [channels]; None when no sample was of use."""
        if self._sums is None:
            return None
        return np.asarray(self._sums.sum(axis=0) / self._count)
