"""Sums whose value does not depend on the order of their terms."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def add_compensated(sums: NDArray[np.float64], term: NDArray[np.float64]) -> None:
    """Adds a term, in place, and keeps what rounding would lose (Knuth's two-sum).

    Rounding errors of the order of 1e-32 are all that the order of the terms can change.

    Args:
        sums: [2, ...]: the running sum, and what it lost so far. Their sum is the value.
        term: [...]
    """
    running, lost = sums
    after = running + term
    grown = after - running
    lost += (running - (after - grown)) + (term - grown)
    running[...] = after
