"""Reading and writing at indices that are data."""

from __future__ import annotations

from typing import Any

import numpy as np

from slimctl.runtime.floats import in_float32
from slimctl.runtime.registry import Array, operator

_REDUCTIONS: dict[str, np.ufunc] = {
    "add": np.add,
    "mul": np.multiply,
    "min": np.minimum,  # NaN spreads; onnxruntime compares, and so keeps it or not by its place
    "max": np.maximum,
}


@operator("Gather", since=1)
def gather(data: Array, indices: Array, *, axis: int = 0) -> Array:
    """Slices along an axis; the indices' shape stands in the place of the axis."""
    return np.asarray(np.take(data, indices, axis))


@operator("GatherElements", since=11)
def gather_elements(data: Array, indices: Array, *, axis: int = 0) -> Array:
    """Along an axis the element that the index of the same place names."""
    axis %= data.ndim
    reach = (slice(None if i == axis else size) for i, size in enumerate(indices.shape))
    return np.take_along_axis(data[tuple(reach)], indices, axis)


@operator("GatherND", since=11)
def gather_nd(data: Array, indices: Array, *, batch_dims: int = 0) -> Array:
    """Slices at index tuples, which stand in the last axis; the first axes run along."""
    batch = np.ogrid[tuple(slice(size) for size in data.shape[:batch_dims])]
    inner = indices.ndim - 1 - batch_dims
    # [b1, .., 1, ..]: as many axes as the index tuples have
    along = tuple(grid.reshape(*grid.shape, *(1,) * inner) for grid in batch)
    return np.asarray(data[along + tuple(np.moveaxis(indices, -1, 0))])


@operator("Scatter", since=9)
def scatter(data: Array, indices: Array, updates: Array, *, axis: int = 0) -> Array:
    """The data with elements replaced: the older name of ScatterElements."""
    return _written(data, _along(indices, axis), updates, "none")


@operator("ScatterElements", since=11)
def scatter_elements(
    data: Array, indices: Array, updates: Array, *, axis: int = 0, reduction: str = "none"
) -> Array:
    """The data with elements replaced, or combined with, along an axis."""
    return _written(data, _along(indices, axis), updates, reduction)


def _along(indices: Array, axis: int) -> tuple[Array, ...]:
    """Indices of all axes: those of one are given, the others run along."""
    places: list[Array] = list(np.ogrid[tuple(slice(size) for size in indices.shape)])
    places[axis] = indices
    return tuple(places)


@operator("ScatterND", since=11)
def scatter_nd(data: Array, indices: Array, updates: Array, *, reduction: str = "none") -> Array:
    """The data with slices replaced, or combined with, at index tuples."""
    return _written(data, tuple(np.moveaxis(indices, -1, 0)), updates, reduction)


def _written(data: Array, places: tuple[Array, ...], updates: Array, reduction: str) -> Array:
    if reduction != "none":
        combined: Array = _combined(data, updates, places=places, reduction=reduction)
        return combined
    result = data.copy()
    result[places] = updates
    return result


@in_float32
def _combined(data: Array, updates: Array, *, places: tuple[Array, ...], reduction: str) -> Array:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"there is no reduction '{reduction}'")
    result: Array = data.copy()
    _REDUCTIONS[reduction].at(result, places, updates)
    return result


@operator("TensorScatter", since=24)
def tensor_scatter(
    past_cache: Array,
    update: Array,
    write_indices: Array | None = None,
    *,
    axis: int = -2,
    mode: str = "linear",
) -> Array:
    """A cache with new elements along an axis, from an index of each batch on."""
    if mode not in ("linear", "circular"):
        raise ValueError(f"there is no mode '{mode}'")
    batch, length, steps = past_cache.shape[0], past_cache.shape[axis], update.shape[axis]
    first = np.zeros(batch, np.int64) if write_indices is None else write_indices
    places = first[:, None] + np.arange(steps)  # [batch, steps]
    if mode == "circular":
        places %= length
    if np.any((places < 0) | (places >= length)):
        raise ValueError(f"an element would be written outside the cache's {length}")
    result = past_cache.copy()
    view = np.moveaxis(result, axis, 1)  # [batch, time, ...]
    view[np.arange(batch)[:, None], places] = np.moveaxis(update, axis, 1)
    return result


@operator("Unique", since=11)
def unique(
    x: Array,
    *,
    axis: int | None = None,
    sorted: int = 1,
) -> tuple[Array, Array, Array, Array]:
    """Distinct elements or slices, where they are first, which of them is where, and how many."""
    if axis is None:
        kept, (first, inverse, counts) = x.ravel(), _distinct(x.ravel())
    else:
        kept, (first, inverse, counts) = x, _distinct(_codes(x, axis), axis=0)
    if not sorted:  # by where they come first
        order = np.argsort(first)
        first, counts = first[order], counts[order]
        inverse = np.argsort(order)[inverse]
    return np.take(kept, first, axis or 0), first, inverse, counts


def _distinct(x: Array, axis: int | None = None) -> tuple[Array, Array, Array]:
    """Of all distinct elements or slices, in their order: where first, which is where, how many."""
    found: Any = np.unique(x, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    first, inverse, counts = (part.ravel().astype(np.int64, copy=False) for part in found[1:])
    return first, inverse, counts


def _codes(x: Array, axis: int) -> Array:
    """A row of integers for each slice, in the order of the elements.

    numpy sorts rows only of its own types; codes serve strings and narrow floats as well.
    """
    rows = np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
    return np.unique(rows, return_inverse=True)[1].reshape(rows.shape)
