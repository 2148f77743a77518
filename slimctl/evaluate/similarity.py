"""How far tensors are from a reference. Everything accumulates over batches; nothing is kept."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimctl.core.errors import DataError

LIMIT_DB = 200.0
"""SQNR of identical tensors, a finite number so that JSON can hold it; float64 reaches 320 dB."""

_BLOCK = 1 << 13
# Values compared at a time. The blocks stay in the first-level cache, and OpenBLAS computes dot
# products of more than 10,000 values in several threads, which on a busy machine wait for each
# other far longer than they compute.


class Similarity:
    """Distance of a tensor from its reference over any number of batches.

    Values that are not finite in the reference do not count if the other has the same there. A
    non-finite value anywhere else is counted in ``non_finite`` and makes the SQNR -200 dB.

    Attributes:
        elements: Number of values compared.
        non_finite: Number of values that are not finite in one of the two and not the same.
        max_abs_error: Largest absolute difference of finite values.
    """

    def __init__(self) -> None:
        self.elements = 0
        self.non_finite = 0
        self.max_abs_error = 0.0
        self._signal = 0.0
        self._noise = 0.0
        self._other = 0.0
        self._dot = 0.0

    def update(self, reference: NDArray[Any], other: NDArray[Any]) -> None:
        """Adds one pair of arrays.

        Raises:
            DataError: The shapes differ.
        """
        if reference.shape != other.shape:
            raise DataError(
                f"Shapes differ: the reference has {list(reference.shape)},"
                f" the other {list(other.shape)}",
                fix="compare models with the same interface",
            )
        self.elements += reference.size
        for start in range(0, reference.size, _BLOCK):
            stop = start + _BLOCK
            self._add(
                reference.reshape(-1)[start:stop].astype(np.float64),
                other.reshape(-1)[start:stop].astype(np.float64),
            )

    def _add(self, reference: NDArray[np.float64], other: NDArray[np.float64]) -> None:
        signal = float(np.dot(reference, reference))
        energy = float(np.dot(other, other))
        if not math.isfinite(signal) or not math.isfinite(energy):
            reference, other = self._finite(reference, other)
            signal, energy = float(np.dot(reference, reference)), float(np.dot(other, other))
        difference = reference - other
        self._signal += signal
        self._other += energy
        self._dot += float(np.dot(reference, other))
        self._noise += float(np.dot(difference, difference))
        if difference.size:
            largest = float(np.abs(difference, out=difference).max())
            self.max_abs_error = max(self.max_abs_error, largest)

    def _finite(
        self, reference: NDArray[np.float64], other: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        finite = np.isfinite(reference) & np.isfinite(other)
        same = (reference == other) | (np.isnan(reference) & np.isnan(other))
        self.non_finite += int((~finite & ~same).sum())
        return reference[finite], other[finite]

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio in dB, ``10 log10(sum r^2 / sum (r - o)^2)``.

        200 for identical values, -200 for a reference of zeros that is not met or for values that
        are not finite; always within these bounds.
        """
        if self.non_finite:
            return -LIMIT_DB
        if self._noise == 0.0:
            return LIMIT_DB
        if self._signal == 0.0:
            return -LIMIT_DB
        if not math.isfinite(self._signal + self._noise):
            return -LIMIT_DB  # squares of float64 values beyond 1e154
        ratio = 10.0 * (math.log10(self._signal) - math.log10(self._noise))
        return min(max(ratio, -LIMIT_DB), LIMIT_DB)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two; 1 when both are zero, 0 when one is."""
        if self._signal == 0.0 or self._other == 0.0:
            return 1.0 if self._signal == self._other else 0.0
        return self._dot / math.sqrt(self._signal) / math.sqrt(self._other)


def _similarity(reference: NDArray[Any], other: NDArray[Any]) -> Similarity:
    result = Similarity()
    result.update(reference, other)
    return result


def sqnr_db(reference: NDArray[Any], other: NDArray[Any]) -> float:
    """See :attr:`Similarity.sqnr_db`."""
    return _similarity(reference, other).sqnr_db


def cosine(reference: NDArray[Any], other: NDArray[Any]) -> float:
    """See :attr:`Similarity.cosine`."""
    return _similarity(reference, other).cosine


def max_abs_error(reference: NDArray[Any], other: NDArray[Any]) -> float:
    """Largest absolute difference of finite values."""
    return _similarity(reference, other).max_abs_error
