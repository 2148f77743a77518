"""What ``slimctl verify`` found, as a self-contained HTML page: no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slimctl.core.files import write_atomic
from slimctl.evaluate.verification import Verdict
from slimctl.report import charts, layers
from slimctl.report.page import (
    Document,
    Markup,
    cards,
    code,
    join,
    long_table,
    named,
    number,
    page,
    passed_or_failed,
    section,
    table,
    tag,
)
from slimctl.report.words import decibel, share

STYLE = f"{charts.STYLE}\n{layers.STYLE}"


def write_report(path: Path, document: Document) -> None:
    """Writes the page; a reader sees the old one or the new one.

    Args:
        path: The ``.html`` file.
        document: What the command prints with ``--json``, as Python values; it has ``nodes``.

    Raises:
        OutputError: The file cannot be written.
    """
    write_atomic(path, render(document).encode())


def render(document: Document) -> str:
    """The page's text."""
    head = join([tag("h1", document["model"]), tag("div", line(document), class_="dim")])
    return page(Path(str(document["model"])).name, [head, *sections(document)], style=STYLE)


def sections(document: Document) -> list[Markup]:
    """Everything but the heading."""
    found = [
        _passed(document),
        _cards(document),
        _outputs(document),
        _metric(document["metric"]),
        *_looked_inside(document["nodes"]),
    ]
    return [named(part for part in found if part is not None)]


def _looked_inside(nodes: Document | None) -> Iterator[Markup | None]:
    """What was found node by node, if that was looked for."""
    if nodes is None:
        return
    faults = list(filter(_is_fault, nodes["judgments"]))
    known = layers.known_layers(nodes["layers"], faults)
    yield _runtimes(nodes)
    yield layers.graph_section(known) if known else None
    yield _judgments(nodes["judgments"])
    yield layers.table_section(known) if known else None
    yield from layers.histogram_sections(known)
    yield _counts(nodes["counts"])


def line(document: Document) -> str:
    """What was compared."""
    reference = document["reference"]
    against = "no reference" if reference is None else f"against {reference}"
    return f"{against}, on {document['data'] or 'random inputs'}; {document['integrity']}"


def _passed(document: Document) -> Markup:
    parts = [_bounds(document)]
    if document["random_data"]:
        text = "The data are random, so these numbers say little about real inputs."
        parts.append(tag("p", text, class_="warning"))
    return join([*parts, Markup("\n")])


def _bounds(document: Document) -> Markup:
    verdict = passed_or_failed(document["passed"])
    if document["passed"]:
        return tag("p", join([verdict, ": no bound is broken"]))
    broken = tag("ul", join(tag("li", failure) for failure in document["failures"]))
    return join([tag("p", join([verdict, ": bounds that do not hold"])), broken])


def _cards(document: Document) -> Markup:
    shown = list(_output_cards(document))
    if document["metric"] is not None:
        metric = document["metric"]
        was = number(metric["reference"])
        shown.append((number(metric["model"]), f"{metric['metric']}, was {was}"))
    if document["nodes"] is not None:
        shown += _node_cards(document["nodes"])
    return cards(shown)


def _output_cards(document: Document) -> Iterator[tuple[Any, str]]:
    outputs = [output for output in document.get("outputs", ()) if output["sqnr_db"] is not None]
    if outputs:
        worst = min(outputs, key=lambda output: output["sqnr_db"])
        yield decibel(worst["sqnr_db"]), f"SQNR of the worst output, {worst['name']}"


def _node_cards(nodes: Document) -> Iterator[tuple[Any, str]]:
    optimized = [one for one in nodes["runtimes"] if one["level"] == "all" and one["codes"]]
    if optimized:
        worst = min(optimized, key=lambda one: one["identical"])
        yield share(worst["identical"]), "of the codes are the same in both runtimes at level all"
        yield nodes["max_step_difference"], "quantization steps apart at most"
    faults = {one["node"] for one in nodes["judgments"] if _is_fault(one)}
    kind = "bad" if faults else "good"
    yield tag("span", len(faults), class_=kind), "nodes at which the model is wrong"
    yield _verdict(nodes["judgments"])


def _verdict(judgments: Sequence[Document]) -> tuple[Markup, str]:
    """Who is wrong: the model, or else the runtimes where they part."""
    for is_meant in (_is_fault, _is_parting):
        first = next(filter(is_meant, judgments), None)
        if first is not None:
            return tag("span", first["verdict"], class_="bad"), f"first at {first['node']}"
    return tag("span", "sound", class_="good"), "the runtimes agree, but for rounding"


