"""Convolutions as matrix products of arrays: floats, or integers that are held in floats."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slimctl.runtime.windows import Windows, padded, run_view, tap_view, taps

Array: TypeAlias = NDArray[Any]

_FEW_ROWS = 16
"""With fewer outputs per group, copying the columns takes longer than multiplying them."""

_CACHED = 1 << 18
"""Elements of a buffer that few rows read: it stays in the second level cache."""

_LARGE = 1 << 20
"""Elements of a buffer that many rows read: it makes long matrix products."""


def convolve(x: Array, weights: Array, windows: Windows, *, groups: int = 1) -> Array:
    """Products of weights and windows, summed over the taps and over the channels of a group.

    The windows become the columns of matrices, a block at a time, so that the memory for them does
    not grow with the image.

    Args:
        x: [N, C, *windows.sizes].
        weights: [M, C / groups, *windows.kernel], of the same type.
        windows: On the spatial axes; their padding is 0.
        groups: Each has channels and outputs of its own.

    Returns:
        [N, M, *windows.counts].
    """
    n, outputs = x.shape[0], weights.shape[0]
    if groups < 1 or x.shape[1] != weights.shape[1] * groups or outputs % groups:
        raise ValueError(_misfit(x.shape[1], weights.shape, groups))
    matrices = weights.reshape(groups, outputs // groups, -1)  # [G, M / G, C / G * taps]
    if windows.is_pointwise:
        rows = x.reshape(n, groups, matrices.shape[2], -1)  # [N, G, C / G, positions]
        product: Array = np.matmul(matrices, rows)  # [N, G, M / G, positions]
        return product.reshape(n, outputs, *windows.counts)
    read = padded(x, windows)
    read = read.reshape(n, groups, -1, *windows.extents)  # [N, G, C / G, *extents]
    if _runs_pay(matrices, windows):
        return _convolve_runs(read, matrices, windows)
    axis = 2 + len(windows.kernel)  # of the first position in [G, C / G, *kernel, *counts]
    result = np.empty((n, *matrices.shape[:2], prod(windows.counts)), x.dtype)
    for image, target in zip(tap_view(read, windows), result, strict=True):
        _multiply(matrices, image, target, axis)
    return result.reshape(n, outputs, *windows.counts)


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


def _misfit(channels: int, weights: tuple[int, ...], groups: int) -> str:
    return (
        f"{channels} channels, weights of the shape {list(weights)} and {groups} groups do not fit"
        " each other"
    )


def _runs_pay(matrices: Array, windows: Windows) -> bool:
    """Whether to compute what lies between the rows of the output too, to copy in long runs."""
    if matrices.shape[1] >= _FEW_ROWS or set(windows.strides) != {1}:
        return False
    return prod(windows.extents[1:]) < 1.5 * prod(windows.counts[1:])


def _convolve_runs(read: Array, matrices: Array, windows: Windows) -> Array:
    """A convolution whose outputs are as far apart as the inputs; [N, G, C / G, *extents]."""
    n, sizes = read.shape[0], (windows.counts[0], *windows.extents[1:])
    view = run_view(np.ascontiguousarray(read), windows)  # [N, G, C / G, *kernel, run]
    result = np.empty((n, *matrices.shape[:2], prod(sizes)), read.dtype)
    for image, target in zip(view, result, strict=True):
        _multiply(matrices, image, target[..., : view.shape[-1]], image.ndim - 1)
    wanted = tuple(slice(count) for count in windows.counts)
    return np.ascontiguousarray(result.reshape(n, -1, *sizes)[(slice(None), slice(None), *wanted)])


def _multiply(matrices: Array, view: Array, result: Array, axis: int) -> None:
    """Copies blocks of columns, and multiplies them by the rows of their groups.

    Args:
        matrices: [G, R, K].
        view: [G, C / G, *kernel, *positions].
        result: [G, R, positions], written to.
        axis: First of the positions in the view.
    """
    groups, rows, terms = matrices.shape
    length, between = view.shape[axis], prod(view.shape[axis + 1 :])
    limit = _CACHED if rows < _FEW_ROWS else _LARGE
    buffer = np.empty(min(view.size, max(limit, terms * between)), view.dtype)
    before = (slice(None),) * (axis - 1)
    for group, part in _blocks(groups, length, terms * between, limit):
        block = view[(group, *before, part)]
        columns = buffer[: block.size].reshape(block.shape[0], terms, -1)  # [groups, K, positions]
        np.copyto(columns.reshape(block.shape), block)
        here = slice(part.start * between, part.stop * between)
        np.matmul(matrices[group], columns, out=result[group, :, here])


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
