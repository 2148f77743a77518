"""Outputs that hold scores of classes, and shares of what is right about them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Share:
    """A share of something, accumulated.

    Attributes:
        total: Number of cases.
    """

    def __init__(self) -> None:
        self._hits = 0
        self.total = 0

    def update(self, hits: NDArray[np.bool_]) -> None:
        """Adds one truth value per case."""
        self._hits += int(hits.sum())
        self.total += hits.size

    @property
    def value(self) -> float | None:
        """The share, or None without a single case."""
        return self._hits / self.total if self.total else None


def class_scores(output: Any) -> NDArray[Any] | None:
    """An output as scores over classes along the last axis, None when it cannot be that.

    Floats of shape [N, C] or [N, T, C] with at least two classes; trailing axes of length one are
    dropped, [N, C, 1, 1] being what fully convolutional classifiers give.
    """
    if not isinstance(output, np.ndarray) or output.dtype.kind != "f":
        return None
    while output.ndim > 2 and output.shape[-1] == 1:
        output = output[..., 0]
    return output if output.ndim in (2, 3) and output.shape[-1] > 1 else None


def in_top_k(scores: NDArray[Any], labels: NDArray[Any], k: int) -> NDArray[np.bool_]:
    """Whether each label is among the k highest scores; ties count for the lower class.

    Args:
        scores: [..., C]
        labels: Integers [...]
        k: At least 1.
    """
    own = np.take_along_axis(scores, labels[..., None], axis=-1)  # [..., 1]
    earlier = np.arange(scores.shape[-1]) < labels[..., None]
    above = (scores > own) | ((scores == own) & earlier)
    # A NaN score is above nothing and below nothing; it must not pass for a hit.
    return np.asarray((above.sum(axis=-1) < k) & np.isfinite(own[..., 0]))


def top_k_accuracy(scores: NDArray[Any], labels: NDArray[Any], k: int) -> float:
    """Share of labels among the k highest scores; see :func:`in_top_k`."""
    return float(in_top_k(scores, labels, k).mean())
