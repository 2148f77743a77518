"""Attention as one operator, and the rotation of queries and keys.

Names: B batch, S positions, N heads, d width of a head. Two kinds of units:

- Whole heads (``site.whole_blocks``): a head goes from query, key and value together. What is left
  of a silent head is a mean over values that are zero.
- The width of the heads: index j goes from all heads alike. Query and key lose it together, one
  term of their inner product; the scale, which the operator derives from the width, is then
  written down. Values have a width of their own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from slimctl.graph.channels.coupling import Axis, Family, Role
from slimctl.graph.channels.rule import Rule
from slimctl.graph.channels.site import Site
from slimctl.graph.channels.units import FIXED, Ids

if TYPE_CHECKING:
    from slimctl.graph.channels.removal import Removal

_PARTS = (0, 1, 2)  # query, key, value
_WIDTH = 2  # [B, S, N*d]
_HEADS_4D, _WIDTH_4D = 1, 3  # [B, N, S, d]

_CACHED = "it keeps the keys and values of earlier steps, which the model takes and gives"
_ATTENDED = "it attends over this axis"
_PACKED = "query, key and value come packed, or in another layout"
_UNEVEN = "query, key and value do not all have heads that can be removed"
_ROTATED = "it rotates these channels in pairs"
_UNCOUNTED = "how many heads it has is unknown"
_ONE_WIDTH = "its heads have one width for all; only whole heads can be removed"


class _Attention(NamedTuple):
    """Where an operator has what, and what it calls it.

    Attributes:
        heads: Attribute with the number of query heads.
        kv_heads: Attribute with the number of key and value heads.
        scores: Input that is added to the scores, [B, N, S, T] or less.
        cache: Inputs that hold earlier steps, or belong to that.
        per_head: Input with one number for each head, if there is one.
        bias: Input with what is added to query, key and value, if there is one.
        narrows: Whether heads may become narrower.
    """

    heads: str
    kv_heads: str
    scores: int
    cache: tuple[int, ...]
    per_head: int | None = None
    bias: int | None = None
    narrows: bool = True


_OPERATORS = {
    "Attention": _Attention("q_num_heads", "kv_num_heads", 3, (4, 5)),
    "com.microsoft::MultiHeadAttention": _Attention(
        "num_heads", "num_heads", 5, (6, 7, 8, 9), bias=3
    ),
    "com.microsoft::GroupQueryAttention": _Attention(
        "num_heads", "kv_num_heads", 10, (3, 4, 12, 13), per_head=11, narrows=False
    ),
}


# blocks of channels


def _blocks(labels: Axis, heads: int) -> Axis:
    """[N*d] -> [N, d]"""
    return labels.map(lambda held: held.reshape(heads, -1))


def _columns(site: Site, block: Axis) -> Axis:
    """Ties everything at one index of the second axis: [n, m] -> [m]."""
    ids: Ids = block.ids[0]
    for row in block.ids[1:]:
        ids = site.tie(ids, row)
    same = np.all(block.rest == block.rest[0], axis=0)
    return Axis(ids, np.where(same, block.rest[0], np.nan), block.alive)


def _rows(site: Site, block: Axis) -> Axis:
    """Ties everything at one index of the first axis: [n, m] -> [n]."""
    return _columns(site, block.map(np.transpose))


def _repeated(labels: Axis, count: int) -> Axis:
    """Each index several times in a row."""
    return labels.map(partial(np.repeat, repeats=count))


# query, key and value as inputs


def _attention(site: Site, operator: _Attention) -> None:
    ranks = [site.rank(index) for index in _PARTS]
    if _keeps_state(site, operator.cache):
        site.block_inputs(_CACHED)
    elif ranks == [4, 4, 4]:
        _separate_heads(site, operator)
    elif ranks == [3, 3, 3]:
        _joined_heads(site, operator)
    else:
        site.block_inputs(_PACKED)


def _keeps_state(site: Site, cache: Sequence[int]) -> bool:
    """Whether earlier steps come in, or keys, values or scores go out."""
    return any(map(site.has, cache)) or any(map(site.is_read, range(1, len(site.node.outputs))))


def _block_others(site: Site, free: Collection[tuple[int, int]]) -> None:
    """Blocks the channels of all inputs but on these axes."""
    for index in range(len(site.node.inputs)):
        for axis, labels in site.axes(index).items():
            if (index, axis) not in free:
                site.block(labels.ids, _ATTENDED)


def _head_of_scores(site: Site, index: int) -> tuple[int, int]:
    """The axis of heads in what is added to the scores [B, N, S, T]; negative if there is none."""
    rank = site.rank(index)
    return index, -1 if rank is None else rank - 3


class _Heads(NamedTuple):
    """Labels of heads.

    Attributes:
        query: One for each query head, [N].
        shared: One for each key and value head.
    """

    query: Axis
    shared: Ids


def _separate_heads(site: Site, operator: _Attention) -> None:
    """[B, N, S, d]: heads are an axis of their own."""
    heads = _tied_heads(site, [site.axes(index).get(_HEADS_4D) for index in _PARTS])
    width = _tied_width(site, [site.axes(index).get(_WIDTH_4D) for index in _PARTS])
    free = [(index, axis) for index in _PARTS for axis in (_HEADS_4D, _WIDTH_4D)]
    if heads is not None:
        free.append(_head_of_scores(site, operator.scores))
        _follow_heads(site, operator, heads)
        site.label(_HEADS_4D, heads.query)
    if width is not None:
        site.label(_WIDTH_4D, width)
    _block_others(site, free)


def _joined_heads(site: Site, operator: _Attention) -> None:
    """[B, S, N*d]: heads stand side by side."""
    queries, shared = (int(site.attribute(n, 0)) for n in (operator.heads, operator.kv_heads))
    counts = [queries, shared, shared]
    parts = [site.axes(index).get(_WIDTH) for index in _PARTS]
    both = list(zip(parts, counts, strict=True))
    free = [(index, _WIDTH) for index in _PARTS]
    if not site.whole_blocks and not operator.narrows:
        site.block_inputs(_ONE_WIDTH)
    elif any(part and (count < 1 or part.ids.size % count) for part, count in both):
        site.block_inputs(_UNCOUNTED)
    elif not _add_bias(site, operator, parts):
        site.block_inputs("its bias is computed at run time")
    elif site.whole_blocks:
        rows = [part and _rows(site, _blocks(part, count)) for part, count in both]
        heads = _tied_heads(site, rows)
        if heads is not None and parts[2] is not None:
            free.append(_head_of_scores(site, operator.scores))
            _follow_heads(site, operator, heads)
            site.label(_WIDTH, _repeated(heads.query, parts[2].ids.size // shared))
        _block_others(site, free)
    else:
        columns = [part and _columns(site, _blocks(part, count)) for part, count in both]
        width = _tied_width(site, columns)
        if width is not None:
            site.label(_WIDTH, width.map(partial(np.tile, reps=queries)))
        _block_others(site, free)


def _add_bias(site: Site, operator: _Attention, parts: Sequence[Axis | None]) -> bool:
    """The bias of query, key and value, one behind the other; False where it is no constant."""
    if operator.bias is None or not site.has(operator.bias):
        return True
    sizes = [(site.shape(index) or ())[_WIDTH] for index in _PARTS]
    if not site.is_constant(operator.bias) or not all(isinstance(size, int) for size in sizes):
        return False
    ids = [
        np.full(int(size or 0), FIXED, np.int64) if part is None else part.ids
        for part, size in zip(parts, sizes, strict=True)
    ]
    site.member(operator.bias, 0, np.concatenate(ids), Role.PRODUCE)
    return True


def _tied_heads(site: Site, parts: Sequence[Axis | None]) -> _Heads | None:
    """Several query heads may share one head of keys and values: [n*m], [n], [n]."""
    query, key, value = parts
    if query is None or key is None or value is None:
        for part in parts:
            if part is not None:
                site.block(part.ids, _UNEVEN)
        return None
    if query.ids.size % key.ids.size or key.ids.size != value.ids.size:
        site.block_inputs(_UNCOUNTED)
        return None
    shared = _rows(site, _blocks(query, key.ids.size))
    ids = site.tie(site.tie(shared.ids, key.ids), value.ids)
    held = Axis(ids, value.rest, value.alive).unknown(site.name)
    return _Heads(_repeated(held, query.ids.size // key.ids.size), ids)


def _tied_width(site: Site, parts: Sequence[Axis | None]) -> Axis | None:
    """Query and key lose the same part of their inner product; labels of the values' width."""
    query, key, value = parts
    if query is not None and key is not None and query.ids.size == key.ids.size:
        site.tie(query.ids, key.ids)
        site.consume(key if key.silent else query)
        site.when_fewer(query.ids, partial(_keep_scale, site, query.ids.size))
    else:
        for part in (query, key):
            if part is not None:
                site.block(part.ids, "what it is multiplied with does not change")
    return None if value is None else value.unknown(site.name)


