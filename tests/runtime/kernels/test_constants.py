"""Constants, shapes, ranges, unit matrices, one-hot vectors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from slimctl.core.errors import ModelExecutionError
from slimctl.runtime.kernels.constants import constant, one_hot
from tests.runtime.kernels.one_node import Array, ours, theirs
from tests.runtime.kernels.special_values import assert_same


@pytest.mark.parametrize(
    ("attribute", "value", "expected"),
    [
        ("value_int", 3, np.array(3)),
        ("value_ints", (3, 4), np.array([3, 4])),
        ("value_float", 0.5, np.array(0.5, np.float32)),
        ("value_floats", (0.5, 2.0), np.array([0.5, 2], np.float32)),
        ("value", np.array([[1]], np.int8), np.array([[1]], np.int8)),
    ],
)
def test_constants(attribute: str, value: Any, expected: Array) -> None:
    np.testing.assert_array_equal(constant(**{attribute: value}), expected, strict=True)
    stored = numpy_helper.from_array(value) if attribute == "value" else value
    (found,) = ours("Constant", [], opset=13, **{attribute: stored})
    np.testing.assert_array_equal(found, expected, strict=True)


def test_constant_strings() -> None:
    (one,) = ours("Constant", [], opset=13, value_string="ä")
    assert one.shape == ()
    assert one.item() == "ä"
    (several,) = ours("Constant", [], opset=13, value_strings=["a", "b"])
    assert several.tolist() == ["a", "b"]
    value = helper.make_tensor("", TensorProto.STRING, [1], ["ä".encode()])
    (stored,) = ours("Constant", [], opset=13, value=value)
    assert stored.tolist() == ["ä"]


def test_an_empty_list_is_a_constant() -> None:
    np.testing.assert_array_equal(constant(value_ints=()), np.zeros(0, np.int64), strict=True)


def test_constants_without_a_dense_value_are_errors() -> None:
    with pytest.raises(ValueError, match="sparse constants are not supported"):
        constant(sparse_value=object())
    with pytest.raises(ValueError, match="without a value"):
        constant()


@pytest.mark.parametrize("kind", ["float32", "int64", "bool", "float16"])
def test_constant_of_shape(kind: str) -> None:
    value = numpy_helper.from_array(np.array([1], kind))
    for shape in ([2, 3], [0], [2, 0], [1]):
        assert_same("ConstantOfShape", [np.array(shape)], opset=9, value=value)
        assert_same("ConstantOfShape", [np.array(shape)], opset=9)


def test_constant_of_no_shape_is_a_scalar() -> None:
    assert_same("ConstantOfShape", [np.zeros(0, np.int64)], opset=9)


def test_constant_of_shape_of_bfloat16() -> None:
    from slimctl.runtime.kernels.constants import constant_of_shape

    found = constant_of_shape(np.array([2]), value=np.array([1.5], ml_dtypes.bfloat16))
    np.testing.assert_array_equal(found, np.array([1.5, 1.5], ml_dtypes.bfloat16), strict=True)


@pytest.mark.parametrize("start", [None, -10, -2, 0, 1, 3, 9])
@pytest.mark.parametrize("end", [None, -10, -1, 0, 2, 3, 9])
def test_shape_clips_its_range(start: int | None, end: int | None) -> None:
    given = {"start": start, "end": end}
    attributes = {name: value for name, value in given.items() if value is not None}
    assert_same("Shape", [np.zeros((2, 3, 4), np.float32)], opset=15, **attributes)


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)])
def test_shape_and_size(shape: tuple[int, ...]) -> None:
    assert_same("Shape", [np.zeros(shape, np.float32)], opset=7)
    assert_same("Size", [np.zeros(shape, np.float32)], opset=7)


@pytest.mark.parametrize("kind", ["int16", "int32", "int64", "float32", "float64"])
@pytest.mark.parametrize(
    "bounds", [(0, 5, 1), (1, 10, 3), (10, 1, -3), (5, 1, 1), (1, 5, -1), (-3, 4, 7), (2, 2, 1)]
)
def test_ranges(kind: str, bounds: tuple[int, int, int]) -> None:
    assert_same("Range", [np.array(bound, kind) for bound in bounds], opset=11)


def test_ranges_of_broken_steps() -> None:
    for bounds in ((0, 1, 0.1), (0.1, 1.1, 0.1), (-1, 1, 0.3), (1, -1, -0.25)):
        inputs = [np.array(bound, np.float32) for bound in bounds]
        (found,), (expected,) = ours("Range", inputs, opset=11), theirs("Range", inputs, opset=11)
        # onnxruntime adds, and rounds, once for each element
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-7)
        start, _, step = (value.astype(np.float64) for value in inputs)
        np.testing.assert_allclose(found, start + np.arange(len(found)) * step, rtol=0, atol=1e-7)


def test_the_length_of_a_range_is_that_of_onnxruntime() -> None:
    rng = np.random.default_rng(0)
    for start, step in rng.uniform(0.01, 1, (200, 2)).astype(np.float32):
        limit = start + step * np.float32(rng.integers(1, 20))  # here rounding decides
        inputs = [np.asarray(value) for value in (start, limit, step)]
        assert len(ours("Range", inputs, opset=11)[0]) == len(theirs("Range", inputs, opset=11)[0])


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_ranges_of_narrow_floats_are_computed_in_float32(kind: str) -> None:
    narrow = getattr(ml_dtypes, kind, kind)
    bounds = [np.array(bound, narrow) for bound in (0, 2, 0.1)]
    (found,) = ours("Range", bounds, opset=27)
    expected = (np.arange(len(found)) * np.float32(bounds[2])).astype(narrow)
    np.testing.assert_array_equal(found, expected, strict=True)
    (rough,) = ours("Range", bounds, opset=27, stash_type=TensorProto.FLOAT16)
    assert rough.dtype == narrow


def test_a_range_moves() -> None:
    with pytest.raises(ModelExecutionError, match="steps of 0"):
        ours("Range", [np.array(0), np.array(3), np.array(0)], opset=11)


@pytest.mark.parametrize("k", [-5, -1, 0, 1, 2, 9])
def test_eye_like(k: int) -> None:
    assert_same("EyeLike", [np.zeros((3, 4), np.int64)], opset=9, k=k)
    assert_same("EyeLike", [np.zeros((3, 4), np.int32)], opset=9, k=k, dtype=TensorProto.DOUBLE)


def test_eye_like_takes_matrices() -> None:
    with pytest.raises(ModelExecutionError, match="not rank 1"):
        ours("EyeLike", [np.zeros(3, np.float32)], opset=9)


@pytest.mark.parametrize("axis", [-3, -2, -1, 0, 1, 2])
@pytest.mark.parametrize("kind", ["int64", "float32"])
def test_one_hot(axis: int, kind: str) -> None:
    indices = np.array([[0, 2, -1], [3, -3, -4]]).astype(kind)
    for depth in (np.array(3, kind), np.array([3], kind)):
        assert_same("OneHot", [indices, depth, np.array([5, 7], kind)], opset=11, axis=axis)


def test_one_hot_of_a_scalar_and_of_nothing() -> None:
    values = np.array([0, 1], np.float32)
    assert_same("OneHot", [np.zeros((0, 2), np.int64), np.array(3), values], opset=11)
    (found,) = ours("OneHot", [np.array(1), np.array(3), values], opset=11)
    np.testing.assert_array_equal(found, np.array([0, 1, 0], np.float32), strict=True)


def test_one_hot_of_other_types() -> None:
    index, depth = np.array([1]), np.array(2)
    narrow = one_hot(index, depth, np.array([0.5, 2], ml_dtypes.bfloat16))
    np.testing.assert_array_equal(narrow, np.array([[0.5, 2]], ml_dtypes.bfloat16), strict=True)
    assert one_hot(index, depth, np.array(["no", "yes"], object)).tolist() == [["no", "yes"]]
    assert one_hot(index, depth, np.array([b"no", b"yes"])).tolist() == [["no", "yes"]]


def test_indices_of_one_hot_are_truncated() -> None:
    # onnxruntime has no float32 indices into int64 values
    found = one_hot(np.array([0.9, -0.9, 1.5], np.float32), np.array(2.5), np.array([0, 1]))
    assert found.tolist() == [[1, 0], [1, 0], [0, 1]]
