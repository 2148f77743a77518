"""What ``slimctl sensitivity`` found, as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slimctl.report import charts
from slimctl.report.layers import limits
from slimctl.report.page import (
    Document,
    Markup,
    cards,
    code,
    join,
    long_table,
    named,
    page,
    section,
    tag,
)
from slimctl.report.words import decibel

_LINES = 3
"""Lines that a plot can tell apart."""

_TITLES = {
    "alone": ("Only this changed", "The less SQNR is left, the more the change costs."),
    "except": (
        "All changed but this",
        "The more SQNR there is, the more is gained by leaving it as it was.",
    ),
}


def sensitivity_page(document: Document) -> str:
    """The page's text.

    Args:
        document: What the command prints with ``--json``, as Python values.
    """
    title = f"Sensitivity of {Path(document['setup']['model']).name}"
    head = [tag("h1", title), tag("div", line(document), class_="dim")]
    return page(title, [join(head), *sections(document)], style=charts.STYLE)


def sections(document: Document) -> list[Markup]:
    """Everything but the heading."""
    findings = document["findings"]
    tables = [*_tables(findings), *_skipped(document["skipped"])]
    return [_cards(document), *_plots(findings), named(tables)]


def line(document: Document) -> str:
    """What was done."""
    setup = document["setup"]
    how = "estimated" if setup["fast"] else "measured"
    metric = f", metric {setup['metric']}" if setup["metric"] else ""
    return f"{how} on {setup['data']['source']} for target {setup['target']}{metric}"


def _cards(document: Document) -> Markup:
    findings = document["findings"]
    groups = {finding["group"] for finding in findings}
    looked = sum(finding["samples"] for finding in findings)
    return cards(
        [
            (len(groups), "groups of layers"),
            (len(findings), "probes"),
            (f"{looked / max(len(findings), 1):.1f}", f"samples each, of {document['samples']}"),
        ]
    )


def _plots(findings: Sequence[Document]) -> Iterator[Markup]:
    """SQNR along the graph, a line for each change."""
    for direction, (title, _) in _TITLES.items():
        chosen = [finding for finding in findings if finding["direction"] == direction]
        for changes in _with_the_same_groups(chosen):
            for start in range(0, len(changes), _LINES):
                some = changes[start : start + _LINES]
                drawn = _plot([finding for finding in chosen if finding["change"] in some], some)
                if drawn is not None:
                    yield section(f"{title}: SQNR along the graph, {', '.join(some)}", drawn)


def _with_the_same_groups(findings: Sequence[Document]) -> list[list[str]]:
    """Changes that were made to the same groups: these can share a plot and lose no group."""
    groups: dict[str, set[str]] = {}
    for finding in findings:
        groups.setdefault(finding["change"], set()).add(finding["group"])
    alike: dict[frozenset[str], list[str]] = {}
    for change, members in groups.items():
        alike.setdefault(frozenset(members), []).append(change)
    return list(alike.values())


def _plot(findings: Sequence[Document], changes: Sequence[str]) -> Markup | None:
    """The groups that all of the changes can be made to."""
    known: dict[str, dict[str, Document]] = {}
    for finding in sorted(findings, key=lambda finding: finding["place"]):
        known.setdefault(finding["group"], {})[finding["change"]] = finding
    columns = {group: found for group, found in known.items() if len(found) == len(changes)}
    if not columns:
        return None
    lines = [
        charts.Line(change, [found[change]["sqnr_db"] for found in columns.values()])
        for change in changes
    ]
    titles = [
        "\n".join(
            [group, *(f"{change} {decibel(one['sqnr_db'])}" for change, one in found.items())]
        )
        for group, found in columns.items()
    ]
    return charts.line_chart(
        lines,
        titles,
        limits=limits(value for line in lines for value in line.values),
        marked=[False] * len(titles),
        mark="",
        unit="dB",
    )


def _tables(findings: Sequence[Document]) -> Iterator[Markup]:
    for direction, (title, note) in _TITLES.items():
        chosen = [finding for finding in findings if finding["direction"] == direction]
        if chosen:
            yield section(title, join([tag("p", note, class_="dim"), _table(chosen)]))


def _table(findings: Sequence[Document]) -> Markup:
    low, high = limits(finding["sqnr_db"] for finding in findings)
    measured = any(finding["metric"] for finding in findings)
    header = ["group", "operator", "change", "SQNR", "", "95 %", "weights"]
    rows = [_row(finding, low, high, measured=measured) for finding in findings]
    return long_table([*header, *["metric drop"] * measured], rows, "...n.nn" + "n" * measured)


def _row(finding: Document, low: float, high: float, *, measured: bool) -> list[Any]:
    share = min(max((finding["sqnr_db"] - low) / (high - low), 0.0), 1.0)
    bar = tag("div", tag("i", "", style=f"width:{share:.0%}"), class_="bar")
    known = finding["low_db"] is not None
    row = [
        code(finding["group"]),
        " ".join(finding["op_types"]),
        finding["change"],
        decibel(finding["sqnr_db"]),
        bar,
        f"{finding['low_db']:.1f} to {finding['high_db']:.1f}" if known else "estimate",
        f"{finding['parameters']:,}",
    ]
    if measured:
        loss = finding["metric"]
        row.append("-" if loss is None else f"{loss['drop']:+.4f}")
    return row


def _skipped(skipped: Document) -> Iterator[Markup]:
    rows = [
        (change, code(item["node"]), item["reason"])
        for change, items in skipped.items()
        for item in items
    ]
    if rows:
        yield section("Cannot be changed", long_table(("change", "node", "reason"), rows, "..w"))
