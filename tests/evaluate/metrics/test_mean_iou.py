from __future__ import annotations

import numpy as np
import pytest

from slimctl.core.errors import OptionError, SampleError
from slimctl.evaluate.metrics import open_metric

FOUND = np.array([[[0, 2], [1, 1]]])
RIGHT = np.array([[[0, 0], [1, 255]]])
SCORES = np.eye(3, dtype=np.float32)[FOUND].transpose(0, 3, 1, 2)


def measured(text: str, output: np.ndarray, labels: np.ndarray) -> float:
    metric = open_metric(text)
    metric.update({"y": output}, labels, len(output))
    return metric.value()


def test_by_hand():
    """Without the ignored pixel: class 0 has 1 of 2, class 1 has 1 of 1, class 2 has 0 of 1."""
    assert measured("mean-iou", SCORES, RIGHT) == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert measured("mean-iou?background=no", SCORES, RIGHT) == pytest.approx((1 + 0) / 2)


def test_ignored_pixels_are_told_by_their_label():
    """The pixel counts now: it is missed for class 2, and wrong for class 1."""
    labels = np.where(RIGHT == 255, 2, RIGHT)
    assert measured("mean-iou", SCORES, labels) == pytest.approx((1 / 2 + 1 / 2 + 0) / 3)
    with pytest.raises(SampleError, match="numbers from 0 to 255, wanted class numbers 0 to 2"):
        measured("mean-iou?ignore=7", SCORES, RIGHT)


@pytest.mark.parametrize("kind", [np.int64, np.uint8])
def test_maps_of_class_numbers(kind):
    assert measured("mean-iou", FOUND.astype(kind), RIGHT) == pytest.approx(0.5)
    assert measured("mean-iou", FOUND[:, None].astype(kind), RIGHT[:, None]) == pytest.approx(0.5)


def test_one_map_with_a_threshold():
    """Above 0.5: 1 0 / 1 0. Class 1 has 1 of 2, class 0 has 2 of 3."""
    scores = np.array([[[[0.9, 0.5], [0.7, 0.2]]]], np.float32)
    labels = np.array([[[1, 0], [0, 0]]])
    assert measured("mean-iou", scores, labels) == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert measured("mean-iou?background=no", scores, labels) == pytest.approx(1 / 2)
    assert measured("mean-iou?background=no&threshold=0.8", scores, labels) == 1.0


def test_counts_of_all_samples_are_added_first():
    """Class 1: 1 of 1 in the first image, 1 of 4 in the second, so 2 of 5 and not 5/8."""
    metric = open_metric("mean-iou?background=no")
    metric.update({"y": np.array([[[1, 0]]])}, np.array([[[1, 0]]]), 1)
    metric.update({"y": np.array([[[1, 1], [1, 1]]])}, np.array([[[1, 0], [0, 0]]]), 1)
    assert metric.value() == pytest.approx(2 / 5)


def test_labels_of_another_size():
    with pytest.raises(SampleError, match=r"shape \[1, 4, 4\].*of shape \[1, 2, 2\]") as caught:
        measured("mean-iou", SCORES, np.zeros((1, 4, 4), np.int64))
    assert "resized to the output's size" in caught.value.fix


def test_an_output_that_is_no_map():
    with pytest.raises(OptionError, match=r"mean-iou needs segmentation maps.*\[2, 3\]"):
        measured("mean-iou", np.zeros((2, 3), np.float32), np.zeros((2, 3), np.int64))


def test_classes_below_zero():
    with pytest.raises(OptionError, match="needs segmentation maps"):
        measured("mean-iou", FOUND - 1, RIGHT)
