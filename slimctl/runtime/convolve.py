"""Convolutions as matrix products of arrays: floats, or integers that floats hold exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import gcd, prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slimctl.runtime.windows import Index, Windows, padded, tap_view, taps

Array: TypeAlias = NDArray[Any]

Block: TypeAlias = tuple[tuple[slice, ...], Array]
"""A place in the result, and what belongs there. It may be longer than its place on the last axes;
what is beyond has no meaning. The next block may overwrite it."""

_FEW_ROWS = 16
"""With fewer outputs per group, copying the columns takes longer than multiplying them."""

_SHORT = 16
"""Rows of fewer elements are worth computing what lies between them, however much that is."""

_CACHED = 1 << 19
"""Elements of a buffer that few rows read: large enough for calls to cost little."""

_LARGE = 1 << 19
"""Elements of a buffer that many rows read: it makes long matrix products."""


def convolve(x: Array, weights: Array, windows: Windows, *, groups: int = 1) -> Array:
    """Products of weights and windows, summed over the taps and over the channels of a group.

    Args:
        x: [N, C, *windows.sizes].
        weights: [M, C / groups, *windows.kernel], of the same type.
        windows: On the spatial axes; their padding is 0.
        groups: Each has channels and outputs of its own.

    Returns:
        [N, M, *windows.counts].
    """
    _check(x, weights, groups)
    n, outputs = x.shape[0], weights.shape[0]
    if windows.is_pointwise:
        matrices = weights.reshape(groups, outputs // groups, -1)  # [G, M / G, C / G]
        rows = x.reshape(n, groups, matrices.shape[2], -1)  # [N, G, C / G, positions]
        product: Array = np.matmul(matrices, rows)  # [N, G, M / G, positions]
        return product.reshape(n, outputs, *windows.counts)
    result = np.empty((n, outputs, *windows.counts), x.dtype)
    places = result.reshape(n, groups, outputs // groups, -1)
    for place, sums in convolved_blocks(x, weights, windows, groups=groups, places=places):
        if not np.may_share_memory(sums, result):
            put_block(result, place, sums)
    return result


def put_block(result: Array, place: tuple[slice, ...], values: Array) -> None:
    """Writes what belongs to a place; values beyond it are left out."""
    target = result[place]
    target[...] = values[tuple(map(slice, target.shape))]


def convolved_blocks(
    x: Array,
    weights: Array,
    windows: Windows,
    *,
    groups: int = 1,
    fill: Any = 0,
    places: Array | None = None,
) -> Iterator[Block]:
    """A convolution, a block at a time: the memory for it does not grow with the image.

    The windows become the columns of matrices.

    Args:
        x: [N, C, *windows.sizes], of a type that the type of the weights holds.
        weights: [M, C / groups, *windows.kernel].
        windows: On the spatial axes.
        groups: Each has channels and outputs of its own.
        fill: The padding.
        places: [N, G, M / G, positions], where blocks may be written at once.

    Returns:
        Blocks of the result [N, M, *windows.counts], of the type of the weights.
    """
    _check(x, weights, groups)
    grouped = weights.reshape(groups, -1, *weights.shape[1:])  # [G, M / G, C / G, *kernel]
    read = x if windows.is_pointwise else padded(x, windows, fill)
    images = read.reshape(len(x), groups, -1, *windows.extents)  # [N, G, C / G, *extents]
    for number, image in enumerate(images):
        columns = _columns(image, grouped, windows)
        here = None if places is None or columns.used < columns.row else places[number]
        for place, sums in _multiplied(columns, windows.counts[0], here):
            yield (slice(number, number + 1), *place), sums[None]


def spread(x: Array, weights: Array, windows: Windows, *, groups: int = 1) -> Array:
    """The transpose of a convolution: every element of the input adds its weights to a window.

    Args:
        x: [N, M, *windows.counts].
        weights: [M, C / groups, *windows.kernel], of the same type.
        windows: On the result, as ``place_spread`` makes them.
        groups: Each has inputs and channels of its own.

    Returns:
        [N, C, *windows.sizes].
    """
    n, inputs, channels = x.shape[0], weights.shape[0], weights.shape[1] * groups
    if groups < 1 or x.shape[1] != inputs or inputs % groups:
        raise ValueError(_misfit(x.shape[1], weights.shape, groups))
    matrices = weights.reshape(groups, inputs // groups, -1)  # [G, M / G, C / G * taps]
    rows = x.reshape(n, groups, inputs // groups, -1)  # [N, G, M / G, positions]
    columns = np.matmul(matrices.swapaxes(1, 2), rows)  # [N, G, C / G * taps, positions]
    columns = columns.reshape(n, channels, *windows.kernel, *windows.counts)
    ends = [begin + size for begin, size in zip(windows.begins, windows.sizes, strict=True)]
    result = np.zeros((n, channels, *map(max, windows.extents, ends)), x.dtype)
    for position, index in taps(windows):
        result[index] += columns[(slice(None), slice(None), *position)]
    kept = tuple(map(slice, windows.begins, ends))
    return np.ascontiguousarray(result[(slice(None), slice(None), *kept)])


def _check(x: Array, weights: Array, groups: int) -> None:
    if groups < 1 or x.shape[1] != weights.shape[1] * groups or weights.shape[0] % groups:
        raise ValueError(_misfit(x.shape[1], weights.shape, groups))


def _misfit(channels: int, weights: tuple[int, ...], groups: int) -> str:
    return (
        f"{channels} channels, weights of the shape {list(weights)} and {groups} groups do not fit"
        " each other"
    )


class _Columns(NamedTuple):
    """The columns of matrices before they are copied, and what multiplies them.

    Attributes:
        views: [G, C / G, *taps, *positions] each; the taps of all are the terms.
        matrices: [G, R, C / G * taps], in the order of the views.
        sizes: Of the sums of one row of the output, which may go on after its end.
        used: Sums of one row that have a meaning.
        unit: Elements of a view's first axis of positions from one row to the next.
        last: Elements of it that the last row needs.
        kernel: Axes of the taps.
        limit: Elements of a buffer.
    """

    views: list[Array]
    matrices: Array
    sizes: tuple[int, ...]
    used: int
    unit: int
    last: int
    kernel: int
    limit: int

    @property
    def row(self) -> int:
        """Sums from one row of the output to the next."""
        return prod(self.sizes)


def _columns(image: Array, weights: Array, windows: Windows) -> _Columns:
    """How a convolution of one image is computed.

    Args:
        image: [G, C / G, *extents].
        weights: [G, R, C / G, *kernel].
        windows: On the last axes of both.
    """
    rows = weights.shape[1]
    if rows >= _FEW_ROWS:
        return _windows_of(image, weights, windows, _LARGE)
    if _runs_pay(windows):
        return _runs_of(image, weights, windows)
    # Each element is copied several times: once as what it is.
    return _windows_of(image.astype(weights.dtype, copy=False), weights, windows, _CACHED)


def _runs_pay(windows: Windows) -> bool:
    """Whether to compute what lies between the rows of the output too, to copy in long runs."""
    if windows.strides[-1] > 1 or windows.counts[-1] < _SHORT:
        return True
    waste = prod(windows.extents[1:]) / max(prod(windows.counts[1:]), 1)
    return set(windows.strides) == {1} and waste < 1.5


def _windows_of(image: Array, weights: Array, windows: Windows, limit: int) -> _Columns:
    """The windows as they are."""
    groups, rows = weights.shape[:2]
    if windows.is_pointwise:
        view = image.reshape(*image.shape[:2], *windows.kernel, *windows.counts)
    else:
        view = tap_view(image, windows)  # [G, C / G, *kernel, *counts]
    between = prod(windows.counts[1:])
    matrices = weights.reshape(groups, rows, -1)
    return _Columns([view], matrices, windows.counts[1:], between, 1, 1, len(windows.kernel), limit)


def _runs_of(image: Array, weights: Array, windows: Windows) -> _Columns:
    """What neighbor windows see through one tap, side by side, so that long runs are copied.

    Runs go on from row to row: what lies between the rows is computed in vain. With strides the
    image is taken apart first: with strides of 2, into its even and odd rows and columns.
    """
    groups, rows, channels = weights.shape[:3]
    sizes = tuple(-(-e // s) for e, s in zip(windows.extents, windows.strides, strict=True))
    pitches = [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    steps = [(count - 1) * pitch for count, pitch in zip(windows.counts, pitches, strict=True)]
    parts = list(_phases(image, windows, sizes, weights.dtype))
    views = [_run_view(part, pitches, 1 + sum(steps)) for part in parts]
    ordered = [weights[part.taps].reshape(groups, rows, channels, -1) for part in parts]
    matrices = np.concatenate(ordered, axis=3).reshape(groups, rows, -1)
    used = 1 + sum(steps[1:])
    return _Columns(views, matrices, sizes[1:], used, pitches[0], used, len(sizes), _CACHED)


class _Phase(NamedTuple):
    """Taps that see the same part of an image.

    Attributes:
        taps: Which they are, an index of the kernel.
        image: That part, [G, C / G, *sizes].
        lengths: Taps on each axis.
        offsets: Where the first tap of the first window lies on each axis.
        steps: From tap to tap on each axis.
    """

    taps: Index
    image: Array
    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    steps: tuple[int, ...]


def _phases(
    image: Array, windows: Windows, sizes: tuple[int, ...], kind: np.dtype[Any]
) -> Iterator[_Phase]:
    """The parts of an image that taps see, each with its elements side by side, in a type."""
    axes = map(_axis_phases, windows.kernel, windows.dilations, windows.strides)
    for chosen in product(*axes):
        taps, starts, offsets, steps = zip(*chosen, strict=True)
        seen: Index = (..., *map(slice, starts, (None,) * len(starts), windows.strides))
        lengths = (len(range(k)[tap]) for k, tap in zip(windows.kernel, taps, strict=True))
        part = _resized(image[seen], sizes).astype(kind, copy=False)
        yield _Phase((..., *taps), part, tuple(lengths), offsets, steps)


def _axis_phases(kernel: int, dilation: int, stride: int) -> list[tuple[slice, int, int, int]]:
    """Taps of one axis by the remainder of their places: taps, remainder, first place, step.

    A tap t lies at t * dilation; places count in strides.
    """
    common = gcd(dilation, stride)
    every = stride // common
    return [
        (
            slice(first, None, every),
            first * dilation % stride,
            first * dilation // stride,
            dilation // common,
        )
        for first in range(min(every, kernel))
    ]


def _resized(image: Array, sizes: tuple[int, ...]) -> Array:
    """The last axes in these sizes, contiguous; what is missing does not matter and is 0."""
    if image.shape[2:] == sizes:
        return np.ascontiguousarray(image)
    result = np.zeros((*image.shape[:2], *sizes), image.dtype)
    result[tuple(map(slice, image.shape))] = image
    return result


def _run_view(phase: _Phase, pitches: Sequence[int], run: int) -> Array:
    """What each tap sees from the first window to the last: [G, C / G, *lengths, run]."""
    first = sum(offset * pitch for offset, pitch in zip(phase.offsets, pitches, strict=True))
    flat = phase.image.reshape(*phase.image.shape[:2], -1)[:, :, first:]
    steps = (s * p * flat.itemsize for s, p in zip(phase.steps, pitches, strict=True))
    return np.lib.stride_tricks.as_strided(
        flat,
        (*flat.shape[:2], *phase.lengths, run),
        (*flat.strides[:2], *steps, flat.itemsize),
        writeable=False,
    )


def _multiplied(columns: _Columns, length: int, places: Array | None) -> Iterator[Block]:
    """Copies blocks of columns, and multiplies them by the rows of their groups.

    Args:
        columns: What is multiplied.
        length: Rows of the output.
        places: [G, R, positions], where the sums are to be; None for a buffer.
    """
    groups, rows, terms = columns.matrices.shape
    row = columns.row
    buffer = sums = np.empty(0, columns.matrices.dtype)
    for some, part in _blocks(groups, length, terms * row, columns.limit):
        here, height = some.stop - some.start, part.stop - part.start
        run = (height - 1) * row + columns.used
        if buffer.size < here * terms * run:
            buffer = np.empty(here * terms * run, buffer.dtype)
        found = buffer[: here * terms * run].reshape(here, terms, run)
        _copy(columns, some, part, found)
        if places is None:
            if sums.size < here * rows * height * row:
                sums = np.zeros(here * rows * height * row, buffer.dtype)
            total = sums[: here * rows * height * row].reshape(here, rows, -1)
        else:
            total = places[some, :, part.start * row : part.stop * row]
        np.matmul(columns.matrices[some], found, out=total[..., :run])
        place = (slice(some.start * rows, some.stop * rows), part)
        yield place, total.reshape(here * rows, height, *columns.sizes)


def _copy(columns: _Columns, groups: slice, rows: slice, target: Array) -> None:
    """Writes the columns [G, terms, run] of some rows of the output."""
    start, length = rows.start * columns.unit, (rows.stop - rows.start - 1) * columns.unit
    part, done = slice(start, start + length + columns.last), 0
    by_channel = target.reshape(len(target), columns.views[0].shape[1], -1, target.shape[2])
    for view in columns.views:
        taps = view.shape[2 : 2 + columns.kernel]
        index: Index = (groups, *(slice(None),) * (1 + columns.kernel), part)
        block = view[index]
        place = by_channel[:, :, done : done + prod(taps)]
        np.copyto(place.reshape(block.shape), block)
        done += prod(taps)


def _blocks(groups: int, length: int, size: int, limit: int) -> Iterator[tuple[slice, slice]]:
    """Parts of the groups, or of the positions of one group, of at most ``limit`` elements."""
    some = max(limit // max(size * length, 1), 1)
    step = length if some > 1 else max(limit // max(size, 1), 1)
    for group in range(0, groups, some):
        for start in range(0, length, step):
            yield (
                slice(group, min(group + some, groups)),
                slice(start, min(start + step, length)),
            )
