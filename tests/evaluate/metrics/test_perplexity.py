from __future__ import annotations

import math

import numpy as np
import pytest

from slimctl.core.errors import SampleError, UnsupportedModelError
from slimctl.evaluate.metrics import open_metric, perplexity


def measured(logits: np.ndarray, labels: np.ndarray) -> float:
    metric = open_metric("perplexity")
    metric.update({"y": logits.astype(np.float32)}, labels, len(logits))
    return metric.value()


def test_of_a_guess_it_is_the_size_of_the_vocabulary():
    assert measured(np.full((2, 3, 11), 4.0), np.zeros((2, 3), np.int64)) == pytest.approx(11)


def test_by_hand():
    """Probabilities 1/2, 1/8 and 1/4: the inverse of their geometric mean is 4."""
    chances = np.array([[[0.5, 0.5, 0], [0.125, 0.5, 0.375], [0.25, 0.25, 0.5]]])
    with np.errstate(divide="ignore"):
        logits = np.log(chances) + 30  # a constant changes nothing
    assert measured(logits, np.array([[0, 0, 1]])) == pytest.approx(4, rel=1e-5)
    assert measured(logits, np.array([[0, -100, -100]])) == pytest.approx(2, rel=1e-5)
    assert not open_metric("perplexity").higher_is_better


def test_tokens_weigh_and_not_samples():
    """2 tokens of probability 1/2 and one of 1/8 in another sample."""
    logits = np.log([[[0.5, 0.5], [0.5, 0.5]], [[0.125, 0.875], [0.5, 0.5]]])
    labels = np.array([[0, 1], [0, -100]])
    assert measured(logits, labels) == pytest.approx((2 * 2 * 8) ** (1 / 3), rel=1e-6)


def test_one_token_per_sample():
    assert measured(np.log([[0.5, 0.5], [0.125, 0.875]]), np.array([0, 0])) == pytest.approx(4)


def test_blocks_of_rows(monkeypatch):
    generator = np.random.default_rng(0)
    logits, labels = generator.normal(size=(2, 9, 5)) * 3, generator.integers(0, 5, (2, 9))
    whole = measured(logits, labels)
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    own = np.take_along_axis(chances, labels[..., None], -1)
    assert whole == pytest.approx(math.exp(-np.log(own).mean()), rel=1e-5)
    monkeypatch.setattr(perplexity, "_BLOCK", 12)
    assert measured(logits, labels) == pytest.approx(whole, rel=1e-12)


def test_an_impossible_token_stays_finite():
    logits = np.array([[[0.0, -np.inf]]])
    assert measured(logits, np.array([[1]])) == pytest.approx(math.exp(700))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_without_a_meaning(value):
    logits = np.zeros((2, 3, 4), np.float32)
    logits[1, 0, 0] = value
    with pytest.raises(UnsupportedModelError, match="perplexity cannot be computed") as caught:
        measured(logits, np.zeros((2, 3), np.int64))
    assert caught.value.where == "sample 1"


def test_tokens_outside_the_vocabulary():
    with pytest.raises(SampleError, match="numbers from 0 to 4, wanted class numbers 0 to 3"):
        measured(np.zeros((1, 2, 4)), np.array([[0, 4]]))
