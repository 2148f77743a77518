"""Thresholds against slow, independent implementations, and their limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimctl.calibration.density import distribution, magnitudes
from slimctl.calibration.distortion import COHERENCE, Distortion
from slimctl.calibration.divergence import BINS, MOST_CUT_OFF, divergences
from slimctl.calibration.histogram import FloatHistogram
from slimctl.calibration.thresholds import choose, why_no_range
from slimctl.core.contract import CalibrationMethod, Range
from slimctl.numerics.affine import INT8, UINT8, affine_from_range, fake_quantize

METHODS = get_args(CalibrationMethod)


def _histogram(values: np.ndarray) -> FloatHistogram:
    histogram = FloatHistogram(row_limit=None)
    histogram.update(np.asarray(values, np.float32)[np.newaxis])
    return histogram


def _error(values: np.ndarray, chosen: Range, *, symmetric: bool = False) -> float:
    kind = INT8 if symmetric else UINT8
    parameters = affine_from_range(*chosen, kind, symmetric=symmetric)
    difference = fake_quantize(values, parameters).astype(np.float64) - values
    return float(np.mean(difference**2))


def _normal(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(0, 1, 40_000)


def _heavy_tails(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_t(3, 40_000)


def _relu6(rng: np.random.Generator) -> np.ndarray:
    return np.clip(rng.normal(1, 3, 40_000), 0, 6)


def _relu(rng: np.random.Generator) -> np.ndarray:
    return np.maximum(rng.laplace(-0.5, 1, 40_000), 0)


def _skewed(rng: np.random.Generator) -> np.ndarray:
    return rng.gamma(2, 1, 40_000) - 0.3


def _negative(rng: np.random.Generator) -> np.ndarray:
    return -rng.gamma(2, 1, 40_000)


def _pixels(rng: np.random.Generator) -> np.ndarray:
    return (rng.integers(0, 256, 40_000) - 127) / 128


def _outlier(rng: np.random.Generator) -> np.ndarray:
    return np.append(rng.normal(0, 1, 40_000), 1e4)


CASES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    case.__name__.removeprefix("_"): case
    for case in (_normal, _heavy_tails, _relu6, _relu, _skewed, _negative, _pixels, _outlier)
}


def _case(name: str) -> np.ndarray:
    return CASES[name](np.random.default_rng(0)).astype(np.float32)


def _naive_divergence(counts: list[float], kept: int, levels: int) -> float:
    """One candidate, word by word after the paper."""
    reference = counts[:kept]
    reference[-1] += sum(counts[kept:])
    groups: list[list[int]] = [[] for _ in range(levels)]
    for index in range(kept):
        groups[index * levels // kept].append(index)
    quantized = [0.0] * kept
    for group in groups:
        filled = [index for index in group if counts[index] > 0]
        for index in filled:
            quantized[index] = sum(counts[i] for i in group) / len(filled)
    p_sum, q_sum = sum(reference), sum(quantized)
    total = 0.0
    for p, q in zip(reference, quantized, strict=True):
        if p > 0:
            if q == 0:
                return math.inf
            total += p / p_sum * math.log((p / p_sum) / (q / q_sum))
    return total


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(0.5, 1e5)), min_size=9, max_size=40),
    st.integers(2, 8),
)
def test_divergences_equal_the_naive_loop(counts: list[float], levels: int) -> None:
    if not any(counts):
        counts[0] = 1.0
    found = divergences(np.array(counts), levels)
    assert found.size == len(counts) - levels + 1
    np.testing.assert_array_equal(divergences(np.array(counts), levels, levels + 1), found[1:])
    for kept in range(levels, len(counts) + 1):
        if not any(counts[:kept]):
            continue  # nothing is kept: there is no distribution Q
        expected = _naive_divergence(list(counts), kept, levels)
        assert found[kept - levels] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_kl_takes_the_best_of_every_candidate() -> None:
    # Whole values in bins of width 1, so that the bins of the search are known.
    rng = np.random.default_rng(1)
    values = np.minimum(rng.exponential(110, 200_000), 2047).astype(np.float32) + 0.5
    values[0] = 2048.0
    counts = np.histogram(values, BINS, (0, 2048))[0].astype(float)
    least = np.quantile(values, 1 - MOST_CUT_OFF)
    naive = {
        kept: _naive_divergence(counts.tolist(), kept, 256)
        for kept in range(math.ceil(least), 2049, 8)
    }
    chosen = choose(_histogram(values), "kl")
    assert chosen is not None and chosen.low == 0.0
    kept = round(chosen.high)
    assert least <= kept < 2048
    ours = _naive_divergence(counts.tolist(), kept, 256)
    assert ours <= min(naive.values()) * 1.02 + 1e-9


def test_kl_cuts_off_a_single_outlier_and_little_else() -> None:
    chosen = choose(_histogram(_case("outlier")), "kl")
    assert chosen is not None
    assert 3 < chosen.high < 6 and -6 < chosen.low < -3


@pytest.mark.parametrize("name", ["relu", "normal"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_kl_does_not_count_exact_zeros(name: str, symmetric: bool) -> None:
    values = _case(name)
    few = choose(_histogram(values[values != 0]), "kl", symmetric=symmetric)
    many = choose(_histogram(np.append(values, np.zeros(10**6))), "kl", symmetric=symmetric)
    assert few == many


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_mse_is_the_best_of_a_grid_measured_on_the_values(name: str, symmetric: bool) -> None:
    values = _case(name)
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    shares = 2.0 ** (-np.arange(0, 13, 0.25))
    if symmetric:
        bound = max(-low, high)
        grid = [Range(-bound * share, bound * share) for share in shares]
    else:
        ends = [(a, b) for a in shares[::2] for b in shares[::2]] if low < 0 < high else []
        ends += [(a, a) for a in shares]
        grid = [Range(low * a, high * b) for a, b in ends]
    best = min(_error(values, candidate, symmetric=symmetric) for candidate in grid)
    chosen = choose(_histogram(values), "mse", symmetric=symmetric)
    assert chosen is not None
    assert _error(values, chosen, symmetric=symmetric) <= best * 1.03


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("share", [1.0, 0.7, 0.4])
def test_measured_error_is_that_of_the_values(name: str, share: float) -> None:
    values = _case(name)
    low = min(float(values.min()), 0.0) * share
    high = max(float(values.max()), 0.0) * share
    distortion = Distortion(_histogram(values).bins())
    found = distortion.measure(np.array([low]), np.array([high]), 255)[0]
    assert found == pytest.approx(_error(values, Range(low, high)), rel=0.03, abs=1e-7)


@pytest.mark.parametrize("name", ["normal", "heavy_tails", "relu", "skewed", "negative"])
@pytest.mark.parametrize("share", [1.0, 0.7, 0.4])
def test_estimated_error_is_near_the_measured_one(name: str, share: float) -> None:
    values = _case(name)
    low = np.array([min(float(values.min()), 0.0) * share])
    high = np.array([max(float(values.max()), 0.0) * share])
    for coherence in (0.0, COHERENCE):
        distortion = Distortion(_histogram(values).bins(), coherence)
        estimated = distortion.estimate(low, high, (high - low) / 255)[0]
        assert estimated == pytest.approx(distortion.measure(low, high, 255)[0], rel=0.1)


@pytest.mark.parametrize("name", CASES)
def test_auto_loses_little_squared_error_and_clips_no_more_than_mse(name: str) -> None:
    values = _case(name)
    histogram = _histogram(values)
    auto, mse = choose(histogram, "auto"), choose(histogram, "mse")
    assert auto is not None and mse is not None
    assert _error(values, auto) <= _error(values, mse) * 1.3
    assert auto.high - auto.low >= (mse.high - mse.low) * 0.96


@pytest.mark.parametrize("name", CASES)
def test_minmax_is_exact_and_holds_zero(name: str) -> None:
    values = _case(name)
    chosen = choose(_histogram(values), "minmax")
    assert chosen == Range(min(float(values.min()), 0.0), max(float(values.max()), 0.0))


@pytest.mark.parametrize("percentile", [90.0, 99.0, 99.9])
@pytest.mark.parametrize("name", ["normal", "heavy_tails", "skewed"])
def test_percentile_cuts_off_half_at_each_end(name: str, percentile: float) -> None:
    values = _case(name)
    chosen = choose(_histogram(values), "percentile", percentile=percentile)
    rest = (100 - percentile) / 2
    expected = np.percentile(values, [rest, 100 - rest])
    np.testing.assert_allclose(chosen, [min(expected[0], 0), max(expected[1], 0)], rtol=0.02)


def test_percentile_of_one_sided_values_cuts_off_one_end() -> None:
    values = _case("relu")
    chosen = choose(_histogram(values), "percentile", percentile=99.0)
    np.testing.assert_allclose(chosen, [0, np.percentile(values, 99)], rtol=0.01)


def test_symmetric_percentile_is_that_of_magnitudes() -> None:
    values = _case("skewed")
    chosen = choose(_histogram(values), "percentile", percentile=99.0, symmetric=True)
    assert chosen is not None and chosen.low == -chosen.high
    assert chosen.high == pytest.approx(np.percentile(np.abs(values), 99), rel=0.01)


def test_magnitudes_join_both_signs() -> None:
    values = _case("normal")
    ours = distribution(magnitudes(_histogram(values).bins()))
    theirs = distribution(_histogram(np.abs(values)).bins())
    points = np.linspace(0, 4, 50)
    np.testing.assert_allclose(
        np.interp(points, ours.at, ours.below),
        np.interp(points, theirs.at, theirs.below),
        rtol=1e-3,
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        [0.0] * 5,
        [3.0] * 5,
        [-3.0] * 5,
        [2.5],
        [0.0, 0.0, 1e29],
        [-1e29, 1e29],
        [1e-6, 2e-6, -1e-6],
        [0.0, 1e-30, 1e10],
        [-1.0, 1e-20],
    ],
    ids=str,
)
def test_unusual_values_get_a_finite_range_around_zero(
    values: list[float], method: CalibrationMethod, symmetric: bool
) -> None:
    histogram = _histogram(np.array(values))
    chosen = choose(histogram, method, symmetric=symmetric)
    assert chosen is not None
    assert math.isfinite(chosen.low) and math.isfinite(chosen.high)
    assert chosen.low <= 0 <= chosen.high
    largest = max(abs(histogram.minimum), abs(histogram.maximum))
    assert max(-chosen.low, chosen.high) <= largest
    if symmetric:
        assert chosen.low == -chosen.high


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_ranges_lie_within_the_extremes_and_mirror(name: str, method: CalibrationMethod) -> None:
    values = _case(name)
    chosen = choose(_histogram(values), method)
    mirrored = choose(_histogram(-values), method)
    assert chosen is not None and mirrored is not None
    assert min(values.min(), 0) <= chosen.low <= 0 <= chosen.high <= max(values.max(), 0)
    if method != "kl":  # it searches the upper end first
        np.testing.assert_allclose(chosen, (-mirrored.high, -mirrored.low), rtol=0.02)


@pytest.mark.parametrize("method", METHODS)
def test_ranges_scale_with_the_values(method: CalibrationMethod) -> None:
    values = _case("skewed")
    first, second = choose(_histogram(values), method), choose(_histogram(values * 2**-20), method)
    assert first is not None and second is not None
    np.testing.assert_allclose(second, np.array(first) * 2**-20, rtol=1e-6)


@pytest.mark.parametrize("method", ["mse", "auto"])
def test_fewer_levels_clip_more(method: CalibrationMethod) -> None:
    histogram = _histogram(_case("normal"))
    chosen = [choose(histogram, method, levels=levels) for levels in (16, 64, 256, 1024)]
    widths = [found.high - found.low for found in chosen if found is not None]
    assert len(widths) == len(chosen)
    assert all(first <= second * 1.01 for first, second in itertools.pairwise(widths))
    assert widths[0] < widths[-1] * 0.8


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("levels", [2, 16, 128, 65536])
def test_any_number_of_levels(method: CalibrationMethod, levels: int) -> None:
    histogram = _histogram(_case("skewed"))
    chosen, widest = choose(histogram, method, levels=levels), choose(histogram, "minmax")
    assert chosen is not None and widest is not None
    assert widest.low <= chosen.low <= 0 < chosen.high <= widest.high


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.zeros(0), "empty"),
        (np.full(4, np.nan), "finite"),
        (np.array([1.0, 2.0, np.finfo(np.float32).min]), "mask"),
        (np.array([1.0, -np.inf]), "mask"),
    ],
)
def test_no_range_for_what_cannot_be_represented(values: np.ndarray, reason: str) -> None:
    histogram = _histogram(values)
    assert reason in why_no_range(histogram)
    assert all(choose(histogram, method) is None for method in METHODS)


def test_every_ordinary_tensor_has_a_range() -> None:
    assert why_no_range(_histogram(_case("normal"))) == ""


@pytest.mark.parametrize("exponent", [1.0, 1.5, 3.0, 4.0])
@pytest.mark.parametrize("one_sided", [False, True])
def test_powers_are_minimized_as_by_brute_force(exponent: float, one_sided: bool) -> None:
    rng = np.random.default_rng(5)
    values = rng.standard_t(4, 20000).astype(np.float32)
    values = np.abs(values) if one_sided else values
    chosen = choose(_histogram(values), "auto", exponent=exponent)
    assert chosen is not None

    def error(low: float, high: float) -> float:
        affine = affine_from_range(low, high, UINT8, symmetric=False)
        return float(np.mean(np.abs(fake_quantize(values, affine) - values) ** exponent))

    low, high = float(values.min()), float(values.max())
    factors = 2.0 ** (-np.arange(0, 4, 0.05))
    pairs = [(min(low, 0.0) * a, high * b) for a in factors for b in factors[::1]]
    if one_sided:
        pairs = [(0.0, high * b) for b in factors]
    best = min(error(*pair) for pair in pairs)
    # Both searches are on grids of a few percent, and the minimum is flat.
    assert error(chosen.low, chosen.high) <= best * 1.05


def test_a_lower_power_clips_more() -> None:
    values = np.random.default_rng(5).standard_t(4, 20000).astype(np.float32)
    widths = []
    for exponent in (1.5, 2.0, 4.0):
        chosen = choose(_histogram(values), "auto", exponent=exponent)
        assert chosen is not None
        widths.append(chosen.high - chosen.low)
    assert widths == sorted(widths) and widths[0] < widths[2]
