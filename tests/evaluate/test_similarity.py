from __future__ import annotations

import json
import math

import numpy as np
import pytest

from slimctl.core.errors import DataError
from slimctl.evaluate.similarity import Similarity, cosine, max_abs_error, sqnr_db


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
