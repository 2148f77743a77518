"""NonZero, Trilu and Det."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.runtime.kernels.one_node import Array, ours
from tests.runtime.kernels.special_values import assert_same, values


@pytest.mark.parametrize("kind", ["float32", "int32", "int64", "uint8", "bool"])
def test_non_zero(kind: str) -> None:
    x = np.array([[[1, 0], [0, 3]], [[0, 0], [2, 0]]], kind)
    for array in (x, x[0], x[0, 0], np.zeros((2, 2), kind), np.zeros((0, 2), kind)):
        assert_same("NonZero", [array], opset=13)


@pytest.mark.parametrize("value", [0, 3])
def test_non_zero_of_a_scalar(value: int) -> None:
    assert_same("NonZero", [np.array(value, np.float32)], opset=13)


def test_nan_is_not_zero_and_negative_zero_is() -> None:
    assert_same("NonZero", [np.array([np.nan, -0.0, 0.0, np.inf], np.float32)], opset=13)


@pytest.mark.parametrize("kind", ["float32", "float64", "int64", "bool"])
@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("k", [None, -9, -2, -1, 0, 1, 3, 9])
def test_triangles(kind: str, upper: int, k: int | None) -> None:
    diagonal = None if k is None else np.array(k)
    for shape in ((3, 4), (2, 4, 3), (1, 1), (0, 3), (2, 3, 0)):
        assert_same("Trilu", [values(kind, shape), diagonal], opset=14, upper=upper)


def test_triangles_of_bfloat16() -> None:
    (found,) = ours("Trilu", [np.ones((2, 2), ml_dtypes.bfloat16)], opset=14)
    np.testing.assert_array_equal(found, np.array([[1, 1], [0, 1]], found.dtype))
    assert found.dtype == ml_dtypes.bfloat16


def _matrices(kind: str) -> list[Array]:
    shapes = [(1, 1), (2, 2), (3, 4, 4), (2, 3, 5, 5), (0, 2, 2)]
    return [values(kind, shape) for shape in shapes]


def test_determinants_agree_with_onnxruntime() -> None:
    for x in _matrices("float32"):
        # a determinant is a sum of products that cancel
        assert_same("Det", [x], opset=11, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_determinants_of_triangles_are_products(kind: str) -> None:
    x = np.triu(values(kind, (5, 6, 6)))
    (found,) = ours("Det", [x], opset=22)
    expected = np.diagonal(x, axis1=1, axis2=2).astype(np.float64).prod(axis=-1)
    assert found.dtype == x.dtype
    np.testing.assert_allclose(found, expected, rtol=2 * float(np.finfo(kind).eps))


def test_a_singular_matrix_and_an_empty_one() -> None:
    assert ours("Det", [np.ones((3, 3), np.float32)], opset=22)[0] == 0
    (found,) = ours("Det", [np.zeros((0, 0), np.float32)], opset=22)
    np.testing.assert_array_equal(found, np.array(1, np.float32), strict=True)
