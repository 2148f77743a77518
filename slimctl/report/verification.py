"""What ``slimctl verify`` found, as a self-contained HTML page: no script, nothing fetched."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from slimctl.core.files import write_atomic
from slimctl.evaluate.code_histogram import BINS, SHOWN
from slimctl.evaluate.metrics import LIMIT_DB
from slimctl.evaluate.verification import Verdict
from slimctl.report import charts
from slimctl.report.page import (
    Document,
    Markup,
    cards,
    code,
    join,
    number,
    page,
    passed_or_failed,
    section,
    table,
    tag,
)

_ROWS = 20
"""Rows of a long table that are seen at once; the rest unfolds."""

_HISTOGRAMS = 6
"""Layers drawn for each reason: two rows of three."""

_STYLE = """
.histograms { display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); }
.histograms h3 { font-size: .9rem; margin: 0; overflow-wrap: anywhere; }
.histograms p { font-size: .82rem; margin: .1rem 0 .5rem; overflow-wrap: anywhere; }
td code { display: inline-block; min-width: 11rem; }
""".strip()


def write_report(path: Path, document: Document) -> None:
    """Writes the page; a reader sees the old one or the new one.

    Args:
        path: The ``.html`` file.
        document: What the command prints with ``--json``, as Python values.

    Raises:
        OutputError: The file cannot be written.
    """
    write_atomic(path, render(document).encode())


def render(document: Document) -> str:
    """The page's text."""
    parts = [
        _head(document),
        _cards(document),
        _outputs(document),
        _runtimes(document),
        _graph(document),
        _judgments(document),
        _layers(document),
        *_histograms(document),
        _counts(document),
    ]
    title = Path(str(document["model"])).name
    return page(title, parts, style=f"{charts.STYLE}\n{_STYLE}")


def _head(document: Document) -> Markup:
    against = (
        "no reference" if document["reference"] is None else f"against {document['reference']}"
    )
    data = document["data"] or "random inputs"
    line = f"{against}, on {data}; {document['integrity']}"
    parts = [tag("h1", document["model"]), tag("div", line, class_="dim")]
    parts.append(tag("p", _bounds(document)))
    if document["random_data"]:
        text = "The data are random, so these numbers say little about real inputs."
        parts.append(tag("p", text, class_="warning"))
    return join([*parts, Markup("\n")])


def _bounds(document: Document) -> Markup:
    verdict = passed_or_failed(document["passed"])
    if document["passed"]:
        return join([verdict, ": no bound is broken"])
    broken = tag("ul", join(tag("li", failure) for failure in document["failures"]))
    return join([verdict, ", bounds that do not hold:", broken])


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
    faults = {one["node"] for one in nodes["judgments"] if one["verdict"] == Verdict.MODEL}
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
            number(output["cosine"]),
            number(output["max_abs_error"]),
            share(output["top1_agreement"]),
            share(output["equal"]),
            output["non_finite"],
        )
        for output in document["outputs"]
    ]
    title = f"Outputs against the reference, {document['samples']} samples"
    return section(title, table(header, rows, ".nnnnnn"))


def _runtimes(document: Document) -> Markup | None:
    nodes = document["nodes"]
    if nodes is None:
        return None
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


def _graph(document: Document) -> Markup | None:
    """SQNR along the graph."""
    layers = _known_layers(document)
    if not layers:
        return None
    wrong = _wrong_nodes(document)
    lines = [
        charts.Line("alone: on the reference's tensors", [layer["own_db"] for layer in layers]),
        charts.Line("at best: only its output rounded", [layer["best_db"] for layer in layers]),
        charts.Line("in all: the whole model quantized", [layer["total_db"] for layer in layers]),
    ]
    drawn = charts.line_chart(
        lines,
        [_point(index, layer, wrong) for index, layer in enumerate(layers, start=1)],
        limits=limits(value for line in lines for value in line.values),
        marked=[layer["node"] in wrong for layer in layers],
        mark="the model is wrong",
        unit="dB",
    )
    return section("SQNR along the graph", drawn)


def _known_layers(document: Document) -> list[Document]:
    return [] if document["nodes"] is None else list(document["nodes"]["layers"])


def _wrong_nodes(document: Document) -> dict[str, str]:
    """By node: what is wrong with the model there."""
    faults = [one for one in document["nodes"]["judgments"] if _is_fault(one)]
    return {fault["node"]: fault["reason"] for fault in reversed(faults)}


def _point(index: int, layer: Document, wrong: dict[str, str]) -> str:
    lines = [
        f"{index}. {layer['node']} ({layer['op_type']})",
        f"alone {decibel(layer['own_db'])}",
        f"at best {decibel(layer['best_db'])}",
        f"in all {decibel(layer['total_db'])}",
    ]
    return "\n".join([*lines, *filter(None, [wrong.get(layer["node"])])])


def limits(values: Iterable[float]) -> tuple[float, float]:
    """Multiples of ten around all values; those that stand for no number of decibels do not count.

    Identical tensors have 200 dB and a reference of zeros -200 dB by definition: drawn to scale
    they would flatten everything else.
    """
    numbers = [value for value in values if abs(value) < LIMIT_DB]
    if not numbers:
        return 0.0, 60.0
    low, high = (math.floor(min(numbers) / 10) * 10, math.ceil(max(numbers) / 10) * 10)
    return float(low), float(max(high, low + 10))


