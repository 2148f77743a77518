from __future__ import annotations

import numpy as np
import pytest

from slimctl.core.errors import SampleError, UnsupportedModelError
from slimctl.evaluate.metrics import open_metric

CLEAN = np.array([[3.0, -0.5, 2.0, 7.0]])
FOUND = np.array([[2.5, 0.0, 2.0, 8.0]], np.float32)


def measured(signals: np.ndarray, clean: np.ndarray, options: str = "") -> float:
    metric = open_metric("si-sdr" + options)
    metric.update({"y": np.asarray(signals, np.float32)}, clean, len(signals))
    return metric.value()


def test_the_published_example():
    """The example of torchmetrics' documentation of this ratio."""
    assert measured(FOUND, CLEAN) == pytest.approx(18.4030, abs=5e-5)


def test_by_hand():
    """The error is at a right angle to the signal: 10 log10(4 / 1)."""
    assert measured([[2, 1]], np.array([[1.0, 0]])) == pytest.approx(10 * np.log10(4))


def test_the_scale_does_not_matter():
    assert measured(FOUND * -3, CLEAN * 0.25) == pytest.approx(measured(FOUND, CLEAN), abs=1e-4)


def test_an_offset_matters_unless_it_is_taken_off():
    assert measured(FOUND + 5, CLEAN) < measured(FOUND, CLEAN) - 3
    centered = measured(FOUND, CLEAN, "?zero_mean=yes")
    assert measured(FOUND + 5, CLEAN - 9, "?zero_mean=yes") == pytest.approx(centered, abs=1e-4)


def test_mean_over_sources_and_samples():
    """[N, sources, T]: the mean of the decibels of all signals."""
    clean = np.array([[[1.0, 0], [0, 1]], [[1, 0], [1, 0]]])
    signals = np.array([[[2, 1], [1, 2]], [[1, 1], [1, 1]]])
    assert measured(signals, clean) == pytest.approx(10 * np.log10(4) / 2, abs=1e-6)


def test_ends_of_the_scale():
    assert measured(CLEAN, CLEAN) == 200.0
    assert measured([[0, 1]], np.array([[1.0, 0]])) == -200.0
    assert measured([[0, 0]], np.array([[1.0, 0]])) == -200.0


@pytest.mark.parametrize(
    ("labels", "found", "place"),
    [
        (None, "no labels", "samples 0 to 1"),
        (np.ones((2, 3)), r"float64 of shape \[2, 3\]", "samples 0 to 1"),
        (np.array([CLEAN[0], CLEAN[0] * 0]), "silence", "sample 1"),
        (np.array([CLEAN[0], CLEAN[0] * np.nan]), "not finite", "sample 1"),
    ],
)
def test_labels_that_do_not_do(labels, found, place):
    with pytest.raises(SampleError, match=found) as caught:
        measured(np.repeat(FOUND, 2, axis=0), labels)
    assert caught.value.sample == place


def test_signals_that_are_not_finite():
    with pytest.raises(UnsupportedModelError, match="output 'y' is not finite"):
        measured(FOUND * np.nan, CLEAN)
