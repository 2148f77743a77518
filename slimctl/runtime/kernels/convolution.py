"""Convolutions, transposed ones and deformed ones."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TypeAlias

import numpy as np

from slimctl.runtime.convolve import convolve, spread
from slimctl.runtime.floats import in_float32
from slimctl.runtime.registry import Array, operator
from slimctl.runtime.windows import Windows, place_spread, place_windows, tap_coordinates

Numbers: TypeAlias = tuple[int, ...]


@operator("Conv", since=1)
@in_float32
def conv(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Numbers | None = None,
    group: int = 1,
    kernel_shape: Numbers | None = None,
    pads: Numbers | None = None,
    strides: Numbers | None = None,
) -> Array:
    """A convolution of any rank: [N, C, *sizes] * [M, C / group, *kernel] -> [N, M, *counts]."""
    _check_kernel(w, kernel_shape)
    windows = place_windows(
        x.shape[2:],
        w.shape[2:],
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
    )
    return _add_bias(convolve(x, w, windows, groups=group), b)


@operator("ConvTranspose", since=1)
@in_float32
def conv_transpose(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Numbers | None = None,
    group: int = 1,
    kernel_shape: Numbers | None = None,
    output_padding: Numbers | None = None,
    output_shape: Numbers | None = None,
    pads: Numbers | None = None,
    strides: Numbers | None = None,
) -> Array:
    """A transposed convolution: [N, M, *counts] * [M, C / group, *kernel] -> [N, C, *sizes].

    Padding is what is cut off: sizes = (counts - 1) stride + (kernel - 1) dilation + 1
    + output_padding - pads; a wanted output_shape sets the pads (ONNX, ConvTranspose).
    """
    _check_kernel(w, kernel_shape)
    windows = place_spread(
        x.shape[2:],
        w.shape[2:],
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
        extra=output_padding,
        wanted=output_shape,
    )
    return _add_bias(spread(x, w, windows, groups=group), b)


@operator("DeformConv", since=19)
@in_float32
def deform_conv(
    x: Array,
    w: Array,
    offset: Array,
    b: Array | None = None,
    mask: Array | None = None,
    *,
    dilations: Numbers | None = None,
    group: int = 1,
    kernel_shape: Numbers | None = None,
    offset_group: int = 1,
    pads: Numbers | None = None,
    strides: Numbers | None = None,
) -> Array:
    """A convolution whose taps are moved: Deformable Convolutional Networks, arXiv 1703.06211.

    With a mask it is the second version, arXiv 1811.11168: every tap has a factor.
    """
    _check_kernel(w, kernel_shape)
    if x.ndim != 4:
        raise ValueError(f"deformed windows have two spatial axes, the input has {x.ndim - 2}")
    windows = place_windows(
        x.shape[2:], w.shape[2:], strides=strides, dilations=dilations, pads=pads
    )
    n, taps = x.shape[0], prod(windows.kernel)
    # [N, OG, taps, 2, *counts]: y and x of each tap
    moved = offset.reshape(n, offset_group, taps, 2, *windows.counts)
    moved = np.moveaxis(moved, 3, 0) + _tap_positions(windows).astype(x.dtype)
    columns = _sampled(x, moved[0], moved[1])  # [N, OG, C / OG, taps, *counts]
    if mask is not None:
        columns *= mask.reshape(n, offset_group, 1, taps, *windows.counts)
    columns = columns.reshape(n, group, x.shape[1] // group * taps, -1)
    matrices = w.reshape(group, w.shape[0] // group, -1)  # [G, M / G, C / G * taps]
    return _add_bias(np.matmul(matrices, columns).reshape(n, -1, *windows.counts), b)


def _tap_positions(windows: Windows) -> Array:
    """Where taps lie on the input before they are moved: [2, 1, 1, taps, *counts]."""
    rows = tap_coordinates(windows, 0)[:, None, :, None]  # [kernel y, 1, count y, 1]
    columns = tap_coordinates(windows, 1)[None, :, None, :]  # [1, kernel x, 1, count x]
    both = np.stack(np.broadcast_arrays(rows, columns))
    return both.reshape(2, 1, 1, prod(windows.kernel), *windows.counts)


def _sampled(x: Array, rows: Array, columns: Array) -> Array:
    """Values between the pixels, bilinear; 0 outside.

    Args:
        x: [N, C, height, width].
        rows: [N, groups, *positions].
        columns: [N, groups, *positions].

    Returns:
        [N, groups, C / groups, *positions].
    """
    n, groups, *positions = rows.shape
    height, width = x.shape[2:]
    flat = x.reshape(n, groups, x.shape[1] // groups, height * width)
    result = np.zeros((*flat.shape[:3], *positions), x.dtype)
    top, left = np.floor(rows), np.floor(columns)
    for down, right in product((0, 1), (0, 1)):
        y, z = top + down, left + right
        inside = (y >= 0) & (y < height) & (z >= 0) & (z < width)
        share = (1 - np.abs(rows - y)) * (1 - np.abs(columns - z)) * inside
        index = np.where(inside, y * width + z, 0).astype(np.int64)
        taken = np.take_along_axis(flat, index.reshape(n, groups, 1, -1), axis=3)
        result += taken.reshape(result.shape) * share[:, :, None]
    return result


def _check_kernel(w: Array, kernel_shape: Numbers | None) -> None:
    if kernel_shape is not None and tuple(kernel_shape) != w.shape[2:]:
        raise ValueError(
            f"kernel_shape is {list(kernel_shape)}, the weights have the shape {list(w.shape)}"
        )


def _add_bias(y: Array, bias: Array | None) -> Array:
    """Adds one number to each channel of an array that nobody else has."""
    if bias is not None:
        y += bias.reshape(-1, *(1,) * (y.ndim - 2))
    return y
