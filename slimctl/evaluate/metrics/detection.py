"""Mean average precision of object detection, as the COCO challenge computes it.

Lin et al., Microsoft COCO, ECCV 2014, and its reference implementation (pycocotools, ``COCOeval``),
for boxes of all sizes and without crowds: per image and class the best 100 detections, from the
highest score down, each take the free object with the largest overlap, if that reaches the
threshold. Precision is made monotonic and read off at 101 recalls; the mean is over thresholds and
classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from slimctl.core.contract import Feeds
from slimctl.core.errors import OptionError, nearest
from slimctl.evaluate.labels import PADDING, describe, label_error
from slimctl.evaluate.metric import OPTION, Metric, Observed, Values, Weights, ratio, register

RECALLS = np.linspace(0.0, 1.0, 101)
_MOST = 100
"""Detections of an image and class that count, ``maxDets`` of COCO."""

_CELLS = 1 << 22
"""Weights of detections in memory at a time."""

_FIX = "give one row (class, x1, y1, x2, y2) per object, and rows of -1 up to a common number"


class Detections(NamedTuple):
    """What was found in one image.

    Attributes:
        boxes: Corners (x1, y1, x2, y2), [D, 4].
        scores: [D]
        classes: [D]
    """

    boxes: NDArray[np.float64]
    scores: NDArray[np.float64]
    classes: NDArray[np.int64]


class Matches(NamedTuple):
    """The record of one image.

    Attributes:
        scores: Of its detections, [D].
        classes: Theirs, [D].
        right: Whether each found an object, for every threshold, [D, T].
        objects: Classes of its objects, [G].
    """

    scores: NDArray[np.float64]
    classes: NDArray[np.int64]
    right: NDArray[np.bool_]
    objects: NDArray[np.int64]


def overlaps(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Intersection over union of boxes [D, 4] with boxes [G, 4], as [D, G]."""
    low = np.maximum(one[:, None, :2], other[None, :, :2])  # [D, G, 2]
    high = np.minimum(one[:, None, 2:], other[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(axis=-1)
    areas = [np.clip(box[:, 2:] - box[:, :2], 0, None).prod(axis=-1) for box in (one, other)]
    return ratio(shared, areas[0][:, None] + areas[1][None, :] - shared)


def match(iou: NDArray[np.float64], thresholds: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which detections find an object of their own.

    Args:
        iou: [D, G], detections from the highest score down.
        thresholds: [T]

    Returns:
        [D, T]
    """
    right = np.zeros((len(iou), len(thresholds)), bool)
    free = np.ones((len(thresholds), iou.shape[1]), bool)  # [T, G]
    for index, row in enumerate(iou):
        possible = free & (row >= thresholds[:, None])
        found = possible.any(axis=1)
        # Of equal overlaps COCO takes the last object.
        best = iou.shape[1] - 1 - np.argmax(np.where(possible, row, -1.0)[:, ::-1], axis=1)
        right[index] = found
        free[found, best[found]] = False
    return right


def match_image(
    found: Detections, objects: NDArray[np.float64], thresholds: NDArray[np.float64]
) -> Matches:
    """The record of one image with objects (class, x1, y1, x2, y2) [G, 5]."""
    kinds = objects[:, 0].astype(np.int64)
    parts = []
    for kind in np.unique(found.classes):
        own = np.flatnonzero(found.classes == kind)
        own = own[np.argsort(-found.scores[own], kind="stable")][:_MOST]
        iou = overlaps(found.boxes[own], objects[kinds == kind, 1:])
        right = match(iou, thresholds) if iou.size else np.zeros((len(own), len(thresholds)), bool)
        parts.append((own, right))
    order = np.concatenate([np.zeros(0, np.int64), *(own for own, _ in parts)])
    nothing = np.zeros((0, len(thresholds)), bool)
    rights = np.concatenate([nothing, *(right for _, right in parts)])
    return Matches(found.scores[order], found.classes[order], rights, kinds)


class ClassTable(NamedTuple):
    """All images' detections of one class, from the highest score down.

    Attributes:
        owner: Image of each, [D].
        right: [D, T]
        objects: Objects of the class in each image, [N].
    """

    owner: NDArray[np.int64]
    right: NDArray[np.bool_]
    objects: NDArray[np.float64]

    def precision(self, weights: Weights) -> NDArray[np.float64]:
        """Average precision for each threshold, [T, B], of images that count ``weights`` [B, N].

        Only places where an object is found raise precision and recall; the others need no look.
        Copies of a detection follow each other: of equal scores in one image the first counts
        first, as often as the image was drawn.
        """
        drawn = weights[:, self.owner]  # [B, D]
        ranked = np.cumsum(drawn, axis=1)
        total = (weights @ self.objects)[:, None]  # [B, 1]
        return np.array(
            [
                _interpolated(drawn[:, places], ranked[:, places], total)
                for places in map(np.flatnonzero, self.right.T)
            ]
        )


def _interpolated(
    drawn: NDArray[np.float64], ranked: NDArray[np.float64], total: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Mean over the 101 recalls of the best precision at that recall or a higher one.

    Args:
        drawn: How often each right detection counts, [B, P].
        ranked: How many detections there are down to it, [B, P].
        total: Number of objects, [B, 1].
    """
    right = np.cumsum(drawn, axis=1)
    precision = ratio(right, ranked)
    best = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    reached = np.searchsorted(RECALLS, ratio(right, np.broadcast_to(total, right.shape)), "right")
    steps = np.diff(reached, axis=1, prepend=0)  # recalls that each detection is the first to reach
    means: NDArray[np.float64] = (best * steps).sum(axis=1) / len(RECALLS)
    return means


class DetectionMetric(Metric):
    """What both have in common."""

    thresholds: ClassVar[tuple[float, ...]]
    reads = (
        "Detections, non-maximum suppression done: one output of rows (x1, y1, x2, y2, score, "
        "class) [N, K, 6], or three outputs named by the options. Labels are rows (class, x1, y1, "
        "x2, y2) [N, M, 5] in the same coordinates, padded with rows of -1. As COCO: 101 recalls, "
        "at most 100 detections of an image and class. A detected box without area is a wrong one."
    )

    boxes: str = Field("", description="Output with boxes [N, K, 4].")
    scores: str = Field("", description="Output with scores [N, K].")
    classes: str = Field("", description="Output with class numbers [N, K].")
    format: Literal["xyxy", "xywh", "cxcywh"] = Field(
        "xyxy", description="Predicted boxes: two corners, corner and size, or center and size."
    )
    min_score: float = Field(
        0.0, description="Detections whose score is not above it are left out, as padding is."
    )

    @model_validator(mode="after")
    def _all_or_none(self) -> DetectionMetric:
        if len({bool(name) for name in (self.boxes, self.scores, self.classes)}) > 1:
            raise ValueError("boxes, scores and classes must be named together")
        return self

    def records(self, batch: Observed) -> Sequence[Any]:
        """See :class:`Matches`."""
        thresholds = np.array(self.thresholds)
        boxes, scores, classes = self._read(batch.outputs)
        if len(boxes) != batch.size:
            raise OptionError(
                OPTION,
                f"{self.name} needs detections of {batch.size} samples, found {len(boxes)}",
                fix="give outputs whose first axis counts samples",
            )
        found = zip(_corners(boxes, self.format), scores, classes, strict=True)
        return [
            match_image(self._kept(*image), objects, thresholds)
            for image, objects in zip(found, _objects(batch), strict=True)
        ]

    def _kept(self, boxes: Any, scores: Any, classes: Any) -> Detections:
        kept = (scores > self.min_score) & np.isfinite(boxes).all(axis=-1) & (classes >= 0)
        return Detections(boxes[kept], scores[kept], np.rint(classes[kept]).astype(np.int64))

    def _read(
        self, outputs: Feeds
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Boxes [N, K, 4], scores [N, K] and classes [N, K]."""
        if not self.boxes:
            _, rows = self.choose(outputs, _six, "rows (x1, y1, x2, y2, score, class) [N, K, 6]")
            wide = rows.astype(np.float64)
            return wide[..., :4], wide[..., 4], wide[..., 5]
        for name in (self.boxes, self.scores, self.classes):
            if name not in outputs:
                raise OptionError(
                    OPTION, f"The model has no output '{name}'", fix=nearest(name, outputs)
                )
        boxes, scores, classes = (
            np.asarray(outputs[name], np.float64)
            for name in (self.boxes, self.scores, self.classes)
        )
        if boxes.ndim != 3 or boxes.shape[-1] != 4:
            raise self.misfit(self.boxes, outputs[self.boxes], "boxes [N, K, 4]")
        for name, array in ((self.scores, scores), (self.classes, classes)):
            if array.size != boxes.size // 4:
                raise self.misfit(name, outputs[name], f"shape {list(boxes.shape[:2])}")
        return boxes, scores.reshape(boxes.shape[:2]), classes.reshape(boxes.shape[:2])

    def weighted(self, records: Sequence[Any]) -> Callable[[Weights], Values]:
        """See :meth:`Metric.weighted`. Classes without an object in a resample do not count."""
        tables = list(class_tables(records))

        def values(weights: Weights) -> Values:
            step = max(1, _CELLS // max([1, *(len(table.owner) for table in tables)]))
            parts = [weights[at : at + step] for at in range(0, len(weights), step)]
            return np.concatenate([_mean_precision(tables, part) for part in parts])

        return values


def _mean_precision(tables: Sequence[ClassTable], weights: Weights) -> Values:
    total, count = np.zeros(len(weights)), np.zeros(len(weights))
    for table in tables:
        total += table.precision(weights).mean(axis=0)  # 0 where there is no object
        count += (weights @ table.objects) > 0
    return ratio(total, count)


def class_tables(records: Sequence[Matches]) -> Iterator[ClassTable]:
    """One table for each class that has objects."""
    owner = np.repeat(np.arange(len(records)), [len(record.scores) for record in records])
    scores, classes, right = (
        np.concatenate([getattr(record, name) for record in records])
        for name in ("scores", "classes", "right")
    )
    for kind in np.unique(np.concatenate([record.objects for record in records])):
        own = np.flatnonzero(classes == kind)
        own = own[np.argsort(-scores[own], kind="stable")]
        objects = np.array([(record.objects == kind).sum() for record in records], np.float64)
        yield ClassTable(owner[own], right[own], objects)


def _six(output: Any) -> NDArray[Any] | None:
    floats = isinstance(output, np.ndarray) and output.dtype.kind == "f"
    return output if floats and output.ndim == 3 and output.shape[-1] == 6 else None


def _corners(boxes: NDArray[np.float64], form: str) -> NDArray[np.float64]:
    """Boxes [..., 4] as two corners."""
    if form == "xyxy":
        return boxes
    place, size = boxes[..., :2], boxes[..., 2:]
    low = place if form == "xywh" else place - size / 2
    return np.concatenate([low, low + size], axis=-1)


def _objects(batch: Observed) -> list[NDArray[np.float64]]:
    """Rows (class, x1, y1, x2, y2) of each image, without padding."""
    labels = batch.labels
    wanted = f"rows (class, x1, y1, x2, y2) of shape [{batch.size}, M, 5]"
    shaped = labels is not None and labels.ndim == 3 and labels.shape[-1] == 5
    if labels is None or not shaped or len(labels) != batch.size or labels.dtype.kind not in "fiu":
        raise label_error(batch, found=describe(labels), wanted=wanted, fix=_FIX)
    return [_checked(batch, index, rows) for index, rows in enumerate(labels.astype(np.float64))]


def _checked(batch: Observed, index: int, rows: NDArray[np.float64]) -> NDArray[np.float64]:
    kept: NDArray[np.float64] = rows[rows[:, 0] != PADDING]
    whole = (kept[:, 0] >= 0) & (kept[:, 0] == np.rint(kept[:, 0]))
    boxes = (kept[:, 3:] > kept[:, 1:3]).all(axis=1) & np.isfinite(kept).all(axis=1)
    if not (whole & boxes).all():
        row = kept[int(np.argmin(whole & boxes))]
        raise label_error(
            batch,
            found=f"the row {row.tolist()}",
            wanted="a class number from 0 on, and corners with x1 < x2 and y1 < y2",
            fix=_FIX,
            index=index,
        )
    return kept


@register
class MeanAveragePrecision(DetectionMetric):
    """``map``."""

    name = "map"
    summary = "Mean average precision of detection, mean over the overlaps 0.50, 0.55 ... 0.95"
    thresholds = tuple(float(value) for value in np.linspace(0.5, 0.95, 10))


@register
class MeanAveragePrecision50(DetectionMetric):
    """``map50``."""

    name = "map50"
    summary = "Mean average precision of detection at the overlap 0.50"
    thresholds = (0.5,)
