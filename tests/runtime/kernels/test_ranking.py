"""ArgMax, ArgMin and TopK."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from slimctl.core.errors import ModelExecutionError
from tests.runtime.kernels.one_node import ours
from tests.runtime.kernels.special_values import assert_same, values

KINDS = ["float16", "float32", "float64", "int8", "uint8", "int32", "int64"]


@pytest.mark.parametrize("op_type", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("kind", ["float32", "float64", "int8", "uint8", "int32", "int64"])
@pytest.mark.parametrize("axis", [-3, -1, 0, 1])
def test_extremes_along_an_axis(op_type: str, kind: str, axis: int) -> None:
    x = (values(kind, (3, 4, 5)) / 3).astype(kind)  # with many equal values
    for keepdims in (0, 1):
        node = {"axis": axis, "keepdims": keepdims}
        assert_same(op_type, [x], opset=13, select_last_index=0, **node)
        assert_same(op_type, [x], opset=13, select_last_index=1, **node)
        if kind in ("float32", "int32"):
            assert_same(op_type, [x], opset=11, **node)


@pytest.mark.parametrize("op_type", ["ArgMax", "ArgMin"])
def test_extremes_of_operator_set_7(op_type: str) -> None:
    assert_same(op_type, [values("float32", (3, 4))], opset=7)


@pytest.mark.parametrize(("op_type", "best"), [("ArgMax", [3, 1]), ("ArgMin", [-3, -1])])
def test_extremes_of_bfloat16(op_type: str, best: list[int]) -> None:
    x = np.array([[0, *best, best[0]]], ml_dtypes.bfloat16)
    (first,) = ours(op_type, [x], opset=13, axis=1)
    (last,) = ours(op_type, [x], opset=13, axis=1, select_last_index=1)
    np.testing.assert_array_equal(first, np.array([[1]]), strict=True)
    np.testing.assert_array_equal(last, np.array([[3]]), strict=True)


@pytest.mark.parametrize("op_type", ["ArgMax", "ArgMin"])
def test_nan_is_an_extreme(op_type: str) -> None:
    # onnxruntime finds it only where it comes first
    x = np.array([1, np.nan, 2, np.nan], np.float32)
    assert ours(op_type, [x], opset=13)[0].tolist() == [1]
    assert ours(op_type, [x], opset=13, select_last_index=1)[0].tolist() == [3]


@pytest.mark.parametrize("kind", ["float32", "float64", "int8", "uint8", "int32", "int64"])
@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("largest", [0, 1])
def test_top_k(kind: str, axis: int, largest: int) -> None:
    x = (values(kind, (6, 7, 5)) / 3).astype(kind)  # with many equal values
    for count in (0, 1, 3, 5):
        node = {"axis": axis, "largest": largest, "outputs": 2}
        assert_same("TopK", [x, np.array([count])], opset=24, **node)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_top_k_of_narrow_floats(kind: str) -> None:
    x = np.array([[1, 3, 2, 3]]).astype(getattr(ml_dtypes, kind, kind))
    found, index = ours("TopK", [x, np.array([3])], opset=24, outputs=2)
    np.testing.assert_array_equal(found, np.array([[3, 3, 2]], x.dtype), strict=True)
    np.testing.assert_array_equal(index, np.array([[1, 3, 2]]), strict=True)


@pytest.mark.parametrize("largest", [0, 1])
def test_top_k_with_nan(largest: int) -> None:
    x = np.array([1, np.nan, 3, 3, -np.inf, np.nan, np.inf], np.float32)
    for count in range(8):
        assert_same("TopK", [x, np.array([count])], opset=11, outputs=2, largest=largest)


def test_top_k_of_integers_at_the_end_of_their_range() -> None:
    x = np.array([-(2**63), 0, 2**63 - 1, -(2**63)])
    for largest in (0, 1):
        assert_same("TopK", [x, np.array([4])], opset=11, outputs=2, largest=largest)


def test_top_k_without_order_holds_the_same_elements() -> None:
    x = values("float32", (50,))
    found, index = ours("TopK", [x, np.array([9])], opset=11, outputs=2, sorted=0)
    np.testing.assert_array_equal(np.sort(found), np.sort(x)[-9:])
    np.testing.assert_array_equal(x[index], found)


def test_top_k_of_operator_set_10() -> None:
    x = values("float32", (4, 5))
    assert_same("TopK", [x, np.array([2])], opset=10, axis=0, outputs=2)


def test_top_k_of_operator_set_9_has_an_attribute() -> None:
    assert_same("TopK", [values("float32", (4, 5))], opset=9, k=2, axis=0, outputs=2)


def test_top_k_is_not_more_than_there_are() -> None:
    with pytest.raises(ModelExecutionError, match="there are no 4 elements along an axis of 3"):
        ours("TopK", [np.ones(3, np.float32), np.array([4])], opset=11, outputs=2)