def _keep_scale(site: Site, width: int, removal: Removal) -> None:
    del removal
    if not site.attribute("scale", 0.0):
        site.node.attributes["scale"] = ir.AttrFloat32("scale", 1.0 / math.sqrt(width))


def _follow_heads(site: Site, operator: _Attention, heads: _Heads) -> None:
    """Everything that depends on which heads there are."""
    query = heads.query.ids
    _add_scores(site, operator.scores, query)
    if operator.per_head is not None and site.has(operator.per_head):
        if site.is_constant(operator.per_head):
            site.member(operator.per_head, 0, query, Role.CARRY)
        else:
            site.block(query, "what it has for each head is computed at run time")
    site.when_fewer(query, partial(_set_count, site, operator.heads, query))
    site.when_fewer(query, partial(_set_count, site, operator.kv_heads, heads.shared))


def _set_count(site: Site, name: str, ids: Ids, removal: Removal) -> None:
    if name in site.node.attributes:
        removal.set_int(site.node, name, removal.count(ids))


def _add_scores(site: Site, index: int, heads: Ids) -> None:
    """What is added to the scores is the same for all heads, or loses heads with them."""
    if not site.has(index):
        return
    shape, (_, axis) = site.shape(index), _head_of_scores(site, index)
    labels = site.axes(index).get(axis)
    if shape is None:
        site.block(heads, "what is added to its scores has an unknown shape")
    elif labels is not None and labels.ids.size == heads.size:
        site.tie(heads, labels.ids)
    elif axis < 0 or shape[axis] == 1:
        return
    elif site.is_constant(index) and shape[axis] == heads.size:
        site.member(index, axis, heads, Role.CARRY)
    else:
        site.block(heads, "what is added to its scores has a part for each head")


