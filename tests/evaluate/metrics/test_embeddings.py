from __future__ import annotations

import numpy as np
import pytest

from slimctl.core.errors import UnsupportedModelError
from slimctl.evaluate.metrics import open_metric
from slimctl.evaluate.metrics.embeddings import Ranks, correlation


def measured(text: str, own: np.ndarray, reference: np.ndarray) -> float:
    metric = open_metric(text)
    for part in (slice(0, 2), slice(2, None)):
        metric.update({"e": own[part]}, None, len(own[part]), reference={"e": reference[part]})
    return metric.value()


def test_cosine_by_hand():
    own = np.array([[1, 0], [1, 1], [0, 0], [0, 0]], np.float32)
    reference = np.array([[2, 0], [1, 0], [1, 0], [0, 0]], np.float32)
    assert measured("cosine", own, reference) == pytest.approx((1 + np.sqrt(0.5) + 0 + 1) / 4)
    assert measured("cosine", -own, own) == pytest.approx((-1 - 1 + 1 + 1) / 4)


def test_spearman_of_values():
    """The example of scipy's documentation of spearmanr, with a tie."""
    one, other = np.array([1.0, 2, 3, 4, 5]), np.array([5.0, 6, 7, 8, 7])
    weights = np.ones(5)
    ranks = Ranks(one)(weights), Ranks(other)(weights)
    assert ranks[1].tolist() == [1, 2, 3.5, 5, 3.5]
    assert correlation(*ranks, weights) == pytest.approx(0.8207826816681233, rel=1e-12)


def test_weights_are_copies():
    values, weights = np.array([3.0, 1, 2, 2]), np.array([2.0, 0, 1, 3])
    copies = np.repeat(values, weights.astype(int))
    expected = Ranks(copies)(np.ones(len(copies)))
    np.testing.assert_allclose(np.repeat(Ranks(values)(weights), weights.astype(int)), expected)


def at(*degrees: float) -> np.ndarray:
    """Vectors in a plane."""
    return np.stack([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))], 1).astype(
        np.float32
    )


def test_spearman_by_hand():
    """Angles of the pairs 01 02 12: 10, 50, 40 and 30, 40, 10 degrees; similarity falls with them.

    Ranks 3 1 2 and 2 1 3: differences 1 0 1, so 1 - 6 * 2 / (3 * 8) = 0.5.
    """
    assert measured("spearman", at(0, 10, 50), at(0, 30, 40)) == pytest.approx(0.5)
    assert measured("spearman", at(0, 10, 50), at(0, 30, 40) * 7) == pytest.approx(0.5)
    assert measured("spearman", at(0, 10, 50), at(90, 100, 140)) == pytest.approx(1)
    assert measured("spearman", at(0, 10, 50), at(0, 50, 10)) == pytest.approx(-1)


def test_spearman_of_constant_similarities():
    same = at(20, 20, 20)
    assert measured("spearman", same, same) == 1.0
    assert measured("spearman", same, at(0, 10, 50)) == 0.0


def test_spearman_takes_the_first_samples():
    own, reference = at(0, 10, 50, 3, 90), at(0, 30, 40, 77, 5)
    metric = open_metric("spearman?samples=3")
    for part in (slice(0, 2), slice(2, None)):
        metric.update({"e": own[part]}, None, len(own[part]), reference={"e": reference[part]})
    assert metric.value() == pytest.approx(0.5)
    assert [record is None for record in metric.records] == [False, False, False, True, True]


def test_copies_of_a_sample_are_no_pairs():
    """Samples 0 0 1 2: the pairs 01 and 02 count twice, 12 once, 00 not at all."""
    metric = open_metric("spearman")
    metric.update({"e": at(0, 10, 50)}, None, 3, reference={"e": at(0, 30, 40)})
    found = metric.weighted()(np.array([[2.0, 1, 1]]))[0]
    one, other = np.array([3, 3, 1, 1, 2.0]), np.array([2, 2, 1, 1, 3.0])
    ones = np.ones(5)
    assert found == pytest.approx(correlation(Ranks(one)(ones), Ranks(other)(ones), ones))


@pytest.mark.parametrize("name", ["cosine", "spearman"])
def test_models_that_do_not_do(name):
    metric = open_metric(name)
    assert metric.needs == "reference"
    with pytest.raises(UnsupportedModelError, match=r"\[3, 2\].*\[3, 1, 3\]|\[3, 2\].*\[3, 3\]"):
        metric.update({"e": at(1, 2, 3)}, None, 3, reference={"e": np.ones((3, 1, 3))})
    broken = at(1, 2, 3)
    broken[1, 0] = np.nan
    with pytest.raises(UnsupportedModelError, match="output 'e' is not finite") as caught:
        metric.update({"e": broken}, None, 3, reference={"e": at(1, 2, 3)})
    assert caught.value.where == "sample 1"
