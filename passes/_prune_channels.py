"""Channels and heads: rank, choose, remove, refit, as many times as there are steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Context, PassReport, ReportTable, Skipped
from slimctl.core.errors import OptionError, PassFailedError
from slimctl.graph.channels import Channels, Group, analyze, group_units, remove_channels
from slimctl.graph.edit import clone_model
from slimctl.graph.select import Selection
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._importance import importance
from slimctl.passes._prune_goal import (
    MEASURED_TRIES,
    TRIES,
    Costs,
    Goal,
    Latency,
    cost_of,
    example_of,
    joined,
    least_share,
    most_share,
)
from slimctl.passes._prune_kept import all_kept, attention_units, considered_share, kept_after
from slimctl.passes._prune_options import goal_of
from slimctl.passes._prune_report import cost_note, refit_note, rounded, time_note
from slimctl.passes._prune_select import Candidate, candidate, ratio_of, select
from slimctl.passes._prune_sensitivity import scaled_by_sensitivity
from slimctl.passes._reconstruct import Kept, Reconstruction, reconstruct

if TYPE_CHECKING:
    from slimctl.passes.prune import Prune

_NAME = "prune"
_NAMES = 3
_COLUMNS = ("layers", ">channels", "why this many")


@dataclass
class _Line:
    """One group over all steps.

    Attributes:
        layers: Names of the layers that compute it.
        total: Channels at first.
        kept: Channels now.
        why: Why not fewer.
    """

    layers: tuple[str, ...]
    total: int
    kept: int
    why: str = ""


_Key: TypeAlias = tuple[tuple[str, ...], int]
"""A group from step to step: its layers, and its number among the groups of the same layers."""


def _keys(groups: Sequence[Group]) -> list[_Key]:
    alike: Counter[tuple[str, ...]] = Counter()
    found: list[_Key] = []
    for group in groups:
        names = tuple(node.name or "" for node in group.layers)
        found.append((names, alike[names]))
        alike[names] += 1
    return found


@dataclass
class ChannelPruning:
    """A model on its way."""

    options: Prune
    model: ir.Model
    context: Context
    original: ir.Model = field(init=False)
    kept: dict[str, Kept] = field(init=False)
    lines: dict[_Key, _Line] = field(default_factory=dict)
    blocked: dict[str, str] = field(default_factory=dict)
    considered: float = 0.0
    removed: int = 0
    total: int = 0
    full: float = 0.0
    metric: float | None = None
    refitted: Reconstruction | None = None

    def __post_init__(self) -> None:
        self.original = clone_model(self.model)
        self.kept = all_kept(self.model)

    # one step

    def step(self, progress: float) -> None:
        """Removes what brings the model this far, 0 to 1, on the way to its goal."""
        channels, candidates = self._candidates(progress)
        chosen = self._chosen(channels, candidates, progress)
        gone = joined(chosen)
        keys = _keys([entry.group for entry in candidates])
        for index, (key, entry) in enumerate(zip(keys, candidates, strict=True)):
            self._note_line(key, entry, len(chosen.get(index, ())))
        if not gone.size:
            return
        self.kept = kept_after(channels, gone, self.kept)
        self.removed += gone.size
        remove_channels(self.model, channels, gone, made_by=_NAME)
        self.refitted = self._refit(self.model, self.kept) or self.refitted

    def _candidates(self, progress: float) -> tuple[Channels, list[Candidate]]:
        options, first = self.options, not self.lines
        channels = analyze(self.model, whole_blocks=options.structure == "head")
        groups = group_units(channels)
        if options.structure == "head":
            whole = set(attention_units(channels).tolist())
            groups = [g for g in groups if whole.intersection(g.units.tolist())]
        selection = Selection(options.include, options.exclude)
        usable = [g for g in groups if self._usable(g, selection, first=first)]
        if first:
            self._check_found(groups, usable, selection)
            self.considered = considered_share(self.model, channels, usable)
            self.total = sum(len(group.units) for group in usable)
        heads = options.structure == "head"
        kind = options.importance or ("activation" if self.context.has_data else "l1")
        ranks = importance(kind, self.model, channels, usable, self.context)
        goal = self.goal
        saved = None if goal is None else Costs(self.model, channels, goal[0]).saved_by_each()
        candidates = [
            candidate(
                group,
                ranks,
                worth=1.0 if saved is None else max(float(saved[group.free].mean()), 1.0),
                ratio=self._ratio_now(key, group, progress),
                round_to=1 if heads else options.round_to or 1,
                min_channels=1 if heads else options.min_channels,
            )
            for key, group in zip(_keys(usable), usable, strict=True)
        ]
        if kind == "activation" and options.scope == "global":
            candidates = scaled_by_sensitivity(self.model, channels, candidates, self.context)
        return channels, candidates

    def _at_first(self, key: _Key, group: Group) -> int:
        """How many units a group had before the first step."""
        return self.lines[key].total if key in self.lines else len(group.units)

    def _ratio_now(self, key: _Key, group: Group, progress: float) -> float | None:
        """The share of what is left of a group that brings it this far to its own ratio."""
        ratio = ratio_of(self.options.ratio, group.layers)
        if ratio is None:
            return None
        stay = self._at_first(key, group) * (1.0 - ratio * progress)
        return max(1.0 - stay / len(group.units), 0.0)

    def _usable(self, group: Group, selection: Selection, *, first: bool) -> bool:
        if not group.layers:
            return False
        excluded = [n for n in group.layers if selection.reason_against(n) is not None]
        if first:
            for node in group.layers:
                if excluded:
                    self.blocked[node.name or ""] = f"'{excluded[0].name}' is excluded"
                elif not group.free.size:
                    block = next(iter(group.blocked.values()))
                    self.blocked[node.name or ""] = f"at '{block.node}': {block.reason}"
        return not excluded and group.free.size > 0

    def _check_found(
        self, groups: Sequence[Group], usable: Sequence[Group], selection: Selection
    ) -> None:
        if usable:
            return
        unused = selection.unused()
        if unused:
            fix = f"the pattern '{unused[0]}' matches no layer; see 'slimctl inspect' for names"
        elif self.blocked:
            node, reason = next(iter(self.blocked.items()))
            fix = f"{len(self.blocked)} layers must stay; the first, '{node}': {reason}"
        elif self.options.structure == "head" and not groups:
            fix = (
                "the model has no attention whose heads can be told apart; use --structure channel"
            )
        else:
            fix = "the model has no layers that compute channels for one another"
        raise PassFailedError(_NAME, "Nothing in this model can be pruned", fix=fix)

    # how much

    def _chosen(
        self, channels: Channels, candidates: Sequence[Candidate], progress: float
    ) -> dict[int, NDArray[np.int64]]:
        options = self.options
        if self.goal is None:
            keys = _keys([entry.group for entry in candidates])
            rest = [(k, e.group) for k, e in zip(keys, candidates, strict=True) if e.ratio is None]
            now = sum(len(group.units) for _, group in rest)
            at_first = sum(self._at_first(key, group) for key, group in rest)
            todo = progress * (options.sparsity or 0.0) * at_first - (at_first - now)
            return select(candidates, max(todo / max(now, 1), 0.0), options.scope)
        goal, wanted = self.goal

        def choose(share: float) -> dict[int, NDArray[np.int64]]:
            return select(candidates, share, options.scope)

        if goal == "metric":
            share: float | None = most_share(
                choose, self._metric_drop, progress * wanted, MEASURED_TRIES
            )
            return choose(share or 0.0)
        cost, full, tries = self._cost(channels, goal)
        reach = full * (1.0 - progress * (1.0 - wanted))
        share = least_share(choose, cost, reach, tries)
        if share is None:
            left = cost(joined(choose(1.0))) / full
            raise OptionError(
                f"--target-{goal}",
                f"Out of reach: without all that can go, {left:.0%} is left",
                fix="ask for less, lower --min-channels or --round-to, or leave fewer layers out",
            )
        return choose(share)

    def _cost(
        self, channels: Channels, goal: Goal
    ) -> tuple[Callable[[NDArray[np.int64]], float], float, int]:
        """What is left without some units, all of it, and how often it may be asked for."""
        if goal == "latency":
            latency = Latency(self.original, example_of(self.context))
            return lambda gone: latency(self._without(gone)[0]), 1.0, MEASURED_TRIES
        costs = Costs(self.model, channels, goal)
        self.full = self.full or costs.total
        if not self.full:
            raise OptionError(
                f"--target-{goal}",
                "What this model costs cannot be told: its shapes depend on the data",
                fix="give --sparsity or --target-size",
            )
        return costs.without, self.full, TRIES

    def _metric_drop(self, gone: NDArray[np.int64]) -> float:
        """What the metric loses without some units, refitted as it will be."""
        if self.metric is None:
            self.metric = self._measured(self.original)
        model, kept = self._without(gone)
        self._refit(model, kept)
        return self.metric - self._measured(model)

    def _measured(self, model: ir.Model) -> float:
        found = self.context.metric(model)
        assert found is not None, "checked before anything was done"
        return found

    def _without(self, gone: NDArray[np.int64]) -> tuple[ir.Model, dict[str, Kept]]:
        """A clone without some units, and what is left of its layers."""
        clone = clone_model(self.model)
        infer_shapes(clone)
        channels = analyze(clone, whole_blocks=self.options.structure == "head")
        kept = kept_after(channels, gone, self.kept)
        if gone.size:
            remove_channels(clone, channels, gone, made_by=_NAME)
        return clone, kept

    def _refit(self, model: ir.Model, kept: Mapping[str, Kept]) -> Reconstruction | None:
        wanted = self.options.reconstruct
        if self.context.has_data if wanted is None else wanted:
            return reconstruct(model, self.original, kept, self.context)
        return None

    @property
    def goal(self) -> tuple[Goal, float] | None:
        """What to count and how much of it may be left, or lost; None when channels count."""
        return goal_of(self.options)

    # what happened

    def _note_line(self, key: _Key, entry: Candidate, gone: int) -> None:
        size = len(entry.group.units)
        line = self.lines.setdefault(key, _Line(key[0], size, size))
        line.kept = size - gone
        line.why = _why(entry, gone)

    def report(self) -> PassReport:
        """The summary."""
        before, after = cost_of(self.original), cost_of(self.model)
        what = self.options.structure
        lines = list(self.lines.values())
        layers = {name for line in lines for name in line.layers if line.kept < line.total}
        notes = [
            f"{self.removed} of {self.total} {what}s removed, from "
            f"{sum(line.kept < line.total for line in lines)} of {len(lines)} groups of layers",
            cost_note(before, after),
            f"{self.considered:.0%} of the weights of Conv, Gemm and MatMul lie in these groups",
        ]
        skipped = [Skipped(name, reason) for name, reason in self.blocked.items()]
        if self.refitted is not None:
            notes.append(refit_note(self.refitted))
            skipped.extend(self.refitted.skipped)
        rows = [
            (_listed(line.layers), f"{line.kept} of {line.total}", line.why)
            for line in sorted(lines, key=lambda line: line.kept / line.total)
        ]
        return PassReport(
            changed={f"{what}s of {len(layers)} layers": self.removed},
            skipped=skipped,
            notes=notes,
            timings=time_note(self.original, self.model, self.context),
            tables=[ReportTable(f"Groups of layers that share {what}s", _COLUMNS, rows)],
            facts={
                "parameters": [before.parameters, after.parameters],
                "macs": [before.macs, after.macs],
                "considered": round(self.considered, 4),
                "groups": [
                    {"layers": line.layers, "kept": line.kept, "total": line.total, "why": line.why}
                    for line in lines
                ],
                "explained": {} if self.refitted is None else rounded(self.refitted.explained),
            },
        )


def _listed(layers: Sequence[str]) -> str:
    """The first names of a group."""
    rest = f" and {len(layers) - _NAMES} more" if len(layers) > _NAMES else ""
    return ", ".join(layers[:_NAMES]) + rest


def _why(entry: Candidate, gone: int) -> str:
    if gone == entry.most:
        return "as few as allowed"
    if entry.ratio is not None:
        return "--ratio"
    return "importance" if gone else "more important than others"
