"""Values between pixels, at places that are data: grids and regions of interest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from slimctl.runtime.floats import in_float32
from slimctl.runtime.interpolation import keys
from slimctl.runtime.registry import Array, operator

_SPATIAL = 2
"""The first spatial axis, after the batch and the channels."""


@operator("GridSample", since=16)
@in_float32
def grid_sample_16(
    x: Array,
    grid: Array,
    *,
    align_corners: int = 0,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
) -> Array:
    """Values at the points of a grid, whose coordinates are -1 to 1 over the image."""
    return _sampled(x, grid, mode.removeprefix("bi"), padding_mode, bool(align_corners))


@operator("GridSample", since=20)
@in_float32
def grid_sample_20(
    x: Array,
    grid: Array,
    *,
    align_corners: int = 0,
    mode: str = "linear",
    padding_mode: str = "zeros",
) -> Array:
    """Values at the points of a grid, in any number of dimensions."""
    return _sampled(x, grid, mode, padding_mode, bool(align_corners))


def _sampled(x: Array, grid: Array, mode: str, padding: str, align: bool) -> Array:
    """The image goes on beyond its border as ``padding`` says, and is interpolated as it is inside.

    So do onnxruntime and torch. ONNX's reference moves the point itself to the border first, which
    differs for cubic interpolation there.
    """
    if mode != "nearest" and x.dtype.kind not in "fc":
        raise ValueError(f"{x.dtype} can only be sampled in the mode 'nearest'")
    (batch, channels), sizes = x.shape[:_SPATIAL], x.shape[_SPATIAL:]
    outside = int(np.prod(sizes))
    flat = x.reshape(batch, channels, outside)
    if padding == "zeros":  # one element more, for all that lies outside
        flat = np.concatenate([flat, np.zeros_like(flat[..., :1])], axis=2)
    # a point names the last axis first
    points = [_denormalized(grid[..., -1 - i], size, align) for i, size in enumerate(sizes)]
    count = int(np.prod(grid.shape[1:-1]))
    taps = [_taps(point.reshape(batch, count), mode) for point in points]
    result = np.zeros((batch, channels, count), x.dtype)
    for corner in product(*(range(len(places)) for places, _ in taps)):
        chosen = [places[tap] for tap, (places, _) in zip(corner, taps, strict=True)]
        index = _flat_index(chosen, sizes, padding, align)
        weight = np.prod([w[tap] for tap, (_, w) in zip(corner, taps, strict=True)], axis=0)
        for item in range(batch):
            part = np.take(flat[item], index[item], axis=1)  # [channels, points]
            result[item] += part * weight[item].astype(x.dtype, copy=False)
    return result.reshape(batch, channels, *grid.shape[1:-1])


def _denormalized(point: Array, size: int, align: bool) -> Array:
    """Coordinates in pixels: -1 and 1 are centers of the first and last, or their outer edges."""
    if align:
        return (point + 1) / 2 * (size - 1)
    return ((point + 1) * size - 1) / 2


def _taps(point: Array, mode: str) -> tuple[Array, Array]:
    """Places and their weights, each [taps, batch, points]."""
    if mode == "nearest":
        return np.rint(point).astype(np.int64)[None], np.ones_like(point)[None]
    low = np.floor(point)
    fraction, first = point - low, low.astype(np.int64)
    if mode == "linear":
        return np.stack([first, first + 1]), np.stack([1 - fraction, fraction])
    if mode == "cubic":
        return first + np.arange(-1, 3)[:, None, None], keys(fraction, -0.75)
    raise ValueError(f"there is no mode '{mode}'")


def _flat_index(places: Sequence[Array], sizes: Sequence[int], padding: str, align: bool) -> Array:
    """Indices of the flat image; one after its last element for what lies outside of zeros."""
    index, inside = np.zeros((), np.int64), np.ones((), bool)
    for place, size in zip(places, sizes, strict=True):
        inside = inside & (place >= 0) & (place < size)
        index = index * size + _within(place, size, padding, align)
    return np.where(inside, index, np.prod(sizes)) if padding == "zeros" else index


def _within(place: Array, size: int, padding: str, align: bool) -> Array:
    if padding in ("zeros", "border"):
        return np.clip(place, 0, size - 1)
    if padding != "reflection":
        raise ValueError(f"there is no padding mode '{padding}'")
    # mirrored at the centers of the outer pixels, or at their outer edges
    last = size - 1 if align else 2 * size - 1
    period = max(2 * size - 2, 1) if align else 2 * size
    folded = place % period
    return np.where(folded < size, folded, (2 * last if align else last) - folded)


@operator("AffineGrid", since=20)
@in_float32
def affine_grid(theta: Array, size: Array, *, align_corners: int = 0) -> Array:
    """Points of a regular grid after an affine map, [N, (D,) H, W, 2 or 3].

    An axis of one aligned point has it in the middle, as in torch; onnxruntime puts it at 1.
    """
    batch, _, *sizes = size.tolist()
    axes = [_regular(n, bool(align_corners)).astype(theta.dtype) for n in sizes]
    mesh = np.meshgrid(*axes, indexing="ij")[::-1]  # a point names the last axis first
    points = np.stack([*mesh, np.ones_like(mesh[0])], axis=-1).reshape(-1, len(sizes) + 1)
    return (points @ theta.transpose(0, 2, 1)).reshape(batch, *sizes, len(sizes))


def _regular(count: int, align: bool) -> Array:
    """Coordinates of pixels from -1 to 1: their centers, or from the first center to the last."""
    if align:
        return np.linspace(-1, 1, count) if count > 1 else np.zeros(count)
    return (2 * np.arange(count) + 1) / count - 1


@operator("RoiAlign", since=10)
@in_float32
def roi_align_10(
    x: Array,
    rois: Array,
    batch_indices: Array,
    *,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Array:
    """Regions of interest, pooled to one size, each of at least one pixel."""
    bounds = rois * rois.dtype.type(spatial_scale)
    extents = np.maximum(bounds[:, 2:] - bounds[:, :2], 1)
    output = (output_height, output_width)
    return _aligned(x, bounds[:, :2], extents, batch_indices, output, sampling_ratio, mode)


@operator("RoiAlign", since=16)
@in_float32
def roi_align_16(
    x: Array,
    rois: Array,
    batch_indices: Array,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Array:
    """Regions of interest, pooled to one size; with half pixels their corners are pixel edges."""
    if coordinate_transformation_mode not in ("half_pixel", "output_half_pixel"):
        raise ValueError(
            f"there is no coordinate transformation mode '{coordinate_transformation_mode}'"
        )
    half = coordinate_transformation_mode == "half_pixel"
    bounds = rois * rois.dtype.type(spatial_scale) - rois.dtype.type(0.5 if half else 0)
    extents = bounds[:, 2:] - bounds[:, :2]
    if not half:
        extents = np.maximum(extents, 1)
    output = (output_height, output_width)
    return _aligned(x, bounds[:, :2], extents, batch_indices, output, sampling_ratio, mode)


def _aligned(
    x: Array,
    starts: Array,
    extents: Array,
    batch_indices: Array,
    output: tuple[int, int],
    ratio: int,
    mode: str,
) -> Array:
    """All regions; starts and extents are [regions, 2], x before y."""
    if mode not in _POOLS:
        raise ValueError(f"there is no mode '{mode}'")
    result = np.zeros((len(starts), x.shape[1], *output), x.dtype)
    sizes = x.shape[_SPATIAL:]
    for region, image in enumerate(batch_indices):
        rows, columns = (
            _samples(starts[region, i], extents[region, i], output[1 - i], ratio, sizes[1 - i])
            for i in (1, 0)
        )
        if rows[0].size and columns[0].size:  # of an inside-out region there is nothing
            points = _weighted_neighbors(x[image], rows, columns)
            result[region] = _POOLS[mode](points).reshape(-1, *output)
    return result


def _samples(
    start: np.floating, extent: np.floating, bins: int, ratio: int, size: int
) -> tuple[Array, Array]:
    """Sample points of all bins along one axis: two neighbors of each and their weights.

    Both are [2, samples, bins]. A point more than a pixel outside has no weight.
    """
    kind = extent.dtype.type
    count = ratio if ratio > 0 else max(int(np.ceil(extent / bins)), 0)
    step = extent / kind(bins)
    within = (np.arange(count)[:, None] + 0.5).astype(kind) * step / kind(max(count, 1))
    points = start + np.arange(bins, dtype=kind) * step + within
    inside = (points >= -1) & (points <= size)
    points = np.clip(points, 0, size - 1)
    low = points.astype(np.int64)
    above = points - low.astype(kind)
    places = np.stack([low, np.minimum(low + 1, size - 1)])
    return places, np.stack([1 - above, above]) * inside


def _weighted_neighbors(
    image: Array, rows: tuple[Array, Array], columns: tuple[Array, Array]
) -> Array:
    """Four neighbors of all sample points, times their weights: [channels, 4, samples, bins]."""
    # [2, 1, samples, 1, bins, 1] and [1, 2, 1, samples, 1, bins]
    index, down = (part[:, None, :, None, :, None] for part in rows)
    across, right = (part[None, :, None, :, None, :] for part in columns)
    index, weight = index * image.shape[2] + across, down * right
    flat = image.reshape(len(image), -1)
    neighbors = np.take(flat, index.ravel(), axis=1) * weight.ravel()
    bins = rows[0].shape[2] * columns[0].shape[2]
    return np.reshape(neighbors, (len(image), 4, -1, bins))


def _average(points: Array) -> Array:
    """Means of interpolated samples, [channels, 4, samples, bins] -> [channels, bins]."""
    means: Array = points.sum(axis=(1, 2)) / points.dtype.type(points.shape[2])
    return means


def _maximum(points: Array) -> Array:
    """The largest weighted neighbor, not the largest sample: so ONNX and onnxruntime have it."""
    largest: Array = points.max(axis=(1, 2))
    return largest


_POOLS: dict[str, Callable[[Array], Array]] = {"avg": _average, "max": _maximum}
