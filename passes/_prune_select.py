"""Which units go: from a share to remove, importance and the limits of each group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.errors import OptionError
from slimctl.graph.channels import Group
from slimctl.graph.select import Selection, check_patterns

Scope = Literal["global", "local"]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Candidate:
    """A group of which units may go.

    Attributes:
        group: The group.
        ranked: Its free units, the least important first.
        ranks: Their scores.
        worth: What removing one unit saves, in units of the goal; 1 where channels are counted.
        ratio: Share to remove that was asked for this group alone; None takes the common one.
        step: The number of units that stay is a multiple of this, so that kernels stay aligned.
        least: At least so many stay.
    """

    group: Group
    ranked: Ids
    ranks: NDArray[np.float64]
    worth: float
    ratio: float | None
    step: int
    least: int

    @property
    def most(self) -> int:
        """How many units can go at most."""
        return self.rounded(len(self.group.units))

    def rounded(self, count: int) -> int:
        """The number of units to remove that is nearest to ``count`` and allowed."""
        total = len(self.group.units)
        bounds = total - max(self.least, 1), len(self.ranked)
        count = min(count, *bounds)
        if count <= 0:
            return 0
        stay = total - count
        options = [
            math.floor(stay / self.step) * self.step,
            math.ceil(stay / self.step) * self.step,
        ]
        allowed = [total - s for s in options if 0 <= total - s <= min(bounds)]
        return min(allowed, key=lambda gone: abs(gone - count), default=0)


def candidate(
    group: Group,
    importance: NDArray[np.float64],
    *,
    worth: float,
    ratio: float | None,
    round_to: int,
    min_channels: int,
) -> Candidate:
    """A group with its limits.

    Args:
        group: With at least one free unit.
        importance: By unit.
        worth: See :class:`Candidate`.
        ratio: See :class:`Candidate`.
        round_to: Channels of a layer that stay are a multiple of this.
        min_channels: At least so many channels of a layer stay.
    """
    free = group.free
    order = np.argsort(importance[free], kind="stable")
    step = round_to // math.gcd(round_to, group.width)
    least = -(-min_channels // group.width)
    return Candidate(group, free[order], importance[free][order], worth, ratio, step, least)


def select(candidates: Sequence[Candidate], share: float, scope: Scope) -> dict[int, Ids]:
    """The units to remove, by position of their candidate.

    Args:
        candidates: The groups.
        share: Part of all units of the groups, 0 to 1.
        scope: ``local`` takes this part of every group; ``global`` takes the least important units
            for what they save, wherever they are, as far as each group's limits allow.
    """
    counts = {
        index: entry.rounded(round(entry.ratio * len(entry.group.units)))
        for index, entry in enumerate(candidates)
        if entry.ratio is not None
    }
    rest = {index: e for index, e in enumerate(candidates) if e.ratio is None}
    if scope == "local":
        for index, entry in rest.items():
            counts[index] = entry.rounded(round(share * len(entry.group.units)))
    else:
        counts |= _global_counts(rest, share)
    return {index: candidates[index].ranked[:count] for index, count in counts.items() if count}


def _global_counts(entries: Mapping[int, Candidate], share: float) -> dict[int, int]:
    total = sum(len(entry.group.units) for entry in entries.values())
    scored: list[tuple[NDArray[np.float64], NDArray[np.int64]]] = []
    for index, entry in entries.items():
        ranks = entry.ranks[: entry.most] / entry.worth
        scored.append((ranks, np.full(len(ranks), index)))
    if not scored:
        return {}
    values = np.concatenate([ranks for ranks, _ in scored])
    owners = np.concatenate([owner for _, owner in scored])
    chosen = owners[np.argsort(values, kind="stable")[: round(share * total)]]
    return {
        index: entry.rounded(int(np.count_nonzero(chosen == index)))
        for index, entry in entries.items()
    }


def parse_ratio(entry: str) -> tuple[str, float]:
    """Pattern and share of a ``PATTERN=SHARE``.

    Raises:
        OptionError: It is none.
    """
    pattern, equals, text = entry.rpartition("=")
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not equals or not pattern or not 0.0 <= share < 1.0:
        raise OptionError("--ratio", f"'{entry}' is no PATTERN=SHARE", fix="write 'layer4*=0.5'")
    check_patterns([pattern])
    return pattern, share


def ratio_of(entries: Sequence[str], nodes: Sequence[ir.Node]) -> float | None:
    """The share of the first ``PATTERN=SHARE`` that fits one of these nodes, or None."""
    for entry in entries:
        pattern, share = parse_ratio(entry)
        only = Selection((pattern,))
        if any(only.reason_against(node) is None for node in nodes):
            return share
    return None
