"""Mean intersection over union of segmentation maps.

Long, Shelhamer and Darrell, Fully Convolutional Networks for Semantic Segmentation, CVPR 2015:
``IoU_c = TP_c / (TP_c + FP_c + FN_c)`` over all pixels of the data set, then the mean over the
classes that occur.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from slimctl.evaluate.class_counts import ClassCountMetric, count_classes
from slimctl.evaluate.labels import class_numbers
from slimctl.evaluate.metric import Observed, ratio, register


@register
class MeanIoU(ClassCountMetric):
    """``mean-iou``."""

    name = "mean-iou"
    summary = "Mean over the classes of intersection over union of segmentation maps"
    reads = (
        "Scores of classes [N, C, H, W], one map of scores [N, 1, H, W] that is compared with the "
        "threshold, or maps of class numbers [N, H, W]. Labels are class numbers [N, H, W] of the "
        "output's size. Pixels of all samples are counted together; a class that occurs neither "
        "in labels nor in decisions does not count."
    )

    ignore: int = Field(255, description="Label of pixels that do not count.")
    threshold: float = Field(0.5, description="A single score above it means class 1.")
    background: bool = Field(True, description="Class 0 counts as well.")

    def records(self, batch: Observed) -> Sequence[Any]:
        """See :meth:`slimctl.evaluate.metric.Metric.records`."""
        _, maps = self.choose(batch.outputs, _maps, "segmentation maps")
        found, classes = self._decided(maps)
        labels = class_numbers(batch, found.shape, classes, self.ignore)
        return [count_classes(*pair, self.ignore) for pair in zip(found, labels, strict=True)]

    def _decided(self, maps: NDArray[Any]) -> tuple[NDArray[np.int64], int | None]:
        """Class of each pixel [N, H, W], and the number of classes where it is known."""
        if maps.dtype.kind != "f":
            return maps.astype(np.int64), None
        if maps.shape[1] == 1:
            return (maps[:, 0] > self.threshold).astype(np.int64), 2
        return np.argmax(maps, axis=1), maps.shape[1]

    def from_counts(self, counts: NDArray[np.float64]) -> float:
        """See :meth:`ClassCountMetric.from_counts`."""
        cases = counts.sum(axis=1)  # [C]: right + wrong + missed is the union
        occurs = cases > 0
        if not self.background:
            occurs[:1] = False
        return float(ratio(counts[:, 0], cases)[occurs].mean()) if occurs.any() else 0.0


def _maps(output: Any) -> NDArray[Any] | None:
    """Scores [N, C, H, W], or class numbers [N, H, W] from 0 on."""
    if not isinstance(output, np.ndarray):
        return None
    if output.dtype.kind == "f":
        return output if output.ndim == 4 else None
    if output.dtype.kind not in "iub" or output.min(initial=0) < 0:
        return None
    if output.ndim == 4 and output.shape[1] == 1:
        return output[:, 0]
    return output if output.ndim == 3 else None
