"""Blocks: packing, parameters, degenerate blocks, and what they hold once stored."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from slimctl.numerics.blocks import (
    Grid,
    Parameters,
    extreme_parameters,
    in_blocks,
    pack,
    round_blocks,
    searched_parameters,
    signed,
    spanning_parameters,
    unpack,
)
from slimctl.numerics.half_quadratic import NORM, half_quadratic

BITS = [2, 4, 8]
DEGENERATE = (
    [0.0],
    [3.0],
    [-3.0],
    [1e-45],
    [1e-30],
    [6e-8, -6e-8],
    [1e-40, 1.0],
    [60000.0, -60000.0],
)


@given(
    st.sampled_from(BITS),
    hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=9),
    st.data(),
)
def test_packing_is_lossless(bits: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    codes = data.draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 2**bits - 1)))
    packed = pack(codes, bits)
    assert packed.shape == (*shape[:-1], -(-shape[-1] * bits // 8))
    np.testing.assert_array_equal(unpack(packed, bits, shape[-1]), codes)


def test_the_first_code_is_in_the_lowest_bits() -> None:
    # By hand, as the operator's documentation has it.
    assert pack(np.array([0x3, 0xA, 0x5], np.uint8), 4).tolist() == [0xA3, 0x05]
    assert pack(np.array([1, 2, 3, 0, 2], np.uint8), 2).tolist() == [0b00111001, 0b10]
    assert pack(np.array([7, 200], np.uint8), 8).tolist() == [7, 200]


def test_signed_codes_are_centered() -> None:
    codes = np.array([0, 8, 15], np.uint8)
    assert signed(codes, Grid(4, True), np.int8).tolist() == [-8, 0, 7]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_nothing_is_off_by_more_than_half_a_step(bits: int, symmetric: bool) -> None:
    matrix = np.random.default_rng(bits).normal(0, 1, (7, 50)).astype(np.float32)
    grid = Grid(bits, symmetric)
    parameters = extreme_parameters(in_blocks(matrix, 16), grid)
    assert parameters.scale.shape == (7, 4)
    restored = round_blocks(matrix, parameters, 16, grid).restored()
    step = np.repeat(parameters.scale, 16, axis=1)[:, :50]
    # With a zero point the ends of a range may be half a step away from where they are wanted.
    slack = 0.5 if symmetric else 1.0
    assert (np.abs(restored - matrix) <= slack * step * (1 + 1e-5)).all()
    if symmetric:
        assert (parameters.zero_point == 2 ** (bits - 1)).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("block", [16, 128])
def test_searching_never_loses_and_reaches_a_fine_search(
    bits: int, symmetric: bool, block: int
) -> None:
    matrix = np.random.default_rng(0).laplace(0, 0.05, (40, 256)).astype(np.float32)
    grid = Grid(bits, symmetric)
    blocks = in_blocks(matrix, block)
    plain, found = extreme_parameters(blocks, grid), searched_parameters(blocks, grid)
    errors = [
        np.sum((round_blocks(matrix, p, block, grid).restored() - matrix) ** 2)
        for p in (plain, found)
    ]
    # Exhaustively, for each block: 200 scales and every zero point.
    rows = blocks.reshape(-1, block)[::7]
    zero_points = [grid.middle] if symmetric else np.unique(np.linspace(0, grid.highest, 16))
    best = np.full(len(rows), np.inf)
    for factor in np.linspace(0.3, 1.2, 100):
        scale = plain.scale.reshape(-1, 1)[::7] * factor
        for zero in np.rint(zero_points):
            codes = np.clip(np.rint(rows / scale) + zero, 0, grid.highest)
            best = np.minimum(best, np.sum(((codes - zero) * scale - rows) ** 2, axis=1))
    restored = in_blocks(round_blocks(matrix, found, block, grid).restored(), block)
    ours = np.sum((restored.reshape(-1, block)[::7] - rows) ** 2, axis=1)
    assert errors[1] < errors[0]
    if bits < 8:  # at 8 bits so few zero points are no exhaustive search
        assert ours.sum() < 1.1 * best.sum()


def test_importance_decides_which_weights_matter() -> None:
    rng = np.random.default_rng(0)
    matrix = rng.normal(0, 1, (64, 32)).astype(np.float32)
    importance = np.zeros((1, 1, 32), np.float32)
    importance[..., :4] = 1
    grid = Grid(2, False)
    blocks = in_blocks(matrix, 32)
    errors = [
        np.sum((round_blocks(matrix, p, 32, grid).restored() - matrix)[:, :4] ** 2)
        for p in (searched_parameters(blocks, grid), searched_parameters(blocks, grid, importance))
    ]
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        *((dtype, values) for values in DEGENERATE for dtype in (np.float32, np.float16)),
        (np.float32, [3.4e38]),
        (np.float32, [3.4e38, -3.4e38]),
    ],
)
def test_degenerate_blocks(values: list[float], bits: int, symmetric: bool, dtype: type) -> None:
    matrix = np.resize(np.array(values, np.float32), (2, 32))
    grid = Grid(bits, symmetric, np.dtype(dtype))
    blocks = in_blocks(matrix, 16)
    with np.errstate(all="raise", under="ignore"):
        parameters = searched_parameters(blocks, grid)
        restored = round_blocks(matrix, parameters, 16, grid).restored()
    stored = parameters.scale.astype(dtype)
    assert (stored > 0).all()
    assert np.isfinite(stored).all()
    np.testing.assert_array_equal(stored.astype(np.float32), parameters.scale)
    assert np.isfinite(restored).all()
    largest = np.abs(matrix).max()
    assert np.abs(restored - matrix).max() <= max(0.75 * largest, 1e-7)
    if values == [0.0]:
        assert not restored.any()
    if len(values) == 1 and dtype is np.float32 and 1e-30 <= abs(values[0]) < 1e38:
        np.testing.assert_allclose(restored, matrix, rtol=1e-6)  # a constant block is exact


@settings(max_examples=60)
@given(
    hnp.arrays(np.float32, (3, 20), elements=st.floats(-(2.0**60), 2.0**60, width=32)),
    st.sampled_from(BITS),
    st.booleans(),
)
def test_zero_stays_zero(matrix: np.ndarray, bits: int, symmetric: bool) -> None:
    grid = Grid(bits, symmetric)
    parameters = searched_parameters(in_blocks(matrix, 16), grid)
    restored = round_blocks(matrix, parameters, 16, grid).restored()
    assert not restored[matrix == 0].any()
    assert (parameters.scale > 0).all()


def norm_of(matrix: np.ndarray, parameters: Parameters, grid: Grid) -> float:
    """``sum |w - w'|^p`` of blocks of 32."""
    error = round_blocks(matrix, parameters, 32, grid).restored() - matrix
    return float(np.sum(np.abs(error).astype(np.float64) ** NORM))


