"""Reading and editing graphs: constants, unique names, provenance, interface, dead code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

PROVENANCE_KEY = "slimctl.pass"
"""Key in a node's ``metadata_props`` that names the pass which created it."""

NAMELESS = "?"
"""What some exporters call every open dimension. It is no symbol: two of them may differ."""

Dimension = int | str | None
"""A known size, a symbol, or nothing known."""


class Port(NamedTuple):
    """One input or output of a model.

    Attributes:
        name: Name by which onnxruntime knows it.
        dtype: Element type; None when it is not a tensor (a sequence, a map) or not stated.
        shape: One entry per axis; None when not even the rank is stated.
    """

    name: str
    dtype: ir.DataType | None
    shape: tuple[Dimension, ...] | None


@dataclass(frozen=True)
class Interface:
    """What a model asks for and gives. Two models are interchangeable if these are equal."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


def dimensions(shape: ir.Shape | None) -> tuple[Dimension, ...] | None:
    """A shape as plain values: sizes, symbols, None for an axis of which nothing is known."""
    return None if shape is None else tuple(map(_dimension, shape.dims))


def _dimension(dim: int | ir.SymbolicDim) -> Dimension:
    if isinstance(dim, ir.SymbolicDim):
        return dim.value if dim.value != NAMELESS else None
    return dim if dim >= 0 else None  # some exporters write -1 for a size that is open


def _port(value: ir.Value) -> Port:
    tensor = isinstance(value.type, ir.TensorType)
    return Port(value.name or "", value.dtype if tensor else None, dimensions(value.shape))


def interface(model: ir.Model) -> Interface:
    """Names, element types and shapes of the model's inputs and outputs, in order."""
    graph = model.graph
    return Interface(tuple(map(_port, graph.inputs)), tuple(map(_port, graph.outputs)))


def all_graphs(model: ir.Model) -> Iterator[ir.Graph]:
    """The main graph, then every subgraph (bodies of If, Loop, Scan) at any depth."""
    yield model.graph
    yield from model.graph.subgraphs()


def all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Every node of every graph."""
    return model.graph.all_nodes()


def clone_model(model: ir.Model) -> ir.Model:
    """A copy of the graph that shares nothing with the original but the weights.

    ``Model.clone`` shares the type objects too, so that ``value.dtype = ...`` in the clone would
    change the original.
    """
    clone = model.clone()
    for graph in all_graphs(clone):
        for value in _values_of(graph):
            value.type = copy(value.type)
    return clone


def attribute_graphs(node: ir.Node) -> Iterator[ir.Graph]:
    """The bodies that a node holds: none for most, two for If, one for Loop and Scan."""
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def const_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor behind a value that is the same in every run.

    An initializer of this graph or of an outer one, or the output of a Constant node. A value that
    the user can feed is no constant, even where it has a default.
    """
    if value is None or value.is_graph_input():
        return None
    if value.is_initializer():
        return value.const_value
    node = value.producer()
    if node is None or node.op_type != "Constant" or node.domain:
        return None
    stored = node.attributes.get("value")
    if stored is not None and not stored.is_ref():
        # Not as_tensor(): its protocol check costs more than everything else here.
        return cast(ir.TensorProtocol, stored.value)
    return ir.convenience.get_const_tensor(value)


def const_array(value: ir.Value | None) -> NDArray[Any] | None:
    """The values behind :func:`const_tensor`, read-only.

    Weights are shared between a model and its clones: a pass that changes them makes a new array.
    Numeric tensors come without a copy; strings give None.
    """
    tensor = const_tensor(value)
    if tensor is None or tensor.dtype == ir.DataType.STRING:
        return None
    array = tensor.numpy().view()
    array.flags.writeable = False
    return array


