"""``slimctl target check``: what an execution provider takes of a model, and why not the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from slimctl.cli import words
from slimctl.cli.inspect_command import parse_dims
from slimctl.cli.options import Json, Model, TargetName, Verbose, optional
from slimctl.cli.output import Output
from slimctl.cli.table import Block, Facts, Table
from slimctl.core.errors import GateFailedError

if TYPE_CHECKING:
    from slimctl.core.target import Target
    from slimctl.targets.placement import PlacementReport, ProblemGroup

_EFFECTS = {"fallback": "falls back", "float": "in float", "advice": "advice"}
_FIRST_NAMES = 3


def check_model(
    model: Model,
    *,
    target: TargetName = "cpu",
    max_fallback: Annotated[
        int,
        typer.Option(
            "--max-fallback",
            metavar="N",
            min=0,
            help="Most nodes, inputs and outputs that may fall back; with more the exit code is 1.",
        ),
    ] = 0,
    dim: Annotated[
        list[str] | None,
        optional(
            "--dim",
            "NAME=N",
            "Check the model as if this open dimension, or nameless one as input[axis], had "
            "the size N; repeatable.",
        ),
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Say which nodes a target's provider takes, which rules others break, and what helps."""
    from slimctl.graph.load import load_model
    from slimctl.targets import load_target
    from slimctl.targets.check import check_placement

    profile = load_target(target)
    report = check_placement(load_model(model), profile, parse_dims(dim or []))
    Output(json=json).result(
        {"model": model, **report.to_dict()},
        list(_blocks(profile, report, everything=verbose)),
    )
    if report.violations > max_fallback:
        raise GateFailedError(
            f"{report.violations} nodes, inputs or outputs do not run on {profile.provider}; "
            f"{max_fallback} may",
            where=str(model),
            fix=_first_fix(report),
        )


def _first_fix(report: PlacementReport) -> str:
    return report.groups()[0].problem.fix


def _blocks(target: Target, report: PlacementReport, *, everything: bool) -> Iterator[Block]:
    yield Facts(
        {
            "target": f"{target.name}: {target.title}",
            "provider": target.provider,
            "nodes": f"{len(report.nodes)}, and {report.folded} that are constant",
            "taken": str(len(report.nodes) - len(report.fallbacks)),
            "fall back": str(len(report.fallbacks)),
            "partitions": str(report.partitions),
            "transitions": f"{report.transitions} tensors go from one provider to another",
            "MACs taken": f"{words.percent(report.macs_share)} of those that are known",
        }
    )
    groups = report.groups()
    if groups:
        limit = len(report.nodes) if everything else _FIRST_NAMES
        yield Table(
            ("rule", "effect", ">nodes", "operators", "first", "found"),
            [_broken(group, limit) for group in groups],
            title="Rules that are broken",
        )
        yield Table(
            ("rule", "because", "what helps", "document"),
            [
                (
                    group.problem.rule,
                    group.problem.reason,
                    group.problem.fix,
                    group.problem.document,
                )
                for group in groups
            ],
            title="Why, and what helps",
        )
    else:
        yield "no rule of the profile is broken"


def _broken(group: ProblemGroup, limit: int) -> tuple[str, ...]:
    problem = group.problem
    count = str(len(group.nodes))
    return (
        problem.rule,
        _EFFECTS[problem.effect],
        count,
        words.first_of(group.operators, limit),
        words.first_of(group.nodes, limit),
        problem.found,
    )
