"""Versions of a result: what each is worth against its size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from slimctl.report.charts import Frame, Scale, round_step
from slimctl.report.page import Document, Markup, join, number, section, table, tag
from slimctl.report.words import decibel, size

STYLE = """
.chart svg.small { max-width: 40rem; margin: 0 auto; }
@media (min-width: 40rem) { svg.small text { font-size: 7.5px; } }
svg .trail { fill: none; stroke: var(--line); stroke-width: 1.6; }
svg .version { fill: var(--accent); } svg .version.rejected { fill: var(--bad); }
svg .version.older { fill: var(--third); }
svg .ring { fill: none; stroke: var(--accent); stroke-width: 1.6; }
svg text.strong { fill: var(--ink); font-weight: 600; }
.key i.dot { width: .7rem; height: .7rem; border: 0; border-radius: 50%; }
.key i.accepted { background: var(--third); } .key i.rejected { background: var(--bad); }
.key i.shown { background: var(--accent); }
""".strip()

_AREA = Frame(left=46, top=24, width=290, height=190)
_TITLE = "Versions"


class Point(NamedTuple):
    """A version that can be drawn.

    Attributes:
        label: Its number.
        size: Its bytes.
        value: Its metric or SQNR.
        kind: ``rejected``, ``older`` or, for the page's own version, empty.
        title: What the pointer shows.
    """

    label: str
    size: float
    value: float
    kind: str
    title: str


def versions_section(history: Document, manifest_hash: str) -> Markup:
    """The plot and its numbers.

    Args:
        history: ``versions``, as ``slimctl history --json`` prints them, and ``store``.
        manifest_hash: Of the page's own version.
    """
    versions = history["versions"]
    if not versions:
        why = f"The ledger in '{history['store']}' has no versions of this name."
        return section(_TITLE, tag("p", why, class_="dim"))
    own = _own(versions, manifest_hash)
    axis, value_of = _axis(versions)
    points = list(_points(versions, own, value_of))
    parts = [_plot(points, axis)] if points else []
    if not points:
        parts.append(tag("p", "No version has a metric or an SQNR to draw.", class_="dim"))
    oldest = versions[0]["version"]
    if oldest > 1:
        parts.append(tag("p", f"Versions before {oldest} are not shown here.", class_="dim"))
    if own is None:
        parts.append(tag("p", "This artifact is none of these versions.", class_="dim"))
    return section(_TITLE, join([*parts, _table(versions, own)]))


def _own(versions: Sequence[Document], manifest_hash: str) -> int | None:
    """The page's version: the newest with its hash, the current one before others."""
    same = [one for one in versions if one["manifest_hash"] == manifest_hash]
    same.sort(key=lambda one: (bool(one["current"]), one["version"]))
    return same[-1]["version"] if same else None


def _axis(versions: Sequence[Document]) -> tuple[str, Callable[[Document], float | None]]:
    """The newest version's metric, or SQNR when it has none."""
    metric = versions[-1]["metric"]

    def value(version: Document) -> float | None:
        key = "metric_result" if metric else "sqnr_db"
        fits = not metric or version["metric"] == metric
        return version[key] if fits else None

    return metric or "SQNR, dB", value


def _points(
    versions: Sequence[Document], own: int | None, value_of: Callable[[Document], float | None]
) -> Iterator[Point]:
    for version in versions:
        value = value_of(version)
        if value is None or not math.isfinite(value):
            continue
        kind = "older" if version["accepted"] else "rejected"
        if version["version"] == own:
            kind = ""
        title = f"version {version['version']}: {size(version['size_bytes'])}, {number(value)}"
        yield Point(str(version["version"]), version["size_bytes"], value, kind, title)


def _plot(points: Sequence[Point], axis: str) -> Markup:
    across = _scale([point.size for point in points], _AREA.left, _AREA.right)
    up = _scale([point.value for point in points], _AREA.bottom, _AREA.top)
    trail = " ".join(f"{across(p.size):.1f},{up(p.value):.1f}" for p in points)
    parts = [
        *_horizontal(up, axis),
        *_vertical(across),
        tag("polyline", "", class_="trail", points=trail),
        *(_drawn(point, across(point.size), up(point.value)) for point in points),
        *_labels([(point.label, across(point.size), up(point.value)) for point in points]),
    ]
    view = f"0 0 360 {_AREA.bottom + 38:g}"
    label = f"{axis} against size of {len(points)} versions"
    drawn = tag("svg", join(parts), class_="small", viewBox=view, role="img", aria_label=label)
    return tag("div", join([_key(points), drawn]), class_="chart")


