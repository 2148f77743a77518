"""The placement linter: what an execution provider takes of a model, and why not the rest.

1. fold      what is constant is computed when the model is loaded
2. judge     every other node against the operators and the rules of the profile
3. pairs     Q and DQ nodes go with the nodes that they serve
4. group     nodes that the provider runs as one
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from slimctl.core.rules import Rule
from slimctl.core.target import ABSORBED, Target
from slimctl.graph.cost import node_costs
from slimctl.graph.edit import all_graphs, attribute_graphs, clone_model, dimensions
from slimctl.graph.kernels import last_opset, version_of, why_no_kernel
from slimctl.graph.shapes import infer_shapes, with_sizes
from slimctl.targets.demands import broken
from slimctl.targets.folding import folded_nodes
from slimctl.targets.partition import partitions, sources, transitions
from slimctl.targets.placement import NodePlacement, PlacementReport, Problem
from slimctl.targets.units import (
    DEQUANTIZE,
    QUANTIZE,
    Unit,
    is_pair,
    operator_of,
    unit_of,
    unit_of_pair,
)


def check_placement(
    model: ir.Model, target: Target, sizes: Mapping[str, int] | None = None
) -> PlacementReport:
    """Says for every node whether the target's provider takes it.

    Args:
        model: Float or quantized; not changed.
        target: The profile.
        sizes: Of open dimensions, as in :func:`~slimctl.graph.shapes.with_sizes`: the check is
            that of the model with these sizes.

    Raises:
        ModelExecutionError: The profile asks the installed onnxruntime for its kernels, and that
            does not have the provider.
    """
    return _Check(_inferred(model, sizes or {}), target).report()


def _inferred(model: ir.Model, sizes: Mapping[str, int]) -> ir.Model:
    """A clone with types and shapes, and those of outputs that the model leaves open."""
    sized = with_sizes(model, sizes)
    if sizes:
        return sized
    clone = clone_model(model)
    infer_shapes(clone)
    for value, found in zip(clone.graph.outputs, sized.graph.outputs, strict=True):
        stated = dimensions(value.shape)
        if stated is None or any(not isinstance(size, int) for size in stated):
            value.shape = value.shape if found.shape is None else found.shape
        value.type = value.type or found.type
    return clone


@dataclass(frozen=True)
class _Verdict:
    """What becomes of a node; ``integer`` when its Q/DQ pairs are part of it."""

    taken: bool
    problems: tuple[Problem, ...] = ()
    integer: bool = False


class _Check:
    def __init__(self, model: ir.Model, target: Target) -> None:
        self.model = model
        self.target = target
        self.folded = folded_nodes(model)
        self.verdicts: dict[ir.Node, _Verdict] = {}

    def report(self) -> PlacementReport:
        graphs = [[n for n in graph if n not in self.folded] for graph in all_graphs(self.model)]
        nodes = [node for graph in graphs for node in graph]
        for node in nodes:
            if not is_pair(node):
                self.verdicts[node] = self._judge(node)
        for node in nodes:
            if is_pair(node):
                self.verdicts[node] = self._judge_pair(node)
        taken = {node: verdict.taken for node, verdict in self.verdicts.items()}
        groups = self._groups(graphs, taken)
        macs, macs_taken = self._macs()
        return PlacementReport(
            target=self.target.name,
            provider=self.target.provider,
            nodes=tuple(self._placement(node, groups) for node in nodes),
            interface=dict(self._interface()),
            folded=len(self.folded),
            partitions=max(groups.values(), default=-1) + 1,
            transitions=sum(transitions(graph, taken) for graph in graphs),
            macs=macs,
            macs_taken=macs_taken,
        )

    def _groups(
        self, graphs: Iterable[Sequence[ir.Node]], taken: Mapping[ir.Node, bool]
    ) -> dict[ir.Node, int]:
        """Partition by node; a body that runs as a whole belongs to the partition of its owner."""
        owners = {
            body: node for node in self.model.graph.all_nodes() for body in attribute_graphs(node)
        }
        groups: dict[ir.Node, int] = {}
        for nodes in graphs:
            graph = nodes[0].graph if nodes else None
            owner = None if graph is None else owners.get(graph)
            if owner is not None and owner in groups and self._runs_whole(owner):
                groups |= dict.fromkeys(nodes, groups[owner])
                continue
            start = max(groups.values(), default=-1) + 1
            groups |= {node: start + number for node, number in partitions(nodes, taken).items()}
        return groups

    def _placement(self, node: ir.Node, groups: Mapping[ir.Node, int]) -> NodePlacement:
        verdict = self.verdicts[node]
        main = node.graph is self.model.graph
        return NodePlacement(
            name=node.name or "",
            operator=operator_of(node),
            graph="" if main or node.graph is None else node.graph.name or "",
            taken=verdict.taken,
            problems=verdict.problems,
            partition=groups.get(node),
        )

    # nodes

    def _judge(self, node: ir.Node) -> _Verdict:
        unit = unit_of(node, self.target.absorbing_integers)
        broken = list(self._broken_rules(unit, self.target.rules))
        integer = self._has_integer_form(unit) and all(p.effect != "float" for p in broken)
        if not integer:
            broken += self._float_problems(unit, explained=any(p.effect == "float" for p in broken))
        taken = all(problem.effect != "fallback" for problem in broken)
        return _Verdict(taken, tuple(broken), integer)

    def _has_integer_form(self, unit: Unit) -> bool:
        leader = unit.operator if unit.leader is None else operator_of(unit.leader)
        return unit.is_quantized and leader in self.target.integer_operators

    def _float_problems(self, unit: Unit, *, explained: bool) -> Iterator[Problem]:
        """Whether the provider runs the operator in float, and what that means between pairs."""
        if self._is_absorbed(unit):
            return
        problem = self._unknown(unit.node)
        if problem is not None:
            yield problem
        elif unit.is_quantized and not explained:
            yield self._in_float(unit)

    def _is_absorbed(self, unit: Unit) -> bool:
        """Whether a Relu or Clip is computed along with the node in front of it."""
        node = unit.node
        source = node.inputs[0] if node.op_type in ABSORBED and not node.domain else None
        producer = source.producer() if source is not None else None
        if source is None or producer is None or len(source.uses()) > 1:
            return False
        ours = producer in self.verdicts and self.verdicts[producer].taken
        return ours and operator_of(producer) in self.target.absorbing

    def _unknown(self, node: ir.Node) -> Problem | None:
        """Why the provider does not run an operator in float, None where it does."""
        table = self.target.operators
        if table.installed:
            reason = why_no_kernel(node, self._opset(node), self.target.provider)
            return None if reason is None else self._operator_problem(reason, table.fix)
        if operator_of(node) not in table.names:
            return self._operator_problem("the operator is not among those it runs", table.fix)
        return self._too_new(node)

    def _too_new(self, node: ir.Node) -> Problem | None:
        """A kernel serves the versions of its operator that it was written for, and none later."""
        operator = operator_of(node)
        newest = None if ":" in operator else self.target.operators.newest_version(operator)
        version = version_of(node.op_type, self._opset(node))
        if newest is None or version is None or version <= newest:
            return None
        usable = last_opset(node.op_type, newest)
        return self._operator_problem(
            f"version {version} of {node.op_type} has no kernel, that of opset {usable} has",
            f"export the model with opset {usable} or older",
        )

    def _operator_problem(self, found: str, fix: str) -> Problem:
        reason = f"{self.target.provider} does not run the operator"
        document = self.target.operators.document
        return Problem("operator", "fallback", found, reason, fix, document)

    def _in_float(self, unit: Unit) -> Problem:
        """A float kernel between a DQ and a Q: it costs more than the float model."""
        return Problem(
            "float-between-pairs",
            "float",
            f"{unit.operator} has no integer kernel",
            "it computes in float between DQ and Q",
            f"leave it in float: quantize with --exclude 'op:{unit.node.op_type}'",
            self.target.operators.document,
        )

    def _broken_rules(self, unit: Unit, rules: Iterable[Rule]) -> Iterator[Problem]:
        for rule in rules:
            wanted = rule.applies_to
            if wanted != "all" and unit.is_quantized != (wanted == "quantized"):
                continue
            if rule.covers(unit.operator):
                found = broken(unit, rule.require, self._opset(unit.node))
                if found is not None:
                    yield _problem(rule, found)

    def _opset(self, node: ir.Node) -> int:
        domain = "" if node.domain == "ai.onnx" else node.domain
        graph = node.graph
        own = graph.opset_imports.get(domain) if graph is not None else None
        return own or self.model.opset_imports.get(domain, 1)

    # Q and DQ

    def _judge_pair(self, node: ir.Node) -> _Verdict:
        """A Q or DQ goes with what it serves; alone it is an operator as any other."""
        named = [rule for rule in self.target.rules if operator_of(node) in rule.operators]
        own = tuple(self._broken_rules(unit_of_pair(node), named))
        if any(problem.effect == "fallback" for problem in own):
            return _Verdict(taken=False, problems=own)
        served = self._served(node)
        if any(self.verdicts[n].taken and self.verdicts[n].integer for n in served):
            return _Verdict(taken=True, problems=own)
        problem = self._unknown(node)
        if problem is not None:
            return _Verdict(taken=False, problems=(*own, problem))
        if served and not any(self.verdicts[n].taken for n in served):
            first = self.verdicts[served[0]].problems
            why = next(problem for problem in first if problem.effect == "fallback")
            found = f"it serves '{served[0].name}'"
            return _Verdict(taken=False, problems=(*own, replace(why, found=found)))
        return _Verdict(taken=True, problems=own)

    def _served(self, pair: ir.Node) -> list[ir.Node]:
        """Nodes that read a DQ or write what a Q reads, seen through neighboring pairs."""
        found: dict[ir.Node, None] = {}
        seen: set[ir.Node] = set()
        pending = [pair]
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            for other in _neighbors(node):
                if is_pair(other):
                    pending.append(other)
                elif other in self.verdicts:
                    found[other] = None
        return list(found)

    # the model as a whole

    def _interface(self) -> Iterator[tuple[str, Problem]]:
        wanted = self.target.interface_types
        for value in (*self.model.graph.inputs, *self.model.graph.outputs):
            kind = "" if value.dtype is None else value.dtype.name.lower()
            if wanted and kind and kind not in wanted:
                yield (
                    value.name or "",
                    Problem(
                        "interface-types",
                        "fallback",
                        f"it is {kind}",
                        f"inputs and outputs are {', '.join(wanted)}",
                        "export the model with another type, or put a Cast behind it",
                        self.target.documents[0],
                    ),
                )

    def _macs(self) -> tuple[int, int]:
        """Known multiply-accumulates of the main graph, all and those that are taken."""
        total = ours = 0
        costs = node_costs(self.model, _single_sample(self.model))
        for node, cost in zip(self.model.graph, costs, strict=False):
            if cost.macs and cost.op_type == node.op_type:
                total += cost.macs
                ours += cost.macs if self._runs_whole(node) else 0
        return total, ours

    def _runs_whole(self, node: ir.Node) -> bool:
        inner = [n for body in attribute_graphs(node) for n in body.all_nodes()]
        return all(n in self.folded or self.verdicts[n].taken for n in (node, *inner))


def _single_sample(model: ir.Model) -> dict[str, int]:
    """Size 1 for every open first dimension: shares hardly depend on the batch size."""
    shapes = {value.name: dimensions(value.shape) for value in model.graph.inputs}
    return {
        shape[0] or f"{name}[0]": 1
        for name, shape in shapes.items()
        if shape and not isinstance(shape[0], int)
    }


def _neighbors(pair: ir.Node) -> Iterator[ir.Node]:
    """The side of a pair that belongs to a node: behind a DQ, in front of a Q; or the other Q/DQ.

    A Q of an input of the model, or of a value that only pairs read, belongs to what is behind it.
    """
    behind = list(pair.outputs[0].consumers())
    before = list(sources(pair))
    if pair.op_type == DEQUANTIZE:
        yield from behind
        if not any(not is_pair(node) for node in behind):
            yield from (node for node in before if node.op_type == QUANTIZE)
        return
    yield from (node for node in before if not is_pair(node))
    if not before or all(node.op_type == DEQUANTIZE for node in before):
        yield from (node for node in behind if node.op_type == DEQUANTIZE)


def _problem(rule: Rule, found: str) -> Problem:
    return Problem(rule.name, rule.effect, found, rule.reason, rule.fix, rule.document)
