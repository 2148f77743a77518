"""Second-order rounding on arrays: against an exhaustive search and a slow reference."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from slimctl.numerics.second_order import (
    inverse_factor,
    round_second_order,
    rounding_error,
    upper_inverse,
)

Array = NDArray[np.float64]


def _problem(groups: int, outputs: int, inputs: int, seed: int = 0) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(groups, inputs, inputs)) * rng.uniform(0.2, 3, (groups, 1, inputs))
    x = mix.transpose(0, 2, 1) @ rng.normal(size=(groups, inputs, 40 * inputs))
    moments = x @ x.transpose(0, 2, 1) / x.shape[2]
    matrix = rng.normal(size=(groups, outputs, inputs))
    scale = np.abs(matrix).max(axis=2) / 7
    return matrix, scale, moments


def _nearest(matrix: Array, scale: Array) -> Array:
    return np.asarray(np.clip(np.rint(matrix / scale[:, :, None]), -7, 7))


def _error(codes: NDArray[np.generic], matrix: Array, scale: Array, moments: Array) -> float:
    return rounding_error(matrix - codes * scale[:, :, None], moments)


@pytest.mark.parametrize(("groups", "outputs", "inputs"), [(1, 6, 40), (5, 1, 9), (3, 4, 70)])
def test_the_error_falls_well_below_that_of_rounding_to_nearest(
    groups: int, outputs: int, inputs: int
) -> None:
    matrix, scale, moments = _problem(groups, outputs, inputs)
    codes = round_second_order(matrix, scale, moments, low=-7, high=7, ridge=0.0)
    assert codes.min() >= -7
    assert codes.max() <= 7
    plain = _error(_nearest(matrix, scale), matrix, scale, moments)
    assert _error(codes, matrix, scale, moments) < 0.7 * plain


def test_small_problems_come_close_to_the_best_of_all_roundings() -> None:
    ratios = []
    for seed in range(20):
        matrix, scale, moments = _problem(1, 1, 6, seed)
        below = np.floor(matrix / scale[:, :, None])
        best = min(
            _error(below + np.array(up).reshape(1, 1, -1), matrix, scale, moments)
            for up in product((0, 1), repeat=6)
        )
        codes = round_second_order(matrix, scale, moments, low=-8, high=8, ridge=0.0)
        plain = _error(np.rint(matrix / scale[:, :, None]), matrix, scale, moments)
        ratios.append((_error(codes, matrix, scale, moments) - best) / (plain - best + 1e-12))
    assert np.median(ratios) < 0.3  # of the way back from the best to rounding to nearest


def test_it_is_algorithm_1_step_by_step() -> None:
    """The inverse updated after every input, as Optimal Brain Quantization has it."""
    matrix, scale, moments = _problem(1, 3, 12)
    order = np.argsort(-np.diagonal(moments[0]), kind="stable")
    left = matrix[0].copy()
    expected = np.zeros((3, 12))
    open_inputs = list(order)
    for place in order:
        inverse = np.linalg.inv(moments[0][np.ix_(open_inputs, open_inputs)])
        expected[:, place] = np.clip(np.rint(left[:, place] / scale[0]), -7, 7)
        error = left[:, place] - expected[:, place] * scale[0]
        left[:, open_inputs] -= np.outer(error, inverse[0] / inverse[0, 0])
        open_inputs = open_inputs[1:]
    codes = round_second_order(matrix, scale, moments, low=-7, high=7, ridge=0.0)
    assert np.mean(codes[0] == expected) > 0.97  # ties of rounding aside


def test_independent_inputs_are_rounded_to_nearest() -> None:
    matrix, scale, _ = _problem(2, 4, 20)
    moments = np.stack([np.diag(np.linspace(1, 5, 20))] * 2)
    codes = round_second_order(matrix, scale, moments, low=-7, high=7, ridge=0.1)
    assert np.array_equal(codes, _nearest(matrix, scale))


def test_dead_inputs_and_groups_do_no_harm() -> None:
    matrix, scale, moments = _problem(3, 2, 8)
    moments[0, 3, :] = moments[0, :, 3] = 0.0
    moments[1] = 0.0
    codes = round_second_order(matrix, scale, moments, low=-7, high=7, ridge=0.01)
    assert np.array_equal(codes[1], _nearest(matrix, scale)[1])
    assert np.array_equal(codes[0, :, 3], _nearest(matrix, scale)[0, :, 3])


@pytest.mark.parametrize("size", [1, 5, 64, 65, 150])
def test_factors_are_inverses(size: int) -> None:
    _, _, moments = _problem(2, 1, size)
    factor = inverse_factor(moments)
    assert np.allclose(np.tril(factor, -1), 0.0)
    product_ = factor.transpose(0, 2, 1) @ factor @ moments
    assert np.allclose(product_, np.eye(size), atol=1e-5)
    upper = np.triu(np.random.default_rng(0).normal(size=(size, size))) + 3 * np.eye(size)
    assert np.allclose(upper_inverse(upper) @ upper, np.eye(size), atol=1e-8)
