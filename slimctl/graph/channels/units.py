"""Numbers for channels, and which of them are tied to one another."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int64]
"""One number per index of an axis: its unit, or :data:`FIXED`."""

FIXED = -1
"""An index that can never be removed, for example a channel of an input of the model."""


class Units:
    """A union-find structure whose operations take whole axes at once.

    A unit is what is removed or kept as one. Every channel that a layer computes begins as a unit
    of its own; an operator that needs channels of two tensors to agree ties their units.
    """

    def __init__(self) -> None:
        self._parent = np.arange(1024, dtype=np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def fresh(self, count: int) -> Ids:
        """New units, tied to nothing."""
        needed = self._count + count
        if needed > self._parent.size:
            grown = np.arange(max(needed, 2 * self._parent.size), dtype=np.int64)
            grown[: self._count] = self._parent[: self._count]
            self._parent = grown
        first, self._count = self._count, needed
        return np.arange(first, needed, dtype=np.int64)

    def find(self, ids: Ids) -> Ids:
        """The representative of each unit, the same for all that are tied; FIXED stays FIXED."""
        fixed = ids == FIXED
        roots = self._parent[np.where(fixed, 0, ids)]
        while True:
            above = self._parent[roots]
            if np.array_equal(above, roots):
                break
            roots = above
        free = ~fixed
        self._parent[ids[free]] = roots[free]
        return np.where(fixed, FIXED, roots)

    def tie(self, first: Ids, second: Ids) -> None:
        """Ties units pairwise; both arrays have one shape and hold no FIXED."""
        while True:
            one, two = self.find(first), self.find(second)
            if np.array_equal(one, two):
                return
            # Smaller numbers become representatives, so that no cycle can arise. One unit may be
            # tied to several at once; what is lost to the minimum is found in the next round.
            np.minimum.at(self._parent, np.maximum(one, two), np.minimum(one, two))
