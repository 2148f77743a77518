"""Operators that move elements: cutting, joining, padding, resizing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.channels.coupling import Axis, Role
from slimctl.graph.channels.fills import adapted
from slimctl.graph.channels.rule import Rule
from slimctl.graph.channels.rules_reshape import in_shape, labels_of, rows_of, taken
from slimctl.graph.channels.site import Site, normalized
from slimctl.graph.channels.units import FIXED, Ids
from slimctl.graph.edit import Dimension
from slimctl.graph.sizes import shape_entries

if TYPE_CHECKING:
    from slimctl.graph.channels.removal import Removal

_Shape = Sequence[Dimension]


# cutting and joining


def _concat(site: Site) -> None:
    shapes = [site.shape(index) for index in range(len(site.node.inputs))]
    ranks = [len(shape) for shape in shapes if shape is not None]
    if not ranks:
        site.block_inputs("its rank is unknown")
        return
    axis = normalized(int(site.attribute("axis", 0)), ranks[0])
    _concat_along(site, axis, shapes)
    labeled = {place for index in range(len(shapes)) for place in site.axes(index)} - {axis}
    for place in sorted(labeled):
        sides = [site.axes(index).get(place) for index in range(len(shapes))]
        first = next(side for side in sides if side is not None)
        ids, rest, alive = first.ids, np.asarray(first.rest), first.alive
        for index, side in enumerate(sides):
            other = _other_part(site, index, place, ids) if side is None else side
            ids = site.tie(ids, other.ids)
            rest = np.where(rest == other.rest, rest, np.nan)
            alive = alive or other.alive
        site.label(place, Axis(ids, rest, alive or site.name))


def _other_part(site: Site, index: int, axis: int, ids: Ids) -> Axis:
    """A part without labels: it adapts, or nothing of the others may go."""
    rest = adapted(site, index, axis, ids, Role.PRODUCE)
    return _fixed(ids.size) if rest is None else Axis(ids, rest)


def _concat_along(site: Site, axis: int, shapes: Sequence[_Shape | None]) -> None:
    if not any(axis in site.axes(index) for index in range(len(shapes))):
        return
    parts: list[Axis] = []
    for index, shape in enumerate(shapes):
        labels = site.axes(index).get(axis)
        size = shape[axis] if shape is not None else None
        if labels is not None:
            parts.append(labels)
        elif isinstance(size, int):
            parts.append(_fixed(size))
        else:
            for other in range(len(shapes)):
                if axis in site.axes(other):
                    site.block(site.axes(other)[axis].ids, "it is joined to an unknown size")
            return
    site.label(axis, _joined(parts))


def _fixed(size: int) -> Axis:
    """Indices that can never be removed."""
    return Axis(np.full(size, FIXED, np.int64), np.zeros(size))


def _joined(parts: Sequence[Axis]) -> Axis:
    alive = next((part.alive for part in parts if part.alive), "")
    return Axis(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.rest for part in parts]),
        alive,
    )


def _split(site: Site) -> None:
    rank = site.rank()
    if rank is None:
        site.block_inputs("its rank is unknown")
        return
    axis = normalized(int(site.attribute("axis", 0)), rank)
    for place, labels in site.axes().items():
        if place != axis:
            for output in range(len(site.node.outputs)):
                site.label(place, labels, output=output)
            continue
        sizes = _split_sizes(site, labels.ids.size)
        if sizes is None:
            site.block(labels.ids, "where it is split is unknown")
            continue
        ends = np.cumsum(sizes)
        parts = np.split(labels.ids, ends[:-1])
        for output, (part, end) in enumerate(zip(parts, ends, strict=True)):
            chosen = slice(int(end) - part.size, int(end))
            site.select(part)
            site.label(axis, labels.map(taken(chosen)), output=output)
        site.when_fewer(labels.ids, partial(_set_split, site, parts))


def _split_sizes(site: Site, total: int) -> list[int] | None:
    given = site.constant(1)
    if given is not None:
        return [int(size) for size in given]
    if site.has(1):
        return None
    attribute = site.attribute("split")
    if attribute is not None:
        return [int(size) for size in attribute]
    count = len(site.node.outputs)
    each = -(-total // count)
    return [each] * (count - 1) + [total - each * (count - 1)]


def _set_split(site: Site, parts: Sequence[Ids], removal: Removal) -> None:
    sizes = [removal.count(part) for part in parts]
    if site.opset < 13:
        removal.set_ints(site.node, "split", sizes)
    else:
        site.node.attributes.pop("num_outputs", None)
        removal.set_input(site.node, 1, np.array(sizes, np.int64))


def _slice(site: Site) -> None:
    rank = site.rank()
    bounds = _slice_bounds(site)
    if rank is None:
        site.block_inputs("its rank is unknown")
        return
    if bounds is None:
        _slice_beside(site, rank)
        return
    cuts = {normalized(axis, rank): (start, end, step) for axis, start, end, step in bounds}
    for axis, labels in site.axes().items():
        if axis not in cuts:
            site.label(axis, labels)
            continue
        start, end, step = cuts[axis]
        chosen = np.arange(labels.ids.size)[_python_slice(start, end, step)]
        if chosen.size == labels.ids.size and step == 1:
            site.label(axis, labels)
        elif not chosen.size:
            site.block(labels.ids, "nothing of it is left")
            continue
        else:
            site.select(labels.ids[chosen])
            site.label(axis, labels.map(taken(chosen)))
        site.when_fewer(labels.ids, partial(_set_slice, site, (axis, rank), labels.ids, chosen))


def _slice_beside(site: Site, rank: int) -> None:
    """Where the bounds are computed, but not the axes, the others pass."""
    listed = site.constant(3)
    cut = range(rank) if listed is None else [normalized(int(a), rank) for a in listed]
    for axis, labels in site.axes().items():
        if axis in cut:
            site.block(labels.ids, "where it is cut is computed at run time")
        else:
            site.label(axis, labels)


def _set_slice(
    site: Site, axis: tuple[int, int], ids: Ids, chosen: NDArray[np.int64], removal: Removal
) -> None:
    removal.set_slice(site.node, axis[0], axis[1], removal.positions(ids, chosen))


def _python_slice(start: int, end: int, step: int) -> slice:
    """ONNX clamps the end of a backward slice where Python would count it from the end."""
    far = np.iinfo(np.int32).min
    return slice(start, None if step < 0 and end <= far else end, step)


def _slice_bounds(site: Site) -> list[tuple[int, int, int, int]] | None:
    """(axis, start, end, step) of each cut."""
    if site.attribute("starts") is not None:  # before opset 10
        starts, ends = list(site.attribute("starts")), list(site.attribute("ends"))
        axes = list(site.attribute("axes", range(len(starts))))
        return list(zip(axes, starts, ends, [1] * len(starts), strict=True))
    arrays: list[NDArray[Any] | None] = [site.constant(index) for index in range(1, 5)]
    if any(array is None and site.has(index + 1) for index, array in enumerate(arrays)):
        return None
    if arrays[0] is None or arrays[1] is None:
        return None
    count = arrays[0].size
    listed = arrays[2] if arrays[2] is not None else np.arange(count)
    steps = arrays[3] if arrays[3] is not None else np.ones(count, np.int64)
    return [
        (int(a), int(s), int(e), int(step))
        for a, s, e, step in zip(listed, arrays[0], arrays[1], steps, strict=True)
    ]


# padding and resizing


def _pad(site: Site) -> None:
    rank, pads = site.rank(), site.constant(1)
    if pads is None and not site.has(1) and site.attribute("pads") is not None:
        pads = np.array(site.attribute("pads"))
    if rank is None or pads is None or (site.has(3) and site.constant(3) is None):
        site.block_inputs("how much is padded is computed at run time")
        return
    axes = [normalized(int(axis), rank) for axis in _constant_or(site, 3, np.arange(rank))]
    count = len(axes)
    sizes = {axis: (int(pads[i]), int(pads[i + count])) for i, axis in enumerate(axes)}
    mode = site.attribute("mode", "constant")
    filled = float(_constant_or(site, 2, np.array(site.attribute("value", 0.0))).reshape(-1)[0])
    known = not site.has(2) or site.is_constant(2)
    elsewhere = {axis for axis, size in sizes.items() if size != (0, 0)}
    for axis, labels in site.axes().items():
        begin, end = sizes.get(axis, (0, 0))
        inside = labels
        if mode == "constant" and elsewhere - {axis}:
            same = known & (labels.rest == filled)
            rest = np.where(same, labels.rest, np.nan)
            inside = Axis(labels.ids, rest, labels.alive or site.name)
        if min(begin, end) < 0 or (mode != "constant" and (begin or end)):
            site.block(labels.ids, "it is padded with its own values, or cut")
            continue
        site.label(axis, _joined([_fixed(begin), inside, _fixed(end)]))


def _constant_or(site: Site, index: int, default: NDArray[Any]) -> NDArray[Any]:
    found = site.constant(index)
    return default if found is None else found


def _resize(site: Site) -> None:
    """Resize and Upsample: only axes that keep their size may lose channels."""
    cropped = site.attribute("coordinate_transformation_mode") == "tf_crop_and_resize"
    for axis, labels in site.axes().items():
        if cropped or not _keeps_size(site, axis, labels.ids.size):
            site.block(labels.ids, "it is resized along this axis")
        else:
            simple = site.attribute("mode", "nearest") in ("nearest", "linear")
            site.label(axis, labels if simple else labels.unknown(site.name))
    if _sizes_input(site) is not None:
        site.later(lambda removal: removal.set_sizes(site.node, 3, labels_of(site)))


def _sizes_input(site: Site) -> ir.Value | None:
    return site.node.inputs[3] if site.node.op_type == "Resize" and site.has(3) else None


def _keeps_size(site: Site, axis: int, size: int) -> bool:
    listed, rank = site.attribute("axes"), site.rank()
    places = list(range(rank or 0)) if listed is None else list(listed)
    places = [normalized(int(place), rank or 0) for place in places]
    if listed is not None and axis not in places:
        return True
    first = site.node.op_type == "Upsample" or site.opset < 11
    scales = site.constant(1 if first else 2)
    if scales is None or not scales.size:
        scales = site.attribute("scales")
    if scales is not None and len(scales):
        return bool(scales[places.index(axis)] == 1.0)
    after, sizes = site.out_shape(), shape_entries(_sizes_input(site))
    stated = None if sizes is None else sizes[places.index(axis)]
    return size == (stated if stated is not None or after is None else after[axis])


def _depth_to_space(site: Site) -> None:
    """DepthToSpace: C = b*b*C' (DCR) or C'*b*b (CRD); SpaceToDepth: C' = b*b*C."""
    block = int(site.attribute("blocksize", 1)) ** 2
    for axis, labels in site.axes().items():
        if axis != 1:
            if axis == 0:
                site.label(0, labels)
            else:
                site.block(labels.ids, "it becomes channels")
        elif site.node.op_type == "SpaceToDepth":
            site.label(1, labels.map(lambda held: np.tile(held, block)))
        else:
            columns = site.attribute("mode", "DCR") == "CRD"
            shape = (-1, block) if columns else (block, -1)
            rows = labels.map(in_shape(shape))
            site.label(1, rows_of(site, rows, 0 if columns else 1))


# sizes as data


def _shape(site: Site) -> None:
    """What is computed from sizes keeps computing with those of the original.

    A scale of ``1/sqrt(width)`` must not change with the width. Whoever needs the new size as a
    shape (Reshape, Expand, Resize) sets it.
    """
    rank = site.rank()
    if rank is None:
        site.block_inputs("its rank is unknown")
        return
    start, end, _ = slice(site.attribute("start"), site.attribute("end")).indices(rank)
    inside = {axis: labels.ids for axis, labels in site.axes().items() if start <= axis < end}
    site.later(
        lambda removal: removal.patch_output(
            site.node,
            {axis - start: ids.size for axis, ids in inside.items() if removal.loses(ids)},
            end - start,
        )
    )


RULES = {
    "Concat": Rule(_concat),
    "DepthToSpace": Rule(_depth_to_space),
    "Pad": Rule(_pad),
    "Resize": Rule(_resize),
    "Shape": Rule(_shape),
    "Slice": Rule(_slice),
    "SpaceToDepth": Rule(_depth_to_space),
    "Split": Rule(_split),
    "Upsample": Rule(_resize),
}
