"""Writes down what a run did: its manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slimctl.data.sources import DataSource
from slimctl.evaluate.verification import Verification
from slimctl.pipeline import facts
from slimctl.pipeline.manifest import GateFacts, Manifest, Results, installed_versions, json_types
from slimctl.recipe.gates import Evidence, GateResult
from slimctl.recipe.measure import Bench, Measurements


def manifest_of(
    bench: Bench,
    found: Measurements,
    proof: Evidence,
    gates: Sequence[GateResult],
    *,
    seconds: Mapping[str, float],
    notes: Sequence[str],
) -> Manifest:
    """The manifest of a result, without its files.

    Args:
        bench: What was worked on.
        found: What was measured.
        proof: The same as gates judged it.
        gates: Their verdicts.
        seconds: Durations by what took them.
        notes: About this run, not about its result.
    """
    job, done = bench.job, found.done
    used = any(step.requires_data() or step.uses_data for step in job.steps)
    calibration = bench.calibration if used else None
    training = bench.training if any(step.requires_training() for step in job.steps) else None
    run = facts.this_run(job.threads).model_copy(
        update={
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
            "notes": tuple(notes),
            "latency": _latency(proof, found),
            "nodes": None if found.verification is None else _nodes(found.verification),
            "gates": _gates(gates, repeatable=False),
        }
    )
    return Manifest(
        name=job.name,
        versions=installed_versions(),
        source=facts.source_facts(bench.model, facts.model_files(bench.path)),
        model=facts.model_facts(done.model, facts.total_bytes(found.files)),
        target=job.target.name,
        seed=job.seed,
        steps=tuple(facts.step_facts(record) for record in done.records),
        calibration=_description(calibration),
        training=_description(training),
        evaluation=_description(bench.evaluation),
        uncalibrated=calibration is not None and calibration.uncalibrated,
        results=_results(found, proof, gates),
        run=run,
    )


def _results(found: Measurements, proof: Evidence, gates: Sequence[GateResult]) -> Results:
    comparison = found.comparison
    return Results(
        size_ratio=round(proof.size_ratio, 6),
        sqnr_db=facts.decibel(proof.sqnr_db),
        sqnr_samples=len(found.done.probes.samples) if comparison is None else comparison.samples,
        metric=proof.metric,
        metric_original=facts.metric_value(proof.metric_original),
        metric_result=facts.metric_value(proof.metric_result),
        gates=_gates(gates, repeatable=True),
    )


def _gates(gates: Sequence[GateResult], *, repeatable: bool) -> tuple[GateFacts, ...]:
    return tuple(
        GateFacts(
            gate=result.gate,
            bound=result.bound,
            found=None if result.found is None else round(result.found, 6),
            passed=result.passed,
            message=result.message,
        )
        for result in gates
        if result.repeatable is repeatable
    )


def _latency(proof: Evidence, found: Measurements) -> dict[str, Any] | None:
    if proof.latency is None or found.latency is None:
        return None
    sides = zip(("original", "result"), proof.latency, found.latency, strict=True)
    return {
        side: json_types(
            {**told, "quantiles_ms": [round(ms, _MS_DIGITS) for ms in measured.quantiles()]}
        )
        for side, told, measured in sides
    }


_MS_DIGITS = 4
"""A tenth of a microsecond, which no clock here resolves."""

_LAYER_FACTS = (
    *("node", "op_type", "tensor", "own_db", "best_db", "total_db"),
    *("mean_steps", "rms_steps", "expected_steps", "clipped"),
)


def _nodes(found: Verification) -> dict[str, Any]:
    """What the gate ``verify`` saw node by node, without values: a page draws it."""
    return {
        "samples": found.samples,
        "layers": [
            {key: _short(getattr(one, key)) for key in _LAYER_FACTS} for one in found.layers
        ],
        "faults": [
            {"node": one.node, "tensor": one.tensor, "reason": one.reason} for one in found.faults
        ],
    }


def _short(value: Any) -> Any:
    return round(float(value), _LAYER_DIGITS) if isinstance(value, float) else value


_LAYER_DIGITS = 6


def _description(source: DataSource | None) -> dict[str, Any] | None:
    """A data source for the manifest; of a path only the name, which is the same everywhere."""
    if source is None:
        return None
    described = source.describe()
    spelled = str(described["source"])
    name = Path(spelled).name if Path(spelled).exists() else spelled
    return {**json_types(described), "source": name}
