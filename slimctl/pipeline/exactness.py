"""How far two models that claim to compute the same may differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Feeds
from slimctl.evaluate.compare import is_float
from slimctl.graph.edit import all_nodes
from slimctl.graph.session import open_session, run
from slimctl.pipeline.stage import Observation

ROUNDINGS = 32.0
"""Rounding errors that one operator may add, in units in the last place of its largest output. A
floating-point sum of K terms errs by about sqrt(K) / 2 units; 32 covers K = 4096, the longest
reductions of common networks."""

SLACK = 4.0
"""Rounding units of 1 that never count: Sigmoid, Softmax and their like compute at the scale of 1,
so that an output near zero carries an absolute error of a few units of 1, whatever its own size."""

CONDITION = 16.0
"""How much more than a change of one unit in the inputs an exact rewrite may move the outputs. A
rewrite rounds at each operator anew, the nudged inputs only once; 16 covers 256 operators whose
independent errors add up like a random walk."""

_BLOCK = 1 << 16
"""Values compared at a time: logits are large, and several copies of them in float64 larger."""


def rounding_tolerance(model: ir.Model) -> float:
    """Difference that rounding alone may make, relative to the largest value of an output.

    Each of N operators adds an independent error of at most :data:`ROUNDINGS` units, so they add up
    like a random walk: ROUNDINGS * unit * sqrt(N). The unit is that of the coarsest type in the
    model: 2^-23 for float32, 2^-10 for float16, 2^-7 for bfloat16.
    """
    nodes = sum(1 for _ in all_nodes(model))
    return ROUNDINGS * unit(model) * math.sqrt(max(nodes, 1))


def unit(model: ir.Model) -> float:
    """Distance from 1 to the next number in the coarsest floating-point type of the model."""
    kinds = {value.dtype for value in _typed_values(model.graph)}
    if ir.DataType.BFLOAT16 in kinds:
        return 2.0**-7
    return 2.0**-10 if ir.DataType.FLOAT16 in kinds else 2.0**-23


def _typed_values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    yield from graph.outputs


def largest_error(expected: Feeds, found: Feeds, unit: float) -> tuple[float, str]:
    """The :func:`relative_error` of the output that differs most, and its name."""
    errors = ((relative_error(array, found[name], unit), name) for name, array in expected.items())
    return max(errors, default=(0.0, ""))


def relative_error(expected: Any, found: Any, unit: float = 0.0) -> float:
    """Largest difference beyond :data:`SLACK` units, relative to the largest expected value.

    For integers and texts it is the share of elements that differ. Infinity when the shapes differ.
    Where the expected value is not finite there is nothing to compare.
    """
    if not isinstance(expected, np.ndarray):  # sequences and maps
        return 0.0 if repr(expected) == repr(found) else math.inf
    if expected.shape != found.shape:
        return math.inf
    if expected.size == 0:
        return 0.0
    if not is_float(expected):
        return float(np.mean(expected != found))
    largest = scale = np.float64(0.0)
    for start in range(0, expected.size, _BLOCK):
        wide, other = (a.reshape(-1)[start : start + _BLOCK] for a in (expected, found))
        usable = np.isfinite(wide)
        wide, other = (a[usable].astype(np.float64) for a in (wide, other))
        scale = np.maximum(scale, np.abs(wide).max(initial=0.0))
        largest = np.maximum(largest, np.abs(wide - other).max(initial=0.0))
    difference = max(largest - SLACK * unit, 0.0)
    # An all-zero output has no scale of its own: its differences count as they are.
    return float(difference / (scale or 1.0))


def sensitivity(
    path: Path, observation: Observation, feeds: Sequence[Feeds], *, unit: float, threads: int
) -> float:
    """How far a model's outputs move when each input value moves by one rounding unit.

    Models with comparisons in them (ArgMax, TopK, quantizers) move farther than their rounding
    errors say; no exact rewrite can do better than that.

    Args:
        path: The model.
        observation: What it computes on the feeds as they are.
        feeds: What to feed.
        unit: Relative size of the change.
        threads: Threads of onnxruntime.
    """
    session = open_session(path, threads=threads)
    moved = (run(session, _nudged(feed, unit)) for feed in feeds)
    pairs = zip(observation.optimized, moved, strict=False)
    return max((largest_error(old, new, unit)[0] for old, new in pairs), default=0.0)


def _nudged(feeds: Feeds, unit: float) -> Feeds:
    generator = np.random.default_rng(0)

    def nudge(array: NDArray[Any]) -> NDArray[Any]:
        if not is_float(array):
            return array
        signs = generator.choice([-1.0, 1.0], array.shape)
        return np.asarray((array.astype(np.float64) * (1.0 + unit * signs)).astype(array.dtype))

    return {name: nudge(array) for name, array in feeds.items()}
