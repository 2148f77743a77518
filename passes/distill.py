"""Distillation: the weights of a small graph learn from what a larger one computes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import onnx_ir as ir
from pydantic import Field, field_serializer, field_validator

from slimctl.core.augmentations import parse_augmentations
from slimctl.core.contract import Context, Pass, PassReport
from slimctl.core.errors import OptionError
from slimctl.graph.edit import clone_model
from slimctl.graph.load import load_model
from slimctl.graph.save import content_hash
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._layers import refuse_quantized
from slimctl.passes._training import (
    OutputKind,
    Run,
    TrainingPass,
    doubt,
    finished_plain,
    left_alone,
    stated,
)
from slimctl.passes.prune import Prune
from slimctl.training import require_torch
from slimctl.training.settings import check_loss

if TYPE_CHECKING:
    from slimctl.training.distillation import Weights
    from slimctl.training.pairs import FeaturePair, Pairs

_AUTO = "auto"


class Distill(TrainingPass):
    """Train the weights of a graph on what another graph, its teacher, computes."""

    name: ClassVar[str] = "distill"
    summary: ClassVar[str] = "Train the weights of a graph on what another graph computes"

    teacher: str | None = Field(
        None,
        description="ONNX file of the model to learn from, with the same inputs and outputs; in a "
        "recipe the model before the steps that made the student smaller, unless it is given.",
        json_schema_extra={"unset": "the model before --shrink", "metavar": "MODEL", "path": True},
    )
    shrink: float | None = Field(
        None,
        gt=0.0,
        lt=1.0,
        description="Prune the model to this share of its multiply-accumulates first, and let it "
        "learn from what it was.",
        json_schema_extra={"unset": "not set"},
    )
    alpha: float = Field(
        0.9,
        ge=0.0,
        le=1.0,
        description="How much the teacher's outputs count; labels count 1 - alpha. Without labels "
        "it is 1.",
    )
    temperature: float = Field(
        4.0, gt=0.0, description="Scores of classes are divided by it, at the beginning."
    )
    final_temperature: float = Field(1.0, gt=0.0, description="The same at the end.")
    kind: OutputKind = Field(
        "auto",
        description="What the outputs hold: scores of classes, of yes or no each, or values. auto "
        "goes by the Softmax or Sigmoid at the end of either model, then by --loss where there are "
        "labels, and takes all else for values.",
    )
    feature: tuple[str, ...] = Field(
        (_AUTO,),
        description="Two tensors that should hold the same up to a linear map; repeatable. auto: "
        "tensors of one name at the ends of blocks.",
        json_schema_extra={"metavar": "STUDENT=TEACHER"},
    )
    feature_weight: float = Field(
        1.0, ge=0.0, description="How much the features count; 0 leaves them out."
    )
    attention_weight: float = Field(
        1.0,
        ge=0.0,
        description="How much attention maps of one name count, where there are some; 0 leaves "
        "them out.",
    )
    teacher_cache_mb: int = Field(
        1024,
        ge=0,
        description="Megabytes of the teacher's outputs that may lie on disk during the run; "
        "0 computes them in every epoch, as --augment does.",
    )
    loss: str = Field(
        "cross-entropy",
        description="Of the labels: cross-entropy, bce, mse, ctc (blank is class 0), or "
        "module:function.",
    )
    output_name: str = Field(
        "", description="The output that labels are for; the first of floats when empty."
    )

    @field_validator("loss")
    @classmethod
    def _loss_exists(cls, name: str) -> str:
        return check_loss(name)

    @field_validator("feature")
    @classmethod
    def _features_parse(cls, pairs: tuple[str, ...]) -> tuple[str, ...]:
        for pair in pairs:
            if pair != _AUTO and not all(pair.partition("=")):
                raise ValueError(f"'{pair}' is not of the form STUDENT=TEACHER")
        return pairs

    @field_serializer("teacher", when_used="json")
    def _name_only(self, teacher: str | None) -> str | None:
        """Manifests are the same wherever the file lies; its hash is among the facts."""
        return None if teacher is None else Path(teacher).name

    def expand(self) -> tuple[Pass, ...]:
        """Pruning first, if that is wanted: each of the two has its own line in the report."""
        if self.shrink is None:
            return (self,)
        return Prune(target_macs=self.shrink), self.model_copy(update={"shrink": None})

    def requires(self, model: ir.Model) -> None:
        """Refuses a quantized model: its weights are integers.

        Raises:
            MissingExtraError: torch is not installed.
            UnsupportedModelError: Names the first quantized node.
        """
        require_torch(self.name)
        refuse_quantized(model, "distill the float model and quantize the result")

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Trains, and keeps the best weights.

        Raises:
            OptionError: There is no teacher, or it does not fit.
            SlimctlError: Data are missing or do not fit.
        """
        from slimctl.training.distillation import Distillation
        from slimctl.training.learnable import separate_statistics
        from slimctl.training.losses import loss_named, scores_of
        from slimctl.training.module import TrainableGraph
        from slimctl.training.objective import FromLabels
        from slimctl.training.pairs import match_inputs
        from slimctl.training.teacher import Teacher

        taught = self._teacher(model, context)
        separate_statistics(model)
        infer_shapes(model)
        labels, labeled = None, _has_labels(context)
        if labeled and self.alpha < 1.0:
            tensor = scores_of(model, self.loss, self.output_name)
            labels = FromLabels(tensor, loss_named(self.loss), self.loss)
        pairs = self._pairs(model, taught, labeled=labeled)
        selection = self.selection()
        module = TrainableGraph(model, selection)
        facts = {
            "teacher": content_hash(taught),
            "pairs": _facts(pairs),
            "loss": self.loss if labels else None,
            "weights": asdict(self._weights()),
            "learned": module.learned,
        }
        keep = 0 if parse_augmentations(self.augment) else self.teacher_cache_mb * 10**6
        with Teacher(
            taught,
            pairs.teacher,
            match_inputs(model, taught),
            threads=context.threads,
            keep_bytes=keep,
        ) as teacher:
            objective = Distillation(teacher, pairs, self._weights(), labels)
            run = Run(self.name, self.settings(), context, facts)
            outcome = run.train(model, module, objective, finished_plain)
            saved = teacher.saved()
        skipped, unused = left_alone(module, selection)
        return PassReport(
            changed={"weight": len(module.learned)},
            skipped=tuple(skipped),
            notes=(
                *outcome.notes(),
                *_notes(pairs, labeled=labels is not None),
                *doubt(self.kind, pairs.outputs),
                *unused,
            ),
            timings=(saved, *outcome.history()),
            facts={**outcome.facts(), "teacher": facts["teacher"], "pairs": facts["pairs"]},
        )

    def _weights(self) -> Weights:
        from slimctl.training.distillation import Weights

        return Weights(
            self.alpha,
            self.temperature,
            self.final_temperature,
            self.feature_weight,
            self.attention_weight,
        )

    def _teacher(self, model: ir.Model, context: Context) -> ir.Model:
        """The given model, or the one before the student was made smaller; shapes are inferred."""
        taught = context.reference if self.teacher is None else load_model(Path(self.teacher))
        if content_hash(taught) != content_hash(model):
            taught = clone_model(taught)
            infer_shapes(taught)
            return taught
        if self.teacher is None:
            raise OptionError(
                "--teacher",
                "There is no teacher: no step before this one changed the model",
                fix="give --teacher MODEL or --shrink 0.5, or put 'prune' right before 'distill'",
            )
        raise OptionError(
            "--teacher",
            "The student is the teacher: there is nothing to learn",
            fix="make it smaller first, with --shrink 0.5 or 'slimctl prune'",
        )

    def _pairs(self, model: ir.Model, taught: ir.Model, *, labeled: bool) -> Pairs:
        from slimctl.training import pairs

        outputs = pairs.match_outputs(
            model,
            taught,
            kind=stated(self.kind),
            labels=(self.output_name, self.loss) if labeled else None,
        )
        features = self._features(model, taught) if self.feature_weight else []
        found = pairs.Pairs(outputs, features)
        if not self.attention_weight:
            return found
        attention, different = pairs.find_attention(model, taught)
        return found._replace(attention=attention, different=different)

    def _features(self, model: ir.Model, taught: ir.Model) -> list[FeaturePair]:
        from slimctl.training.pairs import find_features, named_features

        named = [pair for pair in self.feature if pair != _AUTO]
        features = named_features(model, taught, named)
        if _AUTO in self.feature:
            given = {pair.student for pair in features}
            found = find_features(model, taught)
            features += [pair for pair in found if pair.student not in given]
        return features


