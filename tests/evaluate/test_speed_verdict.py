"""Whether a difference of two models is more than the machine's noise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slimctl.evaluate.benchmark import (
    LEAST_ROUNDS,
    SAME,
    BenchResult,
    Outcome,
    judge_speedup,
    self_difference,
    speedup,
)


def result(latencies) -> BenchResult:
    values = np.asarray(latencies, np.float64)
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return BenchResult(
        p50, p90, p99, values.mean(), 0.0, 0.0, values.size, len(values), None, values
    )


def noisy(level: float, spread: float, *, seed: int, rounds: int = 30) -> BenchResult:
    """Each round has a level of its own, as on a machine that others use too."""
    generator = np.random.default_rng(seed)
    rounds_at = level * np.exp(spread * generator.normal(size=(rounds, 1)))
    return result(rounds_at * (1 + 0.01 * generator.random((rounds, 8))))


@pytest.mark.parametrize(
    ("base", "other", "bound", "outcome"),
    [
        (noisy(4, 0.02, seed=0), noisy(2, 0.02, seed=1), 1.0, Outcome.FASTER),
        (noisy(2, 0.02, seed=0), noisy(4, 0.02, seed=1), 1.0, Outcome.SLOWER),
        (noisy(2, 0.02, seed=0), noisy(2, 0.02, seed=1), 1.0, Outcome.SAME),
        (noisy(2, 0.5, seed=0), noisy(2, 0.5, seed=1), 1.0, Outcome.TOO_NOISY),
        (noisy(4, 0.02, seed=0), noisy(2, 0.02, seed=1), 1.5, Outcome.FASTER),
        (noisy(4, 0.02, seed=0), noisy(2, 0.02, seed=1), 2.0, Outcome.SAME),
        (noisy(4, 0.02, seed=0), noisy(2, 0.02, seed=1), 3.0, Outcome.SLOWER),
        (
            noisy(4, 0.02, seed=0, rounds=LEAST_ROUNDS - 1),
            noisy(2, 0.02, seed=1, rounds=LEAST_ROUNDS - 1),
            1.0,
            Outcome.TOO_FEW_ROUNDS,
        ),
    ],
)
def test_verdict(base, other, bound, outcome):
    verdict = judge_speedup(base, other, bound=bound)
    assert verdict.outcome is outcome
    assert verdict.ratio == speedup(base, other)
    assert verdict.decided == (outcome not in (Outcome.TOO_NOISY, Outcome.TOO_FEW_ROUNDS))
    assert verdict.reason


def common(levels, factor: float) -> tuple[BenchResult, BenchResult]:
    """Two models of which one is slower by a factor, on a machine that has a level per round."""
    rounds = np.repeat(np.asarray(levels, np.float64), 8).reshape(-1, 8)
    return result(factor * rounds), result(rounds)


def test_a_model_that_differs_from_itself_is_not_judged():
    """The interval is narrow, since each round slows both alike; who would believe it?"""
    levels = np.exp(np.random.default_rng(2).normal(size=30))
    verdict = judge_speedup(*common(levels, 1.2))
    assert verdict.ratio == pytest.approx((1.2, 1.2, 1.2))
    assert verdict.noise > math.log(1.2)
    assert verdict.outcome is Outcome.TOO_NOISY
    assert "differs from itself" in verdict.reason


def test_a_slow_drift_is_no_noise():
    verdict = judge_speedup(*common(np.linspace(1.0, 2.0, 30), 1.2))
    assert verdict.outcome is Outcome.FASTER


def test_equal_models_are_rarely_told_apart():
    """The false alarms of a 95 % interval, less what the A/A test holds back."""
    verdicts = [
        judge_speedup(noisy(2, 0.2, seed=2 * seed), noisy(2, 0.2, seed=2 * seed + 1))
        for seed in range(60)
    ]
    wrong = [v for v in verdicts if v.outcome in (Outcome.FASTER, Outcome.SLOWER)]
    # 60 trials at 5 %: 3 expected, more than 8 in 0.4 % of cases (binomial).
    assert len(wrong) <= 8


def test_self_difference_of_a_steady_model_is_nothing():
    assert self_difference(result(np.full((10, 4), 3.0))) == 0.0
    assert self_difference(result(np.full((1, 4), 3.0))) == math.inf


def test_self_difference_against_the_formula():
    """Rounds with normal logarithms: medians of halves of n / 2 differ with variance
    2 (pi / 2) s^2 / (n / 2); the 95th percentile of the size is 1.96 of that deviation."""
    spread, rounds = 0.1, 200
    generator = np.random.default_rng(4)
    one_run = np.exp(spread * generator.normal(size=(rounds, 1)))
    expected = 1.96 * spread * math.sqrt(2 * math.pi / rounds)
    assert self_difference(result(one_run)) == pytest.approx(expected, rel=0.35)


def test_percentile_is_the_one_that_is_compared():
    latencies = np.tile(np.linspace(1.0, 2.0, 101), (10, 1))
    tail = latencies.copy()
    tail[:, -5:] *= 3
    assert judge_speedup(result(tail), result(latencies)).outcome is Outcome.SAME
    verdict = judge_speedup(result(tail), result(latencies), percentile=99)
    assert verdict.outcome is Outcome.FASTER
    assert verdict.ratio.value == pytest.approx(3.0)


def test_same_is_symmetric():
    base, other = result(np.full((10, 4), 1.0)), result(np.full((10, 4), 1.0 + SAME * 0.999))
    assert judge_speedup(base, other).outcome is Outcome.SAME
    assert judge_speedup(other, base).outcome is Outcome.SAME
