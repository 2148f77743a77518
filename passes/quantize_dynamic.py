"""Dynamic quantization: integer weights, activations quantized at run time, no calibration.

Each run takes the scale of an activation from its own minimum and maximum (DynamicQuantizeLinear).
Data are not needed; with data, layers that cost the outputs too much stay in float. Without them
that is decided by the graph alone, and only layers behind gates do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Final, Literal, Self

import onnx_ir as ir
from pydantic import Field

from slimctl.core.contract import Context, Effect, Outlook, Pass, PassReport, Skipped
from slimctl.core.target import Target, WeightType
from slimctl.graph.edit import all_nodes, clone_model, remove_dead
from slimctl.graph.select import Patterns, Selection
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._dynamic_gates import gated_layers
from slimctl.passes._dynamic_operators import WRITERS, write
from slimctl.passes._dynamic_weights import Rounding
from slimctl.passes._dynamic_write import Writer
from slimctl.passes._fallback import (
    Choice,
    choose_float_layers,
    float_prices,
    float_reason,
    noise_of,
)
from slimctl.passes._layers import QUANTIZERS, refuse_quantized

_OPSET: Final = 11  # of DynamicQuantizeLinear
_LEFT: Final = {
    ("", "ConvTranspose"): "there is no integer ConvTranspose",
    ("", "GRU"): "onnxruntime has no integer GRU",
    ("", "RNN"): "onnxruntime has no integer RNN",
}
_CONV: Final = "onnxruntime's ConvInteger is slower than a float Conv: ask for it with 'conv'"
_GATED: Final = (
    "it reads a product of two layers, in which single tokens of language models are a thousand "
    "times as large as all others: one scale for all would leave nothing of those"
)
_MARGIN_DB: Final = 0.5
"""Other data than those that the choice was made on lose a little more."""


class QuantizeDynamic(Pass):
    """Integer weights, activations quantized at run time."""

    name: ClassVar[str] = "quantize-dynamic"
    summary: ClassVar[str] = "Integer weights, activations quantized at run time"
    effect: ClassVar[Effect] = Effect.APPROXIMATE
    uses_data: ClassVar[bool] = True
    not_after: ClassVar[frozenset[str]] = QUANTIZERS

    weight_type: WeightType | None = Field(
        None,
        description="Integer type of weights.",
        json_schema_extra={"unset": "the target's"},
    )
    per_channel: bool | None = Field(
        None,
        description="One weight scale per output channel, or one per weight.",
        json_schema_extra={"flags": ["--per-channel/--per-tensor"], "unset": "the target's"},
    )
    reduce_range: Literal["all", "none"] | None = Field(
        None,
        description="Weights of all layers, or none, use 7 bits, for kernels that add products in "
        "16 bits.",
        json_schema_extra={"unset": "the target's"},
    )
    conv: bool = Field(
        False,
        description="Quantize Conv as well: a quarter of the size, and slower than float.",
    )
    min_sqnr: float = Field(
        20.0,
        ge=0.0,
        description="With data, the layers that hurt most stay in float until every output keeps "
        "this many dB; without, those behind gates do. 0 quantizes everything.",
    )
    include: Patterns = Field(
        (), description="Quantize only matching layers: name glob, op:TYPE or re:REGEX; repeatable."
    )
    exclude: Patterns = Field(
        (), description="Leave matching layers in float: as --include; repeatable."
    )

    def resolve(self, target: Target) -> Self:
        """The target's types in place of what was left open."""
        kind = self.weight_type or target.weight_type
        per_channel = target.per_channel if self.per_channel is None else self.per_channel
        # Nothing is calibrated that layers could be learned from.
        reduced = self.reduce_range or ("none" if target.reduce_range == "none" else "all")
        return self.model_copy(
            update={"weight_type": kind, "per_channel": per_channel, "reduce_range": reduced}
        )

    def minimum_opset(self, model: ir.Model, target: Target) -> int:
        """DynamicQuantizeLinear came with operator set 11."""
        del model, target
        return _OPSET

    def requires(self, model: ir.Model) -> None:
        """Wants a float model.

        Raises:
            UnsupportedModelError: It is quantized; names the first such node.
        """
        refuse_quantized(model, "quantize the float model")

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Quantizes every layer that can be, or as many as the outputs allow."""
        infer_shapes(model)
        selection = self._selection()
        built, changed, skipped = self._build(model, context.target, selection)
        if not changed:
            return PassReport(skipped=tuple(skipped), warnings=(_nothing_to_do(selection),))
        notes: list[str] = []
        together = context.fidelity(built, "many") if self.min_sqnr and context.has_data else {}
        if together:
            found = self._in_float(model, together, tuple(changed), context)
        else:
            found = dict.fromkeys(self._gated(model, changed), _GATED) if self.min_sqnr else {}
        if found:
            selection = self._selection(found)
            built, changed, skipped = self._build(model, context.target, selection)
            notes.append(f"{len(found)} layers stay in float for accuracy")
        if found and not together:
            notes.append("which layers need to is measured with --calib; --min-sqnr 0 asks nobody")
        notes.extend(f"the pattern '{pattern}' matched nothing" for pattern in selection.unused())
        model.graph = built.graph
        return PassReport(
            changed=dict(sorted(Counter(changed.values()).items())),
            skipped=tuple(skipped),
            notes=tuple(notes),
        )

    def outlook(self, model: ir.Model, other: ir.Model, context: Context) -> Outlook | None:
        """What the worst output keeps with either of two models quantized."""
        scores = []
        for each in (model, other):
            clone = clone_model(each)
            infer_shapes(clone)
            built, changed, _ = self._build(clone, context.target, self._selection())
            fidelity = context.fidelity(built, "scores") if changed else {}
            if not fidelity:
                return None
            scores.append(min(fidelity.values()))
        return Outlook(*scores)

    def _selection(self, reasons: dict[str, str] | None = None) -> Selection:
        return Selection(self.include, self.exclude, reasons or {})

    def _build(
        self, model: ir.Model, target: Target, selection: Selection
    ) -> tuple[ir.Model, dict[str, str], list[Skipped]]:
        """A quantized clone, the operators of the quantized nodes by name, and those left alone."""
        clone = clone_model(model)
        options = self.resolve(target)
        rounding = Rounding(
            bool(options.per_channel), options.reduce_range == "all", options.weight_type or "int8"
        )
        writer = Writer(clone, rounding, self.name)
        changed: dict[str, str] = {}
        skipped: list[Skipped] = []
        for node in _candidates(clone):
            name, op_type = node.name or "", node.op_type
            reason = selection.reason_against(node) or self._left(node) or write(writer, node)
            if reason:
                skipped.append(Skipped(name, reason))
            else:
                changed[name] = op_type
        remove_dead(clone)
        return clone, changed, skipped

    def _left(self, node: ir.Node) -> str:
        if node.op_type == "Conv" and not self.conv:
            return _CONV
        return _LEFT.get((node.domain, node.op_type), "")

    def _gated(self, model: ir.Model, changed: Mapping[str, str]) -> tuple[str, ...]:
        """Layers behind gates that nobody asked for by name."""
        selection = self._selection()
        gated = [node for node in gated_layers(model) if not selection.is_named(node)]
        return tuple(node.name or "" for node in gated if node.name in changed)

    def _in_float(
        self,
        model: ir.Model,
        together: Mapping[str, float],
        layers: tuple[str, ...],
        context: Context,
    ) -> dict[str, str]:
        """Layers that stay in float so that every output keeps ``min_sqnr``, with the reason."""
        if min(together.values()) >= self.min_sqnr:
            return {}

        def measure(chosen: tuple[str, ...]) -> float:
            reasons = dict.fromkeys(chosen, "float")
            without, _, _ = self._build(model, context.target, self._selection(reasons))
            return min(context.fidelity(without, "many").values())

        aim = self.min_sqnr + _MARGIN_DB
        gated = self._gated(model, dict.fromkeys(layers, ""))
        gates = Choice(gated, measure(gated)) if gated else None
        # Where some gates are to blame, other layers need not be looked at one by one.
        blamed = gated if gates is not None and gates.sqnr_db >= aim else layers
        alone = {name: self._alone(model, name, layers, context) for name in blamed}
        noise = {name: noise_of(found) for name, found in alone.items()}
        prices = float_prices(model, noise)
        choice = choose_float_layers(noise_of(together), noise, prices, aim, measure)
        if blamed is gated and (choice is None or choice.sqnr_db < aim):
            choice = gates
        if choice is None or choice.sqnr_db <= min(together.values()):
            return {}
        return {name: float_reason(noise[name]) for name in choice.layers}

    def _alone(
        self, model: ir.Model, name: str, layers: Sequence[str], context: Context
    ) -> dict[str, float]:
        reasons = {other: "float" for other in layers if other != name}
        built, _, _ = self._build(model, context.target, self._selection(reasons))
        return dict(context.fidelity(built, "scores"))


def _candidates(model: ir.Model) -> Iterator[ir.Node]:
    """Nodes of operators that carry weights. A list: the graph changes on the way."""
    known = WRITERS.keys() | _LEFT.keys()
    yield from [node for node in all_nodes(model) if (node.domain, node.op_type) in known]


def _nothing_to_do(selection: Selection) -> str:
    unused = selection.unused()
    if unused:
        return f"nothing was quantized: the pattern '{unused[0]}' matches no layer"
    return "nothing was quantized: no MatMul, Gemm, LSTM or Attention with constant weights"
