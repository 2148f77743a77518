"""Movement of elements, against onnxruntime and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.core.errors import ModelExecutionError
from slimctl.runtime.session import Runtime
from tests.runtime.kernels.one_node import Array, assert_agrees, one_node, ours

_X = np.arange(60, dtype=np.float32).reshape(3, 4, 5)


def _ints(*values: int) -> Array:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((3, 4), (-1,)),
        ((3, 4), (0, -1)),
        ((4, 3), (2, 0, -1)),
        ((3, 4, 5), (0, 0, 5)),
        ((0, 3), (3, -1)),
        ((0, 3), (0, 3)),
        ((2, 0), (0, 5, -1)),
        ((), (1, 1)),
        ((1,), ()),
        ((1, 1), (-1, 1, 1)),
    ],
)
def test_reshape(shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert_agrees("Reshape", [x, np.array(sizes, np.int64)], opset=5)
    assert_agrees("Reshape", [x, np.array(sizes, np.int64)], opset=13)


def test_reshape_lets_zero_be_a_size() -> None:
    x = np.zeros((3, 0), np.float32)
    assert_agrees("Reshape", [x, _ints(0, 7)], opset=14, allowzero=1)
    assert ours("Reshape", [x, _ints(0, 7)], opset=14, allowzero=1)[0].shape == (0, 7)


@pytest.mark.parametrize(
    ("shape", "sizes", "allowzero"),
    [((0, 3), (0, -1), 0), ((0, 3), (0, -1), 1), ((3,), (3, 0), 0), ((6,), (4, -1), 0)],
    ids=["what is left of nothing", "the same", "a size that is not there", "no divisor"],
)
def test_reshape_refuses(shape: tuple[int, ...], sizes: tuple[int, ...], allowzero: int) -> None:
    inputs = [np.zeros(shape, np.float32), np.array(sizes, np.int64)]
    with pytest.raises(ModelExecutionError):
        ours("Reshape", inputs, opset=14, allowzero=allowzero)


@pytest.mark.parametrize("axis", [-3, -1, 0, 1, 2, 3])
def test_flatten(axis: int) -> None:
    assert_agrees("Flatten", [_X], opset=13, axis=axis)
    assert_agrees("Flatten", [np.zeros((2, 0, 3), np.float32)], opset=13, axis=axis)


def test_flatten_refuses_an_axis_that_is_not_there() -> None:
    with pytest.raises(ModelExecutionError, match="no axis 4 in 3"):
        ours("Flatten", [_X], opset=13, axis=4)


def test_transpose_keeps_types_that_numpy_does_not_know() -> None:
    import ml_dtypes

    codes = np.arange(6).reshape(2, 3).astype(ml_dtypes.int4)
    found = ours("Transpose", [codes], opset=21)[0]
    assert found.dtype == codes.dtype
    np.testing.assert_array_equal(found, codes.T)


@pytest.mark.parametrize("axis", [0, 2, -2])
def test_concat(axis: int) -> None:
    assert_agrees("Concat", [_X, _X[::-1].copy(), _X], opset=13, axis=axis)


@pytest.mark.parametrize(
    ("inputs", "opset", "attributes", "sizes"),
    [
        ([], 7, {}, [2, 2]),
        ([], 7, {"split": [1, 3]}, [1, 3]),
        ([], 13, {}, [2, 2]),
        ([_ints(0, 4)], 13, {}, [0, 4]),
        ([_ints(3, 1)], 18, {}, [3, 1]),
        ([], 18, {"num_outputs": 2}, [2, 2]),
    ],
)
def test_split(
    inputs: list[Array], opset: int, attributes: dict[str, Any], sizes: list[int]
) -> None:
    assert_agrees("Split", [_X, *inputs], opset=opset, outputs=2, axis=1, **attributes)
    found = ours("Split", [_X, *inputs], opset=opset, outputs=2, axis=1, **attributes)
    assert [part.shape[1] for part in found] == sizes


def test_split_makes_as_many_parts_as_the_node_has_outputs() -> None:
    """Also where nobody reads the last of them."""
    found = ours("Split", [np.arange(4)], opset=13, outputs=("first", "second"))
    assert [part.tolist() for part in found] == [[0, 1], [2, 3]]
    model = one_node("Split", [np.arange(4)], opset=13, outputs=("first", "second"))
    del model.graph.output[1]
    first = Runtime(ir.serde.deserialize_model(model)).run({"x0": np.arange(4)})["first"]
    assert first.tolist() == [0, 1]


def test_split_makes_the_last_part_smaller() -> None:
    found = ours("Split", [np.arange(7)], opset=18, outputs=3, num_outputs=3)
    assert [part.tolist() for part in found] == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize(
    ("opset", "inputs", "attributes"),
    [
        (7, [], {}),
        (13, [], {}),
        (13, [_ints(2, 2, 2, 2, 2)], {}),
        (18, [], {"num_outputs": 5}),  # 2, 2, 2 and 1: there is no fifth part
    ],
)
def test_split_refuses_sizes_that_do_not_fit(
    opset: int, inputs: list[Array], attributes: dict[str, Any]
) -> None:
    with pytest.raises(ModelExecutionError, match="do not make"):
        ours("Split", [np.arange(7), *inputs], opset=opset, outputs=5, **attributes)


@pytest.mark.parametrize("step", [-3, -1, 1, 2, 100])
@pytest.mark.parametrize("start", [-100, -5, -2, 0, 3, 4, 100])
@pytest.mark.parametrize("end", [-(2**63), -100, -6, -1, 0, 2, 5, 2**62])
def test_slice(start: int, end: int, step: int) -> None:
    x = np.arange(5, dtype=np.float32)
    assert_agrees("Slice", [x, _ints(start), _ints(end), _ints(0), _ints(step)], opset=13)


def test_slice_to_the_largest_integer() -> None:
    x, end = np.arange(5, dtype=np.float32), _ints(2**63 - 1)
    assert_agrees("Slice", [x, _ints(2), end], opset=13)
    backwards = ours("Slice", [x, _ints(2), end, _ints(0), _ints(-1)], opset=13)[0]
    assert backwards.size == 0  # the end is clamped like any other


def test_slice_of_some_axes() -> None:
    places = [np.array(v, np.int32) for v in ([1, 2], [3, 0], [-1, 0], [1, -1])]
    assert_agrees("Slice", [_X, *places], opset=13)
    assert_agrees("Slice", [_X, _ints(1, 1), _ints(9, 3)], opset=11)
    assert_agrees("Slice", [np.zeros((2, 0), np.float32), _ints(0), _ints(1), _ints(1)], opset=13)
    back = [_ints(-1), _ints(-9), _ints(1), _ints(-1)]
    assert_agrees("Slice", [np.zeros((2, 0), np.float32), *back], opset=13)


@pytest.mark.parametrize("axes", [None, [2, 0]])
def test_slice_by_attributes(axes: list[int] | None) -> None:
    given = {} if axes is None else {"axes": axes}
    assert_agrees("Slice", [_X], opset=9, starts=[1, -2], ends=[100, -1], **given)


def test_slice_refuses_a_step_of_nothing() -> None:
    inputs = [_X, _ints(0), _ints(1), _ints(0), _ints(0)]
    with pytest.raises(ModelExecutionError, match="must not be 0"):
        ours("Slice", inputs, opset=13)


def test_squeeze() -> None:
    x = np.zeros((1, 3, 1, 2), np.float32)
    assert_agrees("Squeeze", [x], opset=7)
    assert_agrees("Squeeze", [x], opset=7, axes=[2])
    assert_agrees("Squeeze", [x], opset=13)
    assert_agrees("Squeeze", [x, _ints(-2)], opset=13)
    assert_agrees("Squeeze", [x, _ints()], opset=13)
    with pytest.raises(ModelExecutionError):
        ours("Squeeze", [x, _ints(1)], opset=13)


def test_unsqueeze() -> None:
    assert_agrees("Unsqueeze", [_X], opset=7, axes=[0, 3])
    assert_agrees("Unsqueeze", [_X], opset=11, axes=[-1, 0])
    assert_agrees("Unsqueeze", [_X, _ints(4, 1)], opset=13)
    assert_agrees("Unsqueeze", [np.array(3, np.float32), _ints(0)], opset=13)


@pytest.mark.parametrize("shape", [(2, 1, 4), (1,), (3, 1), (3, 0), (3, 7)])
def test_expand(shape: tuple[int, ...]) -> None:
    x = np.arange(3, dtype=np.float32)[:, None]
    assert_agrees("Expand", [x, np.array(shape, np.int64)], opset=13)


def test_tile() -> None:
    assert_agrees("Tile", [_X, _ints(2, 1, 3)], opset=7)
    assert_agrees("Tile", [_X, _ints(1, 0, 1)], opset=13)
    with pytest.raises(ModelExecutionError, match="2 repeats do not fit 3 axes"):
        ours("Tile", [_X, _ints(2, 1)], opset=13)


@pytest.mark.parametrize("length", [1, 4, 9])
def test_compress(length: int) -> None:
    condition = np.arange(length) % 2 == 0
    assert_agrees("Compress", [_X, condition], opset=9, axis=1)
    assert_agrees("Compress", [_X, condition], opset=11, axis=-1)
    assert_agrees("Compress", [_X, condition], opset=11)
