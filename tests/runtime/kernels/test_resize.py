"""Resizing, against onnxruntime in all modes, and against formulas in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from slimctl.core.errors import ModelExecutionError
from tests.runtime.kernels.one_node import Array, assert_agrees, assert_close, ours, theirs

_COORDINATES = [
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "tf_half_pixel_for_nn",
    "asymmetric",
    "align_corners",
    "tf_crop_and_resize",
]
_NEAREST = ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]

_SHAPE = (2, 3, 5, 7)
_SIZES = [(9, 11), (3, 4), (1, 1), (10, 14), (5, 20), (17, 3)]
_SCALES = [(1.3, 2.7), (0.6, 0.6), (0.7, 3.0), (2.0, 2.0), (0.35, 0.5), (1.0, 1.7)]


def _images(dtype: type, shape: tuple[int, ...] = _SHAPE) -> Array:
    random = np.random.default_rng(0)
    if np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        bound = (max(limits.min, -500), min(limits.max, 500))
        return random.integers(*bound, shape, dtype, endpoint=True)
    return random.standard_normal(shape).astype(dtype)


def _geometries() -> Iterator[tuple[Array | None, Array | None]]:
    """Scales and sizes, of which one is given."""
    for sizes in _SIZES:
        yield None, np.array((*_SHAPE[:2], *sizes), np.int64)
    for scales in _SCALES:
        yield np.array((1, 1, *scales), np.float32), None


def _crop(coordinates: str) -> Array | None:
    """A region that reaches beyond the image, where one is read."""
    region = np.array([0, 0, 0.1, -0.2, 1, 1, 0.7, 1.1], np.float32)
    return region if coordinates == "tf_crop_and_resize" else None


def _inputs(x: Array, coordinates: str) -> Iterator[list[Array | None]]:
    for scales, sizes in _geometries():
        kept = scales[2:] == 1 if scales is not None else sizes[2:] == x.shape[2:]
        if coordinates == "tf_crop_and_resize" and np.any(kept):
            continue  # onnxruntime does not crop an axis of scale 1
        given = [x, _crop(coordinates), scales, sizes]
        yield given if sizes is not None else given[:3]


@pytest.mark.parametrize("nearest_mode", _NEAREST)
@pytest.mark.parametrize("coordinates", _COORDINATES)
def test_nearest(coordinates: str, nearest_mode: str) -> None:
    for dtype in (np.float32, np.uint8, np.int8, np.int32):
        for inputs in _inputs(_images(dtype), coordinates):
            node = {"mode": "nearest", "nearest_mode": nearest_mode, "extrapolation_value": 7.0}
            node |= {"coordinate_transformation_mode": coordinates, "opset": 13}
            found, expected = (f("Resize", inputs, **node)[0] for f in (ours, theirs))
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.int8, np.int32])
@pytest.mark.parametrize("coordinates", _COORDINATES)
def test_linear(coordinates: str, dtype: type) -> None:
    """Integers are compared exactly: the cut is onnxruntime's."""
    for inputs in _inputs(_images(dtype), coordinates):
        node = {"mode": "linear", "extrapolation_value": 7.0, "opset": 13}
        assert_agrees("Resize", inputs, coordinate_transformation_mode=coordinates, **node)


@pytest.mark.parametrize("exclude_outside", [0, 1])
@pytest.mark.parametrize("coordinates", _COORDINATES)
def test_cubic(coordinates: str, exclude_outside: int) -> None:
    for inputs in _inputs(_images(np.float32), coordinates):
        for coefficient in (-0.75, -0.5):
            node = {"mode": "cubic", "cubic_coeff_a": coefficient, "extrapolation_value": 7.0}
            node |= {"exclude_outside": exclude_outside, "opset": 13}
            assert_agrees("Resize", inputs, coordinate_transformation_mode=coordinates, **node)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.int32])
@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("coordinates", _COORDINATES)
def test_antialias(coordinates: str, mode: str, dtype: type) -> None:
    """Integers near a half may be one apart: onnxruntime adds up weights beyond an edge first."""
    for inputs in _inputs(_images(dtype), coordinates):
        for exclude_outside in (0, 1):
            node: dict[str, Any] = {"mode": mode, "antialias": 1, "extrapolation_value": 7.0}
            node |= {"exclude_outside": exclude_outside, "opset": 18}
            node |= {"coordinate_transformation_mode": coordinates}
            found, expected = (f("Resize", inputs, **node)[0] for f in (ours, theirs))
            if dtype == np.float32:
                assert_close(found, expected)
            else:
                apart = np.abs(found.astype(np.int64) - expected.astype(np.int64))
                assert apart.max() <= 1
                assert np.count_nonzero(apart) <= 1 + apart.size // 100


