"""Operators that move elements: reshaping, cutting, joining, padding, resizing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.channels import rules_elementwise
from slimctl.graph.channels.coupling import Axis, Role
from slimctl.graph.channels.fills import adapted
from slimctl.graph.channels.rule import Rule
from slimctl.graph.channels.site import Site, normalized
from slimctl.graph.channels.units import FIXED, Ids
from slimctl.graph.edit import Dimension
from slimctl.graph.sizes import reshaped, shape_entries

if TYPE_CHECKING:
    from slimctl.graph.channels.removal import Removal

_Shape = Sequence[Dimension]
_CHANNEL = 1
_DEEPEST = 4
_CHANNEL_FIRST = frozenset(
    {
        "AveragePool",
        "BatchNormalization",
        "Conv",
        "ConvTranspose",
        "GlobalAveragePool",
        "GlobalMaxPool",
        "InstanceNormalization",
        "MaxPool",
        "Resize",
        "Upsample",
    }
)


# reshaping


class _Group(NamedTuple):
    """Neighboring axes before and after a reshape that hold the same elements."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def _aligned(before: _Shape, after: _Shape) -> list[_Group]:
    """Splits a reshape into the smallest groups of axes that hold the same elements.

    Sizes are compared from both ends, products of known ones and single symbols; what is left in
    the middle holds the same elements as a whole.
    """
    head, start = _from_left(before, after)
    rest_before, rest_after = before[start[0] :], after[start[1] :]
    tail, stop = _from_left(rest_before[::-1], rest_after[::-1])
    ends = len(before) - stop[0], len(after) - stop[1]
    middle = _Group(tuple(range(start[0], ends[0])), tuple(range(start[1], ends[1])))
    mirrored = [
        _Group(
            tuple(len(before) - 1 - axis for axis in group.before[::-1]),
            tuple(len(after) - 1 - axis for axis in group.after[::-1]),
        )
        for group in tail[::-1]
    ]
    return [*head, *([middle] if middle.before or middle.after else []), *mirrored]


def _from_left(before: _Shape, after: _Shape) -> tuple[list[_Group], tuple[int, int]]:
    """Groups that can be told from the left, and where they end on both sides."""
    groups: list[_Group] = []
    start = (0, 0)
    while True:
        end = _next_group(before, after, start)
        if end is None:
            return groups, start
        groups.append(_Group(tuple(range(start[0], end[0])), tuple(range(start[1], end[1]))))
        start = end


def _next_group(before: _Shape, after: _Shape, start: tuple[int, int]) -> tuple[int, int] | None:
    """Where the products of sizes agree for the first time; None where that cannot be told."""
    i, j = start
    if i == len(before) or j == len(after):
        return None
    if before[i] == after[j] is not None:
        return i + 1, j + 1
    products = [1, 1]
    while True:
        left = products[0] <= products[1]
        place, sizes = (i, before) if left else (j, after)
        size = sizes[place] if place < len(sizes) else None
        if not isinstance(size, int) or size < 1:
            return None
        products[0 if left else 1] *= size
        i, j = (i + 1, j) if left else (i, j + 1)
        if products[0] == products[1] and j > start[1]:
            return i, j


