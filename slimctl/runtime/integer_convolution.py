"""Exact convolutions of quantized tensors.

A convolution of centered codes in float32 is exact wherever its partial sums stay below 2^24, so
the float convolutions do the work, on parts of the input's channels where the sums are larger.
"""

from __future__ import annotations

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
from slimctl.runtime.convolve import convolve
from slimctl.runtime.device import Sums
from slimctl.runtime.engine import Engine, Summed
from slimctl.runtime.integer_matmul import are_mixed, stacked_sums
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


def convolve_codes(layer: Convolution, engine: Engine) -> Summed:
    """Sums [n, m, *counts].

    Args:
        layer: What is computed.
        engine: Keeps what depends on constants.
    """
    w, bound = layer.w, largest(layer.x, layer.x_zero)
    per_channel = layer.w_zero.reshape(-1, *(1,) * (w.ndim - 1))  # [m or 1, 1, ...]

    def prepare() -> tuple[Array, Reduction, int]:
        weights = centered(w, per_channel)
        return weights, *_channel_parts(weights, bound, constant=not w.flags.writeable)

    weights, reduction, step = engine.prepared("weights", (w, layer.w_zero), prepare)
    values = centered(layer.x, layer.x_zero.reshape(()))
    sums = _summed(values, weights, layer.windows, layer.group, step)

    x, x_zero = engine.seen(layer.x, layer.x_zero)

    def again(device: Sums) -> Array:
        return _device_sums(layer._replace(x=x, x_zero=x_zero), device)

    depthwise = w.shape[1] == 1 and w.shape[0] == layer.group
    return Summed(sums, reduction.bound, again, are_mixed(x, w), depthwise)


def _channel_parts(weights: Array, bound: int, *, constant: bool) -> tuple[Reduction, int]:
    """How many input channels of each group may be summed at a time."""
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
    return reduction, max(min(part.stop - part.start for part in inner), 1)


def largest_magnitude(weights: Array) -> int:
    """The largest magnitude that occurs."""
    return int(np.abs(weights).max(initial=0.0))


def _summed(x: Array, w: Array, windows: Windows, group: int, step: int) -> Accumulators:
    channels = w.shape[1]
    if step >= channels:
        return convolve(x, w, windows, groups=group)
    n, sizes = x.shape[0], x.shape[2:]
    grouped = x.reshape(n, group, channels, *sizes)
    total: Any = None
    for start in range(0, channels, step):
        part = slice(start, min(start + step, channels))
        inputs = grouped[:, :, part].reshape(n, -1, *sizes)
        found = convolve(inputs, np.ascontiguousarray(w[:, part]), windows, groups=group)
        total = found.astype(np.float64) if total is None else np.add(total, found, out=total)
    return np.asarray(total)


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
