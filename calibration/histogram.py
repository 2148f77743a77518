"""A histogram of float32 values that needs to know no range beforehand.

A bin is what the upper 19 bits of a float32 say: sign, 8 bits of exponent, 10 bits of mantissa.
Bins are therefore the same for every tensor, 1024 to an octave, and two histograms add up exactly,
whatever order or batches the values came in.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

DROPPED_BITS = 13
"""Lower mantissa bits that a bin does not tell apart: 23 - 10."""

SIGN = 1 << (31 - DROPPED_BITS)
"""Distance between the bin of a value and the bin of its negative; also the bins of one sign."""

BINS_PER_OCTAVE = 1 << (23 - DROPPED_BITS)

_OCTAVES = 32  # shown by bins(): 24 bits of resolution for a range a 256th of the largest value

MASK_BOUND = 1e30
"""Magnitudes from here on are masks, not measurements.

Attention masks are written as ``finfo(float32).min`` (-3.4e38), -1e38 or similar. A range that
holds such a constant represents nothing else, so they are counted and left out.
"""

HALF_MASK_BOUND = float(np.finfo(np.float16).max)
"""The same for float16 tensors, whose mask is ``finfo(float16).min``, -65504."""

ROW_LIMIT = 1 << 15
"""Values of one sample and tensor that are counted; of larger ones every n-th is.

