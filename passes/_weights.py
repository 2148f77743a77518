"""Turns the weight and bias of a layer into integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from slimctl.numerics.affine import (
    INT8_NARROW,
    SMALLEST_SCALE,
    Affine,
    QuantizedType,
    along,
    fake_quantize,
    quantize,
    symmetric_scales,
)
from slimctl.numerics.scale_search import least_squares_scales
from slimctl.passes._layers import Layer, output_axis

BIAS_LIMIT: Final = 2**30
"""Largest magnitude of an int32 bias: half the type, so that the sum of products, and a later
correction of the bias, still fit beside it."""

INT4_NARROW: Final = QuantizedType(np.dtype(np.int8), -7, 7)
"""Weights of 4 bits: symmetric, as those of 8 are; kernels compute with them as int8."""

_MIDDLE: Final = 128
"""Zero point of uint8 weights."""

PAIR_LIMIT: Final = 128
"""Two uint8 x int8 products fit 16 bits while 255 * (w1 + w2) <= 32767."""


@dataclass(frozen=True)
class WeightSettings:
    """How weights are quantized.

    Attributes:
        per_channel: One scale per output channel.
        reduce_range: As much less than 8 bits as keeps 16-bit sums from saturating.
        unsigned: uint8 with the zero point 128 instead of int8.
        power_of_two: Scales are powers of two.
        bits: 8, or 4 for codes from -7 to 7.
    """

    per_channel: bool = True
    reduce_range: bool = False
    unsigned: bool = False
    power_of_two: bool = False
    bits: int = 8


@dataclass(frozen=True)
class QuantizedWeight:
    """An integer weight.

    Attributes:
        values: int8 or uint8, the shape of the weight.
        scale: float32 [channels], or [] for one scale.
        axis: Channel axis, None for one scale.
        raised: Channels whose scale was raised so that the int32 bias does not overflow.
        reduced: Channels whose scale was raised so that 16-bit sums do not saturate.
        bits: Those that the values need.
    """

    values: NDArray[np.integer[Any]]
    scale: NDArray[np.float32]
    axis: int | None
    raised: int = 0
    reduced: int = 0
    bits: int = 8

    @property
    def zero_point(self) -> NDArray[np.integer[Any]]:
        """The middle of the type, in the shape of the scale: kernels want one for all channels."""
        middle = _MIDDLE if self.values.dtype == np.uint8 else 0
        return np.full(self.scale.shape, middle, self.values.dtype)


def quantize_weight(
    layer: Layer, settings: WeightSettings, *, input_scale: float | None
) -> QuantizedWeight:
    """Symmetric weight of a layer.

    Args:
        layer: The layer.
        settings: How; one scale per channel needs an operator with a channel axis.
        input_scale: Scale of the quantized input; None when the bias stays float.
    """
    weight = layer.weight()
    axis = layer.channel_axis if settings.per_channel else None
    narrow = settings.bits < 8
    kind = INT4_NARROW if narrow else INT8_NARROW
    scale = (least_squares_scales if narrow else symmetric_scales)(weight, axis, kind)
    if settings.power_of_two:
        scale = _powers_of_two(weight, scale, axis, kind)
    reduced = 0
    if settings.reduce_range and not settings.unsigned:
        wider = _reduced_scales(layer, scale, axis)
        reduced = int(np.count_nonzero(wider > scale))
        scale = _next_powers_of_two(wider) if settings.power_of_two else wider
    bias = layer.bias()
    raised = 0
    if input_scale is not None and bias is not None:
        needed = _scale_for_bias(layer, bias, input_scale, axis)
        raised = int(np.count_nonzero(needed > scale))
        scale = np.maximum(scale, needed)
        if settings.power_of_two:
            scale = _next_powers_of_two(scale)
    zero = np.zeros(scale.shape, np.int8)
    values = quantize(weight.astype(np.float32, copy=False), scale, zero, kind, axis)
    if settings.unsigned:
        values = (values.astype(np.int16) + _MIDDLE).astype(np.uint8)
    return QuantizedWeight(values, scale, axis, raised, reduced, settings.bits)


def _next_powers_of_two(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.exp2(np.ceil(np.log2(scale))).astype(np.float32)


def _powers_of_two(
    weight: NDArray[Any], scale: NDArray[np.float32], axis: int | None, kind: QuantizedType
) -> NDArray[np.float32]:
    """For each channel the neighboring power of two with the lower squared error."""
    zero = np.zeros(scale.shape, np.int8)
    others = tuple(index for index in range(weight.ndim) if axis is None or index != axis)
    above = _next_powers_of_two(scale)
    below = np.asarray(above / 2, np.float32)
    errors = []
    for candidate in (below, above):
        parameters = Affine(candidate, zero, kind)
        error = fake_quantize(weight.astype(np.float32), parameters, axis) - weight
        errors.append(np.sum(error.astype(np.float64) ** 2, axis=others))
    return np.where(errors[0] < errors[1], below, above).astype(np.float32)


def _reduced_scales(
    layer: Layer, scale: NDArray[np.float32], axis: int | None
) -> NDArray[np.float32]:
    """Scales raised where two products of 8-bit weights could saturate, as far as that takes.

    ``rint(a) + rint(b) <= a + b + 1``: real weights that add up to one step less than the limit
    stay within it when they are rounded.
    """
    weight = layer.weight()
    steps = weight / along(scale, axis, weight.ndim)
    exact, rounded = (_largest_pairs(layer, each) for each in (steps, np.rint(steps)))  # [outputs]
    if axis != output_axis(layer.node, weight.ndim):
        exact, rounded = exact.max(), rounded.max()  # the scales are not those of the outputs
    needed = np.where(rounded > PAIR_LIMIT, np.maximum(exact / (PAIR_LIMIT - 1), 1.0), 1.0)
    return np.asarray(scale * needed, np.float32)


def _largest_pairs(layer: Layer, weight: NDArray[Any]) -> NDArray[Any]:
    """The largest sum of two weights that a kernel without VNNI adds up, for each output.

    Pairs are neighbors along the reduction (``slimctl.runtime.device.paired_sums``); that of a
    convolution runs over kernel taps, then over input channels. Codes are not negative, so that
    products of weights of unlike sign do not add up.

    Args:
        layer: The layer.
        weight: An array of the shape of its weight.

    Returns:
        [outputs]
    """
    rows = np.moveaxis(weight, output_axis(layer.node, weight.ndim), 0)
    if layer.node.op_type == "Conv":
        rows = np.moveaxis(rows, 1, -1).reshape(len(rows), -1)  # [o, i, *taps] -> [o, taps i]
    odd = rows.shape[-1] % 2
    rows = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, odd)])
    first, second = rows[..., 0::2], rows[..., 1::2]
    up = np.maximum(first, 0.0) + np.maximum(second, 0.0)
    down = np.minimum(first, 0.0) + np.minimum(second, 0.0)
    return np.asarray(np.maximum(up, -down).reshape(len(rows), -1).max(axis=1))


def _scale_for_bias(
    layer: Layer, bias: NDArray[Any], input_scale: float, axis: int | None
) -> NDArray[np.float32]:
    """The smallest weight scales at which the int32 bias stays below its limit."""
    bound = np.abs(bias.astype(np.float64)) / (input_scale * BIAS_LIMIT)  # [channels]
    # The product of both scales is the bias scale: it must stay a normal float32, too.
    bound = np.maximum(bound, SMALLEST_SCALE / input_scale)
    if axis is None:
        return np.asarray(bound.max(), np.float32)
    if layer.node.op_type == "ConvTranspose":
        bound = bound.reshape(layer.groups, -1).max(axis=0)  # groups share the scales of O/g
    return bound.astype(np.float32)


def bias_scale(layer: Layer, weight: QuantizedWeight, input_scale: float) -> NDArray[np.float32]:
    """Scale of the int32 bias, ``input_scale * weight_scale`` in float32 as kernels compute it.

    Returns:
        [channels], or [] when the weight has one scale.
    """
    scale = np.float32(input_scale) * weight.scale
    if weight.axis is not None and layer.node.op_type == "ConvTranspose":
        return np.tile(scale, layer.groups)
    return np.asarray(scale, np.float32)


def quantize_bias(bias: NDArray[Any], scale: NDArray[np.float32]) -> NDArray[np.int32]:
    """``rint(bias / scale)`` as int32; the scale was chosen so that it fits.

    Args:
        bias: [channels]
        scale: [channels] or []
    """
    steps = np.rint(bias.astype(np.float64) / scale.astype(np.float64))
    limits = np.iinfo(np.int32)
    return np.clip(steps, limits.min, limits.max).astype(np.int32)
