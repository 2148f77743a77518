"""Operators that give the same elements other axes: reshaping, transposing, repeating."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.channels import rules_elementwise
from slimctl.graph.channels.coupling import Axis
from slimctl.graph.channels.rule import Rule
from slimctl.graph.channels.site import Site, normalized
from slimctl.graph.channels.units import Ids
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


def in_shape(shape: tuple[int, int]) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """What gives an array another shape."""
    return lambda held: held.reshape(shape)


def taken(chosen: NDArray[Any] | slice) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """What takes some rows of an array."""
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
            return axis, rows_of(site, block, axis)
    chosen = wide[-1]
    if preferred in wide:
        chosen = preferred
    elif site.whole_blocks and len(wide) > 1:
        chosen = max(wide[:-1], key=lambda axis: (shape[axis], axis))
    return chosen, rows_of(site, block, chosen)


def rows_of(site: Site, block: Axis, axis: int) -> Axis:
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
    site.later(lambda removal: removal.set_sizes(site.node, 1, labels_of(site)))


def labels_of(site: Site) -> dict[int, Ids]:
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
    site.later(lambda removal: removal.set_sizes(site.node, 1, dict.fromkeys(labels_of(site), 1)))


def _tile(site: Site) -> None:
    repeats = site.constant(1)
    for axis, labels in site.axes().items():
        if repeats is None:
            site.block(labels.ids, "how often it is repeated is unknown")
        else:
            site.label(axis, labels.map(partial(np.tile, reps=int(repeats[axis]))))


RULES = {
    "Expand": Rule(_expand),
    "Flatten": Rule(_flatten),
    "Reshape": Rule(_reshape),
    "Squeeze": Rule(_squeeze),
    "Tile": Rule(_tile),
    "Transpose": Rule(_transpose),
    "Unsqueeze": Rule(_unsqueeze),
}
