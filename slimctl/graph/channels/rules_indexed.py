"""Operators that pick or place elements by index: channels pass along the other axes."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from slimctl.graph.channels.coupling import Axis, Role
from slimctl.graph.channels.fills import repeats
from slimctl.graph.channels.rule import Rule
from slimctl.graph.channels.site import Site, normalized
from slimctl.graph.channels.units import Ids

_INDEXED = "it is indexed along this axis"
_UNRANKED = "its rank is unknown"


def _aligned(site: Site, index: int, axis: int, ids: Ids, role: Role) -> NDArray[np.float64]:
    """An operand that has one part for each channel loses what the channels lose.

    Indices are often the same for all channels, repeated by an Expand whose size then follows.

    Returns:
        What data hold at an index once its channel is silent.
    """
    shape, labels = site.shape(index), site.axes(index).get(axis)
    if labels is not None:
        site.tie(ids, labels.ids)
        return labels.rest
    value = site.node.inputs[index]
    repeated = None if value is None else repeats(value, axis, ids)
    if site.is_constant(index) and shape is not None and shape[axis] == ids.size:
        site.member(index, axis, ids, role)
        return np.zeros(ids.shape)
    if repeated is not None:
        site.later(lambda removal: removal.set_sizes(repeated, 1, {axis: ids}))
    else:
        site.block(ids, "it is indexed for each channel, by indices that do not change")
    return np.full(ids.shape, np.nan)


def _gather_elements(site: Site) -> None:
    rank = site.rank()
    site.block_inputs(_INDEXED, [1])
    if rank is None:
        site.block_inputs(_UNRANKED)
        return
    picked = normalized(int(site.attribute("axis", 0)), rank)
    for axis, labels in site.axes().items():
        if axis == picked:
            site.block(labels.ids, _INDEXED)
        else:
            _aligned(site, 1, axis, labels.ids, Role.CARRY)
            site.label(axis, labels)


def _gather_nd(site: Site) -> None:
    """GatherND: indices [..., k] replace the first k axes behind those of the batch."""
    indices, batch = site.shape(1), int(site.attribute("batch_dims", 0))
    depth = None if not indices else indices[-1]
    site.block_inputs(_INDEXED, [1])
    for axis, labels in site.axes().items():
        if indices is None or not isinstance(depth, int) or axis < batch + depth:
            site.block(labels.ids, _INDEXED)
        else:
            site.label(axis - depth - batch + len(indices) - 1, labels)


def _placed(site: Site, axis: int, places: Mapping[int, int]) -> None:
    """One axis of a scatter: data, updates and perhaps indices have it.

    Args:
        site: The node.
        axis: Of data and output.
        places: By input, 0 data, 1 indices, 2 updates: where it has this axis.
    """
    sides = [site.axes(index).get(places[index]) for index in (0, 2)]
    labels = sides[0] or sides[1]
    if labels is None:
        return
    data, updates = (
        _aligned(site, index, places[index], labels.ids, Role.PRODUCE) for index in (0, 2)
    )
    if 1 in places:
        _aligned(site, 1, places[1], labels.ids, Role.CARRY)
    rest = np.where(data == updates, data, np.nan)
    if site.attribute("reduction", "none") != "none":
        rest = np.where(rest == 0.0, 0.0, np.nan)
    site.label(axis, Axis(labels.ids, rest, labels.alive or site.name))


def _block_axes(site: Site, index: int, axes: Container[int]) -> None:
    for axis, labels in site.axes(index).items():
        if axis in axes:
            site.block(labels.ids, _INDEXED)


def _scatter_elements(site: Site) -> None:
    rank = site.rank()
    site.block_inputs(_INDEXED, [1])
    if rank is None:
        site.block_inputs(_UNRANKED)
        return
    along = normalized(int(site.attribute("axis", 0)), rank)
    for index in (0, 2):
        _block_axes(site, index, (along,))
    for axis in range(rank):
        if axis != along:
            _placed(site, axis, dict.fromkeys((0, 1, 2), axis))


def _scatter_nd(site: Site) -> None:
    """ScatterND: updates [*indices[:-1], *data[k:]] replace what k indices point at."""
    rank, indices = site.rank(), site.shape(1)
    depth = None if not indices else indices[-1]
    site.block_inputs(_INDEXED, [1])
    if rank is None or indices is None or not isinstance(depth, int):
        site.block_inputs(_UNRANKED)
        return
    ahead = len(indices) - 1
    _block_axes(site, 0, range(depth))
    _block_axes(site, 2, range(ahead))
    for axis in range(depth, rank):
        _placed(site, axis, {0: axis, 2: axis + ahead - depth})


def _top_k(site: Site) -> None:
    rank = site.rank()
    site.block_inputs("it is the number of elements that are picked", [1])
    for axis, labels in site.axes().items():
        if rank is None or axis == normalized(int(site.attribute("axis", -1)), rank):
            site.block(labels.ids, "these channels are compared")
        else:
            site.label(axis, labels)
            site.label(axis, site.alive(labels), output=1)


def _compress(site: Site) -> None:
    """Compress: a constant condition selects channels, and shrinks with them."""
    rank, condition, axis = site.rank(), site.constant(1), site.attribute("axis")
    site.block_inputs(_INDEXED, [1])
    if rank is None or axis is None:
        site.block_inputs("it is flattened")
        return
    picked = normalized(int(axis), rank)
    for place, labels in site.axes().items():
        if place != picked:
            site.label(place, labels)
        elif condition is None or condition.size != labels.ids.size:
            site.block(labels.ids, "which of them are picked is computed at run time")
        else:
            site.member(1, 0, labels.ids, Role.CARRY)
            site.select(labels.ids[condition])
            site.label(place, labels.map(partial(np.compress, condition)))


def _reverse_sequence(site: Site) -> None:
    for axis, labels in site.axes().items():
        if axis in (0, 1):
            site.block(labels.ids, "it is the time or the batch of sequences")
        else:
            site.label(axis, labels)


def _triangle(site: Site) -> None:
    """Trilu: zeros in the last two axes, by position."""
    rank = site.rank()
    for axis, labels in site.axes().items():
        if rank is None or axis >= rank - 2:
            site.block(labels.ids, _INDEXED)
        else:
            site.label(axis, labels.unknown(site.name))


RULES = {
    "Compress": Rule(_compress),
    "GatherElements": Rule(_gather_elements),
    "GatherND": Rule(_gather_nd),
    "ReverseSequence": Rule(_reverse_sequence),
    "ScatterElements": Rule(_scatter_elements),
    "ScatterND": Rule(_scatter_nd),
    "TopK": Rule(_top_k),
    "Trilu": Rule(_triangle),
}
