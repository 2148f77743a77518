"""Scores of units: slices of several tensors add up to what one unit has."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slimctl.graph.channels import Channels
from slimctl.graph.channels.units import FIXED

Scores: TypeAlias = NDArray[np.float64]
"""One number per unit of the analysis, at its representative."""


def add_to_units(
    total: Scores, channels: Channels, ids: NDArray[np.int64], values: NDArray[np.float64]
) -> None:
    """Adds one value per index of an axis to the units of the axis."""
    roots = channels.units.find(ids)
    there = roots != FIXED
    np.add.at(total, roots[there], values[there])
