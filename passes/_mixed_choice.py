"""Which precision each layer gets: a knapsack of the noise that layers make and what they cost.

Noise of layers adds up, to a good approximation (Zhou et al., Adaptive Quantization for Deep Neural
Networks, AAAI 2018, section 4). Cost is time or bytes; where two layers of different precision
meet, conversions come on top. One precision is taken for each layer (the multiple-choice knapsack
problem), by the best step at a time (Sinha and Zoltners, The Multiple-Choice Knapsack Problem,
Operations Research 27, 1979), and repaired by measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from slimctl.passes._fallback import Noise
from slimctl.passes._mixed_frontier import frontier
from slimctl.passes._mixed_words import Choice, Precision, named
from slimctl.passes._precision import FLOAT


class Boundary(NamedTuple):
    """Two layers, one of which reads what the other one makes.

    Attributes:
        first: Name of the one that makes it.
        second: Name of the one that reads it.
        elements: Of the tensor between them.
    """

    first: str
    second: str
    elements: float


@dataclass(frozen=True)
class Bag:
    """The layers of a model, what they cost and what they spoil.

    Attributes:
        noise: By layer and precision, when it alone is changed. The first precision of a layer is
            where a search begins.
        cost: By layer and precision, in any order of the precisions.
        boundaries: Between layers.
        prices: Of one element, by the precisions of the layer that makes it and of the one that
            reads it; what is missing costs nothing.
    """

    noise: Mapping[str, Mapping[Precision, Noise]]
    cost: Mapping[str, Mapping[Precision, float]]
    boundaries: Sequence[Boundary] = ()
    prices: Mapping[tuple[Precision, Precision], float] = field(default_factory=dict)
    _touching: dict[str, list[Boundary]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for boundary in self.boundaries:
            for layer in (boundary.first, boundary.second):
                self._touching.setdefault(layer, []).append(boundary)

    def start(self) -> Choice:
        """Every layer in the first of its precisions."""
        return {layer: next(iter(kinds)) for layer, kinds in self.noise.items()}

    def total_cost(self, choice: Choice) -> float:
        """What a choice costs, conversions included."""
        own = sum(self.cost[layer][kind] for layer, kind in choice.items())
        return own + sum(self._converted(boundary, choice) for boundary in self.boundaries)

    def _converted(self, boundary: Boundary, choice: Choice) -> float:
        kinds = choice[boundary.first], choice[boundary.second]
        return boundary.elements * self.prices.get(kinds, 0.0)

    def total_noise(self, choice: Choice) -> dict[str, float]:
        """The noise of a choice, by output."""
        total = dict.fromkeys(
            (o for kinds in self.noise.values() for noise in kinds.values() for o in noise), 0.0
        )
        for layer, kind in choice.items():
            for output, noise in self.noise[layer][kind].items():
                total[output] += noise
        return total

    def added_cost(self, step: Step, choice: Choice) -> float:
        """What a step costs more, starting from a choice."""
        layer, kind = step
        after = {**choice, layer: kind}
        change = self.cost[layer][kind] - self.cost[layer][choice[layer]]
        for boundary in self._touching.get(layer, ()):
            change += self._converted(boundary, after) - self._converted(boundary, choice)
        return change

    def steps(self) -> list[Step]:
        """How noise goes down from :meth:`start` to the least that there is, the best step first.

        Best is what takes away most noise of the output that has most, for what it costs. What
        costs nothing comes first. The step after which every layer would be in float is left out:
        there would be nothing to do.
        """
        choice = dict(self.start())
        at_first = self.total_noise(choice)
        found: list[Step] = []
        while True:
            left = self.total_noise(choice)
            better = [
                (self._rank(step, gain, choice), step)
                for step in self._possible(choice, at_first)
                if (gain := self._gain(step, choice, left)) > 0
            ]
            if not better:
                return found
            _, (layer, kind) = min(better)
            choice[layer] = kind
            found.append(Step(layer, kind))

    def path(self) -> list[Choice]:
        """Choices with ever less noise that cost ever more, from the least cost to the finest.

        The best that there are where layers cost the same whatever is beside them; else what
        :meth:`steps` make of :meth:`start`, one after the other.
        """
        if self.boundaries:
            choices = [self.start()]
            for layer, kind in self.steps():
                choices.append({**choices[-1], layer: kind})
            return choices
        at_first = self.total_noise(self.start())
        levels = {
            layer: {kind: self._level(layer, kind, at_first) for kind in kinds}
            for layer, kinds in self.noise.items()
        }
        found = frontier(self.cost, levels)
        return [choice for choice in found if set(choice.values()) != {FLOAT}]

    def finest(self) -> Choice:
        """The choice with the least noise that leaves something to do: all but one layer float."""
        at_first = self.total_noise(self.start())
        _, layer, kind = min(
            (self._level(layer, kind, at_first), layer, kind)
            for layer, kinds in self.noise.items()
            for kind in kinds
            if kind != FLOAT
        )
        rest: dict[str, Precision] = dict.fromkeys(self.noise, FLOAT)
        return {**rest, layer: kind}

    def _possible(self, choice: Choice, at_first: Mapping[str, float]) -> list[Step]:
        """Steps that lower the noise of one layer, all outputs taken together.

        That of single outputs could go up and down in turns, without an end.
        """
        rest = [layer for layer, kind in choice.items() if kind != FLOAT]
        return [
            Step(layer, kind)
            for layer, kinds in self.noise.items()
            for kind in kinds
            if self._level(layer, kind, at_first) < self._level(layer, choice[layer], at_first)
            if kind != FLOAT or rest != [layer]
        ]

    def _level(self, layer: str, kind: Precision, at_first: Mapping[str, float]) -> float:
        """Noise of a layer as a share of all that there is at first, summed over outputs."""
        noise = self.noise[layer][kind]
        return sum(noise.get(o, 0.0) / total for o, total in at_first.items() if total > 0)

    def _gain(self, step: Step, choice: Choice, left: Mapping[str, float]) -> float:
        """The share of noise that a step takes away, of the output that gains most."""
        before = self.noise[step.layer][choice[step.layer]]
        after = self.noise[step.layer][step.kind]
        gains = [
            (before.get(output, 0.0) - after.get(output, 0.0)) / noise
            for output, noise in left.items()
            if noise > 0
        ]
        return max(gains, default=0.0)

    def _rank(self, step: Step, gain: float, choice: Choice) -> tuple[int, float]:
        """The less the better."""
        cost = self.added_cost(step, choice)
        return (0, -gain) if cost <= 0 else (1, -gain / cost)


class Step(NamedTuple):
    """One layer gets another precision."""

    layer: str
    kind: Precision


class Judge(NamedTuple):
    """What a measured choice is worth.

    Attributes:
        kept: Whether every bound on accuracy holds.
        value: Which of two choices is nearer to it when none does; more is better.
    """

    kept: bool
    value: float


Measure: TypeAlias = Callable[[Choice], Judge]


class Search:
    """Finds a choice by measuring few of them.

    Args:
        bag: The layers.
        measure: Judges the model that a choice makes; every choice is measured once.
        most: Measurements allowed.
    """

    def __init__(self, bag: Bag, measure: Measure, most: int = 40) -> None:
        self._bag = bag
        self._measure = measure
        self._most = most
        self._known: dict[tuple[tuple[str, Precision], ...], Judge] = {}

    @property
    def measured(self) -> int:
        """Choices that were measured."""
        return len(self._known)

    def judge(self, choice: Choice) -> Judge:
        """One choice, measured at most once."""
        key = tuple(sorted(choice.items()))
        if key not in self._known:
            self._known[key] = self._measure(choice)
        return self._known[key]

    def cheapest(self) -> Choice | None:
        """The least expensive choice found that keeps the bounds; None when none does.

        The first of :meth:`Bag.path` that keeps them is looked for by bisection, as if more cost
        never hurt. Then layers go back to what costs less, the most expensive ones first, as long
        as the bounds hold.
        """
        choices = self._bag.path()
        low, high = 0, len(choices) - 1
        if not self.judge(choices[high]).kept:
            finest = self._bag.finest()
            return self._without_idle(finest) if self.judge(finest).kept else None
        while low < high:
            middle = (low + high) // 2
            if self.judge(choices[middle]).kept:
                high = middle
            else:
                low = middle + 1
        return self._without_idle(choices[low])

    def _without_idle(self, chosen: Choice) -> Choice:
        """With every layer in the least expensive precision that keeps the bounds."""
        start = self._bag.start()
        moved = [layer for layer in chosen if chosen[layer] != start[layer]]

        def saved(layer: str) -> float:
            return self._bag.added_cost(Step(layer, start[layer]), chosen)

        for layer in sorted(moved, key=lambda layer: (saved(layer), layer)):
            for less in self._less(layer, chosen):
                if self.measured >= self._most:
                    return chosen
                if self.judge(less).kept:
                    chosen = less
                    break
        return chosen

    def _less(self, layer: str, chosen: Choice) -> list[Choice]:
        """Choices in which one layer costs less, or as much as where it began; cheapest first."""
        kinds = list(self._bag.noise[layer])
        found = []
        for place, kind in enumerate(kinds):
            added = self._bag.added_cost(Step(layer, kind), chosen)
            if added < 0 or (added == 0 and place < kinds.index(chosen[layer])):
                found.append((added, place, kind))
        return [{**chosen, layer: kind} for _, _, kind in sorted(found)]

    def within(self, budget: float) -> list[Choice]:
        """Choices with ever less noise that cost at most so much more than the start.

        They follow :meth:`Bag.steps`, and one that does not fit is passed over; or they are those
        of :meth:`Bag.path`, where that is more than steps.
        """
        start = self._bag.start()
        most = self._bag.total_cost(start) + budget
        if not self._bag.boundaries:
            found = self._bag.path()
            fitting = [choice for choice in found if self._bag.total_cost(choice) <= most]
            return [start, *(choice for choice in fitting if choice != start)]
        choices = [start]
        for layer, kind in self._bag.steps():
            more: Choice = {**choices[-1], layer: kind}
            if self._bag.total_cost(more) <= most and len(named(more, FLOAT)) < len(more):
                choices.append(more)
        return choices
