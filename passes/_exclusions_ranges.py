"""Concats that mix ranges: one scale for boxes in pixels and scores up to 1 would erase the scores.

Judged by calibrated ranges, and by what reads the result. A layer sees a part through its weights:
with a part that spans ``r_i`` and rounding in steps of ``r / levels``, where ``r`` is the span of
the whole, its output keeps

    sum_i r_i^2 |W_i|^2  /  (sum_i |W_i|^2 (r / levels)^2)

of signal to noise (both evenly distributed, their factor 1/12 cancels). Weights of one size give
the best that 8 bits have, 48 dB, whatever the ranges; weights that make up for the ranges lose what
the smaller part lost. Everything that is no layer may look at the parts by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Range
from slimctl.core.target import Target
from slimctl.graph.edit import const_array
from slimctl.passes._layers import Layer, is_linear
from slimctl.passes._placement import Placement

_LEAST_LEVELS: Final = 16
"""A part that keeps fewer of the levels has less than 4 bits: ranges 16 times apart at 8 bits."""

_LEAST_DB: Final = 30.0
"""Of signal to noise behind a layer, 18 dB or 3 bits below what parts of one range keep. Ranges 16
times apart and weights that make up for it: 27 dB are predicted; 22 dB were measured, not 36."""


@dataclass(frozen=True)
class Part:
    """An input of a Concat.

    Attributes:
        span: Of its range, zero included.
        size: Along the axis of the Concat; None when it is not known.
    """

    span: float
    size: int | None


@dataclass
class _Readers:
    """What is behind a Concat.

    Attributes:
        layers: Nodes that multiply, and the axis of their input on which the parts lie; None when
            it is not known.
        moved: Nodes between that move values.
        others: Whether anything else reads the values, or they leave the graph.
    """

    layers: list[tuple[ir.Node, int | None]] = field(default_factory=list)
    moved: list[ir.Node] = field(default_factory=list)
    others: bool = False


def mixed_tensors(placements: Iterable[Placement], target: Target) -> list[ir.Value]:
    """Tensors whose ranges are needed to judge the Concats, constants included."""
    tensors = [
        _origin(value, placement, target)
        for placement in placements
        for node in _concats(placement)
        for value in node.inputs
        if value is not None
    ]
    return [value for value in tensors if not _is_empty(value)]


def _is_empty(value: ir.Value) -> bool:
    array = const_array(value)
    return array is not None and array.size == 0


def _origin(value: ir.Value, placement: Placement, target: Target) -> ir.Value:
    """Where a value has its range from: it may have been moved since."""
    node = value.producer()
    while node is not None and node in placement.integer and node.op_type in target.data_movement:
        source = node.inputs[0]
        if source is None:
            break
        value, node = source, source.producer()
    return value


def by_range(
    placement: Placement, ranges: Mapping[str, Range], target: Target, levels: int
) -> dict[ir.Node, str]:
    """Nodes that stay in float since a Concat would mix ranges.

    Args:
        placement: What would be quantized.
        ranges: By tensor name; a Concat with an input that has none is not judged.
        target: Which operators move values.
        levels: Of the integer type of activations.
    """
    found: dict[ir.Node, str] = {}
    layers = {layer.node: layer for layer in placement.layers}
    for node in _concats(placement):
        parts = _parts(node, placement, target, ranges)
        spans = [part.span for part in parts or () if part.span > 0]
        if parts is None or not spans or max(spans) * _LEAST_LEVELS <= min(spans) * levels:
            continue
        apart = (
            f"differ in range by {max(spans) / min(spans):.0f}x: one scale would erase the smaller"
        )
        readers = _readers(placement, target, node)
        if readers.others:
            kept = (node, *readers.moved)
            found |= {n: f"its inputs {apart}" for n in kept if n in placement.integer}
        for reader, axis in readers.layers:
            layer = layers.get(reader)
            if layer is None or kept_db(layer, axis, parts, levels) < _LEAST_DB:
                found[reader] = f"it reads a Concat whose inputs {apart}"
    return found


def _concats(placement: Placement) -> Iterator[ir.Node]:
    """Concats whose result would be quantized."""
    concats = (n for n in placement.graph if n.op_type == "Concat" and not n.domain)
    return (node for node in concats if node.outputs[0] in placement.tensors)


def _parts(
    node: ir.Node, placement: Placement, target: Target, ranges: Mapping[str, Range]
) -> list[Part] | None:
    axis, parts = _axis(node), []
    for value in node.inputs:
        if value is None:
            continue
        found = ranges.get(_origin(value, placement, target).name or "")
        if found is None:
            return None
        span = max(found.high, 0.0) - min(found.low, 0.0)
        parts.append(Part(span, _size(value, axis)))
    return parts


def _axis(node: ir.Node) -> int:
    attribute = node.attributes.get("axis")
    axis = 1 if attribute is None else attribute.as_int()
    shape = node.outputs[0].shape
    return axis + len(shape) if axis < 0 and shape is not None else axis


def _size(value: ir.Value, axis: int) -> int | None:
    if value.shape is None or not 0 <= axis < len(value.shape):
        return None
    size = value.shape[axis]
    return size if isinstance(size, int) else None


def _readers(placement: Placement, target: Target, concat: ir.Node) -> _Readers:
    found = _Readers()
    pending: list[tuple[ir.Value, int | None]] = [(concat.outputs[0], _axis(concat))]
    while pending:
        value, axis = pending.pop()
        found.others |= value.is_graph_output()
        for user in value.consumers():
            if user not in placement.integer:
                found.others = True
            elif is_linear(user):
                found.layers.append((user, axis))
            elif user.op_type in target.data_movement:
                found.moved.append(user)
                pending.extend((output, _moved_axis(user, axis)) for output in user.outputs)
            else:
                found.others = True
    return found


def _moved_axis(node: ir.Node, axis: int | None) -> int | None:
    """Where the parts lie behind an operator that moves values."""
    if node.op_type in ("Identity", "MaxPool", "Resize"):
        return axis
    if node.op_type == "Transpose" and axis is not None and "perm" in node.attributes:
        order = list(node.attributes["perm"].as_ints())
        return order.index(axis)
    return None


def kept_db(layer: Layer, axis: int | None, parts: Sequence[Part], levels: int) -> float:
    """Signal to noise in dB behind a layer, as far as rounding of its input decides it."""
    sizes = [part.size for part in parts]
    strengths = _strengths(layer)
    if (
        axis != _channels_axis(layer)
        or None in sizes
        or sum(s or 0 for s in sizes) != strengths.size
    ):
        # Parts meet different weights, or none of their own: the smallest stands for itself.
        spans = [part.span for part in parts if part.span > 0]
        return 20.0 * math.log10(min(spans) * levels / max(spans))
    ends = np.cumsum([size or 0 for size in sizes])[:-1]
    weights = np.array([part.sum() for part in np.split(strengths, ends)])  # |W_i|^2, [parts]
    spans_squared = np.array([part.span for part in parts]) ** 2
    noise = float(weights.sum()) * float(spans_squared.max()) / levels**2
    signal = float((spans_squared * weights).sum())
    return 10.0 * math.log10(signal / noise) if noise > 0 and signal > 0 else math.inf


def _channels_axis(layer: Layer) -> int | None:
    """The axis of the input that the weights run over."""
    if layer.node.op_type == "MatMul":
        shape = layer.data.shape
        return None if shape is None else len(shape) - 1
    transposed = layer.node.attributes.get("transA")
    return 0 if transposed is not None and transposed.as_int() else 1


def _strengths(layer: Layer) -> NDArray[np.float64]:
    """Sum of squares of the weights that each input channel meets, [input channels]."""
    squares = np.square(_weight(layer).astype(np.float64))
    if layer.node.op_type == "Conv":
        # [O, I/g, ...] -> [g, O/g, I/g, k] -> [g, I/g] -> [I]
        shape = (layer.groups, squares.shape[0] // layer.groups, squares.shape[1], -1)
        return np.asarray(squares.reshape(shape).sum(axis=(1, 3))).reshape(-1)
    transposed = layer.node.attributes.get("transB")
    axis = squares.ndim - 2
    if layer.node.op_type == "Gemm" and transposed is not None and transposed.as_int():
        axis = 1
    others = tuple(index for index in range(squares.ndim) if index != axis)
    return np.asarray(squares.sum(axis=others))


def _weight(layer: Layer) -> NDArray[Any]:
    array = const_array(layer.weight_value)
    assert array is not None, "checked when the layer was recognized"
    return array
