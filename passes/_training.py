"""What passes that train have in common: their options, one run, and what it reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import onnx_ir as ir
from pydantic import Field, field_validator

from slimctl import __version__
from slimctl.core.augmentations import parse_augmentations
from slimctl.core.cache import cache_key
from slimctl.core.contract import Context, Effect, Pass, Skipped
from slimctl.graph.edit import clone_model, interface
from slimctl.graph.save import content_hash
from slimctl.graph.select import Patterns, Selection
from slimctl.training import require_torch
from slimctl.training.settings import OptimizerName, ScheduleName, Settings

if TYPE_CHECKING:
    from slimctl.training.loop import Trained
    from slimctl.training.module import TrainableGraph
    from slimctl.training.objective import Objective
    from slimctl.training.pairs import Kind, OutputPair

OutputKind = Literal["auto", "classes", "sigmoid", "values"]
"""What outputs hold that are learned from another model; auto: what the graph tells."""

Finished = Callable[["TrainableGraph", ir.Model], None]
"""Puts what a module has learned into a clone of the model that it was made from."""


class TrainingPass(Pass):
    """Base of passes that train: the options of a run."""

    effect: ClassVar[Effect] = Effect.APPROXIMATE
    trains: ClassVar[bool] = True
    uses_metric: ClassVar[bool] = True

    epochs: int = Field(10, ge=1, description="How often every training sample is seen.")
    batch_size: int = Field(128, ge=1, description="Samples whose gradients make one step.")
    learning_rate: float = Field(1e-3, gt=0.0, description="Its largest value.")
    optimizer: OptimizerName = Field(
        "adamw", description="AdamW, or SGD with Nesterov momentum 0.9."
    )
    schedule: ScheduleName = Field("cosine", description="How the learning rate changes.")
    warmup: float = Field(
        0.05, ge=0.0, lt=1.0, description="Share of the steps in which the learning rate rises."
    )
    weight_decay: float = Field(1e-4, ge=0.0, description="Of matrices and kernels.")
    clip_norm: float = Field(
        1.0, ge=0.0, description="Largest norm of the gradient; 0 leaves it as it is."
    )
    patience: int = Field(
        0,
        ge=0,
        description="Epochs without a better metric on the evaluation data after which training "
        "ends; 0 goes on to the last. The best weights are kept either way.",
    )
    augment: str = Field(
        "",
        description="Random changes of image inputs, such as flip,shift:2; see docs/training.md.",
        json_schema_extra={"metavar": "LIST"},
    )
    device: str = Field("cpu", description="cpu, cuda or cuda:1.")
    checkpoint_minutes: float = Field(
        10.0, ge=0.0, description="Minutes between two checkpoints; 0 writes none."
    )
    resume: bool = Field(
        False, description="Continue from the checkpoint of the same run, if it was stopped."
    )
    include: Patterns = Field(
        (), description="Train only matching layers: name glob, op:TYPE or re:REGEX; repeatable."
    )
    exclude: Patterns = Field(
        (), description="Leave matching layers as they are: as --include; repeatable."
    )

    @field_validator("augment")
    @classmethod
    def _augmentations_exist(cls, text: str) -> str:
        parse_augmentations(text)
        return text

    def settings(self) -> Settings:
        """The options of the run."""
        return Settings(**{item.name: getattr(self, item.name) for item in fields(Settings)})

    def selection(self) -> Selection:
        """Which nodes learn."""
        return Selection(self.include, self.exclude)


class Run:
    """One training run of a pass.

    Args:
        name: Of the pass.
        settings: How.
        context: Data, metric, seed.
        facts: What else decides how the run goes, for the name of its checkpoint.
    """

    def __init__(
        self, name: str, settings: Settings, context: Context, facts: Mapping[str, Any]
    ) -> None:
        require_torch(name)
        self._name, self._settings, self._context = name, settings, context
        self._facts = facts

    def train(
        self,
        model: ir.Model,
        module: TrainableGraph,
        objective: Objective,
        finished: Finished,
        after_step: Callable[[], None] | None = None,
    ) -> Outcome:
        """Trains a module of a model, and puts what it learned into the model.

        Args:
            model: What the module was made from.
            module: Learns.
            objective: What for.
            finished: Puts what was learned into a clone of the model.
            after_step: See :class:`slimctl.training.loop.Training`.

        Raises:
            SlimctlError: Data are missing or do not fit, or the loss is no longer a number.
        """
        from slimctl.training.checkpoint import Checkpoint
        from slimctl.training.loop import Training
        from slimctl.training.samples import Samples, fixed_batch

        context, settings = self._context, self._settings
        data = context.training_data()
        shapes = {port.name: port.shape for port in interface(model).inputs}
        samples = Samples(
            data, settings.batch_size, fixed=fixed_batch(shapes), progress=context.progress
        )
        key = self._key(model, data.content_hash()) if settings.checkpoint_minutes else ""
        checkpoint = Checkpoint(key, settings.checkpoint_minutes)
        stopped = checkpoint.exists

        def judge() -> float | None:
            trial = clone_model(model)
            finished(module, trial)
            return context.metric(trial)

        done = Training(
            module,
            samples,
            objective,
            settings,
            seed=context.seed,
            threads=context.threads,
            judge=judge,
            progress=context.progress,
            checkpoint=checkpoint,
            after_step=after_step,
        ).run()
        finished(module, model)
        return Outcome(done, samples.count, samples.steps, stopped, settings)

    def _key(self, model: ir.Model, data: str) -> str:
        """The same for runs that go the same way."""
        settings = asdict(self._settings)
        for name in ("resume", "checkpoint_minutes"):
            del settings[name]
        facts = {"settings": settings, "seed": self._context.seed, **self._facts}
        text = json.dumps(facts, sort_keys=True, default=str)
        return cache_key(self._name, content_hash(model), data, __version__, text)


class Outcome:
    """What a run did, as passes report it.

    Args:
        done: What the loop says.
        samples: How many there were.
        steps: In an epoch.
        stopped: There was a checkpoint of this run when it began.
        settings: How it was trained.
    """

    def __init__(
        self, done: Trained, samples: int, steps: int, stopped: bool, settings: Settings
    ) -> None:
        self.done, self.samples, self._steps = done, samples, steps
        self._stopped, self._settings = stopped, settings

    def notes(self) -> list[str]:
        """Sentences for the summary."""
        done = self.done
        notes = [
            f"{len(done.losses)} epochs of {self.samples} samples, loss {done.losses[0]:.4g} -> "
            f"{done.losses[-1]:.4g}"
        ]
        if not done.metrics:
            notes.append("no evaluation data: the weights of the last epoch are kept")
        elif done.kept == 0:
            notes.append("no epoch made the metric better: the weights are those from before")
        else:
            notes.append(
                f"metric {abs(done.metrics[0]):.4g} -> {abs(done.metrics[done.kept]):.4g}, "
                f"after epoch {done.kept}"
            )
        if done.ended_early:
            notes.append(f"ended early: no better metric in {self._settings.patience} epochs")
        return notes

    def history(self) -> tuple[str, ...]:
        """What happened on the way, which the result does not depend on."""
        if self.done.resumed_at:
            return (f"continued from a checkpoint at step {self.done.resumed_at}",)
        if self._settings.resume:
            return ("there was no checkpoint of this run: it began anew",)
        if self._stopped:
            return ("a stopped run left a checkpoint, which --resume would have used",)
        return ()

    def facts(self) -> dict[str, Any]:
        """Values for the manifest."""
        return {
            "samples": self.samples,
            "steps_per_epoch": self._steps,
            "loss": [round(loss, 6) for loss in self.done.losses],
            "metric": [round(metric, 6) for metric in self.done.metrics],
            "kept_epoch": self.done.kept,
        }


def finished_plain(module: TrainableGraph, model: ir.Model) -> None:
    """Puts learned values into a model whose graph the module has as it is."""
    module.write_back(model)


def left_alone(module: TrainableGraph, selection: Selection) -> tuple[list[Skipped], list[str]]:
    """Nodes that kept their weights, and patterns without a match."""
    notes = [f"the pattern '{pattern}' matched nothing" for pattern in selection.unused()]
    return module.skipped, notes


def stated(kind: OutputKind) -> Kind | None:
    """What outputs hold, if somebody said it."""
    return None if kind == "auto" else kind


def doubt(kind: OutputKind, pairs: Sequence[OutputPair]) -> list[str]:
    """What nothing told: whether values are scores of classes."""
    values = [pair.name for pair in pairs if pair.kind == "values"]
    if kind != "auto" or not values:
        return []
    return [f"if {values[0]} holds scores of classes, --kind classes suits it better"]
