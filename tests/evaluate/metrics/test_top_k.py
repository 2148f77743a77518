from __future__ import annotations

import numpy as np
import pytest

from slimctl.core.errors import OptionError, SampleError, UnsupportedModelError
from slimctl.evaluate.metrics import open_metric


def test_top1_over_batches():
    metric = open_metric("top1")
    metric.update({"y": np.eye(4, dtype=np.float32)}, np.array([0, 1, 2, 0]), 4)
    metric.update({"y": np.eye(4, dtype=np.float32)[:1]}, np.array([3]), 1)
    assert metric.value() == 3 / 5


def test_labels_per_position():
    """Sequence models: [N, T, C] with labels [N, T]."""
    metric = open_metric("top1")
    scores = np.eye(6, dtype=np.float32).reshape(2, 3, 6)
    metric.update({"y": scores}, np.array([[0, 1, 2], [3, 4, 0]]), 2)
    assert metric.value() == 5 / 6


def test_which_output_holds_the_scores():
    outputs = {
        "boxes": np.zeros((2, 4), np.float32),
        "logits": np.eye(2, 3, dtype=np.float32),
        "ids": np.zeros(2, np.int64),
    }
    with pytest.raises(OptionError, match="'boxes', 'logits'") as caught:
        open_metric("top1").update(outputs, np.array([0, 1]), 2)
    assert "top1:boxes" in caught.value.fix
    chosen = open_metric("top1:logits")
    chosen.update(outputs, np.array([0, 1]), 2)
    assert chosen.value() == 1.0
    with pytest.raises(OptionError, match="no output 'logit'") as caught:
        open_metric("top1:logit").update(outputs, np.array([0, 1]), 2)
    assert "'logits'" in caught.value.fix


@pytest.mark.parametrize(("name", "hits"), [("top1", 1), ("top5", 3)])
def test_labels_at_ranks(name, hits):
    """The first, second, fifth and sixth highest score of seven."""
    metric = open_metric(name)
    scores = np.arange(7, 0, -1, dtype=np.float32)[None].repeat(4, axis=0)
    metric.update({"y": scores}, np.array([0, 1, 4, 5]), 4)
    assert metric.value() == hits / 4


def test_top5_needs_more_than_five_classes():
    with pytest.raises(OptionError, match="more than 5 classes"):
        open_metric("top5").update({"y": np.zeros((1, 5), np.float32)}, np.array([0]), 1)


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        (None, "no labels"),
        (np.array([0.0, 1.0]), "dtype float64"),
        (np.array([0, 4]), "numbers from 0 to 4"),
        (np.array([-1, 2]), "numbers from -1 to 2"),
        (np.array([0, 1, 2]), "shape [3]"),
        (np.eye(2, 4, dtype=np.int64), "shape [2, 4]"),
    ],
)
def test_labels_that_are_no_class_numbers(labels, found):
    metric = open_metric("top1")
    metric.update({"y": np.zeros((2, 4), np.float32)}, np.array([0, 1]), 2)
    with pytest.raises(SampleError) as caught:
        metric.update({"y": np.zeros((2, 4), np.float32)}, labels, 2)
    assert caught.value.found == found
    assert caught.value.sample == "samples 2 to 3"
    assert "0 to 3" in caught.value.wanted


def test_agreement_of_different_classes():
    metric = open_metric("agreement")
    own, other = np.eye(3, dtype=np.float32), np.eye(3, 4, dtype=np.float32)
    metric.update({"y": own}, None, 3, reference={"y": own[[0, 1, 1]]})
    assert metric.value() == 2 / 3
    with pytest.raises(UnsupportedModelError, match=r"\[3, 3\].*\[3, 4\]"):
        metric.update({"y": own}, None, 3, reference={"y": other})
