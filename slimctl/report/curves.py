"""Curves over a measured quantity as inline SVG. Colors come from the page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from slimctl.report.charts import Frame, Scale, round_step
from slimctl.report.page import Markup, join, tag

_AREA = Frame(left=56, top=26, width=888, height=240)
_KINDS = 3
"""Kinds of lines that the page's style can tell apart."""


class Curve(NamedTuple):
    """One curve.

    Attributes:
        label: What it shows.
        points: Pairs of x and y, ascending in x.
    """

    label: str
    points: Sequence[tuple[float, float]]


def curve_chart(curves: Sequence[Curve], *, across: str, up: str) -> Markup:
    """Curves in one frame, both axes from 0.

    Args:
        curves: At most three, each with at least one point.
        across: What x is, with its unit.
        up: What y is, with its unit.
    """
    points = [point for curve in curves for point in curve.points]
    right = _top(max(x for x, _ in points))
    top = _top(max(y for _, y in points))
    x = Scale(0, right, _AREA.left, _AREA.right)
    y = Scale(0, top, _AREA.bottom, _AREA.top)
    parts = [
        *_horizontal(y, up),
        *_vertical(x, across),
        *(_drawn(index, curve, x, y) for index, curve in enumerate(curves[:_KINDS])),
    ]
    view = f"0 0 960 {_AREA.bottom + 38:g}"
    label = "; ".join(curve.label for curve in curves)
    drawn = tag("svg", join(parts), class_="wide", viewBox=view, role="img", aria_label=label)
    return tag("div", join([_key(curves), drawn]), class_="chart")


def _top(largest: float) -> float:
    """The end of an axis: the least multiple of its step that holds a number."""
    step = round_step(largest / 5)
    return step * max(math.ceil(largest / step * (1 - 1e-9)), 1)


def _ticks(scale: Scale) -> list[float]:
    step = round_step(scale.high / 5)
    return [index * step for index in range(math.floor(scale.high / step * (1 + 1e-9)) + 1)]


def _horizontal(scale: Scale, unit: str) -> Iterator[Markup]:
    for value in _ticks(scale):
        place = f"{scale(value):.1f}"
        yield tag(
            "line",
            "",
            class_="grid",
            x1=f"{_AREA.left:g}",
            x2=f"{_AREA.right:g}",
            y1=place,
            y2=place,
        )
        yield _text(f"{value:g}", _AREA.left - 6, scale(value) + 4, "end")
    yield _text(unit, 0, _AREA.top - 13, "start")


def _vertical(scale: Scale, unit: str) -> Iterator[Markup]:
    for value in _ticks(scale):
        yield _text(f"{value:g}", scale(value), _AREA.bottom + 16, "middle")
    yield _text(unit, (_AREA.left + _AREA.right) / 2, _AREA.bottom + 32, "middle")


def _drawn(index: int, curve: Curve, x: Scale, y: Scale) -> Markup:
    places = [(x(first), y(second)) for first, second in curve.points]
    listed = " ".join(f"{first:.1f},{second:.1f}" for first, second in places)
    line = tag("polyline", "", class_=f"line line-{index}", points=listed)
    if len(places) > 30:
        return line
    dots = (
        tag("circle", "", class_=f"dot-{index}", cx=f"{first:.1f}", cy=f"{second:.1f}", r="2.4")
        for first, second in places
    )
    return join([line, *dots])


def _key(curves: Sequence[Curve]) -> Markup:
    items = (
        tag("span", join([tag("i", "", class_=f"line-{index}"), curve.label]))
        for index, curve in enumerate(curves[:_KINDS])
    )
    return tag("div", join(items), class_="key")


def _text(text: str, x: float, y: float, anchor: str) -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)
