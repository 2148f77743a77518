"""Calibrated static quantization: weights, biases and activations become integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np
import onnx_ir as ir
from pydantic import Field, field_validator

from slimctl.core.contract import (
    CalibrationMethod,
    Context,
    Effect,
    LinearInput,
    Pass,
    PassReport,
    Range,
    RangeRequest,
)
from slimctl.core.errors import PassFailedError, UnsupportedModelError
from slimctl.core.target import ActivationType, Target
from slimctl.graph.bodies import observable_graphs
from slimctl.graph.edit import NameScope, all_nodes, const_array, remove_dead
from slimctl.graph.select import Selection, check_patterns
from slimctl.graph.shapes import infer_shapes
from slimctl.numerics.affine import INT8, UINT8, QuantizedType
from slimctl.passes._fusion_report import FusionReport, inspect_fusion
from slimctl.passes._layers import linear_input
from slimctl.passes._placement import Placement, place
from slimctl.passes._qdq import Emitter, WeightSettings, affines_for
from slimctl.passes._widen import widen
from slimctl.passes.bias_correction import BiasCorrection
from slimctl.passes.fuse import Fuse

_ALREADY_QUANTIZED = ("QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul")


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
        "auto takes the one with the least expected error for each tensor.",
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
    fuse: bool = Field(True, description="Run the fuse pass first.")
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
        """Takes the activation type, granularity and range from the target where not given."""
        chosen = {
            "activation_type": target.activation_type,
            "per_channel": target.per_channel,
            "reduce_range": target.reduce_range,
        }
        missing = {key: value for key, value in chosen.items() if getattr(self, key) is None}
        return self.model_copy(update=missing)

    def expand(self) -> tuple[Pass, ...]:
        """Fuse, quantize, bias-correction, as far as they are wanted."""
        alone = self.model_copy(update={"fuse": False, "bias_correction": False})
        before = (Fuse(),) if self.fuse else ()
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
        for node in all_nodes(model):
            if node.op_type in _ALREADY_QUANTIZED:
                raise UnsupportedModelError(
                    f"The model is quantized already: it holds {node.op_type}",
                    where=f"node '{node.name}'",
                    fix="quantize the float model it was made from",
                )

    def anticipates(self, model: ir.Model, target: Target) -> tuple[LinearInput, ...]:
        """Inputs whose means bias-correction will ask for."""
        placements = _placements(model, target, Selection(self.include, self.exclude))
        layers = (layer for placement in placements for layer in placement.layers)
        return tuple(linear_input(layer) for layer in layers)

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Places Q/DQ pairs, calibrates, and writes them.

        Raises:
            PassFailedError: Nothing can be quantized.
        """
        infer_shapes(model)
        widened = widen(model, self.name)
        options = self.resolve(context.target)
        selection = Selection(self.include, self.exclude)
        placements, ranges = _calibrated(model, options, selection, context)
        if not any(placement.integer or placement.layers for placement in placements):
            raise _nothing_to_do(placements, selection)
        operators = _operators(placements)
        emitters = self._emit(model, options, placements, ranges, context.target)
        fusion = inspect_fusion(model, context.target)
        skipped = [item for placement in placements for item in placement.skipped]
        return PassReport(
            changed=operators,
            skipped=(*skipped, *fusion.unfused),
            notes=(
                *(["float16 is computed as float32; inputs and outputs keep float16"] * widened),
                *_notes(emitters, fusion, selection),
            ),
            facts=_facts(emitters, fusion, ranges),
        )

    def _emit(
        self,
        model: ir.Model,
        options: Quantize,
        placements: list[Placement],
        ranges: Mapping[str, Range],
        target: Target,
    ) -> list[Emitter]:
        names = NameScope(model)
        weights = WeightSettings(bool(options.per_channel), bool(options.reduce_range))
        kind = options.activation_kind()
        emitters = [
            Emitter(
                names,
                placement,
                affines_for(placement, ranges, kind, symmetric=target.activation_symmetric),
                weights,
            )
            for placement in placements
        ]
        # Branches first: what they read from the graphs around them is still in place then.
        for emitter in reversed(emitters):
            emitter.emit()
        remove_dead(model)  # the float weights
        return emitters

    def activation_kind(self) -> QuantizedType:
        """The integer type of activations, once resolved."""
        return INT8 if self.activation_type == "int8" else UINT8


def _placements(
    model: ir.Model,
    target: Target,
    selection: Selection,
    unusable: frozenset[str] = frozenset(),
) -> list[Placement]:
    return [place(where.graph, target, selection, unusable) for where in observable_graphs(model)]


def _operators(placements: list[Placement]) -> dict[str, int]:
    nodes = {node for placement in placements for node in placement.integer}
    nodes |= {layer.node for placement in placements for layer in placement.layers}
    return dict(sorted(Counter(node.op_type for node in nodes).items()))


