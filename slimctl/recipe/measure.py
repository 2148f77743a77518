"""Measures a result against its original, for gates and for the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import onnx_ir as ir

from slimctl.core.contract import Progress
from slimctl.data.sources import DataSource, open_source
from slimctl.evaluate.accuracy import Score, accuracy
from slimctl.evaluate.benchmark import (
    BenchResult,
    Verdict,
    benchmark,
    judge_speedup,
    peak_memory,
)
from slimctl.evaluate.compare import Comparison, compare_models
from slimctl.evaluate.verification import FEW_SAMPLES, Verification, verify_model
from slimctl.graph.edit import interface
from slimctl.graph.load import load_model
from slimctl.pipeline.facts import model_files, total_bytes
from slimctl.pipeline.run import PipelineResult
from slimctl.recipe.gates import Evidence, Last
from slimctl.recipe.resolve import Job
from slimctl.recipe.schema import DataSpec, Gates, LatencyGate
from slimctl.recipe.stored import last_accepted
from slimctl.runtime.session import Runtime
from slimctl.targets.check import check_placement

LATENCY_SECONDS = 20.0
LATENCY_ROUNDS = 30
LATENCY_ATTEMPTS = 2
"""A latency gate measures for so long, and twice as long again where that does not decide."""


@dataclass(frozen=True)
class Bench:
    """Everything that a run works on.

    Attributes:
        job: What is run.
        path: The original's file.
        model: The original.
        calibration: Data that steps may look at.
        training: Data that models learn from.
        evaluation: Data that the result is judged with.
        progress: Where to say how far the work is.
    """

    job: Job
    path: Path
    model: ir.Model
    calibration: DataSource | None
    training: DataSource | None
    evaluation: DataSource | None
    progress: Progress


def open_bench(job: Job, path: Path, progress: Progress) -> Bench:
    """Loads the model and opens the data, so that mistakes show before any work is done.

    Raises:
        ModelError: The model cannot be used.
        DataError: The data cannot be used, or do not fit the model.
    """
    model = load_model(path)
    if job.gates.verify is not None:
        Runtime(model)  # raises where it has no function for an operator
    specs = (job.calibration, job.training, job.evaluation)
    calibration, training, evaluation = (_open(spec, model, job.seed) for spec in specs)
    return Bench(job, path, model, calibration, training, evaluation, progress)


def _open(spec: DataSpec | None, model: ir.Model, seed: int) -> DataSource | None:
    if spec is None:
        return None
    return open_source(
        spec.source,
        interface=interface(model),
        samples=spec.samples,
        batch_size=spec.batch_size,
        preprocess=spec.preprocess,
        seed=seed,
        skip_bad=spec.skip_bad_samples,
    )


class Meter:
    """Measures the evaluation metric of one model file after the other."""

    def __init__(self, bench: Bench, source: DataSource, metric: str) -> None:
        self._bench = bench
        self._source = source
        self.metric = metric
        self.last: Score | None = None

    def __call__(self, path: Path) -> float:
        """The metric of a model file."""
        self.last = self.score(path)
        return self.last.value

    def score(self, model: ir.Model | Path) -> Score:
        """The metric of any model."""
        return accuracy(
            model,
            self._source,
            self.metric,
            reference=self._bench.path,
            threads=self._bench.job.threads,
            progress=self._bench.progress,
        )


def meter_for(bench: Bench) -> Meter | None:
    """What measures the metric that the job asks for, None when it asks for none."""
    spec = bench.job.evaluation
    if bench.evaluation is None or spec is None or spec.metric is None:
        return None
    return Meter(bench, bench.evaluation, spec.metric)


@dataclass(frozen=True)
class Measurements:
    """A result against its original.

    Attributes:
        done: What the pipeline made.
        files: The result's files, the model first.
        comparison: Distance of the outputs on the evaluation data; None when not compared.
        latency: Of the original and of the result, when a gate asks for it.
        score: The latest measurement of the metric.
        fallbacks: What does not run on the target's provider, when a gate asks for it.
        verification: What was found node by node, when a gate asks for it.
        speedup: What the latencies say about the gate's bound.
        memory: Bytes that sessions of the original and of the result add, when a gate asks for it.
        last: The last accepted version, when a gate asks for it and there is one.
    """

    done: PipelineResult
    files: tuple[Path, ...]
    comparison: Comparison | None
    latency: tuple[BenchResult, BenchResult] | None
    score: Score | None
    fallbacks: int | None = None
    verification: Verification | None = None
    speedup: Verdict | None = None
    memory: tuple[int | None, ...] | None = None
    last: Last | None = None


def measure(
    bench: Bench, done: PipelineResult, files: Sequence[Path], meter: Meter | None, folder: Path
) -> Measurements:
    """Compares a result with its original as far as the job asks for it.

    Args:
        bench: What it was made of.
        done: What the pipeline made.
        files: The result's files, the model first.
        meter: What has measured the metric.
        folder: For temporary files.
    """
    baseline = last_accepted(bench.job) if _wants_last(bench.job.gates) else None
    older = None if baseline is None else baseline.model(folder / "last")
    timed = _timed(bench, done, files[0], older)
    found = Measurements(
        done,
        tuple(files),
        _compare(bench, done, files[0]),
        None if timed is None else timed.latency,
        meter.last if meter else None,
        _fallbacks(bench, done.model),
        _verification(bench, done, files[0]),
        None if timed is None else timed.speedup,
        _memory(bench, done, [bench.path, files[0]]),
    )
    if baseline is None or older is None:
        return found
    comparison = _compare(bench, done, older)
    memory = _memory(bench, done, [older])
    last = Last(
        baseline.version.reference,
        total_bytes(model_files(older)),
        None if comparison is None else comparison.worst_sqnr_db,
        meter.score(older).value if meter else None,
        None if timed is None else timed.over_last,
        memory[0] if memory else None,
        _fallbacks(bench, load_model(older)),
    )
    return replace(found, last=last)


def _wants_last(gates: Gates) -> bool:
    """Whether a bound is against the last accepted version."""
    set_gates = (getattr(gates, name) for name in type(gates).model_fields)
    return any(
        "last" in name and value is not None
        for gate in set_gates
        if gate is not None
        for name, value in gate
    )


def _fallbacks(bench: Bench, model: ir.Model) -> int | None:
    if bench.job.gates.placement is None:
        return None
    return check_placement(model, bench.job.target).violations


def _verification(bench: Bench, done: PipelineResult, result: Path) -> Verification | None:
    spec = bench.job.evaluation
    if bench.job.gates.verify is None or spec is None or not _same_interface(bench, done):
        return None
    count = min(spec.samples or FEW_SAMPLES, FEW_SAMPLES)
    few = _open(spec.model_copy(update={"samples": count}), bench.model, bench.job.seed)
    assert few is not None, "it has a description"
    return verify_model(
        load_model(result),
        [batch.feeds for batch in few.batches()],
        reference=bench.model,
        threads=bench.job.threads,
        progress=bench.progress,
    )


def _same_interface(bench: Bench, done: PipelineResult) -> bool:
    return interface(done.model) == interface(bench.model)


def _compare(bench: Bench, done: PipelineResult, result: Path) -> Comparison | None:
    source = bench.evaluation or (bench.calibration if bench.job.gates.sqnr else None)
    if source is None or not _same_interface(bench, done):
        return None
    return compare_models(
        bench.path,
        result,
        source.batches(),
        threads=bench.job.threads,
        progress=bench.progress,
    )


class _Timed(NamedTuple):
    """Times and what they say.

    Attributes:
        latency: Of the original and of the result.
        speedup: Over the original; None where nothing bounds it.
        over_last: Over the last accepted version; None where nothing bounds it or there is none.
    """

    latency: tuple[BenchResult, BenchResult]
    speedup: Verdict | None
    over_last: Verdict | None

    @property
    def decided(self) -> bool:
        """Whether every bound can be judged."""
        return all(v is None or v.decided for v in (self.speedup, self.over_last))


def _timed(bench: Bench, done: PipelineResult, result: Path, last: Path | None) -> _Timed | None:
    gate = bench.job.gates.latency
    if gate is None or not done.probes.all:
        return None
    timed = None
    for attempt in range(LATENCY_ATTEMPTS):
        measured = benchmark(
            [bench.path, result, *([] if last is None else [last])],
            done.probes.all[0],
            threads=gate.threads,
            rounds=LATENCY_ROUNDS << attempt,
            max_seconds=LATENCY_SECONDS * 2**attempt,
            memory=False,
            progress=bench.progress,
        )
        timed = _judged(gate, measured)
        if timed.decided:
            break
    return timed


def _judged(gate: LatencyGate, measured: Sequence[BenchResult]) -> _Timed:
    before, after, *older = measured
    percentile = float(gate.percentile.removeprefix("p"))

    def judge(base: BenchResult, bound: float | None) -> Verdict | None:
        if bound is None:
            return None
        return judge_speedup(base, after, bound=bound, percentile=percentile)

    over_last = judge(older[0], gate.min_speedup_over_last) if older else None
    return _Timed((before, after), judge(before, gate.min_speedup), over_last)


def _memory(
    bench: Bench, done: PipelineResult, models: Sequence[Path]
) -> tuple[int | None, ...] | None:
    gate = bench.job.gates.memory
    if gate is None or not done.probes.all:
        return None
    feeds = done.probes.all[0]
    return tuple(peak_memory(model, feeds, threads=gate.threads) for model in models)


def evidence(bench: Bench, found: Measurements) -> Evidence:
    """The measurements in the form that gates judge."""
    latest = found.done.records[-1]
    comparison, latency, score = found.comparison, found.latency, found.score
    return Evidence(
        size=total_bytes(found.files),
        original_size=total_bytes(model_files(bench.path)),
        sqnr_db=latest.sqnr_db if comparison is None else comparison.worst_sqnr_db,
        metric=score.metric if score else None,
        metric_original=found.done.metric,
        metric_result=latest.metric,
        higher_is_better=score is None or score.higher_is_better,
        latency=(latency[0].to_dict(), latency[1].to_dict()) if latency else None,
        fallbacks=found.fallbacks,
        outputs_db=None if comparison is None else _outputs_db(comparison),
        verification=found.verification,
        speedup=found.speedup,
        memory=found.memory,
        last=found.last,
    )


def _outputs_db(comparison: Comparison) -> dict[str, float]:
    return {out.name: out.sqnr_db for out in comparison.outputs if out.sqnr_db is not None}
