"""Comparisons, logic, tests for NaN and infinity, and Where."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.runtime.kernels.one_node import ours
from tests.runtime.kernels.special_values import (
    BROADCASTS,
    FLOATS,
    INTEGERS,
    SHAPES,
    assert_same,
    pairs,
    special,
    values,
)

ORDERS = ["Greater", "GreaterOrEqual", "Less", "LessOrEqual"]


@pytest.mark.parametrize("op_type", [*ORDERS, "Equal"])
@pytest.mark.parametrize("kind", ["float16", *FLOATS, *INTEGERS])
def test_comparisons(op_type: str, kind: str) -> None:
    assert_same(op_type, [*pairs(kind)], opset=19)
    for left, right in BROADCASTS.values():
        assert_same(op_type, [values(kind, left), values(kind, right, seed=1)], opset=19)


@pytest.mark.parametrize("op_type", ["Greater", "Less", "Equal"])
def test_comparisons_of_operator_set_7(op_type: str) -> None:
    kind = "int32" if op_type == "Equal" else "float32"
    assert_same(op_type, [values(kind, (3, 4)), values(kind, (4,))], opset=7)


@pytest.mark.parametrize("op_type", [*ORDERS, "Equal"])
def test_comparisons_of_bfloat16(op_type: str) -> None:
    a, b = pairs("float32")
    narrow = [value.astype(ml_dtypes.bfloat16) for value in (a[1:], b[:, 1:])]  # without NaN
    wide = [value.astype(np.float32) for value in narrow]
    (found,) = ours(op_type, narrow, opset=19)
    np.testing.assert_array_equal(found, ours(op_type, wide, opset=19)[0], strict=True)


@pytest.mark.parametrize("op_type", ["Equal", "And", "Or", "Xor"])
def test_logic(op_type: str) -> None:
    for left, right in BROADCASTS.values():
        assert_same(op_type, [values("bool", left), values("bool", right, seed=1)], opset=13)


def test_negation() -> None:
    for shape in SHAPES.values():
        assert_same("Not", [values("bool", shape)], opset=13)


@pytest.mark.parametrize("kind", ["float16", *FLOATS])
def test_nan(kind: str) -> None:
    for x in (special(kind), values(kind, ()), values(kind, (0,))):
        assert_same("IsNaN", [x], opset=20)


@pytest.mark.parametrize("kind", ["float16", *FLOATS])
@pytest.mark.parametrize("negative", [0, 1])
@pytest.mark.parametrize("positive", [0, 1])
def test_infinity(kind: str, negative: int, positive: int) -> None:
    node = {"opset": 20, "detect_negative": negative, "detect_positive": positive}
    for x in (special(kind), values(kind, ()), np.array(-np.inf, kind)):
        assert_same("IsInf", [x], **node)


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz"])
def test_nan_and_infinity_of_narrow_floats(kind: str) -> None:
    from slimctl.runtime.kernels.comparison import is_inf, is_nan

    x = np.array([np.nan, np.inf, -np.inf, 1], np.float32).astype(getattr(ml_dtypes, kind))
    has_infinity = kind in ("bfloat16", "float8_e5m2")
    assert is_nan(x).tolist() == [True, not has_infinity, not has_infinity, False]
    assert is_inf(x, detect_negative=0).tolist() == [False, has_infinity, False, False]
    assert is_inf(x, detect_positive=0).tolist() == [False, False, has_infinity, False]


@pytest.mark.parametrize("kind", ["float16", *FLOATS, "int8", "uint8", "int32", "int64"])
def test_where(kind: str) -> None:
    for left, right in BROADCASTS.values():
        a, b = values(kind, left), values(kind, right, seed=1)
        assert_same("Where", [values("bool", right, seed=2), a, b], opset=16)
        assert_same("Where", [values("bool", (), seed=2), a, b], opset=16)


@pytest.mark.parametrize("kind", ["bfloat16", "uint64", "int16", "bool", "complex64"])
def test_where_of_other_types(kind: str) -> None:
    x, y = (np.array(row, getattr(ml_dtypes, kind, kind)) for row in ([1, 0], [0, 1]))
    (found,) = ours("Where", [np.array([True, False]), x, y], opset=16)
    np.testing.assert_array_equal(found, np.ones_like(x), strict=True)


def test_strings_of_initializers_are_bytes_and_equal_those_of_inputs() -> None:
    from slimctl.runtime.kernels.comparison import equal, where

    a, b = np.array(["ä", "b"], object), np.array(["ä".encode(), b"c"])
    assert equal(a, b).tolist() == [True, False]
    assert equal(np.array("b", object), a).tolist() == [False, True]
    assert where(np.array([False, True]), a, b).tolist() == ["ä", "b"]
