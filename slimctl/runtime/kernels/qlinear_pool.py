"""Pooling of quantized tensors, and means over axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slimctl.numerics.affine import dequantize
from slimctl.runtime.engine import Engine
from slimctl.runtime.kernels.pooling import max_pool
from slimctl.runtime.kernels.qlinear_elementwise import requantized_codes
from slimctl.runtime.kernels.quantize import quantize_linear
from slimctl.runtime.registry import MICROSOFT, OWN, Array, operator
from slimctl.runtime.windows import Windows, padded, place_windows, window_view


def _mean_codes(
    sums: Array, count: Array | int, scale: Array, y_scale: Array, zero: Array, engine: Engine
) -> Array:
    """Means of integers in steps of the output, in float64: rounded once."""
    factor = np.float64(scale.reshape(())) / np.float64(y_scale.reshape(()))
    return engine.requantized(sums * (factor / count), zero.reshape(()), 1)


@operator("QLinearGlobalAveragePool", since=1, domain=MICROSOFT)
def qlinear_global_average_pool(
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    y_scale: Array,
    y_zero_point: Array,
    *,
    channels_last: int = 0,
    engine: Engine,
) -> Array:
    """The mean over all spatial axes: an integer sum, requantized."""
    axes = tuple(range(1, x.ndim - 1)) if channels_last else tuple(range(2, x.ndim))
    return _mean_over(x, axes, True, x_scale, x_zero_point, y_scale, y_zero_point, engine)


@operator("QLinearReduceMean", since=1, domain=MICROSOFT)
def qlinear_reduce_mean(
    data: Array,
    data_scale: Array,
    data_zero_point: Array | None,
    reduced_scale: Array,
    reduced_zero_point: Array | None = None,
    *,
    axes: Sequence[int],
    keepdims: int,
    engine: Engine,
) -> Array:
    """The mean over some axes: an integer sum, requantized."""
    none = np.zeros((), data.dtype)
    zeros = [none if z is None else z for z in (data_zero_point, reduced_zero_point)]
    chosen = tuple(axes) or tuple(range(data.ndim))
    return _mean_over(
        data, chosen, bool(keepdims), data_scale, zeros[0], reduced_scale, zeros[1], engine
    )


def _mean_over(
    x: Array,
    axes: tuple[int, ...],
    keepdims: bool,
    scale: Array,
    zero: Array,
    y_scale: Array,
    y_zero: Array,
    engine: Engine,
) -> Array:
    count = int(np.prod([x.shape[axis] for axis in axes], dtype=np.int64))
    sums = x.sum(axis=axes, keepdims=keepdims, dtype=np.int64) - count * int(zero.reshape(()))
    return _mean_codes(np.asarray(sums, np.float64), count, scale, y_scale, y_zero, engine)


@operator("QLinearAveragePool", since=1, domain=MICROSOFT)
def qlinear_average_pool(
    x: Array,
    x_scale: Array,
    x_zero_point: Array | None,
    y_scale: Array,
    y_zero_point: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    channels_last: int = 0,
    count_include_pad: int = 0,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    engine: Engine,
) -> Array:
    """The mean of each window: an integer sum, requantized."""
    values = np.moveaxis(x, -1, 1) if channels_last else x
    zero = np.zeros((), x.dtype) if x_zero_point is None else x_zero_point.reshape(())
    windows = place_windows(
        values.shape[2:],
        kernel_shape,
        strides=strides,
        pads=pads,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
    )
    within = tuple(range(-len(kernel_shape), 0))
    steps = values.astype(np.int32) - np.int32(zero)
    sums = window_view(padded(steps, windows, 0), windows).sum(axis=within, dtype=np.int64)
    counts = _counted(windows, include_padding=bool(count_include_pad))
    y_zero = np.zeros((), x.dtype) if y_zero_point is None else y_zero_point
    codes = _mean_codes(sums.astype(np.float64), counts, x_scale, y_scale, y_zero, engine)
    return np.moveaxis(codes, 1, -1) if channels_last else codes


def _counted(windows: Windows, *, include_padding: bool) -> Array:
    """Elements of each window that count, [1, 1, *counts]; those beyond the padding never do."""
    result: Array = np.ones((1, 1), np.int64)
    for axis, count in enumerate(windows.counts):
        begin, end = windows.begins[axis], windows.ends[axis]
        low, high = (
            (-begin, windows.sizes[axis] + end) if include_padding else (0, windows.sizes[axis])
        )
        starts = np.arange(count) * windows.strides[axis] - begin
        inside = np.minimum(starts + windows.kernel[axis], high) - np.maximum(starts, low)
        result = result[..., None] * inside
    return result


@operator("QLinearSoftmax", since=1, domain=MICROSOFT)
def qlinear_softmax(
    x: Array,
    x_scale: Array,
    x_zero_point: Array | None,
    y_scale: Array,
    y_zero_point: Array,
    *,
    axis: int = -1,
    opset: int,
    engine: Engine,
) -> Array:
    """Softmax of the real values, quantized.

    Args:
        x: Codes of any shape.
        x_scale: A scalar.
        x_zero_point: A scalar.
        y_scale: A scalar.
        y_zero_point: A scalar.
        axis: Over which the outputs sum to 1; before operator set 13, all axes from there on.
        opset: Operator set of the Softmax that it stands for.
        engine: Integer arithmetic.
    """
    zero = np.zeros((), x.dtype) if x_zero_point is None else x_zero_point.reshape(())
    real = dequantize(x, x_scale.reshape(()), zero)
    axis %= x.ndim
    shape = (int(np.prod(x.shape[:axis])), -1) if opset < 13 else x.shape
    rows = real.reshape(shape)
    along = 1 if opset < 13 else axis
    powers = np.exp(rows - rows.max(axis=along, keepdims=True))
    shares = (powers / powers.sum(axis=along, keepdims=True)).reshape(x.shape)
    codes = quantize_linear(shares, y_scale.reshape(()), y_zero_point.reshape(()))
    return engine.counted(codes, None)


@operator("QLinearMaxPool", since=1, domain=OWN)
def qlinear_max_pool(
    x: Array,
    x_scale: Array,
    x_zero_point: Array | None,
    y_scale: Array,
    y_zero_point: Array,
    *,
    engine: Engine,
    **windows: Any,
) -> Array:
    """The Q/DQ region around a MaxPool: quantization is monotone, so codes are compared."""
    codes = max_pool(x, outputs=1, **windows)
    return engine.counted(
        requantized_codes(codes, x_zero_point, x_scale, y_scale, y_zero_point), channel_axis=1
    )
