"""Bars of HTML elements. They take the width that there is, on a phone as on a desk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from slimctl.report.page import Markup, join, tag

STYLE = """
:root { --p0: #2563c9; --p1: #c2620e; --p2: #2a8a5a; --p3: #8a4fc7; --p4: #c23a6b; --p5: #7a8491; }
@media (prefers-color-scheme: dark) { :root { --p0: #7fb0ff; --p1: #f0a45d; --p2: #5fc794;
  --p3: #c39bf3; --p4: #f38bb0; --p5: #8a94a1; } }
.panels { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); }
.panel { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .7rem .9rem; min-width: 0; }
.panel h3 { font-size: .9rem; margin: 0 0 .5rem; }
.panel + p, .panels + p { font-size: .85rem; margin: .5rem 0 0; }
.measure + .measure { margin-top: .5rem; }
.measure .said { display: flex; gap: .2rem .6rem; font-size: .88rem;
  font-variant-numeric: tabular-nums; }
.said span:first-child { flex: 1; min-width: 0; overflow-wrap: anywhere; }
.track { height: .6rem; margin-top: .15rem; border-radius: .2rem; background: var(--line);
  overflow: hidden; display: flex; }
.track i { display: block; height: 100%; background: var(--accent); }
.track.tall { height: 1.1rem; }
i.part-0 { background: var(--p0); } i.part-1 { background: var(--p1); }
i.part-2 { background: var(--p2); } i.part-3 { background: var(--p3); }
i.part-4 { background: var(--p4); } i.part-5 { background: var(--p5); }
.keys { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin-top: .7rem; font-size: .85rem; }
.keys i { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem;
  border-radius: .2rem; vertical-align: -.08rem; }
""".strip()

PARTS = 6
"""Colors of parts that can be told apart."""


class Bar(NamedTuple):
    """One bar.

    Attributes:
        label: What it is.
        share: Its length, from 0 to 1.
        value: What it stands for, in words.
        change: What differs from the bar before, in words.
    """

    label: Any
    share: float
    value: str
    change: str = ""


def bar_panel(title: str, bars: Iterable[Bar]) -> Markup:
    """Bars below each other under a title."""
    drawn = [
        _measure((bar.label, bar.value), bar.change, [("", bar.share)], kind="track")
        for bar in bars
    ]
    return tag("div", join([tag("h3", title), *drawn]), class_="panel")


def stacked_bars(rows: Sequence[tuple[str, str, Sequence[float]]], parts: Sequence[str]) -> Markup:
    """Bars below each other, each of parts that have their color in all of them.

    Args:
        rows: Label, value in words, and the share of the track that each part takes.
        parts: What the parts are; at most :data:`PARTS`.
    """
    drawn = [
        _measure(
            (label, value),
            "",
            [(f"part-{index}", share) for index, share in enumerate(shares)],
            kind="track tall",
        )
        for label, value, shares in rows
    ]
    keys = (
        tag("span", join([tag("i", "", class_=f"part-{index}"), part]))
        for index, part in enumerate(parts)
    )
    return tag("div", join([*drawn, tag("div", join(keys), class_="keys")]), class_="panel")


def _measure(
    said: tuple[Any, str], change: str, parts: Iterable[tuple[str, float]], *, kind: str
) -> Markup:
    words = [tag("span", text) for text in said]
    if change:
        words.append(tag("span", change, class_="dim"))
    drawn = (
        tag("i", "", class_=part, style=f"width:{min(max(share, 0.0), 1.0):.2%}")
        for part, share in parts
        if share > 0
    )
    head = tag("div", join(words), class_="said")
    return tag("div", join([head, tag("div", join(drawn), class_=kind)]), class_="measure")
