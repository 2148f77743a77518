"""Reading and writing at indices, against onnxruntime and by hand."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from slimctl.core.errors import ModelExecutionError
from tests.runtime.kernels.one_node import Array, assert_agrees, ours, theirs

_RANDOM = np.random.default_rng(0)
_X = _RANDOM.standard_normal((3, 4, 5)).astype(np.float32)
_REDUCTIONS = ["none", "add", "mul", "min", "max"]


def _ints(*values: int) -> Array:
    return np.array(values, np.int64)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_gather(axis: int, shape: tuple[int, ...], dtype: type) -> None:
    indices = _RANDOM.integers(-3, 3, shape).astype(dtype)
    assert_agrees("Gather", [_X, np.asarray(indices)], opset=13, axis=axis)


def test_gather_of_a_scalar_is_an_array() -> None:
    found = ours("Gather", [np.arange(3), np.asarray(1)], opset=13)[0]
    assert isinstance(found, np.ndarray)
    assert found.shape == ()


def test_gather_refuses_indices_outside() -> None:
    with pytest.raises(ModelExecutionError):
        ours("Gather", [_X, _ints(3)], opset=13)


@pytest.mark.parametrize("axis", [0, 1, 2, -3])
def test_gather_elements(axis: int) -> None:
    indices = _RANDOM.integers(-3, 3, (2, 3, 4))
    assert_agrees("GatherElements", [_X, indices], opset=13, axis=axis)
    assert_agrees("GatherElements", [_X, indices[:, :0]], opset=11, axis=axis)


@pytest.mark.parametrize(
    ("batch_dims", "depth"), [(0, 1), (0, 2), (0, 3), (0, 4), (1, 1), (1, 3), (2, 1), (2, 2)]
)
def test_gather_nd(batch_dims: int, depth: int) -> None:
    data = _RANDOM.standard_normal((2, 3, 4, 5)).astype(np.float32)
    sizes = data.shape[batch_dims : batch_dims + depth]
    shape = (*data.shape[:batch_dims], 3)
    indices = np.stack([_RANDOM.integers(-size, size, shape) for size in sizes], axis=-1)
    assert_agrees("GatherND", [data, indices], opset=12, batch_dims=batch_dims)
    if not batch_dims:
        assert_agrees("GatherND", [data, indices], opset=11)


@pytest.mark.parametrize("reduction", _REDUCTIONS)
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_scatter_elements(reduction: str, axis: int) -> None:
    shape = (2, 3, 4)
    indices = _RANDOM.integers(-_X.shape[axis], _X.shape[axis], shape)
    updates = _RANDOM.standard_normal(shape).astype(np.float32)
    inputs = [_X, indices, updates]
    assert_agrees("ScatterElements", inputs, opset=18, axis=axis, reduction=reduction)
    if reduction == "none":
        assert_agrees("Scatter", inputs, opset=9, axis=axis)
        assert_agrees("ScatterElements", inputs, opset=11, axis=axis)


@pytest.mark.parametrize("reduction", _REDUCTIONS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_scatter_nd(reduction: str, depth: int) -> None:
    indices = np.stack([_RANDOM.integers(-n, n, (6, 2)) for n in _X.shape[:depth]], axis=-1)
    updates = _RANDOM.standard_normal((6, 2, *_X.shape[depth:])).astype(np.float32)
    assert_agrees("ScatterND", [_X, indices, updates], opset=18, reduction=reduction)


def test_the_last_of_equal_indices_stays() -> None:
    updates = np.array([1, 2, 3], np.float32)
    inputs = [np.zeros(3, np.float32), _ints(1, 1, 1), updates]
    np.testing.assert_array_equal(ours("ScatterElements", inputs, opset=18)[0], [0, 3, 0])


def test_scatter_rounds_sums_of_narrow_floats_once() -> None:
    tiny = np.full(8, 2.0**-9, ml_dtypes.bfloat16)  # a quarter of a unit in the last place of 1
    inputs = [np.ones(1, ml_dtypes.bfloat16), np.zeros(8, np.int64), tiny]
    found = ours("ScatterElements", inputs, opset=18, reduction="add")[0]
    assert found.dtype == ml_dtypes.bfloat16
    assert float(found[0]) == 1 + 8 * 2.0**-9


def test_scatter_refuses() -> None:
    inputs = [np.zeros(3, np.float32), _ints(3), np.ones(1, np.float32)]
    with pytest.raises(ModelExecutionError):
        ours("ScatterElements", inputs, opset=18)
    with pytest.raises(ModelExecutionError, match="no reduction 'mean'"):
        ours("ScatterElements", inputs, opset=18, reduction="mean")


@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_tensor_scatter(mode: str) -> None:
    cache = _RANDOM.standard_normal((2, 3, 5, 4)).astype(np.float32)
    update = _RANDOM.standard_normal((2, 3, 2, 4)).astype(np.float32)
    first = _ints(3, 0) if mode == "linear" else _ints(4, 1)
    expected = cache.copy()
    for batch, start in enumerate(first):
        for step in range(2):
            expected[batch, :, (start + step) % 5] = update[batch, :, step]
    found = ours("TensorScatter", [cache, update, first], opset=24, mode=mode)[0]
    np.testing.assert_array_equal(found, expected)


def test_tensor_scatter_refuses_to_leave_the_cache() -> None:
    cache, update = np.zeros((1, 3, 2), np.float32), np.ones((1, 2, 2), np.float32)
    with pytest.raises(ModelExecutionError, match="outside the cache's 3"):
        ours("TensorScatter", [cache, update, _ints(2)], opset=24)


@pytest.mark.parametrize("sorted_", [0, 1])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_unique(sorted_: int, axis: int | None) -> None:
    x = _RANDOM.integers(0, 2, (6, 3, 2)).astype(np.float32)
    given: dict[str, Any] = {} if axis is None else {"axis": axis}
    assert_agrees("Unique", [x], opset=11, outputs=4, sorted=sorted_, **given)


@pytest.mark.parametrize(
    "x",
    [np.array([], np.float32), np.array(["b", "a", "b"], object), np.array([3, -1, 3], np.int8)],
    ids=["empty", "strings", "int8"],
)
def test_unique_of_other_kinds(x: Array) -> None:
    found, expected = (f("Unique", [x], opset=11, outputs=4) for f in (ours, theirs))
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)


def test_unique_rows_of_narrow_floats() -> None:
    x = np.array([[2, 1], [1, 3], [2, 1]], ml_dtypes.bfloat16)
    y, first, inverse, counts = ours("Unique", [x], opset=28, outputs=4, axis=0)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y.astype(np.float32), [[1, 3], [2, 1]])
    assert (first.tolist(), inverse.tolist(), counts.tolist()) == ([1, 0], [1, 0, 1], [1, 2])