def _is_fault(judgment: Document) -> bool:
    return bool(judgment["verdict"] == Verdict.MODEL)


def _is_parting(judgment: Document) -> bool:
    return Verdict(judgment["verdict"]).parts


def _outputs(document: Document) -> Markup | None:
    if not document.get("outputs"):
        return None
    header = ("output", "SQNR", "cosine", "max error", "same top-1", "equal", "non-finite")
    rows = [
        (
            code(output["name"]),
            decibel(output["sqnr_db"]),
            "-" if output["cosine"] is None else f"{output['cosine']:.6f}",
            number(output["max_abs_error"]),
            share(output["top1_agreement"]),
            share(output["equal"]),
            output["non_finite"],
        )
        for output in document["outputs"]
    ]
    title = f"Outputs against the reference, {document['samples']} samples"
    return section(title, table(header, rows, ".nnnnnn"))


def _metric(metric: Document | None) -> Markup | None:
    """What the metric loses at each output, and through single layers."""
    if metric is None:
        return None
    name = metric["metric"]
    rows = [(code(one["output"] or "all"), *_lost(one)) for one in metric["outputs"]]
    parts = [table(("output", "reference", "model", "drop"), rows, ".nnn")]
    if metric["layers"]:
        note = "With one layer quantized and the rest of the reference; those that cost most first."
        header = ("layer", "operator", "SQNR alone", "output", "reference", "model", "drop")
        listed = [_layer_lost(layer, one) for layer in metric["layers"] for one in layer["drops"]]
        parts += [tag("p", note, class_="dim"), long_table(header, listed, "..n.nnn")]
    return section(f"What is lost of {name}", join(parts))


def _layer_lost(layer: Document, drop: Document) -> tuple[Any, ...]:
    place = code(drop["output"] or "all")
    named = (code(layer["node"]), layer["op_type"], decibel(layer["own_db"]), place)
    return (*named, *_lost(drop))


def _lost(drop: Document) -> tuple[str, ...]:
    return f"{drop['reference']:.4f}", f"{drop['model']:.4f}", f"{drop['drop']:+.4f}"


def _runtimes(nodes: Document) -> Markup:
    header = ("provider", "optimizations", "codes", "identical", "steps apart", "outputs")
    rows = [
        (
            one["provider"].removesuffix("ExecutionProvider"),
            one["level"],
            f"{one['codes']:,}",
            share(one["identical"]) if one["codes"] else "-",
            one["max_steps"] if one["codes"] else "-",
            decibel(min(one["outputs_db"].values(), default=None)),
        )
        for one in nodes["runtimes"]
    ]
    note = tag(
        "p",
        f"{nodes['samples']} runs, each node on the same inputs; outputs are those of whole runs.",
        class_="dim",
    )
    listed = table(header, rows, "..nnnn")
    return section("onnxruntime against the built-in runtime", join([note, listed]))


def _judgments(judgments: Sequence[Document]) -> Markup | None:
    if not judgments:
        return None
    ranked = sorted(judgments, key=lambda one: (not _is_fault(one), -one["steps"]))
    rows = [
        (
            code(one["node"]),
            one["op_type"],
            tag("span", one["verdict"], class_="bad" if _is_fault(one) else ""),
            one["level"] or "",
            one["reason"],
        )
        for one in ranked
    ]
    header = ("node", "operator", "verdict", "level", "why")
    return section(f"Verdicts: {len(rows)} nodes and levels", long_table(header, rows, "....w"))


def _counts(counts: Document) -> Markup | None:
    if not counts:
        return None
    ranked = sorted(
        counts.items(), key=lambda pair: (-pair[1]["overflowed"], pair[1]["used_range"])
    )
    header = ("node", "codes", "at least", "at largest", "used", "dead channels", "overflows")
    rows = [
        (
            code(name),
            f"{one['elements']:,}",
            share(one["at_low"] / one["elements"]),
            share(one["at_high"] / one["elements"]),
            f"{one['used_range']:.0%}",
            one["dead_channels"],
            one["overflowed"],
        )
        for name, one in ranked
    ]
    summary = tag("summary", f"Codes at the output of {len(rows)} integer operators")
    listed = table(header, rows, ".nnnnnn")
    return section("Use of the codes", tag("details", join([summary, listed])))
