from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimctl.core.errors import OptionError, SampleError
from slimctl.evaluate.metrics import open_metric
from slimctl.evaluate.metrics.ctc import edit_distance, greedy


def frames(*texts: str) -> np.ndarray:
    """Scores [N, T, 5] whose best classes are the digits of the texts."""
    return np.stack([np.eye(5, dtype=np.float32)[[int(digit) for digit in t]] for t in texts])


@pytest.mark.parametrize(
    ("path", "blank", "expected"),
    [
        ("0110223", 0, [1, 2, 3]),
        ("1101", 0, [1, 1]),  # a blank parts repeats
        ("0000", 0, []),
        ("1144", 4, [1]),
        ("0011", 4, [0, 1]),
    ],
)
def test_best_path(path, blank, expected):
    assert greedy(frames(path)[0], blank).tolist() == expected


def letters(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], np.int64)


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        ("kitten", "sitting", 3),
        ("saturday", "sunday", 3),
        ("", "abc", 3),
        ("abc", "", 3),
        ("", "", 0),
        ("abc", "abc", 0),
        ("abcd", "bcde", 2),
    ],
)
def test_edit_distance(one, other, distance):
    assert edit_distance(letters(one), letters(other)) == distance


@given(st.lists(st.integers(0, 2), max_size=7), st.lists(st.integers(0, 2), max_size=7))
def test_edit_distance_against_its_definition(one, other):
    def distance(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        same = table[i - 1][j - 1] + (one[i - 1] != other[j - 1])
        return min(table[i - 1][j] + 1, table[i][j - 1] + 1, same)

    table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i in range(len(one) + 1):
        for j in range(len(other) + 1):
            table[i][j] = distance(i, j)
    assert edit_distance(np.array(one, np.int64), np.array(other, np.int64)) == table[-1][-1]


# 12, 33 and nothing are read; the labels have 2, 3 and 1 symbols; distances 0, 1 and 1.
SCORES = frames("0112", "3033", "0000")
LABELS = np.array([[1, 2, -1], [3, 3, 4], [2, -1, -1]])


@pytest.mark.parametrize(("name", "expected"), [("ctc-exact", 1 / 3), ("ctc-cer", 2 / 6)])
def test_by_hand(name, expected):
    metric = open_metric(name)
    metric.update({"y": SCORES}, LABELS, 3)
    assert metric.value() == pytest.approx(expected)
    assert metric.higher_is_better == (name == "ctc-exact")


def test_lengths_weigh():
    """1 error in 4 symbols and 1 in 1: 2 of 5, not the mean 5/8."""
    metric = open_metric("ctc-cer")
    metric.update({"y": frames("1234")}, np.array([[1, 2, 3, 1]]), 1)
    metric.update({"y": frames("2222")}, np.array([[1]]), 1)
    assert metric.value() == pytest.approx(2 / 5)


def test_frames_first_and_blank_last():
    metric = open_metric("ctc-exact?layout=tnc&blank=-1")
    metric.update({"y": frames("4014", "0042").swapaxes(0, 1)}, np.array([[0, 1], [0, 2]]), 2)
    assert metric.value() == 1.0


@pytest.mark.parametrize(
    ("labels", "found", "place"),
    [
        (None, "no labels", "samples 0 to 2"),
        (LABELS[:, 0], r"int64 of shape \[3\]", "samples 0 to 2"),
        (LABELS[:2], "2 rows", "samples 0 to 2"),
        (np.where(LABELS == 4, 0, LABELS), r"\[3, 3, 0\]", "sample 1"),
        (LABELS + (LABELS == 4), r"\[3, 3, 5\]", "sample 1"),
        (LABELS[:, ::-1], r"\[-1, 2, 1\]", "sample 0"),
        (LABELS - (LABELS == -1), r"\[1, 2, -2\]", "sample 0"),
    ],
)
def test_labels_that_do_not_do(labels, found, place):
    with pytest.raises(SampleError, match=found) as caught:
        open_metric("ctc-cer").update({"y": SCORES}, labels, 3)
    assert caught.value.sample == place
    assert "-1" in caught.value.fix


def test_the_wrong_layout_is_noticed():
    with pytest.raises(OptionError, match=r"wanted \[N, T, C\] with 3 samples") as caught:
        open_metric("ctc-cer").update({"y": SCORES.swapaxes(0, 1)}, LABELS, 3)
    assert "layout=tnc" in caught.value.fix


def test_labels_without_symbols():
    metric = open_metric("ctc-cer")
    metric.update({"y": frames("12")}, np.array([[-1, -1]]), 1)
    assert metric.value() == 2.0
