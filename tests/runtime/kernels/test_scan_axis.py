"""Running sums and products."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.runtime.kernels.one_node import ours
from tests.runtime.kernels.special_values import assert_same, values

FLAGS = [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(("exclusive", "reverse"), FLAGS)
@pytest.mark.parametrize("kind", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("axis", [-3, -1, 0, 1])
def test_sums(exclusive: int, reverse: int, kind: str, axis: int) -> None:
    flags = {"exclusive": exclusive, "reverse": reverse}
    # a sum of a few values near 0 keeps the rounding of its larger terms
    tolerance = {"rtol": 1e-6, "atol": 1e-6}
    for at in (np.array(axis), np.array(axis, np.int32)):
        assert_same("CumSum", [values(kind, (3, 4, 5)), at], opset=14, **flags, **tolerance)
        assert_same("CumSum", [values(kind, (3, 4, 5)), at], opset=11, **flags, **tolerance)


@pytest.mark.parametrize(("exclusive", "reverse"), FLAGS)
@pytest.mark.parametrize("kind", ["float32", "float64", "int32", "int64", "uint32"])
def test_products(exclusive: int, reverse: int, kind: str) -> None:
    flags = {"exclusive": exclusive, "reverse": reverse}
    for axis in (-1, 0, 1):
        x = values(kind, (3, 4, 5))
        assert_same("CumProd", [x, np.array(axis)], opset=26, rtol=1e-6, **flags)


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 0)])
@pytest.mark.parametrize("exclusive", [0, 1])
def test_of_few_elements(shape: tuple[int, ...], exclusive: int) -> None:
    for axis in range(len(shape)):
        x = values("float32", shape)
        assert_same("CumSum", [x, np.array(axis)], opset=14, exclusive=exclusive)


def test_of_special_values() -> None:
    x = np.array([1, np.inf, 2, -np.inf, np.nan, 3], np.float32)
    assert_same("CumSum", [x, np.array(0)], opset=14)
    assert_same("CumProd", [x, np.array(0)], opset=26)


def test_does_not_lose_small_steps() -> None:
    x = np.full(2**20, 0.1, np.float32)
    (found,) = ours("CumSum", [x, np.array(0)], opset=14)
    exact = np.arange(1, 2**20 + 1) * np.float64(np.float32(0.1))
    np.testing.assert_allclose(found, exact, rtol=1e-7)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_narrow_floats_are_rounded_once(kind: str) -> None:
    x = np.abs(values("float64", (50,))).astype(getattr(ml_dtypes, kind, kind))
    (found,) = ours("CumSum", [x, np.array(0)], opset=14)
    expected = x.astype(np.float64).cumsum().astype(x.dtype)
    np.testing.assert_array_equal(found, expected, strict=True)
