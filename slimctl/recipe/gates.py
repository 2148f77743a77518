"""Bounds on a result, judged against the original model and the last accepted version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slimctl.core.errors import GateFailedError
from slimctl.recipe.schema import (
    AccuracyGate,
    Gates,
    LatencyGate,
    MemoryGate,
    PlacementGate,
    SizeGate,
    SqnrGate,
    VerifyGate,
)

if TYPE_CHECKING:
    from slimctl.evaluate.benchmark import Verdict
    from slimctl.evaluate.verification import Verification

_DIGITS = 9
"""0.98 - 0.97 is 0.010000000000000009 in floating point; a bound of 0.01 means to allow it."""


@dataclass(frozen=True)
class Evidence:
    """What was measured; None where nothing was.

    Attributes:
        size: Bytes of the result's files.
        original_size: Of the original's.
        sqnr_db: Distance of the worst output; None without data or without a float output.
        metric: Name of the metric.
        metric_original: Its value for the original.
        metric_result: Its value for the result.
        higher_is_better: Which direction of the metric is an improvement.
        latency: Milliseconds by percentile of the original and of the result.
        speedup: What these say about the gate's bound.
        memory: Bytes that a session of the original and one of the result add at most.
        fallbacks: What does not run on the target's provider.
        outputs_db: SQNR of each output of floats; None when outputs were not compared.
        verification: What was found node by node on a few samples.
        last: The last accepted version, measured in the same way; None when there is none.
    """

    size: int
    original_size: int
    sqnr_db: float | None = None
    metric: str | None = None
    metric_original: float | None = None
    metric_result: float | None = None
    higher_is_better: bool = True
    latency: tuple[dict[str, Any], dict[str, Any]] | None = None
    speedup: Verdict | None = None
    memory: tuple[int | None, ...] | None = None
    fallbacks: int | None = None
    outputs_db: Mapping[str, float] | None = None
    verification: Verification | None = None
    last: Last | None = None

    @property
    def size_ratio(self) -> float:
        """Size as a share of the original's."""
        return self.size / self.original_size


@dataclass(frozen=True)
class Last:
    """The last accepted version; None where nothing was measured.

    Attributes:
        reference: How it is called, such as ``name@3``.
        size: Bytes of its files.
        sqnr_db: As in :class:`Evidence`.
        metric: Value of the metric.
        speedup: What the result's time beside its own says about the gate's bound.
        memory: Bytes that a session adds at most.
        fallbacks: As in :class:`Evidence`.
    """

    reference: str
    size: int
    sqnr_db: float | None = None
    metric: float | None = None
    speedup: Verdict | None = None
    memory: int | None = None
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
        yield from _accuracy(gates.accuracy, evidence)
    if gates.sqnr is not None:
        yield from _sqnr(gates.sqnr, evidence)
    if gates.size is not None:
        yield from _size(gates.size, evidence)
    if gates.latency is not None:
        yield from _latency(gates.latency, evidence)
    if gates.memory is not None:
        yield from _memory(gates.memory, evidence)
    if gates.placement is not None:
        yield from _placement(gates.placement, evidence)
    if gates.verify is not None:
        yield from _verify(gates.verify, evidence)


def _accuracy(gate: AccuracyGate, evidence: Evidence) -> Iterator[GateResult]:
    if gate.max_drop is not None:
        before = evidence.metric_original
        yield _metric_drop("accuracy", gate.max_drop, before, evidence)
    if gate.max_drop_from_last is not None:
        name, bound, last = "accuracy.last", gate.max_drop_from_last, evidence.last
        if last is None:
            yield _no_version(name, bound)
        else:
            found = _metric_drop(name, bound, last.metric, evidence)
            yield replace(found, message=f"against {last.reference}: {found.message}")


def _metric_drop(gate: str, bound: float, before: float | None, evidence: Evidence) -> GateResult:
    after = evidence.metric_result
    if before is None or after is None:
        return _unmeasured(gate, bound, "no metric was measured")
    loss = before - after if evidence.higher_is_better else after - before
    drop = round(loss, _DIGITS)
    facts = f"{evidence.metric} went from {before:.4f} to {after:.4f}"
    return _at_most(gate, drop, bound, f"{facts}, a drop of {drop:.4f}")


