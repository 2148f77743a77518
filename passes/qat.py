"""Quantization-aware training: weights and scales of a Q/DQ graph learn under quantization."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, ClassVar, Final, Self

import onnx_ir as ir
from pydantic import Field, field_validator, model_validator

from slimctl.core.augmentations import parse_augmentations
from slimctl.core.contract import Context, PassReport, Skipped
from slimctl.core.errors import UnsupportedModelError
from slimctl.core.target import ReducedRange, Target
from slimctl.graph.edit import clone_model
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._qat_graph import TrainingCopy
from slimctl.passes._qat_scales import DEQUANTIZE, QUANTIZE
from slimctl.passes._qat_write import write_learned
from slimctl.passes._quantized_layers import observable_nodes, weight_dequantizer
from slimctl.passes._training import (
    OutputKind,
    Run,
    TrainingPass,
    doubt,
    left_alone,
    stated,
)
from slimctl.passes._weights import BIAS_LIMIT
from slimctl.training import require_torch
from slimctl.training.settings import check_loss

if TYPE_CHECKING:
    from slimctl.training.module import TrainableGraph
    from slimctl.training.objective import Objective
    from slimctl.training.pairs import OutputPair
    from slimctl.training.scales import Scales

_CACHED_BYTES: Final = 1 << 30
"""Of the float model's outputs, on disk while training runs."""

_TO_PROBABILITIES: Final = ("LogSoftmax", "Sigmoid", "Softmax")


