"""What the target's provider makes of a quantized model.

Where the installed onnxruntime has the provider, its own optimizer is asked; elsewhere the rules of
the profile are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir

from slimctl.core.contract import Skipped
from slimctl.core.target import Target
from slimctl.graph.edit import interface
from slimctl.passes._fusion_report import FusionReport, inspect_fusion
from slimctl.targets.check import check_placement
from slimctl.targets.placement import PlacementReport

_STATIC = "static_shapes"


class View(NamedTuple):
    """For the report of a pass.

    Attributes:
        notes: Sentences.
        skipped: Nodes that do not run as they should.
        facts: Values for the manifest.
    """

    notes: Sequence[str]
    skipped: Sequence[Skipped]
    facts: Mapping[str, Any]


def look_at(model: ir.Model, target: Target) -> View:
    """What runs in integers, and where.

    Raises:
        ModelExecutionError: onnxruntime does not load the model.
    """
    if target.operators.installed:
        fusion = inspect_fusion(model, target)
        return View(_fusion_notes(fusion), fusion.unfused, {"fusion": _fusion_facts(fusion)})
    placed = check_placement(model, target, _made_up_sizes(model))
    notes = [*_placement_notes(placed)]
    if target.asks(_STATIC) and _open_sizes(model):
        notes.append("the provider wants fixed sizes: the pass legalize fixes them")
    return View(notes, _fallen_back(placed), {"placement": _placement_facts(placed)})


def _fusion_notes(fusion: FusionReport) -> list[str]:
    notes = [
        f"{fusion.fused} Q/DQ nodes fuse into {sum(fusion.kernels.values())} integer kernels; "
        f"{fusion.left} stay at borders to float operators"
    ]
    if fusion.unfused:
        names = ", ".join(item.node for item in fusion.unfused[:3])
        notes.append(f"{len(fusion.unfused)} layers compute in float in spite of Q/DQ: {names}")
    return notes


def _fusion_facts(fusion: FusionReport) -> dict[str, Any]:
    return {
        "kernels": fusion.kernels,
        "fused": fusion.fused,
        "left": fusion.left,
        "unfused": [list(item) for item in fusion.unfused],
        "borders": fusion.borders,
    }


def _open_sizes(model: ir.Model) -> list[str]:
    """Open dimensions of the inputs, by symbol or place."""
    return [
        dim or f"{port.name}[{axis}]"
        for port in interface(model).inputs
        for axis, dim in enumerate(port.shape or ())
        if not isinstance(dim, int)
    ]


def _made_up_sizes(model: ir.Model) -> dict[str, int]:
    """Any size for every open one: that they are open is said once and not for each node."""
    return dict.fromkeys(_open_sizes(model), 1)


def _placement_notes(placed: PlacementReport) -> list[str]:
    taken = len(placed.nodes) - len(placed.fallbacks)
    groups = "1 partition" if placed.partitions == 1 else f"{placed.partitions} partitions"
    return [f"{taken} of {len(placed.nodes)} nodes run on {placed.provider}, in {groups}"]


def _fallen_back(placed: PlacementReport) -> list[Skipped]:
    return [
        Skipped(node.name, f"runs elsewhere: {node.problems[0].reason}; {node.problems[0].found}")
        for node in placed.fallbacks
        if node.problems
    ]


def _placement_facts(placed: PlacementReport) -> dict[str, Any]:
    return {
        "nodes": len(placed.nodes),
        "fallbacks": dict(sorted(Counter(node.operator for node in placed.fallbacks).items())),
        "partitions": placed.partitions,
    }
