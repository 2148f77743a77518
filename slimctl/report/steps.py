"""What each step did to size, SQNR and metric, as bars."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from slimctl.report.bars import Bar, bar_panel
from slimctl.report.page import Document, Markup, join, number, section, tag
from slimctl.report.words import decibel, size

_FULL_DB = 60.0
"""Where a bar of SQNR is full at least: the noise has a millionth of the signal's power."""


def attribution_section(document: Document) -> Markup | None:
    """One panel for each quantity that was measured, its steps in order."""
    steps = document["steps"]
    if not steps:
        return None
    panels, missing = [_sizes(document)], []
    for panel, lack in ((_distances(steps), _NO_SQNR), (_metrics(document), _NO_METRIC)):
        if panel is None:
            missing.append(lack)
        else:
            panels.append(panel)
    notes = [tag("p", text, class_="dim") for text in missing]
    return section("What each step did", join([tag("div", join(panels), class_="panels"), *notes]))


_NO_SQNR = "No SQNR of single steps: the run had no data to compare the models on."
_NO_METRIC = "No metric of single steps: the recipe names none (data.evaluation.metric)."


def _sizes(document: Document) -> Markup:
    """Bytes of weights from the original on."""
    counts = [document["source"]["weight_bytes"], *_values(document["steps"], "weight_bytes")]
    most = max(*counts, 1)
    names = _names(document["steps"])
    changes = ["", *(_percent(before, after) for before, after in pairwise(counts))]
    rows = zip(["original", *names], counts, changes, strict=True)
    return bar_panel(
        "Weights", [Bar(name, count / most, size(count), change) for name, count, change in rows]
    )


def _percent(before: float, after: float) -> str:
    if before == after or not before:
        return ""
    return f"{after / before - 1:+.1%}"


def _distances(steps: Sequence[Document]) -> Markup | None:
    """SQNR that is left after each step."""
    found = [None if step["sqnr_db"] is None else float(step["sqnr_db"]) for step in steps]
    known = [value for value in found if value is not None]
    if not known:
        return None
    full = max(_FULL_DB, *(value for value in known if value < _IDENTICAL_DB), 0.0)
    before: float | None = None
    bars = []
    for name, value in zip(_names(steps), found, strict=True):
        bars.append(Bar(name, (value or 0.0) / full, _distance(value), _lost(before, value)))
        before = value
    return bar_panel("SQNR left", bars)


_IDENTICAL_DB = 200.0


def _distance(value: float | None) -> str:
    if value is None:
        return "not measured"
    return decibel(value) if math.isfinite(value) else "identical" if value > 0 else "-"


def _lost(before: float | None, after: float | None) -> str:
    """The change in dB; there is none from a model that is identical."""
    if before is None or after is None or not max(abs(before), abs(after)) < _IDENTICAL_DB:
        return ""
    return f"{after - before:+.1f} dB"


def _metrics(document: Document) -> Markup | None:
    """The metric after each step; the bars are how far the step moved it."""
    results, steps = document["results"], document["steps"]
    values = [results["metric_original"], *_values(steps, "metric")]
    changes = list(_changes(values))
    known = [abs(change) for change in changes if change is not None]
    if not known:
        return None
    most = max(known) or 1.0
    bars = [Bar("original", 0.0, number(values[0]))]
    for name, value, change in zip(_names(steps), values[1:], changes, strict=True):
        told = "" if change is None else f"{change:+.4g}" if change else "as before"
        bars.append(Bar(name, abs(change or 0.0) / most, number(value), told))
    return bar_panel(f"Change of {results['metric']}", bars)


def _changes(values: Sequence[float | None]) -> Iterator[float | None]:
    """What each step changed, from the last value that was measured before it."""
    before = values[0]
    for value in values[1:]:
        yield None if value is None or before is None else value - before
        before = before if value is None else value


def _values(steps: Sequence[Document], key: str) -> list[float]:
    return [step[key] for step in steps]


def _names(steps: Sequence[Document]) -> list[str]:
    return [f"{index}. {step['name']}" for index, step in enumerate(steps, start=1)]
