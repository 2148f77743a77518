"""Bounds on a result, judged against the original model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slimctl.core.errors import GateFailedError
from slimctl.recipe.schema import (
    AccuracyGate,
    Gates,
    LatencyGate,
    PlacementGate,
    SizeGate,
    SqnrGate,
    VerifyGate,
)

if TYPE_CHECKING:
    from slimctl.evaluate.verification import Verification

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
        outputs_db: SQNR of each output of floats; None when outputs were not compared.
        verification: What was found node by node on a few samples.
    """

    size_ratio: float
    sqnr_db: float | None = None
    metric: str | None = None
    metric_original: float | None = None
    metric_result: float | None = None
    higher_is_better: bool = True
    latency: tuple[dict[str, Any], dict[str, Any]] | None = None
    fallbacks: int | None = None
    outputs_db: Mapping[str, float] | None = None
    verification: Verification | None = None


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
    if gates.verify is not None:
        yield from _verify(gates.verify, evidence)


def _accuracy(gate: AccuracyGate, evidence: Evidence) -> GateResult:
    return _metric_drop("accuracy", gate.max_drop, evidence)


def _metric_drop(gate: str, bound: float, evidence: Evidence) -> GateResult:
    before, after = evidence.metric_original, evidence.metric_result
    if before is None or after is None:
        return _unmeasured(gate, bound, "no metric was measured")
    loss = before - after if evidence.higher_is_better else after - before
    drop = round(loss, _DIGITS)
    facts = f"{evidence.metric} went from {before:.4f} to {after:.4f}"
    return _at_most(gate, drop, bound, f"{facts}, a drop of {drop:.4f}")


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


def _verify(gate: VerifyGate, evidence: Evidence) -> Iterator[GateResult]:
    """One verdict for each bound, named as the recipe names it."""
    yield _faults("verify.max_faults", gate.max_faults, evidence.verification)
    if gate.max_step_difference is not None:
        # Products saturate on some processors and not on others.
        steps = _steps("verify.max_step_difference", gate.max_step_difference, evidence)
        yield replace(steps, repeatable=False)
    if gate.min_sqnr is not None:
        yield _worst_output("verify.min_sqnr", gate.min_sqnr, evidence.outputs_db)
    if gate.max_metric_drop is not None:
        yield _metric_drop("verify.max_metric_drop", gate.max_metric_drop, evidence)


def _faults(gate: str, bound: int, verification: Verification | None) -> GateResult:
    if verification is None:
        return _unmeasured(gate, bound, _NOT_VERIFIED)
    wrong, faults = len(verification.wrong_nodes), verification.faults
    first = f", first '{faults[0].node}': {faults[0].reason}" if faults else ""
    message = f"nodes that are wrong: {wrong}{first}; at most {bound} allowed"
    return GateResult(gate, bound, wrong, wrong <= bound, message)


def _steps(gate: str, bound: int, evidence: Evidence) -> GateResult:
    if evidence.verification is None:
        return _unmeasured(gate, bound, _NOT_VERIFIED)
    node = evidence.verification.farthest
    if node is None:
        return _unmeasured(gate, bound, "no node of the result has quantized outputs")
    place = f" at node '{node.node}' ({node.op_type})" if node.steps else ""
    message = f"the runtimes differ by {node.steps} steps{place}; at most {bound} allowed"
    return GateResult(gate, bound, node.steps, node.steps <= bound, message)


_NOT_VERIFIED = "the result was not compared with the original node by node"


def _worst_output(gate: str, bound: float, outputs: Mapping[str, float] | None) -> GateResult:
    if not outputs:
        return _unmeasured(gate, bound, "no output of floats was compared")
    worst = min(outputs, key=lambda name: outputs[name])
    facts = f"SQNR {outputs[worst]:.2f} dB at output '{worst}'"
    return _at_least(gate, outputs[worst], bound, facts, unit=" dB")


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
