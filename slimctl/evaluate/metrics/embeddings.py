"""Embeddings against those of a reference model: do vectors, and similarities, stay the same?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from slimctl.core.errors import UnsupportedModelError
from slimctl.evaluate.metric import Metric, Observed, SumMetric, Values, Weights, register

_DIGITS = 12
"""Similarities that agree in so many decimals are ties: products of equal vectors differ in the
last bits, by the order in which they are added."""


def _vectors(output: Any) -> NDArray[Any] | None:
    """Floats [N, ...] as [N, D]."""
    if not isinstance(output, np.ndarray) or output.dtype.kind != "f" or output.ndim < 2:
        return None
    return output.reshape(len(output), -1) if output.size > len(output) > 0 else None


class EmbeddingMetric(Metric):
    """What both have in common: pairs of vectors."""

    needs: ClassVar[Literal["labels", "reference", "nothing"]] = "reference"

    def pairs(self, batch: Observed) -> tuple[NDArray[Any], NDArray[Any]]:
        """Vectors of the model and of the reference, [N, D] each.

        Raises:
            OptionError: No output holds vectors.
            UnsupportedModelError: The vectors differ in shape, or are not finite.
        """
        assert batch.reference is not None, "the caller runs it"
        name, own = self.choose(batch.outputs, _vectors, "embeddings [N, D]")
        _, reference = self.choose(batch.reference, _vectors, "embeddings [N, D]")
        if own.shape != reference.shape:
            raise UnsupportedModelError(
                f"Embeddings have the shape {list(own.shape)}, those of the reference"
                f" {list(reference.shape)}",
                where=batch.place(),
                fix="give a reference with the same outputs",
            )
        finite = np.isfinite(own).all(axis=1) & np.isfinite(reference).all(axis=1)
        if not finite.all():
            raise self.not_finite(name, batch.place(int(np.argmin(finite))))
        return own, reference


def unit(vectors: NDArray[Any]) -> NDArray[np.float64]:
    """Vectors [N, D] with length 1; those of length 0 stay zero."""
    wide = vectors.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    return wide / np.where(lengths == 0, 1.0, lengths)


@register
class Cosine(EmbeddingMetric, SumMetric):
    """``cosine``."""

    name = "cosine"
    summary = "Mean cosine similarity of the model's embeddings with those of the reference model"
    reads = (
        "Embeddings [N, D] of both models; further axes are flattened. The cosine is 1 for two "
        "vectors of zeros and 0 for one."
    )

    def records(self, batch: Observed) -> Sequence[Any]:
        """The cosine and 1, for each sample."""
        own, reference = self.pairs(batch)
        cosines = (unit(own) * unit(reference)).sum(axis=1)
        both_zero = ~own.any(axis=1) & ~reference.any(axis=1)
        return [(value, 1.0) for value in np.where(both_zero, 1.0, cosines)]


@register
class Spearman(EmbeddingMetric):
    """``spearman``.

    Records hold the two vectors of a sample, and None for samples beyond the limit.
    """

    name = "spearman"
    summary = "Rank correlation of similarities of pairs with those by the reference model"
    reads = (
        "Embeddings [N, D] of both models; further axes are flattened. Each pair of different "
        "samples has a cosine similarity by the model and one by the reference. The value is "
        "Spearman's: Pearson's correlation of the ranks of both, ties having their average rank."
    )

    samples: int = Field(
        256, ge=3, description="The first so many samples are paired; pairs grow with the square."
    )

    def records(self, batch: Observed) -> Sequence[Any]:
        """Both vectors of each sample, None beyond the limit."""
        own, reference = self.pairs(batch)
        kept = max(0, self.samples - batch.first)
        both = [(one.copy(), two.copy()) for one, two in zip(own, reference, strict=True)]
        return [pair if index < kept else None for index, pair in enumerate(both)]

    def weighted(self, records: Sequence[Any]) -> Callable[[Weights], Values]:
        """See :meth:`Metric.weighted`.

        A pair of samples drawn v and w times counts v * w times. A sample is never paired with its
        own copies: their similarity is 1 in every model.
        """
        kept = [record for record in records if record is not None]
        first, second = np.triu_indices(len(kept), 1)  # [P]
        one, other = (
            Ranks(_similarities(np.stack([pair[side] for pair in kept]))[first, second])
            for side in range(2)
        )

        def values(weights: Weights) -> Values:
            pairs = (row[first] * row[second] for row in weights)
            return np.array([correlation(one(pair), other(pair), pair) for pair in pairs])

        return values


def _similarities(vectors: NDArray[Any]) -> NDArray[np.float64]:
    """Cosine similarity of each pair of vectors [N, D], as [N, N]."""
    ones = unit(vectors)
    return np.round(ones @ ones.T, _DIGITS)


class Ranks:
    """Average ranks of values that count several times or not at all."""

    def __init__(self, values: NDArray[np.float64]) -> None:
        distinct, self._place = np.unique(values, return_inverse=True)
        self._count = len(distinct)

    def __call__(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Ranks [P], from 1 on, of values that count ``weights`` [P] times each.

        The copies of a value have the ranks ``below + 1`` to ``below + c``; their mean is
        ``below + (c + 1) / 2``.
        """
        copies = np.bincount(self._place, weights, self._count)
        ranks = np.cumsum(copies) - copies + (copies + 1) / 2
        found: NDArray[np.float64] = ranks[self._place]
        return found


def correlation(
    one: NDArray[np.float64], other: NDArray[np.float64], weights: NDArray[np.float64]
) -> float:
    """Pearson's correlation of weighted values; 0 when one of them is constant, 1 when both are."""
    total = weights.sum()
    if total == 0:
        return 0.0
    x, y = (values - (weights * values).sum() / total for values in (one, other))
    deviation_x, deviation_y = (float((weights * values * values).sum()) for values in (x, y))
    if deviation_x == 0 or deviation_y == 0:
        return 1.0 if deviation_x == deviation_y else 0.0
    return float((weights * x * y).sum() / np.sqrt(deviation_x) / np.sqrt(deviation_y))
