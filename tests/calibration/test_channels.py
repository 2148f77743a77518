"""Mean squares of channels, against numpy on all of the data at once."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from slimctl.calibration.channels import SquareAccumulator


def _mean(arrays: list[np.ndarray], axis: int) -> np.ndarray | None:
    squares = SquareAccumulator(axis)
    for array in arrays:
        squares.update(array)
    return squares.mean()


@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 5, 4, 4), 1), ((3, 7, 5), 2), ((3, 5), 1), ((5, 6), 0), ((2, 4, 5), 1)]
)
def test_is_the_mean_square_of_each_channel(shape: tuple[int, ...], axis: int) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(0, 3, shape).astype(np.float32) for _ in range(4)]
    whole = np.moveaxis(np.stack(arrays).astype(np.float64), axis + 1, 0)
    expected = (whole.reshape(shape[axis], -1) ** 2).mean(axis=1)
    np.testing.assert_allclose(_mean(arrays, axis), expected, rtol=1e-6)


def test_neither_order_nor_batching_matters() -> None:
    rng = np.random.default_rng(1)
    samples = [(rng.normal(0, 1, (1, 3, 8, 8)) * 10.0**k).astype(np.float32) for k in (-6, 0, 5, 9)]
    batched = _mean([np.concatenate(samples)], 1)
    for order in permutations(samples):
        np.testing.assert_array_equal(_mean(list(order), 1), batched)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.finfo(np.float32).min])
def test_samples_without_a_finite_square_are_left_out(bad: float) -> None:
    good, spoiled = np.full((1, 2, 3), 2.0, np.float32), np.full((1, 2, 3), 3.0, np.float32)
    spoiled[0, 0, 0] = bad
    np.testing.assert_array_equal(_mean([np.concatenate([good, spoiled])], 1), [4.0, 4.0])
    assert _mean([spoiled], 1) is None


def test_nothing_seen_is_no_mean() -> None:
    assert _mean([np.zeros((0, 2, 3), np.float32)], 1) is None
