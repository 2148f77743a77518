"""Measures a result against its original, for gates and for the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from slimctl.core.contract import Progress
from slimctl.data.sources import DataSource, open_source
from slimctl.evaluate.accuracy import Score, accuracy
from slimctl.evaluate.benchmark import BenchResult, benchmark
from slimctl.evaluate.compare import Comparison, compare_models
from slimctl.evaluate.verification import FEW_SAMPLES, Verification, verify_model
from slimctl.graph.edit import interface
from slimctl.graph.load import load_model
from slimctl.pipeline.facts import model_files, total_bytes
from slimctl.pipeline.run import PipelineResult
from slimctl.recipe.gates import Evidence
from slimctl.recipe.resolve import Job
from slimctl.recipe.schema import DataSpec
from slimctl.runtime.session import Runtime
from slimctl.targets.check import check_placement

LATENCY_SECONDS = 20.0
"""Longest time that a latency gate measures for."""


@dataclass(frozen=True)
class Bench:
    """Everything that a run works on.

    Attributes:
        job: What is run.
        path: The original's file.
        model: The original.
        calibration: Data that steps may look at.
        evaluation: Data that the result is judged with.
        progress: Where to say how far the work is.
    """

    job: Job
    path: Path
    model: ir.Model
    calibration: DataSource | None
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
    calibration = _open(job.calibration, model, job.seed)
    return Bench(job, path, model, calibration, _open(job.evaluation, model, job.seed), progress)


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
    """

    done: PipelineResult
    files: tuple[Path, ...]
    comparison: Comparison | None
    latency: tuple[BenchResult, BenchResult] | None
    score: Score | None
    fallbacks: int | None = None
    verification: Verification | None = None


def measure(
    bench: Bench, done: PipelineResult, files: Sequence[Path], score: Score | None
) -> Measurements:
    """Compares a result with its original as far as the job asks for it."""
    return Measurements(
        done,
        tuple(files),
        _compare(bench, done, files[0]),
        _latency(bench, done, files[0]),
        score,
        _fallbacks(bench, done),
        _verification(bench, done, files[0]),
    )


def _fallbacks(bench: Bench, done: PipelineResult) -> int | None:
    if bench.job.gates.placement is None:
        return None
    return check_placement(done.model, bench.job.target).violations


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


def _latency(
    bench: Bench, done: PipelineResult, result: Path
) -> tuple[BenchResult, BenchResult] | None:
    gate = bench.job.gates.latency
    if gate is None or not done.probes.all:
        return None
    before, after = benchmark(
        [bench.path, result],
        done.probes.all[0],
        threads=gate.threads,
        max_seconds=LATENCY_SECONDS,
        memory=False,
        progress=bench.progress,
    )
    return before, after


def evidence(bench: Bench, found: Measurements) -> Evidence:
    """The measurements in the form that gates judge."""
    original = total_bytes(model_files(bench.path))
    latest = found.done.records[-1]
    comparison, latency, score = found.comparison, found.latency, found.score
    return Evidence(
        size_ratio=total_bytes(found.files) / original,
        sqnr_db=latest.sqnr_db if comparison is None else comparison.worst_sqnr_db,
        metric=score.metric if score else None,
        metric_original=found.done.metric,
        metric_result=latest.metric,
        higher_is_better=score is None or score.higher_is_better,
        latency=(latency[0].to_dict(), latency[1].to_dict()) if latency else None,
        fallbacks=found.fallbacks,
        outputs_db=None if comparison is None else _outputs_db(comparison),
        verification=found.verification,
    )


def _outputs_db(comparison: Comparison) -> dict[str, float]:
    return {out.name: out.sqnr_db for out in comparison.outputs if out.sqnr_db is not None}