def _scale(values: Sequence[float], start: float, end: float) -> Scale:
    """Round numbers around all values, with some room; not from 0, the differences are small."""
    low, high = min(values), max(values)
    room = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
    step = round_step((high - low + 2 * room) / 4)
    return Scale(
        math.floor((low - room) / step) * step, math.ceil((high + room) / step) * step, start, end
    )


def _ticks(scale: Scale) -> list[float]:
    step = round_step((scale.high - scale.low) / 5)
    first, last = math.ceil(scale.low / step - 1e-6), math.floor(scale.high / step + 1e-6)
    return [index * step for index in range(first, last + 1)]


def _horizontal(scale: Scale, axis: str) -> Iterator[Markup]:
    for value in _ticks(scale):
        place = f"{scale(value):.1f}"
        ends = {"x1": f"{_AREA.left:g}", "x2": f"{_AREA.right:g}"}
        yield tag("line", "", class_="grid", y1=place, y2=place, **ends)
        yield _text(f"{value:.6g}", _AREA.left - 6, scale(value) + 4, "end")
    yield _text(axis, 0, _AREA.top - 12, "start")


def _vertical(scale: Scale) -> Iterator[Markup]:
    for value in _ticks(scale):
        if value >= 0:
            yield _text(size(round(value)), scale(value), _AREA.bottom + 16, "middle")
    yield _text("size of the files", (_AREA.left + _AREA.right) / 2, _AREA.bottom + 32, "middle")


def _drawn(point: Point, x: float, y: float) -> Markup:
    place = {"cx": f"{x:.1f}", "cy": f"{y:.1f}"}
    parts = [
        tag("title", point.title),
        tag("circle", "", class_=f"version {point.kind}".strip(), r="4.5", **place),
        tag("circle", "", class_="ring", r="8", **place) if not point.kind else "",
    ]
    return tag("g", join(parts))


_APART = 12
"""Labels of points that are nearer to each other would cover each other."""


def _labels(places: Sequence[tuple[str, float, float]]) -> Iterator[Markup]:
    """Numbers above their points; those of points in one place stand together."""
    groups: list[tuple[list[str], float, float]] = []
    for label, x, y in places:
        near = (one for one in groups if abs(one[1] - x) < _APART and abs(one[2] - y) < _APART)
        group = next(near, None)
        if group is None:
            groups.append(([label], x, y))
        else:
            group[0].append(label)
    for labels, x, y in groups:
        yield _text(", ".join(labels), x, y - 13, "middle", "strong")


def _key(points: Sequence[Point]) -> Markup:
    kinds = {point.kind for point in points}
    named = [("", "shown", "this one"), ("older", "accepted", "other versions")]
    named.append(("rejected", "rejected", "rejected by a gate"))
    items = (
        tag("span", join([tag("i", "", class_=f"dot {color}"), label]))
        for kind, color, label in named
        if kind in kinds
    )
    return tag("div", join(items), class_="key")


def _table(versions: Sequence[Document], own: int | None) -> Markup:
    rows = [
        (
            version["version"],
            _verdict(version),
            size(version["size_bytes"]),
            decibel(version["sqnr_db"]),
            number(version["metric_result"]),
            ", ".join(_words(version, own)),
            "; ".join(version["changes"] or ()) or "-",
        )
        for version in reversed(versions)
    ]
    header = ("", "verdict", "size", "SQNR", "metric", "", "changed")
    return table(header, rows, "n.nnn.w")


def _verdict(version: Document) -> Markup:
    word, kind = ("accepted", "good") if version["accepted"] else ("rejected", "bad")
    return tag("span", word, class_=kind)


def _words(version: Document, own: int | None) -> Iterator[str]:
    if version["version"] == own:
        yield "this one"
    if version["current"]:
        yield "current"
    yield from version["labels"]


def _text(text: str, x: float, y: float, anchor: str, kind: str = "") -> Markup:
    return tag("text", text, class_=kind, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)
