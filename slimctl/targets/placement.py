"""What a placement check finds: nodes, problems, partitions. Plain data, ready for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slimctl.core.rules import Effect

_PAIR = ("QuantizeLinear", "DequantizeLinear")
_ORDER: tuple[Effect, ...] = ("fallback", "float", "advice")


@dataclass(frozen=True)
class Problem:
    """A rule that a node breaks.

    Attributes:
        rule: Its name.
        effect: Whether the node falls back, computes in float, or runs and not well.
        found: What is there instead.
        reason: Why the provider does not want it.
        fix: What to do.
        document: Where the rule is written.
    """

    rule: str
    effect: Effect
    found: str
    reason: str
    fix: str
    document: str


@dataclass(frozen=True)
class NodePlacement:
    """One node.

    Attributes:
        name: Its name.
        operator: As profiles write it.
        graph: Name of the graph that holds it, empty for the main graph.
        taken: The provider runs it.
        problems: Rules that it breaks.
        partition: Number of the group that it runs in; None for nodes of another provider.
    """

    name: str
    operator: str
    graph: str
    taken: bool
    problems: tuple[Problem, ...] = ()
    partition: int | None = None


@dataclass(frozen=True)
class ProblemGroup:
    """All nodes that break one rule in the same way.

    Attributes:
        problem: The rule, with what was found at the first node that is no Q or DQ.
        nodes: Names, in graph order; inputs and outputs of the model for rules about those.
        operators: Their operators, without repetition.
    """

    problem: Problem
    nodes: tuple[str, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True)
class PlacementReport:
    """What a provider takes of a model.

    Attributes:
        target: The profile.
        provider: Its execution provider.
        nodes: Every node that is left once constants are computed.
        interface: Problems of the model's inputs and outputs, by name.
        folded: Nodes that onnxruntime computes when it loads the model.
        partitions: Connected groups of nodes that the provider runs.
        transitions: Tensors that go from one provider to another.
        macs: Multiply-accumulates of the main graph, as far as they are known.
        macs_taken: Those of nodes that the provider runs.
    """

    target: str
    provider: str
    nodes: tuple[NodePlacement, ...]
    interface: Mapping[str, Problem] = field(default_factory=dict)
    folded: int = 0
    partitions: int = 0
    transitions: int = 0
    macs: int = 0
    macs_taken: int = 0

    @property
    def fallbacks(self) -> tuple[NodePlacement, ...]:
        """Nodes that another provider runs."""
        return tuple(node for node in self.nodes if not node.taken)

    @property
    def macs_share(self) -> float | None:
        """Share of the known multiply-accumulates that stays on the provider."""
        return self.macs_taken / self.macs if self.macs else None

    @property
    def violations(self) -> int:
        """Nodes that fall back, and inputs and outputs of a type that the provider refuses."""
        return len(self.fallbacks) + len(self.interface)

    def groups(self) -> list[ProblemGroup]:
        """Problems by rule: those with fall-backs first, then by number of nodes."""
        found: dict[tuple[str, ...], list[tuple[str, str, Problem]]] = {}
        for name, problem in self.interface.items():
            found.setdefault((problem.rule, problem.reason), []).append((name, "", problem))
        for node in self.nodes:
            for problem in node.problems:
                key = (problem.rule, problem.reason)
                found.setdefault(key, []).append((node.name, node.operator, problem))
        groups = [
            ProblemGroup(
                _speaking(members),
                tuple(name for name, _, _ in members),
                tuple(dict.fromkeys(operator for _, operator, _ in members if operator)),
            )
            for members in found.values()
        ]
        return sorted(groups, key=lambda group: (_rank(group), -len(group.nodes)))

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "target": self.target,
            "provider": self.provider,
            "nodes": len(self.nodes),
            "taken": len(self.nodes) - len(self.fallbacks),
            "fallbacks": len(self.fallbacks),
            "violations": self.violations,
            "folded": self.folded,
            "partitions": self.partitions,
            "transitions": self.transitions,
            "macs": self.macs,
            "macs_taken": self.macs_taken,
            "interface": {name: asdict(problem) for name, problem in self.interface.items()},
            "problems": [_group_dict(group) for group in self.groups()],
            "placements": [asdict(node) for node in self.nodes],
        }


def _speaking(members: Sequence[tuple[str, str, Problem]]) -> Problem:
    others = [problem for _, operator, problem in members if operator not in _PAIR]
    return others[0] if others else members[0][2]


def _rank(group: ProblemGroup) -> int:
    return _ORDER.index(group.problem.effect)


def _group_dict(group: ProblemGroup) -> dict[str, Any]:
    lists: dict[str, Sequence[str]] = {"nodes": group.nodes, "operators": group.operators}
    return asdict(group.problem) | {name: list(items) for name, items in lists.items()}
