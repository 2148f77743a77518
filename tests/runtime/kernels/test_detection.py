"""Selecting boxes, against onnxruntime and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from slimctl.core.errors import ModelExecutionError
from tests.runtime.kernels.one_node import Array, assert_agrees, ours

_RANDOM = np.random.default_rng(0)


def _scalar(value: float) -> Array:
    return np.array([value], np.float32)


@pytest.mark.parametrize("center_point_box", [0, 1])
@pytest.mark.parametrize("overlap", [None, 0.0, 0.3, 1.0])
@pytest.mark.parametrize("least", [None, 0.2, 0.6])
@pytest.mark.parametrize("limit", [1, 5, 1000])
def test_agrees(
    limit: int, least: float | None, overlap: float | None, center_point_box: int
) -> None:
    """Among boxes whose corners come in any order, and scores of which many are equal."""
    inputs = [
        _RANDOM.uniform(0, 10, (2, 60, 4)).astype(np.float32),
        _RANDOM.uniform(0, 1, (2, 3, 60)).astype(np.float32).round(1),
        np.array([limit], np.int64),
        None if overlap is None else _scalar(overlap),
        None if least is None else _scalar(least),
    ]
    while inputs[-1] is None:
        inputs.pop()
    assert_agrees("NonMaxSuppression", inputs, opset=11, center_point_box=center_point_box)


def test_many_boxes() -> None:
    """More than are compared at once."""
    first = _RANDOM.uniform(0, 20, (1, 1500, 2))
    boxes = np.concatenate([first, first + _RANDOM.uniform(1, 3, first.shape)], axis=2)
    inputs = [
        boxes.astype(np.float32),
        _RANDOM.uniform(0, 1, (1, 2, 1500)).astype(np.float32),
        np.array([1500], np.int64),
        _scalar(0.4),
    ]
    assert_agrees("NonMaxSuppression", inputs, opset=11)
    assert len(ours("NonMaxSuppression", inputs, opset=11)[0]) > 512


def test_selects_nothing_without_a_limit() -> None:
    inputs = [np.zeros((1, 2, 4), np.float32), np.ones((1, 1, 2), np.float32)]
    assert_agrees("NonMaxSuppression", inputs, opset=10)
    assert ours("NonMaxSuppression", inputs, opset=10)[0].shape == (0, 3)


def test_overlap_at_the_threshold_is_allowed() -> None:
    boxes = np.array([[[0, 0, 1, 2], [0, 1, 1, 3], [0, 0, 1, 2]]], np.float32)  # a third, and all
    scores = np.array([[[0.9, 0.8, 0.7]]], np.float32)
    limit = np.array([9], np.int64)
    third = np.array([np.float32(1) / np.float32(3)], np.float32)
    found = ours("NonMaxSuppression", [boxes, scores, limit, third], opset=11)[0]
    np.testing.assert_array_equal(found, [[0, 0, 0], [0, 0, 1]])
    found = ours("NonMaxSuppression", [boxes, scores, limit, third - 1e-3], opset=11)[0]
    np.testing.assert_array_equal(found, [[0, 0, 0]])


def test_empty_boxes_suppress_nothing() -> None:
    inputs = [np.zeros((1, 3, 4), np.float32), np.ones((1, 1, 3), np.float32), np.array([3])]
    assert_agrees("NonMaxSuppression", inputs, opset=11)
    assert len(ours("NonMaxSuppression", inputs, opset=11)[0]) == 3


def test_refuses_a_threshold_outside() -> None:
    inputs = [np.zeros((1, 2, 4), np.float32), np.ones((1, 1, 2), np.float32)]
    with pytest.raises(ModelExecutionError, match="must be in 0 to 1"):
        ours("NonMaxSuppression", [*inputs, np.array([1]), _scalar(1.5)], opset=11)
