"""Whole residual blocks: ``x + f(x)`` becomes ``x``.

A block is a sum of which one operand is computed from the other by layers that serve nothing else:
the body of a residual network, attention and feed-forward of a transformer, each for itself. Taking
it out is exactly what zeros in the last layer of ``f`` amount to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from slimctl.core.contract import Skipped
from slimctl.graph.edit import (
    Dimension,
    NameScope,
    attribute_graphs,
    const_array,
    dimensions,
    remove_dead,
    set_provenance,
)
from slimctl.graph.shapes import with_sizes
from slimctl.passes._layers import is_linear

_SIZES_ONLY = ("Shape", "Size")
"""Operators that read nothing of a tensor but its shape, which stays."""

_RECURRENT = ("LSTM", "GRU", "RNN", "Einsum")
_FUSED_SUMS = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
_OPEN_SIZES = (2, 64)
"""Sizes of open dimensions, the first one's and all others', at which shapes are compared: large
enough to tell them from the 1 of an axis that is repeated."""


@dataclass(frozen=True)
class Block:
    """A residual block.

    Attributes:
        add: The sum.
        place: Which operand of it is ``x``.
        nodes: Those that compute ``f(x)`` from ``x`` and go with it, in the order of the graph.
        layers: Those among them that have weights.
    """

    add: ir.Node
    place: int
    nodes: tuple[ir.Node, ...]
    layers: tuple[ir.Node, ...]

    @property
    def name(self) -> str:
        """Name of the sum."""
        return self.add.name or ""

    @property
    def skip(self) -> ir.Value:
        """``x``."""
        return _operand(self.add, self.place)

    @property
    def branch(self) -> ir.Value:
        """``f(x)``."""
        return _operand(self.add, 1 - self.place)

    @property
    def total(self) -> ir.Value:
        """``x + f(x)``."""
        return self.add.outputs[0]


def _operand(node: ir.Node, place: int) -> ir.Value:
    value = node.inputs[place]
    assert value is not None, "a sum has two operands"
    return value


# finding


def find_blocks(model: ir.Model) -> tuple[list[Block], list[Skipped]]:
    """Residual blocks in the order of the graph, and the sums that are none with the reason.

    Args:
        model: With shapes inferred; not changed.
    """
    finder = _Finder(model)
    blocks: list[Block] = []
    skipped: list[Skipped] = []
    for node in model.graph:
        if node.op_type in _FUSED_SUMS:
            reason = "its sum is fused with a normalization: give the model before that"
            skipped.append(Skipped(node.name or "", reason))
        elif _is_sum(node):
            found = finder.block(node)
            if isinstance(found, Block):
                blocks.append(found)
            else:
                skipped.append(Skipped(node.name or "", found))
    return blocks, skipped


def _is_sum(node: ir.Node) -> bool:
    """Whether two activations are added."""
    if node.op_type not in ("Add", "Sum") or node.domain not in ("", "ai.onnx"):
        return False
    if len(node.inputs) != 2 or any(v is None or const_array(v) is not None for v in node.inputs):
        return False
    dtype = node.outputs[0].dtype
    return dtype is None or dtype.is_floating_point()


class _Finder:
    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._position = {node: index for index, node in enumerate(model.graph)}
        self._at_sizes: Mapping[str, tuple[Dimension, ...] | None] | None = None

    def block(self, add: ir.Node) -> Block | str:
        """The block that ends in a sum, or why there is none."""
        for place in (0, 1):
            skip, branch = _operand(add, place), _operand(add, 1 - place)
            nodes = self._between(skip, branch)
            if not nodes:
                continue
            layers = tuple(node for node in nodes if _has_weights(node))
            if not layers:
                return "no layers lie between its operands"
            reason = self._reason_against(add, skip, nodes)
            return reason or Block(add, place, nodes, layers)
        return "neither operand is computed from the other"

    def _between(self, start: ir.Value, end: ir.Value) -> tuple[ir.Node, ...]:
        """Nodes through which the content of ``start`` reaches ``end``."""
        maker = start.producer()
        first = -1 if maker is None else self._position.get(maker, -1)
        behind = self._behind(end, first)
        inner: dict[ir.Node, None] = {}
        reached = {start}
        for node in sorted(behind, key=self._position.__getitem__):
            read = set(_read(node)) & reached
            if read and not (read == {start} and node.op_type in _SIZES_ONLY):
                inner[node] = None
                reached.update(node.outputs)
        return tuple(inner) if end in reached else ()

    def _behind(self, end: ir.Value, first: int) -> set[ir.Node]:
        """Nodes after a position that a value depends on."""
        found: set[ir.Node] = set()
        pending = [end]
        while pending:
            node = pending.pop().producer()
            if node is not None and node not in found and self._position.get(node, -1) > first:
                found.add(node)
                pending.extend(_read(node))
        return found

    def _reason_against(self, add: ir.Node, skip: ir.Value, nodes: Sequence[ir.Node]) -> str:
        members = {*nodes, add}
        for node in nodes:
            for value in node.outputs:
                if value.is_graph_output():
                    return f"'{value.name}' in between is an output of the model"
                for use in value.uses():
                    if use.node not in members:
                        return f"'{use.node.name}' also reads what '{node.name}' computes"
        if not self._same_shape(skip, add.outputs[0]):
            return "its shape may differ from that of the operand that would stay"
        return ""

    def _same_shape(self, left: ir.Value, right: ir.Value) -> bool:
        shapes = dimensions(left.shape), dimensions(right.shape)
        if shapes[0] == shapes[1] and shapes[0] is not None and None not in shapes[0]:
            return True
        if self._at_sizes is None:
            self._at_sizes = _shapes_at_sizes(self._model)
        found = self._at_sizes.get(left.name or ""), self._at_sizes.get(right.name or "")
        return found[0] == found[1] and _is_known(found[0])


def _is_known(shape: tuple[Dimension, ...] | None) -> bool:
    return shape is not None and all(isinstance(size, int) for size in shape)


def _shapes_at_sizes(model: ir.Model) -> dict[str, tuple[Dimension, ...] | None]:
    sizes: dict[str, int] = {}
    for value in model.graph.inputs:
        for axis, size in enumerate(dimensions(value.shape) or ()):
            if not isinstance(size, int):
                sizes[size or f"{value.name}[{axis}]"] = _OPEN_SIZES[min(axis, 1)]
    sized = with_sizes(model, sizes)
    values = [*sized.graph.inputs, *(value for node in sized.graph for value in node.outputs)]
    return {value.name or "": dimensions(value.shape) for value in values}


def _read(node: ir.Node) -> Iterator[ir.Value]:
    """Everything a node depends on, in its bodies too."""
    yield from (value for value in node.inputs if value is not None)
    for body in attribute_graphs(node):
        for inner in body.all_nodes():
            yield from (value for value in inner.inputs if value is not None)


def _has_weights(node: ir.Node) -> bool:
    known = is_linear(node) or node.op_type in _RECURRENT or node.domain not in ("", "ai.onnx")
    arrays = (const_array(value) for value in node.inputs) if known else ()
    return any(array is not None and sum(n > 1 for n in array.shape) > 1 for array in arrays)


def inside(blocks: Sequence[Block]) -> list[set[int]]:
    """For each block, the places of those that go with it: they lie in its branch."""
    found = []
    for outer in blocks:
        members = set(outer.nodes)
        found.append({place for place, block in enumerate(blocks) if block.add in members})
    return found


# removing


def remove_blocks(model: ir.Model, names: Collection[str], made_by: str = "") -> None:
    """Replaces sums by their ``x``, in place.

    Args:
        model: With shapes inferred.
        names: Of the sums.
        made_by: Provenance of nodes that are added.
    """
    blocks = [block for block in find_blocks(model)[0] if block.name in names]
    scope = NameScope(model)
    for block in blocks:
        skip, total = block.skip, block.total
        if total.is_graph_output():
            _hand_out(model, block.add, skip, scope, made_by)
        else:
            ir.convenience.replace_all_uses_with(total, skip)
    remove_dead(model)


def _hand_out(
    model: ir.Model, add: ir.Node, skip: ir.Value, scope: NameScope, made_by: str
) -> None:
    """An Identity in the place of a sum that is an output, under its name."""
    total = add.outputs[0]
    node = ir.Node("", "Identity", [skip], name=scope.fresh_node(f"{add.name}_removed"))
    if made_by:
        set_provenance(node, made_by)
    model.graph.insert_before(add, node)
    given = node.outputs[0]
    given.type, given.shape = total.type, total.shape
    ir.convenience.replace_all_uses_with(total, given, replace_graph_outputs=True)
    given.name, total.name = total.name, scope.fresh(f"{total.name}_removed")
