"""Normalizations: means and variances over some axes, or those that were measured."""

from __future__ import annotations

from typing import TypeAlias

import ml_dtypes
import numpy as np

from slimctl.runtime.floats import in_float32, is_narrow
from slimctl.runtime.registry import Array, operator

Axes: TypeAlias = tuple[int, ...]

BFLOAT16 = 16
"""stash_type: the number of bfloat16 among ONNX's types."""


@operator("BatchNormalization", since=7)
def batch_normalization(
    x: Array,
    scale: Array,
    b: Array,
    mean: Array,
    var: Array,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
) -> Array:
    """(x - mean) scale / sqrt(var + epsilon) + b, by channel; the momentum is for training."""
    del momentum
    return _batch_normalized(x, scale, b, mean, var, epsilon)


@operator("BatchNormalization", since=14)
def batch_normalization_14(
    x: Array,
    scale: Array,
    b: Array,
    input_mean: Array,
    input_var: Array,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Array | tuple[Array, Array, Array]:
    """The same; training takes mean and variance of the batch, and gives running ones back.

    running = input momentum + batch (1 - momentum), with the variance of the population (ONNX).
    """
    if not training_mode:
        return _batch_normalized(x, scale, b, input_mean, input_var, epsilon)
    axes, wide = (0, *range(2, x.ndim)), x.astype(np.float64)
    mean, variance = wide.mean(axis=axes), wide.var(axis=axes)  # [C]
    y = _batch_normalized(x, scale, b, mean, variance, epsilon)
    return y, _moved(input_mean, mean, momentum), _moved(input_var, variance, momentum)


def _moved(old: Array, new: Array, momentum: float) -> Array:
    running: Array = old.astype(np.float64) * momentum + new * (1 - momentum)
    return running.astype(old.dtype)


def _batch_normalized(
    x: Array, scale: Array, b: Array, mean: Array, var: Array, epsilon: float
) -> Array:
    """One factor and one term for each channel, made in float64."""
    scale, b, mean, var = (value.astype(np.float64) for value in (scale, b, mean, var))
    factor = scale / np.sqrt(var + epsilon)
    kind = np.dtype(np.float32) if is_narrow(x) else x.dtype
    result = x * _by_channel(factor.astype(kind), x.ndim)
    result += _by_channel((b - mean * factor).astype(kind), x.ndim)
    return result.astype(x.dtype, copy=False)


@operator("InstanceNormalization", since=6)
@in_float32
def instance_normalization(input: Array, scale: Array, b: Array, *, epsilon: float = 1e-5) -> Array:
    """Mean and variance of each channel of each image."""
    result, _, _ = standardized(input, tuple(range(2, input.ndim)), epsilon)
    result *= _by_channel(scale, input.ndim)
    result += _by_channel(b, input.ndim)
    return result


@operator("GroupNormalization", since=18)
@in_float32
def group_normalization_18(
    x: Array, scale: Array, bias: Array, *, epsilon: float = 1e-5, num_groups: int
) -> Array:
    """Mean and variance of each group of channels; scale and bias have one value for each group."""
    grouped = x.reshape(x.shape[0], num_groups, -1)  # [N, G, elements]
    result, _, _ = standardized(grouped, (2,), epsilon)
    result *= scale[:, None]
    result += bias[:, None]
    return result.reshape(x.shape)


@operator("GroupNormalization", since=21)
@in_float32
def group_normalization(
    x: Array,
    scale: Array,
    bias: Array,
    *,
    epsilon: float = 1e-5,
    num_groups: int,
    stash_type: int = 1,
) -> Array:
    """Mean and variance of each group of channels; scale and bias have one value for each channel.

    Narrow floats are computed in float32 whatever stash_type says.
    """
    del stash_type
    grouped = x.reshape(x.shape[0], num_groups, -1)  # [N, G, elements]
    result = standardized(grouped, (2,), epsilon)[0].reshape(x.shape)
    result *= _by_channel(scale, x.ndim)
    result += _by_channel(bias, x.ndim)
    return result


@operator("LayerNormalization", since=17)
def layer_normalization(
    x: Array,
    scale: Array,
    b: Array | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> tuple[Array, Array, Array]:
    """Mean and variance over the axes from ``axis`` on."""
    result, mean, inverse = standardized(widened(x), last_axes(x, axis), epsilon)
    result *= scale
    if b is not None:
        result += b
    kind = ml_dtypes.bfloat16 if stash_type == BFLOAT16 else np.float32
    return result.astype(x.dtype, copy=False), mean.astype(kind), inverse.astype(kind)


@operator("RMSNormalization", since=23)
def rms_normalization(
    x: Array, scale: Array, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Array:
    """X / sqrt(mean(x^2) + epsilon) times scale, over the axes from ``axis`` on; scale's type.

    Narrow floats are computed in float32 whatever stash_type says.
    """
    del stash_type
    result, _ = divided_by_size(widened(x), last_axes(x, axis), epsilon)
    result *= scale
    return result.astype(scale.dtype, copy=False)


@operator("LRN", since=1)
@in_float32
def lrn(
    x: Array, *, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int
) -> Array:
    """X / (bias + alpha / size sum x^2)^beta, the sum over ``size`` channels around each one."""
    squares, kind = np.square(x), x.dtype.type
    sums, channels = np.zeros_like(x), x.shape[1]
    for shift in range(-((size - 1) // 2), size // 2 + 1):
        here = slice(max(-shift, 0), max(channels - shift, 0))
        there = slice(max(shift, 0), max(channels + shift, 0))
        sums[:, here] += squares[:, there]
    result: Array = x / (kind(bias) + kind(alpha / size) * sums) ** kind(beta)
    return result


@operator("LpNormalization", since=1)
@in_float32
def lp_normalization(input: Array, *, axis: int = -1, p: int = 2) -> Array:
    """Input / (sum |input|^p)^(1/p) along an axis; 0 where the norm is 0."""
    norm = np.linalg.norm(input, ord=p, axis=axis, keepdims=True)
    result: Array = input / np.where(norm == 0, norm.dtype.type(1), norm)
    return result


@operator("MeanVarianceNormalization", since=9)
@in_float32
def mean_variance_normalization(x: Array, *, axes: Axes = (0, 2, 3)) -> Array:
    """(x - mean) / (deviation + 1e-9), the body of ONNX's function."""
    centered = x - x.mean(axis=axes, keepdims=True)
    deviation = np.sqrt(np.square(centered).mean(axis=axes, keepdims=True))
    result: Array = centered / (deviation + x.dtype.type(1e-9))
    return result


def standardized(x: Array, axes: Axes, epsilon: float) -> tuple[Array, Array, Array]:
    """(x - mean) / sqrt(variance + epsilon), mean and 1 / sqrt(variance + epsilon).

    The first is a new array; the others keep the axes, with a length of 1.
    """
    mean = x.mean(axis=axes, keepdims=True)
    result, inverse = divided_by_size(x - mean, axes, epsilon)
    return result, mean, inverse


def divided_by_size(x: Array, axes: Axes, epsilon: float) -> tuple[Array, Array]:
    """X / sqrt(mean(x^2) + epsilon), a new array, and 1 / sqrt(mean(x^2) + epsilon)."""
    squares = np.square(x).mean(axis=axes, keepdims=True)
    inverse = 1 / np.sqrt(squares + x.dtype.type(epsilon))
    return x * inverse, inverse


def widened(x: Array) -> Array:
    """Narrow floats in float32, others as they are."""
    return x.astype(np.float32) if is_narrow(x) else x


def last_axes(x: Array, axis: int) -> Axes:
    """The axes from one on, which may count from the end."""
    return tuple(range(x.ndim))[axis:]


def _by_channel(values: Array, rank: int) -> Array:
    """[C] -> [C, 1, ...], to go with [N, C, ...]."""
    return values.reshape(-1, *(1,) * (rank - 2))