class Qat(TrainingPass):
    """Train the weights and scales of a quantized graph (LSQ)."""

    name: ClassVar[str] = "qat"
    summary: ClassVar[str] = "Train the weights and scales of a quantized graph (LSQ)"
    after: ClassVar[frozenset[str]] = frozenset({"quantize-static"})
    not_after: ClassVar[frozenset[str]] = frozenset({"qoperator"})

    epochs: int = Field(10, ge=1, description="How often every training sample is seen.")
    learning_rate: float = Field(1e-3, gt=0.0, description="Its largest value.")
    weight_decay: float = Field(0.0, ge=0.0, description="Of matrices and kernels.")
    loss: str = Field(
        "",
        description="Learn from labels: cross-entropy, bce, mse, ctc or module:function. Without "
        "it the float model is learned from, and labels are not needed.",
        json_schema_extra={"unset": "what the float model computes"},
    )
    kind: OutputKind = Field(
        "auto",
        description="Without a loss: what the outputs hold, scores of classes, of yes or no each, "
        "or values. auto goes by the Softmax or Sigmoid at the end, and takes all else for values.",
    )
    output_name: str = Field(
        "", description="With a loss: the output that labels are for; the first when empty."
    )
    reduce_range: ReducedRange | None = Field(
        None,
        description="Smaller weights in all layers, where 16-bit sums saturate (processors without "
        "VNNI); learned does the same here.",
    )

    @field_validator("loss")
    @classmethod
    def _loss_exists(cls, name: str) -> str:
        return check_loss(name) if name else name

    @model_validator(mode="after")
    def _kind_is_used(self) -> Self:
        if self.loss and self.kind != "auto":
            raise ValueError("kind is for learning from the float model; a loss learns from labels")
        return self

    def resolve(self, target: Target) -> Self:
        """Takes from the target what is not given."""
        if self.reduce_range is not None:
            return self
        return self.model_copy(update={"reduce_range": target.reduce_range})

    def requires(self, model: ir.Model) -> None:
        """Wants a model with quantized weights.

        Raises:
            MissingExtraError: torch is not installed.
            UnsupportedModelError: There are none.
        """
        require_torch(self.name)
        if not any(weight_dequantizer(node) is not None for node in observable_nodes(model)):
            raise UnsupportedModelError(
                "No layer has quantized weights, so there is nothing to train for",
                fix="put qat behind quantize-static, or use finetune for a float model",
            )

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Trains, and keeps the best weights and scales.

        Raises:
            UnsupportedModelError: torch cannot run the model; names the node.
            SlimctlError: Data are missing or do not fit.
        """
        from slimctl.training.module import TrainableGraph
        from slimctl.training.scales import learned_arrays

        infer_shapes(model)
        selection = self.selection()
        paired = self.resolve(context.target).reduce_range != "none"
        copy = TrainingCopy(model, context.reference, context.target, selection, paired=paired)
        module = TrainableGraph(copy.model, selection, also=[item.name for item in copy.scales])
        scales = _scales(module, copy)

        def finished(trained: TrainableGraph, into: ir.Model) -> None:
            write_learned(copy, learned_arrays(trained.values()), scales.values(), into)

        with ExitStack() as stack:
            objective, source, doubts = self._objective(copy, context, stack)
            facts = {"source": source, "tensors": objective.tensors, "learned": module.learned}
            run = Run(self.name, self.settings(), context, facts)
            outcome = run.train(model, module, objective, finished, scales.keep)
        skipped, unused = left_alone(module, selection)
        restored = sum(not weight.exact for weight in copy.weights)
        notes = [
            f"learned from {source}",
            f"scales learned: {len(copy.scales)}, kept: {len(copy.kept)}",
        ]
        if restored:
            notes.append(f"{restored} weights began as what their codes say, not as the originals")
        return PassReport(
            changed={
                "weight": len(module.learned) - len(copy.scales),
                "scale": len(copy.scales),
            },
            skipped=(*skipped, *(Skipped(name, reason) for name, reason in copy.kept.items())),
            notes=(*outcome.notes(), *notes, *doubts, *unused),
            timings=outcome.history(),
            facts={**outcome.facts(), "objective": source},
        )

    def _objective(
        self, copy: TrainingCopy, context: Context, stack: ExitStack
    ) -> tuple[Objective, str, list[str]]:
        """What is minimized, that in words, and what is not certain about it."""
        from slimctl.training.distillation import Distillation, Weights
        from slimctl.training.losses import loss_named, scores_of
        from slimctl.training.objective import FromLabels
        from slimctl.training.pairs import Pairs, match_inputs, match_outputs
        from slimctl.training.teacher import Teacher

        if self.loss:
            tensor = scores_of(copy.model, self.loss, self.output_name)
            objective = FromLabels(tensor, loss_named(self.loss), self.loss)
            return objective, f"labels, {self.loss}", []
        taught = clone_model(context.reference)
        infer_shapes(taught)
        found = match_outputs(copy.model, taught, kind=stated(self.kind), labels=None)
        pairs = [_before_quantized(pair, copy.model) for pair in found]
        teacher = stack.enter_context(
            Teacher(
                taught,
                [pair.teacher for pair in pairs],
                match_inputs(copy.model, taught),
                threads=context.threads,
                keep_bytes=0 if parse_augmentations(self.augment) else _CACHED_BYTES,
            )
        )
        kinds = ", ".join(f"{pair.name} as {pair.kind}" for pair in pairs)
        taught_by = Distillation(teacher, Pairs(pairs), Weights(1.0, 1.0, 1.0, 0.0, 0.0), None)
        return taught_by, f"the float model: {kinds}", doubt(self.kind, pairs)


def _before_quantized(pair: OutputPair, model: ir.Model) -> OutputPair:
    """The scores of an output whose probabilities are quantized, too."""
    if pair.kind == "values" or pair.student != pair.name:
        return pair
    value = next(output for output in model.graph.outputs if output.name == pair.name)
    node = value.producer()
    while node is not None and node.op_type in (QUANTIZE, DEQUANTIZE) and node.inputs[0]:
        node = node.inputs[0].producer()
    scores = None if node is None or node.op_type not in _TO_PROBABILITIES else node.inputs[0]
    return pair if scores is None else pair._replace(student=scores.name or "")


def _scales(module: TrainableGraph, copy: TrainingCopy) -> Scales:
    from slimctl.training.scales import Bound, Scales, Step

    names = {member: scale.name for scale in copy.scales for member in scale.members}
    steps = [Step(scale.name, scale.elements, scale.highest) for scale in copy.scales]
    bounds = [
        Bound(
            bias.name,
            names[bias.weight_scale],
            names.get(bias.data_scale) or float(copy.fixed[bias.data_scale].reshape(())),
        )
        for bias in copy.biases
        if bias.weight_scale in names
    ]
    return Scales(module, steps, bounds, BIAS_LIMIT)
