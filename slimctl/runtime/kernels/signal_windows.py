"""Windows of signal processing, and the matrix from frequencies to mel bands."""

from __future__ import annotations

import numpy as np

from slimctl.runtime.casting import converted, element_type
from slimctl.runtime.registry import Array, operator

_FLOAT = 1  # of ONNX's DataType


@operator("HannWindow", since=17)
def hann_window(size: Array, *, output_datatype: int = _FLOAT, periodic: int = 1) -> Array:
    """1/2 - 1/2 cos(2π n / N)"""
    return _cosines(size, output_datatype, periodic, (0.5, -0.5))


@operator("HammingWindow", since=17)
def hamming_window(size: Array, *, output_datatype: int = _FLOAT, periodic: int = 1) -> Array:
    """25/46 - 21/46 cos(2π n / N)"""
    return _cosines(size, output_datatype, periodic, (25 / 46, -21 / 46))


@operator("BlackmanWindow", since=17)
def blackman_window(size: Array, *, output_datatype: int = _FLOAT, periodic: int = 1) -> Array:
    """0.42 - 0.5 cos(2π n / N) + 0.08 cos(4π n / N)"""
    return _cosines(size, output_datatype, periodic, (0.42, -0.5, 0.08))


def _cosines(size: Array, kind: int, periodic: int, weights: tuple[float, ...]) -> Array:
    """Σ weight[k] cos(2π k n / N); N is the size, or one less where the window is symmetric.

    The symmetric window of one point is 0 / 0, hence NaN, as in onnxruntime.
    """
    count = int(size.item())
    period = np.float64(count if periodic else count - 1)
    angle = 2 * np.pi * np.arange(count) / period
    window = sum(weight * np.cos(k * angle) for k, weight in enumerate(weights))
    return converted(np.asarray(window), element_type(kind))


@operator("MelWeightMatrix", since=17)
def mel_weight_matrix(
    num_mel_bins: Array,
    dft_length: Array,
    sample_rate: Array,
    lower_edge_hertz: Array,
    upper_edge_hertz: Array,
    *,
    output_datatype: int = _FLOAT,
) -> Array:
    """Triangles over the frequencies of a spectrum, a column for each mel band

    The bands' edges are evenly spaced on the mel scale, mel(f) = 2595 log10(1 + f / 700), and
    rounded down to a frequency of the spectrum.
    """
    bands, length = int(num_mel_bins.item()), int(dft_length.item())
    low, high = (_mel(float(edge.item())) for edge in (lower_edge_hertz, upper_edge_hertz))
    # ONNX divides the range by bands + 2, although there are bands + 1 steps between the edges
    edges = _hertz(low + np.arange(bands + 2) * (high - low) / (bands + 2))
    bins = (length + 1) * edges // float(sample_rate.item())  # [bands + 2]
    weights = _triangles(np.arange(length // 2 + 1)[:, None], bins[:-2], bins[1:-1], bins[2:])
    return converted(weights, element_type(output_datatype))


def _triangles(x: Array, left: Array, top: Array, right: Array) -> Array:
    """1 at the top, falling to 0 at both sides, one of which may be the top itself."""
    rising = np.where(left < top, (x - left) / (top - left), 1.0)
    falling = np.where(top < right, (right - x) / (right - top), 1.0)
    sides = np.where(x <= top, np.where(x >= left, rising, 0), np.where(x < right, falling, 0))
    return np.asarray(sides)  # [frequencies, bands]


def _mel(hertz: float) -> float:
    return float(2595 * np.log10(1 + hertz / 700))


def _hertz(mel: Array) -> Array:
    return np.asarray(700 * (10 ** (mel / 2595) - 1))
