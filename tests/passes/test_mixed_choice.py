"""The knapsack of mixed precision, beside trying every choice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np
import pytest

from slimctl.passes._mixed_choice import Bag, Boundary, Judge, Search, Step
from slimctl.passes._mixed_words import Choice, Precision

_KINDS: tuple[Precision, ...] = ("int8", "int16", "int8-weights", "float")


def _random(seed: int, count: int, kinds: tuple[Precision, ...] = _KINDS) -> Bag:
    """Layers in a row with noise over three decades; what is more precise costs more."""
    random = np.random.default_rng(seed)
    names = [f"layer{index}" for index in range(count)]
    noise, cost = {}, {}
    for name in names:
        loudest = 10 ** random.uniform(-5, -2)
        levels = loudest * np.sort(random.uniform(0.01, 1.0, len(kinds)))[::-1]
        prices = np.cumsum(random.uniform(0.1, 2.0, len(kinds)))
        noise[name] = {k: {"y": float(n)} for k, n in zip(kinds, levels, strict=True)}
        noise[name]["float"] = {"y": 0.0}
        cost[name] = {k: float(c - prices[0]) for k, c in zip(kinds, prices, strict=True)}
    edges = [Boundary(a, b, float(random.uniform(0, 0.2))) for a, b in pairwise(names)]
    prices = {(a, b): float(a != b) for a in kinds for b in kinds}
    return Bag(noise, cost, edges, prices)


def _all(bag: Bag) -> Iterator[Choice]:
    """All but the one with everything in float."""
    for kinds in product(*bag.noise.values()):
        if set(kinds) != {"float"}:
            yield dict(zip(bag.noise, kinds, strict=True))


def _changed(bag: Bag, choice: Choice) -> int:
    start = bag.start()
    return sum(kind != start[layer] for layer, kind in choice.items())


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(("kinds", "count"), [(("int8", "float"), 8), (_KINDS, 5)])
def test_choice_is_near_the_cheapest_of_all(
    seed: int, kinds: tuple[Precision, ...], count: int
) -> None:
    bag = _random(seed, count, kinds)
    limit = bag.total_noise(bag.start())["y"] / 10 ** (1 + seed % 3)

    def measure(choice: Choice) -> Judge:
        noise = bag.total_noise(choice)["y"]
        return Judge(noise <= limit, -noise)

    chosen = Search(bag, measure).cheapest()
    fitting = [choice for choice in _all(bag) if measure(choice).kept]
    if not fitting:
        assert chosen is None
        return
    assert chosen is not None
    assert measure(chosen).kept
    best = min(map(bag.total_cost, fitting))
    fewest = min(_changed(bag, choice) for choice in fitting)
    assert _changed(bag, chosen) <= fewest + 1
    dearest = max(cost for kinds in bag.cost.values() for cost in kinds.values())
    assert bag.total_cost(chosen) <= best + dearest


@pytest.mark.parametrize("seed", range(10))
def test_a_budget_is_kept_and_used(seed: int) -> None:
    bag = _random(seed, 5)
    choices = Search(bag, lambda choice: Judge(True, 0.0)).within(3.0)
    assert choices[0] == bag.start()
    assert all(bag.total_cost(choice) <= 3.0 for choice in choices)
    levels = [bag.total_noise(choice)["y"] for choice in choices]
    assert levels == sorted(levels, reverse=True)
    fitting = [c for c in _all(bag) if bag.total_cost(c) <= 3.0]
    least = min(bag.total_noise(choice)["y"] for choice in fitting)
    assert levels[-1] <= 4 * least + 1e-4


def test_conversions_join_neighbors() -> None:
    """Three equal layers; the middle one between two in float costs nothing more."""
    noise = {name: {"int8": {"y": 1e-3}, "float": {}} for name in "abc"}
    cost = {name: {"int8": 0.0, "float": 1.0} for name in "abc"}
    edges = [Boundary("a", "b", 0.5), Boundary("b", "c", 0.5)]
    prices: dict[tuple[Precision, Precision], float] = {
        ("int8", "float"): 1.0,
        ("float", "int8"): 1.0,
    }
    bag = Bag(noise, cost, edges, prices)  # type: ignore[arg-type]  # literals of precisions
    outside: Choice = {"a": "float", "b": "int8", "c": "float"}
    assert bag.total_cost(outside) == pytest.approx(3.0)
    assert bag.added_cost(Step("b", "float"), outside) == pytest.approx(0.0)


def test_a_conversion_depends_on_both_precisions() -> None:
    noise = {name: {kind: {"y": 1e-3} for kind in _KINDS} for name in "ab"}
    cost = {name: dict.fromkeys(_KINDS, 0.0) for name in "ab"}
    prices: dict[tuple[Precision, Precision], float] = {
        ("int8", "int16"): 3.0,
        ("int16", "int16"): 2.0,
    }
    bag = Bag(noise, cost, [Boundary("a", "b", 10.0)], prices)
    assert bag.total_cost({"a": "int8", "b": "int16"}) == 30.0
    assert bag.total_cost({"a": "int16", "b": "int16"}) == 20.0
    assert bag.total_cost({"a": "int16", "b": "int8"}) == 0.0
    assert bag.added_cost(Step("a", "int16"), {"a": "int8", "b": "int16"}) == -10.0


def test_steps_that_cost_nothing_come_first() -> None:
    noise = {
        "a": {"int8": {"y": 1e-2}, "float": {}},
        "b": {"int8": {"y": 1e-5}, "int8-weights": {"y": 1e-6}, "float": {}},
    }
    cost = {"a": {"int8": 0.0, "float": 1.0}, "b": {"int8": 0.0, "int8-weights": 0.0, "float": 9.0}}
    bag = Bag(noise, cost)  # type: ignore[arg-type]  # literals of precisions
    assert bag.steps() == [("b", "int8-weights"), ("a", "float")]


def test_a_layer_may_go_two_steps_and_back_one() -> None:
    """The layer is best in float by what a step gains, and 16 bits are enough."""
    noise = {
        "a": {"int8": {"y": 1.0}, "int16": {"y": 0.2}, "float": {}},
        "b": {"int8": {"y": 0.01}, "float": {}},
    }
    cost = {"a": {"int8": 0.0, "int16": 3.0, "float": 3.1}, "b": {"int8": 0.0, "float": 50.0}}
    bag = Bag(noise, cost)  # type: ignore[arg-type]  # literals of precisions
    search = Search(bag, lambda choice: Judge(bag.total_noise(choice)["y"] <= 0.3, 0.0))
    assert bag.steps()[0] == ("a", "float")
    assert search.cheapest() == {"a": "int16", "b": "int8"}


def test_every_output_counts() -> None:
    loud = {"a": {"y": 1e-2, "z": 0.0}, "b": {"y": 1e-6, "z": 1e-3}, "c": {"y": 0.0, "z": 1e-7}}
    noise = {name: {"int8": level, "float": {}} for name, level in loud.items()}
    cost = {name: {"int8": 0.0, "float": 1.0} for name in loud}
    bag = Bag(noise, cost)  # type: ignore[arg-type]  # literals of precisions
    assert {layer for layer, _ in bag.steps()[:2]} == {"a", "b"}


def test_outputs_that_pull_apart_do_not_go_round_in_circles() -> None:
    noise = {
        "a": {"int8": {"y": 1.0, "z": 0.1}, "int16": {"y": 0.1, "z": 1.0}, "float": {}},
        "b": {"int8": {"y": 1.0, "z": 1.0}, "float": {}},
    }
    cost = {"a": {"int8": 0.0, "int16": 0.0, "float": 5.0}, "b": {"int8": 0.0, "float": 5.0}}
    steps = Bag(noise, cost).steps()  # type: ignore[arg-type]  # literals of precisions
    assert len(steps) == len(set(steps))


def test_each_choice_is_measured_once() -> None:
    seen: list[tuple[object, ...]] = []

    def measure(choice: Choice) -> Judge:
        seen.append(tuple(choice.items()))
        return Judge(sum(kind != "int8" for kind in choice.values()) >= 3, 0.0)

    assert Search(_random(0, 8), measure).cheapest() is not None
    assert len(seen) == len(set(seen))


def test_nothing_is_chosen_where_nothing_helps() -> None:
    assert Search(_random(0, 5), lambda choice: Judge(False, 0.0)).cheapest() is None