64 samples then still give two million values per tensor. A threshold that cuts off 1e-5 of them
(percentile 99.999) rests on 20 counted values and on the exact extremes.
"""

_CHUNK = 1 << 16  # index buffer of 512 KiB: stays in the second-level cache


class Bins(NamedTuple):
    """The bins that hold something, by ascending value.

    Attributes:
        low: Lower edges, float64 [bins]. The first is the exact minimum.
        high: Upper edges, float64 [bins]. The last is the exact maximum.
        weight: Values per bin, float64 [bins].
    """

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    weight: NDArray[np.float64]

    @property
    def center(self) -> NDArray[np.float64]:
        """Middle of each bin, float64 [bins]."""
        return (self.low + self.high) / 2


class FloatHistogram:
    """Counts of values by bin, with the exact extremes and what was left out.

    Safe to update from several threads.

    Args:
        row_limit: Values counted of one row (index of axis 0) of an array; of longer rows every
            n-th value is counted with weight n. None counts all. The extremes are always exact.

    Attributes:
        size: Values seen, of any kind.
        rows: Rows seen.
        nan_count: NaN values, which are left out.
        inf_count: Infinite values, which are left out.
        mask_count: Values of a magnitude of at least :data:`MASK_BOUND`, which are left out.
        masked_rows: Rows that hold negative infinity, the other way to write a mask.
        minimum: Exact least value that was not left out; infinity when there is none.
        maximum: Exact largest value that was not left out; negative infinity when there is none.
    """

    def __init__(self, *, row_limit: int | None = ROW_LIMIT) -> None:
        self.row_limit = row_limit
        self.size = 0
        self.rows = 0
        self.nan_count = 0
        self.inf_count = 0
        self.mask_count = 0
        self.masked_rows = 0
        self.minimum = math.inf
        self.maximum = -math.inf
        self._weight = 0  # what all bins hold together
        self._counts = _sparse_zeros(2 * SIGN)
        self._lock = threading.Lock()

    @property
    def empty(self) -> bool:
        """No value was kept: nothing was seen, or everything was left out."""
        return self.minimum > self.maximum

    @property
    def masked(self) -> bool:
        """The tensor holds mask values by design, so that no range can represent it.

        Mask constants, or negative infinity in at least half of the rows. Infinity in a few rows
        is an accident of the data and says nothing about the tensor.
        """
        return self.mask_count > 0 or (self.masked_rows > 0 and 2 * self.masked_rows >= self.rows)

    def update(self, array: NDArray[Any]) -> None:
        """Adds the values of an array of any shape; axis 0 separates samples.

        Args:
            array: A floating-point type, also ml_dtypes' bfloat16.
        """
        bound = HALF_MASK_BOUND if array.dtype == np.float16 else MASK_BOUND
        values = _as_float32(array)
        rows = values.reshape(values.shape[0] if values.ndim else 1, -1) if values.size else None
        with self._lock:
            self.size += values.size
            self.rows += values.shape[0] if values.ndim else 1
            if rows is not None:
                self._add(rows, values.shape[1:], bound)

    def _add(self, rows: NDArray[np.float32], inner: tuple[int, ...], bound: float) -> None:
        """Adds [rows, n] values."""
        low, high = float(rows.min()), float(rows.max())
        if -bound < low and high < bound:
            self._add_finite(rows, inner, low, high)
            return
        # Each row is treated alike whatever rows came with it, or the batch would matter.
        for row in rows:
            low, high = float(row.min()), float(row.max())
            if -bound < low and high < bound:  # false for NaN
                self._add_finite(row[np.newaxis], inner, low, high)
            else:
                self._add_informative(row, bound)

    def _add_finite(
        self, rows: NDArray[np.float32], inner: tuple[int, ...], low: float, high: float
    ) -> None:
        self._extend(low, high)
        step = _stride(rows.shape[1], self.row_limit, inner)
        if step == 1:
            self._count(rows.reshape(-1), 1)
            return
        self._count(np.ascontiguousarray(rows[:, ::step]).reshape(-1), step)
        # Sampling may miss the extremes, and rare large values are what thresholds weigh.
        if len(rows) == 1:
            extremes = np.array([low, high], np.float32)
        else:
            extremes = np.concatenate([rows.min(axis=1), rows.max(axis=1)])
        self._count(extremes, 1)

    def _add_informative(self, row: NDArray[np.float32], bound: float) -> None:
        """Adds what is left of one row without NaN, infinity and masks."""
        magnitude = np.abs(row)
        nan = np.isnan(row)
        infinite = np.isinf(row)
        kept = row[magnitude < bound]
        self.nan_count += int(nan.sum())
        self.inf_count += int(infinite.sum())
        self.mask_count += row.size - kept.size - int(nan.sum()) - int(infinite.sum())
        self.masked_rows += bool(np.any(row[infinite] < 0))
        if kept.size:
            self._extend(float(kept.min()), float(kept.max()))
            self._count(kept, 1)

    def _extend(self, low: float, high: float) -> None:
        self.minimum = min(self.minimum, low)
        self.maximum = max(self.maximum, high)

    def _count(self, values: NDArray[np.float32], weight: int) -> None:
        self._weight += weight * values.size
        bits = values.view(np.uint32)
        index = np.empty(min(_CHUNK, bits.size), np.intp)
        for start in range(0, bits.size, _CHUNK):
            chunk = bits[start : start + _CHUNK]
            part = index[: chunk.size]
            np.right_shift(chunk, DROPPED_BITS, out=part, casting="unsafe")
            # Twice as fast as bincount here: no array of all bins is made and added per chunk.
            np.add.at(self._counts, part, weight)

    def merge(self, other: FloatHistogram) -> None:
        """Adds another histogram, as if its values had come in here."""
        filled = np.flatnonzero(other._counts)
        with self._lock:
            self._counts[filled] += other._counts[filled]
            self._weight += other._weight
            self._extend(other.minimum, other.maximum)
            for name in _TALLIES:
                setattr(self, name, getattr(self, name) + getattr(other, name))

    def bins(self) -> Bins:
        """The filled bins by ascending value, cut off at the exact extremes.

        Positive and negative zero, and what is smaller than the largest magnitude by a factor of
        2**32 or more, are one bin at zero of width zero.
        """
        top = _bin_of(max(abs(self.minimum), abs(self.maximum))) + 1 if not self.empty else 1
        bottom = max(1, top - _OCTAVES * BINS_PER_OCTAVE)
        negative = self._counts[SIGN + bottom : SIGN + top][::-1]
        positive = self._counts[bottom:top]
        counts = np.concatenate([negative, [0], positive])
        counts[negative.size] = self._weight - counts.sum()
        edges = _edge(np.arange(bottom, top + 1))
        low = np.concatenate([-edges[:0:-1], [0.0], edges[:-1]])
        high = np.concatenate([-edges[-2::-1], [0.0], edges[1:]])
        filled = counts > 0
        clip = (self.minimum, self.maximum)
        return Bins(
            np.clip(low[filled], *clip),
            np.clip(high[filled], *clip),
            counts[filled].astype(np.float64),
        )

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as arrays, for storing."""
        filled = np.flatnonzero(self._counts)
        tallies = [int(getattr(self, name)) for name in _TALLIES]
        return {
            "index": filled.astype(np.uint32),
            "count": self._counts[filled],
            "tallies": np.array(tallies, np.int64),
            "extremes": np.array([self.minimum, self.maximum], np.float64),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """The inverse of :meth:`to_arrays`.

        Raises:
            KeyError: An array is missing.
            ValueError: An array has another shape than it should.
            IndexError: A bin is out of bounds.
        """
        histogram = cls()
        histogram._counts[arrays["index"]] = arrays["count"]
        histogram._weight = int(arrays["count"].sum())
        for name, value in zip(_TALLIES, arrays["tallies"], strict=True):
            setattr(histogram, name, int(value))
        histogram.minimum, histogram.maximum = (float(value) for value in arrays["extremes"])
        return histogram


_TALLIES = ("size", "rows", "nan_count", "inf_count", "mask_count", "masked_rows")


def _edge(magnitude: NDArray[np.intp]) -> NDArray[np.float64]:
    """Lower edge of the bin of a magnitude, float64 [bins]."""
    return (magnitude.astype(np.uint32) << DROPPED_BITS).view(np.float32).astype(np.float64)


def _bin_of(magnitude: float) -> int:
    return int(np.array(magnitude, np.float32).view(np.uint32)) >> DROPPED_BITS


def _as_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):  # float64 beyond float32 becomes infinite
        return np.ascontiguousarray(array, np.float32)


def _stride(size: int, limit: int | None, inner: tuple[int, ...]) -> int:
    """Distance of the counted values in a row of ``size``.

    It shares no factor with an inner dimension, or the same channel or column would be met again
    and again.
    """
    step = 1 if limit is None else -(-size // limit)
    while step > 1 and any(math.gcd(step, dim) > 1 for dim in inner):
        step += 1
    return step


def _sparse_zeros(length: int) -> NDArray[np.int64]:
    """Zeros that take memory only where something is written, one page of 4 KiB at a time.

    A tensor fills some twenty octaves of 8 KiB. An ordinary allocation may come from recycled
    memory, which is cleared and thereby occupied in full.
    """
    # Private: merely reading a page of shared memory occupies it, too.
    private = (
        {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    )
    memory = mmap.mmap(-1, length * 8, **private)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # a page of 2 MiB would hold half of all bins
    return np.frombuffer(memory, np.int64)
