"""F1: the harmonic mean of precision and recall (van Rijsbergen, Information Retrieval, 1979)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from slimctl.evaluate.class_counts import ClassCountMetric, count_classes
from slimctl.evaluate.class_scores import class_scores
from slimctl.evaluate.labels import class_numbers
from slimctl.evaluate.metric import Observed, ratio, register


def f1(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """``2 TP / (2 TP + FP + FN)`` of each row [C, 3] of TP, FP and FN; 0 without a case."""
    right = 2 * counts[:, 0]
    return ratio(right, right + counts[:, 1] + counts[:, 2])


@register
class F1(ClassCountMetric):
    """``f1``."""

    name = "f1"
    summary = "F1, the harmonic mean of precision and recall of classes"
    reads = (
        "Scores of classes [N, C] or [N, T, C], or one score per sample, [N] or [N, 1], that is "
        "compared with the threshold. Labels are class numbers [N] or [N, T]. Counts are taken "
        "over all samples first; a class that occurs neither in labels nor in decisions does not "
        "count."
    )

    average: Literal["macro", "micro", "binary"] = Field(
        "macro",
        description="Mean over the classes that occur; of all decisions together; or of the "
        "positive class alone.",
    )
    positive: int = Field(1, ge=0, description="The class that `binary` looks at.")
    threshold: float = Field(0.5, description="A single score above it means class 1.")
    ignore: int = Field(-100, description="Label of positions that do not count.")

    def records(self, batch: Observed) -> Sequence[Any]:
        """See :meth:`slimctl.evaluate.metric.Metric.records`."""
        _, scores = self.choose(batch.outputs, _scores, "scores of classes")
        if scores.ndim == 1:
            found, classes = (scores > self.threshold).astype(np.int64), 2
        else:
            found, classes = np.argmax(scores, axis=-1), scores.shape[-1]
        labels = class_numbers(batch, found.shape, classes, self.ignore)
        return [
            count_classes(*pair, self.ignore)
            for pair in zip(_split(found, batch.size), _split(labels, batch.size), strict=True)
        ]

    def from_counts(self, counts: NDArray[np.float64]) -> float:
        """See :meth:`ClassCountMetric.from_counts`."""
        if self.average == "micro":
            return float(f1(counts.sum(axis=0, keepdims=True))[0])
        if self.average == "binary":
            return float(f1(counts)[self.positive]) if self.positive < len(counts) else 0.0
        occurs = counts.sum(axis=1) > 0
        return float(f1(counts)[occurs].mean()) if occurs.any() else 0.0


def _scores(output: Any) -> NDArray[Any] | None:
    """Class scores, or one score per sample as [N]."""
    found = class_scores(output)
    if found is not None or not isinstance(output, np.ndarray) or output.dtype.kind != "f":
        return found
    single = output.ndim in (1, 2) and output.size == len(output)
    return output.reshape(-1) if single else None


def _split(values: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """[size, cases in each sample], or one row where samples cannot be told apart."""
    return values.reshape(size if size and values.size % size == 0 else 1, -1)