def _values_of(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


_LONGEST_NAME = 80


class NameScope:
    """Hands out names that are used nowhere in the model, subgraphs included.

    Names are never parsed for meaning, only compared. A scope knows the names that the model had
    when it was made and those it handed out itself.
    """

    def __init__(self, model: ir.Model) -> None:
        graphs = list(all_graphs(model))
        self._values = {value.name for graph in graphs for value in _values_of(graph)}
        self._nodes = {node.name for node in all_nodes(model)}
        self._counts: Counter[str] = Counter()

    def fresh(self, base: str) -> str:
        """A tensor name: ``base`` where it is free, else ``base_1``, ``base_2`` and so on.

        Of a very long base the end is taken. Converters join the names of all that they fuse, and
        in a small model new names would take more bytes than its weights.
        """
        return self._reserve(base, self._values)

    def fresh_node(self, base: str) -> str:
        """A node name, as :meth:`fresh`."""
        return self._reserve(base, self._nodes)

    def _reserve(self, base: str, used: set[str | None]) -> str:
        name = base = base[-_LONGEST_NAME:]
        while not name or name in used:
            # One counter for both kinds of names: gaps do not matter, quadratic searches do.
            self._counts[base] += 1
            name = f"{base}_{self._counts[base]}"
        used.add(name)
        return name


def add_initializer(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    """Registers a new constant; the array is kept, not copied.

    Args:
        graph: Where it lives; its subgraphs see it too.
        name: A name from :class:`NameScope`.
        array: Any shape and any type that ONNX stores, also those of ml_dtypes.
    """
    tensor = ir.Tensor(np.asarray(array), name=name)
    value = ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor
    )
    graph.register_initializer(value)
    return value


def _is_own_initializer(value: ir.Value) -> bool:
    """Whether a tensor is an initializer that one input of one node reads and nothing else."""
    return (
        value.is_initializer()
        and not value.is_graph_input()
        and not value.is_graph_output()
        and len(value.uses()) == 1
    )


def replace_constant(
    node: ir.Node, index: int, array: NDArray[Any], names: NameScope, base: str
) -> None:
    """Gives a node other constant values at one input.

    Values that nobody else reads keep their name; otherwise the node gets a constant of its own.

    Args:
        node: A node of a graph.
        index: Place among its inputs; one past the last adds an input.
        array: In the type to store.
        names: Scope of the model.
        base: Name to start from for a new constant.
    """
    old = node.inputs[index] if index < len(node.inputs) else None
    if old is not None and _is_own_initializer(old):
        old.const_value = ir.Tensor(array, name=old.name)
        old.shape = ir.Shape(array.shape)
        old.type = ir.TensorType(old.const_value.dtype)
        return
    assert isinstance(node.graph, ir.Graph), "only nodes of a graph are rewritten"
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, add_initializer(node.graph, names.fresh(base), array))


def set_provenance(node: ir.Node, pass_name: str) -> None:
    """Marks a node as made by a pass."""
    node.metadata_props[PROVENANCE_KEY] = pass_name


def remove_dead(model: ir.Model) -> int:
    """Removes nodes and initializers that no output depends on.

    Inputs and outputs of the model stay, and so do inputs and outputs of subgraphs.

    Returns:
        How many nodes and initializers went.
    """
    nodes, values = _alive(model)
    removed = 0
    for graph in list(all_graphs(model)):
        dead = [node for node in graph if node not in nodes]
        for node in dead:
            _let_go(node)
        graph.remove(dead)
        unused = [name for name, value in graph.initializers.items() if value not in values]
        for name in unused:
            del graph.initializers[name]
        removed += len(dead) + len(unused)
    return removed


def _alive(model: ir.Model) -> tuple[set[ir.Node], set[ir.Value]]:
    """What the outputs depend on, through subgraphs too."""
    nodes: set[ir.Node] = set()
    values: set[ir.Value] = set(model.graph.inputs)
    pending = list(model.graph.outputs)
    while pending:
        value = pending.pop()
        if value in values:
            continue
        values.add(value)
        node = value.producer()
        if node is not None and node not in nodes:
            nodes.add(node)
            pending.extend(source for source in node.inputs if source is not None)
            for body in attribute_graphs(node):
                values.update(body.inputs)
                pending.extend(body.outputs)
    return nodes, values


def _let_go(node: ir.Node) -> None:
    """Ends the uses that a node makes, and those in its bodies, which would outlive it."""
    for user in (node, *(inner for body in attribute_graphs(node) for inner in body.all_nodes())):
        for index in range(len(user.inputs)):
            user.replace_input_with(index, None)


def used_values(model: ir.Model) -> set[ir.Value]:
    """Everything that a node reads or that is an output, in any graph of the model.

    Unlike ``Value.uses``, which also knows uses in bodies that were removed together with the node
    that held them.
    """
    read = {value for node in all_nodes(model) for value in node.inputs if value is not None}
    return read.union(*(graph.outputs for graph in all_graphs(model)))
