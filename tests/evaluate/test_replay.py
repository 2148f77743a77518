"""What counts as a difference between the runtimes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slimctl.evaluate.replay import NodeTotals

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("ours", "theirs", "relative"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([NAN, 2.0], [NAN, 2.0], 0.0),
        ([INF, 2.0], [INF, 2.0], 0.0),
        ([NAN, 2.0], [1.0, 2.0], INF),
        ([1.0, 2.0], [NAN, 2.0], INF),
        ([INF, 2.0], [-INF, 2.0], INF),
        ([0.5], [0.0], 0.5),
        ([], [], 0.0),
    ],
)
def test_float_differences(ours: list[float], theirs: list[float], relative: float) -> None:
    total = NodeTotals("n", "Op", "t", is_codes=False)
    total.add(np.array(ours, np.float32), np.array(theirs, np.float32), None)
    assert total.relative == relative


def test_codes_and_ties() -> None:
    total = NodeTotals("n", "Op", "t", is_codes=True)
    ours, theirs = np.array([1, 2, 3, 9], np.uint8), np.array([1, 3, 4, 5], np.uint8)
    total.add(ours, theirs, np.array([1.0, 2.501, 3.2, 9.0]))
    assert (total.elements, total.differing, total.steps, total.ties) == (4, 3, 4, 1)
    assert not total.only_ties


@pytest.mark.parametrize("is_codes", [True, False])
def test_another_shape_is_no_agreement(is_codes: bool) -> None:
    total = NodeTotals("n", "Op", "t", is_codes=is_codes)
    total.add_other_shape(np.zeros(6, np.uint8 if is_codes else np.float32))
    assert (total.differing, total.steps) == ((6, 255) if is_codes else (0, 0))
    assert (total.relative == INF) != is_codes
