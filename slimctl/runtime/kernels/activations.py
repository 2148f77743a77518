"""Activations: one value in, one value out, by a formula of the operator's schema."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from slimctl.runtime.pointwise import logistic, pointwise
from slimctl.runtime.registry import Array, operator

_LARGEST_BFLOAT16 = np.array(0x7F7F, np.uint16).view(ml_dtypes.bfloat16)


@operator("Relu", since=6)
@pointwise
def relu(x: Array) -> Any:
    """max(x, 0)"""
    return _positive(x)


@operator("LeakyRelu", since=6)
@pointwise
def leaky_relu(x: Array, *, alpha: float = 0.01) -> Any:
    """Alpha x where x is negative, x elsewhere"""
    result = _negative(x)
    result *= x.dtype.type(alpha)
    result += _positive(x)
    return result


@operator("PRelu", since=7)
@pointwise
def prelu(x: Array, slope: Array) -> Any:
    """Slope x where x is negative, x elsewhere; slope is broadcast to x"""
    _check_broadcast(slope, x)
    return np.where(x < 0, x * slope, x)


@operator("Elu", since=6)
@pointwise
def elu(x: Array, *, alpha: float = 1.0) -> Any:
    """Alpha (exp(x) - 1) where x is negative, x elsewhere"""
    result = np.expm1(_negative(x))
    result *= x.dtype.type(alpha)
    result += _positive(x)
    return result


@operator("Selu", since=6)
@pointwise
def selu(x: Array, *, alpha: float = 1.6732631921768188, gamma: float = 1.0507010221481323) -> Any:
    """Gamma alpha (exp(x) - 1) where x is negative, gamma x elsewhere"""
    result = np.expm1(_negative(x))
    result *= x.dtype.type(alpha)
    result += _positive(x)
    result *= x.dtype.type(gamma)
    return result


@operator("Celu", since=12)
@pointwise
def celu(x: Array, *, alpha: float = 1.0) -> Any:
    """max(x, 0) + min(0, alpha (exp(x / alpha) - 1))"""
    factor = x.dtype.type(alpha)
    # x is cut at 0 so that the exponential of a large x, which is discarded, cannot overflow
    bent = factor * np.expm1(_negative(x) / factor)
    return _positive(x) + np.minimum(bent, x.dtype.type(0))


@operator("ThresholdedRelu", since=10)
@pointwise
def thresholded_relu(x: Array, *, alpha: float = 1.0) -> Any:
    """Zero where x is not above alpha, at NaN too, x elsewhere"""
    return np.where(x > x.dtype.type(alpha), x, x.dtype.type(0))


@operator("Shrink", since=9)
@pointwise
def shrink(input: Array, *, bias: float = 0.0, lambd: float = 0.5) -> Any:
    """Zero from -lambd to lambd and at NaN, x + bias below, x - bias above"""
    # Integers are compared and moved as floats, and truncated afterwards, as in onnxruntime. It
    # moves float64 in float32 too, which is not done here.
    x = input if input.dtype.kind == "f" else input.astype(np.float64)
    below, above = x < x.dtype.type(-lambd), x > x.dtype.type(lambd)
    step = x.dtype.type(bias)
    moved = np.where(below, x + step, np.where(above, x - step, x.dtype.type(0)))
    return moved.astype(input.dtype, copy=False)


@operator("Sigmoid", since=6)
@pointwise
def sigmoid(x: Array) -> Any:
    """1 / (1 + exp(-x))"""
    return logistic(x)


@operator("HardSigmoid", since=6)
@pointwise
def hard_sigmoid(x: Array, *, alpha: float = 0.2, beta: float = 0.5) -> Any:
    """max(0, min(1, alpha x + beta))"""
    line = x * x.dtype.type(alpha)
    line += x.dtype.type(beta)
    return np.clip(line, x.dtype.type(0), x.dtype.type(1))


@operator("HardSwish", since=14)
@pointwise
def hard_swish(x: Array) -> Any:
    """Product of x and max(0, min(1, x / 6 + 1 / 2))"""
    line = x * x.dtype.type(1 / 6)
    line += x.dtype.type(0.5)
    return x * np.clip(line, x.dtype.type(0), x.dtype.type(1))


@operator("Mish", since=18)
@pointwise
def mish(x: Array) -> Any:
    """Product of x and tanh(log(1 + exp(x)))

    With e = exp(x), tanh(log(1 + e)) = ((1 + e)² - 1) / ((1 + e)² + 1) = w / (w + 2) for
    w = e (e + 2): one exponential, and nothing cancels where x is very negative.
    """
    power = np.exp(np.minimum(x, x.dtype.type(20)))  # from 20 on the quotient is 1 in float64 too
    power *= power + x.dtype.type(2)
    power /= power + x.dtype.type(2)
    power *= x
    return power


@operator("Softplus", since=1)
@pointwise
def softplus(x: Array) -> Any:
    """log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|)), which cannot overflow"""
    result = np.log1p(np.exp(-np.abs(x)))
    result += _positive(x)
    return result


@operator("Softsign", since=1)
@pointwise
def softsign(input: Array) -> Any:
    """Quotient of x and 1 + |x|"""
    return input / (np.abs(input) + input.dtype.type(1))


@operator("Clip", since=6)
@pointwise
def clip_to_attributes(
    input: Array, *, max: float = 3.4028234663852886e38, min: float = -3.4028234663852886e38
) -> Any:
    """min(max(x, lower bound), upper bound) with bounds that are attributes"""
    return np.clip(input, input.dtype.type(min), input.dtype.type(max))


@operator("Clip", since=11)
def clip(input: Array, min: Array | None = None, max: Array | None = None) -> Array:
    """min(max(x, lower bound), upper bound) with bounds that are inputs

    A bound that is left out is the largest finite value of the type: infinity is clipped to it.
    """
    low, high = _finite_range(input.dtype)
    low, high = low if min is None else _scalar(min), high if max is None else _scalar(max)
    return np.asarray(np.minimum(np.maximum(input, low), high))


def _positive(x: Array) -> Any:
    return np.maximum(x, x.dtype.type(0))


def _negative(x: Array) -> Any:
    return np.minimum(x, x.dtype.type(0))


def _finite_range(kind: np.dtype[Any]) -> tuple[Array, Array]:
    if kind.kind in "iu":
        return np.array(np.iinfo(kind).min, kind), np.array(np.iinfo(kind).max, kind)
    # numpy does not know bfloat16, the upper half of float32
    largest = _LARGEST_BFLOAT16 if kind.kind == "V" else np.array(np.finfo(kind).max, kind)
    return -largest, largest


def _scalar(bound: Array) -> Array:
    """A bound of any shape with one element, as exporters write it."""
    if bound.size != 1:
        raise ValueError(f"a bound must be one number, and has the shape {list(bound.shape)}")
    return bound.reshape(())


def _check_broadcast(slope: Array, x: Array) -> None:
    if np.broadcast_shapes(slope.shape, x.shape) != x.shape:
        raise ValueError(
            f"slope of the shape {list(slope.shape)} does not fit x of the shape {list(x.shape)}"
        )
