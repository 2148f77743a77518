"""Quantization in every mode: the chain of passes that each stands for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import (
    Field,
    JsonValue,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from slimctl.core.contract import CalibrationMethod, Effect, Pass
from slimctl.core.errors import OptionError
from slimctl.core.target import ReducedRange, StoredActivationType, Target
from slimctl.graph.select import Patterns
from slimctl.graph.session import CPU
from slimctl.passes._training import OutputKind
from slimctl.passes._weights_algorithms import Algorithm
from slimctl.passes._weights_write import StoredType
from slimctl.passes.bias_correction import BiasCorrection
from slimctl.passes.convert_float import ConvertFloat
from slimctl.passes.equalize import Equalize
from slimctl.passes.fuse import Fuse
from slimctl.passes.legalize import Legalize
from slimctl.passes.qat import Qat
from slimctl.passes.qoperator import QOperator
from slimctl.passes.quantize_dynamic import QuantizeDynamic
from slimctl.passes.quantize_embeddings import QuantizeEmbeddings
from slimctl.passes.quantize_static import QuantizeStatic
from slimctl.passes.quantize_weights import QuantizeWeights
from slimctl.passes.round_weights import RoundWeights
from slimctl.passes.smooth import Smooth
from slimctl.passes.split_outliers import SplitOutliers

Mode = Literal["static", "qat", "dynamic", "weight-only", "fp16", "bf16"]

_SINGLE: Final[dict[Mode, tuple[type[Pass], dict[str, Any]]]] = {
    "static": (QuantizeStatic, {}),
    # Nothing is left in float for accuracy: that is what training is to bring back.
    "qat": (QuantizeStatic, {"min_sqnr": 0.0}),
    "dynamic": (QuantizeDynamic, {}),
    "weight-only": (QuantizeWeights, {}),
    "fp16": (ConvertFloat, {"kind": "fp16"}),
    "bf16": (ConvertFloat, {"kind": "bf16"}),
}
"""The pass of each mode, and what the mode says about it."""

_CHAIN: Final = frozenset(
    {
        *("fuse", "equalize", "smooth", "split_outliers", "rounding", "bias_correction"),
        "bias_inputs",
        *("embeddings", "legalize", "dims"),
    }
)
_TRAINING: Final = {
    "epochs": "epochs",
    "learning_rate": "learning_rate",
    "train_batch_size": "batch_size",
    "loss": "loss",
    "kind": "kind",
    "augment": "augment",
    "device": "device",
    "resume": "resume",
}
"""Options about training, and what the qat pass calls them."""

_OWN: Final = _CHAIN | {"mode", "format"} | set(_TRAINING)
"""Options about the chain; all others go to the mode's pass."""

_FORMATS: Final[dict[Mode, tuple[str, ...]]] = {
    "static": ("qdq", "qoperator"),
    "qat": ("qdq", "qoperator"),
    "weight-only": ("nbits", "qdq"),
}
"""How the result of a mode may be written, the usual way first."""

_CHAIN_OPTIONS: Final[dict[str, tuple[Mode, ...]]] = {
    "format": ("static", "qat", "weight-only"),
    "equalize": ("static", "qat"),
    "smooth": ("static", "qat", "dynamic"),
    "split_outliers": ("dynamic",),
    "rounding": ("static", "qat"),
    "bias_correction": ("static", "qat"),
    "bias_inputs": ("static", "qat"),
    "embeddings": ("static", "qat", "dynamic", "weight-only"),
    **dict.fromkeys(_TRAINING, ("qat",)),
}
"""Modes in which there is something that these can do."""


def _unset(default: str) -> dict[str, JsonValue]:
    """What the help shows for an option that the mode's pass decides."""
    return {"unset": default}


