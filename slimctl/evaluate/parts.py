"""Outputs that are put together of parts, each of which counts by itself.

Detectors put boxes and probabilities side by side into one output, in which boxes are so large that
no error of a probability shows. What decides over a model looks at the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import onnx_ir as ir

from slimctl.core.contract import Feeds
from slimctl.graph.edit import clone_model, dimensions
from slimctl.graph.shapes import infer_shapes


class OutputPart(NamedTuple):
    """A part of an output.

    Attributes:
        name: Such as ``boxes[:, :, 0:4]``.
        place: Where it stands.
    """

    name: str
    place: tuple[slice, ...]


OutputParts: TypeAlias = Mapping[str, Sequence[OutputPart]]
"""By output; those of one part are not among them."""


class _Piece(NamedTuple):
    """So many entries along an axis, and the operator that gave them their meaning."""

    size: int
    kind: str


def output_parts(model: ir.Model) -> dict[str, tuple[OutputPart, ...]]:
    """Outputs that end in a Concat, behind operators that only move.

    Where several axes are made of pieces (boxes and scores, and anchors of several sizes), one of
    different kinds goes first, and then the last one, which is where most networks have what
    belongs to one position.
    """
    if not any(node.op_type == "Concat" for node in model.graph):
        return {}
    inferred = clone_model(model)
    infer_shapes(inferred)
    found = {}
    for output in inferred.graph.outputs:
        axes = range(1, len(output.shape or ()))
        split = {axis: pieces for axis in axes if len(pieces := _pieces(output, axis)) > 1}
        if split:
            axis = max(split, key=lambda axis: (len({p.kind for p in split[axis]}), axis))
            found[output.name or ""] = tuple(_parts(output.name or "", axis, split[axis]))
    return found


def in_parts(parts: OutputParts, outputs: Feeds) -> Feeds:
    """Outputs with those of several parts taken apart."""
    seen: Feeds = {}
    for name, array in outputs.items():
        if name in parts:
            seen |= {part.name: array[part.place] for part in parts[name]}
        else:
            seen[name] = array
    return seen


def _parts(name: str, axis: int, pieces: Sequence[_Piece]) -> list[OutputPart]:
    found, start = [], 0
    for piece in pieces:
        end = start + piece.size
        label = ", ".join([":"] * axis + [f"{start}:{end}"])
        found.append(OutputPart(f"{name}[{label}]", (slice(None),) * axis + (slice(start, end),)))
        start = end
    return found


def _pieces(value: ir.Value, axis: int) -> list[_Piece]:
    """What stands side by side along an axis; nothing where sizes are not known."""
    shape, node = dimensions(value.shape), value.producer()
    size = shape[axis] if shape is not None and axis < len(shape) else None
    if not isinstance(size, int):
        return []
    found: list[_Piece] = []
    if node is not None and not node.domain:
        if node.op_type == "Concat":
            found = _joined(node, axis)
        elif (source := _source(node, value, axis)) is not None:
            found = _pieces(*source)
    kind = node.op_type if node is not None and node.op_type in ("Sigmoid", "Softmax") else ""
    return found or [_Piece(size, kind)]


def _joined(node: ir.Node, axis: int) -> list[_Piece]:
    """Pieces of a Concat: one after the other along its axis, else those that all inputs have."""
    inputs = [value for value in node.inputs if value is not None]
    found = [_pieces(value, axis) for value in inputs]
    joined = node.attributes.get_int("axis", 0)
    if joined % len(inputs[0].shape or (0,)) == axis:
        return [piece for pieces in found for piece in pieces] if all(found) else []
    return found[0] if all(pieces == found[0] for pieces in found) else []


def _source(node: ir.Node, value: ir.Value, axis: int) -> tuple[ir.Value, int] | None:
    """The tensor and the axis that an operator only moved; None for other operators."""
    source = node.inputs[0] if node.inputs else None
    if source is None:
        return None
    if node.op_type == "Transpose":
        perm = node.attributes.get("perm")
        order = range(len(value.shape or ()))[::-1] if perm is None else perm.as_ints()
        return source, order[axis]
    if node.op_type in ("Reshape", "Flatten") and _keeps(source, value, axis):
        return source, axis
    return None


def _keeps(source: ir.Value, value: ir.Value, axis: int) -> bool:
    """Whether the entries along an axis are the same ones before and after a Reshape."""
    before, after = dimensions(source.shape), dimensions(value.shape)
    return before is not None and after is not None and before[: axis + 1] == after[: axis + 1]
