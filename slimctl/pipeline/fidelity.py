"""How near a model's outputs are to the original's, on outputs that were kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Feeds
from slimctl.evaluate.compare import is_float
from slimctl.evaluate.metrics import Similarity

_TINY = np.finfo(np.float32).tiny
_RESOLVED = 2.0**-24  # float32 tells probabilities nearer to 1 not apart, and Sigmoid none below

View = Callable[[NDArray[Any]], NDArray[Any]]
"""What is looked at instead of an output."""


def score_views(model: ir.Model) -> dict[str, View]:
    """For outputs that are probabilities: the scores that they were made from.

    Softmax and Sigmoid flatten large scores, so that probabilities near 0 and 1 hide most of what
    happened to the scores and the rest of the error hangs on a few undecided samples. The scores
    are computed from the probabilities; those of a Softmax have a mean of 0, since a shift of all
    is no error.
    """
    views: dict[str, View] = {}
    for output in model.graph.outputs:
        producer = output.producer()
        if producer is None or producer.domain:
            continue
        if producer.op_type == "Softmax":
            axis = producer.attributes.get_int("axis", -1)
            views[output.name or ""] = partial(_logarithms, axis=axis)
        elif producer.op_type == "Sigmoid":
            views[output.name or ""] = _logits
    return views


def _logarithms(probabilities: NDArray[Any], *, axis: int) -> NDArray[Any]:
    scores = np.log(np.maximum(probabilities.astype(np.float64), _TINY))
    return np.asarray(scores - scores.mean(axis=axis, keepdims=True))


def _logits(probabilities: NDArray[Any]) -> NDArray[Any]:
    kept = np.clip(probabilities.astype(np.float64), _RESOLVED, 1.0 - _RESOLVED)
    return np.asarray(np.log(kept) - np.log1p(-kept))


def seen_through(views: Mapping[str, View], outputs: Feeds) -> Feeds:
    """Outputs as their views show them; those without one as they are."""
    return {name: views[name](a) if name in views else a for name, a in outputs.items()}


def sqnr_by_output(reference: Iterable[Feeds], other: Iterable[Feeds]) -> dict[str, float]:
    """SQNR in dB of each output of floats, over all runs together.

    Args:
        reference: Outputs of the original, one dictionary per run.
        other: Outputs of the compared model for the same inputs.
    """
    outputs: defaultdict[str, Similarity] = defaultdict(Similarity)
    for expected, found in zip(reference, other, strict=True):
        for name, array in expected.items():
            if is_float(array):
                outputs[name].update(array, found[name])
    return {name: output.sqnr_db for name, output in outputs.items()}


def worst_sqnr_db(reference: Iterable[Feeds], other: Iterable[Feeds]) -> float | None:
    """SQNR in dB of the worst output, as :func:`sqnr_by_output`; None when none is of floats."""
    return min(sqnr_by_output(reference, other).values(), default=None)
