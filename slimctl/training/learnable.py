"""What of a graph can be learned: which of its constants are weights, and where they are read.

A constant is learned if it reaches a place in :data:`SLOTS` as it is, or through operators that
only move or convert values. Everything else (sizes, grids, bounds, sigmas) is part of the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from slimctl.core.contract import Skipped
from slimctl.graph.edit import NameScope, add_initializer, all_nodes, const_array, const_tensor
from slimctl.graph.select import Selection

SLOTS: dict[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "GRU": (1, 2, 3),
    "Gather": (0,),
    "Gemm": (1, 2),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LSTM": (1, 2, 3, 7),
    "LayerNormalization": (1, 2),
    "MatMul": (0, 1),
    "PRelu": (1,),
    "RMSNormalization": (1,),
    "RNN": (1, 2, 3),
}
"""Inputs that hold weights, by operator."""

_FACTORS_AND_SHIFTS = ("Add", "Mul", "Sub")
"""Their constants are weights where they hold one number per channel, or one for each channel of
each place."""

_MOVING = (
    *("Cast", "DequantizeLinear", "Expand", "Flatten", "Identity", "QuantizeLinear", "Reshape"),
    *("Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"),
)

STATISTICS: dict[str, tuple[int, ...]] = {"BatchNormalization": (3, 4)}
"""Inputs that hold what training measures, and does not learn."""


class Weight(NamedTuple):
    """A constant that can be learned.

    Attributes:
        value: The initializer, or the output of a Constant node.
        readers: The nodes that compute with it, those that may not learn included.
        matrix: A reader multiplies by it: zeros in it are connections that were pruned.
        decays: Weight decay is for it: matrices and tables of words, not biases and scales.
    """

    value: ir.Value
    readers: tuple[ir.Node, ...]
    matrix: bool
    decays: bool


def find_weights(model: ir.Model, selection: Selection) -> tuple[list[Weight], list[Skipped]]:
    """Constants of floats that can be learned, in the order of the graph.

    Args:
        model: The graph.
        selection: Which nodes may learn. A constant that several nodes read is learned if one may.

    Returns:
        The weights, and nodes with weights that keep them, with the reason.
    """
    found, skipped = [], {}
    for value in constants(model.graph):
        if not _holds_floats(value):
            continue
        places = [place for place in _places(value) if _is_slot(value, *place)]
        allowed = []
        for node, index in places:
            reason = selection.reason_against(node)
            if reason:
                skipped[node.name or node.op_type] = reason
            else:
                allowed.append((node, index))
        if allowed:
            readers = tuple(dict.fromkeys(node for node, _ in places))
            matrix = any(_multiplies(*place) for place in places)
            words = any(node.op_type == "Gather" for node in readers)
            found.append(Weight(value, readers, matrix, matrix or words))
    learned = {node.name or node.op_type for weight in found for node in weight.readers}
    left = [Skipped(name, reason) for name, reason in skipped.items() if name not in learned]
    return found, left


def find_measuring(model: ir.Model, selection: Selection) -> list[ir.Node]:
    """Nodes that measure statistics in training: those that may learn, and whose are constants.

    Others normalize by the statistics that they have, as they do at inference.
    """
    return [
        node
        for node in model.graph
        if node.op_type in STATISTICS
        and node.domain in ("", "ai.onnx")
        and selection.reason_against(node) is None
        and all(const_tensor(value) is not None for value in statistics_of([node]))
    ]


def statistics_of(nodes: Iterable[ir.Node]) -> list[ir.Value]:
    """Inputs that hold statistics."""
    values = [node.inputs[index] for node in nodes for index in STATISTICS[node.op_type]]
    return [value for value in values if value is not None]


def separate_statistics(model: ir.Model) -> int:
    """Gives every normalization statistics of its own.

    Exporters store equal constants once, or hand them on through Identity, so that in a network
    that was never trained a mean of zeros is also a bias.

    Args:
        model: Changed where statistics are shared.

    Returns:
        How many copies were made.
    """
    names = NameScope(model)
    copies = 0
    for node in all_nodes(model):
        for index in STATISTICS.get(node.op_type, ()):
            value = node.inputs[index]
            tensor = const_tensor(_source(value))
            if value is None or tensor is None or _is_own(value):
                continue
            own = add_initializer(model.graph, names.fresh(value.name or ""), tensor.numpy())
            node.replace_input_with(index, own)
            copies += 1
    return copies


def _source(value: ir.Value | None) -> ir.Value | None:
    """The value behind Identity nodes."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type != "Identity":
            break
        value = node.inputs[0]
    return value


def _is_own(value: ir.Value) -> bool:
    return const_tensor(value) is not None and len(value.uses()) == 1


def constants(graph: ir.Graph) -> Iterator[ir.Value]:
    """Initializers and what Constant nodes hold, each once."""
    yield from graph.initializers.values()
    for node in graph:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            yield node.outputs[0]


def _holds_floats(value: ir.Value) -> bool:
    tensor = const_tensor(value)
    return tensor is not None and tensor.dtype.is_floating_point() and tensor.size > 0


def _places(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """Where a value is read, itself or after having been moved."""
    for node, index in value.uses():
        if _moves(node, index):
            for output in node.outputs:
                yield from _places(output)
        else:
            yield node, index


def _moves(node: ir.Node, index: int) -> bool:
    """Whether an input goes on as it is. Parts are put together where all of them are constants."""
    if node.op_type == "Concat":
        return all(map(_is_fixed, node.inputs))
    return node.op_type in _MOVING and index == 0


def _is_fixed(value: ir.Value | None) -> bool:
    """Whether it is a constant, or one that was moved."""
    while value is not None and const_tensor(value) is None:
        node = value.producer()
        if node is None or not node.inputs:
            return False
        if node.op_type == "Concat":
            return all(map(_is_fixed, node.inputs))
        if node.op_type not in _MOVING:
            return False
        value = node.inputs[0]
    return value is not None


def _is_slot(value: ir.Value, node: ir.Node, index: int) -> bool:
    if node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type in _FACTORS_AND_SHIFTS:
        tensor = const_tensor(value)
        axes = 0 if tensor is None else sum(size > 1 for size in tensor.shape.numpy())
        return axes == 1 or (node.op_type == "Add" and axes > 1 and _is_table(value))
    return index in SLOTS.get(node.op_type, ())


def _is_table(value: ir.Value) -> bool:
    """Whether there are more different numbers than a grid or a mask has, such as for places.

    A grid is made from one coordinate for each place along each axis.
    """
    array = const_array(value)
    return array is not None and np.unique(array).size > sum(array.shape)


def _multiplies(node: ir.Node, index: int) -> bool:
    """Whether the input is a matrix or a kernel; the first after the data is, if there is one."""
    if node.op_type in ("Conv", "ConvTranspose", "Gemm"):
        return index == 1
    return node.op_type == "MatMul" or (node.op_type in ("GRU", "LSTM", "RNN") and index < 3)
