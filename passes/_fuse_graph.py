"""What the rewrite families of ``fuse`` share: facts about a graph, and surgery that keeps names.

The rule behind the surgery: in the result, a tensor that has the name of a tensor of the original
also has its values, so that two models can be compared tensor by tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Skipped
from slimctl.graph.edit import (
    NameScope,
    all_nodes,
    attribute_graphs,
    const_array,
    const_tensor,
    dimensions,
    replace_constant,
    set_provenance,
)
from slimctl.graph.select import Selection

PASS_NAME = "fuse"

Array: TypeAlias = NDArray[Any]
Dims: TypeAlias = tuple[int | str | None, ...]

FLOATS = frozenset(
    {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}
)


@dataclass
class Workbench:
    """One application of the pass to one model.

    Attributes:
        model: Changed in place.
        selection: Which nodes may be touched.
        fold_limit_bytes: Largest new constant.
        changed: What was done so far.
        skipped: Candidates left alone in this round; the last round's are reported.
        varying: Graphs that run several times in one run of the model (bodies of Loop and Scan),
            by identity. Shapes may differ between their iterations.
    """

    model: ir.Model
    selection: Selection
    fold_limit_bytes: int
    changed: Counter[str] = field(default_factory=Counter)
    skipped: dict[Skipped, None] = field(default_factory=dict)
    varying: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.names = NameScope(self.model)
        self.varying = frozenset(id(graph) for graph in _varying(self.model.graph, varying=False))

    @property
    def opset(self) -> int:
        """Version of the default operator set; 0 if the model imports none."""
        return self.model.opset_imports.get("", 0)

    def nodes(self) -> list[ir.Node]:
        """All nodes, subgraphs included: a list, so that the graph may change meanwhile."""
        return list(all_nodes(self.model))

    def count(self, what: str, number: int = 1) -> None:
        """Notes a change."""
        if number:
            self.changed[what] += number

    def skip(self, node: ir.Node, reason: str) -> None:
        """Notes a candidate left alone."""
        self.skipped[Skipped(node.name or "", reason)] = None

    def may_touch(self, candidate: ir.Node, *others: ir.Node) -> bool:
        """Whether every node of a rewrite is selected; notes the reason against the candidate."""
        for node in (candidate, *others):
            reason = self.selection.reason_against(node)
            if reason is not None:
                about = "" if node is candidate else f"'{node.name}' is "
                self.skip(candidate, about + reason)
                return False
        return True

    def shape(self, value: ir.Value | None) -> Dims | None:
        """The shape that a tensor has in every run and every iteration, as far as known."""
        if value is None or id(value.graph) in self.varying:
            return None
        dims = dimensions(value.shape)
        if dims is None:
            return None
        # Some exporters write -1 for a size that is open.
        return tuple(None if isinstance(dim, int) and dim < 0 else dim for dim in dims)

    def static_shape(self, value: ir.Value | None) -> tuple[int, ...] | None:
        """The shape if every axis is known."""
        dims = self.shape(value)
        if dims is None:
            return None
        sizes = tuple(dim for dim in dims if isinstance(dim, int))
        return sizes if len(sizes) == len(dims) else None

    def rank(self, value: ir.Value | None) -> int | None:
        """The number of axes, which may be known where no size is."""
        dims = self.shape(value)
        if dims is not None:
            return len(dims)
        node = None if value is None else value.producer()
        if node is not None and is_op(node, "Reshape"):
            target = self.static_shape(input_of(node, 1))
            return None if target is None else target[0]
        return None

    def replace_constant(self, node: ir.Node, index: int, array: Array, base: str) -> None:
        """:func:`slimctl.graph.edit.replace_constant` with the names of the model."""
        replace_constant(node, index, array, self.names, base)


def _varying(graph: ir.Graph, *, varying: bool) -> Iterator[ir.Graph]:
    if varying:
        yield graph
    for node in graph:
        for body in attribute_graphs(node):
            yield from _varying(body, varying=varying or node.op_type != "If")


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Whether a node is one of these operators of the default domain."""
    return node is not None and not node.domain and node.op_type in op_types


def input_of(node: ir.Node, index: int) -> ir.Value | None:
    """An input, or None where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def integers(
    node: ir.Node, index: int, attribute: str, default: tuple[int, ...] | None = None
) -> tuple[int, ...] | None:
    """Integers that are a constant input since some opset, and an attribute before it.

    Returns:
        ``default`` where neither is given, None where they are not constant.
    """
    value = input_of(node, index)
    if value is not None:
        array = const_array(value)
        return None if array is None else tuple(int(entry) for entry in array.reshape(-1))
    found = node.attributes.get_ints(attribute, None)
    return default if found is None else tuple(found)


def is_constant(value: ir.Value | None) -> bool:
    """Whether a tensor of numbers is the same in every run."""
    tensor = const_tensor(value)
    return tensor is not None and tensor.dtype != ir.DataType.STRING


def columns_of(tensor: ir.TensorProtocol) -> int:
    """The last size of a constant."""
    return int(tensor.shape.numpy()[-1])


def used_outputs(node: ir.Node) -> int:
    """Number of outputs that somebody reads."""
    return sum(1 for value in node.outputs if value.uses() or value.is_graph_output())


def only_reader(value: ir.Value) -> ir.Node | None:
    """The node that reads a tensor, if it does so once, in the same graph, and nothing else does.

    A graph output has a reader outside.
    """
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    node = uses[0].node
    return node if node.graph is value.graph else None


def absorb(value: ir.Value, node: ir.Node) -> None:
    """Lets a tensor stand for the first output of a node, and removes the node.

    The tensor takes over the output's name: its values are now those of the output.
    """
    output = node.outputs[0]
    name = output.name
    describe(value, output)
    value.metadata_props.clear()
    value.metadata_props.update(output.metadata_props)
    output.replace_all_uses_with(value, replace_graph_outputs=True)
    remove(node)
    value.name = name


def bypass(node: ir.Node, source: ir.Value) -> bool:
    """Removes a node whose first output equals a tensor that exists already.

    Returns:
        False when the output is a graph output whose name the tensor cannot take.
    """
    output = node.outputs[0]
    if output.is_graph_output():
        if not _can_take_name(source, node):
            return False
        absorb(source, node)
        return True
    if source.shape is None:
        describe(source, output)
    output.replace_all_uses_with(source)
    remove(node)
    return True


def describe(value: ir.Value, other: ir.Value) -> None:
    """Gives a tensor the type and shape of another that it is equal to, as far as stated."""
    if other.type is not None:
        value.type = other.type
    if other.shape is not None:
        value.shape = other.shape


def _can_take_name(source: ir.Value, node: ir.Node) -> bool:
    """Whether a tensor may become the graph output that a node produces."""
    return (
        source.producer() is not None
        and source.graph is node.graph
        and not source.is_graph_output()
        and not source.is_graph_input()
    )


def remove(node: ir.Node) -> None:
    """Takes a node that nobody reads out of its graph."""
    graph = node.graph
    assert graph is not None, "only nodes of a graph are rewritten"
    graph.remove(node, safe=True)


def mark(node: ir.Node) -> None:
    """Notes on a node that this pass made or changed it."""
    set_provenance(node, PASS_NAME)


def as_float64(array: Array) -> NDArray[np.float64]:
    """A copy in double precision, in which all folding is done."""
    return np.asarray(array).astype(np.float64)
