"""Runs a chain of passes; after each one its promises are checked and its cost is recorded."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import onnx_ir as ir

from slimctl.core.contract import Effect, Feeds, Pass, PassReport
from slimctl.core.errors import PassError, SlimctlError, SourceError
from slimctl.core.files import output_error
from slimctl.graph.edit import all_nodes, interface
from slimctl.graph.opset import raise_opset
from slimctl.graph.save import (
    EXTERNAL_THRESHOLD,
    PASSING_THRESHOLD,
    content_hash,
    parameter_count,
    save_model,
    stated_values,
    weight_bytes,
)
from slimctl.graph.shapes import infer_shapes
from slimctl.pipeline.chain import check_order, resolve_chain
from slimctl.pipeline.checks import Trial, Verdict, check_step
from slimctl.pipeline.context import PipelineContext
from slimctl.pipeline.fidelity import worst_sqnr_db
from slimctl.pipeline.probe import SHORT, Probes, Spread, shortened, spread_samples, take_samples
from slimctl.pipeline.stage import Stage, observe_original

Measure = Callable[[Path], float]
"""Judges a model file with the metric of the evaluation data."""


@dataclass(frozen=True)
class StepRecord:
    """What one step did and what it cost.

    Attributes:
        step: The pass with every option explicit.
        report: What it says about itself.
        weight_bytes: Bytes of all weights afterwards.
        nodes: Number of nodes afterwards, subgraphs included.
        sqnr_db: Distance to the original on a few samples, of the worst output; None without data.
        metric: The metric afterwards; None when none is measured.
        exact_error: What an EXACT step changed, relative to the largest output; None for others.
        notes: What the checks say.
        seconds: Time of the step, checks included.
    """

    step: Pass
    report: PassReport
    weight_bytes: int
    nodes: int
    sqnr_db: float | None
    metric: float | None
    exact_error: float | None
    notes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class PipelineResult:
    """What a chain of passes made of a model.

    Attributes:
        model: The graph.
        path: Its file in the workspace; the source itself when no step changed anything.
        records: One per step.
        probes: Inputs that the checks used.
        metric: The metric of the original; None when none is measured.
    """

    model: ir.Model
    path: Path
    records: tuple[StepRecord, ...]
    probes: Probes
    metric: float | None = None


def run_steps(
    model: ir.Model,
    steps: Sequence[Pass],
    context: PipelineContext,
    *,
    source: Path,
    workspace: Path,
    measure: Measure | None = None,
) -> PipelineResult:
    """Runs passes one after the other on clones; the given model is never changed.

    Args:
        model: The loaded model.
        steps: Passes in order; they are resolved for the target and expanded.
        context: What passes may use.
        source: The file that the model was loaded from.
        workspace: An existing folder for the model files of the steps; ``result/model.onnx`` in it
            is the last one.
        measure: Called with every step's model file.

    Raises:
        ConfigError: The order of steps is impossible.
        PassContractError: A step broke a promise.
        SlimctlError: Whatever a pass or its data raise; ``where`` names the step.
    """
    chain = tuple(link.step for link in resolve_chain(steps, context.target))
    check_order(chain)
    stated = stated_values(model)
    return _Runner(chain, context, workspace, source, Stage(model, source), measure, stated).run()


@dataclass
class _Runner:
    """State of one run."""

    chain: tuple[Pass, ...]
    context: PipelineContext
    workspace: Path
    source: Path
    original: Stage
    measure: Measure | None
    stated: frozenset[str]
    probes: Probes = field(default_factory=Probes)
    inputs: list[ir.Model] = field(default_factory=list)  # the model before each step

    def run(self) -> PipelineResult:
        self.original = self._mapped(self.original)
        spread = self._observed_on()
        self.context.random = self.probes.random
        if self.original.observation is not None:
            samples = self.probes.samples
            outputs = self.original.observation.optimized[: len(samples)]
            self.context.judge_by(
                self.original.path, self.original.model, samples, outputs, spread.more
            )
        metric = self.measure(self.original.path) if self.measure else None
        stage, latest, records = self.original, metric, []
        for index in range(len(self.chain)):
            stage, record = self._step(index, stage, latest)
            latest = record.metric
            records.append(record)
        path = self._result_path(stage)
        return PipelineResult(stage.model, path, tuple(records), self.probes, metric)

    def _mapped(self, original: Stage) -> Stage:
        """The original, from a file with its weights apart if they are many; see save_model."""
        inline = self.source.stat().st_size > PASSING_THRESHOLD
        if not inline or weight_bytes(original.model) <= PASSING_THRESHOLD:
            return original
        return Stage(original.model, self._save("original", original.model, PASSING_THRESHOLD))

    def _result_path(self, stage: Stage) -> Path:
        """The file of the last step, in the layout that results have; the source if unchanged."""
        if stage is self.original:
            return self.source
        apart = any(file != stage.path for file in stage.path.parent.iterdir())
        if apart and weight_bytes(stage.model) <= EXTERNAL_THRESHOLD:
            return self._save("result", stage.model)  # steps after it changed nothing
        return stage.path

    def _observed_on(self) -> Spread:
        """Runs the original on some samples of the data, none without data.

        Of long samples of large models the beginnings, unless the model does not take those.
        """
        batches = self.context.data.batches() if self.context.data else ()
        ports, parameters = interface(self.original.model), parameter_count(self.original.model)
        samples = take_samples(batches, ports)
        short = shortened(samples, ports, parameters)
        if short is not None:
            spread = spread_samples(short, parameters)
            self._observe(spread)
            if not self.original.refusal:
                self.context.notes.append(f"steps are checked on {SHORT} tokens of each sample")
                return spread
        spread = spread_samples(samples, parameters)
        self._observe(spread)
        return spread

    def _observe(self, spread: Spread) -> None:
        self.original.refusal = ""
        self.probes = observe_original(
            self.original, spread.few, seed=self.context.seed, threads=self.context.threads
        )

    def _step(self, index: int, before: Stage, metric: float | None) -> tuple[Stage, StepRecord]:
        """Runs and judges one step; ``metric`` is that of the model before."""
        started = time.perf_counter()
        step = self.chain[index]
        label = f"{index + 1} ({step.name})"
        with _StepName(label):
            after, report = self._apply(index, before)
            verdict = self._check(
                Trial(
                    label,
                    step,
                    before,
                    after,
                    self._feeds(index),
                    self.context.threads,
                    self.context.known_outputs(after.model),
                )
            )
            if self.measure is not None and after is not before:
                metric = self.measure(after.path)
        return after, StepRecord(
            step=step,
            report=report,
            weight_bytes=weight_bytes(after.model),
            nodes=sum(1 for _ in all_nodes(after.model)),
            sqnr_db=self._fidelity(after),
            metric=metric,
            exact_error=verdict.error,
            notes=verdict.notes,
            seconds=time.perf_counter() - started,
        )

    def _feeds(self, index: int) -> tuple[Feeds, ...]:
        """What this step's model is run on: what the next step has to be compared on as well."""
        exact = any(step.effect is Effect.EXACT for step in self.chain[index : index + 2])
        return self.probes.chosen(exact=exact)

    def _apply(self, index: int, before: Stage) -> tuple[Stage, PassReport]:
        """Runs the pass on a clone and writes the result; ``before`` itself if nothing changed."""
        step = self.chain[index]
        if step.requires_data() and not self.context.has_data:
            raise SourceError(
                "none", f"Step '{step.name}' needs calibration data", fix="give --calib SOURCE"
            )
        raised = raise_opset(before.model, step.minimum_opset(before.model, self.context.target))
        step.requires(raised)
        self.inputs.append(raised)
        candidate = raised.clone()  # weights are shared, only the graph is copied
        self.context.enter(step, self.chain[index + 1 :], self.inputs[self._reference(index)])
        report = step.apply(candidate, self.context)
        if not report.changed and content_hash(candidate) == content_hash(before.model):
            return before, report
        infer_shapes(candidate)
        more = index + 1 < len(self.chain)
        most_inline = PASSING_THRESHOLD if more else EXTERNAL_THRESHOLD
        return Stage(candidate, self._save(f"step{index + 1}", candidate, most_inline)), report

    def _reference(self, index: int) -> int:
        """Which step's input is the float model that this step may compare with.

        The input of the latest step that it declares to stand ``after``; for others the input of
        the first APPROXIMATE step of the unbroken row of them that leads here.
        """
        step = self.chain[index]
        if step.after:
            earlier = [i for i in range(index) if self.chain[i].name in step.after]
            return earlier[-1]
        first = index
        while first > 0 and self.chain[first - 1].actual_effect() is Effect.APPROXIMATE:
            first -= 1
        return first

    def _check(self, trial: Trial) -> Verdict:
        if trial.after is trial.before:
            return Verdict()  # checked already
        verdict = check_step(trial)
        if trial.step.actual_effect() is Effect.INTERFACE:
            # The data were opened for another interface: from here on random inputs must do.
            self.probes = observe_original(
                trial.after, (), seed=self.context.seed, threads=self.context.threads
            )
        if trial.before is not self.original:
            # No later step reads this file, and large models fill disks.
            shutil.rmtree(trial.before.path.parent)
        return verdict

    def _save(self, name: str, model: ir.Model, most_inline: int = EXTERNAL_THRESHOLD) -> Path:
        folder = self.workspace / name
        try:
            folder.mkdir()
            path = folder / "model.onnx"
            return save_model(model, path, most_inline=most_inline, stated=self.stated)[0]
        except OSError as error:
            raise output_error(self.workspace.parent, error) from error

    def _fidelity(self, stage: Stage) -> float | None:
        samples = len(self.probes.samples)
        if not (samples and self.original.observation and stage.observation):
            return None
        return worst_sqnr_db(
            self.original.observation.optimized[:samples], stage.observation.optimized[:samples]
        )


class _StepName:
    """Adds the step to whatever is raised inside; nothing is swallowed."""

    def __init__(self, label: str) -> None:
        self._label = label

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del kind, traceback
        place = f"step {self._label}"
        if isinstance(error, PassError) and error.where.startswith("step "):
            return
        if isinstance(error, SlimctlError):
            error.where = f"{place}, {error.where}" if error.where else place
            error.args = (error.message,)
        elif error is not None:
            error.add_note(f"while running {place}")
