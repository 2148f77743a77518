"""Follows every channel of a model from the layer that computes it to the layers that read it."""

from __future__ import annotations

from collections import defaultdict

import onnx_ir as ir

from slimctl.graph.channels.coupling import Channels, Member, Role
from slimctl.graph.channels.site import Site
from slimctl.graph.channels.table import RULES, key
from slimctl.graph.edit import attribute_graphs

_BRANCHES = ("If",)


def analyze(model: ir.Model, *, whole_blocks: bool = False) -> Channels:
    """Finds out which slices of which tensors must go together.

    Labels start at the layers that compute channels and go through the graph once, in order; each
    operator's rule says how. The cost grows with the number of nodes and of channels.

    Args:
        model: Its shapes are inferred (:func:`slimctl.graph.shapes.infer_shapes`). Not changed.
        whole_blocks: Where one axis becomes several (heads times width), take out whole blocks and
            not the same part of each.
    """
    channels = Channels()
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1))
    _follow(model.graph, channels, opset, whole_blocks)
    _block_outputs(model.graph, channels, "it is an output of the model")
    _share(channels)
    return channels


def _follow(graph: ir.Graph, channels: Channels, opset: int, whole_blocks: bool) -> None:
    for node in graph:
        site = Site(node, channels, opset=opset, whole_blocks=whole_blocks)
        labeled = any(value in channels.tensors for value in node.inputs if value is not None)
        bodies = list(attribute_graphs(node))
        if bodies:
            _control_flow(site, bodies)
            continue
        rule = RULES.get(key(node.domain, node.op_type))
        if rule is None:
            site.block_inputs(f"there is no rule for the operator {node.op_type}")
        elif labeled or rule.computes:
            rule.follow(site)
            site.block_rest()
            channels.passed(node)


def _control_flow(site: Site, bodies: list[ir.Graph]) -> None:
    """Branches of an If run once, in place: they are followed. Loops carry state: they are not."""
    site.block_inputs("it goes into control flow")
    for body in bodies:
        if site.node.op_type in _BRANCHES:
            _follow(body, site.channels, site.opset, site.whole_blocks)
            _block_outputs(body, site.channels, "it is an output of a branch")
            continue
        for node in body.all_nodes():
            inner = Site(node, site.channels, opset=site.opset, whole_blocks=site.whole_blocks)
            inner.block_inputs("it goes into the body of a loop")


def _block_outputs(graph: ir.Graph, channels: Channels, reason: str) -> None:
    for value in graph.outputs:
        for axis in channels.tensors.get(value, {}).values():
            channels.block(axis.ids, value.name or "", reason)


def _share(channels: Channels) -> None:
    """A constant that several nodes read shrinks for all of them or for none."""
    by_place: dict[tuple[ir.Value, int], list[Member]] = defaultdict(list)
    for member in channels.members:
        by_place[member.value, member.axis].append(member)
    for (value, _), members in by_place.items():
        first = members[0]
        name = first.node.name or first.node.op_type
        for other in members[1:]:
            channels.tie(first.ids, other.ids, name)
        readers = {(member.node, member.place) for member in members}
        if value.is_graph_output() or any(
            (use.node, use.idx) not in readers for use in value.uses()
        ):
            _block_members(channels, members, f"'{value.name}' is read elsewhere, as a whole")
        if _conflicting(channels, members):
            _block_members(
                channels, members, f"'{value.name}' computes channels here and scales them there"
            )


def _conflicting(channels: Channels, members: list[Member]) -> bool:
    """Whether a constant that silence makes zero is one that others count on as it is."""
    fixed = [
        member.role is Role.CARRY or (member.role is Role.CONSUME and node in channels.folding)
        for member in members
        for node in (member.node,)
    ]
    return any(member.role is Role.PRODUCE for member in members) and any(fixed)


def _block_members(channels: Channels, members: list[Member], reason: str) -> None:
    for member in members:
        channels.block(member.ids, member.node.name or member.node.op_type, reason)
