"""Tensors of attributes and shapes: constants, ranges, unit matrices."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np

from slimctl.runtime.casting import as_text, element_type, is_text
from slimctl.runtime.floats import is_narrow
from slimctl.runtime.registry import Array, operator


@operator("Constant", since=1)
def constant(
    *,
    value: Array | None = None,
    sparse_value: Any = None,
    value_float: float | None = None,
    value_floats: Sequence[float] | None = None,
    value_int: int | None = None,
    value_ints: Sequence[int] | None = None,
    value_string: str | None = None,
    value_strings: Sequence[str] | None = None,
) -> Array:
    """The value of whichever attribute there is"""
    if sparse_value is not None:
        raise ValueError("sparse constants are not supported")
    if value is not None:
        return value
    given = (
        (value_float, np.float32),
        (value_floats, np.float32),
        (value_int, np.int64),
        (value_ints, np.int64),
        (value_string, np.object_),
        (value_strings, np.object_),
    )
    for plain, kind in given:
        if plain is not None:
            return np.array(plain, kind)
    raise ValueError("a constant without a value")


@operator("ConstantOfShape", since=9)
def constant_of_shape(input: Array, *, value: Array | None = None) -> Array:
    """A tensor of a shape, full of one value, which is 0 if it is not given"""
    if value is None:
        return np.zeros(input.tolist(), np.float32)
    return np.full(input.tolist(), value.reshape(()), value.dtype)


@operator("Shape", since=1)
def shape(data: Array, *, start: int = 0, end: int | None = None) -> Array:
    """The lengths of the axes from ``start`` to ``end``, which are clipped to those there are"""
    return np.array(data.shape[start:end], np.int64)


@operator("Size", since=1)
def size(data: Array) -> Array:
    """The number of elements"""
    return np.array(data.size, np.int64)


@operator("Range", since=11)
def range_(start: Array, limit: Array, delta: Array, *, stash_type: int = 1) -> Array:
    """Numbers start + i delta below the limit; onnxruntime adds delta again and again

    Narrow floats are computed in the type that ``stash_type`` names.
    """
    kind = element_type(stash_type) if is_narrow(start) else start.dtype
    first, last, step = (value.reshape(()).astype(kind) for value in (start, limit, delta))
    if step == 0:
        raise ValueError("a range cannot have steps of 0")
    index = np.arange(_steps(first, last, step)).astype(kind)
    return np.asarray(first + index * step).astype(start.dtype, copy=False)


def _steps(first: Array, last: Array, step: Array) -> int:
    """max(ceil((limit - start) / delta), 0); of floats in float64, as in onnxruntime."""
    if first.dtype.kind in "iu":
        return max(-((int(first) - int(last)) // int(step)), 0)
    return max(ceil((float(last) - float(first)) / float(step)), 0)


@operator("EyeLike", since=9)
def eye_like(input: Array, *, dtype: int | None = None, k: int = 0) -> Array:
    """Ones on a diagonal of a matrix of the input's shape, zeros elsewhere"""
    if input.ndim != 2:
        raise ValueError(f"it takes a matrix, not rank {input.ndim}")
    rows, columns = input.shape
    kind = input.dtype if dtype is None else element_type(dtype)
    return np.eye(rows, columns, k, dtype=kind)


@operator("OneHot", since=9)
def one_hot(indices: Array, depth: Array, values: Array, *, axis: int = -1) -> Array:
    """The second of ``values`` where a new axis has the index, the first elsewhere

    An index from -depth to -1 counts from the end; one out of range is nowhere.
    """
    length = int(depth.item())
    index = indices.astype(np.int64)[..., None]  # [..] -> [.., 1]
    hits = np.where(index < 0, index + length, index) == np.arange(length)  # [.., depth]
    off, on = as_text(values) if is_text(values) else values
    return np.asarray(np.where(np.moveaxis(hits, -1, axis), on, off))
