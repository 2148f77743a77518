"""Sequences of tensors, against onnxruntime and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from slimctl.core.errors import ModelExecutionError
from slimctl.runtime.kernels import sequences as kernels
from tests.runtime.kernels.one_node import Array, ours, theirs

_X = np.arange(20, dtype=np.float32).reshape(4, 5)
_SEQUENCE = [np.full(i, i, np.float32) for i in range(3)]


def _at(value: int) -> Array:
    return np.array(value, np.int64)


def _lengths(sequence: list[Array]) -> list[int]:
    return [len(item) for item in sequence]


def test_construction() -> None:
    assert kernels.sequence_empty() == []
    assert _lengths(kernels.sequence_construct(*_SEQUENCE)) == [0, 1, 2]
    assert kernels.sequence_length(_SEQUENCE).tolist() == 3


@pytest.mark.parametrize(("position", "length"), [(0, 0), (2, 2), (-1, 2), (-3, 0)])
def test_at(position: int, length: int) -> None:
    assert len(kernels.sequence_at(_SEQUENCE, _at(position))) == length


@pytest.mark.parametrize(
    ("position", "lengths"),
    [
        (None, [0, 1, 2, 9]),
        (0, [9, 0, 1, 2]),
        (3, [0, 1, 2, 9]),
        (-1, [0, 1, 9, 2]),
        (-3, [9, 0, 1, 2]),
    ],
)
def test_insert(position: int | None, lengths: list[int]) -> None:
    new = np.zeros(9, np.float32)
    place = None if position is None else _at(position)
    assert _lengths(kernels.sequence_insert(_SEQUENCE, new, place)) == lengths
    assert _lengths(_SEQUENCE) == [0, 1, 2]  # the input stays


@pytest.mark.parametrize(("position", "lengths"), [(None, [0, 1]), (0, [1, 2]), (-2, [0, 2])])
def test_erase(position: int | None, lengths: list[int]) -> None:
    place = None if position is None else _at(position)
    assert _lengths(kernels.sequence_erase(_SEQUENCE, place)) == lengths
    assert _lengths(_SEQUENCE) == [0, 1, 2]


@pytest.mark.parametrize("position", [3, -4])
def test_positions_outside(position: int) -> None:
    for erase_or_read in (kernels.sequence_at, kernels.sequence_erase):
        with pytest.raises(ValueError, match="there is no element"):
            erase_or_read(_SEQUENCE, _at(position))
    with pytest.raises(ValueError, match="there is no position"):
        kernels.sequence_insert(_SEQUENCE, _X, _at(position + (1 if position > 0 else 0)))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("split", [None, _at(2), _at(3), _at(9), "sizes"])
def test_split_to_sequence(split: Array | str | None, axis: int) -> None:
    sizes = np.array([1, _X.shape[axis] - 1], np.int64) if isinstance(split, str) else split
    _assert_splits_alike([_X, sizes], axis=axis)
    if split is None:
        _assert_splits_alike([_X], axis=axis, keepdims=0)


def _assert_splits_alike(inputs: list[Array | None], **node: int) -> None:
    found, expected = (f("SplitToSequence", inputs, opset=11, **node)[0] for f in (ours, theirs))
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_parts_of_a_given_size_keep_the_axis() -> None:
    found = ours("SplitToSequence", [_X, _at(1)], opset=11, keepdims=0)[0]
    assert [part.shape for part in found] == [(1, 5)] * 4


def test_split_to_sequence_refuses_sizes_that_do_not_fit() -> None:
    with pytest.raises(ModelExecutionError, match="do not make 4"):
        ours("SplitToSequence", [_X, np.array([1, 2], np.int64)], opset=11)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concat_from_sequence(axis: int) -> None:
    parts = [_X, _X + 1]
    joined = kernels.concat_from_sequence(parts, axis=axis)
    np.testing.assert_array_equal(joined, np.concatenate(parts, axis))
    stacked = kernels.concat_from_sequence(parts, axis=axis, new_axis=1)
    np.testing.assert_array_equal(stacked, np.stack(parts, axis))
