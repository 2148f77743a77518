"""Exact convolutions of quantized tensors.

A convolution of codes in float32 is exact wherever its partial sums stay below 2^24, so the float
convolutions do the work, on parts of the input's channels where the sums are larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slimctl.numerics.integer import (
    Accumulators,
    Reduction,
    centered,
    exact_reduction,
    largest,
    uniform_reduction,
)
from slimctl.runtime.channels_last import (
    depthwise_blocks,
    depthwise_weights,
    is_channels_last,
    pointwise_blocks,
    suits_depthwise,
)
from slimctl.runtime.convolve import Block, convolve, convolved_blocks
from slimctl.runtime.device import Sums
from slimctl.runtime.engine import Engine
from slimctl.runtime.integer_matmul import are_mixed, stacked_sums
from slimctl.runtime.sums import Summed, array_blocks
from slimctl.runtime.windows import Windows, columns, padded

Array = NDArray[Any]


class Convolution(NamedTuple):
    """A convolution of codes; its padding is the zero point.

    Attributes:
        x: Codes [n, c, *sizes].
        x_zero: A scalar.
        w: Codes [m, c / group, *kernel].
        w_zero: A scalar, or one per output channel.
        windows: Of the kernel on the input.
        group: Number of groups.
    """

    x: Array
    x_zero: Array
    w: Array
    w_zero: Array
    windows: Windows
    group: int


class _Parts(NamedTuple):
    """How many input channels of each group may be summed at a time, and how large sums become."""

    reduction: Reduction
    step: int


class _Weights(NamedTuple):
    """What is prepared once.

    Attributes:
        values: Centered weights [m, c / group, *kernel].
        sums: Of the weights of each output, [m].
        plain: Sums of products with codes from which nothing is subtracted.
        centered: Sums of products with centered codes.
    """

    values: Array
    sums: Array
    plain: _Parts
    centered: _Parts


def convolve_codes(layer: Convolution, engine: Engine) -> Summed:
    """Sums [n, m, *counts].

    The zero point of x is subtracted from the sums: ``sum((x - z) w) = sum(x w) - z sum(w)``.

    Args:
        layer: What is computed.
        engine: Keeps what depends on constants.
    """
    x, x_zero, w, w_zero, windows, group = layer

    def prepare() -> _Weights:
        values = centered(w, w_zero.reshape(-1, *(1,) * (w.ndim - 1)))  # [m or 1, 1, ...]
        sums = values.reshape(len(w), -1).sum(axis=1, dtype=np.float64)
        bounds = largest(x), largest(x, x_zero)
        parts = [_channel_parts(values, bound, constant=not w.flags.writeable) for bound in bounds]
        return _Weights(values, sums, *parts)

    weights = engine.prepared("weights", (w, w_zero, x_zero), prepare)
    again_x, again_zero = engine.seen(x, x_zero)

    def again(device: Sums) -> Array:
        return _device_sums(layer._replace(x=again_x, x_zero=again_zero), device)

    shape = (len(x), len(w), *windows.counts)
    mixed, depthwise = are_mixed(again_x, w), w.shape[1] == 1 and w.shape[0] == group
    zero = x_zero.reshape(-1)[0]
    if weights.plain.step < w.shape[1]:
        sums = _summed(centered(x, zero), weights, windows, group)
        bound = weights.centered.reduction.bound
        return Summed(shape, lambda: array_blocks(sums), bound, again, mixed, depthwise)

    def blocks() -> Iterable[Block]:
        return convolved_blocks(x, weights.values, windows, groups=group, fill=zero)

    bound = weights.plain.reduction.bound
    kept = _channels_last_blocks(layer, weights.values, engine)
    summed = Summed(
        shape, kept or blocks, bound, again, mixed, depthwise, channels_last=kept is not None
    )
    if not zero:
        return summed

    def offset() -> Array:
        return summed.per_channel(weights.sums * -float(zero))

    sources = (w, w_zero, x_zero, windows)
    return summed._replace(offset=engine.prepared("offset", sources, offset))


def _channels_last_blocks(
    layer: Convolution, weights: Array, engine: Engine
) -> Callable[[], Iterable[Block]] | None:
    """Sums that have their channels side by side; None where that does not pay.

    A depthwise convolution is much faster then, whatever order its input has. Products of single
    elements leave the order as it is.

    Args:
        layer: What is computed.
        weights: Centered.
        engine: Keeps what depends on constants.
    """
    x, w, windows = layer.x, layer.w, layer.windows
    if suits_depthwise(w, windows, layer.group):
        sources = (w, layer.w_zero, windows)
        ready = engine.prepared("taps", sources, lambda: depthwise_weights(weights, windows))
        return lambda: depthwise_blocks(x, ready, windows, layer.x_zero.reshape(-1)[0])
    if layer.group == 1 and windows.is_pointwise and is_channels_last(x):
        return lambda: pointwise_blocks(x, weights.reshape(len(w), -1).T)
    return None


def _channel_parts(weights: Array, bound: int, *, constant: bool) -> _Parts:
    channels = weights.shape[1]
    flat = weights.reshape(weights.shape[0], channels, -1)  # [m, c / group, taps]
    if constant:
        magnitudes = np.abs(flat).sum(axis=2)  # [m, c / group]
        reduction = exact_reduction(magnitudes, bound)
    else:
        terms = largest_magnitude(weights) * flat.shape[2]
        reduction = uniform_reduction(channels, bound, terms)
    # All parts get the width of the narrowest: the last may be shorter, which only makes it safer.
    inner = reduction.parts[:-1] or reduction.parts
    return _Parts(reduction, max(min(part.stop - part.start for part in inner), 1))


def largest_magnitude(weights: Array) -> int:
    """The largest magnitude that occurs."""
    return int(np.abs(weights).max(initial=0.0))


def _summed(x: Array, weights: _Weights, windows: Windows, group: int) -> Accumulators:
    """Sums of products with centered codes, some channels at a time."""
    w, step = weights.values, weights.centered.step
    channels = w.shape[1]
    n, sizes = x.shape[0], x.shape[2:]
    grouped = x.reshape(n, group, channels, *sizes)
    total = np.zeros((n, len(w), *windows.counts))
    for start in range(0, channels, step):
        part = slice(start, min(start + step, channels))
        inputs = grouped[:, :, part].reshape(n, -1, *sizes)
        total += convolve(inputs, np.ascontiguousarray(w[:, part]), windows, groups=group)
    return total


def _device_sums(layer: Convolution, sums: Sums) -> Array:
    """Group by group as a matrix product, in onnxruntime's order: kernel taps, then channels."""
    x, _, w, _, windows, group = layer
    n, m, channels = x.shape[0], w.shape[0], w.shape[1]
    taps = int(np.prod(windows.kernel))
    wide = columns(padded(x, windows, layer.x_zero.reshape(-1)[0]), windows)  # [n, c taps, p]
    points = wide.shape[-1]
    split = wide.reshape(n, group, channels, taps, points).transpose(1, 0, 4, 3, 2)
    rows = split.reshape(group, n * points, taps * channels)
    kernels = w.reshape(group, m // group, channels, taps).transpose(0, 3, 2, 1)
    weights = kernels.reshape(group, taps * channels, m // group)
    zeros = np.broadcast_to(layer.w_zero.reshape(-1), (m,)).reshape(group, -1)
    found = [stacked_sums(rows[g], weights[g], layer.x_zero, zeros[g], sums) for g in range(group)]
    stacked = np.stack(found).reshape(group, n, points, -1)  # each was [n p, m / group]
    return stacked.transpose(1, 0, 3, 2).reshape(n, m, *windows.counts)
