"""Runs a job: a recipe from a file, or the few steps of one command. There is one path for both."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slimctl.core.contract import Pass, Progress, SilentProgress
from slimctl.core.errors import OptionError
from slimctl.core.files import output_error
from slimctl.evaluate.benchmark import BenchResult
from slimctl.evaluate.compare import Comparison
from slimctl.graph.save import save_model
from slimctl.pipeline.artifact import Artifact, check_artifact_output, workspace, write_artifact
from slimctl.pipeline.chain import check_order, resolve_chain
from slimctl.pipeline.context import PipelineContext
from slimctl.pipeline.manifest import Manifest
from slimctl.pipeline.run import PipelineResult, StepRecord, run_steps
from slimctl.recipe.gates import GateResult, gate_error, judge
from slimctl.recipe.measure import Bench, Measurements, evidence, measure, meter_for, open_bench
from slimctl.recipe.parse import load_recipe
from slimctl.recipe.presets import find_recipe
from slimctl.recipe.record import manifest_of
from slimctl.recipe.resolve import (
    Job,
    check_complete,
    locate_data,
    located_target,
    lock,
    resolve_recipe,
)
from slimctl.recipe.schema import DataSpec, EvaluationSpec
from slimctl.recipe.stored import Stored, check_store, store_result
from slimctl.targets import load_target


@dataclass(frozen=True)
class RunResult:
    """What a run found and made.

    Attributes:
        job: What ran, every default explicit.
        records: One per step.
        manifest: Everything about the result.
        gates: Every gate's verdict.
        artifact: The result on disk; None when there was no output, a gate failed, or the ledger
            is on object storage.
        comparison: The result against the original on the evaluation data, if they were compared.
        latency: Of the original and of the result, if a gate asked for it.
        stored: What became of the result in the ledger, if the recipe names one.
    """

    job: Job
    records: tuple[StepRecord, ...]
    manifest: Manifest
    gates: tuple[GateResult, ...]
    artifact: Artifact | None
    comparison: Comparison | None
    latency: tuple[BenchResult, BenchResult] | None
    stored: Stored | None = None

    @property
    def failed_gates(self) -> tuple[GateResult, ...]:
        """The gates that are broken."""
        return tuple(gate for gate in self.gates if not gate.passed)

    def raise_for_gates(self) -> None:
        """Ends a run whose result is not good enough.

        Raises:
            GateFailedError: Says by how much, and what became of the result.
        """
        if not self.failed_gates:
            return
        raise gate_error(self.failed_gates, self._whereabouts())

    def _whereabouts(self) -> str:
        if self.artifact is not None:
            return f"the result was kept all the same: {self.artifact.path}"
        if self.stored is not None and self.stored.version.has_files:
            return f"the result was kept all the same: {self.stored.version.reference}"
        return "the result was not published; --keep-failed keeps it"


def plan_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> Job:
    """What a recipe would run, without running it; ``lock(job, folder)`` prints it.

    Args:
        recipe: A file, or the name of a preset.
        overrides: Texts such as ``steps.1.sparsity=0.4``.

    Raises:
        ConfigError: The recipe or an override is wrong.
    """
    return resolve_recipe(load_recipe(find_recipe(str(recipe)), overrides))


def run_recipe(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    *,
    output: Path | None = None,
    force: bool = False,
    keep_failed: bool = False,
    use_cache: bool = True,
    progress: Progress | None = None,
) -> RunResult:
    """Runs a recipe. Call :meth:`RunResult.raise_for_gates` once its results were shown.

    Args:
        recipe: A file, or the name of a preset.
        overrides: Texts such as ``steps.1.sparsity=0.4``.
        output: Where the result goes instead of where the recipe says.
        force: An existing output may be replaced.
        keep_failed: The result is published even if a gate fails.
        use_cache: Calibration may use and fill the cache.
        progress: Where to say how far the work is.

    Raises:
        ConfigError: The recipe or an override is wrong.
        SlimctlError: Whatever the model, the data, a step or the output are at fault for.
    """
    parsed = load_recipe(find_recipe(str(recipe)), overrides)
    job = resolve_recipe(parsed)
    check_complete(parsed)
    if output is not None:
        job = replace(job, output=output, store=None)
    return run_job(
        job, force=force, keep_failed=keep_failed, use_cache=use_cache, progress=progress
    )


def run_passes(
    model: Path,
    steps: Sequence[Pass],
    *,
    output: Path,
    target: str = "cpu",
    calibration: DataSpec | None = None,
    training: DataSpec | None = None,
    evaluation: EvaluationSpec | None = None,
    seed: int = 0,
    threads: int = 0,
    dry_run: bool = False,
    force: bool = False,
    use_cache: bool = True,
    progress: Progress | None = None,
) -> RunResult:
    """Runs the steps of one command: a recipe made in memory.

    Args:
        model: The model file.
        steps: What to do with it.
        output: An ``.onnx`` file or an artifact folder.
        target: Execution-provider profile, a name or a file.
        calibration: Data that the steps may look at.
        training: Data that models learn from.
        evaluation: Data and metric to judge the result with.
        seed: Of everything random.
        threads: Threads of onnxruntime; 0 lets it decide.
        dry_run: Nothing is written.
        force: An existing output may be replaced.
        use_cache: Calibration may use and fill the cache.
        progress: Where to say how far the work is.

    Raises:
        SlimctlError: Whatever the model, the data, a step or the output are at fault for.
    """
    here = Path.cwd()
    target = located_target(target, here)
    profile = load_target(target)
    chain = tuple(link.step for link in resolve_chain(steps, profile))
    check_order(chain)
    job = Job(
        name=_name_for(output),
        model=model.absolute(),
        target=profile,
        target_name=target,
        steps=chain,
        seed=seed,
        threads=threads,
        calibration=locate_data(calibration, here),
        training=locate_data(training, here),
        evaluation=locate_data(evaluation, here),
        output=None if dry_run else output,
    )
    return run_job(job, force=force, use_cache=use_cache, progress=progress)


def _name_for(output: Path) -> str:
    """A name that recipes allow, from the output's."""
    stem = output.absolute().name.removesuffix(".onnx")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip(".-_") or "result"


