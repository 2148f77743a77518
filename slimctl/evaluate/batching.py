"""Inputs of any batch size out of one batch, for models whose first axis is open."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimctl.core.contract import Feeds
from slimctl.graph.edit import Port


def why_fixed(inputs: Sequence[Port]) -> str | None:
    """Why a model takes one batch size only; None where its inputs leave it open.

    Inputs without axes say nothing about it. All others must leave their first axis open, since
    which of them hold samples is not written in a model.
    """
    if all(port.shape == () for port in inputs):
        return "the model has no input with a batch axis"
    for port in inputs:
        if port.shape is None:
            return f"input '{port.name}' does not state its axes"
        if port.shape and isinstance(port.shape[0], int):
            return f"the first axis of input '{port.name}' is fixed at {port.shape[0]}"
    return None


def resized(feeds: Feeds, size: int) -> Feeds:
    """Feeds of some samples: the given ones, repeated in turn as often as needed."""
    return {
        name: array[np.arange(size) % len(array)] if array.ndim and len(array) else array
        for name, array in feeds.items()
    }
