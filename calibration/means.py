"""Mean of what each weight of a linear layer sees, over samples and output positions.

The mean output of a linear layer is its weight times this mean, so nothing else about the input is
needed to know by how much rounding the weight shifts the output.

A weight at kernel position k along an axis meets input i when some output o reads it there:
``i = o * stride + k * dilation - pad``. Which inputs those are is a 0/1 matrix [inputs, kernel] per
axis, and one matrix product per axis gives the sums for all positions. They are divided by the
number of outputs: of padding, a weight sees zeros.
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from slimctl.calibration.histogram import MASK_BOUND
from slimctl.calibration.sums import add_compensated
from slimctl.core.contract import InputMean, LinearInput

BUCKETS: Final = 8
"""Samples are dealt out to so many sums by a hash of their content; halves are made of them.

With two sums only, a handful of samples would often end up all in one.
"""

_LARGEST_SELECTOR: Final = 1 << 13
"""Elements up to which the matrices of neighboring axes are multiplied out (Kronecker product)."""

_SMALL_PRODUCT: Final = 1 << 18
"""Multiplications that OpenBLAS does on one thread. For a handful of columns more threads only
cost, the more so as several workers ask for them at once."""

Matrix = NDArray[np.float32]


class MeanAccumulator:
    """Sums of what each weight of one layer sees. Safe to update from several threads.

    The order of the samples does not matter; see :func:`add_compensated`.

    Attributes:
        layer: How the layer reads its input.
        skipped_samples: Samples left out, since they hold NaN, infinite or mask values.
    """

    def __init__(self, layer: LinearInput) -> None:
        self.layer = layer
        self.skipped_samples = 0
        self._sums: NDArray[np.float64] | None = None  # [2, buckets, channels, *kernel]
        self._outputs = [0] * BUCKETS
        self._samples = [0] * BUCKETS
        self._lock = threading.Lock()

    def update(self, array: NDArray[Any], hashes: NDArray[np.integer[Any]]) -> None:
        """Adds the input of one run.

        Args:
            array: What the layer reads: [N, C, *spatial], or any shape for Gemm and MatMul.
            hashes: One number per sample of the run, made from its content.
        """
        if array.size == 0:
            return
        sums, outputs = _sums_per_row(array, self.layer)
        if outputs == 0:
            return
        rows, rest = divmod(sums.shape[0], hashes.size)
        if rest:  # the samples cannot be told apart in this tensor
            rows, hashes = sums.shape[0], hashes.sum(keepdims=True)
        per_sample = sums.reshape(hashes.size, rows, *sums.shape[1:]).sum(axis=1)
        with self._lock:
            for total, number in zip(per_sample, hashes, strict=True):
                self._add(total, int(number) % BUCKETS, rows * outputs)

    def _add(self, total: NDArray[np.float64], bucket: int, outputs: int) -> None:
        if not np.all(np.abs(total) < MASK_BOUND):  # false for NaN
            self.skipped_samples += 1
            return
        if self._sums is None:
            self._sums = np.zeros((2, BUCKETS, *total.shape))
        add_compensated(self._sums[:, bucket], total)
        self._outputs[bucket] += outputs
        self._samples[bucket] += 1

    def mean(self) -> InputMean | None:
        """The means; None when no sample was of use."""
        if self._sums is None:
            return None
        sums = self._sums.sum(axis=0)  # [buckets, channels, *kernel]
        both = self._mean_of(sums, range(BUCKETS))
        first, second = self._halves()
        if not any(self._samples[bucket] for bucket in second):
            return InputMean(both, None, both)
        return InputMean(self._mean_of(sums, first), self._mean_of(sums, second), both)

    def _halves(self) -> tuple[list[int], list[int]]:
        """Buckets in two groups of about equally many samples: largest first, to the smaller."""
        groups: tuple[list[int], list[int]] = ([], [])
        held = [0, 0]
        for bucket in sorted(range(BUCKETS), key=lambda b: (-self._samples[b], b)):
            side = int(held[1] < held[0])
            groups[side].append(bucket)
            held[side] += self._samples[bucket]
        return groups

    def _mean_of(
        self, sums: NDArray[np.float64], buckets: range | list[int]
    ) -> NDArray[np.float64]:
        total: NDArray[np.float64] = sums[list(buckets)].sum(axis=0)
        return total / sum(self._outputs[bucket] for bucket in buckets)


def _sums_per_row(array: NDArray[Any], layer: LinearInput) -> tuple[NDArray[np.float64], int]:
    """Sums over the outputs of what each weight sees, per index of axis 0.

    Sums over one sample are in float32, whose rounding is some 1e-7 of the values' mean size.

    Returns:
        float64 [N, C, *kernel], and the outputs of one index.
    """
    if not layer.kernel:
        return _channel_sums(array, layer.channel_axis)
    selectors, outputs = _selectors(layer, array.shape[2:])
    channels = array.shape[0] * array.shape[1]
    rest: NDArray[np.float32] = np.ascontiguousarray(array, np.float32)
    if all(np.all(selector == 1) for selector in selectors):  # every position sees every input
        total = rest.reshape(channels, -1).sum(axis=1)
        rest = np.repeat(total, math.prod(layer.kernel))
    else:
        for selector in reversed(selectors):  # the last axes go and come back in front
            product = _product(rest.reshape(-1, selector.shape[0]), selector)
            parts = product.reshape(channels, -1, selector.shape[1]).swapaxes(1, 2)
            rest = np.ascontiguousarray(parts)
    return rest.reshape(*array.shape[:2], *layer.kernel).astype(np.float64), outputs


def _product(left: Matrix, right: Matrix) -> Matrix:
    """Matrix product with few columns, in portions that stay on this thread."""
    result = np.empty((left.shape[0], right.shape[1]), np.float32)
    block = max(_SMALL_PRODUCT // right.size, 1)
    for start in range(0, left.shape[0], block):
        part = slice(start, start + block)
        np.matmul(left[part], right, out=result[part])
    return result


def _channel_sums(array: NDArray[Any], channel_axis: int) -> tuple[NDArray[np.float64], int]:
    """The same without a kernel; one row in all when axis 0 holds the channels."""
    axis = channel_axis % array.ndim
    values = array.astype(np.float32, copy=False)
    if axis == 0:
        rows = values.reshape(1, array.shape[0], -1).swapaxes(1, 2)
    else:
        rows = np.moveaxis(values, axis, -1).reshape(array.shape[0], -1, array.shape[axis])
    # [N, positions, C]
    return rows.sum(axis=1).astype(np.float64), rows.shape[1]


@lru_cache(maxsize=64)
def _selectors_cached(layer: LinearInput, sizes: tuple[int, ...]) -> tuple[tuple[Matrix, ...], int]:
    found = [_selector(layer, axis, size) for axis, size in enumerate(sizes)]
    outputs = math.prod(count for _, count in found)
    parts: list[Matrix] = []
    for selector, _ in reversed(found):
        if parts and parts[0].size * selector.size <= _LARGEST_SELECTOR:
            parts[0] = np.kron(selector, parts[0])
        else:
            parts.insert(0, selector)
    return tuple(parts), outputs


def _selectors(layer: LinearInput, sizes: tuple[int, ...]) -> tuple[tuple[Matrix, ...], int]:
    """Which inputs each kernel position meets, and the outputs of one sample.

    Returns:
        Matrices [inputs, positions] from the first axis to the last, each over one axis or over
        several neighboring ones.
    """
    # Layers that read in the same way share their selectors, whatever they are called.
    return _selectors_cached(anonymous(layer), sizes)


def anonymous(layer: LinearInput) -> LinearInput:
    """The layer without its names: equal for layers that read their input in the same way."""
    return LinearInput(**{**vars(layer), "node": "", "tensor": ""})


def _selector(layer: LinearInput, axis: int, size: int) -> tuple[Matrix, int]:
    """Which inputs along one axis each kernel position sees.

    Returns:
        float32 [size, kernel] of zeros and ones, and the number of outputs along the axis.
    """
    stride, dilation = layer.strides[axis], layer.dilations[axis]
    extent = dilation * (layer.kernel[axis] - 1) + 1
    begin, end = _pads(layer, axis, size, extent)
    offsets = np.arange(layer.kernel[axis]) * dilation - begin
    if layer.transposed:  # input i reaches output i * stride + k * dilation - pad
        outputs = stride * (size - 1) + layer.output_padding[axis] + extent - begin - end
        reached = np.arange(size)[:, np.newaxis] * stride + offsets  # [size, kernel]
        return ((reached >= 0) & (reached < outputs)).astype(np.float32), outputs
    outputs = max((size + begin + end - extent) // stride + 1, 0)
    # Input i is read at position k when (i - offset) is one of 0, stride, 2 stride, ...
    steps, between = np.divmod(np.arange(size)[:, np.newaxis] - offsets, stride)
    return ((between == 0) & (steps >= 0) & (steps < outputs)).astype(np.float32), outputs


def _pads(layer: LinearInput, axis: int, size: int, extent: int) -> tuple[int, int]:
    """Padding before and behind along one axis, ``auto_pad`` worked out (ONNX, Conv)."""
    rank = len(layer.kernel)
    if layer.auto_pad == "VALID":
        return 0, 0
    if layer.auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        stride = layer.strides[axis]
        if layer.transposed:
            total = extent + layer.output_padding[axis] - stride
        else:
            total = (-(-size // stride) - 1) * stride + extent - size
        total = max(total, 0)
        less, more = total // 2, total - total // 2
        return (less, more) if layer.auto_pad == "SAME_UPPER" else (more, less)
    return layer.pads[axis], layer.pads[axis + rank]