def test_antialias_leaves_negative_codes_negative() -> None:
    x = np.full((1, 1, 4, 4), -5, np.int8)  # onnxruntime 1.32 makes 0 of them
    scales = np.array([1, 1, 0.5, 0.5], np.float32)
    found = ours("Resize", [x, None, scales], opset=18, mode="linear", antialias=1)[0]
    np.testing.assert_array_equal(found, np.full((1, 1, 2, 2), -5))


def test_cubic_integers_are_rounded_and_saturated() -> None:
    x = np.array([[0, 0, 255, 255]], np.uint8)  # cubic overshoots on both sides of the step
    found = ours("Resize", [x, None, np.array([1, 4], np.float32)], opset=13, mode="cubic")[0]
    wide = ours(
        "Resize", [x.astype(np.float32), None, np.array([1, 4], np.float32)], opset=13, mode="cubic"
    )[0]
    assert wide.min() < -1
    assert wide.max() > 256
    np.testing.assert_array_equal(found, np.clip(np.rint(wide), 0, 255))


@pytest.mark.parametrize("policy", ["stretch", "not_larger", "not_smaller"])
@pytest.mark.parametrize("axes", [[2, 3], [3, 2], [-1, -2]])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_some_axes(mode: str, axes: list[int], policy: str) -> None:
    x = _images(np.float32)
    node = {"mode": mode, "keep_aspect_ratio_policy": policy, "opset": 19}
    for sizes in _SIZES:
        inputs = [x, None, None, np.array(sizes, np.int64)]
        found = ours("Resize", inputs, axes=axes, **node)[0]
        # onnxruntime knows no negative axes
        expected = theirs("Resize", inputs, axes=[axis % 4 for axis in axes], **node)[0]
        assert_close(found, expected)


def test_scales_and_a_region_of_some_axes() -> None:
    x, scales = _images(np.float32), np.array([1.7, 0.6], np.float32)
    roi = np.array([0.2, -0.1, 0.7, 1.2], np.float32)
    node = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "opset": 18}
    for axes in ([2, 3], [3, 2]):
        assert_agrees("Resize", [x, roi, scales], axes=axes, extrapolation_value=9.0, **node)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.int8, np.int32])
def test_older_forms(mode: str, dtype: type) -> None:
    x = _images(dtype)
    for scales in [(2.0, 2.0), (1.3, 2.7), (1.0, 3.0)]:
        whole = np.array([1, 1, *scales], np.float32)
        assert_agrees("Upsample", [x], opset=7, mode=mode, scales=whole.tolist())
        assert_agrees("Upsample", [x, whole], opset=9, mode=mode)
    for scales in _SCALES:
        assert_agrees("Resize", [x, np.array([1, 1, *scales], np.float32)], opset=10, mode=mode)


@pytest.mark.parametrize("shape", [(6, 5), (4, 3, 5), (1, 2, 4, 3, 5)])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_other_ranks(mode: str, shape: tuple[int, ...]) -> None:
    scales = np.array([1, 1, 1.5, 0.7, 2.0], np.float32)[-len(shape) :]
    if len(shape) == 5:
        scales[:2] = 1
    assert_agrees("Resize", [_images(np.float32, shape), None, scales], opset=13, mode=mode)


def test_a_tie_is_one_although_float32_misses_it() -> None:
    """From 20 to 6 elements: https://github.com/microsoft/onnxruntime/issues/28291"""
    # the places are 7/6, 4.5, 47/6, 67/6, 14.5 and 107/6
    inputs = [np.arange(20, dtype=np.float32), None, None, np.array([6], np.int64)]
    found = ours("Resize", inputs, opset=13, nearest_mode="round_prefer_ceil")[0]
    np.testing.assert_array_equal(found, [1, 5, 8, 11, 15, 18])
    found = ours("Resize", inputs, opset=13, nearest_mode="round_prefer_floor")[0]
    np.testing.assert_array_equal(found, [1, 4, 8, 11, 14, 18])