def _sqnr(gate: SqnrGate, evidence: Evidence) -> Iterator[GateResult]:
    found, last = evidence.sqnr_db, evidence.last
    if gate.min_db is not None:
        if found is None:
            yield _unmeasured("sqnr", gate.min_db, _NO_FLOATS)
        else:
            yield _at_least("sqnr", found, gate.min_db, f"SQNR {found:.2f} dB", unit=" dB")
    if gate.max_loss_from_last_db is not None:
        name, bound = "sqnr.last", gate.max_loss_from_last_db
        if last is None:
            yield _no_version(name, bound)
        elif found is None or last.sqnr_db is None:
            yield _unmeasured(name, bound, _NO_FLOATS)
        else:
            loss = round(last.sqnr_db - found, _DIGITS)
            facts = f"SQNR {found:.2f} dB, {last.sqnr_db:.2f} dB in {last.reference}"
            yield _at_most(name, loss, bound, facts)


_NO_FLOATS = "the model has no output of floats"


def _size(gate: SizeGate, evidence: Evidence) -> Iterator[GateResult]:
    if gate.max_ratio is not None:
        ratio = evidence.size_ratio
        yield _at_most("size", ratio, gate.max_ratio, f"{ratio:.4f} of the original's size")
    if gate.max_ratio_to_last is not None:
        name, bound, last = "size.last", gate.max_ratio_to_last, evidence.last
        if last is None:
            yield _no_version(name, bound)
        else:
            ratio = evidence.size / last.size
            yield _at_most(name, ratio, bound, f"{ratio:.4f} of the size of {last.reference}")


def _latency(gate: LatencyGate, evidence: Evidence) -> Iterator[GateResult]:
    if gate.min_speedup is not None:
        yield _speedup("latency", gate.min_speedup, gate, evidence.speedup, "the original")
    if gate.min_speedup_over_last is not None:
        name, bound, last = "latency.last", gate.min_speedup_over_last, evidence.last
        if last is None:
            yield replace(_no_version(name, bound), repeatable=False)
        else:
            yield _speedup(name, bound, gate, last.speedup, last.reference)


def _speedup(
    name: str, bound: float, gate: LatencyGate, found: Verdict | None, than: str
) -> GateResult:
    if found is None:
        return _unmeasured(name, bound, "no input fits the model", stable=False)
    ratio = found.ratio
    facts = (
        f"{gate.percentile} is {ratio.value:.2f}x as fast as {than} "
        f"({ratio.low:.2f} to {ratio.high:.2f})"
    )
    result = _at_least(name, ratio.value, bound, facts, unit="x", repeatable=False)
    if found.decided:
        return result
    return replace(result, message=f"{result.message}; within noise: {found.reason}")


def _memory(gate: MemoryGate, evidence: Evidence) -> Iterator[GateResult]:
    before, after = evidence.memory or (None, None)
    if gate.max_ratio is not None:
        yield _memory_ratio("memory", gate.max_ratio, before, after, "the original")
    if gate.max_ratio_to_last is not None:
        name, bound, last = "memory.last", gate.max_ratio_to_last, evidence.last
        if last is None:
            yield replace(_no_version(name, bound), repeatable=False)
        else:
            yield _memory_ratio(name, bound, last.memory, after, last.reference)


def _memory_ratio(
    name: str, bound: float, before: int | None, after: int | None, than: str
) -> GateResult:
    if not before or after is None:
        why = "the memory of a session cannot be measured here"
        return _unmeasured(name, bound, why, stable=False)
    ratio = after / before
    facts = f"{after / _MB:.1f} MB at most, {ratio:.3f} of {than}'s {before / _MB:.1f} MB"
    return replace(_at_most(name, ratio, bound, facts), repeatable=False)


_MB = 1e6


def _placement(gate: PlacementGate, evidence: Evidence) -> Iterator[GateResult]:
    found, last = evidence.fallbacks, evidence.last
    if gate.max_fallback_nodes is not None:
        bound = gate.max_fallback_nodes
        if found is None:
            yield _unmeasured("placement", bound, _NOT_PLACED)
        else:
            message = f"{found} nodes, inputs or outputs fall back; at most {bound} allowed"
            yield GateResult("placement", bound, found, found <= bound, message)
    if gate.max_more_than_last is not None:
        name, bound = "placement.last", gate.max_more_than_last
        if last is None:
            yield _no_version(name, bound)
        elif found is None or last.fallbacks is None:
            yield _unmeasured(name, bound, _NOT_PLACED)
        else:
            more = found - last.fallbacks
            message = (
                f"{found} nodes, inputs or outputs fall back, {last.fallbacks} in "
                f"{last.reference}; at most {bound} more allowed"
            )
            yield GateResult(name, bound, more, more <= bound, message)


_NOT_PLACED = "placement was not checked"


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
        before = evidence.metric_original
        yield _metric_drop("verify.max_metric_drop", gate.max_metric_drop, before, evidence)


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


def _no_version(gate: str, bound: float) -> GateResult:
    return GateResult(gate, bound, None, True, "there is no accepted version to compare with yet")


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
