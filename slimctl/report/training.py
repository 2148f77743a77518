"""How steps that train went: loss and metric over the epochs, as curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slimctl.report.curves import Curve, curve_chart
from slimctl.report.page import Document, Markup, join, number, section, tag


def training_section(document: Document) -> Markup | None:
    """The curves of every step that trained; None when none did."""
    parts = [
        join(_step(index, step, document["results"]["metric"] or "metric"))
        for index, step in enumerate(document["steps"], start=1)
        if step["facts"].get("loss")
    ]
    return section("Training", join(parts)) if parts else None


def _step(index: int, step: Document, metric: str) -> Iterator[Markup]:
    losses, metrics = step["facts"]["loss"], [abs(v) for v in step["facts"].get("metric", ())]
    kept = step["facts"].get("kept_epoch", len(losses))
    line = f"{index}. {step['name']}: {len(losses)} epochs, loss {number(losses[-1])}"
    if metrics:
        line += f"; {metric} {number(metrics[0])} before, {number(metrics[kept])} in epoch {kept}"
        line += ", whose weights were kept"
    yield tag("p", line, class_="dim")
    yield _chart(f"loss of {step['name']}", losses, 1, "loss")
    if metrics:
        yield _chart(f"{metric} on evaluation data", metrics, 0, metric)


def _chart(label: str, values: Sequence[float], first: int, unit: str) -> Markup:
    """One value per epoch; the first one is that of epoch ``first``."""
    points = [(float(epoch), value) for epoch, value in enumerate(values, start=first)]
    return curve_chart([Curve(label, points)], across="epoch", up=unit)
