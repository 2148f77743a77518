"""Which layers to leave in float: a knapsack of the noise that they make and what float costs.

Noise of layers that are quantized adds up, to a good approximation (Zhou et al., Adaptive
Quantization for Deep Neural Networks, AAAI 2018, section 4). What float costs is time or bytes;
where a float layer and a quantized one meet, a conversion comes on top.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from slimctl.passes._fallback import Noise


class Boundary(NamedTuple):
    """Two layers, one of which reads what the other one makes.

    Attributes:
        first: Name of the one.
        second: Name of the other.
        cost: Of the conversion between them when only one of them is in float.
    """

    first: str
    second: str
    cost: float


@dataclass(frozen=True)
class Bag:
    """The layers of a model, what they cost and what they spoil.

    Attributes:
        noise: By layer, when it alone is quantized.
        cost: By layer, what more it costs in float; negative where float is cheaper.
        boundaries: Between layers.
    """

    noise: Mapping[str, Noise]
    cost: Mapping[str, float]
    boundaries: Sequence[Boundary] = ()
    _touching: dict[str, list[Boundary]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for boundary in self.boundaries:
            for layer in (boundary.first, boundary.second):
                self._touching.setdefault(layer, []).append(boundary)

    def total_cost(self, floating: Collection[str]) -> float:
        """What these layers cost in float, conversions included."""
        converted = sum(b.cost for b in self.boundaries if _is_between(b, floating))
        return sum(self.cost[layer] for layer in floating) + converted

    def total_noise(self, floating: Collection[str]) -> dict[str, float]:
        """The noise of all others, by output."""
        outputs = {output for noise in self.noise.values() for output in noise}
        return {
            output: sum(
                noise.get(output, 0.0)
                for layer, noise in self.noise.items()
                if layer not in floating
            )
            for output in outputs
        }

    def added_cost(self, layer: str, floating: Collection[str]) -> float:
        """What one more layer in float costs."""
        change = self.cost[layer]
        for boundary in self._touching.get(layer, ()):
            other = boundary.second if boundary.first == layer else boundary.first
            change += -boundary.cost if other in floating else boundary.cost
        return change

    def order(self) -> tuple[str, ...]:
        """All layers, the one that is best in float first, and so on.

        Best is what takes away most noise of the output that has most, for what it costs. What
        costs nothing comes first.
        """
        floating: dict[str, None] = {}
        left = self.total_noise(())
        while len(floating) < len(self.noise):
            rest = [layer for layer in self.noise if layer not in floating]
            best = min(rest, key=lambda layer: self._rank(layer, floating, left))
            floating[best] = None
            left = {o: max(n - self.noise[best].get(o, 0.0), 0.0) for o, n in left.items()}
        return tuple(floating)

    def _rank(
        self, layer: str, floating: Collection[str], left: Mapping[str, float]
    ) -> tuple[int, float, str]:
        """The less the better."""
        gain = max(
            (self.noise[layer].get(output, 0.0) / noise for output, noise in left.items() if noise),
            default=0.0,
        )
        cost = self.added_cost(layer, floating)
        if cost <= 0:
            return (0, -gain, layer)
        return (1, -gain / cost, layer)


def _is_between(boundary: Boundary, floating: Collection[str]) -> bool:
    return (boundary.first in floating) != (boundary.second in floating)


class Judge(NamedTuple):
    """What a measured choice is worth.

    Attributes:
        kept: Whether every bound on accuracy holds.
        value: Which of two choices is nearer to it when none does; more is better.
    """

    kept: bool
    value: float


Measure: TypeAlias = Callable[[frozenset[str]], Judge]


class Search:
    """Finds a choice by measuring few of them.

    Args:
        bag: The layers.
        measure: Judges the model with these layers in float; every choice is measured once.
        most: Measurements allowed.
    """

    def __init__(self, bag: Bag, measure: Measure, most: int = 40) -> None:
        self._bag = bag
        self._measure = measure
        self._most = most
        self._known: dict[frozenset[str], Judge] = {}

    @property
    def measured(self) -> int:
        """Choices that were measured."""
        return len(self._known)

    def judge(self, floating: Collection[str]) -> Judge:
        """One choice, measured at most once."""
        key = frozenset(floating)
        if key not in self._known:
            self._known[key] = self._measure(key)
        return self._known[key]

    def cheapest(self) -> frozenset[str] | None:
        """The least expensive choice found that keeps the bounds; None when none does.

        The shortest beginning of :meth:`Bag.order` that keeps them is looked for by bisection, as
        if more layers in float never hurt. Then layers go back one by one, the most expensive ones
        first, as long as the bounds hold.
        """
        order = self._bag.order()
        # One layer stays quantized, or there would be nothing to do.
        low, high = 0, len(order) - 1
        if not self.judge(order[:high]).kept:
            return None
        while low < high:
            middle = (low + high) // 2
            if self.judge(order[:middle]).kept:
                high = middle
            else:
                low = middle + 1
        return self._without_idle(frozenset(order[:low]))

    def _without_idle(self, chosen: frozenset[str]) -> frozenset[str]:
        """Without the layers that need not be in float."""
        by_cost = sorted(chosen, key=lambda layer: (-self._bag.cost[layer], layer))
        for layer in by_cost:
            fewer = chosen - {layer}
            if self.measured >= self._most:
                break
            if self._bag.total_cost(fewer) < self._bag.total_cost(chosen) and (
                self.judge(fewer).kept
            ):
                chosen = fewer
        return chosen

    def best_within(self, budget: float) -> frozenset[str]:
        """The choice with the least noise whose cost is within a budget.

        Layers are taken in the order of :meth:`Bag.order`; one that does not fit is passed over.
        """
        chosen: frozenset[str] = frozenset()
        for layer in self._bag.order()[: len(self._bag.noise) - 1]:
            more = chosen | {layer}
            if self._bag.total_cost(more) <= budget:
                chosen = more
        return chosen
