from __future__ import annotations

import math
from itertools import pairwise

import pytest

from slimctl.report.charts import Line, Scale, histogram, line_chart, log_heights, round_step
from tests.report.reader import read


@pytest.mark.parametrize(
    ("least", "step"),
    [(0.0, 1), (0.07, 0.1), (1, 1), (1.1, 2), (3, 5), (5, 5), (6, 10), (13.4, 20), (100, 100)],
)
def test_steps_are_round(least: float, step: float) -> None:
    assert round_step(least) == pytest.approx(step)


@pytest.mark.parametrize(
    ("value", "place"), [(0, 100), (10, 0), (5, 50), (-3, 100), (1e9, 0), (-math.inf, 100)]
)
def test_what_lies_outside_is_drawn_at_the_edge(value: float, place: float) -> None:
    assert Scale(0, 10, 100, 0)(value) == place


def test_one_value_is_seen_beside_millions() -> None:
    assert log_heights([0, 0]) == [0, 0]
    none, one, many = log_heights([0, 1, 10**6])
    assert (none, many) == (0, 1)
    assert one == pytest.approx(math.log(2) / math.log(10**6 + 1))


def drawn(count: int, marked: tuple[int, ...] = ()) -> str:
    return line_chart(
        [Line(name, [float(place) for place in range(count)]) for name in ("a", "b", "c")],
        [f"column {place}" for place in range(count)],
        limits=(0.0, 10.0 * math.ceil(count / 10)),
        marked=[place in marked for place in range(count)],
        mark="broken",
        unit="dB",
    )


@pytest.mark.parametrize(("count", "numbers"), [(1, ["1"]), (3, ["1", "2", "3"]), (200, ["1"])])
def test_each_column_has_its_title_and_a_number_where_there_is_room(
    count: int, numbers: list[str]
) -> None:
    reader = read(drawn(count))
    assert reader.titles == [f"column {place}" for place in range(count)]
    points = [value.split() for value in reader.values("points")]
    assert [len(line) for line in points] == [count] * 3
    assert all(number in reader.text for number in numbers)
    assert ("circle" in reader.tags) is (count <= 80)


def test_lines_rise_to_the_right() -> None:
    line = [point.split(",") for point in read(drawn(20)).values("points")[0].split()]
    across, down = ([float(pair[axis]) for pair in line] for axis in (0, 1))
    assert across == sorted(across)
    assert down == sorted(down, reverse=True)
    assert 0 < min(across) < max(across) < 960


def test_only_what_is_marked_is_marked() -> None:
    assert "broken" not in read(drawn(5)).text
    reader = read(drawn(5, marked=(1, 4)))
    assert "broken" in reader.text
    assert reader.values("class").count("flag") == 2


def test_bars_beyond_the_thresholds_stand_out() -> None:
    counts = [5, 0, 7, 9, 1]
    titles = [f"bin {place}" for place in range(5)]
    reader = read(histogram(counts, titles, [(1, "low end"), (4, "high end")], "values"))
    classes = reader.values("class")
    assert classes.count("value beyond") == 2  # bins 0 and 4
    assert classes.count("value") == 2  # bin 1 is empty
    assert reader.titles == titles
    assert "low end" in reader.text and "high end" in reader.text
    lines = [
        float(x)
        for kind, x in zip(classes_of_lines(reader), reader.values("x1"), strict=True)
        if kind == "threshold"
    ]
    assert lines == [pytest.approx(4 + 312 / 5), pytest.approx(4 + 312 * 4 / 5)]


def classes_of_lines(reader: object) -> list[str]:
    """The class of each line, in order; only lines have an ``x1``."""
    pairs: list[tuple[str, str | None]] = reader.attributes  # type: ignore[attr-defined]
    return [
        str(value)
        for (key, value), (following, _) in pairwise(pairs)
        if key == "class" and following == "x1"
    ]


def test_names_are_escaped() -> None:
    evil = '<script>&"'
    text = line_chart(
        [Line(evil, [1.0])], [evil], limits=(0.0, 10.0), marked=[True], mark=evil, unit=evil
    )
    reader = read(text + histogram([1], [evil], [(0, evil), (1, evil)], evil))
    assert "script" not in reader.tags
    assert reader.titles == [evil, evil]
