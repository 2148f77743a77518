"""Convolutions of images whose channels lie side by side in memory.

Such an array has the shape [N, C, H, W] like any other; only its strides are those of [N, H, W, C].
Every operator reads it as it is, and those of this module keep it so. Its rows hold all channels,
so that a depthwise convolution adds up long pieces of memory, each times as long a piece of
weights, and nothing is copied into columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slimctl.runtime.windows import Windows

Array: TypeAlias = NDArray[Any]
Shape: TypeAlias = tuple[int, ...]
Block: TypeAlias = tuple[tuple[slice, ...], Array]

_FEWEST = 8
"""Channels, for whose sake it is worth to change the order."""

_LONG = 2048
"""Elements of the pieces that are added: sums and weights stay in the first-level cache."""

_CACHED = 1 << 17
"""Elements of a block, more or less: with its sums it stays in the second-level cache."""


def is_channels_last(x: Array) -> bool:
    """Whether an array is one of those, and not in the usual order as well."""
    last = x.ndim == 4 and x.transpose(0, 2, 3, 1).flags.c_contiguous
    return last and not x.flags.c_contiguous


def empty_channels_last(shape: Shape, kind: np.dtype[Any]) -> Array:
    """A new array [N, C, H, W] of that order."""
    n, channels, height, width = shape
    return np.empty((n, height, width, channels), kind).transpose(0, 3, 1, 2)


def along_rows(values: Array, width: int) -> Array:
    """One value per channel, repeated for each column: passes over whole rows read it.

    Args:
        values: [C]
        width: Columns of a row.

    Returns:
        [C, 1, width], in memory as a row of an image.
    """
    rows = np.ascontiguousarray(np.broadcast_to(values, (width, len(values))))
    return rows.T[:, None]


def suits_depthwise(weights: Array, windows: Windows, groups: int) -> bool:
    """Whether a convolution has one output for each of many channels, and steps that are known."""
    if len(windows.kernel) != 2 or weights.shape[1] != 1 or len(weights) != groups:
        return False
    return groups >= _FEWEST and 1 in (windows.strides[1], windows.dilations[1])


def depthwise_weights(weights: Array, windows: Windows) -> Array:
    """Weights as :func:`depthwise_blocks` wants them.

    With a stride of s a row is taken apart into s phases: the columns with the same remainder. The
    taps of all phases are made equal in number, by zeros.

    Args:
        weights: [C, 1, *kernel]
        windows: Of the convolution.

    Returns:
        [rows, taps, phases, columns * C], repeated for a few columns.
    """
    (height, width), phases = windows.kernel, windows.strides[1]
    taps = -(-width // phases)
    padded = np.zeros((height, taps * phases, len(weights)), weights.dtype)
    padded[:, :width] = weights[:, 0].transpose(1, 2, 0)
    columns = _columns(len(weights), windows.counts[1])
    every = padded.reshape(height, taps, phases, 1, -1)
    return np.repeat(every, columns, axis=3).reshape(height, taps, phases, -1)


def _columns(channels: int, width: int) -> int:
    """How many columns of an output are summed in one piece."""
    fitting = range(1, max(min(_LONG // channels, width), 1) + 1)
    return max((count for count in fitting if width % count == 0), default=1)


def depthwise_blocks(x: Array, weights: Array, windows: Windows, fill: Any) -> Iterator[Block]:
    """A depthwise convolution, some rows of the output at a time.

    Args:
        x: [N, C, H, W], in any order, of a type that the type of the weights holds.
        weights: From :func:`depthwise_weights`.
        windows: On the spatial axes.
        fill: The padding.

    Returns:
        Blocks of the result [N, C, *windows.counts], in the order of channels last.
    """
    (height, width), channels = windows.counts, x.shape[1]
    taps, phases, piece = weights.shape[1:]
    row = phases * (width + (taps - 1) * windows.dilations[1]) * channels
    step = _step(height, row * windows.strides[0])
    image = np.empty(
        (_rows(step, windows), phases, row // phases // channels, channels), weights.dtype
    )
    sums = np.empty((step, width * channels // piece, piece), weights.dtype)
    for number, one in enumerate(x.transpose(0, 2, 3, 1)):
        for start in range(0, height, step):
            part = slice(start, min(start + step, height))
            count = part.stop - start
            _fill(image[: _rows(count, windows)], one, start, windows, fill)
            total = sums[:count]
            np.einsum("ijkhwl,ijkl->hwl", _seen(image, weights, total, windows), weights, out=total)
            yield _place(x, number, part, height), _image(total, count, width)


def _step(rows: int, size: int) -> int:
    """Rows of a block, of this size each: blocks are about equal, as a small one takes long."""
    blocks = max(rows * size // _CACHED, 1)
    return max(-(-rows // blocks), 1)


def _place(x: Array, number: int, rows: slice, height: int) -> tuple[slice, ...]:
    """Where a block of one of the images belongs: () for all of them."""
    whole = len(x) == 1 and rows.stop - rows.start == height
    return () if whole else (slice(number, number + 1), slice(None), rows)


def _image(values: Array, height: int, width: int) -> Array:
    """Rows of an image as a block [1, C, height, width]."""
    return values.reshape(1, height, width, -1).transpose(0, 3, 1, 2)


def _rows(count: int, windows: Windows) -> int:
    """Rows of the padded image that some rows of the output see."""
    reach = (windows.kernel[0] - 1) * windows.dilations[0] + 1
    return (count - 1) * windows.strides[0] + reach


def _fill(target: Array, image: Array, start: int, windows: Windows, fill: Any) -> None:
    """Copies rows of an image, and the padding around them.

    Args:
        target: [rows, phases, columns, C].
        image: [H, W, C].
        start: Row of the output that the first row belongs to.
        windows: On the image.
        fill: The padding.
    """
    first = start * windows.strides[0] - windows.begins[0]
    low = min(max(-first, 0), len(target))
    high = max(min(len(image) - first, len(target)), low)
    target[:low], target[high:] = fill, fill
    rows, stride, begin = image[first + low : first + high], windows.strides[1], windows.begins[1]
    for phase in range(stride):
        column = (phase - begin) % stride  # the first of this phase
        place = (column + begin) // stride
        part = rows[:, column::stride][:, : max(target.shape[2] - place, 0)]
        end = place + part.shape[1]
        target[low:high, phase, place:end] = part
        target[low:high, phase, :place], target[low:high, phase, end:] = fill, fill


def _seen(image: Array, weights: Array, sums: Array, windows: Windows) -> Array:
    """What each tap sees: [rows, taps, phases, height, pieces, columns * C], a view.

    Args:
        image: [rows, phases, columns, C].
        weights: [rows, taps, phases, columns * C].
        sums: [height, pieces, columns * C].
        windows: On the image.
    """
    row, phase, column, element = image.strides
    tap = column * windows.dilations[1] if windows.strides[1] == 1 else column
    window = row * windows.dilations[0], tap, phase
    places = row * windows.strides[0], sums.strides[1], element
    # as_strided makes the same view, and takes longer for it than the sums of a small image do
    shape = (*weights.shape[:3], *sums.shape)
    return np.ndarray(shape, image.dtype, image, strides=(*window, *places))


def pointwise_blocks(x: Array, weights: Array) -> Iterator[Block]:
    """A convolution of single elements, some rows at a time.

    Args:
        x: [N, C, H, W] in the order of channels last, of a type that the type of the weights holds.
        weights: [C, M], or with one row more: what is added to the sums.

    Returns:
        Blocks of the result [N, M, H, W], in the same order.
    """
    _, channels, height, width = x.shape
    outputs = weights.shape[1]
    step = _step(height, width * max(channels, outputs))
    rows = np.empty((step * width, len(weights)), weights.dtype)
    rows[:, channels:] = 1
    sums = np.empty((step * width, outputs), weights.dtype)
    for number, image in enumerate(x.transpose(0, 2, 3, 1)):
        for start in range(0, height, step):
            part = slice(start, min(start + step, height))
            positions = (part.stop - start) * width
            rows[:positions, :channels] = image[part].reshape(positions, channels)
            total = np.matmul(rows[:positions], weights, out=sums[:positions])
            yield _place(x, number, part, height), _image(total, part.stop - start, width)