# query, key and value from weights of its own


def _self_attention(site: Site) -> None:
    """com.microsoft::Attention: X [B, S, I], W [I, 2*N*d + N*v], bias [2*N*d + N*v]."""
    weight, heads = site.constant(1), int(site.attribute("num_heads", 0))
    computed = weight is None or (site.has(2) and not site.is_constant(2))
    if weight is None or computed or heads < 1:
        site.block_inputs("its weights are computed at run time")
        return
    _block_others(site, [(0, _WIDTH), *([_head_of_scores(site, 5)] if site.whole_blocks else [])])
    if _WIDTH in site.axes():
        site.member(1, 0, site.consume(site.axes()[_WIDTH]), Role.CONSUME)
    sizes = site.attribute("qkv_hidden_sizes") or [int(weight.shape[1]) // 3] * 3
    key, value = int(sizes[1]) // heads, int(sizes[2]) // heads
    make = _fresh_heads if site.whole_blocks else _fresh_width
    parts = make(site, heads, key, value)
    ids = np.concatenate([parts.key, parts.key, parts.value])
    site.member(1, 1, ids, Role.PRODUCE)
    if site.has(2):
        site.member(2, 0, ids, Role.PRODUCE)
    if _keeps_state(site, (4, 6)):
        site.block(ids, _CACHED)
    site.label(_WIDTH, site.computed(parts.value))
    site.when_fewer(ids, partial(_set_hidden_sizes, site, parts))


class _Columns(NamedTuple):
    """Units of the columns that compute keys (queries alike), and values."""

    key: Ids
    value: Ids


def _fresh_heads(site: Site, heads: int, key: int, value: int) -> _Columns:
    units = site.channels.units.fresh(heads)
    columns = _Columns(np.repeat(units, key), np.repeat(units, value))
    joined = np.concatenate([columns.key, columns.key, columns.value])
    site.channels.families.append(Family(site.node, joined, True))
    _add_scores(site, 5, units)
    site.when_fewer(units, partial(_set_count, site, "num_heads", units))
    return columns


def _fresh_width(site: Site, heads: int, key: int, value: int) -> _Columns:
    units = site.channels.units
    columns = _Columns(np.tile(units.fresh(key), heads), np.tile(units.fresh(value), heads))
    site.channels.families.append(Family(site.node, np.tile(columns.key, 2), True))
    site.channels.families.append(Family(site.node, columns.value, True))
    if site.attribute("do_rotary", 0):
        site.block(columns.key, _ROTATED)
    site.when_fewer(columns.key, partial(_keep_scale, site, key))
    return columns


def _set_hidden_sizes(site: Site, columns: _Columns, removal: Removal) -> None:
    key, value = removal.count(columns.key), removal.count(columns.value)
    if key != value or "qkv_hidden_sizes" in site.node.attributes:
        removal.set_ints(site.node, "qkv_hidden_sizes", [key, key, value])


# rotation


def _rotary(site: Site, cosine: int) -> None:
    """RotaryEmbedding: X [B, S, N*d] or [B, N, S, d]; pairs of channels of a head are mixed."""
    rank = site.rank()
    site.block_inputs(_ROTATED, range(1, len(site.node.inputs)))
    for axis, labels in site.axes().items():
        if rank == 4 and axis == _HEADS_4D:
            site.label(axis, labels.unknown(site.name))
            site.when_fewer(labels.ids, partial(_set_rotated, site, labels.ids))
        elif rank == 3 and axis == _WIDTH:
            _rotate_joined(site, labels, cosine)
        else:
            site.block(labels.ids, _ROTATED)


def _rotate_joined(site: Site, labels: Axis, cosine: int) -> None:
    heads = int(site.attribute("num_heads", 0))
    table = site.shape(cosine)
    if not heads and table is not None and isinstance(table[-1], int):
        heads = labels.ids.size // (2 * table[-1])
    if not site.whole_blocks or heads < 1 or labels.ids.size % heads:
        site.block(labels.ids, _ROTATED)
        return
    units = _rows(site, _blocks(labels, heads))
    rotated = _repeated(units.unknown(site.name), labels.ids.size // heads)
    site.label(_WIDTH, rotated)
    site.when_fewer(units.ids, partial(_set_rotated, site, units.ids))


def _set_rotated(site: Site, heads: Ids, removal: Removal) -> None:
    if site.attribute("num_heads", 0):
        removal.set_int(site.node, "num_heads", removal.count(heads))


RULES = {
    **{name: Rule(partial(_attention, operator=found)) for name, found in _OPERATORS.items()},
    "RotaryEmbedding": Rule(partial(_rotary, cosine=1)),
    "com.microsoft::Attention": Rule(_self_attention, computes=True),
    "com.microsoft::RotaryEmbedding": Rule(partial(_rotary, cosine=2)),
}
