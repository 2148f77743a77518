"""Where a graph can be cut in two, and which part of it is the same in another graph."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from slimctl.graph.edit import attribute_graphs, const_tensor

_SMALL = 1 << 12
"""Bytes of a constant that is compared by what it holds; larger ones are shared by clones, and a
pass that changes one makes a new tensor."""


class Cut(NamedTuple):
    """A place between two nodes of the main graph.

    Attributes:
        position: Nodes in front of it.
        tensors: Names of what is computed in front of it and is read behind it or is an output.
    """

    position: int
    tensors: tuple[str, ...]


def find_cuts(model: ir.Model) -> list[Cut]:
    """Every place between two nodes, in the order of the nodes, which must be topological."""
    graph = model.graph
    nodes = list(graph)
    last: dict[ir.Value, int] = {}
    for index, node in enumerate(nodes):
        last |= dict.fromkeys(values_read(node), index)
    last |= dict.fromkeys(graph.outputs, len(nodes))
    live: dict[ir.Value, None] = {}
    cuts = []
    for index, node in enumerate(nodes[:-1]):
        made = (v for v in node.outputs if v.name and const_tensor(v) is None)
        live |= dict.fromkeys(made)
        live = {value: None for value in live if last.get(value, -1) > index}
        cuts.append(Cut(index + 1, tuple(value.name or "" for value in live)))
    return cuts


def choose_cuts(cuts: Sequence[Cut], costs: Sequence[float], count: int) -> list[Cut]:
    """Few cuts that divide the work about evenly, at narrow places.

    Args:
        cuts: From :func:`find_cuts`.
        costs: Work of each node of the graph.
        count: How many at most.
    """
    total = sum(costs)
    done, sums = 0.0, []
    for cost in costs:
        done += cost
        sums.append(done)
    chosen: dict[int, Cut] = {}
    usable = [cut for cut in cuts if cut.tensors]
    for index in range(1, count + 1):
        goal, reach = total * index / (count + 1), total / (count + 1) / 2
        away = {cut: abs(sums[cut.position - 1] - goal) for cut in usable}
        # A node that does most of the work leaves no place near: the one beside it is taken.
        reach = max(reach, min(away.values(), default=0.0))
        near = [cut for cut in usable if away[cut] <= reach]
        if near:
            best = min(near, key=lambda cut: (len(cut.tensors), away[cut]))
            chosen[best.position] = best
    return [chosen[position] for position in sorted(chosen)]


def values_read(node: ir.Node) -> Iterator[ir.Value]:
    """What a node and its bodies read."""
    yield from (value for value in node.inputs if value is not None)
    for body in attribute_graphs(node):
        for inner in body:
            yield from values_read(inner)
        yield from body.outputs


class Part(NamedTuple):
    """The part of a graph in which it differs from another one.

    Attributes:
        start: Index of the last cut before which both are the same; None: there is none.
        stop: Index of the first cut behind which both are the same; None: there is none.
    """

    start: int | None
    stop: int | None


class Differ:
    """Compares variants of one model with it.

    Args:
        model: Must not be changed afterwards.
        cuts: Some cuts of it.
    """

    def __init__(self, model: ir.Model, cuts: Sequence[Cut]) -> None:
        self._model = model
        self._cuts = cuts
        self._own = _fingerprints(model, ())
        self._behind: dict[int, Mapping[str, bytes]] = {}

    def part(self, variant: ir.Model) -> Part:
        """Where a variant differs. Both parts around it compute the same in both models.

        Tensors are known by their names; so are the outputs, which both models must have alike.
        """
        other = _fingerprints(variant, ())
        same = [
            index
            for index, cut in enumerate(self._cuts)
            if all(other.get(name) == self._own[name] for name in cut.tensors)
        ]
        start = same[-1] if same else None
        first = 0 if start is None else start + 1
        for index in range(first, len(self._cuts)):
            if self._is_same_behind(index, variant, other):
                return Part(start, index)
        return Part(start, None)

    def _is_same_behind(self, index: int, variant: ir.Model, names: Collection[str]) -> bool:
        tensors = self._cuts[index].tensors
        if not all(name in names for name in tensors):
            return False
        if index not in self._behind:
            self._behind[index] = _fingerprints(self._model, tensors)
        own, other = self._behind[index], _fingerprints(variant, tensors)
        outputs = (value.name or "" for value in self._model.graph.outputs)
        return all(own[name] == other.get(name) for name in outputs)


def _fingerprints(model: ir.Model, given: Collection[str]) -> dict[str, bytes]:
    """What each tensor of the main graph is made of and how, as a short hash.

    Args:
        model: Its nodes must be in topological order.
        given: Names of tensors for which the name itself stands.
    """
    found: dict[ir.Value, bytes] = {}
    _add_graph(model.graph, found, frozenset(given))
    return {value.name or "": hashed for value, hashed in found.items()}


def _add_graph(graph: ir.Graph, found: dict[ir.Value, bytes], given: Collection[str] = ()) -> None:
    for value in graph.inputs:
        found[value] = _hash("input", value.name)
    for value in graph.initializers.values():
        found[value] = _constant(value.const_value)
    for node in graph:
        _add_node(node, found, given)


def _add_node(node: ir.Node, found: dict[ir.Value, bytes], given: Collection[str]) -> None:
    parts: list[object] = [node.domain, node.op_type, node.overload]
    parts += [None if value is None else found.get(value) for value in node.inputs]
    for name in sorted(node.attributes):
        parts += [name, *_attribute(node.attributes[name], found)]
    whole = _hash(*parts)
    for index, value in enumerate(node.outputs):
        if value.name in given:
            found[value] = _hash("given", value.name)
        else:
            found[value] = _hash(whole, index)


def _attribute(attribute: ir.Attr, found: dict[ir.Value, bytes]) -> Iterator[object]:
    yield attribute.type
    if attribute.is_ref():
        yield attribute.ref_attr_name
    elif attribute.type == ir.AttributeType.TENSOR:
        yield _constant(attribute.value)
    elif attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        graphs = (
            [attribute.as_graph()]
            if attribute.type == ir.AttributeType.GRAPH
            else attribute.as_graphs()
        )
        for graph in graphs:
            _add_graph(graph, found)  # bodies read what is around them
            yield from (found.get(value) for value in graph.outputs)
    else:
        yield attribute.value


def _constant(tensor: ir.TensorProtocol | None) -> bytes:
    if tensor is None:
        return _hash("absent")
    if tensor.dtype == ir.DataType.STRING or tensor.nbytes > _SMALL:
        return _hash("tensor", id(tensor))
    return _hash("values", tensor.dtype, tensor.shape.numpy(), tensor.tobytes())


def _hash(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
