"""Replaces an If whose condition is constant by the branch that it always takes."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from slimctl.graph.edit import all_graphs, all_nodes, const_array
from slimctl.passes._fuse_graph import Workbench, describe, is_op, mark, remove


def inline_branches(bench: Workbench) -> None:
    """Inlines branches, outer ones first."""
    while (node := _next(bench)) is not None:
        _inline(bench, node)


def _next(bench: Workbench) -> ir.Node | None:
    for node in bench.nodes():
        if is_op(node, "If") and _taken(node) is not None and bench.may_touch(node):
            return node
    return None


def _taken(node: ir.Node) -> ir.Graph | None:
    """The branch that an If always takes."""
    condition = const_array(node.inputs[0])
    if condition is None or condition.size != 1:
        return None
    branch = node.attributes["then_branch" if condition.reshape(-1)[0] else "else_branch"]
    return branch.as_graph()


def _inline(bench: Workbench, node: ir.Node) -> None:
    branch, graph = _taken(node), node.graph
    assert branch is not None and graph is not None, "chosen for having them"
    results = list(branch.outputs)
    branch.outputs.clear()
    _make_names_unique(bench, branch)
    for name, value in list(branch.initializers.items()):
        del branch.initializers[name]
        graph.register_initializer(value)
    moved = list(branch)
    branch.remove(moved)
    graph.insert_before(node, moved)
    for output, result in zip(node.outputs, results, strict=True):
        _hand_over(bench, node, output, result)
    remove(node)
    bench.count("If with a constant condition inlined")


def _make_names_unique(bench: Workbench, branch: ir.Graph) -> None:
    """Names may repeat in branches that do not see each other, but not in one graph."""
    graphs = list(all_graphs(bench.model))
    produced = [value for graph in graphs for node in graph for value in node.outputs]
    stored = [value for graph in graphs for value in graph.initializers.values()]
    names = Counter(value.name for value in (*produced, *stored))
    nodes = Counter(node.name for node in all_nodes(bench.model))
    values = [value for node in branch for value in node.outputs]
    for value in (*values, *branch.initializers.values()):
        if value.name and names[value.name] > 1:
            value.name = bench.names.fresh(value.name)
    for node in branch:
        if nodes[node.name] > 1:
            node.name = bench.names.fresh_node(node.name or node.op_type)


def _hand_over(bench: Workbench, node: ir.Node, output: ir.Value, result: ir.Value) -> None:
    """Lets the result of a branch stand for an output of the If."""
    graph = node.graph
    assert graph is not None, "only nodes of a graph are rewritten"
    named = output.is_graph_output()
    own = result.graph is graph and result.producer() is not None and not result.is_graph_output()
    if named and not own:
        result = _identity(bench, node, result)
    output.replace_all_uses_with(result, replace_graph_outputs=True)
    name, output.name = output.name, None
    if named:
        describe(result, output)
        result.name = name


def _identity(bench: Workbench, node: ir.Node, value: ir.Value) -> ir.Value:
    """A node that gives a tensor a second name."""
    graph = node.graph
    assert graph is not None, "only nodes of a graph are rewritten"
    identity = ir.Node("", "Identity", [value], name=bench.names.fresh_node(f"{node.name}_result"))
    mark(identity)
    graph.insert_before(node, identity)
    return identity.outputs[0]
