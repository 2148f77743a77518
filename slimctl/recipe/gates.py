"""Bounds on a result, judged against the original model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slimctl.core.errors import GateFailedError
from slimctl.recipe.schema import (
    AccuracyGate,
    Gates,
    LatencyGate,
    PlacementGate,
    SizeGate,
    SqnrGate,
)

_DIGITS = 9
"""0.98 - 0.97 is 0.010000000000000009 in floating point; a bound of 0.01 means to allow it."""


@dataclass(frozen=True)
class Evidence:
    """What was measured; None where nothing was.

    Attributes:
        size_ratio: Bytes of the result's files as a share of the original's.
        sqnr_db: Distance of the worst output; None without data or without a float output.
        metric: Name of the metric.
        metric_original: Its value for the original.
        metric_result: Its value for the result.
        higher_is_better: Which direction of the metric is an improvement.
        latency: Milliseconds by percentile of the original and of the result.
        fallbacks: What does not run on the target's provider.
    """

    size_ratio: float
    sqnr_db: float | None = None
    metric: str | None = None
    metric_original: float | None = None
    metric_result: float | None = None
    higher_is_better: bool = True
    latency: tuple[dict[str, Any], dict[str, Any]] | None = None
    fallbacks: int | None = None


@dataclass(frozen=True)
class GateResult:
    """One gate's verdict.

    Attributes:
        gate: Its name.
        bound: What was asked for.
        found: What was measured; None when it could not be.
        passed: Whether the bound holds.
        message: One sentence; for a broken bound it says by how much.
        repeatable: The same run again finds the same value.
    """

    gate: str
    bound: float
    found: float | None
    passed: bool
    message: str
    repeatable: bool = True


def judge(gates: Gates, evidence: Evidence) -> tuple[GateResult, ...]:
    """The verdict of every gate that is set, in a fixed order."""
    return tuple(_verdicts(gates, evidence))


def _verdicts(gates: Gates, evidence: Evidence) -> Iterator[GateResult]:
    if gates.accuracy is not None:
        yield _accuracy(gates.accuracy, evidence)
    if gates.sqnr is not None:
        yield _sqnr(gates.sqnr, evidence)
    if gates.size is not None:
        yield _size(gates.size, evidence)
    if gates.latency is not None:
        yield _latency(gates.latency, evidence)
    if gates.placement is not None:
        yield _placement(gates.placement, evidence)


def _accuracy(gate: AccuracyGate, evidence: Evidence) -> GateResult:
    before, after = evidence.metric_original, evidence.metric_result
    if before is None or after is None:
        return _unmeasured("accuracy", gate.max_drop, "no metric was measured")
    loss = before - after if evidence.higher_is_better else after - before
    drop = round(loss, _DIGITS)
    facts = f"{evidence.metric} went from {before:.4f} to {after:.4f}"
    return _at_most("accuracy", drop, gate.max_drop, f"{facts}, a drop of {drop:.4f}")


def _sqnr(gate: SqnrGate, evidence: Evidence) -> GateResult:
    if evidence.sqnr_db is None:
        return _unmeasured("sqnr", gate.min_db, "the model has no output of floats")
    facts = f"SQNR {evidence.sqnr_db:.2f} dB"
    return _at_least("sqnr", evidence.sqnr_db, gate.min_db, facts, unit=" dB")


def _size(gate: SizeGate, evidence: Evidence) -> GateResult:
    ratio = evidence.size_ratio
    return _at_most("size", ratio, gate.max_ratio, f"{ratio:.4f} of the original's size")


def _latency(gate: LatencyGate, evidence: Evidence) -> GateResult:
    if evidence.latency is None:
        return _unmeasured("latency", gate.min_speedup, "no input fits the model", stable=False)
    before, after = (float(side[f"{gate.percentile}_ms"]) for side in evidence.latency)
    facts = f"{gate.percentile} went from {before:.3f} to {after:.3f} ms, {before / after:.2f}x"
    return _at_least("latency", before / after, gate.min_speedup, facts, unit="x", repeatable=False)


def _placement(gate: PlacementGate, evidence: Evidence) -> GateResult:
    if evidence.fallbacks is None:
        return _unmeasured("placement", gate.max_fallback_nodes, "placement was not checked")
    found, bound = evidence.fallbacks, gate.max_fallback_nodes
    message = f"{found} nodes, inputs or outputs fall back; at most {bound} allowed"
    return GateResult("placement", bound, found, found <= bound, message)


def _at_most(gate: str, found: float, bound: float, facts: str) -> GateResult:
    passed = found <= bound
    excess = "" if passed else f": {found - bound:.4f} too much"
    return GateResult(gate, bound, found, passed, f"{facts}; at most {bound:g} allowed{excess}")


def _at_least(
    gate: str, found: float, bound: float, facts: str, *, unit: str, repeatable: bool = True
) -> GateResult:
    passed = found >= bound
    lack = "" if passed else f": {bound - found:.2f}{unit} too little"
    message = f"{facts}; at least {bound:g}{unit} wanted{lack}"
    return GateResult(gate, bound, found, passed, message, repeatable)


def _unmeasured(gate: str, bound: float, why: str, *, stable: bool = True) -> GateResult:
    return GateResult(gate, bound, None, False, f"cannot be judged: {why}", stable)


def gate_error(failed: Sequence[GateResult], where: str) -> GateFailedError:
    """The error of some broken gates.

    Args:
        failed: At least one.
        where: What became of the result.
    """
    listed = "; ".join(f"{result.gate}: {result.message}" for result in failed)
    count = "1 gate failed" if len(failed) == 1 else f"{len(failed)} gates failed"
    return GateFailedError(
        f"{count}: {listed}",
        where=where,
        fix="change the steps or their options, or loosen the gate on purpose",
    )
