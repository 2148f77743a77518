"""Reductions in both forms, against onnxruntime and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.runtime.kernels.one_node import Array, ours, theirs
from tests.runtime.kernels.special_values import assert_same, values

FORMULAS: dict[str, Callable[..., Any]] = {
    "ReduceSum": np.sum,
    "ReduceMean": np.mean,
    "ReduceMax": np.max,
    "ReduceMin": np.min,
    "ReduceProd": np.prod,
    "ReduceL1": lambda x, **axes: np.sum(np.abs(x), **axes),
    "ReduceL2": lambda x, **axes: np.sqrt(np.sum(x * x, **axes)),
    "ReduceSumSquare": lambda x, **axes: np.sum(x * x, **axes),
    "ReduceLogSum": lambda x, **axes: np.log(np.sum(x, **axes)),
    "ReduceLogSumExp": lambda x, **axes: np.log(np.sum(np.exp(x), **axes)),
}
AXES = {
    "all": None,
    "none given": (),
    "first": (0,),
    "last": (-1,),
    "two": (0, 2),
    "two negative": (-1, -3),
    "three": (2, 0, 1),
}
CANCELS = 2e-6
"""Sums of float32 in another order, of values up to 10: they differ where they cancel."""


def _reduce(op_type: str, x: Array, axes: Any, **node: Any) -> None:
    tolerances = {"rtol": 1e-5 if x.dtype != np.float64 else 1e-12, "atol": CANCELS}
    indices = None if axes is None else np.array(axes, np.int64)
    assert_same(op_type, [x, indices], opset=20, **tolerances, **node)


@pytest.mark.parametrize("op_type", FORMULAS)
@pytest.mark.parametrize("kind", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_axes_that_are_an_input(op_type: str, kind: str, axes: Any) -> None:
    x = np.abs(values(kind, (2, 3, 4)))
    if op_type == "ReduceProd":
        x = np.minimum(
            x, 2
        )  # a product that int32 does not hold is undefined, here it wraps around
    for keepdims in (0, 1):
        _reduce(op_type, x, axes, keepdims=keepdims)


@pytest.mark.parametrize("op_type", FORMULAS)
@pytest.mark.parametrize("opset", [7, 11, 12])
@pytest.mark.parametrize("axes", [None, (0,), (2, 0), (0, 1, 2)])
def test_axes_that_are_an_attribute(op_type: str, opset: int, axes: Any) -> None:
    x = np.abs(values("float32", (2, 3, 4)))
    for keepdims in (0, 1):
        given = {"keepdims": keepdims} if axes is None else {"keepdims": keepdims, "axes": axes}
        assert_same(op_type, [x], opset=opset, rtol=1e-5, **given)


@pytest.mark.parametrize("op_type", sorted(FORMULAS.keys() - {"ReduceSum"}))
@pytest.mark.parametrize("axes", [None, (-1,), (-2, 0)])
def test_axes_that_are_an_attribute_until_operator_set_17(op_type: str, axes: Any) -> None:
    given = {} if axes is None else {"axes": axes}
    x = np.abs(values("float32", (2, 3, 4)))
    assert_same(op_type, [x], opset=17, rtol=1e-5, **given)


def test_sums_have_their_axes_as_an_input_from_operator_set_13_on() -> None:
    x = values("float32", (2, 3))
    assert_same("ReduceSum", [x, np.array([1])], opset=13, rtol=1e-5)
    assert_same("ReduceSum", [x], opset=13, rtol=1e-5)


@pytest.mark.parametrize("op_type", FORMULAS)
@pytest.mark.parametrize("axes", [None, ()])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_no_axes_may_mean_no_reduction(op_type: str, axes: Any, keepdims: int) -> None:
    x = values("float32", (2, 3)) if op_type != "ReduceLogSum" else np.ones((2, 3), np.float32)
    _reduce(op_type, x, axes, noop_with_empty_axes=1, keepdims=keepdims)


@pytest.mark.parametrize("op_type", FORMULAS)
def test_scalars(op_type: str) -> None:
    _reduce(op_type, np.array(3, np.float32), None)
    _reduce(op_type, np.array(3, np.float32), None, keepdims=0)
    _reduce(op_type, np.array(3, np.int64), None)


@pytest.mark.parametrize("op_type", sorted(FORMULAS.keys() - {"ReduceMean"}))
@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 2, 3), (0, 0, 0)])
def test_nothing_to_reduce(op_type: str, shape: tuple[int, ...]) -> None:
    for keepdims in (0, 1):
        _reduce(op_type, values("float32", shape), (1,), keepdims=keepdims)


@pytest.mark.parametrize("kind", ["int32", "uint8", "bool"])
def test_the_largest_and_the_smallest_of_nothing(kind: str) -> None:
    x, axes = np.zeros((2, 0), kind), np.array([1])
    low, high = (False, True) if kind == "bool" else (np.iinfo(kind).min, np.iinfo(kind).max)
    (found,) = ours("ReduceMax", [x, axes], opset=20)
    np.testing.assert_array_equal(found, np.array([[low]] * 2, kind), strict=True)
    (found,) = ours("ReduceMin", [x, axes], opset=20)
    np.testing.assert_array_equal(found, np.array([[high]] * 2, kind), strict=True)


def test_the_mean_of_nothing_is_nan() -> None:
    # ONNX calls it undefined; onnxruntime says 0
    (found,) = ours("ReduceMean", [np.zeros((2, 0), np.float32), np.array([1])], opset=18)
    np.testing.assert_array_equal(found, np.full((2, 1), np.nan, np.float32), strict=True)


@pytest.mark.parametrize("op_type", sorted(FORMULAS.keys() - {"ReduceMax", "ReduceMin"}))
def test_special_values(op_type: str) -> None:
    inf, nan = np.inf, np.nan
    rows = [
        [nan, 1],
        [1, nan],
        [inf, 1],
        [-inf, inf],
        [-inf, -inf],
        [-inf, 2],
        [100, 101],
        [-0.0, 0.0],
    ]
    _reduce(op_type, np.array(rows, np.float32), (1,))


@pytest.mark.parametrize("op_type", ["ReduceMax", "ReduceMin"])
def test_nan_is_the_largest_and_the_smallest(op_type: str) -> None:
    inf, nan = np.inf, np.nan
    # onnxruntime lets NaN win only where it comes first
    x, axes = np.array([[nan, 1], [1, nan]], np.float32), np.array([1])
    assert np.isnan(ours(op_type, [x, axes], opset=18)[0]).all()
    assert np.isnan(theirs(op_type, [x, axes], opset=18)[0]).tolist() == [[True], [False]]
    _reduce(op_type, np.array([[inf, 1], [-inf, inf], [-inf, -inf]], np.float32), (1,))


@pytest.mark.parametrize("op_type", ["ReduceMax", "ReduceMin"])
@pytest.mark.parametrize("kind", ["int8", "uint8", "int32", "int64", "bool", "float16"])
def test_the_ends_of_narrow_types(op_type: str, kind: str) -> None:
    for axes in AXES.values():
        _reduce(op_type, values(kind, (2, 3, 4)), axes)


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_means_and_roots_of_integers_are_truncated(kind: str) -> None:
    x = np.array([[-7, 2], [7, 2], [3, 4], [1, -1]], kind)
    _reduce("ReduceMean", x, (1,))
    _reduce("ReduceL2", x, (1,))
    _reduce("ReduceLogSumExp", x, (1,))


def test_sums_and_means_of_large_integers_are_exact() -> None:
    x = np.array([[2**53 + 1, 2**53 + 1, 2**53 + 1]])
    assert ours("ReduceSum", [x], opset=13)[0].item() == 3 * 2**53 + 3
    assert ours("ReduceMean", [x], opset=18)[0].item() == 2**53 + 1
    assert ours("ReduceMax", [x], opset=18)[0].item() == 2**53 + 1
    small = np.array([2**31 - 1, 2**31 - 3], np.int32)
    assert ours("ReduceMean", [small], opset=18)[0].item() == 2**31 - 2
    large = np.array([2**63 + 1, 2], np.uint64)
    assert ours("ReduceMean", [large], opset=18)[0].item() == 2**62 + 1


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("op_type", FORMULAS)
@pytest.mark.parametrize("axis", [0, 1])
def test_is_right_to_the_last_place(op_type: str, kind: str, axis: int) -> None:
    """All is accumulated in float64 and rounded once, along any axis."""
    x = np.abs(values("float64", (300, 300))) / 4 + 0.75
    x = x.astype(getattr(ml_dtypes, kind, kind)) / np.array(2, getattr(ml_dtypes, kind, kind))
    wide = x.astype(np.float64)
    (found,) = ours(op_type, [x, np.array([axis])], opset=18)
    expected = FORMULAS[op_type](wide, axis=axis, keepdims=True)
    assert found.dtype == x.dtype
    # half a unit in the last place, and float32's own where exponentials or squares have one
    rtol = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24}[kind] + 2e-7
    normal = float(ml_dtypes.finfo(x.dtype).smallest_normal)
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=rtol, atol=normal / 4)


def test_a_sum_does_not_depend_on_where_it_begins() -> None:
    x = np.full((2**22, 2), 0.1, np.float32)  # float32's own sum along this axis is off by percents
    (found,) = ours("ReduceSum", [x, np.array([0])], opset=13, keepdims=0)
    np.testing.assert_allclose(found, 2**22 * np.float64(np.float32(0.1)), rtol=1e-7)


def test_squares_may_leave_the_range_of_float32() -> None:
    x = np.full(4, 1e30, np.float32)
    assert ours("ReduceL2", [x], opset=18)[0].item() == pytest.approx(2e30)
    assert ours("ReduceSumSquare", [x], opset=18)[0].item() == np.inf
