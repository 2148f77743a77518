"""Operators whose channels lie on the last axis: onnxruntime's optimizer makes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimctl.runtime.engine import Engine
from slimctl.runtime.kernels.pooling import max_pool
from slimctl.runtime.kernels.qlinear_convolution import qlinear_conv
from slimctl.runtime.registry import MICROSOFT, Array, operator


@operator("QLinearConv", since=1, domain=MICROSOFT)
def nhwc_qlinear_conv(
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    w: Array,
    w_scale: Array,
    w_zero_point: Array,
    y_scale: Array,
    y_zero_point: Array,
    b: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    channels_last: int = 0,
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    engine: Engine,
) -> Array:
    """QLinearConv of [n, *sizes, c], or of [n, c, *sizes] without ``channels_last``."""
    values = np.ascontiguousarray(np.moveaxis(x, -1, 1)) if channels_last else x
    codes = qlinear_conv(
        values,
        x_scale,
        x_zero_point,
        w,
        w_scale,
        w_zero_point,
        y_scale,
        y_zero_point,
        b,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
        engine=engine,
    )
    return np.moveaxis(codes, 1, -1) if channels_last else codes


@operator("NhwcMaxPool", since=1, domain=MICROSOFT)
def nhwc_max_pool(
    x: Array,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Array:
    """MaxPool of codes [n, *sizes, c]."""
    largest = max_pool(
        np.moveaxis(x, -1, 1),
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        dilations=dilations,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
        outputs=1,
    )
    return np.moveaxis(largest, 1, -1)
