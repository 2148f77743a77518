"""Layers that compute channels from channels: Conv, ConvTranspose, Gemm, MatMul, Gather."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slimctl.graph.channels.coupling import Axis, Role
from slimctl.graph.channels.rule import Rule
from slimctl.graph.channels.site import Site, normalized
from slimctl.graph.channels.units import FIXED, Ids

if TYPE_CHECKING:
    from slimctl.graph.channels.removal import Removal

_COMPUTED = "the weight is computed at run time"
_CHANNEL = 1


def _tied_across(site: Site, ids: Ids, groups: int) -> Ids:
    """Ties the channels at one place of every group; [groups * n] -> [n]."""
    return site.tie_rows(ids.reshape(groups, -1))


def _conv(site: Site) -> None:
    """Conv: X [N, I, ...], W [O, I/g, ...], B [O]."""
    weight = site.constant(1)
    if weight is None or (site.has(2) and site.constant(2) is None):
        site.block_inputs(_COMPUTED)
        return
    _other_axes(site)
    groups = int(site.attribute("group", 1))
    inputs = site.axes().get(_CHANNEL)
    outputs = int(weight.shape[0])
    if groups > 1 and weight.shape[1] == 1:  # depthwise: a channel's output goes with its input
        if inputs is None:
            return
        ids = np.repeat(inputs.ids, outputs // groups)
        channels = inputs.ids
        site.later(lambda removal: removal.set_int(site.node, "group", removal.count(channels)))
    else:
        if inputs is not None:
            read = _read(site, inputs, groups)
            site.member(
                1, 1, read if groups == 1 else _tied_across(site, read, groups), Role.CONSUME
            )
        ids = np.tile(site.fresh(outputs // groups), groups)
    _weights_of_outputs(site, ids, weight_axis=0)


def _read(site: Site, labels: Axis, groups: int) -> Ids:
    """What a convolution sums over.

    A channel that holds one number everywhere can go into the bias, unless the kernel also sees
    the zeros of the padding.
    """
    padded = site.attribute("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    if padded or any(site.attribute("pads", ())):
        return site.consume(labels)

    def share(held: NDArray[Any]) -> NDArray[Any]:
        weight = site.constant(1)
        assert weight is not None, "the rule looked"
        taps = weight.astype(np.float64).reshape(groups, -1, weight.shape[1], weight[0, 0].size)
        by_group = held.reshape(groups, -1)
        return np.asarray(np.einsum("goik,gi->go", taps, by_group)).reshape(-1)

    return site.consume_constant(labels, share)


def _conv_transpose(site: Site) -> None:
    """ConvTranspose: X [N, I, ...], W [I, O/g, ...], B [O]."""
    weight = site.constant(1)
    if weight is None or (site.has(2) and site.constant(2) is None):
        site.block_inputs(_COMPUTED)
        return
    _other_axes(site)
    groups = int(site.attribute("group", 1))
    inputs = site.axes().get(_CHANNEL)
    per_group = int(weight.shape[1])
    if groups > 1 and weight.shape[0] == groups:  # depthwise
        if inputs is None:
            return
        channels = inputs.ids
        ids = np.repeat(channels, per_group)
        site.member(1, 0, channels, Role.PRODUCE)
        site.later(lambda removal: removal.set_int(site.node, "group", removal.count(channels)))
    else:
        if inputs is not None:
            read = site.consume(inputs)
            if groups > 1:
                read = np.tile(_tied_across(site, read, groups), groups)
            site.member(1, 0, read, Role.CONSUME)
        fresh = site.fresh(per_group)
        site.member(1, 1, fresh, Role.PRODUCE)
        ids = np.tile(fresh, groups)
    if site.has(2):
        site.member(2, 0, ids, Role.PRODUCE)
    site.label(_CHANNEL, site.computed(ids))


def _weights_of_outputs(site: Site, ids: Ids, weight_axis: int) -> None:
    site.member(1, weight_axis, ids, Role.PRODUCE)
    if site.has(2):
        site.member(2, 0, ids, Role.PRODUCE)
    site.label(_CHANNEL, site.computed(ids))


def _other_axes(site: Site) -> None:
    """A kernel slides over the axes that are not channels: nothing may be taken out of them."""
    for axis, labels in site.axes().items():
        if axis == 0:
            site.label(0, site.alive(labels))
        elif axis != _CHANNEL:
            site.block(labels.ids, "a kernel slides over this axis")


def _gemm(site: Site) -> None:
    """Gemm: A [M, K], B [K, N], C broadcast to [M, N]."""
    _product(
        site,
        "transA" in site.node.attributes and bool(site.attribute("transA")),
        bool(site.attribute("transB", 0)),
    )
    if site.has(2):
        _add_c(site, float(site.attribute("beta", 1.0)))


def _add_c(site: Site, beta: float) -> None:
    """C of a Gemm is added to the product as ONNX broadcasts it."""
    product = dict(site.channels.tensors.get(site.node.outputs[0], {}))
    added = site.shape(2)
    if added is None:
        site.block_inputs("the rank of an operand is unknown", [2])
        for labels in product.values():
            site.block(labels.ids, "the rank of an operand is unknown")
        return
    shift = 2 - len(added)
    for axis, labels in product.items():
        place = axis - shift
        mine = site.axes(2).get(place)
        if mine is not None:
            ids, rest = site.tie(labels.ids, mine.ids), labels.rest + beta * mine.rest
        elif place < 0 or added[place] == 1:
            ids, rest = labels.ids, labels.rest + beta * site.one_number(2)
        elif site.is_constant(2) and added[place] == labels.ids.size:
            site.member(2, place, labels.ids, Role.PRODUCE)
            ids, rest = labels.ids, labels.rest
        else:
            ids = site.tie(labels.ids, np.full(labels.ids.size, FIXED, np.int64))
            rest = np.full(ids.shape, np.nan)
        site.label(axis, Axis(ids, rest, labels.alive or site.name))
    for place, labels in site.axes(2).items():
        if place + shift not in product:
            site.block(labels.ids, "what it is added to does not change")


def _matmul(site: Site) -> None:
    """MatMul: A [..., M, K], B [..., K, N]; FusedMatMul may have either of them transposed."""
    _product(site, bool(site.attribute("transA", 0)), bool(site.attribute("transB", 0)))


def _product(site: Site, flip_first: bool, flip_second: bool) -> None:
    first, second = site.rank(0), site.rank(1)
    if not first or not second:
        site.block_inputs("the rank of an operand is unknown")
        return
    k_first = first - 1 if first == 1 or not flip_first else first - 2
    k_second = 0 if second == 1 else second - 1 if flip_second else second - 2
    _contract(site, (0, k_first), (1, k_second))
    rank = max(first, second, 2) - (first == 1) - (second == 1)
    if first > 1:
        m_axis = first - 2 if not flip_first else first - 1
        _outer(site, 0, m_axis, rank - (2 if second > 1 else 1))
    if second > 1:
        n_axis = second - 1 if not flip_second else second - 2
        _outer(site, 1, n_axis, rank - 1)
    _batch(site, (first, second))


def _contract(site: Site, first: tuple[int, int], second: tuple[int, int]) -> None:
    """The summed axis: both sides lose the same indices, and one of them was zero there."""
    sides = [site.axes(index).get(axis) for index, axis in (first, second)]
    if sides[0] is None and sides[1] is None:
        return
    for (index, axis), mine, other in (
        (first, sides[0], sides[1]),
        (second, sides[1], sides[0]),
    ):
        if mine is None and other is not None:
            if site.is_constant(index):
                site.member(index, axis, other.ids, Role.CONSUME)
            else:
                site.block(other.ids, "what it is multiplied with does not change")
    present = [side for side in sides if side is not None]
    labels = present[0]
    if len(present) == 2:
        zero = np.any([side.rest == 0.0 for side in present], axis=0)
        alive = present[0].alive or present[1].alive
        ids = site.tie(present[0].ids, present[1].ids)
        labels = Axis(ids, np.where(zero, 0.0, np.nan), alive)
    weight = site.constant(second[0])
    if len(present) == 1 and weight is not None and weight.ndim == 2:
        axis = second[1]
        site.consume_constant(labels, lambda held: _columns(site, held, axis))
    else:
        site.consume(labels)


def _columns(site: Site, held: NDArray[Any], axis: int) -> NDArray[Any]:
    """What constant inputs add to the outputs of a Gemm or MatMul: [K] -> [N]."""
    weight = site.constant(1)
    assert weight is not None, "the rule looked"
    alpha = float(site.attribute("alpha", 1.0))
    return alpha * np.tensordot(held, weight.astype(np.float64), (0, axis))


def _outer(site: Site, index: int, axis: int, place: int) -> None:
    """An axis that the result takes over from one operand; weights compute new channels on it."""
    labels = site.axes(index).get(axis)
    if labels is not None:
        site.label(place, labels.unknown(site.name))
        return
    weight = site.constant(index)
    if weight is not None and weight.shape[axis] > 1:
        ids = site.fresh(int(weight.shape[axis]))
        site.member(index, axis, ids, Role.PRODUCE)
        site.label(place, site.computed(ids))


def _batch(site: Site, ranks: tuple[int, int]) -> None:
    """Leading axes broadcast; an index that one side loses, the other loses too."""
    if min(ranks) == 1 and max(ranks) > 2:
        long = 0 if ranks[0] > ranks[1] else 1
        for axis, labels in site.axes(long).items():
            if axis < ranks[long] - 2:
                site.label(axis, labels.unknown(site.name))
        return
    for place in range(max(ranks) - 2):
        sides: list[tuple[int, int, Axis | None]] = []
        for index in (0, 1):
            axis = place - max(ranks) + ranks[index]
            sides.append((index, axis, site.axes(index).get(axis) if axis >= 0 else None))
        labeled = [side[2] for side in sides if side[2] is not None]
        if not labeled:
            continue
        ids = labeled[0].ids if len(labeled) == 1 else site.tie(labeled[0].ids, labeled[1].ids)
        for index, axis, mine in sides:
            shape = site.shape(index) or ()
            if mine is not None or axis < 0 or shape[axis] == 1:
                continue
            if site.is_constant(index) and shape[axis] == ids.size:
                site.member(index, axis, ids, Role.CARRY)
            else:
                site.block(ids, "what it is multiplied with does not change")
        tied = Axis(ids, labeled[0].rest, labeled[0].alive)
        silent = any(side.silent for side in labeled)
        site.label(place, site.computed(ids) if silent else site.alive(tied))


def _gather(site: Site) -> None:
    """Gather: constant indices select channels; a table of vectors computes them."""
    rank, picked = site.rank(0), site.shape(1)
    if rank is None or picked is None:
        site.block_inputs("a rank is unknown")
        return
    axis = normalized(int(site.attribute("axis", 0)), rank)
    for place, labels in site.axes(1).items():
        site.label(axis + place, site.alive(labels))
    table = site.constant(0)
    if table is not None and table.dtype.kind == "f" and axis == 0 and table.ndim == 2:
        ids = site.fresh(int(table.shape[1]))
        site.member(0, 1, ids, Role.PRODUCE)
        site.label(len(picked), site.computed(ids))
        return
    for place, labels in site.axes(0).items():
        if place != axis:
            shift = len(picked) - 1 if place > axis else 0
            site.label(place + shift, labels)
            continue
        indices = site.constant(1)
        if indices is None or indices.ndim > 1:
            site.block(labels.ids, "indices into it are computed, or are a table")
            continue
        before = labels.ids
        chosen = np.where(indices < 0, indices + before.size, indices)
        if indices.ndim == 0:
            site.block(before[chosen.reshape(1)], "it is selected by its index")
        else:
            site.select(before[chosen])
            site.label(axis, labels.map(partial(np.take, indices=chosen)))
        site.when_fewer(before, partial(_set_indices, site, before, chosen))


def _set_indices(site: Site, ids: Ids, chosen: NDArray[Any], removal: Removal) -> None:
    removal.set_input(site.node, 1, removal.positions(ids, chosen))


RULES = {
    "Conv": Rule(_conv, computes=True),
    "ConvTranspose": Rule(_conv_transpose, computes=True),
    "Gather": Rule(_gather, computes=True),
    "Gemm": Rule(_gemm, computes=True),
    "MatMul": Rule(_matmul, computes=True),
}
