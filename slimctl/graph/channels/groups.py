"""Units in groups: those that touch the same layers in the same way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.channels.coupling import Block, Channels
from slimctl.graph.channels.units import FIXED, Ids


@dataclass(frozen=True)
class Group:
    """Units that touch the same layers: to remove one costs and saves what another does.

    Attributes:
        units: Representatives, in the order in which the layers compute them.
        layers: The nodes that compute the channels.
        width: How many channels of one layer a unit stands for, at most.
        blocked: Those units that must stay, with the reason.
    """

    units: Ids
    layers: tuple[ir.Node, ...]
    width: int
    blocked: dict[int, Block]

    @property
    def free(self) -> Ids:
        """Units that may go."""
        return np.array([unit for unit in self.units if int(unit) not in self.blocked], np.int64)


Groups = list[Group]


def group_units(channels: Channels) -> Groups:
    """Groups in the order of the graph."""
    total = len(channels.units)
    if not total:
        return []
    signature = np.zeros(total, np.uint64)
    random = np.random.default_rng(0)
    touched: list[tuple[ir.Node, Ids, NDArray[np.int64]]] = []
    for family in channels.families:
        roots = channels.units.find(family.ids)
        unique, counts = np.unique(roots[roots != FIXED], return_counts=True)
        # Equal sums of random 64-bit numbers stand for equal sets: a set costs one addition.
        signature[unique] += random.integers(1, 2**63, dtype=np.uint64)
        if family.computed:
            touched.append((family.node, unique, counts))
    roots = np.unique(channels.units.find(np.arange(total, dtype=np.int64)))
    _, first, kind = np.unique(signature[roots], return_index=True, return_inverse=True)
    layers: list[list[ir.Node]] = [[] for _ in first]
    widths = [1] * len(first)
    of_unit = np.full(total, -1, np.int64)
    of_unit[roots] = kind
    for node, units, counts in touched:
        for group in np.unique(of_unit[units]):
            layers[group].append(node)
            widths[group] = max(widths[group], int(counts[of_unit[units] == group].max()))
    order = np.argsort(kind, kind="stable")
    bounds = np.searchsorted(kind[order], np.arange(len(first) + 1))
    blocked = channels.blocked()
    found: Groups = []
    for group in np.argsort(first, kind="stable"):
        units = roots[order[bounds[group] : bounds[group + 1]]]
        reasons = {int(unit): blocked[int(unit)] for unit in units if int(unit) in blocked}
        found.append(Group(units, tuple(layers[group]), widths[group], reasons))
    return found
