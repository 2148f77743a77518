"""Nodes that compute in float32 because of the values that they see on the data."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Final

import onnx_ir as ir

from slimctl.core.contract import Context, RangeRequest
from slimctl.graph.bodies import observable_graphs
from slimctl.graph.edit import const_array, dimensions
from slimctl.passes._float_constants import Clamps, limits_of
from slimctl.passes._float_network import Network
from slimctl.passes._float_reasons import INTEGERS, may_overflow
from slimctl.passes._float_rules import REDUCTIONS, SQUARES

RESERVE: Final = 4.0
"""Other data may hold values so many times larger than the samples do."""
_FAINT: Final = 2.0**-12
"""Where nothing is larger, most values are subnormal in float16."""
_EXACT_INTEGERS: Final = 2048.0

Magnitudes = Mapping[ir.Value, float]


def magnitudes(network: Network, model: ir.Model, context: Context) -> dict[ir.Value, float]:
    """Largest magnitude of each float32 value on the data; values inside loops have none."""
    values = {
        value.name: value
        for place in observable_graphs(model)
        for value in _values(place.graph)
        if value in network.producers and value.name
    }
    request = RangeRequest(tuple(sorted(values)), "minmax")
    ranges = context.ranges(model, request) if values else {}
    return {values[name]: max(-low, high) for name, (low, high) in ranges.items()}


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def force_ranges(network: Network, known: Magnitudes, clamps: Clamps) -> frozenset[ir.Node]:
    """Float32 for values that float16 cannot hold, and for sums that would overflow.

    Returns:
        Nodes of which the data say that they do not overflow.
    """
    for value, highest in known.items():
        reason = "" if value in clamps.masked else _against(network, value, highest)
        if reason:
            network.producers[value].force(reason)
            for read in network.reads.get(value, ()):
                read.site.force(reason)
    return frozenset(
        node
        for _, node in network.node_sites()
        if may_overflow(node)
        and _is_known(network, known.keys() | clamps.masked, node)
        and _fits(node, known, clamps)
    )


def _limit() -> float:
    return limits_of(ir.DataType.FLOAT16).largest / RESERVE


def _against(network: Network, value: ir.Value, highest: float) -> str:
    if highest > _limit():
        return f"'{value.name}' reaches {highest:.3g} on the data, too close to the end of float16"
    if 0.0 < highest < _FAINT:
        return f"'{value.name}' stays below {highest:.1g} on the data: too small for float16"
    node = value.producer()
    if highest > _EXACT_INTEGERS and node is not None and _reads_integers(network, node):
        return f"'{value.name}' holds integers up to {highest:.0f}, float16 up to 2048"
    return ""


def _reads_integers(network: Network, node: ir.Node) -> bool:
    source = node.inputs[0] if node.op_type == "Cast" else None
    return source is not None and source.dtype in INTEGERS


def _is_known(network: Network, known: Collection[ir.Value], node: ir.Node) -> bool:
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    return all(value in known for value in values if value in network.producers)


def _fits(node: ir.Node, known: Magnitudes, clamps: Clamps) -> bool:
    """Whether no sum inside the node comes close to the end of float16."""
    source = node.inputs[0]
    if source is None or source in clamps.masked:
        return node.op_type in ("Softmax", "LogSoftmax")
    highest = known.get(source, math.inf)
    if node.op_type in ("Softmax", "LogSoftmax"):
        return True  # at most 1 for each of some thousand terms
    if node.op_type in SQUARES:
        return highest**2 * _terms(node) <= _limit()
    if node.op_type in REDUCTIONS:
        return highest * _terms(node) <= _limit()
    return True  # what it writes was looked at


def _terms(node: ir.Node) -> float:
    """How many terms each sum has; infinity where that is not known."""
    shape = dimensions(node.inputs[0].shape) if node.inputs[0] is not None else None
    if shape is None:
        return math.inf
    axes = _axes(node, len(shape))
    if axes is None:
        return math.inf
    sizes = [shape[axis] for axis in axes]
    return math.prod(size if isinstance(size, int) else math.inf for size in sizes)


def _axes(node: ir.Node, rank: int) -> list[int] | None:
    if not node.op_type.startswith("Reduce"):
        return list(range(1 if "Normalization" in node.op_type else 2, rank))
    attribute = node.attributes.get("axes")
    if attribute is not None:
        return [int(axis) for axis in attribute.as_ints()]
    if len(node.inputs) < 2 or node.inputs[1] is None:
        return list(range(rank))
    stored = const_array(node.inputs[1])
    return (
        None
        if stored is None
        else [int(axis) for axis in stored.reshape(-1)] or (list(range(rank)))
    )
