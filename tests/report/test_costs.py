from __future__ import annotations

from typing import Any

from slimctl.report.costs import cost_section, layer_costs
from slimctl.report.html import render
from tests.report.documents import manifest
from tests.report.reader import read


def _document(alone: dict[str, dict[str, float]]) -> dict[str, Any]:
    steps = [dict(step) for step in manifest()["steps"]]
    steps[1] = {**steps[1], "facts": {"alone_db": alone}}
    return manifest(steps=steps)


def test_the_layers_that_cost_most_come_first() -> None:
    reader = read(str(cost_section(_document({"int8": {"a": 40.0, "b": 20.0, "c": 26.0}}))))
    assert "int8b20.0 dBc26.0 dBa40.0 dB" in reader.text
    # Noise of 40 dB has a tenth of the amplitude of 20 dB, 26 dB about half.
    widths = [style.removeprefix("width:") for style in reader.values("style")]
    assert widths == ["100.00%", "50.12%", "10.00%"]


def test_kinds_share_a_scale() -> None:
    reader = read(str(cost_section(_document({"int8": {"a": 20.0}, "int4": {"a": 14.0}}))))
    assert [style.removeprefix("width:") for style in reader.values("style")] == [
        "50.12%",
        "100.00%",
    ]


def test_only_the_worst_are_shown() -> None:
    many = {f"layer{index:02}": float(20 + index) for index in range(30)}
    text = read(str(cost_section(_document({"int8": many})))).text
    assert "int8, 12 of 30 layers" in text
    assert "layer11" in text
    assert "layer12" not in text


def test_nothing_where_nobody_looked() -> None:
    assert layer_costs(manifest()) == {}
    assert cost_section(manifest()) is None
    assert "What single layers cost" not in render(manifest())


def test_an_artifacts_page_has_it() -> None:
    page = render(_document({"int8": {"a": 40.0}}))
    assert "What single layers cost" in page
    assert "intervals, other precisions, the metric" in page
