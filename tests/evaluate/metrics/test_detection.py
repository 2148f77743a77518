from __future__ import annotations

import numpy as np
import pytest

from slimctl.core.errors import OptionError, SampleError
from slimctl.evaluate.metrics import open_metric
from slimctl.evaluate.metrics.detection import match, overlaps

MAP, MAP50 = 0.6606105610561055, 0.9326732673267326
NONE = [-1] * 5
NOTHING = [0] * 6
OBJECTS = np.array(
    [
        [[0, 10, 10, 50, 50], [0, 60, 60, 90, 90], [1, 20, 60, 40, 100]],
        [[1, 0, 0, 30, 30], [1, 5, 5, 35, 35], NONE],
        [[0, 40, 10, 80, 70], NONE, NONE],
    ]
)
DETECTIONS = np.array(
    [
        [
            [12, 11, 50, 52, 0.9, 0],
            [11, 12, 49, 47, 0.8, 0],
            [60, 62, 91, 88, 0.3, 0],
            [22, 60, 42, 98, 0.75, 1],
            NOTHING,
        ],
        [
            [1, 1, 31, 31, 0.7, 1],
            [6, 5, 36, 34, 0.6, 1],
            [0, 0, 28, 30, 0.5, 1],
            [50, 50, 70, 70, 0.65, 0],
            [0, 0, 30, 30, 0.95, 2],
        ],
        [[45, 12, 80, 66, 0.85, 0], [40, 10, 80, 70, 0.2, 1], NOTHING, NOTHING, NOTHING],
    ],
    np.float32,
)


def measured(text: str, detections: np.ndarray, objects: np.ndarray) -> float:
    metric = open_metric(text)
    for image in range(len(objects)):
        metric.update({"y": detections[image][None]}, objects[image][None], 1)
    return metric.value()


def test_against_the_reference_implementation():
    """What COCOeval of pycocotools 2.0.11 says of these boxes."""
    assert measured("map", DETECTIONS, OBJECTS) == pytest.approx(MAP, rel=1e-12)
    assert measured("map50", DETECTIONS, OBJECTS) == pytest.approx(MAP50, rel=1e-12)


def test_by_hand():
    """Two objects; right, wrong, right from the highest score down.

    Precision 1 up to the recall 0.5, which is 51 of 101 recalls, then 2/3.
    """
    objects = np.array([[[0, 0, 0, 10, 10], [0, 20, 0, 30, 10]]])
    rows = [[0, 0, 10, 10, 0.9, 0], [50, 50, 60, 60, 0.8, 0], [20, 0, 30, 10, 0.7, 0]]
    expected = (51 * 1 + 50 * 2 / 3) / 101
    assert measured("map50", np.array([rows], np.float32), objects) == pytest.approx(expected)
    assert measured("map", np.array([rows], np.float32), objects) == pytest.approx(expected)


def test_mean_over_overlaps():
    """9 of 12 columns shared, 0.75: right for the six thresholds from 0.50 to 0.75."""
    objects = np.array([[[3, 0, 0, 12, 10]]])
    box = np.array([[[0, 0, 9, 10, 0.9, 3]]], np.float32)
    assert measured("map", box, objects) == pytest.approx(6 / 10)
    assert measured("map50", box, objects) == 1.0


def test_perfect_and_empty():
    boxes = OBJECTS[:, :, 1:]
    rows = np.concatenate([boxes, np.full((3, 3, 1), 0.5), OBJECTS[:, :, :1]], axis=-1)
    assert measured("map", rows.astype(np.float32), OBJECTS) == 1.0
    assert measured("map", np.zeros((3, 1, 6), np.float32), OBJECTS) == 0.0
    assert measured("map", DETECTIONS, np.full((3, 0, 5), -1)) == 0.0


def test_an_object_is_found_once():
    iou = np.array([[0.9, 0.6], [0.8, 0.7], [0.95, 0.55]])
    found = match(iou, np.array([0.5, 0.65]))
    assert found.tolist() == [[True, True], [True, True], [False, False]]


def test_overlap():
    one = np.array([[0.0, 0, 2, 2], [5, 5, 5, 9]])
    other = np.array([[1.0, 1, 3, 3], [0, 0, 2, 2], [9, 9, 10, 10]])
    np.testing.assert_allclose(overlaps(one, other), [[1 / 7, 1, 0], [0, 0, 0]])


def test_only_the_best_hundred_of_an_image_count():
    objects = np.array([[[0, 0, 0, 10, 10]]])
    rows = np.tile(np.array([50, 50, 60, 60, 0.9, 0], np.float32), (101, 1))
    rows[100, :5] = [0, 0, 10, 10, 0.1]
    assert measured("map", rows[None], objects) == 0.0
    assert measured("map", rows[None, 1:], objects) == pytest.approx(1 / 100)


@pytest.mark.parametrize("form", ["xyxy", "xywh", "cxcywh"])
def test_three_outputs_and_other_boxes(form):
    low, high = DETECTIONS[..., :2], DETECTIONS[..., 2:4]
    forms = {
        "xyxy": [low, high],
        "xywh": [low, high - low],
        "cxcywh": [(low + high) / 2, high - low],
    }
    outputs = {
        "b": np.concatenate(forms[form], axis=-1),
        "s": DETECTIONS[..., 4],
        "c": DETECTIONS[..., 5].astype(np.int64),
    }
    metric = open_metric(f"map50?boxes=b&scores=s&classes=c&format={form}")
    metric.update(outputs, OBJECTS, 3)
    assert metric.value() == pytest.approx(MAP50)


def test_low_scores_are_left_out():
    objects = np.array([[[0, 0, 0, 10, 10]]])
    box = np.array([[[0, 0, 10, 10, 0.4, 0]]], np.float32)
    assert measured("map?min_score=0.3", box, objects) == 1.0
    assert measured("map?min_score=0.5", box, objects) == 0.0


@pytest.mark.parametrize(
    ("labels", "found", "place"),
    [
        (None, "no labels", "samples 0 to 2"),
        (OBJECTS[..., :4], r"shape \[3, 3, 4\]", "samples 0 to 2"),
        (OBJECTS[:2], r"shape \[2, 3, 5\]", "samples 0 to 2"),
        (OBJECTS[..., [0, 3, 2, 1, 4]], "the row", "sample 0"),
        (OBJECTS * np.array([0.5, 1, 1, 1, 1]), r"the row \[0.5, 20.0", "sample 0"),
    ],
)
def test_labels_that_do_not_do(labels, found, place):
    with pytest.raises(SampleError, match=found) as caught:
        open_metric("map").update({"y": DETECTIONS}, labels, 3)
    assert caught.value.sample == place


def test_outputs_that_do_not_do():
    two = {"b": DETECTIONS[..., :4], "s": DETECTIONS[..., 4]}
    with pytest.raises(OptionError, match="cannot tell which output holds rows"):
        open_metric("map").update(two, OBJECTS, 3)
    with pytest.raises(OptionError, match="no output 'c'"):
        open_metric("map?boxes=b&scores=s&classes=c").update(two, OBJECTS, 3)
    with pytest.raises(OptionError, match=r"shape \[3, 5\], output 'b'"):
        open_metric("map?boxes=b&scores=s&classes=b").update(two, OBJECTS, 3)
    with pytest.raises(OptionError, match=r"needs boxes \[N, K, 4\], output 's'"):
        open_metric("map?boxes=s&scores=s&classes=s").update(two, OBJECTS, 3)
    with pytest.raises(OptionError, match="must be named together"):
        open_metric("map?boxes=b")
