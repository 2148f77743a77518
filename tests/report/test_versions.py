from __future__ import annotations

import re
from typing import Any

import pytest

from slimctl.report.versions import versions_section
from tests.report.documents import history
from tests.report.reader import read


def changed(**changes: list[Any]) -> dict[str, Any]:
    """The history with other values of some keys."""
    versions = [dict(version) for version in history()["versions"]]
    for key, values in changes.items():
        for version, value in zip(versions, values, strict=True):
            version[key] = value
    return {**history(), "versions": versions}


def points(drawn: str) -> dict[str, tuple[float, float]]:
    """Place of each kind of point; the last of a kind."""
    found = re.findall(r'circle class="version ?(\w*)" r="4.5" cx="([\d.]+)" cy="([\d.]+)"', drawn)
    return {kind: (float(x), float(y)) for kind, x, y in found}


def test_versions_lie_where_their_numbers_are() -> None:
    drawn = str(versions_section(history(), "hash 3"))
    places = points(drawn)
    older, rejected, own = places["older"], places["rejected"], places[""]
    assert rejected[0] < own[0] < older[0]  # smaller is further left
    assert older[1] < own[1] < rejected[1]  # better is further up
    # Bytes are linear: 1.2, 1.5 and 1.7 MB.
    assert (own[0] - rejected[0]) / (older[0] - own[0]) == pytest.approx(1.5, rel=0.01)
    assert drawn.count('class="ring"') == 1


def test_what_the_section_says() -> None:
    reader = read(str(versions_section(history(), "hash 3")))
    assert "3accepted1.5 MB23.0 dB0.975this one, current, production" in reader.text
    assert "version 2: 1.2 MB, 0.91" in reader.titles
    assert "none of these versions" not in reader.text
    assert reader.text.index("3accepted") < reader.text.index("1accepted")  # newest first


def test_another_artifact_is_not_marked() -> None:
    drawn = str(versions_section(history(), "unknown"))
    assert "This artifact is none of these versions." in drawn
    assert 'class="ring"' not in drawn


def test_without_a_metric_it_is_sqnr() -> None:
    drawn = str(versions_section(changed(metric=[None] * 3), "hash 3"))
    assert "SQNR, dB" in drawn
    assert "version 3: 1.5 MB, 23" in drawn


def test_values_of_another_metric_are_no_points() -> None:
    drawn = str(versions_section(changed(metric=["top5", "top1", "top1"]), "hash 3"))
    assert sorted(points(drawn)) == ["", "rejected"]


def test_versions_in_one_place_share_a_label() -> None:
    same = changed(size_bytes=[10, 10, 10], metric_result=[0.5] * 3)
    assert "1, 2, 3" in re.findall(r"<text[^>]*>([^<]*)</text>", str(versions_section(same, "")))


def test_older_versions_that_are_left_out_are_named() -> None:
    newest = {**history(), "versions": history()["versions"][1:]}
    assert "Versions before 2 are not shown here." in str(versions_section(newest, "hash 3"))
    assert "not shown here" not in str(versions_section(history(), "hash 3"))


def test_nothing_to_draw() -> None:
    nothing = changed(metric=[None] * 3, sqnr_db=[None, None, None])
    assert "No version has a metric or an SQNR" in str(versions_section(nothing, "hash 3"))
    empty = {**history(), "versions": []}
    assert "has no versions of this name" in str(versions_section(empty, "hash 3"))


@pytest.mark.parametrize("values", [[0.0] * 3, [1.0] * 3, [-1e9, 0, 1e9], [1e-9, 2e-9, 3e-9]])
def test_any_scale_is_drawn(values: list[float]) -> None:
    drawn = str(versions_section(changed(metric_result=values), "hash 3"))
    assert all(0 < x < 360 and 0 < y < 260 for x, y in points(drawn).values())
