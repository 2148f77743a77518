"""Which options of pruning go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimctl.core.errors import OptionError
from slimctl.passes._prune_goal import Goal

if TYPE_CHECKING:
    from slimctl.passes.prune import Prune

SPARSE = ("2:4", "unstructured")
"""Structures that set weights to zero and leave the graph as it is."""

_COSTS = ("target_macs", "target_size", "target_latency", "max_metric_drop")


def goal_of(options: Prune) -> tuple[Goal, float] | None:
    """What to count and how much of it may be left, or lost; None when structures count."""
    goals: dict[Goal, float | None] = {
        "macs": options.target_macs,
        "size": options.target_size,
        "latency": options.target_latency,
        "metric": options.max_metric_drop,
    }
    return next(((goal, value) for goal, value in goals.items() if value is not None), None)


def check_options(options: Prune) -> None:
    """Checks what a structure cannot do.

    Raises:
        OptionError: An option has no meaning for the structure.
    """
    if options.structure in SPARSE:
        _check_sparse(options)


def _check_sparse(options: Prune) -> None:
    for name in _COSTS:
        if getattr(options, name) is not None:
            raise OptionError(
                "--" + name.replace("_", "-"),
                "It asks for a smaller graph, and zeros among the weights leave the graph as it is",
                fix="give --sparsity, or --structure channel, head or layer",
            )
    if options.structure == "2:4":
        _check_two_of_four(options)


def _check_two_of_four(options: Prune) -> None:
    if options.sparsity not in (None, 0.5):
        raise OptionError(
            "--sparsity",
            f"In 2:4, two of every four weights are zero: the share is 0.5, not {options.sparsity}",
            fix="leave --sparsity out, or use --structure unstructured",
        )
    if options.ratio:
        raise OptionError(
            "--ratio",
            "In 2:4, every layer has the same share of zeros",
            fix="choose layers with --include and --exclude, or use --structure unstructured",
        )
    if options.steps > 1:
        raise OptionError(
            "--steps", "In 2:4 there are no steps in between", fix="leave --steps out"
        )
