"""Resize: every axis by itself, each result a weighted sum of a few elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slimctl.training.operator import Call, Operator, any_of, only

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class _Axis:
    """An axis that changes its size.

    Attributes:
        before: Size.
        after: Size.
        scale: What one is of the other; not always the quotient, since sizes are rounded.
    """

    before: int
    after: int
    scale: np.float32


# where a new element lies among the old ones; as in the specification, in single precision


def _half_pixel(axis: _Axis, x: Floats) -> Floats:
    return (x + np.float32(0.5)) / axis.scale - np.float32(0.5)


def _pytorch_half_pixel(axis: _Axis, x: Floats) -> Floats:
    return _half_pixel(axis, x) if axis.after > 1 else np.zeros_like(x)


def _half_pixel_symmetric(axis: _Axis, x: Floats) -> Floats:
    adjusted = np.float32(axis.after) / (axis.scale * np.float32(axis.before))
    offset = np.float32(axis.before / 2) * (1 - adjusted)
    return np.asarray(offset + _half_pixel(axis, x), np.float32)


def _align_corners(axis: _Axis, x: Floats) -> Floats:
    return x * np.float32(axis.before - 1) / np.float32(max(axis.after - 1, 1))


def _asymmetric(axis: _Axis, x: Floats) -> Floats:
    return x / axis.scale


_PLACES: dict[str, Callable[[_Axis, Floats], Floats]] = {
    "half_pixel": _half_pixel,
    "align_corners": _align_corners,
    "asymmetric": _asymmetric,
    "half_pixel_symmetric": _half_pixel_symmetric,
    "pytorch_half_pixel": _pytorch_half_pixel,
}

_ROUNDED: dict[str, Callable[[Floats], Floats]] = {
    "round_prefer_floor": lambda x: np.ceil(x - np.float32(0.5)),
    "round_prefer_ceil": lambda x: np.floor(x + np.float32(0.5)),
    "floor": np.floor,
    "ceil": np.ceil,
}


# which elements count how much: indices and weights, both [taps, after]


def _nearest(call: Call, axis: _Axis, x: Floats) -> tuple[Floats, Floats]:
    del axis
    rounded = _ROUNDED[call.attribute("nearest_mode", "round_prefer_floor")](x)
    return rounded[None], np.ones_like(rounded)[None]


def _linear(call: Call, axis: _Axis, x: Floats) -> tuple[Floats, Floats]:
    del call
    x = np.clip(x, 0, axis.before - 1)
    first = np.floor(x)
    return np.stack([first, first + 1]), np.stack([1 - (x - first), x - first])


def _cubic(call: Call, axis: _Axis, x: Floats) -> tuple[Floats, Floats]:
    """Keys, "Cubic Convolution Interpolation for Digital Image Processing", 1981."""
    a = call.attribute("cubic_coeff_a", -0.75)
    places = np.floor(x) + np.arange(-1, 3, dtype=np.float32)[:, None]
    d = np.abs(x - places)
    near = (a + 2) * d**3 - (a + 3) * d**2 + 1
    far = a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
    weights = np.where(d <= 1, near, far)
    if call.attribute("exclude_outside", 0):
        weights = np.where((places < 0) | (places >= axis.before), 0, weights)
        weights = weights / weights.sum(axis=0)
    return places, weights.astype(np.float32)


_TAPS = {"nearest": _nearest, "linear": _linear, "cubic": _cubic}


def _resize(
    call: Call,
    x: Tensor,
    roi: Tensor | None = None,
    scales: Tensor | None = None,
    sizes: Tensor | None = None,
) -> Tensor:
    del roi  # read only where an image is cropped
    axes = [axis % x.ndim for axis in call.attribute("axes", range(x.ndim))]
    for place, axis in enumerate(axes):
        before = x.shape[axis]
        if sizes is not None and sizes.numel():
            after = int(sizes[place])
            scale = np.float32(after / before)
        else:
            assert scales is not None, "one of both is given"
            scale = np.float32(scales[place].item())
            after = int(np.floor(np.float32(before) * scale))
        if after != before or scale != 1:
            x = _resized(call, x, axis, _Axis(before, after, scale))
    return x


def _resized(call: Call, x: Tensor, place: int, axis: _Axis) -> Tensor:
    mode = call.attribute("coordinate_transformation_mode", "half_pixel")
    new = _PLACES[mode](axis, np.arange(axis.after, dtype=np.float32))
    indices, weights = _TAPS[call.attribute("mode", "nearest")](call, axis, new)
    indices = np.clip(indices, 0, axis.before - 1)
    shape = (-1, *(1,) * (x.ndim - place - 1))
    terms = [
        x.index_select(place, torch.from_numpy(index.astype(np.int64)).to(x.device))
        * torch.from_numpy(weight).to(x).reshape(shape)
        for index, weight in zip(indices, weights, strict=True)
    ]
    return torch.stack(terms).sum(0) if len(terms) > 1 else terms[0]


OPERATORS = {
    "Resize": Operator(
        _resize,
        any_of(
            only(mode=tuple(_TAPS), coordinate_transformation_mode=tuple(_PLACES)),
            only(antialias=(0,), keep_aspect_ratio_policy=("stretch",)),
        ),
        numbers=(1, 2, 3),
    ),
}
