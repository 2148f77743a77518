"""Attempts at quantizing one float model: what each placement of Q/DQ pairs costs its outputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx_ir as ir

from slimctl.core.contract import (
    CalibrationMethod,
    Context,
    PassReport,
    Range,
    RangeRequest,
    SampleSet,
)
from slimctl.core.errors import PassFailedError
from slimctl.core.target import Target
from slimctl.graph.bodies import observable_graphs
from slimctl.graph.edit import NameScope, all_nodes, clone_model, const_array, remove_dead
from slimctl.graph.select import Selection
from slimctl.numerics.affine import Affine, QuantizedType
from slimctl.numerics.blocks import Blocks
from slimctl.passes._exclusions import by_pattern
from slimctl.passes._exclusions_ranges import by_range, mixed_tensors
from slimctl.passes._layers import is_linear
from slimctl.passes._mixed_words import widened, without_pairs
from slimctl.passes._placement import Placement, place
from slimctl.passes._provider_view import look_at
from slimctl.passes._qdq import Emitter, affines_for
from slimctl.passes._weights import WeightSettings
from slimctl.passes.bias_correction import BiasCorrection, correct_biases

if TYPE_CHECKING:
    from slimctl.passes.quantize_static import QuantizeStatic


class Rule(NamedTuple):
    """How ranges are chosen.

    Attributes:
        method: As in a request for ranges.
        exponent: For ``auto``, the power of the error.
    """

    method: CalibrationMethod
    exponent: float = 2.0

    def __str__(self) -> str:
        if self.method != "auto":
            return self.method
        return "nothing clipped" if math.isinf(self.exponent) else f"error^{self.exponent:g}"


@dataclass
class Outcome:
    """What is said about the whole, collected on the way.

    Attributes:
        notes: Sentences.
        warnings: Sentences that the user must not miss.
        alone: SQNR in dB of the worst output with one layer changed, by kind of change and layer.
    """

    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    alone: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Built:
    """A quantized model and how it came about."""

    model: ir.Model
    selection: Selection
    emitters: list[Emitter]
    ranges: Mapping[str, Range]
    operators: Mapping[str, int]

    def layers(self) -> list[str]:
        """Names of the quantized layers."""
        return [
            node.name or ""
            for emitter in self.emitters
            for node in emitter.placement.graph
            if node in emitter.placement.integer or node in emitter.layers
            if is_linear(node)
        ]

    def reduced(self) -> frozenset[str]:
        """Names of the layers whose weights have less than 8 bits."""
        return frozenset(name for emitter in self.emitters for name in emitter.reduced_channels)

    def report(self, outcome: Outcome, target: Target) -> PassReport:
        """What was done, and what the provider makes of it."""
        seen = look_at(self.model, target)
        others = set(chain(*without_pairs(self.selection).values()))
        skipped = [
            item
            for emitter in self.emitters
            for item in emitter.placement.skipped
            if item.node not in others
        ]
        stored = {n.name for e in self.emitters for n in e.layers - e.placement.integer}
        return PassReport(
            changed=self.operators,
            skipped=(*skipped, *(i for i in seen.skipped if i.node not in stored | others)),
            notes=(*outcome.notes, *seen.notes, *_notes(self.emitters, self.selection)),
            warnings=tuple(outcome.warnings),
            facts={
                **_facts(self.emitters, self.ranges),
                **seen.facts,
                **({"alone_db": outcome.alone} if outcome.alone else {}),
            },
        )


class Work:
    """Quantizes clones of one float model, with more or fewer layers left in float.

    Attributes:
        full_range: Names of layers whose weights keep 8 bits where ranges are reduced.
        blocks: Weights in blocks that were rounded already, by precision and matrix.
        magnitudes: Largest magnitudes of tensors on the data, once somebody has asked.
    """

    def __init__(
        self, options: QuantizeStatic, model: ir.Model, context: Context, rule: Rule
    ) -> None:
        self.options = options
        self.model = model
        self.context = context
        self.target = options.effective(context.target)
        self.rule = rule
        self.known: dict[str, Range] = {}
        self.known_wide: dict[str, Range] = {}
        self.full_range: frozenset[str] = frozenset()
        self.blocks: dict[tuple[object, ...], Blocks] = {}
        self.magnitudes: Mapping[str, float] | None = None

    def build(self, selection: Selection) -> Built:
        """A quantized clone.

        Raises:
            PassFailedError: The selection leaves nothing to quantize.
        """
        clone = clone_model(self.model)
        placements = self._calibrated(clone, selection)
        others = without_pairs(selection)
        quantized = any(placement.integer or placement.layers for placement in placements)
        if not quantized and not others:
            raise _nothing_to_do(placements, selection, self.target)
        apart = [names for kind, names in others.items() if kind.keeps_itself(self.target)]
        operators = _operators(placements, set(chain(*others.values())))
        emitters = self._emit(clone, placements, frozenset(chain(*apart)))
        for kind, names in others.items():
            kind.write(clone, names, self)
        return Built(clone, selection, emitters, dict(self.known), operators)

    def untouched(self) -> Built:
        """A clone in which nothing is quantized."""
        clone = clone_model(self.model)
        reasons = {node.name: "not looked at" for node in all_nodes(clone) if node.name}
        selection = Selection(reasons=reasons)
        placements = place_all(clone, self.target, selection, patterns=False)
        return Built(clone, selection, self._emit(clone, placements), {}, {})

    def _emit(
        self, model: ir.Model, placements: list[Placement], apart: frozenset[str] = frozenset()
    ) -> list[Emitter]:
        names = NameScope(model)
        options = self.options
        weights = WeightSettings(
            bool(options.per_channel),
            options.reduce_range in ("all", "learned"),
            unsigned=options.weight_type == "uint8",
            power_of_two=bool(options.power_of_two),
            bits=4 if options.weight_type == "int4" else 8,
        )
        emitters = [self._emitter(names, p, weights, apart) for p in placements]
        # Branches first: what they read from the graphs around them is still in place then.
        for emitter in reversed(emitters):
            emitter.emit()
        remove_dead(model)  # the float weights
        return emitters

    def _emitter(
        self,
        names: NameScope,
        placement: Placement,
        weights: WeightSettings,
        apart: frozenset[str],
    ) -> Emitter:
        usual = self._affines(placement, self.known, self.options.activation_kind())
        affines, narrow = usual, {}
        if placement.wide_tensors:
            kind = widened(self.options.activation_kind())
            wide = self._affines(placement, {**self.known, **self.known_wide}, kind)
            affines = {v: wide[v] if v in placement.wide_tensors else usual[v] for v in usual}
            narrow = {value: usual[value] for value in placement.wide_tensors}
        return Emitter(
            names, placement, self.target, affines, weights, self.full_range, narrow, apart
        )

    def _affines(
        self, placement: Placement, ranges: Mapping[str, Range], kind: QuantizedType
    ) -> dict[ir.Value, Affine]:
        power_of_two = bool(self.options.power_of_two)
        return affines_for(placement, ranges, kind, self.target, power_of_two=power_of_two)

    def _calibrated(self, model: ir.Model, selection: Selection) -> list[Placement]:
        """Placements in which every tensor has a range; tensors without one drop out of them."""
        unusable: frozenset[str] = frozenset()
        excluded: dict[ir.Node, str] = {}
        wanted = self.options.default_exclusions
        while True:
            placements = place_all(
                model, self.target, selection, unusable, excluded, patterns=wanted
            )
            groups = [group for placement in placements for group in placement.sources.items()]
            sources = dict.fromkeys(source for _, group in groups for source in group)
            mixed = mixed_tensors(placements, self.target) if wanted else []
            unknown = [v for v in dict.fromkeys((*sources, *mixed)) if v.name not in self.known]
            self._learn(unknown, model)
            missing = {source.name or "" for source in sources} - set(self.known)
            found = self._mixing(placements, selection) if wanted and not missing else {}
            if found:
                excluded |= found
            elif not missing:
                for value, group in groups:  # of use where a smaller choice breaks a group up
                    self.known.setdefault(
                        value.name or "", _union(self.known[s.name or ""] for s in group)
                    )
                self._learn_wide(placements, model)
                return placements
            else:
                assert not missing <= unusable, "a tensor without a range is not placed again"
                unusable |= missing

    def _mixing(self, placements: list[Placement], selection: Selection) -> dict[ir.Node, str]:
        levels = self.options.activation_kind().levels
        found: dict[ir.Node, str] = {}
        for placement in placements:
            found |= by_range(placement, self.known, self.target, levels)
        return {n: reason for n, reason in found.items() if not selection.is_named(n)}

    def _learn(self, sources: list[ir.Value], model: ir.Model) -> None:
        """Ranges: known by operator, read off constants, or calibrated."""
        observed: list[str] = []
        for source in sources:
            known = known_range(source, self.target)
            if known is None:
                observed.append(source.name or "")
            else:
                self.known[source.name or ""] = known
        if observed:
            kind = self.options.activation_kind()
            self.known |= self.context.ranges(model, self._request(observed, self.rule, kind))

    def _learn_wide(self, placements: list[Placement], model: ir.Model) -> None:
        """Ranges of tensors of 16 bits where others have 8: by ``auto`` nothing is clipped."""
        sources = {
            source.name or ""
            for placement in placements
            for value in placement.wide_tensors
            for source in placement.sources[value]
            if known_range(source, self.target) is None
        }
        unknown = sorted(sources - self.known_wide.keys())
        if unknown:
            rule = Rule("minmax") if self.options.calibration == "auto" else self.rule
            kind = widened(self.options.activation_kind())
            self.known_wide |= self.context.ranges(model, self._request(unknown, rule, kind))

    def _request(self, tensors: Sequence[str], rule: Rule, kind: QuantizedType) -> RangeRequest:
        return RangeRequest(
            tensors=tuple(tensors),
            method=rule.method,
            percentile=self.options.percentile,
            levels=kind.levels,
            symmetric=self.target.activation_symmetric,
            exponent=rule.exponent,
        )

    # accuracy

    def score(self, built: Built) -> float | None:
        """SQNR in dB of the scores of the worst output, corrected if it will be."""
        found = self.fidelity(clone_model(built.model), "scores")
        return min(found.values(), default=None)

    def fidelity(self, model: ir.Model, samples: SampleSet = "few") -> Mapping[str, float]:
        """SQNR as it will be once a later bias-correction has run; the model is used up."""
        self.correct(model)
        return self.context.fidelity(model, samples)

    def correct(self, model: ir.Model) -> None:
        """Does what a later bias-correction will do."""
        if BiasCorrection.name in self.context.later:
            correct_biases(model, self.model, self.context)


def _union(ranges: Iterable[Range]) -> Range:
    found = list(ranges)
    return Range(min(item.low for item in found), max(item.high for item in found))


def place_all(
    model: ir.Model,
    target: Target,
    selection: Selection,
    unusable: frozenset[str] = frozenset(),
    excluded: Mapping[ir.Node, str] = MappingProxyType({}),
    *,
    patterns: bool = True,
) -> list[Placement]:
    """Where Q/DQ pairs go in every graph of a model that can be observed.

    Args:
        model: Float model with inferred types and shapes.
        target: What the execution provider runs in integers.
        selection: Which nodes the user wants touched.
        unusable: Names of tensors without a range.
        excluded: Nodes that stay in float, with the reason.
        patterns: Whether nodes stay in float for where they stand, too.
    """
    placements = []
    for where in observable_graphs(model):
        found = dict(excluded)
        placement = place(where.graph, target, selection, unusable, found)
        if patterns:
            standing = by_pattern(where.graph, target)
            standing = {n: r for n, r in standing.items() if n in placement.integer}
            found |= {n: r for n, r in standing.items() if not selection.is_named(n)}
        if len(found) > len(excluded):
            placement = place(where.graph, target, selection, unusable, found)
        placements.append(placement)
    return placements


def known_range(source: ir.Value, target: Target) -> Range | None:
    """The range of a constant, or of what an operator gives whatever it reads."""
    array = const_array(source)
    if array is not None:
        return Range(float(np.min(array)), float(np.max(array)))
    producer = source.producer()
    if producer is not None and producer.op_type in target.fixed_ranges:
        return Range(*target.fixed_ranges[producer.op_type])
    return None


def _operators(placements: list[Placement], others: Collection[str]) -> dict[str, int]:
    nodes = {node for placement in placements for node in placement.integer}
    nodes |= {layer.node for placement in placements for layer in placement.layers}
    nodes |= {node for placement in placements for node in placement.graph if node.name in others}
    return dict(sorted(Counter(node.op_type for node in nodes).items()))


def _nothing_to_do(
    placements: list[Placement], selection: Selection, target: Target
) -> PassFailedError:
    skipped = [item for placement in placements for item in placement.skipped]
    unused = selection.unused()
    if target.quantize_mode != "static":
        fix = f"{target.name} has no integer kernels for it: quantize --mode {target.quantize_mode}"
    elif unused:
        fix = f"the pattern '{unused[0]}' matches no layer; see 'slimctl inspect' for names"
    elif skipped:
        node, reason = skipped[0]
        fix = f"{len(skipped)} candidates were left in float; the first, '{node}': {reason}"
    else:
        fix = "the model has no Conv, ConvTranspose, Gemm or MatMul: there is nothing to gain here"
    return PassFailedError("quantize-static", "Nothing in this model can be quantized", fix=fix)


def _notes(emitters: list[Emitter], selection: Selection) -> list[str]:
    notes = []
    storage = [
        layer.node.op_type
        for emitter in emitters
        for layer in emitter.placement.layers
        if layer.node not in emitter.placement.integer
    ]
    if storage:
        notes.append(
            f"{len(storage)} {', '.join(sorted(set(storage)))}: weights stored as integers and "
            "computed in float"
        )
    shielded = sum(len(emitter.shielded) for emitter in emitters)
    if shielded:
        notes.append(
            f"{shielded} float nodes between quantized ones are shielded by a Max, "
            "since onnxruntime would quantize them by itself"
        )
    raised = [count for emitter in emitters for count in emitter.raised_channels.values()]
    if raised:
        notes.append(
            f"weight scale raised in {sum(raised)} channels of {len(raised)} layers "
            "so that the int32 bias does not overflow"
        )
    notes.extend(f"the pattern '{pattern}' matched nothing" for pattern in selection.unused())
    return notes


def _facts(emitters: list[Emitter], ranges: Mapping[str, Range]) -> dict[str, Any]:
    clamps = Counter(kind for emitter in emitters for kind in emitter.removed_clamps)
    raised = {key: n for emitter in emitters for key, n in emitter.raised_channels.items()}
    reduced = {key: n for emitter in emitters for key, n in emitter.reduced_channels.items()}
    return {
        "layers": sum(len(emitter.placement.layers) for emitter in emitters),
        "quantized_tensors": sum(len(emitter.placement.tensors) for emitter in emitters),
        "removed_clamps": dict(sorted(clamps.items())),
        "shielded": [name for emitter in emitters for name in emitter.shielded],
        "raised_channels": dict(sorted(raised.items())),
        "reduced_channels": dict(sorted(reduced.items())),
        "ranges": {name: [item.low, item.high] for name, item in sorted(ranges.items())},
    }
