from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.evaluate.code_histogram import BINS, SHOWN, count_values
from slimctl.evaluate.layers import LayerError, layer_errors
from slimctl.graph._normalize import normalize
from slimctl.graph.edit import clone_model
from slimctl.passes.quantize_static import QuantizeStatic

LOWER, UPPER = 16, 48
"""The bins that begin at the thresholds: a quarter and three quarters of -0.5 to 1.5."""


@pytest.mark.parametrize(
    ("step", "place"),
    [
        (-0.49, LOWER),  # rounds to code 0
        (-0.51, LOWER - 1),  # is cut off
        (0.0, LOWER),
        (7.4, LOWER),  # 256 codes in 32 bins: 8 each
        (7.6, LOWER + 1),
        (255.0, UPPER - 1),
        (255.4, UPPER - 1),
        (255.6, UPPER),
        (-128.4, 0),
        (-1e30, 0),
        (-np.inf, 0),
        (383.4, BINS - 1),
        (1e30, BINS - 1),
        (np.inf, BINS - 1),
    ],
)
def test_where_values_are_counted(step: float, place: int) -> None:
    counts = count_values(np.array([[step]]), 0, 255)
    assert np.flatnonzero(counts).tolist() == [place]


def test_nan_is_not_counted() -> None:
    counts = count_values(np.array([np.nan, 5.0, np.nan], np.float32), 0, 255)
    assert counts.sum() == 1


@pytest.mark.parametrize(("lowest", "highest"), [(0, 255), (-128, 127), (-32768, 32767)])
def test_the_range_of_the_type_lies_between_the_thresholds(lowest: int, highest: int) -> None:
    codes = np.arange(lowest, highest + 1)
    counts = count_values(codes.astype(np.float64), lowest, highest)
    expected = np.zeros(BINS, np.int64)
    expected[LOWER:UPPER] = (highest - lowest + 1) // (UPPER - LOWER)
    np.testing.assert_array_equal(counts, expected)


def test_counts_of_parts_add_up_to_those_of_the_whole() -> None:
    values = np.random.default_rng(0).normal(100, 150, (4, 3, 50))
    whole = count_values(values, 0, 255)
    assert whole.sum() == values.size
    np.testing.assert_array_equal(whole, sum(count_values(part, 0, 255) for part in values))


@pytest.fixture
def layers(chain: Callable[..., ir.Model], plain_context: Callable[..., Any]) -> Any:
    """The layers of a quantized chain, and the inputs that they were compared on."""
    original = chain()
    normalize(original)
    random = np.random.default_rng(3)
    known = [{"x": random.normal(size=(4, 8)).astype(np.float32)} for _ in range(8)]
    quantized = clone_model(original)
    options = QuantizeStatic(calibration="minmax", min_sqnr=0)
    options.apply(quantized, plain_context(known, original))
    # Twice as wide as in calibration, so that something lies beyond the thresholds.
    wide = [{"x": (2 * random.normal(size=(4, 8))).astype(np.float32)} for _ in range(3)]
    return layer_errors(quantized, original, wide), wide


def test_layers_have_a_histogram_of_the_values_of_all_samples(layers: Any) -> None:
    found, samples = layers
    first: LayerError = next(layer for layer in found if layer.tensor == "x")
    values = np.concatenate([feeds["x"].reshape(-1) for feeds in samples]).astype(np.float64)
    assert first.low is not None and first.high is not None
    scale = (first.high - first.low) / 255
    width = 256 * scale
    edges = first.low - scale / 2 + np.linspace(*SHOWN, BINS + 1) * width
    expected, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    np.testing.assert_array_equal(first.histogram, expected)


def test_what_lies_beyond_the_thresholds_is_what_is_clipped(layers: Any) -> None:
    found, samples = layers
    clipping = [layer for layer in found if layer.clipped]
    assert clipping
    for layer in clipping:
        counts = np.array(layer.histogram)
        outside = counts[:LOWER].sum() + counts[UPPER:].sum()
        assert outside == pytest.approx(layer.clipped * counts.sum())
        assert counts.sum() % (len(samples) * 4) == 0
