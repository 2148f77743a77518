"""Pools: one value for each window, or for each channel."""

from __future__ import annotations

from functools import reduce
from math import prod
from typing import Any, TypeAlias

import numpy as np

from slimctl.runtime.floats import in_float32
from slimctl.runtime.registry import Array, operator
from slimctl.runtime.windows import (
    Windows,
    padded,
    place_spread,
    place_windows,
    reduce_windows,
    tap_coordinates,
    taps,
)

Numbers: TypeAlias = tuple[int, ...]


@operator("MaxPool", since=8)
@in_float32
def max_pool(
    x: Array,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Numbers | None = None,
    kernel_shape: Numbers,
    pads: Numbers | None = None,
    storage_order: int = 0,
    strides: Numbers | None = None,
    outputs: int,
) -> Array | tuple[Array, Array]:
    """The largest element of each window, and where it lies in the flat input."""
    windows = place_windows(
        x.shape[2:],
        kernel_shape,
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
    )
    if outputs > 1:
        return _largest_with_index(x, windows, by_columns=bool(storage_order))
    return reduce_windows(x, windows, np.maximum, empty=_least(x.dtype))


def _least(kind: np.dtype[Any]) -> Any:
    return np.iinfo(kind).min if kind.kind in "iu" else -np.inf


def _largest_with_index(x: Array, windows: Windows, *, by_columns: bool) -> tuple[Array, Array]:
    """The first of the largest elements in each window, and its index in the flat input.

    Args:
        x: [N, C, *sizes].
        windows: On the spatial axes.
        by_columns: The index counts along the first spatial axis first, not along the last one.
    """
    read = padded(x, windows, _least(x.dtype))
    best = np.full((*x.shape[:2], *windows.counts), _least(x.dtype), x.dtype)
    place = np.full(best.shape, -1, np.int64)
    axes = range(len(windows.kernel))
    steps = [prod(windows.sizes[:a] if by_columns else windows.sizes[a + 1 :]) for a in axes]
    coordinates = [tap_coordinates(windows, axis) for axis in axes]
    for position, index in taps(windows):
        spots = np.meshgrid(*(coordinates[a][position[a]] for a in axes), indexing="ij")
        bounds = zip(spots, windows.sizes, strict=True)
        inside = np.logical_and.reduce([(spot >= 0) & (spot < size) for spot, size in bounds])
        better = inside & ((read[index] > best) | (place < 0))
        flat = sum(spot * step for spot, step in zip(spots, steps, strict=True))
        best = np.where(better, read[index], best)
        place = np.where(better, flat, place)
    channels = np.arange(x.shape[0] * x.shape[1]) * prod(windows.sizes)
    return best, place + channels.reshape(*x.shape[:2], *(1,) * len(windows.sizes))


@operator("AveragePool", since=7)
@in_float32
def average_pool(
    x: Array,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Numbers | None = None,
    kernel_shape: Numbers,
    pads: Numbers | None = None,
    strides: Numbers | None = None,
) -> Array:
    """The mean of each window, over its elements or with the padding that was asked for."""
    windows = place_windows(
        x.shape[2:],
        kernel_shape,
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
    )
    numbers = [
        _elements(windows, a, with_padding=bool(count_include_pad)) for a in range(x.ndim - 2)
    ]
    sums = reduce_windows(x, windows, np.add, empty=0)
    divisors: Array = reduce(np.multiply.outer, numbers)  # [*counts]
    means: Array = sums / divisors.astype(x.dtype)
    return means


def _elements(windows: Windows, axis: int, *, with_padding: bool) -> Array:
    """How many taps of each window count along one axis: [counts]."""
    spots, size = tap_coordinates(windows, axis), windows.sizes[axis]
    begin, end = (windows.begins[axis], windows.ends[axis]) if with_padding else (0, 0)
    counted: Array = ((spots >= -begin) & (spots < size + end)).sum(axis=0)
    return np.maximum(counted, 1)  # the sum of no elements is 0, whatever divides it


@operator("LpPool", since=2)
@in_float32
def lp_pool(
    x: Array,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Numbers | None = None,
    kernel_shape: Numbers,
    p: int = 2,
    pads: Numbers | None = None,
    strides: Numbers | None = None,
) -> Array:
    """(sum |x|^p)^(1/p) of each window."""
    windows = place_windows(
        x.shape[2:],
        kernel_shape,
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
    )
    return _root(reduce_windows(_power(x, p), windows, np.add, empty=0), p)


@operator("GlobalAveragePool", since=1)
@in_float32
def global_average_pool(x: Array) -> Array:
    """The mean of each channel."""
    return _per_channel(_flat(x).mean(axis=2), x)


@operator("GlobalMaxPool", since=1)
@in_float32
def global_max_pool(x: Array) -> Array:
    """The largest element of each channel."""
    return _per_channel(_flat(x).max(axis=2), x)


@operator("GlobalLpPool", since=2)
@in_float32
def global_lp_pool(x: Array, *, p: int = 2) -> Array:
    """(sum |x|^p)^(1/p) of each channel."""
    return _per_channel(_root(_power(_flat(x), p).sum(axis=2), p), x)


def _flat(x: Array) -> Array:
    """[N, C, *sizes] -> [N, C, elements]."""
    return x.reshape(*x.shape[:2], -1)


def _per_channel(values: Array, x: Array) -> Array:
    """[N, C] -> [N, C, 1, ...], of the rank of x."""
    return values.reshape(*values.shape, *(1,) * (x.ndim - 2))


def _power(x: Array, p: int) -> Array:
    """|x|^p"""
    sized = np.abs(x)
    return sized if p == 1 else np.square(sized) if p == 2 else sized ** x.dtype.type(p)


def _root(x: Array, p: int) -> Array:
    return x if p == 1 else np.sqrt(x) if p == 2 else x ** x.dtype.type(1 / p)


@operator("MaxUnpool", since=9)
def max_unpool(
    x: Array,
    i: Array,
    output_shape: Array | None = None,
    *,
    kernel_shape: Numbers,
    pads: Numbers | None = None,
    strides: Numbers | None = None,
) -> Array:
    """Puts every element back where it came from; 0 elsewhere.

    Indices are those of MaxPool: they count in the shape that the pool read, which is output_shape
    where it is given.
    """
    windows = place_spread(x.shape[2:], kernel_shape, strides=strides, pads=pads)
    wanted = x.shape[:2] + windows.sizes if output_shape is None else tuple(map(int, output_shape))
    result = np.zeros(wanted, x.dtype)
    result.reshape(-1)[i.reshape(-1)] = x.reshape(-1)
    return result
