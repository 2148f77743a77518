from __future__ import annotations

import numpy as np
import pytest

from slimctl.core.errors import DataError
from slimctl.evaluate.accuracy import Score
from slimctl.evaluate.metrics import open_metric
from slimctl.evaluate.significance import interval, paired


def score(name: str, outputs: np.ndarray, labels: np.ndarray, size: int = 1) -> Score:
    metric = open_metric(name)
    for at in range(0, len(outputs), size):
        part = slice(at, at + size)
        metric.update({"y": outputs[part]}, labels[part], len(outputs[part]))
    return Score(name, metric.value(), len(outputs), metric.higher_is_better, metric)


def hits(*which: int) -> Score:
    """100 samples of which some are right."""
    right = np.isin(np.arange(100), which)
    return score("top1", np.stack([right, ~right], 1).astype(np.float32), np.zeros(100, int), 7)


def test_an_interval_holds_the_value():
    found = interval(hits(*range(70)), seed=4)
    assert found is not None
    assert 0.58 < found.low < 0.65 and 0.75 < found.high < 0.82  # 0.7 +- 0.09
    assert (found.confidence, found.resamples, found.unit) == (0.95, 2000, "samples")
    assert interval(hits(*range(70)), seed=4) == found


def test_one_record_tells_nothing():
    one = score("top1", np.eye(2, dtype=np.float32)[:1], np.array([0]))
    assert interval(one) is None
    found = paired(one, one)
    assert (found.low, found.p_value, found.within_noise) == (None, None, None)
    assert found.verdict == "unknown"


def test_a_drop_within_noise():
    """82 hits against 80, 4 of the samples lost and 2 gained: p = 2 (1 + 6 + 15) / 64."""
    found = paired(hits(*range(82)), hits(*range(4, 84)))
    assert found.drop == pytest.approx(0.02)
    assert found.low is not None and found.high is not None
    assert found.low < 0 < found.high
    assert found.p_value == pytest.approx(44 / 64)
    assert (found.test, found.verdict) == ("exact McNemar test", "within noise")


def test_a_drop_that_is_real():
    """10 samples lost, none gained: p = 2 / 2^10."""
    found = paired(hits(*range(82)), hits(*range(72)))
    assert found.p_value == pytest.approx(2 / 1024)
    assert found.low is not None and found.low > 0
    assert (found.within_noise, found.verdict) == (False, "significant")
    back = paired(hits(*range(72)), hits(*range(82)))
    assert back.drop == pytest.approx(-0.1)
    assert back.verdict == "significant"


def test_the_same_model_twice():
    found = paired(hits(*range(50)), hits(*range(50)))
    assert (found.drop, found.low, found.high, found.p_value) == (0, 0, 0, 1)
    assert found.within_noise


def test_pairing_sees_what_two_intervals_do_not():
    """Samples differ by far more than models do: each model alone has a wide interval."""
    generator = np.random.default_rng(3)
    hard = generator.normal(size=(60, 1)) * 3
    logits = np.concatenate([hard, np.zeros((60, 1))], axis=1).astype(np.float32)
    worse = logits - np.array([[0.3, 0]], np.float32)
    labels = np.zeros(60, int)
    first, second = score("perplexity", logits, labels), score("perplexity", worse, labels)
    one, other = interval(first), interval(second)
    assert one is not None and other is not None and one.high > other.low
    found = paired(first, second)
    assert found.drop == pytest.approx(second.value - first.value)  # less is better
    assert found.drop > 0 and found.low is not None and found.low > 0
    assert (found.test, found.verdict) == ("paired bootstrap", "significant")


def test_scores_that_do_not_belong_together():
    with pytest.raises(DataError, match="top1 of 100 records cannot be paired with f1 of 3"):
        paired(hits(1), score("f1", np.eye(3, dtype=np.float32), np.arange(3)))
    with pytest.raises(DataError, match="cannot be paired"):
        paired(hits(1), Score("top1", 0.5, 100, True))
