"""How the nodes of one provider hang together: the groups that it compiles, and their borders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from slimctl.graph.edit import attribute_graphs, const_tensor


def partitions(nodes: Sequence[ir.Node], taken: Mapping[ir.Node, bool]) -> dict[ir.Node, int]:
    """Numbers the groups of connected nodes that the provider can run as one.

    Two nodes may share a group only if no path between them leaves it, since the group runs as one
    node. The level of a node, the most changes of provider on a path that leads to it, tells:
    neighbors of one level can share a group.

    Args:
        nodes: Of one graph, in topological order.
        taken: For each, whether the provider runs it.

    Returns:
        Group by node, from 0 on, in the order of first nodes; taken nodes only.
    """
    levels: dict[ir.Node, int] = {}
    parent = {node: node for node in nodes}
    for node in nodes:
        before = [source for source in sources(node) if source in parent]
        placed = [source for source in before if source in levels]
        steps = [levels[source] + (taken[source] != taken[node]) for source in placed]
        if before or _reads_input(node):
            levels[node] = max(steps, default=0)
        else:
            continue  # fed by constants alone: it joins its first reader
        for source in before:
            level = levels.setdefault(source, levels[node])
            if taken[node] and taken[source] and level == levels[node]:
                parent[_root(parent, node)] = _root(parent, source)
    numbers: dict[ir.Node, int] = {}
    chosen = [node for node in nodes if taken[node]]
    return {node: numbers.setdefault(_root(parent, node), len(numbers)) for node in chosen}


def _reads_input(node: ir.Node) -> bool:
    """Whether a node reads what is fed, or computed outside of its graph."""
    return any(value is not None and const_tensor(value) is None for value in node.inputs)


def _root(parent: dict[ir.Node, ir.Node], node: ir.Node) -> ir.Node:
    while parent[node] is not node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


def transitions(nodes: Sequence[ir.Node], taken: Mapping[ir.Node, bool]) -> int:
    """Tensors between nodes that go from one provider to another."""
    return sum(
        any(taken.get(user, taken[node]) != taken[node] for user in value.consumers())
        for node in nodes
        for value in node.outputs
    )


def sources(node: ir.Node) -> Iterator[ir.Node]:
    """Producers of what a node reads, what its bodies read from outside included."""
    readers = [node, *(inner for body in attribute_graphs(node) for inner in body.all_nodes())]
    for reader in readers:
        for value in reader.inputs:
            producer = value.producer() if value is not None else None
            if producer is not None:
                yield producer
