"""Blocks: packing, parameters, degenerate blocks, and what they hold once stored."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from slimctl.numerics.blocks import (
    Grid,
    extreme_parameters,
    in_blocks,
    pack,
    round_blocks,
    searched_parameters,
    signed,
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


@pytest.mark.parametrize("whole", [True, False])
def test_half_quadratic_lowers_the_norm_that_it_is_after(whole: bool) -> None:
    rng = np.random.default_rng(0)
    matrix = (rng.standard_t(3, (200, 64)) * 0.02).astype(np.float32)
    grid = Grid(4, False)
    blocks = in_blocks(matrix, 32)
    start = extreme_parameters(blocks, grid)
    found = half_quadratic(blocks, start, grid, whole=whole)

    def norm(parameters: object) -> float:
        error = round_blocks(matrix, parameters, 32, grid).restored() - matrix  # type: ignore[arg-type]
        return float(np.sum(np.abs(error).astype(np.float64) ** NORM))

    np.testing.assert_array_equal(found.scale, start.scale)
    assert norm(found) <= norm(start)
    if not whole:  # whole zero points leave little to choose
        assert norm(found) < 0.97 * norm(start)
    assert np.array_equal(np.rint(found.zero_point), found.zero_point) == whole
