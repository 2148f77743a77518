"""The layers of a quantized model against its reference: plot, table, histograms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from slimctl.evaluate.code_histogram import BINS, SHOWN
from slimctl.evaluate.metrics import LIMIT_DB
from slimctl.report import charts
from slimctl.report.page import Document, Markup, code, join, long_table, number, section, tag
from slimctl.report.words import decibel, share

_HISTOGRAMS = 6
"""Layers drawn for each reason: two rows of three."""

STYLE = """
.histograms { display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); }
.histograms h3 { font-size: .9rem; line-height: 1.3; margin: 0; overflow-wrap: anywhere; }
.histograms p { font-size: .82rem; margin: .1rem 0 .5rem; overflow-wrap: anywhere; }
""".strip()


class Layer(NamedTuple):
    """One layer of the document.

    Attributes:
        place: Number in the order of the graph, from 1.
        found: What was found, as ``LayerError``.
        fault: What is wrong with the model there; empty if nothing is.
    """

    place: int
    found: Document
    fault: str


def known_layers(layers: Sequence[Document], faults: Sequence[Document]) -> list[Layer]:
    """The layers in the order of the graph, each with its first fault.

    Findings about scales and zero points name a Q/DQ node: the tensor leads to its layer.

    Args:
        layers: As ``LayerError``.
        faults: As ``Judgment``.
    """

    def fault_at(layer: Document) -> str:
        here = (
            fault["reason"]
            for fault in faults
            if fault["node"] == layer["node"] or fault["tensor"] == layer["tensor"]
        )
        return next(here, "")

    return [Layer(place, layer, fault_at(layer)) for place, layer in enumerate(layers, start=1)]


def graph_section(layers: Sequence[Layer]) -> Markup:
    """SQNR along the graph."""
    lines = [
        charts.Line(label, [layer.found[key] for layer in layers])
        for key, label in (
            ("best_db", "at best: only its output rounded"),
            ("own_db", "alone: on the reference's tensors"),
            ("total_db", "in all: the whole model quantized"),
        )
    ]
    drawn = charts.line_chart(
        lines,
        [_point(layer) for layer in layers],
        limits=limits(value for line in lines for value in line.values),
        marked=[layer.fault != "" for layer in layers],
        mark="the model is wrong",
        unit="dB",
    )
    return section("SQNR along the graph", drawn)


def _point(layer: Layer) -> str:
    found = layer.found
    lines = [
        f"{layer.place}. {found['node']} ({found['op_type']})",
        f"at best {decibel(found['best_db'])}",
        f"alone {decibel(found['own_db'])}",
        f"in all {decibel(found['total_db'])}",
        layer.fault,
    ]
    return "\n".join(filter(None, lines))


def limits(values: Iterable[float]) -> tuple[float, float]:
    """Multiples of ten around all values; those that stand for no number of decibels do not count.

    Identical tensors have 200 dB and a reference of zeros -200 dB by definition: drawn to scale
    they would flatten everything else.
    """
    numbers = [value for value in values if abs(value) < LIMIT_DB]
    if not numbers:
        return 0.0, 60.0  # any: all values are drawn at an edge
    low, high = math.floor(min(numbers) / 10) * 10, math.ceil(max(numbers) / 10) * 10
    return float(low), float(max(high, low + 10))


def table_section(layers: Sequence[Layer]) -> Markup:
    """The layers, those at which the model is wrong first, then the worst."""
    ranked = sorted(layers, key=lambda layer: (not layer.fault, -layer.found["rms_steps"]))
    names = ("alone", "best", "in all", "mean", "rms", "expected", "clipped")
    note = tag(
        "p",
        "Worst first; the number is the place in the graph. Mean and rms (root mean square) are "
        "differences from the best layer with the same scales, in quantization steps; expected is "
        "the rms that rounding explains.",
        class_="dim",
    )
    header = ("", "layer", "operator", *names)
    listed = long_table(header, [_row(layer) for layer in ranked], "n..nnnnnnn")
    return section(f"{len(layers)} layers against the reference", join([note, listed]))


def _row(layer: Layer) -> tuple[Any, ...]:
    found, name = layer.found, code(layer.found["node"])
    return (
        layer.place,
        join([name, " ", tag("span", "wrong", class_="bad")]) if layer.fault else name,
        found["op_type"],
        decibel(found["own_db"]),
        decibel(found["best_db"]),
        decibel(found["total_db"]),
        f"{found['mean_steps']:+.3f}",
        f"{found['rms_steps']:.3f}",
        f"{found['expected_steps']:.3f}",
        share(found["clipped"]),
    )


def histogram_sections(layers: Sequence[Layer]) -> Iterator[Markup]:
    """Values of the worst layers, and of those of which most is cut off."""
    known = [layer.found for layer in layers if layer.found["histogram"]]
    worst = sorted(known, key=lambda layer: -layer["rms_steps"])[:_HISTOGRAMS]
    clipping = [layer for layer in known if layer["clipped"] > 0 and layer not in worst]
    clipping.sort(key=lambda layer: -layer["clipped"])
    if worst:
        yield section("Values of the worst layers", join([_HISTOGRAM_NOTE, _drawn(worst)]))
    if clipping:
        drawn = _drawn(clipping[:_HISTOGRAMS])
        yield section("Values of the other layers that clip most", drawn)


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
        [(_bins_to(0), number(layer["low"])), (_bins_to(1), number(layer["high"]))],
        f"values of {layer['tensor']}",
    )
    head = tag("h3", code(layer["node"]), title=layer["tensor"])
    return tag("div", join([head, tag("p", facts, class_="dim"), chart]), class_="chart")


def _bins_to(position: float) -> float:
    """Bins from the left to a position in the codes' range."""
    return (position - SHOWN[0]) / (SHOWN[1] - SHOWN[0]) * BINS


def _bin(layer: Document, index: int) -> str:
    """What a bin holds; the real value is exact to one quantization step."""
    position = SHOWN[0] + (index + 0.5) * (SHOWN[1] - SHOWN[0]) / BINS
    value = layer["low"] + position * (layer["high"] - layer["low"])
    return f"{layer['histogram'][index]:,} around {value:.3g}"
