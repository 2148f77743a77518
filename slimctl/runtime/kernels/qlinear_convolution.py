"""Convolutions of quantized tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimctl.runtime.engine import Engine, Target, channelwise
from slimctl.runtime.integer_convolution import Convolution, convolve_codes
from slimctl.runtime.integer_matmul import zero_of
from slimctl.runtime.registry import Array, operator
from slimctl.runtime.windows import place_windows


@operator("QLinearConv", since=10)
def qlinear_conv(
    x: Array,
    x_scale: Array,
    x_zero_point: Array | None,
    w: Array,
    w_scale: Array,
    w_zero_point: Array | None,
    y_scale: Array,
    y_zero_point: Array,
    b: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    engine: Engine,
) -> Array:
    """Codes of a convolution.

    Args:
        x: Codes [n, c, *sizes].
        x_scale: A scalar.
        x_zero_point: A scalar.
        w: Codes [m, c / group, *kernel].
        w_scale: A scalar, or [m].
        w_zero_point: As its scale.
        y_scale: A scalar.
        y_zero_point: A scalar.
        b: int32 [m] in steps of ``x_scale w_scale``.
        auto_pad: NOTSET, VALID, SAME_UPPER or SAME_LOWER.
        dilations: From tap to tap.
        group: Number of groups.
        kernel_shape: Must be that of the weights.
        pads: Before each axis, then after each.
        strides: From window to window.
        engine: Integer arithmetic.
    """
    windows = place_windows(
        x.shape[2:],
        kernel_shape or w.shape[2:],
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
    )
    zeros = zero_of(x, x_zero_point), zero_of(w, w_zero_point)
    layer = Convolution(x, zeros[0], w, zeros[1], windows, group)
    summed = convolve_codes(layer, engine)
    scale = channelwise(x_scale.reshape(()) * w_scale, x.ndim, 1) / y_scale.reshape(())
    target = Target(
        np.asarray(scale, np.float32),
        y_zero_point,
        channel_axis=1,
    )
    bias = None if b is None else b.reshape(-1, *(1,) * (x.ndim - 2))  # [m, 1, ...]
    return engine.codes(summed, bias, target)


@operator("ConvInteger", since=10)
def conv_integer(
    x: Array,
    w: Array,
    x_zero_point: Array | None = None,
    w_zero_point: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    engine: Engine,
) -> Array:
    """int32 sums of a convolution of codes without their zero points."""
    windows = place_windows(
        x.shape[2:],
        kernel_shape or w.shape[2:],
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
    )
    zeros = zero_of(x, x_zero_point), zero_of(w, w_zero_point)
    layer = Convolution(x, zeros[0], w, zeros[1], windows, group)
    # onnxruntime has the weights on the left of the product here, where signed codes are exact.
    return engine.sums(convolve_codes(layer, engine)._replace(mixed=False))
