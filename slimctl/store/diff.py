"""Two results side by side: what went in, what came out, and what each step did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from slimctl.store.changes import Change, changes_between, paired_steps, things_changed
from slimctl.store.summary import gates_of


class Measured(NamedTuple):
    """One number of both results.

    Attributes:
        what: Its name.
        before: Of the first; None when it was not measured.
        after: Of the second; None when it was not measured.
    """

    what: str
    before: Any
    after: Any


class StepEffect(NamedTuple):
    """What one step did.

    Attributes:
        position: In the chain, from 0.
        weight_bytes: Bytes of all weights afterwards.
        sqnr_db: Distance to the original afterwards.
        metric: The metric afterwards.
        metric_change: By how much this step alone changed it.
    """

    position: int
    weight_bytes: int
    sqnr_db: float | None
    metric: float | None
    metric_change: float | None


class StepRow(NamedTuple):
    """A step of both results; None where one has no such step.

    Attributes:
        name: Of the pass.
        before: What it did in the first.
        after: What it did in the second.
    """

    name: str
    before: StepEffect | None
    after: StepEffect | None


class GateRow(NamedTuple):
    """A gate of both results; None where one has no such gate.

    Attributes:
        gate: Its name.
        before: Verdict of the first.
        after: Verdict of the second.
    """

    gate: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


@dataclass(frozen=True)
class Diff:
    """Two results side by side.

    Attributes:
        changes: Values that went in and differ.
        things: What was changed; a difference has one sure cause only when this is one.
        measured: Sizes, distances, metrics, times.
        steps: What each step did.
        gates: Verdicts.
        same_model: Both results are the same bytes.
    """

    changes: tuple[Change, ...]
    things: tuple[str, ...]
    measured: tuple[Measured, ...]
    steps: tuple[StepRow, ...]
    gates: tuple[GateRow, ...]
    same_model: bool


def diff_manifests(before: Mapping[str, Any], after: Mapping[str, Any]) -> Diff:
    """Compares two results by their manifests."""
    changes = changes_between(before, after)
    return Diff(
        changes=tuple(changes),
        things=tuple(things_changed(changes)),
        measured=tuple(_measured(before, after)),
        steps=tuple(_steps(before, after)),
        gates=tuple(_gates(before, after)),
        same_model=_hashes(before) == _hashes(after),
    )


def _hashes(manifest: Mapping[str, Any]) -> list[str]:
    return [entry["sha256"] for entry in manifest["files"]]


def _measured(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Measured]:
    for key in ("size_bytes", "weight_bytes", "nodes"):
        yield Measured(key, before["model"][key], after["model"][key])
    for key in ("size_ratio", "sqnr_db"):
        yield Measured(key, before["results"][key], after["results"][key])
    yield from _metrics(before["results"], after["results"])
    yield from _latency(before["run"], after["run"])


def _metrics(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Measured]:
    """One row when both measured the same, else one for each metric."""
    for name in dict.fromkeys(side["metric"] for side in (before, after) if side["metric"]):
        first, second = (
            side["metric_result"] if side["metric"] == name else None for side in (before, after)
        )
        yield Measured(name, first, second)


def _latency(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Measured]:
    # Runs of different days cannot be compared; each run's own ratio to the original can.
    found = [_speedup(side["latency"]) for side in (before, after)]
    if found != [None, None]:
        yield Measured("speedup_p50", *found)


def _speedup(latency: Mapping[str, Any] | None) -> float | None:
    if latency is None:
        return None
    return float(round(latency["original"]["p50_ms"] / latency["result"]["p50_ms"], 3))


def _steps(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[StepRow]:
    for first, second in paired_steps(before["steps"], after["steps"]):
        name = before["steps"][first]["name"] if first is not None else None
        yield StepRow(
            name or after["steps"][second]["name"],
            None if first is None else _effect(before, first),
            None if second is None else _effect(after, second),
        )


def _effect(manifest: Mapping[str, Any], index: int) -> StepEffect:
    steps = manifest["steps"]
    metric = steps[index]["metric"]
    previous = steps[index - 1]["metric"] if index else manifest["results"]["metric_original"]
    change = None if metric is None or previous is None else round(metric - previous, 6)
    return StepEffect(index, steps[index]["weight_bytes"], steps[index]["sqnr_db"], metric, change)


def _gates(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[GateRow]:
    first, second = ({gate["gate"]: gate for gate in gates_of(side)} for side in (before, after))
    for name in dict.fromkeys((*first, *second)):
        yield GateRow(name, first.get(name), second.get(name))
