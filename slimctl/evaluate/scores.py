"""The scores behind outputs that are probabilities: what their errors are better seen by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Feeds

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
