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
_EXACT = (ir.DataType.DOUBLE, ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64)
"""Types that hold a size as it is."""
_SAME = frozenset({"Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape"})


def shape_entries(value: ir.Value | None, depth: int = 0) -> list[Entry] | None:
    """The entries of an int64 vector (or the number in a scalar), as far as the graph tells.

    Follows Shape, Gather, Slice, Concat and what only repacks them, for a bounded number of steps.
    Of what is computed from sizes, only how many entries it has is known.
    """
    found = _followed(value, depth)
    return _unknown(value) if found is None else found


def _unknown(value: ir.Value | None) -> list[Entry] | None:
    shape = None if value is None else dimensions(value.shape)
    if shape is None or len(shape) > 1:
        return None
    length = shape[0] if shape else 1
    return [None] * length if isinstance(length, int) else None


def _followed(value: ir.Value | None, depth: int) -> list[Entry] | None:
    array = const_array(value)
    if array is not None:
        whole = array.dtype.kind in "iu" and array.ndim <= 1
        return [int(entry) for entry in array.reshape(-1)] if whole else None
    if value is None or depth > _DEEPEST or not _is_vector(value):
        return None
    node = value.producer()
    if node is None or node.domain not in ("", "ai.onnx"):
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


def _is_vector(value: ir.Value) -> bool:
    """Of a table, rows and columns would have to be told apart."""
    shape = dimensions(value.shape)
    return shape is not None and len(shape) <= 1 and value.dtype in _EXACT


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
    constants = [const_array(value) for value in node.inputs[1:]]
    given = [value is not None for value in node.inputs[1:]]
    if any(there and array is None for there, array in zip(given, constants, strict=True)):
        return None
    if node.op_type == "Gather":
        picked = np.asarray(constants[0]).reshape(-1)
        inside = all(-len(entries) <= place < len(entries) for place in picked)
        return [entries[int(place)] for place in picked] if inside else None
    starts = node.attributes.get("starts")
    if starts is not None:  # before opset 10
        return entries[starts.as_ints()[0] : node.attributes["ends"].as_ints()[0]]
    numbers = [None if array is None else int(array.reshape(-1)[0]) for array in constants]
    return entries[numbers[0] : numbers[1] : (numbers[3] or None) if len(numbers) > 3 else None]


def reshaped(
    before: Sequence[Dimension],
    inferred: Sequence[Dimension] | None,
    entries: Sequence[Entry] | None,
    *,
    allow_zero: bool = False,
) -> list[Dimension] | None:
    """The shape that a Reshape gives, from what inference knows and from its shape input.

    Args:
        before: Of the tensor.
        inferred: What inference found out.
        entries: See :func:`shape_entries`.
        allow_zero: An entry of 0 is a size, and not that of the same axis before.
    """
    if entries is None:
        return None if inferred is None else list(inferred)
    stated: list[Dimension] = [
        before[axis]
        if entry == 0 and axis < len(before) and not allow_zero
        else None
        if entry == -1
        else entry
        for axis, entry in enumerate(entries)
    ]
    if inferred is None or len(inferred) != len(stated):
        return stated
    return [
        known if isinstance(known, int) else said if said is not None else known
        for known, said in zip(inferred, stated, strict=True)
    ]