class Quantize(Pass):
    """Quantize: static, dynamic, weights only, or to float16 and bfloat16."""

    name: ClassVar[str] = "quantize"
    summary: ClassVar[str] = "Quantize: static int8, dynamic, weight-only int4, fp16 or bf16"
    effect: ClassVar[Effect] = Effect.APPROXIMATE
    needs_data: ClassVar[bool] = True
    uses_metric: ClassVar[bool] = True
    may_train: ClassVar[bool] = True

    mode: Mode | None = Field(
        None,
        description="static: ranges of activations are fixed by calibration; qat: static, then "
        "weights and scales are trained (all options of static apply); dynamic: ranges are "
        "taken at run time; weight-only: matrices are stored with few bits and computed in float; "
        "fp16, bf16: float types of 16 bits.",
        json_schema_extra=_unset(
            "static with --mixed-precision or --plan, else what the target gains from"
        ),
    )
    calibration: CalibrationMethod | None = Field(
        None,
        description="static: how the range of an activation is chosen from its histogram; auto "
        "tries several ways on the whole network.",
        json_schema_extra=_unset("auto"),
    )
    percentile: float | None = Field(
        None,
        gt=50.0,
        le=100.0,
        description="static: share of values kept by --calibration percentile, in percent.",
        json_schema_extra=_unset("99.999"),
    )
    activation_type: StoredActivationType | None = Field(
        None,
        description="static: integer type of activations; none stores weights as integers and "
        "computes in float.",
    )
    symmetric_activations: bool | None = Field(
        None, description="static: zero point of activations in the middle of their type."
    )
    weight_type: StoredType | None = Field(
        None,
        description="Integer type of weights; int4 with static and qat is computed as int8, fewer "
        "bits are for weight-only.",
        json_schema_extra=_unset("the target's, weight-only uint4"),
    )
    block_size: int | None = Field(
        None,
        ge=0,
        description="weight-only: inputs that share a scale, a power of two from 16; 0: one scale "
        "per output.",
        json_schema_extra=_unset("32"),
    )
    algorithm: Algorithm | None = Field(
        None,
        description="weight-only: rtn rounds to nearest, hqq sets outliers aside, gptq lets later "
        "weights make good for earlier ones, awq spares strong inputs; the last two need data.",
        json_schema_extra=_unset("rtn"),
    )
    symmetric: bool | None = Field(
        None,
        description="weight-only: no zero points.",
        json_schema_extra=_unset("signed types only"),
    )
    accuracy_level: int | None = Field(
        None,
        ge=0,
        le=4,
        description="weight-only: least precision that MatMulNBits may compute in: 0 that of the "
        "model, 1 float32, 2 float16, 3 bfloat16, 4 int8.",
        json_schema_extra=_unset("0"),
    )
    embeddings: bool | None = Field(
        None,
        description="All but fp16 and bf16: tables of which rows are looked up, too; static and "
        "dynamic store them as int8 where the target can look up integers.",
        json_schema_extra=_unset("yes"),
    )
    format: Literal["qdq", "nbits", "qoperator"] | None = Field(
        None,
        description="static: qdq writes Q/DQ pairs, qoperator the operators on integers that "
        "onnxruntime makes of them; weight-only: nbits writes onnxruntime's MatMulNBits, qdq the "
        "standard DequantizeLinear.",
        json_schema_extra=_unset("static qdq, weight-only nbits"),
    )
    per_channel: bool | None = Field(
        None,
        description="One weight scale per output channel, or one per weight.",
        json_schema_extra={"flags": ["--per-channel/--per-tensor"]},
    )
    reduce_range: ReducedRange | None = Field(
        None,
        description="static, dynamic: smaller weights where 16-bit sums saturate (processors "
        "without VNNI): in all layers where they could, or learned (static): where they do on "
        "calibration data.",
    )
    conv: bool | None = Field(
        None,
        description="dynamic: convolutions, too: a quarter of the size, and slower than float.",
        json_schema_extra=_unset("no"),
    )
    default_exclusions: bool | None = Field(
        None,
        description="static: leave in float what loses more than it gains for where it stands: "
        "residual Add of transformers, the inside of normalizations, Softmax, Concat of ranges far "
        "apart; a node that --include names exactly is quantized all the same.",
        json_schema_extra=_unset("yes"),
    )
    power_of_two: bool | None = Field(
        None, description="static: scales are powers of two, for hardware that shifts."
    )
    min_sqnr: float | None = Field(
        None,
        ge=0.0,
        description="static, dynamic: leave the most sensitive layers in float so that every "
        "output keeps this SQNR on calibration samples, in dB; 0 quantizes whatever can be.",
        json_schema_extra=_unset("15, dynamic 20"),
    )
    mixed_precision: bool | None = Field(
        None,
        description="static: give each layer a precision that the target runs (int8, int16, "
        "int8-weights, int4, fp16 or float), so that the bounds (--min-sqnr, --max-metric-drop, "
        "--max-size, --max-latency) are kept at the least cost, by measurement.",
        json_schema_extra=_unset("no"),
    )
    max_metric_drop: float | None = Field(
        None,
        ge=0.0,
        description="With --mixed-precision: largest loss of the metric on --data, 0.01 for one "
        "point.",
        json_schema_extra=_unset("none"),
    )
    max_size: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="With --mixed-precision: bytes of the weights as a share of the float "
        "model's; within it layers are as precise as possible.",
        json_schema_extra=_unset("none"),
    )
    max_latency: float | None = Field(
        None,
        gt=0.0,
        description="With --mixed-precision: as --max-size, for the time of one run, measured in "
        "onnxruntime on one thread.",
        json_schema_extra=_unset("none"),
    )
    minimize: Literal["latency", "size"] | None = Field(
        None,
        description="With --mixed-precision: what layers are counted by, time in onnxruntime (bit "
        "operations where the target's provider is not here) or bytes of weights.",
        json_schema_extra=_unset("latency"),
    )
    plan: str | None = Field(
        None,
        min_length=1,
        description="static: a plan file that says the precision of each layer, such as a run with "
        "--mixed-precision leaves beside its result.",
        json_schema_extra={"metavar": "FILE", "path": True, **_unset("none")},
    )
    keep_io: bool | None = Field(
        None,
        description="fp16, bf16: inputs and outputs of the model stay float32.",
        json_schema_extra=_unset("yes"),
    )
    include: Patterns = Field(
        (), description="Quantize only matching nodes: name glob, op:TYPE or re:REGEX; repeatable."
    )
    exclude: Patterns = Field(
        (), description="Leave matching nodes in float: as --include; repeatable."
    )
    fuse: bool = Field(True, description="Run the fuse pass first.")
    equalize: bool | None = Field(
        None,
        description="static: run the equalize pass first; it changes nothing where it does not "
        "help.",
        json_schema_extra=_unset("with --calibration auto"),
    )
    smooth: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        description="static, dynamic: run the smooth pass first, with this alpha; 0 leaves it out.",
        json_schema_extra=_unset("with --calibration auto, alpha searched"),
    )
    split_outliers: int | None = Field(
        None,
        ge=1,
        description="dynamic: run the split-outliers pass first: so many of the strongest channels "
        "that a layer reads are multiplied in float, where that halves the range of the others.",
        json_schema_extra=_unset("none"),
    )
    rounding: Literal["nearest", "second-order", "adaround"] | None = Field(
        None,
        description="static: second-order and adaround run the round-weights pass, which rounds "
        "weights so that what their layers compute changes least.",
        json_schema_extra=_unset("nearest"),
    )
    bias_correction: bool | None = Field(
        None,
        description="static: run the bias-correction pass afterwards.",
        json_schema_extra=_unset("yes"),
    )
    bias_inputs: Literal["float", "quantized"] | None = Field(
        None,
        description="With bias-correction: measure the mean error on inputs of the float model, or "
        "layer after layer on those in the quantized model.",
        json_schema_extra=_unset("float"),
    )
    epochs: int | None = Field(
        None,
        ge=1,
        description="qat: how often every training sample is seen.",
        json_schema_extra=_unset("10"),
    )
    learning_rate: float | None = Field(
        None,
        gt=0.0,
        description="qat: its largest value; a scale changes by about this share in one step.",
        json_schema_extra=_unset("0.001"),
    )
    train_batch_size: int | None = Field(
        None,
        ge=1,
        description="qat: samples whose gradients make one step.",
        json_schema_extra=_unset("128"),
    )
    loss: str | None = Field(
        None,
        min_length=1,
        description="qat: learn from labels: cross-entropy, bce, mse, ctc or module:function.",
        json_schema_extra=_unset("learn from the float model"),
    )
    kind: OutputKind | None = Field(
        None,
        description="qat: what the outputs of the float model hold: scores of classes, of yes or "
        "no each, or values.",
        json_schema_extra=_unset("auto: by the Softmax or Sigmoid at the end, else values"),
    )
    augment: str | None = Field(
        None,
        min_length=1,
        description="qat: random changes of image inputs, such as flip,shift:2.",
        json_schema_extra={"metavar": "LIST", **_unset("none")},
    )
    device: str | None = Field(
        None,
        min_length=1,
        description="qat: cpu, cuda or cuda:1.",
        json_schema_extra=_unset("cpu"),
    )
    resume: bool | None = Field(
        None,
        description="qat: continue from the checkpoint of the same run, if it was stopped.",
        json_schema_extra=_unset("no"),
    )
    legalize: bool | None = Field(
        None,
        description="Run the legalize pass around it: open sizes are fixed, and what the target's "
        "provider does not take is rewritten.",
        json_schema_extra=_unset("for targets other than processors"),
    )
    dims: tuple[str, ...] = Field(
        (),
        description="With legalize: sizes of open dimensions, batch=1 or input[2]=224; repeatable.",
        json_schema_extra={"metavar": "NAME=SIZE"},
    )

    @field_validator("calibration", mode="before")
    @classmethod
    def _entropy_is_kl(cls, value: object) -> object:
        return "kl" if value == "entropy" else value

    @field_serializer("plan", when_used="json")
    def _plan_name(self, plan: str | None) -> str | None:
        """Manifests are the same wherever the file lies; what it says is among the facts."""
        return None if plan is None else Path(plan).name

    @model_validator(mode="after")
    def _options_fit_the_mode(self) -> Self:
        mode = self.mode or "static"
        for name in self._given():
            modes = _CHAIN_OPTIONS.get(name, (mode,))
            known = name in _OWN or name in _SINGLE[mode][0].model_fields
            if not known or mode not in modes:
                raise ValueError(f"{name} has no meaning for mode {mode}")
        if self.dims and self.legalize is False:
            raise ValueError("dims are for the legalize pass, which is turned off")
        if self.bias_inputs and self.bias_correction is False:
            raise ValueError("bias_inputs is for the bias-correction pass, which is turned off")
        formats = _FORMATS.get(mode, ())
        if self.format not in (None, *formats):
            raise ValueError(f"mode {mode} writes format {' or '.join(formats)}")
        if self.format == "qoperator" and self.activation_type not in (None, "uint8", "int8"):
            raise ValueError("format qoperator takes activations of 8 bits")
        if self.format == "qoperator" and self.weight_type == "int4":
            raise ValueError("format qoperator takes weights of 8 bits")
        try:
            self._single()
            list(self._trained())
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            place = ": ".join(str(part) for part in problem["loc"])
            reason = problem["msg"].removeprefix("Value error, ")
            raise ValueError(": ".join(filter(None, (f"mode {mode}", place, reason)))) from error
        return self

    def _given(self) -> dict[str, Any]:
        """Options that somebody set."""
        fields = type(self).model_fields
        return {
            name: value
            for name in fields
            if (value := getattr(self, name)) != fields[name].get_default()
        }

    def resolve(self, target: Target) -> Self:
        """The target's mode where none is given, and whether there is anything to legalize.

        Raises:
            OptionError: An option has no meaning for the target's mode.
        """
        chosen = {
            "mode": self.mode or ("static" if self._mixes else target.quantize_mode),
            "legalize": (target.provider != CPU) if self.legalize is None else self.legalize,
        }
        try:
            return type(self).model_validate({**self.model_dump(), **chosen})
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
            raise OptionError(
                "--mode",
                f"Target {target.name} gains from mode {target.quantize_mode}: {problem}",
                fix="leave the option out, or say --mode static",
            ) from error

    @property
    def _mixes(self) -> bool:
        """Whether layers get precisions of their own, which is the static mode's work."""
        return bool(self.mixed_precision) or self.plan is not None

    def requires_training(self) -> bool:
        """Only where quantization is trained."""
        return self.mode == "qat"

    def requires_data(self) -> bool:
        """What the mode's pass says."""
        return self._single().requires_data()

    def _single(self) -> Pass:
        kind, fixed = _SINGLE[self.mode or "static"]
        own = _OWN - set(kind.model_fields)
        given = {name: value for name, value in self._given().items() if name not in own}
        return kind.model_validate({**fixed, **given})

    def expand(self) -> tuple[Pass, ...]:
        """The mode's pass with what makes it accurate and what writes its format, as wanted."""
        single = self._single()
        before: list[Pass] = [Fuse()] if self.fuse else []
        if self.legalize:  # sizes come last: the data may have more than one sample per batch
            before.append(Legalize(batch=0))
        after: list[Pass] = [Legalize(dims=self.dims)] if self.legalize or self.dims else []
        if isinstance(single, QuantizeStatic):
            return (*before, *self._around(single), *after)
        if self.smooth:
            before.append(Smooth(alpha=self.smooth))
        if self.split_outliers:
            before.append(SplitOutliers(channels=self.split_outliers))
        if isinstance(single, QuantizeDynamic):
            after = [*self._tables(), *after]
        return (*before, single, *after)

    def _around(self, single: QuantizeStatic) -> Iterator[Pass]:
        """The static pass with what raises its accuracy."""
        calibrated = single.requires_data()
        # They have to be tried out, which is what ``auto`` takes its time for.
        tried = single.calibration == "auto" and calibrated and not single.has_fine_steps()
        if tried if self.equalize is None else self.equalize:
            yield Equalize()
        if self.smooth or (tried and self.smooth is None):
            yield Smooth(alpha=self.smooth)
        yield single
        if self.rounding in ("second-order", "adaround"):
            yield RoundWeights(method=self.rounding)
        if calibrated if self.bias_correction is None else self.bias_correction:
            yield BiasCorrection(inputs=self.bias_inputs or "float")
        yield from self._trained()
        yield from self._tables()
        if self.format == "qoperator":
            yield QOperator()

    def _tables(self) -> Iterator[QuantizeEmbeddings]:
        if self.embeddings is not False:
            yield QuantizeEmbeddings(include=self.include, exclude=self.exclude)

    def _trained(self) -> Iterator[Qat]:
        """The pass that trains, in mode qat."""
        if self.mode == "qat":
            given = self._given()
            options = {name: given[ours] for ours, name in _TRAINING.items() if ours in given}
            yield Qat.model_validate({"reduce_range": self.reduce_range, **options})