def _calibrated(
    model: ir.Model, options: Quantize, selection: Selection, context: Context
) -> tuple[list[Placement], dict[str, Range]]:
    """Placements in which every tensor has a range; tensors without one drop out of them."""
    unusable: frozenset[str] = frozenset()
    while True:
        placements = _placements(model, context.target, selection, unusable)
        sources = dict.fromkeys(
            source
            for placement in placements
            for group in placement.sources.values()
            for source in group
        )
        ranges = _ranges(list(sources), options, context, model)
        missing = {source.name or "" for source in sources} - set(ranges)
        if not missing:
            return placements, ranges
        unusable |= missing


def _ranges(
    sources: list[ir.Value], options: Quantize, context: Context, model: ir.Model
) -> dict[str, Range]:
    """Ranges of all sources: known by operator, read off constants, or calibrated."""
    known: dict[str, Range] = {}
    observed: list[str] = []
    for source in sources:
        name = source.name or ""
        producer = source.producer()
        array = const_array(source)
        if array is not None:
            known[name] = Range(float(np.min(array)), float(np.max(array)))
        elif producer is not None and producer.op_type in context.target.fixed_ranges:
            known[name] = Range(*context.target.fixed_ranges[producer.op_type])
        else:
            observed.append(name)
    request = RangeRequest(
        tensors=tuple(observed),
        method=options.calibration,
        percentile=options.percentile,
        levels=options.activation_kind().levels,
        symmetric=context.target.activation_symmetric,
    )
    return {**known, **(context.ranges(model, request) if observed else {})}


def _nothing_to_do(placements: list[Placement], selection: Selection) -> PassFailedError:
    skipped = [item for placement in placements for item in placement.skipped]
    unused = selection.unused()
    if unused:
        fix = f"the pattern '{unused[0]}' matches no layer; see 'slimctl inspect' for names"
    elif skipped:
        node, reason = skipped[0]
        fix = f"{len(skipped)} candidates were left in float; the first, '{node}': {reason}"
    else:
        fix = "the model has no Conv, ConvTranspose, Gemm or MatMul: there is nothing to gain here"
    return PassFailedError("quantize", "Nothing in this model can be quantized", fix=fix)


def _notes(emitters: list[Emitter], fusion: FusionReport, selection: Selection) -> list[str]:
    notes = [
        f"{fusion.fused} Q/DQ nodes fuse into {sum(fusion.kernels.values())} integer kernels; "
        f"{fusion.left} stay at borders to float operators"
    ]
    if fusion.unfused:
        names = ", ".join(item.node for item in fusion.unfused[:3])
        notes.append(f"{len(fusion.unfused)} layers compute in float in spite of Q/DQ: {names}")
    storage = [
        layer.node.op_type
        for emitter in emitters
        for layer in emitter.placement.layers
        if layer.node not in emitter.placement.integer
    ]
    if storage:
        notes.append(
            f"{len(storage)} {', '.join(sorted(set(storage)))}: weights stored as int8 and "
            "computed in float, since the target has no integer kernel"
        )
    shielded = sum(len(emitter.shielded) for emitter in emitters)
    if shielded:
        notes.append(
            f"{shielded} float layers between quantized ones are shielded by a Max, "
            "since onnxruntime would quantize their weights itself"
        )
    raised = [count for emitter in emitters for count in emitter.raised_channels.values()]
    if raised:
        notes.append(
            f"weight scale raised in {sum(raised)} channels of {len(raised)} layers "
            "so that the int32 bias does not overflow"
        )
    notes.extend(f"the pattern '{pattern}' matched nothing" for pattern in selection.unused())
    return notes


def _facts(
    emitters: list[Emitter], fusion: FusionReport, ranges: Mapping[str, Range]
) -> dict[str, Any]:
    clamps = Counter(kind for emitter in emitters for kind in emitter.removed_clamps)
    raised = {key: n for emitter in emitters for key, n in emitter.raised_channels.items()}
    return {
        "layers": sum(len(emitter.placement.layers) for emitter in emitters),
        "quantized_tensors": sum(len(emitter.placement.tensors) for emitter in emitters),
        "removed_clamps": dict(sorted(clamps.items())),
        "shielded": [name for emitter in emitters for name in emitter.shielded],
        "raised_channels": dict(sorted(raised.items())),
        "fusion": {
            "kernels": fusion.kernels,
            "fused": fusion.fused,
            "left": fusion.left,
            "unfused": [list(item) for item in fusion.unfused],
            "borders": fusion.borders,
        },
        "ranges": {name: [item.low, item.high] for name, item in sorted(ranges.items())},
    }