def test_linear_against_numpy() -> None:
    x = _images(np.float64, (3, 40))
    found = ours("Resize", [x, None, np.array([1, 2.5], np.float32)], opset=13, mode="linear")[0]
    places = np.clip((np.arange(100) + 0.5) / 2.5 - 0.5, 0, 39)
    expected = [np.interp(places, np.arange(40), row) for row in x]
    assert found.dtype == np.float64
    # coordinates are float32: up to 39 they are 2e-6 off, and so are weights
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.ptp(x))


def test_narrow_floats_are_rounded_once() -> None:
    x = _images(np.float16)
    scales = np.array([1, 1, 1.3, 2.7], np.float32)
    found = ours("Resize", [x, None, scales], opset=13, mode="cubic")[0]
    wide = ours("Resize", [x.astype(np.float32), None, scales], opset=13, mode="cubic")[0]
    np.testing.assert_array_equal(found, wide.astype(np.float16))


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_what_is_not_finite_stays_near_its_place(mode: str) -> None:
    x = np.zeros((1, 1, 16, 16), np.float32)
    x[..., 8, 8] = np.nan
    found = ours("Resize", [x, None, np.array([1, 1, 2, 2], np.float32)], opset=13, mode=mode)[0]
    far = np.ones((32, 32), bool)
    far[12:22, 12:22] = False
    assert np.isnan(found[0, 0, 16:18, 16:18]).all()
    assert np.isfinite(found[0, 0][far]).all()


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_crops_an_axis_that_keeps_its_size(mode: str) -> None:
    """onnxruntime leaves it alone."""
    x = np.arange(5, dtype=np.float32)
    roi, sizes = np.array([0.25, 0.75], np.float32), np.array([5], np.int64)
    node = {"opset": 13, "coordinate_transformation_mode": "tf_crop_and_resize", "mode": mode}
    found = ours("Resize", [x, roi, None, sizes], **node)[0]
    at = np.linspace(1, 3, 5)
    expected = np.ceil(at - 0.5) if mode == "nearest" else at
    if mode == "cubic":  # of a ramp cubic interpolation makes the ramp, away from the ends
        np.testing.assert_allclose(found[1:-1], expected[1:-1], atol=0.2)
        return
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_empty_tensors() -> None:
    x = np.zeros((0, 3, 4, 4), np.float32)
    scales = np.array([1, 1, 2, 2], np.float32)
    for mode in ("nearest", "linear", "cubic"):
        assert ours("Resize", [x, None, scales], opset=13, mode=mode)[0].shape == (0, 3, 8, 8)
        no_rows = np.zeros((1, 3, 0, 4), np.float32)
        assert ours("Resize", [no_rows, None, scales], opset=13, mode=mode)[0].shape == (1, 3, 0, 8)
    small = np.array([1, 1, 0.1, 0.1], np.float32)
    one = np.zeros((1, 3, 4, 4), np.float32)
    assert ours("Resize", [one, None, small], opset=13, mode="linear")[0].shape == (1, 3, 0, 0)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"mode": "area"}, "no mode 'area'"),
        ({"nearest_mode": "round"}, "no nearest mode 'round'"),
        ({"coordinate_transformation_mode": "edges"}, "no coordinate transformation mode 'edges'"),
    ],
)
def test_refuses_modes_that_are_not_there(attributes: dict[str, str], message: str) -> None:
    inputs = [_images(np.float32), None, np.array([1, 1, 2, 2], np.float32)]
    with pytest.raises(ModelExecutionError, match=message):
        ours("Resize", inputs, opset=13, **attributes)


@pytest.mark.parametrize(
    ("scales", "sizes", "message"),
    [
        ([], None, "neither scales nor sizes"),
        ([1, 1, 2], None, "3 scales or sizes do not fit 4 axes"),
        ([1, 1, 0, 2], None, "scales must be positive"),
        (None, [2, 3, 4], "3 scales or sizes do not fit 4 axes"),
    ],
)
def test_refuses_scales_that_do_not_fit(
    scales: list[float] | None, sizes: list[int] | None, message: str
) -> None:
    given = [None if scales is None else np.array(scales, np.float32)]
    given += [] if sizes is None else [np.array(sizes, np.int64)]
    with pytest.raises(ModelExecutionError, match=message):
        ours("Resize", [_images(np.float32), None, *given], opset=13)
