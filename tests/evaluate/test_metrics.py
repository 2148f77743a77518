from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimctl.core.errors import DataError, OptionError, SampleError, SourceError
from slimctl.evaluate.metrics import (
    Similarity,
    class_scores,
    cosine,
    in_top_k,
    max_abs_error,
    metric_names,
    open_metric,
    sqnr_db,
    top_k_accuracy,
)


def test_sqnr_by_hand():
    reference = np.array([3.0, 4.0], np.float32)  # signal 25
    other = np.array([3.0, 4.5], np.float32)  # noise 0.25
    assert sqnr_db(reference, other) == pytest.approx(20.0)
    assert max_abs_error(reference, other) == 0.5
    assert cosine(reference, other) == pytest.approx(27 / (5 * math.sqrt(29.25)))


@pytest.mark.parametrize(
    ("reference", "other", "db", "cos"),
    [
        ([1.0, 2.0], [1.0, 2.0], 200.0, 1.0),
        ([0.0, 0.0], [0.0, 0.0], 200.0, 1.0),
        ([0.0, 0.0], [0.0, 1.0], -200.0, 0.0),
        ([1.0, 0.0], [0.0, 0.0], 0.0, 0.0),
        ([1e-30, 0.0], [1e30, 0.0], -200.0, 1.0),
        ([1.0, np.nan], [1.0, np.nan], 200.0, 1.0),
        ([1.0, np.inf], [1.0, np.inf], 200.0, 1.0),
        ([1.0, np.inf], [1.0, -np.inf], -200.0, 1.0),
        ([1.0, 2.0], [1.0, np.nan], -200.0, 1.0),
        ([], [], 200.0, 1.0),
    ],
)
def test_edges_are_finite_and_json_safe(reference, other, db, cos):
    total = Similarity()
    total.update(np.array(reference, np.float32), np.array(other, np.float32))
    assert total.sqnr_db == pytest.approx(db)
    assert total.cosine == pytest.approx(cos)
    json.dumps([total.sqnr_db, total.cosine, total.max_abs_error], allow_nan=False)


def test_non_finite_values_are_counted():
    total = Similarity()
    total.update(np.array([np.nan, 1, 2, np.inf]), np.array([np.nan, np.nan, 2.5, 1]))
    assert total.non_finite == 2
    assert total.max_abs_error == 0.5


def test_accumulating_equals_all_at_once():
    """More values than one block holds, and the oracle's own formula."""
    generator = np.random.default_rng(0)
    reference = generator.normal(size=(7, 41, 997)).astype(np.float32)
    other = reference + generator.normal(size=reference.shape).astype(np.float32) * 0.01
    parts = Similarity()
    for one, two in zip(reference, other, strict=True):
        parts.update(one, two)
    a, b = reference.astype(np.float64).ravel(), other.astype(np.float64).ravel()
    wanted = 10 * np.log10((a**2).sum() / ((a - b) ** 2).sum())
    assert parts.sqnr_db == pytest.approx(wanted, rel=1e-12)
    assert sqnr_db(reference, other) == pytest.approx(wanted, rel=1e-12)
    assert parts.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert parts.max_abs_error == np.abs(a - b).max()
    assert sqnr_db(reference.T, other.T) == pytest.approx(wanted, rel=1e-12)


def test_half_precision_does_not_overflow():
    values = np.full(100_000, 60_000, np.float16)
    assert sqnr_db(values, values) == 200.0
    assert sqnr_db(values, (values * np.float16(0.9)).astype(np.float16)) == pytest.approx(20, 0.01)


@pytest.mark.filterwarnings("ignore:overflow")
def test_values_beyond_the_range_of_squares():
    assert sqnr_db(np.array([1e200]), np.array([2e200])) == -200.0


def test_shapes_must_be_equal():
    with pytest.raises(DataError, match=r"\[2\].*\[3\]"):
        sqnr_db(np.zeros(2), np.zeros(3))


# classes


@pytest.mark.parametrize(
    ("shape", "scores"),
    [
        ((2, 10), (2, 10)),
        ((2, 7, 10), (2, 7, 10)),
        ((2, 10, 1, 1), (2, 10)),
        ((10,), None),
        ((2, 1), None),
        ((2, 3, 8, 8), None),
    ],
)
def test_which_outputs_are_class_scores(shape, scores):
    found = class_scores(np.zeros(shape, np.float32))
    assert (None if found is None else found.shape) == scores
    assert class_scores(np.zeros(shape, np.int64)) is None


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_top_k_against_sorting(seed, k):
    generator = np.random.default_rng(seed)
    scores = generator.permutation(70).reshape(10, 7).astype(np.float32)  # no ties
    labels = generator.integers(0, 7, 10)
    best = np.argsort(-scores, axis=1)[:, :k]
    np.testing.assert_array_equal(
        in_top_k(scores, labels, k), [label in row for label, row in zip(labels, best, strict=True)]
    )


def test_ties_count_for_the_lower_class_as_argmax_does():
    scores = np.array([[1.0, 1.0, 0.0]] * 3)
    np.testing.assert_array_equal(in_top_k(scores, np.array([0, 1, 2]), 1), [True, False, False])
    np.testing.assert_array_equal(in_top_k(scores, np.array([0, 1, 2]), 2), [True, True, False])
    constant = np.zeros((4, 5))
    assert top_k_accuracy(constant, np.array([0, 1, 2, 3]), 1) == 0.25


def test_a_nan_score_is_no_hit():
    scores = np.full((2, 4), np.nan)
    assert top_k_accuracy(scores, np.array([0, 3]), 1) == 0.0


def test_metrics_by_name():
    assert list(metric_names()) == ["top1", "top5", "agreement"]
    with pytest.raises(OptionError, match="Unknown metric 'top-1'") as caught:
        open_metric("top-1")
    assert "'top1'" in caught.value.fix and "module:function" in caught.value.fix


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


# the user's own


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(body: str) -> str:
        Path("own_metric.py").write_text(f"def score(outputs, labels):\n    {body}\n")
        return "own_metric.py:score"

    return write


def test_mean_of_a_batch_is_weighted_by_its_size(own):
    metric = open_metric(own("return float(outputs['y'].mean())"))
    metric.update({"y": np.array([1.0, 3.0])}, None, 2)
    metric.update({"y": np.array([8.0])}, None, 1)
    assert metric.value() == pytest.approx(4.0)
    assert metric.higher_is_better


def test_sum_and_count(own):
    metric = open_metric(own("return outputs['y'].sum(), outputs['y'].size"))
    metric.update({"y": np.array([1.0, 3.0])}, None, 1)
    metric.update({"y": np.array([8.0])}, None, 1)
    assert metric.value() == pytest.approx(4.0)


def test_direction_of_a_metric(own):
    name = own("return 1.0\n\nscore.higher_is_better = False")
    assert not open_metric(name).higher_is_better


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return None", "returned None"),
        ("return 'good'", "returned 'good'"),
        ("return float('nan')", "returned nan"),
        ("return 1, 2, 3", "returned"),
        ("return labels[0]", r"own_metric.py:2 in score: TypeError"),
    ],
)
def test_metrics_that_do_not_do(own, body, expected):
    metric = open_metric(own(body))
    with pytest.raises(SourceError, match=expected):
        metric.update({"y": np.zeros(2)}, None, 2)


def test_metric_that_does_not_exist():
    with pytest.raises(SourceError, match="There is no module 'nowhere_at_all'"):
        open_metric("nowhere_at_all:score")
