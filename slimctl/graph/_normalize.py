"""Bringing a model into the one form that passes work on, its function unchanged.

Weights are initializers and nothing else, functions are inlined, every node has a name of its own,
no name hides another, nodes stand in an order in which they can run.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import onnx_ir as ir
from onnx_ir.passes.common import (
    InlinePass,
    RemoveInitializersFromInputsPass,
    RemoveUnusedOpsetsPass,
)

from slimctl.core.errors import UnsupportedModelError
from slimctl.graph.edit import NameScope, all_graphs, all_nodes, attribute_graphs, const_tensor
from slimctl.graph.opset import raise_graph

_STRINGS = {"value_string", "value_strings"}
_FIRST_IR_WITH_FREE_INITIALIZERS = 4  # before, every initializer had to be listed as an input


def normalize(model: ir.Model) -> None:
    """Normalizes in place. Inputs and outputs of the model keep name, order, type and shape.

    Raises:
        UnsupportedModelError: A cycle, or functions that cannot be inlined.
    """
    _unify_default_domain(model)
    _sort(model)
    _inline_functions(model)
    RemoveInitializersFromInputsPass()(model)
    model.ir_version = max(model.ir_version, _FIRST_IR_WITH_FREE_INITIALIZERS)
    for graph in all_graphs(model):
        _lift_constants(graph)
        _state_initializer_types(graph)
        graph.name = graph.name or "graph"  # the ONNX checker wants one
    _name_nodes(model)
    scope = NameScope(model)
    _rename_hiding(model.graph, set(), scope)


def _unify_default_domain(model: ir.Model) -> None:
    """``ai.onnx`` is another spelling of the empty domain; onnx-ir maps nodes but not imports."""
    for imports in (model.opset_imports, *(f.opset_imports for f in model.functions.values())):
        if "ai.onnx" in imports:
            imports[""] = max(imports.pop("ai.onnx"), imports.get("", 0))


def _sort(model: ir.Model) -> None:
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        try:
            graph.sort()
        except ValueError as error:
            raise UnsupportedModelError(
                "The graph has a cycle: " + " -> ".join(_cycle(graph)),
                where=f"graph {graph.name}",
                fix="export the model again; ONNX graphs must not have cycles",
            ) from error


def _cycle(graph: ir.Graph) -> list[str]:
    """Names of the nodes on a cycle."""
    sorter: TopologicalSorter[ir.Node] = TopologicalSorter()
    for node in graph.all_nodes():
        sorter.add(node, *node.predecessors())
        for body in attribute_graphs(node):
            sorter.add(node, *body)
    try:
        sorter.prepare()
    except CycleError as error:
        return [node.name or node.op_type for node in error.args[1]]
    return []


def _inline_functions(model: ir.Model) -> None:
    """Replaces calls of model-local functions by their bodies."""
    _align_opsets(model)
    try:
        InlinePass()(model)
    except (ir.passes.InvariantError, ir.passes.PassError, ValueError) as error:
        raise UnsupportedModelError(
            f"The model's functions cannot be inlined: {error}",
            fix="inline them before export (onnx.inliner.inline_local_functions)",
        ) from error
    model.functions.clear()  # those that nothing calls
    RemoveUnusedOpsetsPass()(model)


def _align_opsets(model: ir.Model) -> None:
    """One version of the default operator set for the graph and all functions: the newest."""
    graphs = [model.graph, *(function.graph for function in model.functions.values())]
    newest = max(graph.opset_imports.get("", 0) for graph in graphs)
    for graph in graphs:
        if graph.opset_imports.get("", newest) < newest:
            raise_graph(graph, newest)


def _lift_constants(graph: ir.Graph) -> None:
    """Makes initializers of Constant nodes. Strings and outputs of a graph stay nodes."""
    for node in list(graph):
        if node.op_type != "Constant" or node.domain or node.outputs[0].is_graph_output():
            continue
        value = node.outputs[0]
        tensor = None if _STRINGS & node.attributes.keys() else const_tensor(value)
        if tensor is None or tensor.dtype == ir.DataType.STRING or not value.name:
            continue
        lifted = ir.Value(name=value.name, const_value=tensor)
        value.replace_all_uses_with(lifted)
        graph.remove(node, safe=True)
        graph.register_initializer(lifted)


def _state_initializer_types(graph: ir.Graph) -> None:
    """What a tensor is, it knows best: declarations of old exporters are sometimes stale."""
    for value in graph.initializers.values():
        if value.const_value is not None:
            value.type = ir.TensorType(value.const_value.dtype)
            value.shape = ir.Shape(value.const_value.shape.numpy())


def _name_nodes(model: ir.Model) -> None:
    """A name for every node, used once in the whole model. First come, first served."""
    scope = NameScope(model)
    seen: set[str] = set()
    for node in all_nodes(model):
        if not node.name or node.name in seen:
            node.name = scope.fresh_node(node.name or node.op_type)
        seen.add(node.name)


def _rename_hiding(graph: ir.Graph, outer: set[str], scope: NameScope) -> None:
    """Renames tensors of a body that carry the name of a tensor outside, which ONNX forbids."""
    own = [*graph.inputs, *graph.initializers.values()]
    own += [value for node in graph for value in node.outputs]
    for value in own:
        if value.name in outer:
            value.name = scope.fresh(value.name)
    visible = outer | {value.name for value in own if value.name}
    for node in graph:
        for body in attribute_graphs(node):
            _rename_hiding(body, visible, scope)
