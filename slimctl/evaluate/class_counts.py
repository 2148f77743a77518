"""Metrics of the number of right and wrong decisions for each class: F1, IoU.

A record is an integer array [k, 4] with one row for each of the k classes that occur in the
sample: the class, the decisions for it that are right, those that are wrong, and missed cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimctl.evaluate.metric import Metric, Values, Weights


def count_classes(
    found: NDArray[np.int64], labels: NDArray[np.int64], ignore: int | None
) -> NDArray[np.int64]:
    """The record of one sample.

    Args:
        found: Class decided for, any shape.
        labels: Class that is right, of the same shape.
        ignore: A label that does not count.
    """
    if ignore is not None:
        counted = labels != ignore
        found, labels = found[counted], labels[counted]
    classes = max(found.max(initial=-1), labels.max(initial=-1)) + 1
    right = np.bincount(labels[labels == found], minlength=classes)
    decided = np.bincount(found.reshape(-1), minlength=classes)
    cases = np.bincount(labels.reshape(-1), minlength=classes)
    table = np.stack([np.arange(classes), right, decided - right, cases - right], axis=1)
    return table[decided + cases > 0].astype(np.int64)


class ClassCountMetric(Metric):
    """A metric of the counts of all samples together."""

    def from_counts(self, counts: NDArray[np.float64]) -> float:
        """The value for [C, 3]: right, wrong and missed decisions for each class."""
        raise NotImplementedError

    def weighted(self, records: Sequence[Any]) -> Callable[[Weights], Values]:
        """See :meth:`slimctl.evaluate.metric.Metric.weighted`."""
        owner = np.repeat(np.arange(len(records)), [len(record) for record in records])  # [k]
        table = np.concatenate(list(records))  # [k, 4]
        classes = int(table[:, 0].max(initial=-1)) + 1
        cells = (table[:, :1] * 3 + np.arange(3)).reshape(-1)  # [k * 3]

        def counts(weights: NDArray[np.float64]) -> NDArray[np.float64]:
            values = (weights[owner][:, None] * table[:, 1:]).reshape(-1)
            sums = np.bincount(cells, values, classes * 3).astype(np.float64)  # ints if empty
            return sums.reshape(classes, 3)

        return lambda weights: np.array([self.from_counts(counts(row)) for row in weights])
