"""Convolutions of quantized tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slimctl.numerics.integer import EXACT, centered, largest
from slimctl.runtime.engine import Engine, channelwise
from slimctl.runtime.integer_convolution import Convolution, convolve_codes
from slimctl.runtime.integer_matmul import zero_of
from slimctl.runtime.kernels.convolution import conv_transpose
from slimctl.runtime.registry import OWN, Array, operator
from slimctl.runtime.sums import Target, summed_at_once
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
    layer = Convolution(x, zeros[0], w, zeros[1], windows, group, b)
    summed = convolve_codes(layer, engine)

    def multiplier() -> Array:
        scale = x_scale.reshape(()) * w_scale / y_scale.reshape(())
        return summed.per_channel(np.asarray(scale, np.float32))

    factors = engine.prepared("multiplier", (x_scale, w_scale, y_scale, windows), multiplier)
    target = Target(factors, y_zero_point, channel_axis=1)
    bias = None
    if b is not None:
        bias = engine.prepared("bias", (b, windows), lambda: summed.per_channel(b))
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


@operator("QLinearConvTranspose", since=1, domain=OWN)
def qlinear_conv_transpose(
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
    group: int = 1,
    engine: Engine,
    **placement: Any,
) -> Array:
    """Codes of a transposed convolution: the Q/DQ region around a ConvTranspose.

    Args:
        x: Codes [n, m, *counts].
        x_scale: A scalar.
        x_zero_point: A scalar.
        w: Codes [m, c / group, *kernel].
        w_scale: A scalar, or one per output channel [c / group], or [c].
        w_zero_point: As its scale.
        y_scale: A scalar.
        y_zero_point: A scalar.
        b: int32 [c] in steps of ``x_scale w_scale``.
        group: Number of groups.
        engine: Integer arithmetic.
        placement: The other attributes of ConvTranspose.
    """
    values = centered(x, zero_of(x, x_zero_point).reshape(()))
    w_zero = zero_of(w, w_zero_point)
    weights = centered(w, channelwise(w_zero, w.ndim, 1))
    # At most, every weight that leads to an output channel meets the largest code.
    reach = np.abs(weights).sum(axis=(0, *range(2, w.ndim))).max()  # [c / group]
    bound = largest(x, zero_of(x, x_zero_point)) * float(reach)
    kind = np.float32 if bound < EXACT else np.float64  # exact up to 2^24 and 2^53
    sums = conv_transpose(values.astype(kind), weights.astype(kind), group=group, **placement)
    scale = x_scale.reshape(()) * _per_output(w_scale, group)
    multiplier = channelwise(scale, x.ndim, 1) / y_scale.reshape(())
    bias = None if b is None else b.reshape(-1, *(1,) * (x.ndim - 2))  # [c, 1, ...]
    target = Target(np.asarray(multiplier, np.float32), y_zero_point, channel_axis=1)
    return engine.codes(summed_at_once(sums, bound), bias, target)


def _per_output(scale: Array, group: int) -> Array:
    """Scales of the channels of one group hold for all groups."""
    return scale if scale.size == 1 else np.tile(scale.reshape(-1), group)
