from __future__ import annotations

import math

import numpy as np
import pytest

from slimctl.evaluate import resampling
from slimctl.evaluate.resampling import bootstrap, bootstrap_p, bounds, draws, mcnemar_p


def mean_of(values: np.ndarray):
    return lambda weights: weights @ values / len(values)


def test_draws_are_seeded_and_complete():
    first, again, other = (np.concatenate(list(draws(7, 50, seed))) for seed in (1, 1, 2))
    assert first.shape == (50, 7)
    assert (first.sum(axis=1) == 7).all() and (first >= 0).all()
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_draws_in_blocks(monkeypatch):
    """Counts of all rows, however many of them are made at a time."""
    monkeypatch.setattr(resampling, "_CELLS", 20)
    blocks = list(draws(7, 5, 1))
    assert [len(block) for block in blocks] == [2, 2, 1]
    assert all((block.sum(axis=1) == 7).all() for block in blocks)


def test_the_spread_is_that_of_the_mean():
    """The standard error of a mean is sigma / sqrt(n)."""
    values = np.random.default_rng(0).normal(size=400)
    found = bootstrap(mean_of(values), 400, resamples=4000, seed=3)
    assert found.mean() == pytest.approx(values.mean(), abs=0.005)
    assert found.std() == pytest.approx(values.std() / 20, rel=0.05)
    low, high = bounds(found)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.08)


@pytest.mark.parametrize("kind", ["hits", "skewed", "ratio"])
def test_the_interval_covers_the_true_value(kind):
    """In about 95 % of simulated data sets of 120 samples."""
    generator = np.random.default_rng(42)
    held, trials, count = 0, 400, 120
    for trial in range(trials):
        if kind == "hits":
            truth, values = 0.8, (generator.random(count) < 0.8).astype(float)
            value = mean_of(values)
        elif kind == "skewed":
            truth, values = 1.0, generator.exponential(size=count)
            value = mean_of(values)
        else:  # a rate of words of which samples have different numbers
            sizes = generator.integers(1, 20, count).astype(float)
            errors = generator.binomial(sizes.astype(int), 0.1).astype(float)
            truth = 0.1

            def value(weights, errors=errors, sizes=sizes):
                return weights @ errors / (weights @ sizes)

        low, high = bounds(bootstrap(value, count, resamples=400, seed=trial))
        held += low <= truth <= high
    assert 0.90 <= held / trials <= 0.99


def test_p_values_of_differences():
    assert bootstrap_p(np.zeros(99)) == 1.0
    assert bootstrap_p(np.ones(99)) == pytest.approx(2 / 100)
    assert bootstrap_p(np.array([-1.0] * 10 + [1.0] * 89)) == pytest.approx(2 * 11 / 100)


def test_false_alarms_are_rare():
    """Two models that are equally good: a p-value below 5 % in about 5 % of the simulations."""
    generator = np.random.default_rng(1)
    small = {"bootstrap": 0, "mcnemar": 0}
    for trial in range(300):
        one, other = generator.random((2, 150)) < 0.7
        differences = one.astype(float) - other
        found = bootstrap(mean_of(differences), 150, resamples=400, seed=trial)
        small["bootstrap"] += bootstrap_p(found) < 0.05
        small["mcnemar"] += mcnemar_p(one, other) < 0.05
    assert 0.01 <= small["bootstrap"] / 300 <= 0.10
    assert small["mcnemar"] / 300 <= 0.06  # exact tests stay below


@pytest.mark.parametrize(
    ("only_one", "only_other", "expected"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (6, 0, 2 / 64),
        (5, 15, 43400 / 2**20),  # sum of binomial(20, 0..5) is 21700
        (10, 10, 1.0),
        (0, 2000, 0.0),
    ],
)
def test_mcnemar_by_hand(only_one, only_other, expected):
    one = np.array([True] * only_one + [False] * only_other + [True] * 7 + [False] * 3)
    other = np.array([False] * only_one + [True] * only_other + [True] * 7 + [False] * 3)
    assert mcnemar_p(one, other) == pytest.approx(expected, abs=1e-12)
    assert mcnemar_p(other, one) == mcnemar_p(one, other)


def test_mcnemar_of_many_samples():
    """Close to the normal approximation with continuity correction."""
    one = np.arange(20_000) < 9_850
    z = (abs(9_850 - 10_150) - 1) / math.sqrt(20_000)
    assert mcnemar_p(one, ~one) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=1e-3)
