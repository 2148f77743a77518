"""Blocks, borders and reversed sequences of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from slimctl.runtime.floats import in_float32
from slimctl.runtime.registry import Array, Value, operator


@operator("Pad", since=2)
def pad_2(data: Array, *, mode: str = "constant", pads: Sequence[int], value: float = 0.0) -> Array:
    """Borders before and after every axis; negative ones cut off."""
    return _padded(data, pads, range(data.ndim), mode, value)


@operator("Pad", since=11)
def pad_11(
    data: Array,
    pads: Array,
    constant_value: Array | None = None,
    axes: Array | None = None,
    *,
    mode: str = "constant",
) -> Array:
    """Borders before and after some axes; negative ones cut off."""
    places = range(data.ndim) if axes is None else axes.tolist()
    value = _zero(data) if constant_value is None else constant_value.item()
    return _padded(data, pads.tolist(), places, mode, value)


def _zero(data: Array) -> Value:
    return "" if data.dtype == object else data.dtype.type(0)


def _padded(
    data: Array, pads: Sequence[int], axes: Sequence[int], mode: str, value: Value
) -> Array:
    if len(pads) != 2 * len(axes):
        raise ValueError(f"{len(pads)} pads do not fit {len(axes)} axes")
    widths = [(0, 0)] * data.ndim
    for axis, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        widths[axis] = (int(before), int(after))
    # first cut, then grow: what is cut off is not there to be mirrored, as in onnxruntime
    cut = tuple(slice(max(-b, 0), min(a, 0) or None) for b, a in widths)
    return _grown(data[cut], [(max(b, 0), max(a, 0)) for b, a in widths], mode, value)


def _grown(data: Array, widths: list[tuple[int, int]], mode: str, value: Value) -> Array:
    if mode == "constant":
        shape = [b + size + a for size, (b, a) in zip(data.shape, widths, strict=True)]
        result = np.full(shape, value, data.dtype)
        inner = tuple(slice(b, b + n) for n, (b, _) in zip(data.shape, widths, strict=True))
        result[inner] = data
        return result
    if mode == "reflect":
        return np.pad(data, widths, "reflect")
    if mode == "edge":
        return np.pad(data, widths, "edge")
    if mode == "wrap":
        return np.pad(data, widths, "wrap")
    raise ValueError(f"there is no padding mode '{mode}'")


@operator("CenterCropPad", since=18)
def center_crop_pad(input_data: Array, shape: Array, *, axes: Sequence[int] | None = None) -> Array:
    """The middle of larger axes; smaller ones in the middle of zeros."""
    axes = range(input_data.ndim) if axes is None else axes
    pads: list[tuple[int, int]] = []
    for axis, target in zip(axes, shape.tolist(), strict=True):
        missing = target - input_data.shape[axis]
        # halves are rounded toward zero in front, both where it grows and where it shrinks
        before = abs(missing) // 2 * (1 if missing > 0 else -1)
        pads.append((before, missing - before))
    before_all, after_all = zip(*pads, strict=True) if pads else ((), ())
    return _padded(input_data, [*before_all, *after_all], axes, "constant", _zero(input_data))


@operator("DepthToSpace", since=1)
def depth_to_space(input: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    """Channels become blocks of pixels; DCR: they lead the channels, CRD: they follow them."""
    n, c, h, w = input.shape
    b = blocksize
    if c % (b * b):
        raise ValueError(f"{c} channels do not make blocks of {b} x {b}")
    if mode == "DCR":
        blocks = input.reshape(n, b, b, c // (b * b), h, w)  # [n, b1, b2, c', h, w]
        moved = blocks.transpose(0, 3, 4, 1, 5, 2)
    elif mode == "CRD":
        blocks = input.reshape(n, c // (b * b), b, b, h, w)  # [n, c', b1, b2, h, w]
        moved = blocks.transpose(0, 1, 4, 2, 5, 3)
    else:
        raise ValueError(f"there is no mode '{mode}'")
    return moved.reshape(n, c // (b * b), h * b, w * b)  # [n, c', h, b1, w, b2]


@operator("SpaceToDepth", since=1)
def space_to_depth(input: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    """Blocks of pixels become channels: the inverse of DepthToSpace."""
    n, c, h, w = input.shape
    b = blocksize
    if h % b or w % b:
        raise ValueError(f"{h} x {w} pixels do not make blocks of {b} x {b}")
    blocks = input.reshape(n, c, h // b, b, w // b, b)  # [n, c, h', b1, w', b2]
    if mode == "DCR":
        moved = blocks.transpose(0, 3, 5, 1, 2, 4)  # [n, b1, b2, c, h', w']
    elif mode == "CRD":
        moved = blocks.transpose(0, 1, 3, 5, 2, 4)  # [n, c, b1, b2, h', w']
    else:
        raise ValueError(f"there is no mode '{mode}'")
    return moved.reshape(n, c * b * b, h // b, w // b)


@operator("ReverseSequence", since=10)
def reverse_sequence(
    input: Array,
    sequence_lens: Array,
    *,
    batch_axis: int = 1,
    time_axis: int = 0,
) -> Array:
    """The first elements of every sequence in reverse, as many as its length says."""
    steps = input.shape[time_axis]
    if np.any((sequence_lens < 0) | (sequence_lens > steps)):
        raise ValueError(f"a sequence has a length outside 0 to {steps}")
    time = np.arange(steps)[:, None]  # [time, 1]
    source = np.where(time < sequence_lens, sequence_lens - 1 - time, time)  # [time, batch]
    batch_axis, time_axis = batch_axis % input.ndim, time_axis % input.ndim
    if batch_axis < time_axis:
        source = source.T
    others = tuple(axis for axis in range(input.ndim) if axis not in (batch_axis, time_axis))
    return np.take_along_axis(input, np.expand_dims(source, others), time_axis)


@operator("Col2Im", since=18)
@in_float32
def col2im(
    input: Array,
    image_shape: Array,
    block_shape: Array,
    *,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Array:
    """Images from their sliding blocks; where blocks overlap they are added up."""
    image, block = image_shape.tolist(), block_shape.tolist()
    rank = len(image)
    dilations, strides = dilations or (1,) * rank, strides or (1,) * rank
    pads = pads or (0,) * (2 * rank)
    padded = [size + pads[i] + pads[rank + i] for i, size in enumerate(image)]
    counts = [
        (padded[i] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1 for i in range(rank)
    ]
    # [n, c * blocks, positions] -> [n, c, *block, *counts]
    columns = input.reshape(input.shape[0], -1, *block, *counts)
    result = np.zeros((*columns.shape[:2], *padded), input.dtype)
    every = (slice(None), slice(None))
    for tap in product(*map(range, block)):
        starts = [t * d for t, d in zip(tap, dilations, strict=True)]
        triples = zip(starts, strides, counts, strict=True)
        places = tuple(slice(first, first + s * n, s) for first, s, n in triples)
        result[every + places] += columns[every + tap]
    return result[every + tuple(slice(pads[i], pads[i] + size) for i, size in enumerate(image))]
