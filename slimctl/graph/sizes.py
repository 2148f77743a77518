"""What a shape that is computed at run time says: sizes, and sizes of other tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from slimctl.graph.edit import Dimension, const_array, dimensions

Entry: TypeAlias = "int | str | None"
"""A number as it stands there (-1 and 0 included), a symbol, or nothing known."""

_DEEPEST = 64
_SAME = frozenset({"Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape"})


def shape_entries(value: ir.Value | None, depth: int = 0) -> list[Entry] | None:
    """The entries of an int64 vector (or the number in a scalar), as far as the graph tells.

    Follows Shape, Gather, Slice, Concat and what only repacks them, for a bounded number of steps.
    """
    array = const_array(value)
    if array is not None:
        whole = array.dtype.kind in "iu" and array.ndim <= 1
        return [int(entry) for entry in array.reshape(-1)] if whole else None
    node = None if value is None else value.producer()
    if node is None or depth > _DEEPEST or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "Shape":
        return _shape(node)
    if node.op_type == "Concat":
        parts = [shape_entries(source, depth + 1) for source in node.inputs]
        known = [part for part in parts if part is not None]
        return [entry for part in known for entry in part] if len(known) == len(parts) else None
    follow = {**dict.fromkeys(_SAME, _as_it_is), "Gather": _chosen, "Slice": _chosen}
    entries = shape_entries(node.inputs[0], depth + 1) if node.op_type in follow else None
    return None if entries is None else follow[node.op_type](node, entries)


def _as_it_is(node: ir.Node, entries: list[Entry]) -> list[Entry]:
    del node
    return entries


def _shape(node: ir.Node) -> list[Entry] | None:
    source = node.inputs[0]
    sizes = None if source is None else dimensions(source.shape)
    if sizes is None:
        return None
    start, end = (node.attributes.get(name) for name in ("start", "end"))
    first = None if start is None else start.as_int()
    last = None if end is None else end.as_int()
    return list[Entry](sizes)[first:last]


def _chosen(node: ir.Node, entries: list[Entry]) -> list[Entry] | None:
    places = np.arange(len(entries))
    constants = [const_array(value) for value in node.inputs[1:]]
    if any(array is None for array in constants):
        return None
    if node.op_type == "Gather":
        picked = places[np.asarray(constants[0]).reshape(-1)]
    elif node.attributes.get("starts") is not None:
        return None
    else:
        start, end = (int(np.asarray(constants[i]).reshape(-1)[0]) for i in (0, 1))
        step = int(np.asarray(constants[3]).reshape(-1)[0]) if len(constants) > 3 else 1
        picked = places[start:end:step]
    return [entries[int(place)] for place in picked]


def reshaped(
    before: Sequence[Dimension],
    inferred: Sequence[Dimension] | None,
    entries: Sequence[Entry] | None,
) -> list[Dimension] | None:
    """The shape that a Reshape gives, from what inference knows and from its shape input."""
    if entries is None:
        return None if inferred is None else list(inferred)
    stated: list[Dimension] = [
        before[axis] if entry == 0 and axis < len(before) else None if entry == -1 else entry
        for axis, entry in enumerate(entries)
    ]
    if inferred is None or len(inferred) != len(stated):
        return stated
    return [
        known if isinstance(known, int) else said if said is not None else known
        for known, said in zip(inferred, stated, strict=True)
    ]
