from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimctl.evaluate.class_scores import class_scores, in_top_k, top_k_accuracy


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
