"""Resizing: see ``slimctl.runtime.interpolation`` for the arithmetic of one axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from slimctl.runtime.interpolation import (
    Span,
    Taps,
    along_axis,
    antialias_taps,
    by_corners,
    cubic_taps,
    interpolated,
    linear_taps,
    nearest_places,
    original_coordinates,
)
from slimctl.runtime.registry import Array, operator

_CROPS = "tf_crop_and_resize"

_Weigh: TypeAlias = Callable[[Array, Span], Taps]
_Blend: TypeAlias = Callable[[Array, Sequence[Taps]], Array]


@operator("Upsample", since=7)
def upsample(x: Array, scales: Array | Sequence[float], *, mode: str = "nearest") -> Array:
    """Resized by scales of at least 1: an attribute in operator set 7, an input from 9 on."""
    return _resized_10(x, np.asarray(scales, np.float32), mode)


@operator("Resize", since=10)
def resize_10(x: Array, scales: Array, *, mode: str = "nearest") -> Array:
    """Resized by scales; the first place of an axis stays where it is."""
    return _resized_10(x, scales, mode)


def _resized_10(x: Array, scales: Array, mode: str) -> Array:
    coordinates = _coordinates("asymmetric", _scaled_spans(x.shape, range(x.ndim), scales))
    if mode == "nearest":
        return _nearest(x, coordinates, "simple")
    if mode == "linear":
        return _linear(x, [linear_taps(at, span) for span, at in coordinates.items()])
    raise ValueError(f"there is no mode '{mode}'")


@operator("Resize", since=11)
def resize_11(
    x: Array,
    roi: Array | None = None,
    scales: Array | None = None,
    sizes: Array | None = None,
    *,
    antialias: int = 0,
    axes: Sequence[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Array:
    """Resized by scales or to sizes, by one of three modes of interpolation.

    An axis of scale 1 that is not cropped stays as it is. onnxruntime also leaves alone one of
    scale 1 that should be cropped, one that keeps its size although its scale is not 1 where there
    is antialiasing, and elsewhere a tensor of which this holds for all axes.
    """
    places = range(x.ndim) if axes is None else [axis % x.ndim for axis in axes]
    spans = _spans(x.shape, places, scales, sizes, keep_aspect_ratio_policy)
    if coordinate_transformation_mode == _CROPS and roi is not None and roi.size:
        spans = _cropped(spans, roi)
    coordinates = _coordinates(coordinate_transformation_mode, spans)
    if mode == "nearest":
        result = _nearest(x, coordinates, nearest_mode)
    else:
        weigh, blend = _method(mode, bool(antialias), cubic_coeff_a, bool(exclude_outside))
        result = blend(x, [weigh(at, span) for span, at in coordinates.items()])
    if coordinate_transformation_mode == _CROPS:
        return _extrapolated(result, coordinates, extrapolation_value)
    return result


def _coordinates(mode: str, spans: Sequence[Span]) -> dict[Span, Array]:
    """Coordinates in the input of those axes that change, in the order of the axes."""
    changed = sorted((s for s in spans if not s.is_same), key=lambda span: span.axis)
    return {span: original_coordinates(mode, span) for span in changed}


def _method(mode: str, antialias: bool, a: float, exclude: bool) -> tuple[_Weigh, _Blend]:
    """How places are weighted, and how the sum becomes the result."""
    if mode not in ("linear", "cubic"):
        raise ValueError(f"there is no mode '{mode}'")
    if antialias:
        coefficient = a if mode == "cubic" else None
        weigh = partial(antialias_taps, cubic_coeff_a=coefficient, exclude_outside=exclude)
        return weigh, _antialiased
    if mode == "cubic":
        return partial(cubic_taps, a=a, exclude_outside=exclude), _cubic
    return linear_taps, _linear  # of two places, leaving one out is the same as doubling the other


def _spans(
    shape: Sequence[int],
    axes: Sequence[int],
    scales: Array | None,
    sizes: Array | None,
    policy: str,
) -> list[Span]:
    if scales is not None and scales.size:
        return _scaled_spans(shape, axes, scales)
    if sizes is None or not sizes.size:
        raise ValueError("neither scales nor sizes are given")
    return _sized_spans(shape, axes, _one_each(sizes, axes).tolist(), policy)


def _one_each(values: Array, axes: Sequence[int]) -> Array:
    if len(values) != len(axes):
        raise ValueError(f"{len(values)} scales or sizes do not fit {len(axes)} axes")
    return values


def _scaled_spans(shape: Sequence[int], axes: Sequence[int], scales: Array) -> list[Span]:
    """Axes of floor(size * scale) elements, where the product is one of float32.

    The schema multiplies with the extent of the region of interest as well; neither onnxruntime
    nor ONNX's own reference does.
    """
    scales = _one_each(scales, axes).astype(np.float32)
    if np.any(scales <= 0):
        raise ValueError(f"scales must be positive, not {scales.tolist()}")
    return [
        Span(axis, shape[axis], int(np.float32(shape[axis]) * scale), scale)
        for axis, scale in zip(axes, scales, strict=True)
    ]


def _sized_spans(
    shape: Sequence[int], axes: Sequence[int], sizes: Sequence[int], policy: str
) -> list[Span]:
    pairs = list(zip(axes, sizes, strict=True))
    scales = [_ratio(size, shape[axis]) for axis, size in pairs]
    if policy == "stretch":
        ends = zip(pairs, scales, strict=True)
        return [Span(axis, shape[axis], size, scale) for (axis, size), scale in ends]
    if policy not in ("not_larger", "not_smaller"):
        raise ValueError(f"there is no policy '{policy}' for aspect ratios")
    scale = min(scales) if policy == "not_larger" else max(scales)
    return [
        Span(axis, shape[axis], int(np.floor(scale * np.float32(shape[axis]) + 0.5)), scale)
        for axis in axes
    ]


def _ratio(length: int, size: int) -> np.float32:
    if not size:
        if length:
            raise ValueError(f"an empty axis cannot be resized to {length}")
        return np.float32(1)
    return np.float32(length) / np.float32(size)


def _cropped(spans: Sequence[Span], roi: Array) -> list[Span]:
    """Axes with their regions of interest, which stand as all starts, then all ends."""
    starts, ends = roi.astype(np.float32).reshape(2, len(spans))
    return [
        Span(s.axis, s.size, s.length, s.scale, float(start), float(end))
        for s, start, end in zip(spans, starts, ends, strict=True)
    ]


def _nearest(x: Array, coordinates: dict[Span, Array], rounding: str) -> Array:
    for span in reversed(coordinates):  # the last axis while the tensor is small: it costs most
        x = np.take(x, nearest_places(coordinates[span], span, rounding), span.axis)
    return x


def _linear(x: Array, taps: Sequence[Taps]) -> Array:
    """Integers are cut off, as in onnxruntime; the schema leaves it open.

    Images whose channels stand last onnxruntime resizes in fixed point: those may be one apart.
    """
    if _is_integer(x):
        return by_corners(x.astype(np.float32), _completed(taps, x.shape)).astype(x.dtype)
    return interpolated(x, taps)


def _completed(taps: Sequence[Taps], shape: Sequence[int]) -> list[Taps]:
    """Taps of all axes that onnxruntime goes along: the last two, or three of an odd rank.

    Those of an axis that stays change the order of float32 sums, and so what is cut off.
    """
    found = {one.axis: one for one in taps}
    for axis in range(max(len(shape) - 2 - len(shape) % 2, 0), len(shape)):
        if axis not in found:
            same = Span(axis, shape[axis], shape[axis], np.float32(1))
            found[axis] = linear_taps(np.arange(same.size, dtype=np.float32), same)
    return [found[axis] for axis in sorted(found)]


def _cubic(x: Array, taps: Sequence[Taps]) -> Array:
    """Integers are rounded, ties to even: onnxruntime has none, ONNX's reference does so."""
    if _is_integer(x):
        return _saturated(np.rint(interpolated(x.astype(np.float32), taps)), x.dtype)
    return interpolated(x, taps)


