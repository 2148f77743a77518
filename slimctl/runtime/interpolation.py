"""Where along an axis the values of a resized tensor come from.

Resizing is separable: along each axis a place of the result is made of a few places of the input,
each with a weight. Coordinates are float32, and each formula is evaluated in the order in which
onnxruntime does it (upsamplebase.h), so that ties of nearest pixels break the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from slimctl.runtime.floats import in_float32
from slimctl.runtime.registry import Array

_HALF = np.float32(0.5)
_ONE = np.float32(1)

_TIE = 1e-6
"""A coordinate so near a half is one that float32 has missed.

It is onnxruntime's bound too, since https://github.com/microsoft/onnxruntime/issues/28291.
"""


@dataclass(frozen=True)
class Span:
    """What is to become of one axis.

    Attributes:
        axis: Its place.
        size: Elements of the input.
        length: Elements of the result.
        scale: Of a step; not ``length / size`` where that was rounded.
        start: Beginning of the region of interest; 0 for the whole axis.
        end: End of it; 1 for the whole axis.
    """

    axis: int
    size: int
    length: int
    scale: np.float32
    start: float = 0.0
    end: float = 1.0

    @property
    def is_same(self) -> bool:
        """Whether the axis stays as it is."""
        whole = self.start == 0 and self.end == 1
        return self.size == self.length and self.scale == 1 and whole


@dataclass(frozen=True)
class Taps:
    """What the result is made of along one axis.

    Attributes:
        axis: The axis.
        places: Of the input, [taps, length].
        weights: float32, [taps, length].
    """

    axis: int
    places: Array
    weights: Array

    def growth(self, shape: Sequence[int]) -> float:
        """How much longer the axis becomes."""
        return float(self.places.shape[1] / max(shape[self.axis], 1))


def original_coordinates(mode: str, span: Span) -> Array:
    """Coordinates in the input of all places of the result, float32.

    The formulas are those of ``coordinate_transformation_mode`` in the schema of Resize. There
    ``length_resized`` is the number of elements, and so it is in onnxruntime and torch; ONNX's
    reference code takes the fractional product of size and scale.
    """
    if mode not in _COORDINATES:
        raise ValueError(f"there is no coordinate transformation mode '{mode}'")
    place = np.arange(span.length, dtype=np.float32)
    return _COORDINATES[mode](place, span).astype(np.float32)


def _half_pixel(place: Array, span: Span) -> Array:
    return (place + _HALF) / span.scale - _HALF


def _half_pixel_symmetric(place: Array, span: Span) -> Array:
    width = span.scale * np.float32(span.size)
    offset = np.float32(span.size) / 2 * (1 - np.float32(span.length) / width)
    wide = place.astype(np.float64)  # onnxruntime leaves float32 here
    return offset + (wide + 0.5) / span.scale - 0.5


def _pytorch_half_pixel(place: Array, span: Span) -> Array:
    return _half_pixel(place, span) if span.length > 1 else np.zeros_like(place)


def _tf_half_pixel_for_nn(place: Array, span: Span) -> Array:
    return (place + _HALF) / span.scale


def _asymmetric(place: Array, span: Span) -> Array:
    return place / span.scale


def _align_corners(place: Array, span: Span) -> Array:
    if span.length == 1:
        return np.zeros_like(place)
    return place * np.float32(span.size - 1) / np.float32(span.length - 1)


def _tf_crop_and_resize(place: Array, span: Span) -> Array:
    last = np.float32(span.size - 1)
    if span.length == 1:
        return place + 0.5 * np.float64(np.float32(span.start + span.end)) * last
    return span.start * last + place * (span.end - span.start) * last / np.float32(span.length - 1)


_COORDINATES: dict[str, Callable[[Array, Span], Array]] = {
    "half_pixel": _half_pixel,
    "half_pixel_symmetric": _half_pixel_symmetric,
    "pytorch_half_pixel": _pytorch_half_pixel,
    "tf_half_pixel_for_nn": _tf_half_pixel_for_nn,
    "asymmetric": _asymmetric,
    "align_corners": _align_corners,
    "tf_crop_and_resize": _tf_crop_and_resize,
}


def nearest_places(coordinates: Array, span: Span, rounding: str) -> Array:
    """Places of the input next to the coordinates, by a ``nearest_mode`` of the schema.

    ``simple`` is what operator set 10 means, by onnxruntime: up where it shrinks, else down.
    """
    wide = coordinates.astype(np.float64)  # holds float32 plus a half exactly
    if rounding == "round_prefer_floor":
        places = np.ceil(wide - 0.5 - _TIE)
    elif rounding == "round_prefer_ceil":
        places = np.floor(wide + 0.5 + _TIE)
    elif rounding == "floor" or (rounding == "simple" and span.scale >= 1):
        places = np.floor(wide)
    elif rounding in ("ceil", "simple"):
        places = np.ceil(wide)
    else:
        raise ValueError(f"there is no nearest mode '{rounding}'")
    return _inside(places.astype(np.int64), span.size)


def linear_taps(coordinates: Array, span: Span) -> Taps:
    """The two neighbors, weighted by nearness."""
    within = np.clip(coordinates, 0, np.float32(span.size - 1))
    low = within.astype(np.int64)
    above = within - low.astype(np.float32)
    # the last element twice a half, as in onnxruntime: for integers the last bit can matter
    above = np.where(low == span.size - 1, _HALF, above)
    weights = np.stack([_ONE - above, above])
    return Taps(span.axis, _inside(np.stack([low, low + 1]), span.size), weights)


def cubic_taps(coordinates: Array, span: Span, a: float, *, exclude_outside: bool) -> Taps:
    """Four neighbors by Keys' convolution, https://ieeexplore.ieee.org/document/1163711, (4)."""
    low = np.floor(coordinates)
    places = low.astype(np.int64) + np.arange(-1, 3)[:, None]  # [4, length]
    weights = keys(coordinates - low, a)
    return _closed(span, places, weights, exclude_outside=exclude_outside)


