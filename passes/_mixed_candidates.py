"""Which precisions each layer can have: by its form, and by what the target's provider takes.

Nothing is declared for that: a model with all layers in one precision is judged by the rules of the
profile, and a layer that falls back there, and does not as the options would quantize it, cannot
have that precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import onnx_ir as ir

from slimctl.core.target import Target
from slimctl.passes._attempt import Built, Work
from slimctl.passes._mixed_words import (
    Choice,
    Precision,
    all_of,
    mixture,
    named,
    usual_precision,
)
from slimctl.passes.qoperator import QOperator
from slimctl.targets.check import check_placement
from slimctl.targets.placement import Problem

OPSET_16_BITS: Final = 21
_PAIR: Final = ("QuantizeLinear", "DequantizeLinear")


def lists_16_bits(target: Target) -> bool:
    """Whether the profile names activations of 16 bits."""
    listed = (kind for kinds in target.demands("activation_types") for kind in kinds)
    return any(kind in ("int16", "uint16") for kind in listed)


def possible(work: Work, built: Built) -> dict[str, tuple[Precision, ...]]:
    """What each layer can be by its form, in the order of the graph; first what options make of it.

    Args:
        work: Of the float model.
        built: With everything quantized as the options say.
    """
    usual = usual_precision(work.options.activation_type)
    opset = work.model.opset_imports.get("", 0)
    later = work.context.later
    wide = usual == "int8" and opset >= OPSET_16_BITS and QOperator.name not in later
    found: dict[str, tuple[Precision, ...]] = {}
    integer = {n.name for emitter in built.emitters for n in emitter.placement.integer}
    weighted = {n.name for emitter in built.emitters for n in emitter.layers}
    for name in built.layers():
        kinds: list[Precision] = []
        if name in integer:
            kinds += [usual, "int16"] if wide else [usual]
        if name in weighted:
            kinds.append("int8-weights")
        found[name] = (*kinds, "float")
    return found


def build(work: Work, choice: Choice) -> Built:
    """The model that a choice makes.

    Raises:
        PassFailedError: It leaves nothing to quantize.
    """
    options = work.options
    usual = usual_precision(options.activation_type)
    return work.build(mixture(options.include, options.exclude, choice, usual))


@dataclass(frozen=True)
class Candidates:
    """Precisions to choose from.

    Attributes:
        kinds: By layer.
        whole: The model with all layers in one precision that can have it.
    """

    kinds: Mapping[str, Sequence[Precision]]
    whole: Mapping[Precision, Built]

    def without(self, kind: Precision) -> Candidates:
        """With one precision less, but where options make that of a layer."""
        kinds = {
            name: tuple(k for k in found if k in (found[0], "float") or k != kind)
            for name, found in self.kinds.items()
        }
        return Candidates(kinds, self.whole)


def candidates(work: Work, built: Built) -> Candidates:
    """What the target's provider takes of what is possible.

    Float is always among it: what the provider does not take runs on the CPU. Activations of 16
    bits are where the profile lists them or onnxruntime can be asked what they cost.

    Args:
        work: Of the float model.
        built: With everything quantized as the options say.
    """
    able = possible(work, built)
    target = work.context.target
    measured = lists_16_bits(target) or target.operators.installed
    tried: list[Precision] = ["int16", "int8-weights"] if measured else ["int8-weights"]
    view = View(work, built)
    whole: dict[Precision, Built] = {}
    kinds: dict[str, tuple[Precision, ...]] = {n: found[:1] for n, found in able.items()}
    usual = usual_precision(work.options.activation_type)
    whole[usual] = built
    for kind in tried:
        layers = [n for n, found in able.items() if kind in found]
        if kind == usual or not layers:
            continue
        choice = all_of(able, kind, layers)
        model = build(work, choice)
        refused = view.refused(model, choice)
        taken = [name for name in layers if name not in refused]
        if taken:
            whole[kind] = model if not refused else build(work, all_of(able, kind, taken))
            kinds |= {n: (*kinds[n], kind) for n in taken if kind not in kinds[n]}
    return Candidates({n: (*found, "float") for n, found in kinds.items()}, whole)


class View:
    """What the target's provider makes of layers in other precisions.

    Args:
        work: Of the float model.
        built: With everything quantized as the options say.
    """

    def __init__(self, work: Work, built: Built) -> None:
        self._target = work.context.target
        self._built = built

    def refused(self, built: Built, choice: Choice) -> dict[str, Problem]:
        """Layers whose precision makes them fall back, with what is wrong.

        Float is not looked at, and neither is what is wrong with the layers anyway.
        """
        layers = [name for kind in ("int16", "int8-weights") for name in named(choice, kind)]
        found = _problems(built, self._target, layers)
        refused = {}
        for name in layers:
            new = [p for rule, p in found[name].items() if rule not in self._usual.get(name, {})]
            if new:
                refused[name] = new[0]
        return refused

    @cached_property
    def _usual(self) -> dict[str, dict[str, Problem]]:
        return _problems(self._built, self._target, self._built.layers())


def _problems(built: Built, target: Target, layers: Sequence[str]) -> dict[str, dict[str, Problem]]:
    """Rules by which layers or the pairs around them fall back, by layer."""
    placed = {node.name: node.problems for node in check_placement(built.model, target).nodes}
    nodes = {node.name: node for emitter in built.emitters for node in emitter.placement.graph}
    return {
        name: {
            problem.rule: problem
            for around in _with_pairs(nodes[name])
            for problem in placed.get(around, ())
            if problem.effect == "fallback"
        }
        for name in layers
    }


def _with_pairs(node: ir.Node) -> list[str]:
    """Names of a node and of the Q and DQ nodes in front of it and behind it."""
    before = [value.producer() for value in node.inputs if value is not None]
    behind = [user for value in node.outputs for user in value.consumers()]
    pairs = [n for n in (*before, *behind) if n is not None and n.op_type in _PAIR]
    return [each.name or "" for each in (node, *pairs)]
