"""Where the largest and the smallest elements are."""

from __future__ import annotations

import numpy as np

from slimctl.runtime.floats import in_float32
from slimctl.runtime.registry import Array, operator


@operator("ArgMax", since=1)
@in_float32
def arg_max(data: Array, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Array:
    """Index of the maximum; NaN counts as the maximum, onnxruntime steps over it"""
    if select_last_index:
        last = data.shape[axis] - 1
        return _index(last - np.flip(data, axis).argmax(axis=axis, keepdims=True), axis, keepdims)
    return _index(data.argmax(axis=axis, keepdims=True), axis, keepdims)


@operator("ArgMin", since=1)
@in_float32
def arg_min(data: Array, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Array:
    """Index of the minimum; NaN counts as the minimum, onnxruntime steps over it"""
    if select_last_index:
        last = data.shape[axis] - 1
        return _index(last - np.flip(data, axis).argmin(axis=axis, keepdims=True), axis, keepdims)
    return _index(data.argmin(axis=axis, keepdims=True), axis, keepdims)


def _index(index: Array, axis: int, keepdims: int) -> Array:
    index = index.astype(np.int64, copy=False)
    return index if keepdims else index.squeeze(axis)


@operator("TopK", since=1)
@in_float32
def top_k_by_attribute(x: Array, *, k: int, axis: int = -1) -> tuple[Array, Array]:
    """The k largest elements, and where they are"""
    return _top(x, k, axis, largest=True)


@operator("TopK", since=10)
@in_float32
def largest_k(x: Array, k: Array, *, axis: int = -1) -> tuple[Array, Array]:
    """The k largest elements, and where they are"""
    return _top(x, k.item(), axis, largest=True)


@operator("TopK", since=11)
@in_float32
def top_k(
    x: Array, k: Array, *, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Array, Array]:
    """The k largest or smallest elements, and where they are

    They come sorted even where the order is free.
    """
    del sorted
    return _top(x, k.item(), axis, largest=bool(largest))


def _top(x: Array, count: int, axis: int, *, largest: bool) -> tuple[Array, Array]:
    """Of equal elements the first comes first; NaN counts as the largest."""
    length = x.shape[axis]
    if not 0 <= count <= length:
        raise ValueError(f"there are no {count} elements along an axis of {length}")
    if largest:  # a stable sort of the reversed axis, read backward
        index = length - 1 - _first(np.flip(_order(np.flip(x, axis), axis), axis), count, axis)
    else:
        index = _first(_order(x, axis), count, axis)
    return np.take_along_axis(x, index, axis), index


def _order(x: Array, axis: int) -> Array:
    return x.argsort(axis=axis, kind="stable").astype(np.int64, copy=False)


def _first(x: Array, count: int, axis: int) -> Array:
    return np.moveaxis(np.moveaxis(x, axis, 0)[:count], 0, axis)
