"""Integer arithmetic against Python's integers and fractions."""

from __future__ import annotations

from fractions import Fraction
from math import floor, log2
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from slimctl.numerics.affine import INT8, INT16, UINT8, UINT16
from slimctl.numerics.integer import (
    EXACT,
    add_bias,
    centered,
    exact_product,
    exact_reduction,
    float_parts,
    half_away,
    largest,
    requantize,
    uniform_reduction,
    wrapped,
)

_EXAMPLES = settings(
    max_examples=60, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
)
_BYTES = ("uint8", "int8")
_INT32 = np.iinfo(np.int32)


def draw_codes(draw: Any, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Codes of the whole type, or only its ends, where sums are largest."""
    limits = np.iinfo(kind)
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    if draw(st.booleans()):
        return random.choice([limits.min, limits.max], shape).astype(kind)
    return random.integers(limits.min, limits.max, shape, endpoint=True).astype(kind)


def draw_zero(draw: Any, kind: str) -> np.ndarray:
    limits = np.iinfo(kind)
    ends = st.sampled_from([int(limits.min), 0, int(limits.max)])
    return np.array(draw(st.one_of(ends, st.integers(int(limits.min), int(limits.max)))), kind)


def product(a: np.ndarray, a_zero: int, b: np.ndarray, b_zero: int) -> list[list[int]]:
    """With Python's integers."""
    rows = [[int(v) - a_zero for v in row] for row in a]
    columns = [[int(v) - b_zero for v in column] for column in b.T]
    return [[sum(map(int.__mul__, row, column)) for column in columns] for row in rows]


@given(st.data())
@_EXAMPLES
def test_products_are_exact(data: Any) -> None:
    draw = data.draw
    kinds = draw(st.sampled_from(_BYTES)), draw(st.sampled_from(_BYTES))
    terms = draw(st.one_of(st.integers(1, 20), st.integers(200, 5000)))
    a = draw_codes(draw, kinds[0], (draw(st.integers(1, 2)), terms))
    b = draw_codes(draw, kinds[1], (terms, draw(st.integers(1, 2))))
    zeros = draw_zero(draw, kinds[0]), draw_zero(draw, kinds[1])
    left, right = centered(a, zeros[0]), centered(b, zeros[1])
    expected = product(a, int(zeros[0]), b, int(zeros[1]))
    bound = largest(a, zeros[0])
    for reduction in (
        exact_reduction(right.T, bound),
        uniform_reduction(terms, bound, largest(b, zeros[1])),
    ):
        found = exact_product(left, right, reduction.parts)
        assert found.tolist() == expected
        assert np.abs(found).max() <= reduction.bound


@given(st.data())
@_EXAMPLES
def test_parts_cover_the_terms_and_stay_exact(data: Any) -> None:
    draw = data.draw
    terms, bound = draw(st.integers(1, 3000)), draw(st.sampled_from([1, 255, 65535]))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    weights = random.integers(-256, 256, (2, terms)).astype(np.float32)
    parts, whole = exact_reduction(weights, bound)
    assert [i for part in parts for i in range(terms)[part]] == list(range(terms))
    sums = [int(np.abs(weights[:, part].astype(np.int64)).sum(axis=1).max()) for part in parts]
    assert max(sums) * bound <= EXACT
    # a longer part would not be exact for one of the rows
    for part in parts[:-1]:
        longer = weights[:, part.start : part.stop + 1].astype(np.int64)
        assert int(np.abs(longer).sum(axis=1).max()) * bound > EXACT
    assert whole == int(np.abs(weights.astype(np.int64)).sum(axis=1).max()) * bound


def test_a_product_that_float32_cannot_hold_is_refused() -> None:
    with pytest.raises(OverflowError, match="a product of 65535 does not fit"):
        exact_reduction(np.array([[1.0, 257.0]], np.float32), 65535)


def test_a_reduction_without_terms_is_zero() -> None:
    none = np.zeros((2, 0), np.float32)
    reduction = exact_reduction(none, 255)
    assert reduction.bound == 0
    assert exact_product(none, none.T, reduction.parts).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("kind", "zero", "expected"),
    [
        ("uint8", 0, 255),
        ("uint8", 100, 155),
        ("uint8", 200, 200),
        ("int8", 0, 128),
        ("int8", -128, 255),
        ("int8", 127, 255),
        ("uint16", 32768, 32768),
    ],
)
def test_largest_magnitude(kind: str, zero: int, expected: int) -> None:
    codes = np.array([np.iinfo(kind).min, np.iinfo(kind).max], kind)
    assert largest(codes, np.array(zero, kind)) == expected
    assert np.abs(centered(codes, np.array(zero, kind))).max() == expected


def test_several_zero_points_count_by_the_worst() -> None:
    assert largest(np.zeros(1, np.uint8), np.array([100, 250], np.uint8)) == 250


# biases and registers


def to_float32(x: Fraction) -> Fraction:
    """The nearest float32, ties to even; no subnormal numbers."""
    if x == 0:
        return x
    exponent = floor(log2(abs(x)))
    unit = Fraction(2) ** (exponent - 23)
    return round(x / unit) * unit


_SUMS = st.integers(-(EXACT - 1), EXACT - 1)
_INT32S = st.one_of(
    st.integers(int(_INT32.min), int(_INT32.max)),
    st.sampled_from([2**24 + 1, 2**25 + 1, 2**31 - 1]),
)


