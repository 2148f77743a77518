"""Selecting boxes."""

from __future__ import annotations

import numpy as np

from slimctl.runtime.registry import Array, operator

_CHUNK = 256
"""Boxes that are compared with each other at once."""


@operator("NonMaxSuppression", since=10)
def non_max_suppression(
    boxes: Array,
    scores: Array,
    max_output_boxes_per_class: Array | None = None,
    iou_threshold: Array | None = None,
    score_threshold: Array | None = None,
    *,
    center_point_box: int = 0,
) -> Array:
    """Boxes of each class that no better box overlaps too much: [n, 3] of batch, class and box."""
    given = max_output_boxes_per_class
    limit = 0 if given is None else max(int(given.item()), 0)
    overlap = 0.0 if iou_threshold is None else iou_threshold.item()
    if not 0 <= overlap <= 1:
        raise ValueError(f"the threshold of overlaps must be in 0 to 1, not {overlap}")
    least = None if score_threshold is None else score_threshold.item()
    corners = _from_centers(boxes) if center_point_box else _ordered(boxes)
    found = [
        (batch, kind, box)
        for batch, (places, classes) in enumerate(zip(corners, scores, strict=True))
        for kind, values in enumerate(classes)
        for box in _kept(places, _ranked(values, least), limit, overlap)
    ]
    return np.array(found, np.int64).reshape(-1, 3)


def _ordered(boxes: Array) -> Array:
    """Corners [..., 4] of which the smaller stand first; a box may name any two opposite ones."""
    first, second = boxes[..., :2], boxes[..., 2:]
    return np.concatenate([np.minimum(first, second), np.maximum(first, second)], axis=-1)


def _from_centers(boxes: Array) -> Array:
    """Corners [..., 4] of boxes that are given as center and size."""
    center, half = boxes[..., :2], boxes[..., 2:] / 2
    return np.concatenate([center - half, center + half], axis=-1)


def _ranked(scores: Array, least: float | None) -> Array:
    """Boxes from the best score down, equal ones in their order; only those above the least."""
    order = np.argsort(-scores, kind="stable")
    return order if least is None else order[scores[order] > least]


def _kept(corners: Array, candidates: Array, limit: int, overlap: float) -> Array:
    """Candidates that no better one overlaps, chunk by chunk: few are looked at if few are kept."""
    kept = np.zeros(0, np.int64)
    for start in range(0, len(candidates), _CHUNK):
        chunk = candidates[start : start + _CHUNK]
        clashes = _overlaps(corners[chunk], corners[kept]) > overlap
        chunk = chunk[~clashes.any(axis=1)]
        among = _overlaps(corners[chunk], corners[chunk]) > overlap
        kept = np.append(kept, chunk[_first_ones(among)])[:limit]
        if len(kept) == limit:
            break
    return kept


def _first_ones(clashes: Array) -> Array:
    """Which stay if each that stays removes all after it that it clashes with."""
    stays = np.ones(len(clashes), bool)
    for i, row in enumerate(clashes):
        if stays[i]:
            stays[i + 1 :] &= ~row[i + 1 :]
    return stays


def _overlaps(boxes: Array, others: Array) -> Array:
    """Intersection over union of all pairs, [boxes, others]; NaN where both are empty."""
    common = np.ones((), boxes.dtype)
    for low, high in ((0, 2), (1, 3)):  # one side after the other: pairs of numbers are slow
        ends = np.minimum(boxes[:, None, high], others[:, high])
        starts = np.maximum(boxes[:, None, low], others[:, low])
        common = common * np.maximum(ends - starts, 0)
    total = _areas(boxes)[:, None] + _areas(others)
    return np.asarray(common / (total - common))


def _areas(boxes: Array) -> Array:
    return np.asarray((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]))
