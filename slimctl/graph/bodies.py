"""Bodies of If nodes: which graphs can be observed, and how a tensor inside one gets out.

A tensor in a branch of an If has one value per run, or none when the other branch is taken. It is
made an additional output of the If; the other branch gives an empty tensor in its place. Bodies of
Loop and Scan run many times, so their tensors have no single value and are not observed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from slimctl.graph.edit import NameScope


@dataclass(frozen=True)
class Place:
    """Where an observable graph stands.

    Attributes:
        graph: The graph.
        owner: The If node whose branch it is, None for the main graph.
        parent: Where the owner stands.
    """

    graph: ir.Graph
    owner: ir.Node | None = None
    parent: Place | None = None


def observable_graphs(model: ir.Model) -> Iterator[Place]:
    """The main graph and every branch of every If outside loops, outer graphs first."""
    pending = [Place(model.graph)]
    while pending:
        place = pending.pop(0)
        yield place
        pending.extend(
            Place(branch, node, place) for node in place.graph for branch in branches(node)
        )


def branches(node: ir.Node) -> list[ir.Graph]:
    """Both branches of an If, nothing for other nodes."""
    if node.op_type != "If" or node.domain:
        return []
    return [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]


def expose(value: ir.Value, place: Place, names: NameScope) -> ir.Value:
    """Makes a tensor of a branch an output of the Ifs around it, under its own name.

    Args:
        value: A tensor of the branch; it is renamed.
        place: Where the branch stands.
        names: Scope of the model.

    Returns:
        The tensor of the main graph that holds the value, empty when the branch was not taken.
    """
    name = value.name or ""
    value.name = names.fresh(f"{name}_inside")
    while place.owner is not None and place.parent is not None:
        value = _through(value, place.graph, place.owner, names)
        place = place.parent
    value.name = name
    return value


def _through(value: ir.Value, branch: ir.Graph, owner: ir.Node, names: NameScope) -> ir.Value:
    """One level up: the new output of the owner."""
    copy = _node("Identity", [value], names, value.type)
    branch.append(copy)
    branch.outputs.append(copy.outputs[0])
    for other in branches(owner):
        if other is not branch:
            empty = _empty(value, names)
            other.append(empty)
            other.outputs.append(empty.outputs[0])
    owner.resize_outputs(len(owner.outputs) + 1)
    outer = owner.outputs[-1]
    outer.name = names.fresh(f"{value.name}_of_branch")
    outer.type = value.type
    return outer


def _empty(value: ir.Value, names: NameScope) -> ir.Node:
    kind = (value.dtype or ir.DataType.FLOAT).numpy()
    tensor = ir.Tensor(np.zeros(0, kind))
    node = _node("Constant", [], names, value.type)
    node.attributes["value"] = ir.AttrTensor("value", tensor)
    return node


def _node(
    op_type: str, inputs: list[ir.Value], names: NameScope, kind: ir.TypeProtocol | None
) -> ir.Node:
    node = ir.Node("", op_type, inputs, name=names.fresh_node(f"observe_{op_type}"))
    node.outputs[0].name = names.fresh(f"{node.name}_output")
    node.outputs[0].type = kind
    return node
