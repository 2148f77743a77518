"""Affine quantization on arrays. The one place where rounding and scales are decided.

The rule (docs/numerics.md): ``q = saturate(rint(x / scale) + zero_point)``, ties to even, division
and not multiplication by a reciprocal, the zero point added after rounding. These are the rules of
onnxruntime's CPU kernels.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.floating[Any]]
Integer = NDArray[np.integer[Any]]

SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
"""Scales below the smallest normal float32 divide badly (subnormal, flushed to zero by kernels)."""


class QuantizedType(NamedTuple):
    """An integer type and the part of its range that is used."""

    dtype: np.dtype[Any]
    low: int
    high: int

    @property
    def levels(self) -> int:
        """Number of representable values."""
        return self.high - self.low + 1


UINT8 = QuantizedType(np.dtype(np.uint8), 0, 255)
INT8 = QuantizedType(np.dtype(np.int8), -128, 127)
UINT16 = QuantizedType(np.dtype(np.uint16), 0, 65535)
INT16 = QuantizedType(np.dtype(np.int16), -32768, 32767)
INT8_NARROW = QuantizedType(np.dtype(np.int8), -127, 127)  # symmetric weights
INT8_REDUCED = QuantizedType(np.dtype(np.int8), -64, 63)  # 7 bits: u8 x s8 pairs fit 16 bits
UINT8_REDUCED = QuantizedType(np.dtype(np.uint8), 0, 127)


class Affine(NamedTuple):
    """Scale and zero point; arrays of one element (per tensor) or one per channel."""

    scale: NDArray[np.float32]
    zero_point: Integer
    type: QuantizedType


def affine_from_range(
    low: float, high: float, kind: QuantizedType, *, symmetric: bool, power_of_two: bool = False
) -> Affine:
    """Scale and zero point that represent [low, high], with 0.0 exactly representable.

    The range is widened to hold zero. Constant-zero and subnormal ranges get the scale of a range
    of one rather than a division by nothing: the int32 biases that depend on it stay fine. With
    ``symmetric`` the zero point is the middle of the type (0 for int8, 128 for uint8).

    Args:
        low: Finite lower end.
        high: Finite upper end, at least ``low``.
        kind: Integer type.
        symmetric: Range symmetric about zero.
        power_of_two: Raise the scale to the next power of two, which clips nothing.
    """
    up = next_power_of_two if power_of_two else float
    # In float64, since high - low of two float32 extremes overflows float32.
    low64, high64 = min(float(low), 0.0), max(float(high), 0.0)
    if symmetric:
        middle = (kind.low + kind.high + 1) // 2
        bound = max(-low64, high64)
        # The shorter side of the type decides, so that both ends are representable.
        scale = up(_usable_scale(bound, min(middle - kind.low, kind.high - middle)))
        return _scalar(scale, middle, kind)
    scale = up(_usable_scale(high64 - low64, kind.high - kind.low))
    zero_point = int(np.clip(np.rint(kind.low - low64 / scale), kind.low, kind.high))
    return _scalar(scale, zero_point, kind)


def next_power_of_two(scale: float) -> float:
    """The smallest power of two that is not less, at most 2^127; exact in float32."""
    return 2.0 ** min(math.ceil(math.log2(scale)), 127)


def _usable_scale(length: float, steps: int) -> float:
    # Guard before anything divides: an all-zero or subnormal range has no meaningful scale.
    scale = length / steps if length / steps > SMALLEST_SCALE else 1.0 / steps
    return float(np.float32(min(scale, float(np.finfo(np.float32).max))))


def _scalar(scale: float, zero_point: int, kind: QuantizedType) -> Affine:
    return Affine(np.asarray(scale, np.float32), np.asarray(zero_point, kind.dtype), kind)


def symmetric_scales(weight: Float, axis: int | None, kind: QuantizedType) -> NDArray[np.float32]:
    """Scales max|w| / high, one per slice along ``axis``, or one in all for ``axis=None``.

    Any positive scale represents an all-zero slice (a pruned channel) exactly. It gets the largest
    of the others, so that its int32 bias is no coarser than theirs; 1 where all slices are zero.

    Args:
        weight: Any shape.
        axis: Channel axis, or None for one scale.
        kind: Integer type whose zero point is 0.

    Returns:
        float32 [channels], or [] for ``axis=None``.
    """
    others = (
        None if axis is None else tuple(i for i in range(weight.ndim) if i != axis % weight.ndim)
    )
    bound = np.max(np.abs(weight), axis=others, initial=0.0).astype(np.float64)  # [channels]
    scale = bound / kind.high
    largest = scale.max(initial=0.0)
    usable = largest if largest > SMALLEST_SCALE else 1.0
    return np.where(scale > SMALLEST_SCALE, scale, usable).astype(np.float32)


def along(values: NDArray[Any], axis: int | None, ndim: int) -> NDArray[Any]:
    """Reshapes one value per channel so that it broadcasts along ``axis`` of an ndim array."""
    if axis is None or values.ndim == 0:
        return values
    shape = [1] * ndim
    shape[axis % ndim] = values.size
    return values.reshape(shape)  # [c] -> [1, c, 1, 1]


def quantize(
    x: Float, scale: Float, zero_point: Integer, kind: QuantizedType, axis: int | None = None
) -> Integer:
    """``saturate(rint(x / scale) + zero_point)``, ties to even.

    Args:
        x: Real values.
        scale: Positive, [] or [channels].
        zero_point: As ``scale``.
        kind: Integer type.
        axis: Channel axis of ``x`` when there is one scale per channel.
    """
    steps = np.rint(x / along(scale, axis, x.ndim))
    shifted = steps + along(zero_point, axis, x.ndim).astype(steps.dtype)
    codes: Integer = np.clip(shifted, kind.low, kind.high).astype(kind.dtype)
    return codes


def dequantize(
    q: Integer, scale: Float, zero_point: Integer, axis: int | None = None
) -> NDArray[np.float32]:
    """``(q - zero_point) * scale`` in float32."""
    centered = q.astype(np.int32) - along(zero_point, axis, q.ndim).astype(np.int32)
    return centered.astype(np.float32) * along(scale, axis, q.ndim).astype(np.float32)


def fake_quantize(x: Float, parameters: Affine, axis: int | None = None) -> NDArray[np.float32]:
    """What a value becomes by quantizing and dequantizing it."""
    q = quantize(x, parameters.scale, parameters.zero_point, parameters.type, axis)
    return dequantize(q, parameters.scale, parameters.zero_point, axis)
