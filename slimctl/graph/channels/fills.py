"""Tensors whose size can follow: constants, and what one number or one slice fills."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.channels.coupling import Member, Role
from slimctl.graph.channels.units import Ids
from slimctl.graph.edit import const_array, dimensions

if TYPE_CHECKING:
    from slimctl.graph.channels.site import Site

_DEEPEST = 16
_MOVES = frozenset(
    {
        "Cast",
        "Expand",
        "Flatten",
        "Gather",
        "Identity",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    }
)
"""Operators whose outputs hold nothing but what their first input holds."""


def always_zero(value: ir.Value | None, depth: int = 0) -> bool:
    """Whether a tensor holds nothing but zeros in every run.

    Sees through operators that only move or repeat elements, for a bounded number of steps: an
    exporter computes the initial state of a recurrent layer from the size of the batch.
    """
    if value is None or depth > _DEEPEST:
        return False
    array = const_array(value)
    if array is not None:
        return not np.any(array)
    node = value.producer()
    if node is None or node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type == "ConstantOfShape":
        filled = node.attributes.get("value")
        return filled is None or not np.any(filled.as_tensor().numpy())
    if node.op_type == "Concat":
        return all(always_zero(source, depth + 1) for source in node.inputs)
    return node.op_type in _MOVES and always_zero(node.inputs[0], depth + 1)


def repeats(value: ir.Value, axis: int, ids: Ids) -> ir.Node | None:
    """The Expand or Tile that alone makes an axis as long as it is, for one reader.

    Args:
        value: What is read.
        axis: Not negative.
        ids: Labels that the axis should follow.

    Returns:
        A node at whose second input the length stands; None where there is no such node.
    """
    node = value.producer()
    if node is None or node.op_type not in ("Expand", "Tile") or len(value.uses()) != 1:
        return None
    source = node.inputs[0]
    before = None if source is None else dimensions(source.shape)
    after = dimensions(value.shape)
    if before is None or after is None or value.is_graph_output():
        return None
    place = axis - len(after) + len(before)
    single = place < 0 or before[place] == 1
    return node if single and after[axis] == ids.size else None


def adapted(site: Site, index: int, axis: int, ids: Ids, role: Role) -> NDArray[np.float64] | None:
    """Lets an operand without labels lose what the others lose, if it can.

    A constant is cut, also where an Expand repeats it along another axis (a class token, for each
    image of a batch). What one thing fills is filled less far.

    Args:
        site: The node that reads the operand.
        index: Which of its inputs.
        axis: Of the operand.
        ids: Labels of the others along this axis; not one.
        role: What slices of a constant do.

    Returns:
        What the operand holds at each index once its channel is silent, NaN where that is not one
        number; None where it cannot adapt, and nothing is changed.
    """
    value, shape = site.node.inputs[index], site.shape(index)
    if value is None or shape is None or shape[axis] != ids.size:
        return None
    if site.is_constant(index):
        site.member(index, axis, ids, role)
        return _held(const_array(value), axis, ids, role)
    alone = len(value.uses()) == 1 and not value.is_graph_output()
    return _filled_less(site, value, axis, ids, role) if alone else None


def _filled_less(
    site: Site, value: ir.Value, axis: int, ids: Ids, role: Role
) -> NDArray[np.float64] | None:
    node, shape = value.producer(), dimensions(value.shape)
    if node is None or shape is None:
        return None
    if node.op_type == "ConstantOfShape":
        site.later(lambda removal: removal.set_sizes(node, 0, {axis: ids}))
        filled = node.attributes.get("value")
        number = 0.0 if filled is None else float(filled.as_tensor().numpy().item())
        return np.full(ids.shape, number)
    if repeats(value, axis, ids) is not None:
        site.later(lambda removal: removal.set_sizes(node, 1, {axis: ids}))
        return np.full(ids.shape, np.nan)
    source = const_array(node.inputs[0]) if node.op_type == "Expand" else None
    place = -1 if source is None else axis - len(shape) + source.ndim
    if source is None or place < 0 or source.shape[place] != ids.size:
        return None
    constant = node.inputs[0]
    assert constant is not None, "it has an array"
    site.channels.members.append(Member(constant, place, ids, role, node, 0))
    site.later(lambda removal: removal.set_sizes(node, 1, {axis: 1}))
    return _held(source, place, ids, role)


def _held(constant: NDArray[Any] | None, axis: int, ids: Ids, role: Role) -> NDArray[np.float64]:
    """What a constant with one slice per channel holds once its channel was silenced."""
    if role is Role.PRODUCE:
        return np.zeros(ids.shape)
    if constant is None or constant.size != constant.shape[axis]:
        return np.full(ids.shape, np.nan)
    return constant.reshape(-1).astype(np.float64)
