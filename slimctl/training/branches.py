"""If nodes that always take the same branch: the branch takes their place, before anything runs.

A condition is known when it follows from constants, and from sizes that the graph tells.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from slimctl.graph.edit import (
    NameScope,
    add_initializer,
    all_graphs,
    clone_model,
    const_array,
    dimensions,
    remove_dead,
)
from slimctl.graph.opset import raise_opset
from slimctl.graph.shapes import infer_shapes
from slimctl.graph.sizes import shape_entries
from slimctl.training.operator import Call
from slimctl.training.table import OPERATORS
from slimctl.training.tensors import TYPES, to_torch

_MOST_ELEMENTS = 4096
"""Conditions are made from sizes, not from weights."""

_WHOLE = (ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64)

_DEEPEST = 64
"""Nodes between a constant and a condition."""


def flat_graph(model: ir.Model, opset: int) -> ir.Model:
    """The model in an operator set, without the branches that can be decided.

    Args:
        model: Not changed.
        opset: The lowest version that is wanted.

    Returns:
        The model itself where nothing is to be done. Constants that come out of a branch have the
        names that :func:`distinct_names` gives them.
    """
    if not any(map(_is_branching, model.graph)):
        return raise_opset(model, opset)
    flat = clone_model(model)
    for name, value in distinct_names(flat).items():
        value.name = name
    flat = raise_opset(flat, opset)
    _tell_sizes(flat)
    while decided := _decided(flat.graph):
        for node, branch in decided:
            _inline(flat.graph, node, branch)
        remove_dead(flat)
        _tell_sizes(flat)
    return flat


def distinct_names(model: ir.Model) -> dict[str, ir.Value]:
    """All tensors of all graphs by names of which each is there once.

    Tensors of branches that do not see each other may share a name: the first keeps it. Clones
    give the same names.
    """
    names = NameScope(model)
    found: dict[str, ir.Value] = {}
    for graph in all_graphs(model):
        for value in _own(graph):
            name = value.name or ""
            found[names.fresh(name) if name in found else name] = value
    found.pop("", None)
    return found


def _own(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _is_branching(node: ir.Node) -> bool:
    return node.op_type == "If" and node.domain in ("", "ai.onnx")


def _tell_sizes(model: ir.Model) -> None:
    """Infers shapes, with integers that are the same in every run in place of what makes them."""
    infer_shapes(model)
    graph, found = model.graph, dict[ir.Value, Tensor | None]()
    for value in [value for node in graph for value in node.outputs]:
        whole = value.dtype in _WHOLE and not value.is_graph_output()
        tensor = _known(value, found, 0) if whole and const_array(value) is None else None
        if tensor is not None:
            name, value.name = value.name or "", None
            value.replace_all_uses_with(add_initializer(graph, name, tensor.numpy()))
    if remove_dead(model):
        infer_shapes(model)


def _decided(graph: ir.Graph) -> list[tuple[ir.Node, ir.Graph]]:
    """If nodes whose condition is known, with the branches that they take."""
    decided, found = [], dict[ir.Value, Tensor | None]()
    for node in filter(_is_branching, graph):
        condition = _known(node.inputs[0], found, 0)
        if condition is not None and condition.numel() == 1:
            name = "then_branch" if bool(condition) else "else_branch"
            decided.append((node, node.attributes[name].as_graph()))
    return decided


def _known(
    value: ir.Value | None, found: dict[ir.Value, Tensor | None], depth: int
) -> Tensor | None:
    """What a small tensor holds in every run; None where that is not known."""
    if value is None or depth > _DEEPEST:
        return None
    if value not in found:
        found[value] = None
        found[value] = _stored(value) if const_array(value) is not None else _sizes(value)
        if found[value] is None:
            found[value] = _computed(value, found, depth)
    return found[value]


def _stored(value: ir.Value) -> Tensor | None:
    array = const_array(value)
    if array is None or array.size > _MOST_ELEMENTS or value.dtype not in TYPES:
        return None
    return to_torch(array)


def _sizes(value: ir.Value) -> Tensor | None:
    """What is told about shapes; a vector, or the number in a scalar."""
    node, shape = value.producer(), dimensions(value.shape)
    if node is not None and node.op_type == "Size" and node.inputs[0] is not None:
        sizes = dimensions(node.inputs[0].shape)
        numbers = [size for size in sizes or () if isinstance(size, int)]
        known = sizes is not None and len(numbers) == len(sizes)
        return torch.tensor(int(np.prod(numbers, dtype=np.int64))) if known else None
    if shape is None or value.dtype != ir.DataType.INT64:
        return None
    entries = shape_entries(value)
    if entries is None or not all(isinstance(entry, int) for entry in entries):
        return None
    return torch.tensor(entries, dtype=torch.int64).reshape((-1,) * len(shape))


def _computed(value: ir.Value, found: dict[ir.Value, Tensor | None], depth: int) -> Tensor | None:
    """The result of a node whose inputs are all known."""
    node = value.producer()
    operator = None if node is None or node.domain else OPERATORS.get(node.op_type)
    if node is None or operator is None or not node.inputs:
        return None
    inputs = [_known(source, found, depth + 1) for source in node.inputs]
    pairs = zip(inputs, node.inputs, strict=True)
    if any(tensor is None and source is not None for tensor, source in pairs):
        return None
    call = Call(node)
    if operator.objection(call):
        return None
    results = operator.run(call, *inputs)
    return results if isinstance(results, Tensor) else results[node.outputs.index(value)]


def _inline(graph: ir.Graph, node: ir.Node, branch: ir.Graph) -> None:
    """Puts the nodes of a branch before the If; its results get the names that the If gave them."""
    results = list(branch.outputs)
    branch.outputs.clear()
    for name, value in list(branch.initializers.items()):
        del branch.initializers[name]
        graph.register_initializer(value)
    moved = list(branch)
    branch.remove(moved)
    graph.insert_before(node, moved)
    for output, result in zip(node.outputs, results, strict=True):
        named = ir.Node("", "Identity", [result], name=f"{node.name}_{output.name}")
        graph.insert_before(node, named)
        output.replace_all_uses_with(named.outputs[0], replace_graph_outputs=True)
        named.outputs[0].name, output.name = output.name, None
        named.outputs[0].type, named.outputs[0].shape = output.type, output.shape
