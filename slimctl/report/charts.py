"""Charts as inline SVG. Colors come from the page, so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from slimctl.report.page import Markup, join, tag

STYLE = """
:root { --second: #b3590f; --third: #5d6673; }
@media (prefers-color-scheme: dark) { :root { --second: #f0a45d; --third: #9aa4b1; } }
.chart { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .7rem .9rem; overflow-x: auto; }
.chart svg { display: block; width: 100%; height: auto; }
.chart svg.wide { min-width: 50rem; }
.chart .key { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin-bottom: .4rem;
  font-size: .85rem; }
.key i { display: inline-block; width: 1.4rem; height: 0; margin-right: .4rem;
  vertical-align: middle; border-top: 3px solid var(--line); }
.key i.line-0 { border-color: var(--third); } .key i.line-1 { border-color: var(--accent); }
.key i.line-2 { border-color: var(--second); } .key i.mark { border-color: var(--bad); }
svg text { fill: var(--dim); font: 11px system-ui, -apple-system, "Segoe UI", sans-serif; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
svg .line-0 { stroke: var(--third); } svg .line-1 { stroke: var(--accent); }
svg .line-2 { stroke: var(--second); }
svg .dot-0 { fill: var(--third); } svg .dot-1 { fill: var(--accent); }
svg .dot-2 { fill: var(--second); }
svg .mark { stroke: var(--bad); stroke-width: 1; stroke-dasharray: 3 2; }
svg .flag { fill: var(--bad); }
svg .column rect { fill: transparent; }
svg .column:hover rect { fill: var(--ink); fill-opacity: .08; }
svg .bars { fill: var(--accent); } svg .bars .beyond { fill: var(--bad); }
svg .outside { fill: var(--bad); fill-opacity: .07; }
svg .threshold { stroke: var(--bad); stroke-width: 1.2; }
svg .column:hover .value { fill-opacity: .6; }
""".strip()


class Frame(NamedTuple):
    """Where a chart's data area lies, in SVG units.

    Attributes:
        left: Its left edge.
        top: Its upper edge.
        width: Its width.
        height: Its height.
    """

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """Its right edge."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """Its lower edge."""
        return self.top + self.height


class Scale(NamedTuple):
    """A range of numbers drawn on a range of SVG units.

    Attributes:
        low: Number at ``start``.
        high: Number at ``end``.
        start: In SVG units.
        end: In SVG units.
    """

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The place of a number; what lies outside is drawn at the edge."""
        inside = min(max(value, self.low), self.high)
        return self.start + (inside - self.low) / (self.high - self.low) * (self.end - self.start)


class Line(NamedTuple):
    """One line of a line chart.

    Attributes:
        label: What it shows.
        values: One number per column.
    """

    label: str
    values: Sequence[float]


_LINES = Frame(left=38, top=14, width=906, height=250)
_MOST_DOTS = 80
"""Columns up to which each value has a dot: with more, dots would touch and hide the lines."""


def line_chart(
    lines: Sequence[Line],
    titles: Sequence[str],
    *,
    limits: tuple[float, float],
    marked: Sequence[bool],
    mark: str,
    unit: str,
) -> Markup:
    """Lines over numbered columns.

    Args:
        lines: At most three, each with one value per column.
        titles: What the pointer shows at each column.
        limits: Numbers at the lower and upper edge; multiples of ten.
        marked: Columns that stand out.
        mark: What marked columns are.
        unit: Of the values.
    """
    count = len(titles)
    across = Scale(0.5, count + 0.5, _LINES.left, _LINES.right)
    up = Scale(*limits, _LINES.bottom, _LINES.top)
    parts = [
        *_horizontal_grid(limits, up, unit),
        *_column_numbers(count, across),
        *(_mark(across(index)) for index, found in enumerate(marked, start=1) if found),
        *(_polyline(index, line, across, up) for index, line in enumerate(lines)),
        *_columns(titles, across),
    ]
    label = "; ".join(line.label for line in lines)
    drawn = _svg(parts, 960, _LINES.bottom + 34, label, kind="wide")
    return tag("div", join([_key(lines, mark if any(marked) else ""), drawn]), class_="chart")


def _key(lines: Sequence[Line], mark: str) -> Markup:
    items = [(f"line-{index}", line.label) for index, line in enumerate(lines)]
    items += [("mark", mark)] * bool(mark)
    return tag(
        "div",
        join(tag("span", join([tag("i", "", class_=kind), label])) for kind, label in items),
        class_="key",
    )


def _horizontal_grid(limits: tuple[float, float], up: Scale, unit: str) -> Iterator[Markup]:
    low, high = limits
    step = round_step((high - low) / 5)
    for index in range(math.ceil(low / step), math.floor(high / step) + 1):
        value = index * step
        y = up(value)
        yield _shape("line", class_="grid", x1=_LINES.left, x2=_LINES.right, y1=y, y2=y)
        yield _label(f"{value:g}", _LINES.left - 6, y + 4, "end")
    yield _label(unit, 0, _LINES.top + 4, "start")


def _column_numbers(count: int, across: Scale) -> Iterator[Markup]:
    step = max(int(round_step(count / 15)), 1)
    numbers = [1, *range(step, count + 1, step)] if step > 1 else range(1, count + 1)
    for number in numbers:
        yield _label(str(number), across(number), _LINES.bottom + 16, "middle")
    middle = (_LINES.left + _LINES.right) / 2
    yield _label("layers in the order in which they run", middle, _LINES.bottom + 31, "middle")


def round_step(least: float) -> float:
    """The least of 1, 2, 5, 10, 20, 50, ... (and their tenths) that is not less than a number."""
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))


def _mark(x: float) -> Markup:
    line = _shape("line", class_="mark", x1=x, x2=x, y1=_LINES.top, y2=_LINES.bottom)
    flag = f"M{x - 5:.1f} {_LINES.top - 10} h10 l-5 9 z"
    return join([line, tag("path", "", class_="flag", d=flag)])


def _polyline(index: int, line: Line, across: Scale, up: Scale) -> Markup:
    points = [(across(place), up(value)) for place, value in enumerate(line.values, start=1)]
    listed = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    drawn = tag("polyline", "", class_=f"line line-{index}", points=listed)
    if len(points) > _MOST_DOTS:
        return drawn
    dots = (_shape("circle", class_=f"dot-{index}", cx=x, cy=y, r=2.4) for x, y in points)
    return join([drawn, *dots])


def _columns(titles: Sequence[str], across: Scale) -> Iterator[Markup]:
    """An invisible area over each column, for the pointer."""
    width = (across.end - across.start) / len(titles)
    for index, title in enumerate(titles):
        area = _shape(
            "rect",
            x=across.start + index * width,
            y=_LINES.top,
            width=width,
            height=_LINES.height,
        )
        yield tag("g", join([tag("title", title), area]), class_="column")


_BARS = Frame(left=4, top=6, width=312, height=96)


def histogram(
    counts: Sequence[int],
    titles: Sequence[str],
    thresholds: Sequence[tuple[float, str]],
    label: str,
) -> Markup:
    """Counts as bars, their heights logarithmic, with two thresholds.

    Args:
        counts: Of bins of equal width.
        titles: What the pointer shows at each bin.
        thresholds: Places, in bins from the left, of the lower and the upper one, each with its
            label. Bars beyond them stand out.
        label: What it shows, for readers that do not see it.
    """
    across = Scale(0, len(counts), _BARS.left, _BARS.right)
    (low, low_label), (high, high_label) = thresholds
    parts = [
        _outside(across(0), across(low)),
        _outside(across(high), across(len(counts))),
        tag("g", join(_bars(counts, titles, across, low, high)), class_="bars"),
        _shape(
            "line", class_="grid", x1=_BARS.left, x2=_BARS.right, y1=_BARS.bottom, y2=_BARS.bottom
        ),
        _threshold(across(low), low_label),
        _threshold(across(high), high_label),
    ]
    return _svg(parts, 320, _BARS.bottom + 18, label)


def _outside(start: float, end: float) -> Markup:
    return _shape(
        "rect", class_="outside", x=start, y=_BARS.top, width=end - start, height=_BARS.height
    )


def _threshold(x: float, label: str) -> Markup:
    line = _shape("line", class_="threshold", x1=x, x2=x, y1=_BARS.top, y2=_BARS.bottom)
    return join([line, _label(label, x, _BARS.bottom + 14, "middle")])


def _bars(
    counts: Sequence[int], titles: Sequence[str], across: Scale, low: float, high: float
) -> Iterator[Markup]:
    heights = log_heights(counts)
    for index, (height, title) in enumerate(zip(heights, titles, strict=True)):
        x, width = across(index), across(index + 1) - across(index)
        area = _shape("rect", x=x, y=_BARS.top, width=width, height=_BARS.height)
        tall = height * _BARS.height
        kind = "value" if low <= index < high else "value beyond"
        bar = _shape(
            "path",
            class_=kind,
            d=f"M{x + 0.3:.2f} {_BARS.bottom} v{-tall:.2f} h{width - 0.6:.2f} v{tall:.2f} z",
        )
        yield tag("g", join([tag("title", title), area, bar if tall else ""]), class_="column")


def log_heights(counts: Sequence[int]) -> list[float]:
    """``log(1 + count)`` as a share of the largest: one value is still seen beside millions."""
    largest = math.log1p(max(counts, default=0))
    return [math.log1p(count) / largest if largest else 0.0 for count in counts]


def _svg(
    parts: Iterable[Markup], width: float, height: float, label: str, kind: str = ""
) -> Markup:
    view = f"0 0 {width:g} {height:g}"
    return tag("svg", join(parts), class_=kind, viewBox=view, role="img", aria_label=label)


def _shape(name: str, *, class_: str = "", d: str = "", **numbers: float) -> Markup:
    places = {key: f"{value:.2f}".rstrip("0").rstrip(".") for key, value in numbers.items()}
    return tag(name, "", class_=class_, d=d, **places)


def _label(text: str, x: float, y: float, anchor: str) -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)
