"""Softmax, LogSoftmax and Hardmax in both forms."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from slimctl.core.errors import ModelExecutionError
from tests.runtime.kernels.one_node import Array, ours
from tests.runtime.kernels.special_values import assert_same, values

OPERATORS = ["Softmax", "LogSoftmax", "Hardmax"]
NEAR_ZERO = 1e-6
"""Logarithms near 0 are differences of larger numbers."""


@pytest.mark.parametrize("op_type", OPERATORS)
@pytest.mark.parametrize("axis", [-3, -1, 0, 1, 2])
def test_along_an_axis(op_type: str, axis: int) -> None:
    x = values("float32", (2, 3, 4))
    assert_same(op_type, [x], opset=13, axis=axis, rtol=1e-5, atol=NEAR_ZERO)


@pytest.mark.parametrize("op_type", OPERATORS)
@pytest.mark.parametrize("opset", [7, 11])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_over_all_axes_from_one_on(op_type: str, opset: int, axis: int) -> None:
    x = values("float32", (2, 3, 4))
    assert_same(op_type, [x], opset=opset, axis=axis, rtol=1e-5, atol=NEAR_ZERO)


@pytest.mark.parametrize("op_type", OPERATORS)
def test_a_negative_axis_of_the_old_form_counts_from_the_end(op_type: str) -> None:
    x = values("float32", (2, 3, 4))
    assert_same(op_type, [x], opset=11, axis=-2, rtol=1e-5, atol=NEAR_ZERO)


@pytest.mark.parametrize("op_type", OPERATORS)
def test_the_old_form_by_default_keeps_the_first_axis(op_type: str) -> None:
    x = values("float32", (2, 3, 4))
    (found,) = ours(op_type, [x], opset=11)
    for row, expected in zip(x, found, strict=True):
        np.testing.assert_array_equal(
            ours(op_type, [row.reshape(-1)], opset=13)[0].reshape(3, 4), expected
        )


@pytest.mark.parametrize("op_type", OPERATORS)
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 2), (1,), (1, 1)])
def test_of_few_elements(op_type: str, shape: tuple[int, ...]) -> None:
    assert_same(op_type, [values("float32", shape)], opset=13)


@pytest.mark.parametrize("op_type", OPERATORS)
def test_the_old_form_has_no_axis_beyond_the_rank(op_type: str) -> None:
    with pytest.raises(ModelExecutionError, match="axis 3 is out of bounds"):
        ours(op_type, [np.ones((2, 3), np.float32)], opset=9, axis=3)


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax"])
def test_of_special_values(op_type: str) -> None:
    inf, nan = np.inf, np.nan
    rows = [
        [nan, 1, 2],
        [inf, 1, 2],
        [-inf, -inf, -inf],
        [-inf, 1, 2],
        [1e30, -1e30, 0],
        [88, 89, 90],
    ]
    assert_same(op_type, [np.array(rows, np.float32)], opset=13, rtol=1e-5)


def test_hardmax_takes_the_first_of_equal_values() -> None:
    (found,) = ours("Hardmax", [np.array([[1, 3, 3], [2, 2, 2]], np.float32)], opset=13)
    assert found.tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("kind", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax"])
def test_is_its_formula(op_type: str, kind: str) -> None:
    x = values("float64", (5, 40)).astype(getattr(ml_dtypes, kind, kind))
    (found,) = ours(op_type, [x], opset=13)
    expected = _softmax(x.astype(np.float64))
    expected = np.log(expected) if op_type == "LogSoftmax" else expected
    assert found.dtype == x.dtype
    # half a unit of the narrow type, and float32's error where it meets a tie
    rtol = {"float64": 1e-13, "float16": 2**-11 + 1e-6, "bfloat16": 2**-8 + 1e-6}[kind]
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=rtol, atol=3e-8)


def _softmax(x: Array) -> Array:
    power = np.exp(x)
    return np.asarray(power / power.sum(axis=-1, keepdims=True))
