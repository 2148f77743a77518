"""Arithmetic: against onnxruntime in every type, and by hand where onnxruntime has no say."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from slimctl.core.errors import ModelExecutionError
from tests.runtime.kernels.one_node import ours
from tests.runtime.kernels.special_values import (
    BROADCASTS,
    FLOATS,
    INTEGERS,
    SHAPES,
    WIDE_INTEGERS,
    assert_same,
    pairs,
    special,
    values,
)

OPSET = 22
NARROW = ("float16", *FLOATS)

BINARY = {
    "Add": (*NARROW, *INTEGERS),
    "Sub": (*NARROW, *INTEGERS),
    "Mul": (*NARROW, *INTEGERS),
    "Div": (*NARROW, *INTEGERS),
    "Pow": FLOATS,
    "Max": (*NARROW, *WIDE_INTEGERS, "int8", "uint8"),
    "Min": (*NARROW, *WIDE_INTEGERS, "int8", "uint8"),
    "Sum": FLOATS,
    "Mean": ("float32",),
}
UNARY = {
    "Neg": ("float16", *FLOATS, "int8", "int32", "int64"),
    "Abs": ("float16", *FLOATS, *INTEGERS),
    "Sign": ("float16", *FLOATS, *INTEGERS),
    "Sqrt": ("float16", *FLOATS),
    "Reciprocal": ("float16", *FLOATS),
    "Exp": ("float16", *FLOATS),
    "Log": ("float16", *FLOATS),
    "Ceil": ("float16", *FLOATS),
    "Floor": ("float16", *FLOATS),
    "Round": ("float16", *FLOATS),
    "Identity": ("float16", *FLOATS, *INTEGERS, "bool"),
}


def _table(operators: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(op_type, kind) for op_type, kinds in operators.items() for kind in kinds]


@pytest.mark.parametrize(("op_type", "kind"), _table(BINARY))
def test_binary_operators_broadcast(op_type: str, kind: str) -> None:
    for left, right in BROADCASTS.values():
        a, b = values(kind, left), values(kind, right, seed=1)
        assert_same(op_type, [np.asarray(abs(a)) if op_type == "Pow" else a, b], opset=OPSET)


@pytest.mark.parametrize(("op_type", "kind"), _table(BINARY))
def test_binary_operators_of_special_values(op_type: str, kind: str) -> None:
    a, b = pairs(kind)
    if op_type == "Div" and not kind.startswith("float"):
        b = b[b != 0]  # onnxruntime divides by 0, and takes the process with it
        if kind.startswith("i"):
            b = b[b != -1]  # nor does the smallest integer have an opposite
    assert_same(op_type, [a, b], opset=OPSET)


@pytest.mark.parametrize(("op_type", "kind"), _table(UNARY))
def test_unary_operators(op_type: str, kind: str) -> None:
    for shape in SHAPES.values():
        assert_same(op_type, [values(kind, shape)], opset=OPSET)
    assert_same(op_type, [values(kind, (3, 4)).T], opset=OPSET)
    x = special(kind)
    if (op_type, kind) == ("Sign", "float16"):
        x = x[~np.isnan(x)]  # onnxruntime says 0 for this type alone
    assert_same(op_type, [x], opset=OPSET)


@pytest.mark.parametrize(
    ("kind", "fmod"),  # onnxruntime has no other remainder of floats
    [(kind, 0) for kind in INTEGERS] + [(kind, 1) for kind in (*NARROW, *INTEGERS)],
)
def test_remainders(kind: str, fmod: int) -> None:
    floats = kind.startswith("float")
    for left, right in BROADCASTS.values():
        assert_same(
            "Mod", [values(kind, left), values(kind, right, seed=1)], opset=OPSET, fmod=fmod
        )
    a, b = pairs(kind)
    assert_same("Mod", [a, b if floats else b[(b != 0) & (b != -1)]], opset=OPSET, fmod=fmod)


def test_a_remainder_of_floats_has_the_sign_of_the_divisor() -> None:
    inf, nan = np.inf, np.nan
    a = np.array([5, -5, 5, -5, 0, inf, 1, -1, 1, nan], np.float32)
    b = np.array([3, 3, -3, -3, -3, 3, 0, inf, -inf, 3], np.float32)
    (found,) = ours("Mod", [a, b], opset=28)
    np.testing.assert_array_equal(found, [2, 1, -1, -2, 0, nan, nan, inf, -inf, nan])
    assert np.signbit(found[4])


def test_division_of_integers_is_truncated() -> None:
    a, b = np.array([7, -7, 7, -7, -128], np.int8), np.array([2, 2, -2, -2, -1], np.int8)
    (found,) = ours("Div", [a, b], opset=OPSET)
    np.testing.assert_array_equal(found, np.array([3, -3, -3, 3, -128], np.int8), strict=True)


@pytest.mark.parametrize("op_type", ["Div", "Mod"])
def test_an_integer_is_not_divided_by_zero(op_type: str) -> None:
    with pytest.raises(ModelExecutionError, match="divided by 0"):
        ours(op_type, [np.array([1]), np.array([0])], opset=OPSET)


@pytest.mark.parametrize("op_type", ["Add", "Sub", "Mul"])
def test_integers_wrap_around(op_type: str) -> None:
    assert_same(op_type, [*pairs("int8")], opset=OPSET)


@pytest.mark.parametrize("base", ["int32", "int64", *FLOATS])
@pytest.mark.parametrize("exponent", ["int32", "int64", *FLOATS])
def test_powers_have_the_type_of_the_base(base: str, exponent: str) -> None:
    x = np.array([[1], [2], [3], [-2], [10]], base)
    y = np.array([0, 1, 2, 3, 5], exponent)
    assert_same("Pow", [x, y], opset=15)


def test_integers_to_negative_and_broken_powers_are_truncated() -> None:
    x = np.array([1, -1, 2, 4, 4], np.int32)
    assert_same("Pow", [x, np.array([-1, -1, -1, -2, -1], np.int32)], opset=15)
    assert_same("Pow", [x[2:], np.array([0.5, 0.5, 1.5], np.float32)], opset=15)


def test_large_powers_of_integers_are_exact() -> None:
    # onnxruntime computes in float64: it says 4052555153018976256
    (found,) = ours("Pow", [np.array([3]), np.array([39])], opset=15)
    assert found.tolist() == [3**39]


def test_an_exponent_that_float32_does_not_hold_is_not_rounded_first() -> None:
    (found,) = ours("Pow", [np.array([-1], np.float32), np.array([2**24 + 1])], opset=15)
    np.testing.assert_array_equal(found, np.array([-1], np.float32), strict=True)


def test_a_narrow_exponent_does_not_narrow_the_base() -> None:
    (found,) = ours("Pow", [np.array([3.3], np.float32), np.array([2], np.float16)], opset=15)
    np.testing.assert_allclose(found, np.array([3.3], np.float32) ** 2, rtol=1e-6, strict=True)


@pytest.mark.parametrize("op_type", ["Max", "Min", "Sum", "Mean"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_tensors(op_type: str, count: int) -> None:
    shapes = [(2, 3), (3,), (2, 1)][:count]
    inputs = [values("float32", shape, seed) for seed, shape in enumerate(shapes)]
    assert_same(op_type, inputs, opset=8)
    assert_same(op_type, inputs, opset=13)


def test_halves_are_rounded_to_even() -> None:
    x = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5], np.float32)
    (found,) = ours("Round", [x], opset=11)
    assert found.tolist() == [-2, -2, 0, 0, 2, 2]


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("op_type", ["Add", "Mul", "Exp", "Sqrt"])
@pytest.mark.parametrize("shape", [(40,), ()])
def test_narrow_floats_are_rounded_once(op_type: str, kind: str, shape: tuple[int, ...]) -> None:
    narrow = np.dtype(getattr(ml_dtypes, kind, kind))
    count = 2 if op_type in ("Add", "Mul") else 1
    inputs = [np.abs(values("float64", shape, seed)).astype(narrow) for seed in range(count)]
    wide = [value.astype(np.float64) for value in inputs]
    exact = {"Add": np.add, "Mul": np.multiply, "Exp": np.exp, "Sqrt": np.sqrt}[op_type](*wide)
    (found,) = ours(op_type, inputs, opset=OPSET)
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found, np.asarray(exact).astype(narrow), strict=True)


def test_identity_of_a_sequence_is_the_sequence() -> None:
    from slimctl.runtime.kernels.elementwise import identity

    sequence = [np.array([1]), np.array([2, 3])]
    assert identity(sequence) is sequence