def _completed(before: _Shape, after: _Shape) -> list[Dimension]:
    """Sizes of a group after a reshape; the one that is left open follows from the others."""
    open_axes = [axis for axis, size in enumerate(after) if not isinstance(size, int)]
    if len(open_axes) != 1 or not all(isinstance(size, int) for size in before):
        return list(after)
    total = math.prod(int(size or 0) for size in before)
    known = math.prod(size for size in after if isinstance(size, int))
    return [total // known if axis == open_axes[0] and known else s for axis, s in enumerate(after)]


def _regroup(site: Site, before: _Shape, after: _Shape) -> dict[int, Axis]:
    """Labels of the output of a reshape; blocks what cannot follow."""
    found: dict[int, Axis] = {}
    channel_first = _read_as_images(site.node.outputs[0])
    for group in _aligned(before, after):
        inside = [axis for axis in group.before if axis in site.axes()]
        if not inside:
            continue
        if len(inside) > 1:
            for axis in inside:
                site.block(site.axes()[axis].ids, "two of the joined axes could both lose channels")
            continue
        axis = inside[0]
        labels = site.axes()[axis]
        others = [before[other] for other in group.before]
        sizes = _completed(others, [after[other] for other in group.after])
        if not all(isinstance(size, int) and size > 0 for size in (*others, *sizes)):
            site.block(labels.ids, "it is reshaped together with an axis of unknown size")
            continue
        shape_before = [int(size or 0) for size in others]
        view = [1] * len(shape_before)
        view[group.before.index(axis)] = labels.ids.size
        shape_after = [int(size or 0) for size in sizes]
        block = labels.map(_spread(view, shape_before, shape_after))
        first = group.after.index(_CHANNEL) if channel_first and _CHANNEL in group.after else None
        place, kept = _one_axis(site, block, first)
        if kept is not None:
            found[group.after[place]] = kept
    return found


def _spread(
    view: Sequence[int], full: Sequence[int], after: Sequence[int]
) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Repeats a vector along the axes that it shares a reshape with."""
    return lambda held: np.broadcast_to(held.reshape(view), full).reshape(after)


def _reshaped(shape: tuple[int, int]) -> Callable[[NDArray[Any]], NDArray[Any]]:
    return lambda held: held.reshape(shape)


def _taken(chosen: NDArray[Any] | slice) -> Callable[[NDArray[Any]], NDArray[Any]]:
    return lambda held: held[chosen]


def _with_labels(site: Site) -> list[Dimension] | None:
    shape = site.shape()
    if shape is None:
        return None
    return [
        site.axes()[axis].ids.size if axis in site.axes() else size
        for axis, size in enumerate(shape)
    ]


def _read_as_images(value: ir.Value, depth: int = 0) -> bool:
    """Whether a tensor goes to an operator for which the second axis is that of channels."""
    for use in value.uses():
        if use.idx == 0 and use.node.op_type in _CHANNEL_FIRST:
            return True
        elementwise = use.node.op_type in rules_elementwise.RULES and depth < _DEEPEST
        if elementwise and _read_as_images(use.node.outputs[0], depth + 1):
            return True
    return False


def _one_axis(site: Site, block: Axis, preferred: int | None) -> tuple[int, Axis | None]:
    """Which axis of a block of labels may shrink; what lies along the others is tied.

    An axis along which alone the labels vary needs no ties (a reshape that undoes an earlier one).
    Otherwise it is the one that the next layer takes for channels; or the last axis, so that
    channels are taken out of every block alike; or, where whole blocks are wanted (attention
    heads), the largest of the axes before it.
    """
    shape = block.ids.shape
    wide = [axis for axis, size in enumerate(shape) if size > 1]
    if not wide:
        site.block(block.ids, "it is the only channel")
        return 0, None
    roots = site.channels.units.find(block.ids.reshape(-1)).reshape(shape)
    for axis in wide:
        line = np.moveaxis(roots, axis, -1).reshape(-1, shape[axis])
        if np.all(line == line[0]):
            return axis, _rows(site, block, axis)
    chosen = wide[-1]
    if preferred in wide:
        chosen = preferred
    elif site.whole_blocks and len(wide) > 1:
        chosen = max(wide[:-1], key=lambda axis: (shape[axis], axis))
    return chosen, _rows(site, block, chosen)


def _rows(site: Site, block: Axis, axis: int) -> Axis:
    """Ties everything that lies at one index of an axis."""
    rows = block.map(lambda held: np.moveaxis(held, axis, -1).reshape(-1, held.shape[axis]))
    ids = site.tie_rows(rows.ids)
    same = np.all(rows.rest == rows.rest[0], axis=0)
    return Axis(ids, np.where(same, rows.rest[0], np.nan), block.alive)


def _reshape(site: Site) -> None:
    before = _with_labels(site)
    entries = shape_entries(site.node.inputs[1]) if site.has(1) else site.attribute("shape")
    allow = bool(site.attribute("allowzero", 0))
    after = (
        None if before is None else reshaped(before, site.out_shape(), entries, allow_zero=allow)
    )
    if before is None or after is None:
        site.block_inputs("the shape before or after the reshape is unknown")
        return
    found = _regroup(site, before, after)
    for axis, labels in found.items():
        site.label(axis, labels)
    site.later(lambda removal: removal.set_sizes(site.node, 1, _labels(site)))


def _labels(site: Site) -> dict[int, Ids]:
    """Labels of the first output, by axis."""
    found = site.channels.tensors.get(site.node.outputs[0], {})
    return {axis: labels.ids for axis, labels in found.items()}


def _flatten(site: Site) -> None:
    before = _with_labels(site)
    if before is None:
        site.block_inputs("its rank is unknown")
        return
    axis = normalized(int(site.attribute("axis", 1)), len(before))
    for inside in (range(axis), range(axis, len(before))):
        labeled = [place for place in inside if place in site.axes()]
        sizes = [before[place] for place in inside]
        if not labeled:
            continue
        known = all(isinstance(size, int) for size in sizes)
        if len(labeled) > 1 or not known:
            for place in labeled:
                site.block(
                    site.axes()[place].ids, "it is flattened with axes of unknown or changing size"
                )
            continue
        labels = site.axes()[labeled[0]]
        view = [1] * len(sizes)
        view[labeled[0] - inside.start] = labels.ids.size
        full = [int(size or 0) for size in sizes]
        site.label(
            0 if inside.start == 0 and axis else 1,
            labels.map(_spread(view, full, [-1])),
        )


def _transpose(site: Site) -> None:
    rank = site.rank()
    order = site.attribute("perm")
    if order is None and rank is None:
        site.block_inputs("its rank is unknown")
        return
    places = list(order) if order is not None else list(range(rank or 0))[::-1]
    for axis, labels in site.axes().items():
        site.label(places.index(axis), labels)


def _listed_axes(site: Site) -> list[int] | None:
    """Axes from the second input (opset 13) or the attribute."""
    constant = site.constant(1)
    if constant is not None:
        return [int(axis) for axis in constant.reshape(-1)]
    if site.has(1):
        return None
    attribute = site.attribute("axes")
    return None if attribute is None else [int(axis) for axis in attribute]


def _squeeze(site: Site) -> None:
    rank, axes = site.rank(), _listed_axes(site)
    shape = site.shape()
    if rank is None or shape is None or (axes is None and None in [_int(d) for d in shape]):
        site.block_inputs("which axes go is unknown")
        return
    gone = (
        [axis for axis, size in enumerate(shape) if size == 1]
        if axes is None
        else [normalized(axis, rank) for axis in axes]
    )
    left = [axis for axis in range(rank) if axis not in gone]
    for axis, labels in site.axes().items():
        site.label(left.index(axis), labels)
        if axes is None:  # an axis of which one index stays must not go too
            site.when_fewer(labels.ids, partial(_set_axes, site, gone))


def _set_axes(site: Site, axes: Sequence[int], removal: Removal) -> None:
    if site.opset < 13:
        removal.set_ints(site.node, "axes", axes)
    else:
        removal.set_input(site.node, 1, np.array(axes, np.int64))


def _int(size: Dimension) -> int | None:
    return size if isinstance(size, int) else None


def _unsqueeze(site: Site) -> None:
    rank, axes = site.rank(), _listed_axes(site)
    if rank is None or axes is None:
        site.block_inputs("which axes are new is unknown")
        return
    total = rank + len(axes)
    new = {normalized(axis, total) for axis in axes}
    old = [axis for axis in range(total) if axis not in new]
    for axis, labels in site.axes().items():
        site.label(old[axis], labels)


def _expand(site: Site) -> None:
    rank, out = site.rank(), site.out_rank()
    if rank is None or out is None:
        site.block_inputs("its rank is unknown")
        return
    for axis, labels in site.axes().items():
        site.label(axis + out - rank, labels)
    # A size of 1 leaves the axis as it comes, whatever it will be.
    site.later(lambda removal: removal.set_sizes(site.node, 1, dict.fromkeys(_labels(site), 1)))


def _tile(site: Site) -> None:
    repeats = site.constant(1)
    for axis, labels in site.axes().items():
        if repeats is None:
            site.block(labels.ids, "how often it is repeated is unknown")
        else:
            site.label(axis, labels.map(partial(np.tile, reps=int(repeats[axis]))))


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
            site.label(axis, labels.map(_taken(chosen)), output=output)
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
            site.label(axis, labels.map(_taken(chosen)))
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
        site.later(lambda removal: removal.set_sizes(site.node, 3, _labels(site)))


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
            rows = labels.map(_reshaped(shape))
            site.label(1, _rows(site, rows, 0 if columns else 1))


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
    "Expand": Rule(_expand),
    "Flatten": Rule(_flatten),
    "Pad": Rule(_pad),
    "Reshape": Rule(_reshape),
    "Resize": Rule(_resize),
    "Shape": Rule(_shape),
    "Slice": Rule(_slice),
    "SpaceToDepth": Rule(_depth_to_space),
    "Split": Rule(_split),
    "Squeeze": Rule(_squeeze),
    "Tile": Rule(_tile),
    "Transpose": Rule(_transpose),
    "Unsqueeze": Rule(_unsqueeze),
    "Upsample": Rule(_resize),
}
