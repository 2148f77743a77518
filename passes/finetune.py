"""Fine-tuning: the weights of a graph learn from labels."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir
from pydantic import Field, field_validator

from slimctl.core.contract import Context, PassReport
from slimctl.passes._layers import refuse_quantized
from slimctl.passes._training import Run, TrainingPass, finished_plain, left_alone
from slimctl.training import require_torch
from slimctl.training.settings import check_loss


class Finetune(TrainingPass):
    """Train the weights of a graph on labels."""

    name: ClassVar[str] = "finetune"
    summary: ClassVar[str] = "Train the weights of a graph on labels"

    loss: str = Field(
        "cross-entropy",
        description="cross-entropy, bce, mse, ctc (blank is class 0), or module:function, which "
        "gets an output and labels as torch tensors.",
    )
    output_name: str = Field(
        "", description="The output that labels are for; the first of floats when empty."
    )

    @field_validator("loss")
    @classmethod
    def _loss_exists(cls, name: str) -> str:
        return check_loss(name)

    def requires(self, model: ir.Model) -> None:
        """Refuses a quantized model: its weights are integers.

        Raises:
            MissingExtraError: torch is not installed.
            UnsupportedModelError: Names the first quantized node.
        """
        require_torch(self.name)
        refuse_quantized(model, "fine-tune the float model, or use quantize --mode qat")

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Trains, and keeps the best weights."""
        from slimctl.training.learnable import separate_statistics
        from slimctl.training.losses import loss_named, scores_of
        from slimctl.training.module import TrainableGraph
        from slimctl.training.objective import FromLabels

        selection = self.selection()
        separate_statistics(model)
        tensor = scores_of(model, self.loss, self.output_name)
        objective = FromLabels(tensor, loss_named(self.loss), self.loss)
        module = TrainableGraph(model, selection)
        facts = {"loss": self.loss, "tensor": tensor, "learned": module.learned}
        run = Run(self.name, self.settings(), context, facts)
        outcome = run.train(model, module, objective, finished_plain)
        skipped, unused = left_alone(module, selection)
        return PassReport(
            changed={"weight": len(module.learned)},
            skipped=tuple(skipped),
            notes=(*outcome.notes(), *unused),
            timings=outcome.history(),
            facts=outcome.facts(),
        )
