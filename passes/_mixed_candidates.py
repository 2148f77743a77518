"""Which precisions each layer can have: by its form, and by what the target's provider takes.

Nothing is declared for the provider: a model with all layers in one precision is judged by the
rules of the profile, and a layer that falls back there, and does not as the options would quantize
it, cannot have that precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import onnx_ir as ir

from slimctl.core.target import Target
from slimctl.graph.bodies import observable_graphs
from slimctl.graph.select import Selection
from slimctl.passes._attempt import Built, Work
from slimctl.passes._layers import is_linear
from slimctl.passes._mixed_words import (
    Choice,
    Precision,
    all_of,
    mixture,
    usual_precision,
)
from slimctl.passes._precision import FLOAT, Aim, Layers
from slimctl.passes._precisions import PRECISIONS
from slimctl.targets.check import check_placement
from slimctl.targets.placement import Problem

_AROUND: Final = ("QuantizeLinear", "DequantizeLinear", "Cast")


def layers_of(work: Work, built: Built) -> Layers:
    """The layers that can be anything but float.

    Args:
        work: Of the float model.
        built: With everything quantized as the options say.
    """
    weighted = work.target.weighted
    integer = [n for e in built.emitters for n in e.placement.integer if n.op_type in weighted]
    stored = [n for emitter in built.emitters for n in emitter.layers]
    found = Layers(
        work,
        usual_precision(work.options.activation_type),
        frozenset(node.name or "" for node in integer),
        frozenset(node.name or "" for node in stored),
        {node.name or "": node for node in _linear(work)},
    )
    every = {name: _able(name, found) for name in found.nodes}
    able = {name: kinds for name, kinds in every.items() if len(kinds) > 1}
    return replace(found, nodes={name: found.nodes[name] for name in able}, able=able)


def _linear(work: Work) -> Iterator[ir.Node]:
    """Layers, and products of two activations, that the user wants touched."""
    selection = Selection(work.options.include, work.options.exclude)
    for place in observable_graphs(work.model):
        for node in place.graph:
            if is_linear(node) and selection.reason_against(node) is None:
                yield node


def _able(layer: str, layers: Layers) -> list[Precision]:
    return [name for name, kind in PRECISIONS.items() if not kind.against(layer, layers)]


def possible(layers: Layers) -> dict[str, tuple[Precision, ...]]:
    """What each layer can be by its form; first what options make of it."""
    return {name: _made_first(kinds, layers.made(name)) for name, kinds in layers.able.items()}


def _made_first(kinds: Sequence[Precision], made: Precision) -> tuple[Precision, ...]:
    return tuple(sorted(kinds, key=lambda kind: kind != made))  # sorting is stable


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
            name: tuple(k for k in found if k in (found[0], FLOAT) or k != kind)
            for name, found in self.kinds.items()
        }
        return Candidates(kinds, self.whole)

    def ordered(
        self, order: Callable[[Sequence[Precision], str], Sequence[Precision]]
    ) -> Candidates:
        """With the precisions of every layer in another order."""
        kinds = {name: order(found, name) for name, found in self.kinds.items()}
        return Candidates(kinds, self.whole)


def candidates(layers: Layers, built: Built, aim: Aim) -> Candidates:
    """What the target's provider takes of what is possible.

    Float is always among it: what the provider does not take runs on the CPU.

    Args:
        layers: Of the float model.
        built: With everything quantized as the options say.
        aim: What they are counted by.
    """
    work, able = layers.work, possible(layers)
    view = View(work, built)
    whole: dict[Precision, Built] = {}
    kinds: dict[str, tuple[Precision, ...]] = {n: found[:1] for n, found in able.items()}
    for kind in PRECISIONS:
        named = [n for n, found in able.items() if kind in found]
        if kind == FLOAT or not named:
            continue
        if kind == layers.usual:
            whole[kind] = built
            continue
        if PRECISIONS[kind].passed_over(layers, aim):
            continue
        choice = all_of(able, kind, named)
        model = build(work, choice)
        refused = view.refused(model, choice)
        taken = [name for name in named if name not in refused]
        if taken:
            whole[kind] = model if not refused else build(work, all_of(able, kind, taken))
            kinds |= {n: (*kinds[n], kind) for n in taken if kind not in kinds[n]}
    kinds = {n: found if FLOAT in found else (*found, FLOAT) for n, found in kinds.items()}
    return Candidates(kinds, whole)


class View:
    """What the target's provider makes of layers in other precisions.

    Args:
        work: Of the float model.
        built: With everything quantized as the options say.
    """

    def __init__(self, work: Work, built: Built) -> None:
        self._target = work.context.target
        self._built = built
        self._made = usual_precision(work.options.activation_type)

    def refused(self, built: Built, choice: Choice) -> dict[str, Problem]:
        """Layers whose precision makes them fall back, with what is wrong.

        Float is not looked at, and neither is what is wrong with the layers anyway.
        """
        layers = [name for name, kind in choice.items() if kind not in (FLOAT, self._made)]
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
    """Rules by which layers or the conversions around them fall back, by layer."""
    placed = {node.name: node.problems for node in check_placement(built.model, target).nodes}
    nodes = {node.name: node for emitter in built.emitters for node in emitter.placement.graph}
    return {
        name: {
            problem.rule: problem
            for around in _with_conversions(nodes[name])
            for problem in placed.get(around, ())
            if problem.effect == "fallback"
        }
        for name in layers
    }


def _with_conversions(node: ir.Node) -> list[str]:
    """Names of a node and of the Q, DQ and Cast nodes in front of it and behind it."""
    before = [value.producer() for value in node.inputs if value is not None]
    behind = [user for value in node.outputs for user in value.consumers()]
    around = [n for n in (*before, *behind) if n is not None and n.op_type in _AROUND]
    return [each.name or "" for each in (node, *around)]
