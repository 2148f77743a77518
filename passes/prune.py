"""Pruning: takes channels, heads or blocks out of the graph, or sets weights to zero."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import onnx_ir as ir
from pydantic import Field, JsonValue, field_validator, model_validator

from slimctl.core.contract import Context, Effect, Pass, PassReport
from slimctl.core.errors import OptionError
from slimctl.core.target import Target
from slimctl.graph.select import Patterns
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._importance import Importance
from slimctl.passes._layers import refuse_quantized
from slimctl.passes._prune_blocks import BlockPruning
from slimctl.passes._prune_channels import ChannelPruning
from slimctl.passes._prune_options import SPARSE, check_options
from slimctl.passes._prune_select import Scope, parse_ratio
from slimctl.passes._sparsity import sparsify, wanted_of
from slimctl.passes.finetune import Finetune
from slimctl.passes.fuse import Fuse, Rewrite

Structure = Literal["channel", "head", "layer", "2:4", "unstructured"]


_GOALS = ("sparsity", "target_macs", "target_size", "target_latency", "max_metric_drop")
_NOT_SET: dict[str, JsonValue] = {"unset": "not set"}


class Prune(Pass):
    """Remove the least important channels and what depends on them."""

    name: ClassVar[str] = "prune"
    summary: ClassVar[str] = "Remove the least important channels and what depends on them"
    effect: ClassVar[Effect] = Effect.APPROXIMATE
    uses_data: ClassVar[bool] = True
    uses_metric: ClassVar[bool] = True
    may_train: ClassVar[bool] = True

    structure: Structure = Field(
        "channel",
        description="What is removed: channels, attention heads, residual blocks (layer), two of "
        "every four weights, or single weights (unstructured).",
    )
    sparsity: float | None = Field(
        None,
        ge=0.0,
        lt=1.0,
        description="Share of the structures to remove.",
        json_schema_extra=_NOT_SET,
    )
    target_macs: float | None = Field(
        None,
        gt=0.0,
        lt=1.0,
        description="Instead of --sparsity: remove as little as brings multiply-accumulates down "
        "to this share of the original's.",
        json_schema_extra=_NOT_SET,
    )
    target_size: float | None = Field(
        None,
        gt=0.0,
        lt=1.0,
        description="Instead of --sparsity: as --target-macs, for the bytes of the weights.",
        json_schema_extra=_NOT_SET,
    )
    target_latency: float | None = Field(
        None,
        gt=0.0,
        lt=1.0,
        description="Instead of --sparsity: as --target-macs, for the time of one run, measured "
        "in onnxruntime on one thread.",
        json_schema_extra=_NOT_SET,
    )
    max_metric_drop: float | None = Field(
        None,
        ge=0.0,
        description="Instead of --sparsity: remove as much as costs no more than this of the "
        "metric on the evaluation data, 0.01 for one point.",
        json_schema_extra=_NOT_SET,
    )
    importance: Importance | None = Field(
        None,
        description="What decides which go: norm of the weights (l1, l2), energy contributed on "
        "data (activation), effect on the outputs by their gradients on data (taylor; needs the "
        "extra torch), or chance (random).",
        json_schema_extra={"unset": "activation with data, else l1"},
    )
    scope: Scope = Field(
        "local",
        description="Take the same share everywhere, or compare importance over the whole model "
        "(blocks always are).",
    )
    ratio: tuple[str, ...] = Field(
        (),
        description="Remove this share from matching layers, whatever the rest: name glob, op:TYPE "
        "or re:REGEX; repeatable.",
        json_schema_extra={"metavar": "PATTERN=SHARE"},
    )
    round_to: int | None = Field(
        None, ge=1, description="Channels that stay are a multiple of this."
    )
    min_channels: int = Field(8, ge=1, description="At least so many channels of a layer stay.")
    steps: int = Field(
        1, ge=1, le=100, description="Prune gradually: rank and refit again after each step."
    )
    reconstruct: bool | None = Field(
        None,
        description="Refit the remaining weights by least squares on data.",
        json_schema_extra={"unset": "with data"},
    )
    finetune: int = Field(
        0,
        ge=0,
        description="Epochs of training on labels after pruning, as 'slimctl finetune' does; needs "
        "the extra torch.",
    )
    include: Patterns = Field(
        (), description="Prune only matching layers: name glob, op:TYPE or re:REGEX; repeatable."
    )
    exclude: Patterns = Field(
        (), description="Leave matching layers alone: as --include; repeatable."
    )

    @field_validator("ratio")
    @classmethod
    def _ratios_parse(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        for entry in entries:
            parse_ratio(entry)
        return entries

    @model_validator(mode="after")
    def _one_goal(self) -> Self:
        given = [name for name in _GOALS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} both say how much to remove; give one")
        check_options(self)
        if not given and not self.ratio and self.structure != "2:4":
            raise ValueError(f"say how much to remove: {', '.join(_GOALS)} or ratio")
        return self

    def resolve(self, target: Target) -> Self:
        """Takes the alignment of kernels from the target where not given."""
        if self.round_to is not None:
            return self
        return self.model_copy(update={"round_to": target.channel_multiple})

    def requires_training(self) -> bool:
        """Whether the model is trained after it was pruned."""
        return self.finetune > 0

    def expand(self) -> tuple[Pass, ...]:
        """Training is a step of its own."""
        if not self.finetune:
            return (self,)
        return self.model_copy(update={"finetune": 0}), Finetune(epochs=self.finetune)

    def requires(self, model: ir.Model) -> None:
        """Refuses a quantized model: its scales were measured on all channels.

        Raises:
            UnsupportedModelError: Names the first quantized node.
        """
        refuse_quantized(model, "prune the float model and quantize the result")

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Ranks, removes, refits, as many times as there are steps.

        Raises:
            OptionError: Data are needed and not there, or a target is out of reach.
            PassFailedError: Nothing can be removed.
        """
        assert not self.finetune, "expand leaves that to a step of its own"
        self._check_data(model, context)
        Fuse(rewrites=(Rewrite.CONSTANTS,)).apply(model, context)
        infer_shapes(model)
        if self.structure in SPARSE:
            return sparsify(model, wanted_of(self, context), context)
        kind = BlockPruning if self.structure == "layer" else ChannelPruning
        work = kind(self.resolve(context.target), model, context)
        for step in range(1, self.steps + 1):
            work.step(step / self.steps)
        return work.report()

    def _check_data(self, model: ir.Model, context: Context) -> None:
        if self.max_metric_drop is not None and context.metric(model) is None:
            raise OptionError(
                "--max-metric-drop",
                "There is no metric to keep",
                fix="give --data SOURCE and --metric, or data.evaluation with a metric",
            )
        wanting = {
            f"--importance {self.importance}": self.importance in ("activation", "taylor"),
            "--reconstruct": self.reconstruct,
        }
        missing = [option for option, wanted in wanting.items() if wanted]
        if missing and not context.has_data:
            raise OptionError(missing[0], "It needs calibration data", fix="give --calib SOURCE")
