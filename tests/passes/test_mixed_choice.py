"""The knapsack of mixed precision, beside trying every choice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
import pytest

from slimctl.passes._mixed_choice import Bag, Boundary, Judge, Search


def _random(seed: int, count: int) -> Bag:
    """Layers in a row with noise over three decades."""
    random = np.random.default_rng(seed)
    names = [f"layer{index}" for index in range(count)]
    noise = {name: {"y": float(10 ** random.uniform(-5, -2))} for name in names}
    cost = {name: float(random.uniform(0.1, 2.0)) for name in names}
    rows = pairwise(names)
    edges = [Boundary(a, b, float(random.uniform(0, 0.2))) for a, b in rows]
    return Bag(noise, cost, edges)


def _subsets(names: list[str]) -> Iterator[frozenset[str]]:
    """All but the one with nothing quantized."""
    for size in range(len(names)):
        yield from map(frozenset, combinations(names, size))


@pytest.mark.parametrize("seed", range(30))
def test_choice_is_near_the_cheapest_of_all(seed: int) -> None:
    bag = _random(seed, 8)
    limit = sum(noise["y"] for noise in bag.noise.values()) / 10 ** (1 + seed % 3)

    def measure(floating: frozenset[str]) -> Judge:
        noise = bag.total_noise(floating)["y"]
        return Judge(noise <= limit, -noise)

    chosen = Search(bag, measure).cheapest()
    fitting = [choice for choice in _subsets(list(bag.noise)) if measure(choice).kept]
    if not fitting:
        assert chosen is None
        return
    assert chosen is not None
    assert measure(chosen).kept
    best = min(fitting, key=bag.total_cost)
    fewest = min(map(len, fitting))
    assert len(chosen) <= fewest + 1
    assert bag.total_cost(chosen) <= bag.total_cost(best) + max(bag.cost.values()) + 0.4


@pytest.mark.parametrize("seed", range(10))
def test_a_budget_is_kept_and_used(seed: int) -> None:
    bag = _random(seed, 8)
    search = Search(bag, lambda floating: Judge(True, 0.0))
    chosen = search.best_within(3.0)
    assert bag.total_cost(chosen) <= 3.0
    fitting = [c for c in _subsets(list(bag.noise)) if bag.total_cost(c) <= 3.0]
    least = min(bag.total_noise(choice)["y"] for choice in fitting)
    assert bag.total_noise(chosen)["y"] <= 4 * least + 1e-4


def test_conversions_join_neighbors() -> None:
    """Three equal layers; the middle one between two that are in float costs nothing more."""
    noise = {name: {"y": 1e-3} for name in "abc"}
    edges = [Boundary("a", "b", 0.5), Boundary("b", "c", 0.5)]
    bag = Bag(noise, {"a": 1.0, "b": 1.0, "c": 1.0}, edges)
    assert bag.total_cost({"a", "c"}) == pytest.approx(3.0)
    assert bag.added_cost("b", {"a", "c"}) == pytest.approx(0.0)
    assert bag.total_cost({"a", "b", "c"}) == pytest.approx(3.0)


def test_layers_that_are_cheaper_in_float_come_first() -> None:
    bag = Bag({"a": {"y": 1e-2}, "b": {"y": 1e-6}}, {"a": 1.0, "b": -0.1})
    assert bag.order() == ("b", "a")


def test_every_output_counts() -> None:
    noise = {"a": {"y": 1e-2, "z": 0.0}, "b": {"y": 1e-6, "z": 1e-3}, "c": {"y": 0.0, "z": 1e-7}}
    bag = Bag(noise, dict.fromkeys(noise, 1.0))
    assert set(bag.order()[:2]) == {"a", "b"}


def test_each_choice_is_measured_once() -> None:
    seen: list[frozenset[str]] = []

    def measure(floating: frozenset[str]) -> Judge:
        seen.append(floating)
        return Judge(len(floating) >= 3, 0.0)

    assert Search(_random(0, 8), measure).cheapest() is not None
    assert len(seen) == len(set(seen))


def test_nothing_is_chosen_where_nothing_helps() -> None:
    assert Search(_random(0, 5), lambda floating: Judge(False, 0.0)).cheapest() is None
