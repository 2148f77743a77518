from __future__ import annotations

import numpy as np
import pytest

from slimctl.core.errors import OptionError, SampleError
from slimctl.evaluate.metrics import open_metric

# The example of scikit-learn's documentation of f1_score.
RIGHT, FOUND = np.array([0, 1, 2, 0, 1, 2]), np.array([0, 2, 1, 0, 0, 1])
SCORES = np.eye(3, dtype=np.float32)[FOUND]


def measured(text: str, scores: np.ndarray, labels: np.ndarray) -> float:
    """In two batches."""
    metric = open_metric(text)
    for part in (slice(0, 2), slice(2, None)):
        metric.update({"y": scores[part]}, labels[part], len(scores[part]))
    return metric.value()


@pytest.mark.parametrize(
    ("options", "expected"),
    [("", 4 / 15), ("?average=micro", 1 / 3), ("?average=binary&positive=0", 4 / 5)],
)
def test_the_published_example(options, expected):
    """Class 0: 2 right, 1 wrong, none missed, so 4/5; the others have nothing right."""
    assert measured("f1" + options, SCORES, RIGHT) == pytest.approx(expected)


def test_a_class_that_does_not_occur_does_not_count():
    """Classes 2 to 6 and 8 of nine; the third one is called 7."""
    found, right = (np.where(classes == 2, 7, classes) for classes in (FOUND, RIGHT))
    scores = np.eye(9, dtype=np.float32)[found]
    assert measured("f1", scores, right) == pytest.approx(4 / 15)


def test_scores_of_one_class():
    """Decisions 1 1 0 0 for labels 1 0 1 0: one right, one wrong, one missed."""
    scores, labels = np.array([[0.9], [0.6], [0.4], [0.1]], np.float32), np.array([1, 0, 1, 0])
    assert measured("f1?average=binary", scores, labels) == 0.5
    assert measured("f1?average=binary", scores[:, 0], labels) == 0.5
    assert measured("f1?average=binary&threshold=0.2", scores, labels) == pytest.approx(4 / 5)


def test_positions_that_do_not_count():
    """Sequences [N, T, C]; what is at ignored positions changes nothing."""
    scores = SCORES.reshape(2, 3, 3)
    padded = np.concatenate([scores, scores[:, :1]], axis=1)
    labels = np.concatenate([RIGHT.reshape(2, 3), [[-100], [-100]]], axis=1)
    metric = open_metric("f1")
    metric.update({"y": padded}, labels, 2)
    assert metric.value() == pytest.approx(4 / 15)
    assert len(metric.records) == 2


def test_nothing_counts():
    metric = open_metric("f1")
    metric.update({"y": SCORES[:1]}, np.array([-100]), 1)
    assert metric.value() == 0.0


def test_labels_out_of_range():
    with pytest.raises(SampleError, match="numbers from 0 to 3, wanted class numbers 0 to 2"):
        measured("f1", SCORES, RIGHT + (RIGHT == 2))


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("f1?avrage=micro", "no option 'avrage'", "did you mean 'average'?"),
        ("f1?average=mean", "'macro', 'micro' or 'binary'", "f1?average=macro"),
        ("f1?positive=-1", "greater than or equal to 0", "f1?"),
        ("top1?k=3", "no option 'k'", "top1 has no options"),
    ],
)
def test_options_that_do_not_do(text, what, fix):
    with pytest.raises(OptionError, match=what) as caught:
        open_metric(text)
    assert fix in caught.value.fix
