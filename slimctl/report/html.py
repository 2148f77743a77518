"""One artifact as a self-contained HTML page: no script, nothing fetched."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from slimctl.report import additions, bars, benchmark, layers, versions
from slimctl.report.additions import ASKED, Asked
from slimctl.report.costs import cost_section, layer_costs
from slimctl.report.page import (
    Document,
    Markup,
    cards,
    code,
    join,
    named,
    number,
    page,
    passed_or_failed,
    section,
    table,
    tag,
)
from slimctl.report.sizes import dtype_section
from slimctl.report.steps import attribution_section
from slimctl.report.training import training_section
from slimctl.report.words import decibel, size

STYLE = "\n".join((additions.STYLE, bars.STYLE, versions.STYLE))

HISTORY = Asked("Versions", "slimctl report NAME --store STORE", "the versions of a ledger")
"""What the page of an artifact outside of a ledger lacks."""

LATER = HISTORY._replace(what="Later versions", shows="versions made since, and their labels")
"""What the page of a version lacks: it is made with the version."""


def render(document: Document) -> str:
    """The page inside an artifact.

    Args:
        document: The manifest as JSON types.
    """
    return full_page(document, None, [], [HISTORY, *ASKED.values()])


def stored_page(document: Document, history: Document) -> str:
    """The page inside a version of a ledger.

    Args:
        document: The manifest as JSON types.
        history: Versions, this one last, as ``slimctl history --json`` prints them.
    """
    return full_page(document, history, [], [LATER, *ASKED.values()])


def full_page(
    document: Document,
    history: Document | None,
    chapters: Sequence[Markup],
    missing: Sequence[Asked],
) -> str:
    """A page from a manifest and from what else is known.

    Args:
        document: The manifest as JSON types.
        history: Versions, as ``slimctl history --json`` prints them.
        chapters: What was measured since.
        missing: What could be on this page, and is not.
    """
    own = document["manifest_hash"]
    parts = [
        _head(document),
        _cards(document),
        _gates(document),
        attribution_section(document),
        dtype_section(document),
        None if history is None else versions.versions_section(history, own),
        _steps(document),
        training_section(document),
        _groups(document),
        _skipped(document),
        cost_section(document),
        _latency(document),
        *(_along_the_graph(document) if ASKED["--verify"] in missing else ()),
        _data(document),
        _provenance(document),
        *chapters,
        _missing([_rest(one, document) for one in missing]),
    ]
    return page(str(document["name"]), parts, style=STYLE)


def _missing(asked: Sequence[Asked]) -> Markup | None:
    """What is not here, and which command would bring it."""
    if not asked:
        return None
    lines = (
        tag("li", join([f"{one.what}: {one.shows}. Made by ", code(one.command), "."]))
        for one in asked
    )
    return section("Not on this page", tag("ul", join(lines), class_="dim"))


def _rest(asked: Asked, document: Document) -> Asked:
    """What a command would bring beside what the run has measured for its gates."""
    if asked == ASKED["--sensitivity"] and layer_costs(document):
        return asked._replace(shows="intervals, other precisions, the metric")
    if asked == ASKED["--verify"] and document["run"].get("nodes"):
        return asked._replace(shows="verdicts on nodes, values of the worst layers")
    if asked == ASKED["--bench"] and document["run"]["latency"]:
        return asked._replace(shows="bounds of operators, throughput")
    return asked


def _head(document: Document) -> Markup:
    source = document["source"]["files"][0]["name"]
    line = f"made from {source} for target {document['target']}"
    parts = [tag("h1", document["name"]), tag("div", line, class_="dim")]
    if document["uncalibrated"]:
        parts.append(
            tag(
                "p",
                "Uncalibrated: ranges come from random data. This artifact shows that the chain "
                "runs; its accuracy means nothing.",
                class_="warning",
            )
        )
    return join([*parts, Markup("\n")])


def _cards(document: Document) -> Markup:
    results, source = document["results"], document["source"]
    shown = [
        (size(document["model"]["size_bytes"]), f"was {size(source['size_bytes'])}"),
        (f"{results['size_ratio']:.1%}", "of the original's size"),
    ]
    if results["sqnr_db"] is not None:
        shown.append(
            (f"{number(results['sqnr_db'])} dB", f"SQNR on {results['sqnr_samples']} samples")
        )
    if results["metric"] is not None:
        was = number(results["metric_original"])
        shown.append((number(results["metric_result"]), f"{results['metric']}, was {was}"))
    return cards(shown)


def _gates(document: Document) -> Markup | None:
    gates = [*document["results"]["gates"], *document["run"]["gates"]]
    if not gates:
        return None
    rows = [(passed_or_failed(gate["passed"]), gate["gate"], gate["message"]) for gate in gates]
    return section("Gates", table(("verdict", "gate", "found"), rows))


def _steps(document: Document) -> Markup:
    rows = [
        (
            index,
            join([tag("b", step["name"]), Markup("<br>"), _options(step["options"])]),
            ", ".join(f"{count} {what}" for what, count in step["changed"].items()) or "nothing",
            size(step["weight_bytes"]),
            _distance(step["sqnr_db"]),
            number(step["metric"]),
        )
        for index, step in enumerate(document["steps"], start=1)
    ]
    header = ("", "step", "changed", "weights", "SQNR", "metric")
    notes = [
        tag("li", join([tag("b", step["name"]), ": ", note]))
        for step in document["steps"]
        for note in step["notes"]
    ]
    notes += [tag("li", note) for note in document["run"]["notes"]]
    listed = tag("ul", join(notes)) if notes else Markup("")
    return section("Steps", join([table(header, rows, "nw.nnn"), listed]))


def _distance(value: Any) -> str:
    """An SQNR; manifests have a text for an infinity."""
    return decibel(None if value is None else float(value))


def _groups(document: Document) -> Markup | None:
    """What is left of each group of layers that was pruned, drawn as bars."""
    parts = [
        section(
            f"Kept by {step['name']}",
            table(
                ("layers", "", "kept", "why this many"),
                [
                    (
                        join((code(name) for name in group["layers"]), " "),
                        _bar(group["kept"] / group["total"]),
                        f"{group['kept']} of {group['total']}",
                        group["why"],
                    )
                    for group in step["facts"].get("groups", ())
                ],
                "..n.",
            ),
        )
        for step in document["steps"]
        if step["facts"].get("groups")
    ]
    return join(parts) if parts else None


def _bar(share: float) -> Markup:
    inner = tag("i", "", style=f"width:{share:.1%}")
    return tag("div", inner, class_="bar", title=f"{share:.0%}")


def _options(options: Document) -> Markup:
    shown = {key: value for key, value in options.items() if value not in (None, [], "")}
    return code(", ".join(f"{key}={_plain(value)}" for key, value in shown.items()))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _skipped(document: Document) -> Markup | None:
    rows = [
        (step["name"], code(item["node"]), item["reason"])
        for step in document["steps"]
        for item in step["skipped"]
    ]
    if not rows:
        return None
    listed = table(("step", "node", "reason"), rows)
    summary = tag("summary", f"Candidates left as they are: {len(rows)}")
    return section("Left alone", tag("details", join([summary, listed])))


def _latency(document: Document) -> Markup | None:
    latency = document["run"]["latency"]
    if not latency:
        return None
    rows = [
        (side, *(number(times[key]) for key in ("p50_ms", "p90_ms", "p99_ms")))
        for side, times in latency.items()
    ]
    parts = [table(("model", "P50 ms", "P90 ms", "P99 ms"), rows, ".nnn")]
    curves = [
        (side, times["quantiles_ms"]) for side, times in latency.items() if "quantiles_ms" in times
    ]
    if curves:
        parts.append(benchmark.distribution(curves))
    return section("Latency", join(parts))


def _along_the_graph(document: Document) -> Iterator[Markup]:
    """What the gate ``verify`` saw layer by layer."""
    nodes = document["run"].get("nodes")
    if nodes and nodes["layers"]:
        known = layers.known_layers(nodes["layers"], nodes["faults"])
        yield layers.graph_section(known)
        yield named([layers.table_section(known)])


def _data(document: Document) -> Markup | None:
    parts = [
        section(f"{title} data", _facts(document[key]))
        for key, title in (
            ("calibration", "Calibration"),
            ("training", "Training"),
            ("evaluation", "Evaluation"),
        )
        if document.get(key)
    ]
    return join(parts) if parts else None


def _facts(facts: Document) -> Markup:
    return table(("", ""), [(key, code(_plain(value))) for key, value in facts.items()])


def _provenance(document: Document) -> Markup:
    files = table(
        ("file", "bytes", "SHA-256"),
        [
            (entry["name"], f"{entry['size_bytes']:,}", code(entry["sha256"]))
            for entry in (*document["source"]["files"], *document["files"])
        ],
        ".n",
    )
    run = document["run"]
    made = {
        **document["versions"],
        "host": f"{run['host']} ({run['platform']})",
        "started": run["started"],
        "manifest": document["manifest_hash"],
    }
    return join([section("Files", files), section("Provenance", _facts(made))])
