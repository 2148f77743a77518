"""Shapes and places: elements move, their values stay.

Results are views of their inputs wherever numpy can make one: no kernel writes into an input.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimctl.runtime.registry import Array, operator


@operator("Reshape", since=5)
def reshape(data: Array, shape: Array, *, allowzero: int = 0) -> Array:
    """The same elements in another shape: -1 is what is left, 0 keeps a size or is one."""
    sizes = [int(size) for size in shape]
    if not allowzero:
        if 0 in sizes[data.ndim :]:
            raise ValueError(f"the shape {sizes} keeps a size that {data.ndim} axes do not have")
        sizes = [data.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return data.reshape(sizes)


@operator("Flatten", since=1)
def flatten(input: Array, *, axis: int = 1) -> Array:
    """A matrix: the sizes before the axis multiplied, and those from it on."""
    if not -input.ndim <= axis <= input.ndim:
        raise ValueError(f"there is no axis {axis} in {input.ndim} dimensions")
    split = axis + input.ndim if axis < 0 else axis
    rows = int(np.prod(input.shape[:split], dtype=np.int64))
    columns = int(np.prod(input.shape[split:], dtype=np.int64))
    return input.reshape(rows, columns)


@operator("Transpose", since=1)
def transpose(data: Array, *, perm: Sequence[int] | None = None) -> Array:
    """Axes in another order, reversed by default."""
    return data.transpose(perm)


@operator("Concat", since=4)
def concat(*inputs: Array, axis: int) -> Array:
    """Tensors one after another along an axis."""
    return np.concatenate(inputs, axis)


@operator("Split", since=2)
def split_2(
    input: Array,
    *,
    axis: int = 0,
    split: Sequence[int] | None = None,
    outputs: int,
) -> tuple[Array, ...]:
    """Parts along an axis, of equal sizes by default."""
    length = input.shape[axis]
    return _parts(input, axis, _even_sizes(length, outputs) if split is None else split)


@operator("Split", since=13)
def split_13(
    input: Array,
    split: Array | None = None,
    *,
    axis: int = 0,
    num_outputs: int | None = None,
    outputs: int,
) -> tuple[Array, ...]:
    """Parts along an axis; of ``num_outputs`` parts the last may be smaller."""
    length = input.shape[axis]
    if split is not None:
        return _parts(input, axis, split.tolist())
    if num_outputs is not None:
        return _parts(input, axis, _ceiled_sizes(length, num_outputs))
    return _parts(input, axis, _even_sizes(length, outputs))


def _even_sizes(length: int, parts: int) -> list[int]:
    if length % parts:
        raise ValueError(f"{length} elements do not make {parts} equal parts")
    return [length // parts] * parts


def _ceiled_sizes(length: int, parts: int) -> list[int]:
    """Sizes ceil(length / parts), and what is left for the last."""
    size = -(-length // parts)
    last = length - size * (parts - 1)
    if last < 0:
        raise ValueError(f"{length} elements do not make {parts} parts of {size}")
    return [size] * (parts - 1) + [last]


def _parts(x: Array, axis: int, sizes: Sequence[int]) -> tuple[Array, ...]:
    if sum(sizes) != x.shape[axis]:
        raise ValueError(f"parts of {list(sizes)} elements do not make {x.shape[axis]}")
    return tuple(np.split(x, np.cumsum(sizes)[:-1], axis))


@operator("Slice", since=1)
def slice_1(
    data: Array, *, axes: Sequence[int] | None = None, ends: Sequence[int], starts: Sequence[int]
) -> Array:
    """Ranges of some axes."""
    return _sliced(data, starts, ends, axes, None)


@operator("Slice", since=10)
def slice_10(
    data: Array,
    starts: Array,
    ends: Array,
    axes: Array | None = None,
    steps: Array | None = None,
) -> Array:
    """Ranges of some axes, with steps."""
    return _sliced(data, starts.tolist(), ends.tolist(), _listed(axes), _listed(steps))


def _listed(values: Array | None) -> list[int] | None:
    return None if values is None else [int(value) for value in values.ravel()]


def _sliced(
    data: Array,
    starts: Sequence[int],
    ends: Sequence[int],
    axes: Sequence[int] | None,
    steps: Sequence[int] | None,
) -> Array:
    places = [slice(None)] * data.ndim
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        places[axis] = _range(start, end, step, data.shape[axis])
    return data[tuple(places)]


def _range(start: int, end: int, step: int, length: int) -> slice:
    """A slice as the schema clamps it.

    Backwards it differs from Python's own: a start before the first element is the first. And from
    onnxruntime's: there the largest integer as an end means the beginning of the axis.
    """
    if step == 0:
        raise ValueError("the step of a slice must not be 0")
    start, end = (place + length if place < 0 else place for place in (start, end))
    if step > 0:
        return slice(_clamped(start, 0, length), _clamped(end, 0, length), step)
    start, end = _clamped(start, 0, length - 1), _clamped(end, -1, length - 1)
    return slice(start, end if end >= 0 else None, step) if length else slice(0, 0)


def _clamped(place: int, low: int, high: int) -> int:
    return max(low, min(place, high))


@operator("Squeeze", since=1)
def squeeze_1(data: Array, *, axes: Sequence[int] | None = None) -> Array:
    """Without axes of size 1: those given, else all."""
    return data.squeeze(None if axes is None else tuple(axes))


@operator("Squeeze", since=13)
def squeeze_13(data: Array, axes: Array | None = None) -> Array:
    """Without axes of size 1: those given, else all.

    An empty list of axes means all of them to onnxruntime, and here.
    """
    return data.squeeze(None if axes is None or not axes.size else tuple(axes.ravel().tolist()))


@operator("Unsqueeze", since=1)
def unsqueeze_1(data: Array, *, axes: Sequence[int]) -> Array:
    """With axes of size 1 at the places that they have in the result."""
    return np.expand_dims(data, tuple(axes))


@operator("Unsqueeze", since=13)
def unsqueeze_13(data: Array, axes: Array) -> Array:
    """With axes of size 1 at the places that they have in the result."""
    return np.expand_dims(data, tuple(axes.ravel().tolist()))


@operator("Expand", since=8)
def expand(input: Array, shape: Array) -> Array:
    """Broadcast with a shape, in both directions."""
    return np.broadcast_to(input, np.broadcast_shapes(input.shape, tuple(shape.tolist())))


@operator("Tile", since=6)
def tile(input: Array, repeats: Array) -> Array:
    """Copies side by side, as many as every axis asks for."""
    if len(repeats) != input.ndim:
        raise ValueError(f"{len(repeats)} repeats do not fit {input.ndim} axes")
    return np.tile(input, repeats.tolist())


@operator("Compress", since=9)
def compress(input: Array, condition: Array, *, axis: int | None = None) -> Array:
    """Slices along an axis, or elements of the flat input, where a condition holds.

    What a shorter condition does not reach is left out; what it has too much is not read.
    """
    length = input.size if axis is None else input.shape[axis]
    return np.compress(condition[:length], input, axis)