def _judgments(document: Document) -> Markup | None:
    if document["nodes"] is None or not document["nodes"]["judgments"]:
        return None
    ranked = sorted(
        document["nodes"]["judgments"], key=lambda one: (not _is_fault(one), -one["steps"])
    )
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
    return section(f"Verdicts: {len(rows)} nodes and levels", _long_table(header, rows))


def _layers(document: Document) -> Markup | None:
    layers = _known_layers(document)
    if not layers:
        return None
    wrong = _wrong_nodes(document)
    numbered = sorted(enumerate(layers, start=1), key=lambda pair: -pair[1]["rms_steps"])
    header = (
        "",
        "layer",
        "operator",
        "alone",
        "best",
        "in all",
        "cosine",
        "mean",
        "rms",
        "clipped",
    )
    rows = [(index, *_layer_row(layer, layer["node"] in wrong)) for index, layer in numbered]
    note = tag(
        "p",
        "Worst first; the number is the place in the graph. Mean and rms (root mean square) are "
        "differences from the best layer with the same scales, in quantization steps.",
        class_="dim",
    )
    title = f"{len(layers)} layers against the reference"
    return section(title, join([note, _long_table(header, rows, "n..nnnnnnn")]))


def _layer_row(layer: Document, is_wrong: bool) -> tuple[Any, ...]:
    name = code(layer["node"])
    return (
        join([name, " ", tag("span", "wrong", class_="bad")]) if is_wrong else name,
        layer["op_type"],
        decibel(layer["own_db"]),
        decibel(layer["best_db"]),
        decibel(layer["total_db"]),
        f"{layer['cosine']:.5f}",
        f"{layer['mean_steps']:+.3f}",
        f"{layer['rms_steps']:.3f}",
        share(layer["clipped"]),
    )


def _long_table(header: Sequence[str], rows: Sequence[Sequence[Any]], numbers: str = "") -> Markup:
    """A table of which the beginning is seen and the rest unfolds."""
    first = table(header, rows[:_ROWS], numbers)
    if len(rows) <= _ROWS:
        return first
    summary = tag("summary", f"{len(rows) - _ROWS} more")
    return join([first, tag("details", join([summary, table(header, rows[_ROWS:], numbers)]))])


def _histograms(document: Document) -> Iterator[Markup]:
    """The worst tensors, and those of which most is cut off."""
    layers = [layer for layer in _known_layers(document) if layer["histogram"]]
    worst = sorted(layers, key=lambda layer: -layer["rms_steps"])[:_HISTOGRAMS]
    clipped = sorted(layers, key=lambda layer: -layer["clipped"])
    others = [layer for layer in clipped if layer["clipped"] > 0 and layer not in worst]
    if worst:
        yield section("Values of the worst layers", join([_HISTOGRAM_NOTE, _drawn(worst)]))
    if others:
        yield section("Values of the layers that clip most", _drawn(others[:_HISTOGRAMS]))


_HISTOGRAM_NOTE = tag(
    "p",
    "The reference's values, counted on a logarithmic scale. The lines are the least and the "
    "largest value that the layer's codes represent; what lies beyond them is cut off, and the "
    "outermost bars hold all that lies further out.",
    class_="dim",
)


def _drawn(layers: Sequence[Document]) -> Markup:
    return tag("div", join(map(_histogram, layers)), class_="histograms")


def _histogram(layer: Document) -> Markup:
    facts = (
        f"rms {layer['rms_steps']:.3f} steps, {share(layer['clipped'])} clipped, "
        f"{layer['used_range']:.0%} of the codes used"
    )
    chart = charts.histogram(
        layer["histogram"],
        [_bin(layer, index) for index in range(BINS)],
        [(_place(0), number(layer["low"])), (_place(1), number(layer["high"]))],
        f"values of {layer['tensor']}",
    )
    head = tag("h3", code(layer["node"]), title=layer["tensor"])
    return tag("div", join([head, tag("p", facts, class_="dim"), chart]), class_="chart")


def _place(position: float) -> float:
    """Bins from the left to a position in the codes' range."""
    return (position - SHOWN[0]) / (SHOWN[1] - SHOWN[0]) * BINS


def _bin(layer: Document, index: int) -> str:
    """What a bin holds; the real value is exact to one quantization step."""
    position = SHOWN[0] + (index + 0.5) * (SHOWN[1] - SHOWN[0]) / BINS
    value = layer["low"] + position * (layer["high"] - layer["low"])
    return f"{layer['histogram'][index]:,} around {value:.3g}"


def _counts(document: Document) -> Markup | None:
    if document["nodes"] is None or not document["nodes"]["counts"]:
        return None
    counts = document["nodes"]["counts"].items()
    ranked = sorted(counts, key=lambda pair: (-pair[1]["overflowed"], pair[1]["used_range"]))
    header = (
        "node",
        "codes",
        "least code",
        "largest code",
        "codes used",
        "dead channels",
        "overflows",
    )
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


def decibel(value: float | None) -> str:
    """An SQNR; 200 dB is what identical tensors have by definition."""
    if value is None:
        return "-"
    return "identical" if value >= LIMIT_DB else f"{value:.1f} dB"


def share(value: float | None) -> str:
    """A share as a percentage; one that is almost 0 or 1 does not look as if it were."""
    if value is None:
        return "-"
    text = f"{value:.2%}"
    if text == "0.00%" and value > 0:
        return "< 0.01%"
    return "> 99.99%" if text == "100.00%" and value < 1 else text
