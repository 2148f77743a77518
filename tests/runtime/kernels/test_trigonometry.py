"""Trigonometric and hyperbolic functions."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from tests.runtime.kernels.one_node import ours
from tests.runtime.kernels.special_values import SHAPES, assert_same, special, values

FUNCTIONS: dict[str, Callable[[float], float]] = {
    "Sin": np.sin,
    "Cos": np.cos,
    "Tan": np.tan,
    "Asin": np.arcsin,
    "Acos": np.arccos,
    "Atan": np.arctan,
    "Sinh": np.sinh,
    "Cosh": np.cosh,
    "Tanh": np.tanh,
    "Asinh": np.arcsinh,
    "Acosh": np.arccosh,
    "Atanh": np.arctanh,
}
ATOL = 2e-7
"""Next to a zero of the function, a unit in the last place of its argument is much."""


@pytest.mark.parametrize("kind", ["float16", "float32"])
@pytest.mark.parametrize("op_type", FUNCTIONS)
def test_agrees_with_onnxruntime(op_type: str, kind: str) -> None:
    opset = 22 if kind == "float16" else 9
    rtol = 1e-3 if kind == "float16" else 1e-5
    for x in (special(kind), *(values(kind, shape) for shape in SHAPES.values())):
        assert_same(op_type, [x], opset=opset, rtol=rtol, atol=ATOL)


@pytest.mark.parametrize("op_type", ["Sin", "Cos", "Tanh"])
def test_agrees_with_onnxruntime_in_float64(op_type: str) -> None:
    assert_same(op_type, [values("float64", (100,))], opset=22, rtol=1e-12)


@pytest.mark.parametrize("op_type", FUNCTIONS)
@pytest.mark.parametrize("shape", [(30,), ()])
def test_bfloat16_is_rounded_once(op_type: str, shape: tuple[int, ...]) -> None:
    x = np.asarray(np.tanh(values("float64", shape))).astype(ml_dtypes.bfloat16)
    x = np.asarray(x + 1).astype(x.dtype) if op_type == "Acosh" else x
    (found,) = ours(op_type, [x], opset=22)
    assert type(found) is np.ndarray
    with np.errstate(all="ignore"):
        expected = np.asarray(FUNCTIONS[op_type](x.astype(np.float64))).astype(x.dtype)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
