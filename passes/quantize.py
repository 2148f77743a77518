"""Calibrated static quantization: weights, biases and activations become integers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import onnx_ir as ir
from pydantic import Field, field_validator

from slimctl.core.contract import (
    CalibrationMethod,
    Context,
    Effect,
    LinearInput,
    Outlook,
    Pass,
    PassReport,
)
from slimctl.core.errors import PassFailedError
from slimctl.core.target import ActivationType, Target
from slimctl.graph.edit import clone_model
from slimctl.graph.save import content_hash
from slimctl.graph.select import Selection, check_patterns
from slimctl.graph.shapes import infer_shapes
from slimctl.numerics.affine import INT8, UINT8, QuantizedType
from slimctl.passes._attempt import Built, Outcome, Work, known_range, place_all
from slimctl.passes._layers import linear_input, refuse_quantized
from slimctl.passes._widen import widen
from slimctl.passes.bias_correction import BiasCorrection
from slimctl.passes.equalize import Equalize
from slimctl.passes.fuse import Fuse

_EXPONENTS = (2.0, 1.5, 4.0, math.inf)
"""Powers of the error that ``auto`` tries: squares; one for networks in which rare large values
matter little (MobileNetV2), and two for those in which they matter more; infinity clips nothing."""

_GOOD_DB = 30.0
"""Outputs that keep so much, an error of a thirtieth, need no other model: trying costs time."""

_AS_GOOD_DB = 0.3
"""Among powers that are as good as this, the one that clips least is taken: other data may hold
larger values than the samples do."""


class Quantize(Pass):
    """Calibrated static int8 quantization (Q/DQ)."""

    name: ClassVar[str] = "quantize"
    summary: ClassVar[str] = "Calibrated static int8 quantization (Q/DQ)"
    effect: ClassVar[Effect] = Effect.APPROXIMATE
    needs_data: ClassVar[bool] = True
    not_after: ClassVar[frozenset[str]] = frozenset({"quantize"})

    mode: Literal["static"] = Field(
        "static", description="static: ranges of activations are fixed by calibration."
    )
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
    activation_type: ActivationType | None = Field(None, description="Integer type of activations.")
    per_channel: bool | None = Field(
        None,
        description="One weight scale per output channel, or one per weight.",
        json_schema_extra={"flags": ["--per-channel/--per-tensor"]},
    )
    reduce_range: bool | None = Field(
        None,
        description="7-bit weights where 16-bit sums could saturate (processors without VNNI).",
    )
    include: tuple[str, ...] = Field(
        (), description="Quantize only matching nodes: name glob, op:TYPE or re:REGEX; repeatable."
    )
    exclude: tuple[str, ...] = Field(
        (), description="Leave matching nodes in float: as --include; repeatable."
    )
    min_sqnr: float = Field(
        15.0,
        ge=0.0,
        description="Leave the most sensitive layers in float so that every output keeps this "
        "SQNR on calibration samples, in dB; 0 quantizes whatever can be.",
    )
    fuse: bool = Field(True, description="Run the fuse pass first.")
    equalize: bool | None = Field(
        None,
        description="Run the equalize pass first; it changes nothing where it does not help.",
        json_schema_extra={"unset": "with --calibration auto"},
    )
    bias_correction: bool = Field(True, description="Run the bias-correction pass afterwards.")

    @field_validator("include", "exclude")
    @classmethod
    def _patterns_compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        return check_patterns(patterns)

    @field_validator("calibration", mode="before")
    @classmethod
    def _entropy_is_kl(cls, value: object) -> object:
        return "kl" if value == "entropy" else value

    def resolve(self, target: Target) -> Self:
        """Takes the activation type, granularity and range from the target where not given.

        Equalization has to be tried out, which is what ``auto`` takes its time for.
        """
        chosen = {
            "equalize": self.calibration == "auto",
            "activation_type": target.activation_type,
            "per_channel": target.per_channel,
            "reduce_range": target.reduce_range,
        }
        missing = {key: value for key, value in chosen.items() if getattr(self, key) is None}
        return self.model_copy(update=missing)

    def expand(self) -> tuple[Pass, ...]:
        """Fuse, equalize, quantize, bias-correction, as far as they are wanted."""
        alone = self.model_copy(update={"fuse": False, "equalize": False, "bias_correction": False})
        before = (*((Fuse(),) if self.fuse else ()), *((Equalize(),) if self.equalize else ()))
        after = (BiasCorrection(),) if self.bias_correction else ()
        return (*before, alone, *after)

    def minimum_opset(self, model: ir.Model, target: Target) -> int:
        """What the target asks for: 13 where scales are per channel."""
        del model
        return target.minimum_opset

    def requires(self, model: ir.Model) -> None:
        """Refuses a model that is quantized already.

        Raises:
            UnsupportedModelError: Names the first quantized node.
        """
        refuse_quantized(model, "quantize the float model it was made from")

    def anticipates(self, model: ir.Model, target: Target) -> tuple[LinearInput, ...]:
        """Inputs whose means bias-correction will ask for."""
        placements = place_all(model, target, self._selection())
        layers = (layer for placement in placements for layer in placement.layers)
        return tuple(linear_input(layer) for layer in layers)

    def anticipates_ranges(self, model: ir.Model, target: Target) -> tuple[str, ...]:
        """Tensors that are calibrated if every layer can be quantized."""
        placements = place_all(model, target, self._selection())
        groups = [group for placement in placements for group in placement.sources.values()]
        sources = dict.fromkeys(source for group in groups for source in group)
        return tuple(s.name or "" for s in sources if known_range(s, target) is None)

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Places Q/DQ pairs, calibrates, and writes them.

        Raises:
            PassFailedError: Nothing can be quantized.
        """
        infer_shapes(model)
        widened = widen(model, self.name)
        outcome = Outcome()
        work, built = self._best_start(model, context, outcome)
        if widened:
            outcome.notes.append("float16 is computed as float32; inputs and outputs keep float16")
        if self.min_sqnr and context.has_data:
            built = work.keep_sqnr(built, self.min_sqnr, outcome)
        model.graph = built.model.graph
        return built.report(outcome, context.target)

    def _best_start(
        self, model: ir.Model, context: Context, outcome: Outcome
    ) -> tuple[Work, Built]:
        """Everything quantized; for ``auto`` with the exponent that serves the outputs best."""
        exponents = self._exponents(context.target)
        scores = self._scores(model, context) if len(exponents) > 1 else {}
        work = self._work(model, context, _best(scores) if scores else exponents[0])
        if scores:
            outcome.notes.append(
                f"auto: errors to the power {work.exponent:g} serve the outputs best, of "
                + ", ".join(f"{power:g} ({score:.1f} dB)" for power, score in scores.items())
            )
        return work, work.build(self._selection())

    def outlook(self, model: ir.Model, other: ir.Model, context: Context) -> Outlook | None:
        """What the worst output keeps with either of two models quantized.

        The second is tried with the power of the error that serves the first best: what it gains,
        it gains at least.
        """
        first, second = clone_model(model), clone_model(other)
        for clone in (first, second):
            infer_shapes(clone)
            widen(clone, self.name)
        try:
            scores = self._scores(first, context)
            if not scores:
                return None
            power = _best(scores)
            if scores[power] >= _GOOD_DB:
                return Outlook(scores[power], None)
            work = self._work(second, context, power)
            score = work.score(work.build(self._selection()))
        except PassFailedError:  # apply() will say so
            return None
        return None if score is None else Outlook(scores[power], score)

    def _exponents(self, target: Target) -> tuple[float, ...]:
        searched = self.calibration == "auto" and not target.activation_symmetric
        return _EXPONENTS if searched else _EXPONENTS[:1]

    def _scores(self, model: ir.Model, context: Context) -> dict[float, float]:
        """SQNR in dB that the worst output keeps, by exponent; empty where none is measured."""

        def measure() -> dict[float, float]:
            found: dict[float, float] = {}
            for exponent in self._exponents(context.target):
                work = self._work(model, context, exponent)
                score = work.score(work.build(self._selection()))
                if score is None:
                    return {}
                found[exponent] = score
            return found

        return context.remembered((self, content_hash(model)), measure)

    def _work(self, model: ir.Model, context: Context, exponent: float) -> Work:
        return Work(self.resolve(context.target), model, context, exponent)

    def _selection(self) -> Selection:
        return Selection(self.include, self.exclude)

    def activation_kind(self) -> QuantizedType:
        """The integer type of activations, once resolved."""
        return INT8 if self.activation_type == "int8" else UINT8


def _best(scores: Mapping[float, float]) -> float:
    """Of the exponents that are as good as the best, the one that clips least."""
    enough = max(scores.values()) - _AS_GOOD_DB
    return max(exponent for exponent, score in scores.items() if score >= enough)
