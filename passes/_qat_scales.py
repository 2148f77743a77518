"""Scales of a Q/DQ graph as training sees them: which are one, and which may change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.target import ABSORBED, Target
from slimctl.graph.edit import const_array, dimensions
from slimctl.passes._layers import is_linear
from slimctl.passes._quantized_layers import code_holder, weight_dequantizer

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"


@dataclass(frozen=True)
class ScaleGroup:
    """Scales of activations that must stay equal.

    Attributes:
        members: Their initializers.
        elements: Of one sample of the first tensor that has this scale.
        highest: Largest distance of a code from the zero point.
        reason: Why they are kept as they are; empty when they are learned.
    """

    members: tuple[ir.Value, ...]
    elements: int
    highest: int
    reason: str = ""


def activation_scales(model: ir.Model, target: Target) -> list[ScaleGroup]:
    """The scales of all quantized activations.

    Scales are one where their tensors are: a Q and its DQs. They also stay equal where they are
    equal and meet at an operator other than a layer: kernels that only move values want one scale
    in and out, and so do some of Concat.

    Args:
        model: The Q/DQ graph.
        target: Says which operators have an output range that is known.
    """
    quantizers = [node for node in model.graph if node.op_type == QUANTIZE]
    groups = _Groups()
    for node in quantizers:
        scale = _scale(node)
        for use in node.outputs[0].uses():
            if use.node.op_type == DEQUANTIZE:
                groups.join(scale, _scale(use.node))
    for node in model.graph:
        if node.op_type not in (QUANTIZE, DEQUANTIZE) and not is_linear(node):
            _join_at(node, groups)
    fixed = dict(_fixed(model, target))
    found = []
    for members in groups.sets():
        first = next((node for node in quantizers if _scale(node) in members), None)
        if first is None:
            continue  # a constant that meets no activation
        reasons = [fixed[member] for member in members if member in fixed]
        found.append(
            ScaleGroup(
                tuple(members), _elements(first), _highest(first), reasons[0] if reasons else ""
            )
        )
    return found


def are_powers_of_two(scales: Iterable[NDArray[Any]]) -> bool:
    """Whether all of them are, as hardware that shifts wants it."""
    return all(bool(np.all(np.frexp(scale)[0] == 0.5)) for scale in scales)


def _scale(node: ir.Node) -> ir.Value:
    value = node.inputs[1]
    assert value is not None, "the checker wants it"
    return value


def _parameters(node: ir.Node) -> bytes:
    """Scale and zero point, to compare."""
    arrays = [const_array(value) for value in node.inputs[1:]]
    return b"|".join(b"" if array is None else array.tobytes() for array in arrays)


def _join_at(node: ir.Node, groups: _Groups) -> None:
    pairs = [pair for value in node.inputs for pair in _read_as(value)]
    pairs += [pair for value in node.outputs for pair in _written_as(value)]
    for pair in pairs[1:]:
        for other in pairs:
            if _parameters(pair) == _parameters(other):
                groups.join(_scale(pair), _scale(other))


def _read_as(value: ir.Value | None) -> Iterator[ir.Node]:
    """The DQ that a value comes from, Relu and Clip in between."""
    node = None if value is None else value.producer()
    if node is not None and node.op_type == DEQUANTIZE:
        yield node
    elif node is not None and node.op_type in ABSORBED:
        yield from _read_as(node.inputs[0])


def _written_as(value: ir.Value) -> Iterator[ir.Node]:
    """The Qs that a value goes to, Relu and Clip in between."""
    for use in value.uses():
        if use.node.op_type == QUANTIZE and use.idx == 0:
            yield use.node
        elif use.node.op_type in ABSORBED:
            yield from _written_as(use.node.outputs[0])


def _fixed(model: ir.Model, target: Target) -> Iterator[tuple[ir.Value, str]]:
    weights = {weight_dequantizer(node) for node in model.graph}
    for node in model.graph:
        if node.op_type == QUANTIZE:
            maker = None if node.inputs[0] is None else node.inputs[0].producer()
            while maker is not None and maker.op_type in ABSORBED and maker.inputs[0] is not None:
                maker = maker.inputs[0].producer()
            name = "" if maker is None else maker.op_type
            if name in target.fixed_ranges or (name and target.asks("output_scale", name)):
                yield _scale(node), f"the range of {name} is known"
            elif const_array(_scale(node)) is None:
                yield _scale(node), "it is computed at run time"
        elif node.op_type == DEQUANTIZE and node not in weights and code_holder(node) is not None:
            yield _scale(node), "a constant has it, too"


def _elements(node: ir.Node) -> int:
    """Of one sample; sizes that are open count as one."""
    shape = None if node.inputs[0] is None else dimensions(node.inputs[0].shape)
    return int(np.prod([size for size in (shape or ())[1:] if isinstance(size, int)], dtype=int))


def _highest(node: ir.Node) -> int:
    zero = const_array(node.inputs[2]) if len(node.inputs) > 2 else None
    limits = np.iinfo(np.uint8 if zero is None else zero.dtype)
    middle = 0 if zero is None else int(zero.reshape(-1)[0])
    return max(int(limits.max) - middle, middle - int(limits.min))


class _Groups:
    """Sets that grow together."""

    def __init__(self) -> None:
        self._of: dict[ir.Value, dict[ir.Value, None]] = {}

    def join(self, one: ir.Value, other: ir.Value) -> None:
        """Both are in one set from now on."""
        first = self._of.setdefault(one, {one: None})
        second = self._of.setdefault(other, {other: None})
        if first is not second:
            first.update(second)
            for member in second:
                self._of[member] = first

    def sets(self) -> list[list[ir.Value]]:
        """All sets, in the order in which they began."""
        unique = {id(group): group for group in self._of.values()}
        return [list(group) for group in unique.values()]