def _has_labels(context: Context) -> bool:
    first = next(context.training_data().batches(), None)
    return first is not None and first.labels is not None


def _facts(pairs: Pairs) -> dict[str, Any]:
    """Values for the manifest."""
    return {
        "outputs": {pair.name: pair.kind for pair in pairs.outputs},
        "features": [list(pair) for pair in pairs.features],
        "attention": [list(pair) for pair in pairs.attention],
    }


def _notes(pairs: Pairs, *, labeled: bool) -> list[str]:
    """Sentences for the summary."""
    kinds = ", ".join(f"{pair.name} as {pair.kind}" for pair in pairs.outputs)
    notes = [f"learned from the teacher: {kinds}{'; and from labels' if labeled else ''}"]
    if pairs.features:
        notes.append("features: " + ", ".join(map(_feature_text, pairs.features)))
    if pairs.attention:
        notes.append(f"attention maps: {len(pairs.attention)}")
    if pairs.different:
        notes.append(
            f"{len(pairs.different)} attention maps have other shapes than the teacher's, such as "
            f"{pairs.different[0]}: they were left out"
        )
    return notes


def _feature_text(pair: FeaturePair) -> str:
    ours, theirs = pair.widths
    return f"{pair.student} ({ours} -> {theirs} channels)" if ours != theirs else pair.student
