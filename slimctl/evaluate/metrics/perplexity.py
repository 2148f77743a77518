"""Perplexity of language models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from slimctl.evaluate.class_scores import class_scores
from slimctl.evaluate.labels import class_numbers
from slimctl.evaluate.metric import Observed, SumMetric, ratio, register

_LARGEST = 700.0
"""Largest loss of one token in nats, so that its exponential is a finite float64 (e^709)."""

_BLOCK = 1 << 20
"""Logits converted to float64 at a time."""


def losses(logits: NDArray[Any], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Negative log-likelihood in nats, ``log sum_v exp(z_v) - z_label``, at most 700.

    Args:
        logits: [R, V], not normalized; log-probabilities give the same.
        labels: [R]

    Returns:
        [R]; NaN where the logits are NaN or hold +infinity.
    """
    wide = logits.astype(np.float64)
    largest = wide.max(axis=-1, keepdims=True)  # [R, 1]
    largest[np.isinf(largest)] = np.nan
    total = np.log(np.exp(wide - largest).sum(axis=-1)) + largest[:, 0]
    own = np.take_along_axis(wide, labels[:, None], axis=-1)[:, 0]
    found: NDArray[np.float64] = np.minimum(total - own, _LARGEST)
    return found


@register
class Perplexity(SumMetric):
    """``perplexity``."""

    name = "perplexity"
    summary = "Exponential of the mean negative log-likelihood of tokens"
    reads = (
        "Logits [N, S, V] or [N, V]. The label [N, S] or [N] of a position is the token that its "
        "logits should predict: for a causal model the input's tokens moved by one place, with "
        "-100 at the last and at padding. The mean is over the tokens of all samples. The loss of "
        "one token is at most 700 nats."
    )
    direction: ClassVar[Literal["higher", "lower"]] = "lower"

    ignore: int = Field(-100, description="Label of positions that do not count.")

    def records(self, batch: Observed) -> Sequence[Any]:
        """Loss in nats and number of tokens of each sample."""
        name, logits = self.choose(batch.outputs, class_scores, "logits of tokens")
        labels = class_numbers(batch, logits.shape[:-1], logits.shape[-1], self.ignore)
        records = []
        for index, (scores, wanted) in enumerate(zip(logits, labels, strict=True)):
            counted = np.atleast_1d(wanted) != self.ignore
            nats = _total(np.atleast_2d(scores)[counted], np.atleast_1d(wanted)[counted])
            if not np.isfinite(nats):
                raise self.not_finite(name, batch.place(index))
            records.append((nats, int(counted.sum())))
        return records

    def from_sums(self, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """``exp(nats / tokens)``."""
        return np.exp(ratio(sums[:, 0], sums[:, 1]))


def _total(logits: NDArray[Any], labels: NDArray[np.int64]) -> float:
    """Losses added up, a few rows at a time: vocabularies are large."""
    rows = max(1, _BLOCK // logits.shape[-1])
    blocks = range(0, len(labels), rows)
    return float(sum(losses(logits[at : at + rows], labels[at : at + rows]).sum() for at in blocks))