@pytest.mark.parametrize("whole", [True, False])
def test_half_quadratic_lowers_the_norm_that_it_is_after(whole: bool) -> None:
    rng = np.random.default_rng(0)
    matrix = (rng.standard_t(3, (200, 64)) * 0.02).astype(np.float32)
    grid = Grid(4, False)
    blocks = in_blocks(matrix, 32)
    start = searched_parameters(blocks, grid)
    found = half_quadratic(blocks, start, grid, whole=whole)
    spanning = spanning_parameters(blocks, grid)
    assert norm_of(matrix, found, grid) <= norm_of(matrix, start, grid)
    if whole:  # whole zero points leave little to choose
        np.testing.assert_array_equal(found.scale, start.scale)
    else:
        assert norm_of(matrix, found, grid) < 0.97 * norm_of(matrix, start, grid)
        found_error, *others = (
            round_blocks(matrix, parameters, 32, grid).squared_error(matrix)
            for parameters in (found, start, spanning)
        )
        assert found_error < 0.97 * min(others)
        assert ((found.scale == start.scale) | (found.scale == spanning.scale)).all()
        assert (found.scale == start.scale).any() and (found.scale == spanning.scale).any()
    assert np.array_equal(np.rint(found.zero_point), found.zero_point) == whole


def test_spanning_parameters_by_hand() -> None:
    """w = 0.5 code - 1.25 with codes 0 to 15: scale 0.5, zero point 1.25 / 0.5 = 2.5."""
    codes = np.array([[0, 15, 3, 7]], np.float32)
    found = spanning_parameters(0.5 * codes - 1.25, Grid(4, False))
    assert (found.scale.item(), found.zero_point.item()) == (0.5, 2.5)
    # Zero lies outside of the block, and so does the zero point outside of the codes.
    found = spanning_parameters(0.25 * codes + 1, Grid(4, False))
    assert (found.scale.item(), found.zero_point.item()) == (0.25, -4.0)
    # 2 bits: (2 - -1) / 3 = 1; equal weights: scale 1, and code 0 is the weight.
    found = spanning_parameters(np.array([[-1, 2], [7, 7]], np.float32), Grid(2, False))
    assert (found.scale.tolist(), found.zero_point.tolist()) == ([1, 1], [1, -7])


def test_fractional_zero_points_are_what_half_precision_holds() -> None:
    grid = Grid(4, False, np.dtype(np.float16))
    rng = np.random.default_rng(0)
    blocks = rng.normal(3, 0.1, (4, 2, 32)).astype(np.float32)
    found = half_quadratic(blocks, searched_parameters(blocks, grid), grid, whole=False)
    for array in (*found, *spanning_parameters(blocks, grid)):
        np.testing.assert_array_equal(array.astype(np.float16).astype(np.float32), array)


def test_weights_on_a_grid_of_scale_and_minimum_are_stored_without_loss() -> None:
    """Q4_1 of llama.cpp: ``w = d code + m``, a block each."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (50, 3, 32))
    codes[..., 4], codes[..., 9] = 0, 15  # as an encoder from the extremes makes them
    scale = 2.0 ** rng.integers(-8, -2, (50, 3, 1))
    weights = (codes * scale - scale * rng.integers(0, 60, scale.shape) / 4).astype(np.float32)
    matrix, grid = weights.reshape(50, 96), Grid(4, False)
    start = searched_parameters(weights, grid)
    found = half_quadratic(weights, start, grid, whole=False)
    np.testing.assert_allclose(round_blocks(matrix, found, 32, grid).restored(), matrix, atol=1e-6)
    assert np.abs(round_blocks(matrix, start, 32, grid).restored() - matrix).max() > 1e-3
