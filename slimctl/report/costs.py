"""What single layers cost the outputs, as far as a run looked at that to decide."""

from __future__ import annotations

from collections.abc import Mapping

from slimctl.report.bars import Bar, bar_panel
from slimctl.report.page import Document, Markup, code, join, section, tag
from slimctl.report.words import decibel

_SHOWN = 12
"""Layers of each kind: those behind them cost less."""


def layer_costs(document: Document) -> dict[str, Mapping[str, float]]:
    """SQNR in dB of the worst output with one layer changed, by kind of change and layer."""
    found: dict[str, Mapping[str, float]] = {}
    for step in document["steps"]:
        for kind, layers in step["facts"].get("alone_db", {}).items():
            if layers:
                found[kind] = layers
    return found


def cost_section(document: Document) -> Markup | None:
    """The layers that cost most, one panel for each kind of change; None where nobody looked."""
    costs = layer_costs(document)
    if not costs:
        return None
    most = max(_lost(value) for layers in costs.values() for value in layers.values())
    panels = [_panel(kind, layers, most) for kind, layers in costs.items()]
    note = "Noise that one layer alone puts on the output that suffers most; longer costs more."
    return section(
        "What single layers cost",
        join([tag("p", note, class_="dim"), tag("div", join(panels), class_="panels")]),
    )


def _panel(kind: str, layers: Mapping[str, float], most: float) -> Markup:
    worst = sorted(layers, key=lambda name: (layers[name], name))[:_SHOWN]
    rest = f", {_SHOWN} of {len(layers)} layers" if len(layers) > _SHOWN else ""
    bars = [Bar(code(name), _lost(layers[name]) / most, decibel(layers[name])) for name in worst]
    return bar_panel(f"{kind}{rest}", bars)


def _lost(sqnr_db: float) -> float:
    """Amplitude of the noise: decibels would make a layer without any the longest bar."""
    return float(10.0 ** (-sqnr_db / 20.0))
