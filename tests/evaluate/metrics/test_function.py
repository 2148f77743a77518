from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from slimctl.core.errors import SourceError
from slimctl.evaluate.metrics import open_metric


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
