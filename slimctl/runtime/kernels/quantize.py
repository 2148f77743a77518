"""Between real numbers and codes, as these nodes are written.

The rule is that of ``slimctl.numerics.affine``: ties to even, division, the zero point added after
rounding.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from slimctl.numerics.affine import along
from slimctl.runtime.floats import is_narrow
from slimctl.runtime.registry import MICROSOFT, Array, operator

_INTEGERS = "iu"
_NARROW_INTEGERS = {
    np.dtype(ml_dtypes.int4): (-8, 7),
    np.dtype(ml_dtypes.uint4): (0, 15),
    np.dtype(ml_dtypes.int2): (-2, 1),
    np.dtype(ml_dtypes.uint2): (0, 3),
}


def _quantized(
    x: Array, scale: Array, zero_point: Array | None, axis: int, block_size: int, kind: Any
) -> Array:
    scale = _spread(scale, x.shape, axis, block_size)
    if is_narrow(x) or is_narrow(scale):
        x, scale = x.astype(np.float32), scale.astype(np.float32)
    limits = _limits(kind)
    if scale.ndim == 0 and x.dtype == scale.dtype and kind in _SHORT_INTEGERS:
        zero = 0.0 if zero_point is None else float(zero_point.reshape(()))
        return _quantized_evenly(x, scale, zero, kind)
    steps = x / scale
    if limits is None:  # a narrow float rounds by itself
        return _saturated(steps, kind)
    steps = np.rint(steps)
    if zero_point is not None:
        steps = steps + _spread(zero_point, x.shape, axis, block_size).astype(steps.dtype)
    # NaN becomes the lower end, as in onnxruntime's comparison
    clipped = np.clip(np.nan_to_num(steps, nan=limits[0], posinf=None, neginf=None), *limits)
    return np.asarray(clipped.astype(np.int32).astype(kind))


_SHORT_INTEGERS = tuple(np.dtype(kind) for kind in (np.uint8, np.int8, np.uint16, np.int16))

_CACHED = 1 << 16
"""Elements of a part of a tensor: all passes over it find them in the second-level cache."""


def _quantized_evenly(x: Array, scale: Array, zero_point: float, kind: np.dtype[Any]) -> Array:
    """The same for one scale, a part of the tensor at a time."""
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    flat, result = x.reshape(-1), np.empty(x.size, kind)
    buffer = np.empty(min(x.size, _CACHED), x.dtype)
    for start in range(0, x.size, _CACHED):
        part = flat[start : start + _CACHED]
        steps = np.divide(part, scale, out=buffer[: part.size])
        np.rint(steps, out=steps)
        if zero_point:
            steps += x.dtype.type(zero_point)
        np.clip(steps, x.dtype.type(low), x.dtype.type(high), out=steps)
        if np.isnan(steps.min()):
            steps[np.isnan(steps)] = low
        result[start : start + _CACHED] = steps
    return result.reshape(x.shape)


def _limits(kind: np.dtype[Any]) -> tuple[int, int] | None:
    if kind in _NARROW_INTEGERS:
        return _NARROW_INTEGERS[kind]
    if kind.kind not in _INTEGERS:
        return None
    limits = np.iinfo(kind)
    return int(limits.min), int(limits.max)


def _saturated(values: Array, kind: np.dtype[Any]) -> Array:
    """A float of 8 or 4 bits, its largest value in place of what is larger."""
    largest = float(ml_dtypes.finfo(kind).max)  # type: ignore[no-untyped-call]  # ml_dtypes
    finite = np.clip(values, -largest, largest)
    return np.asarray(np.where(np.isnan(values), values, finite).astype(kind))


def _spread(values: Array, shape: tuple[int, ...], axis: int, block_size: int) -> Array:
    """Scales or zero points that broadcast: in all, per channel, or per block along an axis."""
    if values.size == 1:
        return values.reshape(())
    if block_size:
        axis %= len(shape)
        repeated = np.repeat(values, block_size, axis=axis)
        return repeated[(slice(None),) * axis + (slice(shape[axis]),)]
    return along(values.reshape(-1), axis, len(shape))


def _dequantized(
    x: Array, scale: Array, zero_point: Array | None, axis: int, block_size: int, kind: Any
) -> Array:
    wide = np.float32 if is_narrow(scale) or kind != scale.dtype else scale.dtype
    if x.dtype in _SHORT_INTEGERS and wide == np.float32:
        return _dequantized_short(x, scale, zero_point, axis, block_size).astype(kind, copy=False)
    steps = x
    if x.dtype.kind in _INTEGERS or x.dtype in _NARROW_INTEGERS:
        steps = x.astype(np.int32 if x.dtype.itemsize < 4 else np.int64)
        if zero_point is not None:
            steps = steps - _spread(zero_point, x.shape, axis, block_size).astype(steps.dtype)
    factor = _spread(scale, x.shape, axis, block_size).astype(wide)
    return np.asarray((steps.astype(wide) * factor).astype(kind))


def _dequantized_short(
    x: Array, scale: Array, zero_point: Array | None, axis: int, block_size: int
) -> Array:
    """The same for up to 16 bits: float32 holds the differences.

    The result is in the usual order whatever that of the codes is, so that float sums over it are
    added in one order.
    """
    steps = x.astype(np.float32, order="C")
    if zero_point is not None and zero_point.any():
        steps -= _spread(zero_point, x.shape, axis, block_size).astype(np.float32)
    steps *= _spread(scale, x.shape, axis, block_size).astype(np.float32)
    return steps


def _type(number: int) -> np.dtype[Any]:
    return np.dtype(ir.DataType(number).numpy())


@operator("QuantizeLinear", since=10)
def quantize_linear(
    x: Array,
    y_scale: Array,
    y_zero_point: Array | None = None,
    *,
    axis: int = 1,
    saturate: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
) -> Array:
    """``saturate(rint(x / scale) + zero_point)``

    Args:
        x: Any shape.
        y_scale: [], [channels], or x's shape with the axis cut into blocks.
        y_zero_point: As the scale; its type is the output's.
        axis: Of channels or blocks.
        saturate: Narrow floats that overflow become their largest value, not infinity or NaN.
        block_size: Elements of a block; 0 without blocks.
        output_dtype: Type of the output where there is no zero point; 0 is uint8.
        precision: Type of the division; 0 is that of the inputs. float64 is not narrower than any.
    """
    del precision
    if y_zero_point is not None:
        kind = y_zero_point.dtype
    else:
        kind = _type(output_dtype) if output_dtype else np.dtype(np.uint8)
    if not saturate and _limits(kind) is None:
        return np.asarray((x / _spread(y_scale, x.shape, axis, block_size)).astype(kind))
    return _quantized(x, y_scale, y_zero_point, axis, block_size, kind)


@operator("DequantizeLinear", since=10)
def dequantize_linear(
    x: Array,
    x_scale: Array,
    x_zero_point: Array | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Array:
    """``(x - zero_point) * scale``

    Args:
        x: Codes of any shape.
        x_scale: [], [channels], or x's shape with the axis cut into blocks.
        x_zero_point: As the scale; 0 where it is left out.
        axis: Of channels or blocks.
        block_size: Elements of a block; 0 without blocks.
        output_dtype: Type of the output; 0 is that of the scale.
    """
    kind = _type(output_dtype) if output_dtype else x_scale.dtype
    return _dequantized(x, x_scale, x_zero_point, axis, block_size, kind)


@operator("QuantizeLinear", since=1, domain=MICROSOFT)
def microsoft_quantize_linear(
    x: Array, y_scale: Array, y_zero_point: Array | None = None, *, axis: int = 1
) -> Array:
    """The same for 16 bits before operator set 21."""
    return quantize_linear(x, y_scale, y_zero_point, axis=axis)


@operator("DequantizeLinear", since=1, domain=MICROSOFT)
def microsoft_dequantize_linear(
    x: Array, x_scale: Array, x_zero_point: Array | None = None, *, axis: int = 1
) -> Array:
    """The same for 16 bits before operator set 21."""
    return dequantize_linear(x, x_scale, x_zero_point, axis=axis)


@operator("DynamicQuantizeLinear", since=11)
def dynamic_quantize_linear(x: Array) -> tuple[Array, Array, Array]:
    """Codes with the scale and zero point of the values' own range, which is made to hold zero."""
    low, high = np.float32(min(x.min(initial=0), 0)), np.float32(max(x.max(initial=0), 0))
    scale = np.float32((high - low) / np.float32(255)) if high > low else np.float32(1)
    # rounded in float32, as in the function that ONNX defines the operator by
    zero_point = np.clip(np.rint(np.float32(0) - low / scale), 0, 255).astype(np.uint8)
    codes = _quantized(x, np.asarray(scale), np.asarray(zero_point), 1, 0, np.dtype(np.uint8))
    return codes, np.asarray(scale), np.asarray(zero_point)
