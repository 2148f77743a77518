"""Borders, blocks and reversed sequences, against onnxruntime and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from slimctl.core.errors import ModelExecutionError
from tests.runtime.kernels.one_node import Array, assert_agrees, ours

_X = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
_MODES = ["constant", "edge", "reflect", "wrap"]


def _ints(*values: int) -> Array:
    return np.array(values, np.int64)


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize(
    "pads", [(1, 0, 2, 0, 3, 1), (-1, 0, 1, 0, -2, 2), (0, -1, -2, 1, 2, 1), (0,) * 6]
)
def test_pad(mode: str, pads: tuple[int, ...]) -> None:
    assert_agrees("Pad", [_X, _ints(*pads)], opset=19, mode=mode)
    if mode != "wrap":
        assert_agrees("Pad", [_X], opset=7, mode=mode, pads=list(pads))
        assert_agrees("Pad", [_X, _ints(*pads)], opset=11, mode=mode)


@pytest.mark.parametrize("pads", [(4, 4), (6, 0), (-3, 5), (3, -2), (0, 12)])
def test_wrapping_goes_around_more_than_once(pads: tuple[int, int]) -> None:
    assert_agrees("Pad", [np.arange(5, dtype=np.float32), _ints(*pads)], opset=19, mode="wrap")


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int32, np.int64, np.float32, np.float64])
def test_pad_with_a_value(dtype: type) -> None:
    x = np.zeros((2, 2), dtype)
    assert_agrees("Pad", [x, _ints(1, 0, 0, 1), np.array(1, dtype)], opset=13)
    assert_agrees("Pad", [x, _ints(1, 0, 0, 1), np.array([1], dtype)], opset=13)


def test_pad_by_attribute() -> None:
    assert_agrees("Pad", [_X], opset=7, pads=[1, 0, 0, 0, 0, 2], value=2.5)


def test_pad_of_some_axes() -> None:
    assert_agrees("Pad", [_X, _ints(1, 2, 0, -1), None, _ints(-1, 0)], opset=18)


def test_pad_refuses() -> None:
    with pytest.raises(ModelExecutionError, match="4 pads do not fit 3 axes"):
        ours("Pad", [_X, _ints(1, 2, 0, -1)], opset=13)
    with pytest.raises(ModelExecutionError):
        ours("Pad", [np.zeros((0, 2), np.float32), _ints(1, 0, 0, 0)], opset=13, mode="edge")


@pytest.mark.parametrize("shape", [(5, 2, 3), (2, 9, 4), (3, 4, 5), (4, 3, 8)])
def test_center_crop_pad(shape: tuple[int, ...]) -> None:
    assert_agrees("CenterCropPad", [_X, _ints(*shape)], opset=18)
    assert_agrees("CenterCropPad", [_X, _ints(*shape[:2])], opset=18, axes=[-1, 0])


def test_center_crop_pad_keeps_the_middle() -> None:
    found = ours("CenterCropPad", [np.arange(1, 6), _ints(2)], opset=18)[0]
    np.testing.assert_array_equal(found, [2, 3])  # of 3 elements too many, 1 in front
    found = ours("CenterCropPad", [np.arange(1, 3), _ints(5)], opset=18)[0]
    np.testing.assert_array_equal(found, [0, 1, 2, 0, 0])


def test_depth_to_space() -> None:
    x = np.arange(48, dtype=np.float32).reshape(1, 8, 2, 3)
    assert_agrees("DepthToSpace", [x], opset=7, blocksize=2)
    assert_agrees("DepthToSpace", [x], opset=13, blocksize=2, mode="DCR")
    assert_agrees("DepthToSpace", [x], opset=11, blocksize=2, mode="CRD")
    with pytest.raises(ModelExecutionError, match="8 channels do not make blocks of 3 x 3"):
        ours("DepthToSpace", [x], opset=13, blocksize=3)


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_space_to_depth_is_the_inverse(mode: str) -> None:
    x = np.arange(2 * 3 * 4 * 6, dtype=np.float32).reshape(2, 3, 4, 6)
    assert_agrees("SpaceToDepth", [x], opset=7, blocksize=2)
    deep = ours("SpaceToDepth", [x], opset=28, blocksize=2, mode=mode)[0]
    np.testing.assert_array_equal(
        ours("DepthToSpace", [deep], opset=13, blocksize=2, mode=mode)[0], x
    )


@pytest.mark.parametrize(("batch_axis", "time_axis"), [(0, 1), (1, 0)])
def test_reverse_sequence(batch_axis: int, time_axis: int) -> None:
    x = np.arange(32, dtype=np.float32).reshape(4, 4, 2)
    lengths = _ints(0, 1, 3, 4)
    axes = {"batch_axis": batch_axis, "time_axis": time_axis}
    assert_agrees("ReverseSequence", [x, lengths], opset=10, **axes)


def test_reverse_sequence_refuses_lengths_outside() -> None:
    with pytest.raises(ModelExecutionError, match="outside 0 to 3"):
        ours("ReverseSequence", [np.zeros((3, 1), np.float32), _ints(4)], opset=10)


@pytest.mark.parametrize("strides", [(1, 1), (2, 1)])
@pytest.mark.parametrize("pads", [(0, 0, 0, 0), (1, 0, 2, 1)])
@pytest.mark.parametrize("dilations", [(1, 1), (1, 2)])
def test_col2im(
    strides: tuple[int, int], pads: tuple[int, ...], dilations: tuple[int, int]
) -> None:
    image, block = (5, 6), (2, 3)
    counts = [
        (image[i] + pads[i] + pads[2 + i] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1
        for i in range(2)
    ]
    random = np.random.default_rng(0)
    x = random.standard_normal((2, 3 * 6, counts[0] * counts[1])).astype(np.float32)
    window = {"strides": strides, "pads": pads, "dilations": dilations}
    assert_agrees("Col2Im", [x, _ints(*image), _ints(*block)], opset=18, **window)


def test_col2im_adds_up_narrow_floats_before_it_rounds() -> None:
    parts = np.full((1, 4, 4), 2.0**-11, np.float16)  # half a unit in the last place of 1
    parts[0, 0] = 1
    found = ours("Col2Im", [parts, _ints(1, 1), _ints(2, 2)], opset=18, pads=(1, 1, 1, 1))[0]
    # each element of the block falls on the only pixel once
    np.testing.assert_array_equal(found, np.array([[[[1 + 3 * 2.0**-11]]]], np.float16))
    assert found.dtype == np.float16