def _antialiased(x: Array, taps: Sequence[Taps]) -> Array:
    """Integers are rounded after each axis, the last one first, as in onnxruntime and Pillow.

    Of negative int8 onnxruntime 1.32 makes 0; here they stay negative.
    """
    if not _is_integer(x):
        return interpolated(x, taps)
    for one in reversed(taps):
        if x.dtype.itemsize > 1:
            x = _saturated(_rounded(along_axis(x.astype(np.float32), one)), x.dtype)
        else:  # fixed point with 22 fractional bits, which float64 holds exactly
            codes = Taps(one.axis, one.places, _rounded(one.weights * np.float32(1 << 22)))
            wide = along_axis(x.astype(np.float64), codes) / (1 << 22)
            x = _saturated(np.floor(wide + 0.5), x.dtype)
    return x


def _is_integer(x: Array) -> bool:
    return x.dtype.kind in "iu"


def _rounded(x: Array) -> Array:
    """Nearest integers, ties away from zero."""
    result: Array = np.trunc(x + np.copysign(x.dtype.type(0.5), x))
    return result


def _saturated(x: Array, dtype: np.dtype[Any]) -> Array:
    limits = np.iinfo(dtype)
    result: Array = np.clip(x, limits.min, limits.max).astype(dtype)
    return result


def _extrapolated(x: Array, coordinates: dict[Span, Array], value: float) -> Array:
    """With one value where a coordinate lies outside the input."""
    result = x.copy()
    for span, at in coordinates.items():
        outside = (at < 0) | (at > span.size - 1)
        np.moveaxis(result, span.axis, 0)[outside] = value
    return result