@given(st.lists(_SUMS, min_size=1, max_size=6), _INT32S)
@_EXAMPLES
@example([1 - EXACT, EXACT - 1], 2**24 + 1)
@example([1], 2**24)  # 2^24 + 1 is a tie in float32
@example([3], 2**24)
@example([-1], 2**31 - 1)
def test_sums_with_a_bias_are_rounded_once(sums: list[int], bias: int) -> None:
    """As an int32 register that is converted to float32; wrapped where that is too small."""
    bound = max(map(abs, sums))
    found, outside = wrapped(
        add_bias(np.array(sums, np.float32), np.array(bias, np.int32), float(bound))
    )
    registers = [(value + bias + 2**31) % 2**32 - 2**31 for value in sums]
    assert outside == sum(
        register != value + bias for register, value in zip(registers, sums, strict=True)
    )
    wanted = [to_float32(Fraction(register)) for register in registers]
    assert [Fraction(float(value)) for value in found.astype(np.float32)] == wanted


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=6), _INT32S)
@_EXAMPLES
def test_registers_wrap(sums: list[int], bias: int) -> None:
    total = add_bias(np.array(sums, np.float64), np.array(bias, np.int32), 2.0**40)
    assert total.tolist() == [value + bias for value in sums]
    found, outside = wrapped(total)
    registers = [(value + bias + 2**31) % 2**32 - 2**31 for value in sums]
    assert found.tolist() == registers
    assert outside == sum(
        register != value + bias for register, value in zip(registers, sums, strict=True)
    )


@given(st.lists(_INT32S, min_size=1, max_size=6), st.integers(0, EXACT - 129))
@_EXAMPLES
def test_parts_of_a_bias(bias: list[int], bound: int) -> None:
    parts = float_parts(np.array(bias, np.int32), float(bound))
    if max(map(abs, bias)) + bound > _INT32.max:
        assert parts is None
        return
    assert parts is not None
    assert [sum(map(int, column)) for column in zip(*parts, strict=True)] == bias
    for part in parts[:-1]:  # what is added before the last leaves sums exact
        assert bound + np.abs(part).max() < EXACT


def test_a_bias_for_each_channel() -> None:
    sums = np.arange(6, dtype=np.float32).reshape(2, 3)
    bias = np.array([[10], [2**30 + 1]], np.int32)
    found = add_bias(sums.copy(), bias, 5.0)
    assert found.dtype == np.float32
    assert found.tolist() == [[10, 11, 12], [2**30, 2**30, 2**30]]  # spacing 64 up there


# rounding


@given(st.lists(st.floats(-(2.0**24), 2.0**24, width=32), min_size=1, max_size=20))
@_EXAMPLES
@example([0.5, -0.5, 1.5, 2.5, -2.5])
@example([0.49999997, -0.49999997, 8388609.0, -8388609.0, 4194303.5])
def test_ties_away_from_zero(values: list[float]) -> None:
    array = np.array(values, np.float32)
    expected = [int(abs(v) + Fraction(1, 2)) * (1 if v > 0 else -1) for v in map(Fraction, values)]
    assert half_away(array).tolist() == expected
    half_away(array, out=array)
    assert array.tolist() == expected


def half_even(x: Fraction) -> int:
    return round(x)


def away(x: Fraction) -> int:
    return int(abs(x) + Fraction(1, 2)) * (1 if x > 0 else -1)


_ROUNDING = {"even": (np.rint, half_even), "away": (half_away, away)}
_TYPES = [UINT8, INT8, UINT16, INT16]


@pytest.mark.parametrize("name", _ROUNDING)
@given(st.data())
@_EXAMPLES
def test_requantize(name: str, data: Any) -> None:
    draw = data.draw
    rounding, oracle = _ROUNDING[name]
    kind = draw(st.sampled_from(_TYPES))
    wide = draw(st.booleans())
    limit = 2**31 - 1 if wide else EXACT - 1
    near = st.integers(-2000, 2000)
    sums = draw(st.lists(st.one_of(near, st.integers(-limit, limit)), min_size=1, max_size=20))
    if draw(st.booleans()):  # every other sum, or every fourth, is a tie
        multiplier = np.float32(2.0 ** -draw(st.integers(0, 4)))
    else:
        multiplier = np.float32(draw(st.floats(2.0**-15, 4.0, width=32)))
    zero = draw(st.integers(kind.low, kind.high))
    found = requantize(
        np.array(sums, np.float64 if wide else np.float32),
        np.asarray(multiplier),
        np.asarray(zero, kind.dtype),
        kind,
        rounding,
    )
    expected = []
    for value in sums:
        real = to_float32(to_float32(Fraction(value)) * Fraction(float(multiplier)))
        expected.append(min(max(oracle(real) + zero, kind.low), kind.high))
    assert found.astype(kind.dtype).tolist() == expected
    assert found.tolist() == expected  # nothing is left for the cast to decide


def test_requantize_by_channel() -> None:
    sums = np.array([[1, 3, 5], [1, 3, 5]], np.float32)
    multiplier = np.array([[0.5], [0.25]], np.float32)
    found = requantize(sums, multiplier, np.asarray(10, np.uint8), UINT8)
    assert found.tolist() == [[10, 12, 12], [10, 11, 11]]  # 0.5, 1.5, 2.5; 0.25, 0.75, 1.25


def test_reals_in_float64_are_rounded_once() -> None:
    """A value that float32 would move onto a tie."""
    values = np.array([0.5 + 2.0**-30, 0.5 - 2.0**-30])
    found = requantize(values, np.ones(()), np.asarray(0, np.uint8), UINT8)
    assert found.tolist() == [1, 0]
