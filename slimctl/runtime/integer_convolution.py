"""Exact convolutions of quantized tensors.

A convolution of codes in float32 is exact wherever its partial sums stay below 2^24, so the float
convolutions do the work, on parts of the input's channels where the sums are larger.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slimctl.numerics.integer import (
    EXACT,
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
        bias: int32 [m], which is added to the sums; None for nothing.
    """

    x: Array
    x_zero: Array
    w: Array
    w_zero: Array
    windows: Windows
    group: int
    bias: Array | None = None


class _Parts(NamedTuple):
    """How many input channels of each group may be summed at a time, and how large sums become."""

    reduction: Reduction
    step: int


class _Weights(NamedTuple):
    """What is prepared once.

    Attributes:
        values: Centered weights [m, c / group, *kernel].
        offset: Of the sums of products with codes from which nothing is subtracted, [m].
        plain: Sums of those products.
        centered: Sums of products with centered codes.
        matrix: For windows of one element [c, m], of which the values are a view. A further row
            holds the offset and the bias, if float32 is exact for these sums as well.
    """

    values: Array
    offset: Array
    plain: _Parts
    centered: _Parts
    matrix: Array | None = None


def convolve_codes(layer: Convolution, engine: Engine) -> Summed:
    """Sums [n, m, *counts].

    The zero point of x is subtracted from the sums: ``sum((x - z) w) = sum(x w) - z sum(w)``.

    Args:
        layer: What is computed.
        engine: Keeps what depends on constants.
    """
    x, x_zero, w, w_zero, windows, group, bias = layer
    sources = (w, w_zero, x_zero, bias)
    weights = engine.prepared("weights", sources, lambda: _weights(layer))
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
    summed = Summed(shape, blocks, bound, again, mixed, depthwise)
    summed = _with_channels_last(summed, layer, weights, engine)
    if not zero:
        return summed
    placed = (*sources, windows)
    offset = engine.prepared("offset", placed, lambda: summed.per_channel(weights.offset))
    return summed._replace(offset=offset)


def _weights(layer: Convolution) -> _Weights:
    x, x_zero, w, w_zero = layer[:4]
    values = centered(w, w_zero.reshape(-1, *(1,) * (w.ndim - 1)))  # [m or 1, 1, ...]
    sums = values.reshape(len(w), -1).sum(axis=1, dtype=np.float64)
    plain, shifted = (
        _channel_parts(values, bound, constant=not w.flags.writeable)
        for bound in (largest(x), largest(x, x_zero))
    )
    weights = _Weights(values, sums * -float(x_zero.reshape(-1)[0]), plain, shifted)
    single = layer.group == 1 and prod(w.shape[2:]) == 1
    return _as_matrix(weights, layer.bias) if single else weights


def _as_matrix(weights: _Weights, bias: Array | None) -> _Weights:
    """Weights of single elements in the order of a matrix; a sum may have one term more then.

    The term is the offset and the bias. It saves a pass over the sums, and is as exact as they are
    while float32 holds what all of them come to.
    """
    added = weights.offset if bias is None else weights.offset + bias.reshape(-1)
    outputs, channels = weights.values.shape[:2]
    bound = weights.plain.reduction.bound + float(np.abs(added).max(initial=0.0))
    matrix = np.empty((channels + (bound < EXACT), outputs), np.float32)
    matrix[:channels] = weights.values.reshape(outputs, channels).T
    matrix[channels:] = added
    values = matrix[:channels].T.reshape(weights.values.shape)
    return weights._replace(values=values, matrix=matrix)


def _with_channels_last(
    summed: Summed, layer: Convolution, weights: _Weights, engine: Engine
) -> Summed:
    """Sums that have their channels side by side; the same as they are where that does not pay.

    A depthwise convolution is much faster then, whatever order its input has. Products of single
    elements leave the order as it is.
    """
    x, w, windows = layer.x, layer.w, layer.windows
    if suits_depthwise(w, windows, layer.group):
        sources, zero = (w, layer.w_zero, windows), layer.x_zero.reshape(-1)[0]
        taps = engine.prepared("taps", sources, lambda: depthwise_weights(weights.values, windows))
        blocks = partial(depthwise_blocks, x, taps, windows, zero)
        return summed._replace(blocks=blocks, channels_last=True)
    matrix = weights.matrix
    if matrix is None or not windows.is_pointwise or not is_channels_last(x):
        return summed
    blocks = partial(pointwise_blocks, x, matrix[: w.shape[1]])
    complete = partial(pointwise_blocks, x, matrix) if len(matrix) > w.shape[1] else None
    return summed._replace(blocks=blocks, channels_last=True, complete=complete)


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
    x, _, w, _, windows, group, _ = layer
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