def run_job(
    job: Job,
    *,
    force: bool = False,
    keep_failed: bool = False,
    use_cache: bool = True,
    progress: Progress | None = None,
) -> RunResult:
    """Runs a job; see :func:`run_recipe`."""
    if job.model is None:
        raise OptionError("model", "There is no model to run on", fix="give --set model=PATH")
    _check_output(job, force=force)
    started = time.perf_counter()
    bench = open_bench(job, job.model, progress or SilentProgress())
    with workspace(job.output) as folder:
        context = PipelineContext(
            target=job.target,
            seed=job.seed,
            progress=bench.progress,
            data=bench.calibration,
            training=bench.training,
            threads=job.threads,
            use_cache=use_cache,
        )
        found = _worked(bench, context, folder)
        proof = evidence(bench, found)
        gates = judge(job.gates, proof)
        seconds = {
            **_step_seconds(found.done.records),
            "calibration": context.calibration_seconds,
            "total": time.perf_counter() - started,
        }
        timings = [
            f"{r.step.name}: {line}" for r in found.done.records for line in r.report.timings
        ]
        notes = [*context.notes, *timings]
        manifest = manifest_of(bench, found, proof, gates, seconds=seconds, notes=notes)
        accepted = all(gate.passed for gate in gates)
        stored, artifact = None, None
        if job.store is not None:
            stored, artifact = store_result(
                *(job, found.files, manifest, folder),
                accepted=accepted,
                keep_failed=keep_failed,
                force=force,
            )
        elif accepted or keep_failed:
            artifact = _published(job, found, manifest, folder)
    sealed = stored or artifact
    return RunResult(
        job,
        found.done.records,
        sealed.manifest if sealed else manifest.sealed(()),
        gates,
        artifact,
        found.comparison,
        found.latency,
        stored,
    )


def _check_output(job: Job, *, force: bool) -> None:
    if job.store is not None:
        check_store(job, force=force)
    elif job.output is not None:
        check_artifact_output(job.output, force=force)


def _worked(bench: Bench, context: PipelineContext, folder: Path) -> Measurements:
    """Runs the steps and measures their result."""
    meter = meter_for(bench)
    context.measure = meter.score if meter else None
    done = run_steps(
        bench.model, bench.job.steps, context, source=bench.path, workspace=folder, measure=meter
    )
    files = _result_files(bench.job, done, folder)
    return measure(bench, done, files, meter, folder)


def _result_files(job: Job, done: PipelineResult, folder: Path) -> list[Path]:
    """The result's files in the workspace; a copy of its own when no step changed anything."""
    if done.path.is_relative_to(folder):
        return [done.path, *sorted(set(done.path.parent.iterdir()) - {done.path})]
    target = folder / "unchanged"
    try:
        target.mkdir()
        return save_model(done.model, target / "model.onnx")
    except OSError as error:
        raise output_error(job.output or target, error) from error


def _step_seconds(records: Sequence[StepRecord]) -> dict[str, float]:
    return {
        f"step {index} ({record.step.name})": record.seconds
        for index, record in enumerate(records, start=1)
    }


def _published(job: Job, found: Measurements, manifest: Manifest, folder: Path) -> Artifact | None:
    if job.output is None:
        return None
    return write_artifact(found.files, manifest, job.output, folder, lock=lock(job, job.output))