def keys(fraction: Array, a: float) -> Array:
    """Weights of the places at -1, 0, 1 and 2 for a coordinate in [0, 1), [4, ...]."""
    before, after = fraction + 1, 2 - fraction
    near = _inner(fraction, a), _inner(1 - fraction, a)
    return np.stack([_outer(before, a), *near, _outer(after, a)])


def _inner(x: Array, a: float) -> Array:
    """Keys' cubic at a distance up to 1."""
    return ((a + 2) * x - (a + 3)) * x * x + 1


def _outer(x: Array, a: float) -> Array:
    """Keys' cubic at a distance from 1 to 2."""
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


def antialias_taps(
    coordinates: Array, span: Span, cubic_coeff_a: float | None, *, exclude_outside: bool
) -> Taps:
    """All places under a filter that is as wide as a step of the result, if that is above 1.

    As in Pillow, https://github.com/python-pillow/Pillow/blob/main/src/libImaging/Resample.c. The
    filter is a triangle, or Keys' cubic where its coefficient is given.
    """
    width = max(_ONE / span.scale, _ONE)
    support = (1 if cubic_coeff_a is None else 2) * width
    center = coordinates + _HALF
    first = np.floor(center - support + _HALF).astype(np.int64)
    places = first + np.arange(2 * int(np.ceil(support)) + 1)[:, None]  # [taps, length]
    distance = np.abs(places.astype(np.float32) - center + _HALF) * (_ONE / width)
    if cubic_coeff_a is None:
        weights = np.maximum(_ONE - distance, 0)
    else:
        outer = (((distance - 5) * distance + 8) * distance - 4) * np.float32(cubic_coeff_a)
        far = np.where(distance < 2, outer, np.float32(0))
        weights = np.where(distance < 1, _inner(distance, cubic_coeff_a), far)
    return _closed(span, places, weights, exclude_outside=exclude_outside, normalize=True)


def _closed(
    span: Span, places: Array, weights: Array, *, exclude_outside: bool, normalize: bool = False
) -> Taps:
    """Taps inside the input: what lies outside has no weight, or the weight goes to the edge."""
    if exclude_outside:
        weights = np.where((places < 0) | (places >= span.size), np.float32(0), weights)
    if exclude_outside or normalize:
        total = weights.sum(axis=0)
        # a filter may see nothing at all
        weights = weights * (_ONE / np.where(total == 0, _ONE, total))
    return Taps(span.axis, _inside(places, span.size), weights)


def _inside(places: Array, size: int) -> Array:
    return np.clip(places, 0, size - 1)


def interpolated(x: Array, all_taps: Sequence[Taps]) -> Array:
    """The weighted sums, one axis after another."""
    result: Array = _interpolated(x, all_taps)
    return result


@in_float32
def _interpolated(x: Array, all_taps: Sequence[Taps]) -> Array:
    # those first that grow least: the tensor stays small
    for taps in sorted(all_taps, key=lambda t: (t.growth(x.shape), -t.axis)):
        x = along_axis(x, taps)
    return x


def along_axis(x: Array, taps: Taps) -> Array:
    """The weighted sums along one axis."""
    weights = taps.weights.astype(x.dtype, copy=False)
    result: Array = np.take(x, taps.places[0], taps.axis)
    result *= _on_axis(weights[0], taps.axis, x.ndim)
    for places, weight in zip(taps.places[1:], weights[1:], strict=True):
        part = np.take(x, places, taps.axis)
        part *= _on_axis(weight, taps.axis, x.ndim)
        result += part
    return result


def by_corners(x: Array, all_taps: Sequence[Taps]) -> Array:
    """The weighted sums of all axes at once, each weight a product.

    Costs more than one axis after another, and rounds as onnxruntime does: that decides where
    integers are cut off.
    """
    total: Array = np.zeros((), x.dtype)
    for corner in product(*(range(len(taps.places)) for taps in all_taps)):
        part, weight = x, np.ones((), np.float32)
        for tap, taps in zip(corner[::-1], all_taps[::-1], strict=True):
            part = np.take(part, taps.places[tap], taps.axis)
            weight = weight * _on_axis(taps.weights[tap], taps.axis, x.ndim)
        total = total + weight * part
    return total


def _on_axis(values: Array, axis: int, rank: int) -> Array:
    """Values along one axis, ready to be broadcast."""
    return values.reshape(-1, *(1,) * (rank - 1 - axis))
