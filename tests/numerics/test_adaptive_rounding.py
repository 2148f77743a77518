"""AdaRound on arrays: against an exhaustive search and finite differences."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from slimctl.numerics import adaptive_rounding
from slimctl.numerics.adaptive_rounding import round_adaptive
from slimctl.numerics.second_order import rounding_error

Array = NDArray[np.float64]


def problem(groups: int, outputs: int, inputs: int, seed: int = 0) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(groups, inputs, inputs)) * rng.uniform(0.2, 3, (groups, 1, inputs))
    x = mix.transpose(0, 2, 1) @ rng.normal(size=(groups, inputs, 40 * inputs))
    matrix = rng.normal(size=(groups, outputs, inputs))
    return matrix, np.abs(matrix).max(axis=2) / 7, x @ x.transpose(0, 2, 1) / x.shape[2]


def error(codes: NDArray[np.generic], matrix: Array, scale: Array, moments: Array) -> float:
    return rounding_error(matrix - codes * scale[:, :, None], moments)


def adaptive(matrix: Array, scale: Array, moments: Array, **options: int) -> NDArray[np.int64]:
    bounds = {"low": -7, "high": 7, "steps": 1000} | options
    return round_adaptive(matrix, scale, moments, ridge=0.0, **bounds)


@pytest.mark.parametrize(("groups", "outputs", "inputs"), [(1, 6, 40), (5, 3, 9), (3, 4, 70)])
def test_every_code_is_next_to_its_weight_and_the_error_falls(
    groups: int, outputs: int, inputs: int
) -> None:
    matrix, scale, moments = problem(groups, outputs, inputs)
    codes = adaptive(matrix, scale, moments)
    steps = matrix / scale[:, :, None]
    assert np.abs(codes - steps).max() < 1.0 + 1e-5
    for group in range(groups):
        for output in range(outputs):
            part = np.s_[group : group + 1, output : output + 1]
            of_one = matrix[part], scale[part], moments[group : group + 1]
            assert error(codes[part], *of_one) <= error(np.rint(steps[part]), *of_one)
    whole = matrix, scale, moments
    assert error(codes, *whole) < 0.75 * error(np.rint(steps), *whole)


def test_small_problems_come_close_to_the_best_of_all_roundings() -> None:
    ratios = []
    for seed in range(20):
        matrix, scale, moments = problem(1, 1, 8, seed)
        below = np.floor(matrix / scale[:, :, None])
        best = min(
            error(below + np.array(up).reshape(1, 1, -1), matrix, scale, moments)
            for up in product((0, 1), repeat=8)
        )
        found = error(adaptive(matrix, scale, moments, low=-8, high=8), matrix, scale, moments)
        plain = error(np.rint(matrix / scale[:, :, None]), matrix, scale, moments)
        ratios.append((found - best) / (plain - best + 1e-12))
    assert max(ratios) <= 1.0
    assert np.median(ratios) < 0.4  # of the way back from the best to rounding to nearest


def test_codes_stay_within_their_bounds() -> None:
    matrix, scale, moments = problem(2, 4, 12)
    codes = adaptive(matrix, scale / 2, moments)  # half of the largest weights do not fit
    assert codes.min() >= -7
    assert codes.max() <= 7
    steps = matrix / (scale / 2)[:, :, None]
    np.testing.assert_array_equal(codes[steps >= 7], 7)
    np.testing.assert_array_equal(codes[steps <= -7], -7)


def test_inputs_that_say_nothing_round_to_nearest() -> None:
    matrix, scale, _ = problem(1, 3, 6)
    steps = matrix / scale[:, :, None]
    np.testing.assert_array_equal(adaptive(matrix, scale, np.zeros((1, 6, 6))), np.rint(steps))
    np.testing.assert_array_equal(adaptive(matrix, scale, np.eye(6)[None]), np.rint(steps))


def test_slopes_are_those_of_finite_differences() -> None:
    variable = np.linspace(-3, 3, 41)
    free = np.ones(41, np.bool_)
    step = 1e-6

    def raised(at: Array) -> Array:
        return adaptive_rounding._rectified(at, free)[0]

    around = (raised(variable + step) - raised(variable - step)) / (2 * step)
    inside = (raised(variable) > 1e-3) & (raised(variable) < 1 - 1e-3)
    slope = adaptive_rounding._rectified(variable, free)[1]
    np.testing.assert_allclose(slope[inside], around[inside], rtol=1e-5)

    height = np.linspace(0.05, 0.95, 19)
    for done, beta in ((0.0, 20.0), (0.5, 11.0), (1.0, 2.0)):  # half a cosine from 20 to 2

        def penalty(at: Array, beta: float = beta) -> Array:
            return 1 - np.abs(2 * at - 1) ** beta

        expected = (penalty(height + step) - penalty(height - step)) / (2 * step)
        found = adaptive_rounding._penalty_slope(height, done)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
