"""Values between pixels, against onnxruntime and by hand."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from slimctl.core.errors import ModelExecutionError
from tests.runtime.kernels.one_node import Array, assert_agrees, ours

_RANDOM = np.random.default_rng(0)
_OLD_NAMES = {"linear": "bilinear", "cubic": "bicubic", "nearest": "nearest"}


def _normal(*shape: int) -> Array:
    return _RANDOM.standard_normal(shape).astype(np.float32)


def _points(*shape: int) -> Array:
    """Points of which many lie outside, some more than the image's size away."""
    return _RANDOM.uniform(-3.5, 3.5, shape).astype(np.float32)


@pytest.mark.parametrize("align_corners", [0, 1])
@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize("size", [(5, 4), (1, 3), (1, 1)])
def test_grid_sample(
    size: tuple[int, int], mode: str, padding_mode: str, align_corners: int
) -> None:
    inputs = [_normal(2, 3, *size), _points(2, 6, 7, 2)]
    node = {"align_corners": align_corners, "padding_mode": padding_mode}
    assert_agrees("GridSample", inputs, opset=20, mode=mode, **node)
    assert_agrees("GridSample", inputs, opset=16, mode=_OLD_NAMES[mode], **node)


@pytest.mark.parametrize("align_corners", [0, 1])
@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_grid_sample_of_volumes(mode: str, padding_mode: str, align_corners: int) -> None:
    inputs = [_normal(2, 3, 5, 4, 3), _points(2, 4, 3, 5, 3)]
    node = {"align_corners": align_corners, "padding_mode": padding_mode}
    assert_agrees("GridSample", inputs, opset=20, mode=mode, **node)


def test_grid_sample_of_integers() -> None:
    x, grid = np.arange(6).reshape(1, 1, 2, 3), np.array([[[[-1, -1], [9, 9]]]], np.float32)
    node = {"opset": 20, "align_corners": 1, "padding_mode": "border"}
    found = ours("GridSample", [x, grid], mode="nearest", **node)[0]
    np.testing.assert_array_equal(found, [[[[0, 5]]]])
    assert found.dtype == np.int64
    with pytest.raises(ModelExecutionError, match="only be sampled in the mode 'nearest'"):
        ours("GridSample", [x, grid], mode="linear", **node)


def test_grid_sample_of_nothing() -> None:
    inputs = [np.zeros((0, 3, 4, 4), np.float32), np.zeros((0, 2, 5, 2), np.float32)]
    assert ours("GridSample", inputs, opset=20)[0].shape == (0, 3, 2, 5)


def test_grid_sample_by_default() -> None:
    inputs = [_normal(1, 2, 4, 4), _points(1, 3, 3, 2)]
    assert_agrees("GridSample", inputs, opset=16)
    assert_agrees("GridSample", inputs, opset=20)


def test_what_is_not_finite_does_not_leak_into_zeros() -> None:
    x = np.full((1, 1, 2, 2), np.inf, np.float32)
    grid = np.full((1, 1, 1, 2), 9, np.float32)
    for mode in ("linear", "cubic"):
        assert ours("GridSample", [x, grid], opset=20, mode=mode)[0].item() == 0


def test_grid_sample_refuses_modes_that_are_not_there() -> None:
    inputs = [_normal(1, 1, 2, 2), _points(1, 1, 1, 2)]
    with pytest.raises(ModelExecutionError, match="no mode 'area'"):
        ours("GridSample", inputs, opset=20, mode="area")
    with pytest.raises(ModelExecutionError, match="no padding mode 'wrap'"):
        ours("GridSample", inputs, opset=20, padding_mode="wrap")


@pytest.mark.parametrize("align_corners", [0, 1])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_affine_grid(size: tuple[int, ...], align_corners: int) -> None:
    rank = len(size) - 2
    inputs = [_normal(2, rank, rank + 1), np.array(size, np.int64)]
    assert_agrees("AffineGrid", inputs, opset=20, align_corners=align_corners)


def test_affine_grid_of_one_row() -> None:
    """It lies in the middle; onnxruntime puts it at the end."""
    theta = np.eye(2, 3, dtype=np.float32)[None]
    inputs = [theta, np.array([1, 1, 1, 3], np.int64)]
    found = ours("AffineGrid", inputs, opset=20, align_corners=1)[0]
    np.testing.assert_array_equal(found, [[[[-1, 0], [0, 0], [1, 0]]]])


_REGIONS = np.array(
    [
        [0, 0, 9, 9],
        [3.3, 2.2, 12.7, 30],  # beyond the image
        [-4, -3, 5, 6],
        [8, 8, 7.5, 7.9],  # inside out by less than a pixel
        [10, 10, 10, 10],  # empty
        [9, 9, 3, 2],  # inside out
    ],
    np.float32,
)


@pytest.mark.parametrize("ratio", [0, 1, 3])
@pytest.mark.parametrize("scale", [1.0, 0.5, 1.25])
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_roi_align(mode: str, scale: float, ratio: int) -> None:
    inputs = [_normal(2, 3, 14, 17), _REGIONS, np.array([0, 1, 1, 0, 0, 1], np.int64)]
    node: dict[str, Any] = {"mode": mode, "sampling_ratio": ratio, "spatial_scale": scale}
    node |= {"output_height": 3, "output_width": 4}
    assert_agrees("RoiAlign", inputs, opset=10, **node)
    for coordinates in ("half_pixel", "output_half_pixel"):
        node["coordinate_transformation_mode"] = coordinates
        assert_agrees("RoiAlign", inputs, opset=16, **node)


def test_roi_align_without_regions() -> None:
    inputs = [_normal(1, 3, 4, 4), np.zeros((0, 4), np.float32), np.zeros(0, np.int64)]
    assert ours("RoiAlign", inputs, opset=16, output_height=2)[0].shape == (0, 3, 2, 1)


def test_roi_align_refuses_modes_that_are_not_there() -> None:
    inputs = [_normal(1, 3, 4, 4), _REGIONS[:1], np.zeros(1, np.int64)]
    with pytest.raises(ModelExecutionError, match="no mode 'min'"):
        ours("RoiAlign", inputs, opset=10, mode="min")
    with pytest.raises(ModelExecutionError, match="no coordinate transformation mode 'corner'"):
        ours("RoiAlign", inputs, opset=16, coordinate_transformation_mode="corner")


@pytest.mark.parametrize("op_type", ["GridSample", "AffineGrid", "RoiAlign"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_floats_are_rounded_once(dtype: type, op_type: str) -> None:
    kind = np.dtype(dtype)
    inputs = {
        "GridSample": [_normal(1, 2, 4, 4), _points(1, 3, 3, 2)],
        "AffineGrid": [_normal(1, 2, 3), np.array([1, 1, 3, 4], np.int64)],
        "RoiAlign": [_normal(1, 2, 9, 9), _REGIONS[:1], np.zeros(1, np.int64)],
    }[op_type]
    narrow = [x.astype(kind) if x.dtype == np.float32 else x for x in inputs]
    wide = [x.astype(np.float32) if x.dtype == kind else x for x in narrow]
    found, expected = (ours(op_type, given, opset=22)[0] for given in (narrow, wide))
    assert found.dtype == kind
    np.testing.assert_array_equal(found, expected.astype(kind))
