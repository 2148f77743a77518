"""The multiple-choice knapsack where layers cost what they cost, whatever stands beside them.

Dynamic programming over cost (Pisinger, A minimal algorithm for the multiple-choice knapsack
problem, European Journal of Operational Research 83, 1995, section 1), cut into cells: the least
noise that every cost allows. It answers for every bound at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_CELLS: Final = 4000
"""Costs are rounded to the nearest cell, so that of 400 layers is off by 10 of them, or 0.25 %."""

_WORTH: Final = 0.99
"""A choice that costs more must have this much of the noise of the one before at most."""


def frontier(
    cost: Mapping[str, Mapping[str, float]], noise: Mapping[str, Mapping[str, float]]
) -> list[dict[str, str]]:
    """Choices with ever less noise that cost ever more, none of them far from the best.

    Args:
        cost: By layer and precision.
        noise: By layer and precision, not negative; the same layers and precisions or fewer.

    Returns:
        The first one is what costs least, by the order of precisions among equals.
    """
    names = list(noise)
    prices = {name: _above_least(cost[name], list(noise[name])) for name in names}
    total = sum(max(kinds.values()) for kinds in prices.values())
    cell = total / _CELLS or 1.0
    best: NDArray[np.float64] = np.zeros(_CELLS + 1)  # [cost]: the least noise of layers so far
    taken: list[NDArray[np.intp]] = []
    steps: list[list[int]] = []
    for name in names:
        steps.append([round(price / cell) for price in prices[name].values()])
        levels = zip(steps[-1], noise[name].values(), strict=True)
        tried = np.stack([_moved(best, cells) + level for cells, level in levels])  # [kinds, cost]
        taken.append(np.argmin(tried, axis=0))
        best = np.min(tried, axis=0)
    return [_read(names, noise, steps, taken, at) for at in _worthwhile(best)]


def _above_least(cost: Mapping[str, float], kinds: Sequence[str]) -> dict[str, float]:
    least = min(cost[kind] for kind in kinds)
    return {kind: cost[kind] - least for kind in kinds}


def _moved(best: NDArray[np.float64], cells: int) -> NDArray[np.float64]:
    """The noise that is left where so much of the cost is spent already; infinite below."""
    moved = np.full_like(best, np.inf)
    moved[cells:] = best[: len(best) - cells]
    return moved


def _worthwhile(best: NDArray[np.float64]) -> list[int]:
    """Costs at which there is less noise than for less."""
    found = [0]
    for at in range(1, len(best)):
        if best[at] < best[found[-1]] * _WORTH:
            found.append(at)
    return found


def _read(
    names: Sequence[str],
    noise: Mapping[str, Mapping[str, float]],
    steps: Sequence[Sequence[int]],
    taken: Sequence[NDArray[np.intp]],
    at: int,
) -> dict[str, str]:
    """The choice that leads to a cost, from the last layer to the first."""
    found: dict[str, str] = {}
    for place in range(len(names) - 1, -1, -1):
        chosen = int(taken[place][at])
        found[names[place]] = list(noise[names[place]])[chosen]
        at -= steps[place][chosen]
    return {name: found[name] for name in names}
