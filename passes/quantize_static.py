"""Calibrated static quantization: weights, biases and activations become integers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

import onnx_ir as ir
from pydantic import Field, JsonValue, field_serializer, field_validator, model_validator

from slimctl.core.contract import (
    CalibrationMethod,
    Context,
    Effect,
    LinearInput,
    Outlook,
    Pass,
    PassReport,
)
from slimctl.core.errors import OptionError, PassFailedError
from slimctl.core.target import ReducedRange, StaticWeightType, StoredActivationType, Target
from slimctl.graph.edit import clone_model
from slimctl.graph.save import content_hash
from slimctl.graph.select import Patterns, Selection
from slimctl.graph.shapes import infer_shapes
from slimctl.numerics.affine import INT8, INT16, UINT8, UINT16, QuantizedType
from slimctl.passes._attempt import Built, Outcome, Rule, Work, known_range, place_all
from slimctl.passes._exclusions_ranges import mixed_tensors
from slimctl.passes._kept_float import keep_sqnr
from slimctl.passes._layers import QUANTIZERS, linear_input, refuse_quantized
from slimctl.passes._mixed import mix
from slimctl.passes._placement import Placement
from slimctl.passes._plan import read_plan
from slimctl.passes._precision_pairs import OPSET_16_BITS, lists_16_bits
from slimctl.passes._saturation import check_full_range, keep_full_range
from slimctl.passes._widen import widen

_KINDS = {"uint8": UINT8, "int8": INT8, "uint16": UINT16, "int16": INT16, "none": UINT8}

_MANY_LEVELS = 256

_BOUNDS = ("max_metric_drop", "max_size", "max_latency")

_NOT_SET: Final[dict[str, JsonValue]] = {"unset": "none"}

_RULES = (
    Rule("kl"),
    Rule("auto", 1.5),
    Rule("auto", 2.0),
    Rule("auto", 4.0),
    Rule("auto", math.inf),
)
"""What ``auto`` tries, from the rule that clips most to the one that clips nothing: the divergence
of the histogram, which fits long tails behind which little depends on single values, and powers of
the error, the higher the more rare large values matter."""

_FIRST = Rule("auto", 2.0)
"""Where nothing can be measured."""

_GOOD_DB = 30.0
"""Outputs that keep so much, an error of a thirtieth, need no other model: trying costs time."""

_AS_GOOD_DB = 0.3
"""Among rules that are as good as this, the one that clips least is taken: other data may hold
larger values than the samples do."""


class QuantizeStatic(Pass):
    """Calibrated static quantization: Q/DQ pairs with ranges that are fixed beforehand."""

    name: ClassVar[str] = "quantize-static"
    summary: ClassVar[str] = "Calibrated static quantization (Q/DQ)"
    effect: ClassVar[Effect] = Effect.APPROXIMATE
    needs_data: ClassVar[bool] = True
    uses_metric: ClassVar[bool] = True
    not_after: ClassVar[frozenset[str]] = QUANTIZERS

    calibration: CalibrationMethod = Field(
        "auto",
        description="How the range of an activation is chosen from its histogram; "
        "auto takes, for each tensor, the range with the least expected squared error, in which "
        "clipping weighs more than rounding.",
    )
    percentile: float = Field(
        99.999,
        gt=50.0,
        le=100.0,
        description="Share of values kept by --calibration percentile, in percent.",
    )
    activation_type: StoredActivationType | None = Field(
        None,
        description="Integer type of activations; none stores weights as integers and computes in "
        "float.",
    )
    symmetric_activations: bool | None = Field(
        None, description="Zero point of activations in the middle of their type."
    )
    weight_type: StaticWeightType | None = Field(
        None,
        description="Integer type of weights; uint8 is int8 moved by 128, int4 is stored in 4 bits "
        "and computed as int8.",
    )
    per_channel: bool | None = Field(
        None,
        description="One weight scale per output channel, or one per weight.",
        json_schema_extra={"flags": ["--per-channel/--per-tensor"]},
    )
    reduce_range: ReducedRange | None = Field(
        None,
        description="Smaller weights where 16-bit sums saturate (processors without VNNI): in all "
        "layers where they could, or learned: where they do on calibration data.",
    )
    include: Patterns = Field(
        (), description="Quantize only matching nodes: name glob, op:TYPE or re:REGEX; repeatable."
    )
    exclude: Patterns = Field(
        (), description="Leave matching nodes in float: as --include; repeatable."
    )
    default_exclusions: bool = Field(
        True,
        description="Leave in float what loses more than it gains for where it stands: residual "
        "Add of transformers, the inside of normalizations, Softmax, Concat of ranges far apart; "
        "a node that --include names exactly is quantized all the same.",
    )
    power_of_two: bool | None = Field(
        None, description="Scales are powers of two, for hardware that shifts."
    )
    min_sqnr: float = Field(
        15.0,
        ge=0.0,
        description="Leave the most sensitive layers in float so that every output keeps this "
        "SQNR on calibration samples, in dB; 0 quantizes whatever can be.",
    )

    mixed_precision: bool = Field(
        False,
        description="Give each layer a precision that the target runs (int8, int16, int8-weights, "
        "int4, fp16 or float), so that the bounds (--min-sqnr, --max-metric-drop, --max-size, "
        "--max-latency) are kept at the least cost, by measurement.",
    )
    max_metric_drop: float | None = Field(
        None,
        ge=0.0,
        description="With mixed precision: largest loss of the metric on the evaluation data, "
        "0.01 for one point.",
        json_schema_extra=_NOT_SET,
    )
    max_size: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="With mixed precision: bytes of the weights as a share of the float model's; "
        "within it layers are as precise as possible.",
        json_schema_extra=_NOT_SET,
    )
    max_latency: float | None = Field(
        None,
        gt=0.0,
        description="With mixed precision: as --max-size, for the time of one run, measured in "
        "onnxruntime on one thread.",
        json_schema_extra=_NOT_SET,
    )
    minimize: Literal["latency", "size"] = Field(
        "latency",
        description="With mixed precision: what layers are counted by, time in onnxruntime (bit "
        "operations where the target's provider is not here) or bytes of weights.",
    )
    plan: str | None = Field(
        None,
        min_length=1,
        description="A plan file that says the precision of each layer, such as a run with "
        "--mixed-precision leaves beside its result.",
        json_schema_extra={"metavar": "FILE", "path": True, **_NOT_SET},
    )

    @field_serializer("plan", when_used="json")
    def _plan_name(self, plan: str | None) -> str | None:
        """Manifests are the same wherever the file lies; what it says is among the facts."""
        return None if plan is None else Path(plan).name

    @model_validator(mode="after")
    def _bounds_belong_together(self) -> Self:
        bounds = [name for name in _BOUNDS if getattr(self, name) is not None]
        if bounds and not self.mixed_precision:
            raise ValueError(f"{bounds[0]} is a bound of mixed_precision, which is not asked for")
        if self.plan is not None and self.mixed_precision:
            raise ValueError("a plan says what mixed_precision would look for; give one of them")
        if self.max_size is not None and self.max_latency is not None:
            raise ValueError("give one of max_size and max_latency")
        return self

    @field_validator("calibration", mode="before")
    @classmethod
    def _entropy_is_kl(cls, value: object) -> object:
        return "kl" if value == "entropy" else value

    def resolve(self, target: Target) -> Self:
        """Takes from the target what is not given.

        Raises:
            OptionError: The target has no way to store such weights.
        """
        if self.weight_type == "int4" and "int4" not in target.narrow_weights:
            raise OptionError(
                "--weight-type",
                f"Target {target.name} does not widen int4 weights to the int8 of its kernels",
                fix=f"use --weight-type {target.weight_type}, or --target cpu",
            )
        chosen = {
            "activation_type": target.activation_type,
            "symmetric_activations": target.activation_symmetric,
            "weight_type": target.weight_type,
            "per_channel": target.per_channel,
            "reduce_range": target.reduce_range,
            "power_of_two": target.power_of_two,
        }
        missing = {key: value for key, value in chosen.items() if getattr(self, key) is None}
        return self.model_copy(update=missing)

    def requires_data(self) -> bool:
        """Not where activations stay in float."""
        return self.activation_type != "none"

    def minimum_opset(self, model: ir.Model, target: Target) -> int:
        """What the target asks for (13 where scales are per channel); 21 for 16 or 4 bits."""
        del model
        wide = self.activation_type in ("uint16", "int16") or self._may_mix_16_bits(target)
        newer = wide or self.weight_type == "int4"
        return max(target.minimum_opset, OPSET_16_BITS if newer else 0)

    def _may_mix_16_bits(self, target: Target) -> bool:
        """Whether some layers may get activations of 16 bits."""
        if self.plan is not None:
            return read_plan(Path(self.plan)).has("int16")
        return self.mixed_precision and lists_16_bits(target)

    def requires(self, model: ir.Model) -> None:
        """Refuses a model that is quantized already.

        Raises:
            UnsupportedModelError: Names the first quantized node.
        """
        refuse_quantized(model, "quantize the float model it was made from")

    def anticipates(self, model: ir.Model, target: Target) -> tuple[LinearInput, ...]:
        """Inputs whose means bias-correction will ask for."""
        placements = self._placements(model, target)
        layers = (layer for placement in placements for layer in placement.layers)
        return tuple(linear_input(layer) for layer in layers)

    def anticipates_ranges(self, model: ir.Model, target: Target) -> tuple[str, ...]:
        """Tensors that are calibrated if every layer can be quantized."""
        placements = self._placements(model, target)
        groups = [group for placement in placements for group in placement.sources.values()]
        mixed = mixed_tensors(placements, target) if self.default_exclusions else []
        sources = dict.fromkeys((*(source for group in groups for source in group), *mixed))
        return tuple(s.name or "" for s in sources if known_range(s, target) is None)

    def _placements(self, model: ir.Model, target: Target) -> list[Placement]:
        return place_all(
            model, self.effective(target), self._selection(), patterns=self.default_exclusions
        )

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Places Q/DQ pairs, calibrates, and writes them.

        Raises:
            PassFailedError: Nothing can be quantized.
        """
        infer_shapes(model)
        widened = widen(model, self.name)
        outcome = Outcome()
        work, built = self._best_start(model, context, outcome)
        learned = self.resolve(context.target).reduce_range == "learned"
        if learned:
            built = keep_full_range(work, built, outcome)
        if widened:
            outcome.notes.append("float16 is computed as float32; inputs and outputs keep float16")
        better = context.target.quantize_mode
        if better != "static" and not self._mixes:
            outcome.warnings.append(
                f"{context.target.name} gains little or nothing from integers: quantize with "
                f"--mode {better}"
            )
        mixed = None
        if self._mixes:
            mixed = mix(self, work, built, outcome)
            built = check_full_range(work, mixed.built, outcome) if learned else mixed.built
        elif self.min_sqnr and context.has_data:
            kept = keep_sqnr(work, built, self.min_sqnr, outcome)
            changed = kept is not built
            built = check_full_range(work, kept, outcome) if learned and changed else kept
        model.graph = built.model.graph
        report = built.report(outcome, work.target)
        if mixed is None:
            return report
        facts = {**report.facts, "plan": mixed.plan.model_dump(mode="json")}
        return replace(report, facts=facts, tables=(*report.tables, *mixed.tables))

    def _best_start(
        self, model: ir.Model, context: Context, outcome: Outcome
    ) -> tuple[Work, Built]:
        """Everything quantized; for ``auto`` by the rule that serves the outputs best."""
        try:
            return self._best_quantized(model, context, outcome)
        except PassFailedError:
            if not self._mixes:
                raise
        # There are other precisions than integers.
        work = self._work(model, context, _FIRST)
        return work, work.untouched()

    @property
    def _mixes(self) -> bool:
        """Whether layers get precisions of their own."""
        return self.mixed_precision or self.plan is not None

    def _best_quantized(
        self, model: ir.Model, context: Context, outcome: Outcome
    ) -> tuple[Work, Built]:
        scores = self._scores(model, context) if len(self._rules(context.target)) > 1 else {}
        rule = _best(scores) if scores else self._rules(context.target)[0]
        if scores:
            outcome.notes.append(
                f"auto: {rule} serves the outputs best, of "
                + ", ".join(f"{other} ({score:.1f} dB)" for other, score in scores.items())
            )
        work = self._work(model, context, rule)
        return work, work.build(self._selection())

    def outlook(self, model: ir.Model, other: ir.Model, context: Context) -> Outlook | None:
        """What the worst output keeps with either of two models quantized.

        The second is tried by the rule that serves the first best: what it gains, it gains at
        least.
        """
        if model.opset_imports.get("", 0) < self.minimum_opset(model, context.target):
            return None
        first, second = clone_model(model), clone_model(other)
        for clone in (first, second):
            infer_shapes(clone)
            widen(clone, self.name)
        try:
            scores = self._scores(first, context)
            if not scores:
                return None
            rule = _best(scores)
            if other is model or scores[rule] >= _GOOD_DB:
                return Outlook(scores[rule], None)
            work = self._work(second, context, rule)
            score = work.score(work.build(self._selection()))
        except PassFailedError:  # apply() will say so
            return None
        return None if score is None else Outlook(scores[rule], score)

    def _rules(self, target: Target) -> tuple[Rule, ...]:
        if self.calibration != "auto":
            return (Rule(self.calibration),)
        if self.has_fine_steps():
            return (Rule("minmax"),)  # steps are so fine that clipping gains nothing
        # Symmetric ranges have one end to choose: squares serve them.
        return (_FIRST,) if self.effective(target).activation_symmetric else _RULES

    def effective(self, target: Target) -> Target:
        """The target with the options of this pass in place of its defaults."""
        options = self.resolve(target)
        changes: dict[str, Any] = {"activation_symmetric": options.symmetric_activations}
        if options.activation_type == "none":
            stored = (*target.weighted, *target.storage_only)
            changes |= {"weighted": (), "storage_only": stored}
            changes |= {"elementwise": (), "unary": (), "data_movement": ()}
        return target.model_copy(update=changes)

    def _scores(self, model: ir.Model, context: Context) -> dict[Rule, float]:
        """SQNR in dB that the worst output keeps, by rule; empty where none is measured."""

        def measure() -> dict[Rule, float]:
            found: dict[Rule, float] = {}
            for rule in self._rules(context.target):
                work = self._work(model, context, rule)
                score = work.score(work.build(self._selection()))
                if score is None:
                    return {}
                found[rule] = score
            return found

        return context.remembered((self, content_hash(model)), measure)

    def _work(self, model: ir.Model, context: Context, rule: Rule) -> Work:
        return Work(self.resolve(context.target), model, context, rule)

    def _selection(self) -> Selection:
        return Selection(self.include, self.exclude)

    def has_fine_steps(self) -> bool:
        """Whether activations have so many levels that evening out channels gains nothing."""
        return self.activation_kind().levels > _MANY_LEVELS

    def activation_kind(self) -> QuantizedType:
        """The integer type of activations, once resolved."""
        return _KINDS[self.activation_type or "uint8"]


def _best(scores: Mapping[Rule, float]) -> Rule:
    """Of the rules that are as good as the best, the one that clips least."""
    enough = max(scores.values()) - _AS_GOOD_DB
    return [rule for rule, score in scores.items() if score >= enough][-1]
