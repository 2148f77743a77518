"""What of a graph can be learned: which of its constants are weights, and where they are read.

A constant is learned if it reaches a place in :data:`SLOTS` as it is, or through operators that
only move or convert values. Everything else (sizes, grids, bounds, sigmas) is part of the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import onnx_ir as ir

from slimctl.core.contract import Skipped
from slimctl.graph.edit import NameScope, add_initializer, const_tensor
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
"""Their constants are weights where they hold one number per channel."""

_MOVING = (
    *("Cast", "DequantizeLinear", "Expand", "Flatten", "Identity", "QuantizeLinear", "Reshape"),
    *("Squeeze", "Transpose", "Unsqueeze"),
)

STATISTICS: dict[str, tuple[int, ...]] = {"BatchNormalization": (3, 4)}
"""Inputs that hold what training measures, and does not learn."""


class Weight(NamedTuple):
    """A constant that can be learned.

    Attributes:
        value: The initializer, or the output of a Constant node.
        readers: The nodes that compute with it.
        matrix: A reader multiplies by it: zeros in it are connections that were pruned.
    """

    value: ir.Value
    readers: tuple[ir.Node, ...]
    matrix: bool


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
            readers = tuple(dict.fromkeys(node for node, _ in allowed))
            found.append(Weight(value, readers, any(_multiplies(*place) for place in allowed)))
    learned = {node.name or node.op_type for weight in found for node in weight.readers}
    left = [Skipped(name, reason) for name, reason in skipped.items() if name not in learned]
    return found, left


def find_statistics(model: ir.Model) -> list[ir.Value]:
    """Constants that training measures."""
    found = []
    for node in model.graph:
        for index in STATISTICS.get(node.op_type, ()):
            value = node.inputs[index]
            if value is not None and const_tensor(value) is not None:
                found.append(value)
    return list(dict.fromkeys(found))


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
    for node in model.graph:
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
        if node.op_type in _MOVING and index == 0:
            yield from _places(node.outputs[0])
        else:
            yield node, index


def _is_slot(value: ir.Value, node: ir.Node, index: int) -> bool:
    if node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type in _FACTORS_AND_SHIFTS:
        tensor = const_tensor(value)
        return tensor is not None and sum(size > 1 for size in tensor.shape.numpy()) == 1
    return index in SLOTS.get(node.op_type, ())


def _multiplies(node: ir.Node, index: int) -> bool:
    """Whether the input is a matrix or a kernel; the first after the data is, if there is one."""
    if node.op_type in ("Conv", "ConvTranspose", "Gemm"):
        return index == 1
    return node.op_type == "MatMul" or (node.op_type in ("GRU", "LSTM", "RNN") and index < 3)
