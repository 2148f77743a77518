from __future__ import annotations

import re
from typing import Any

import pytest

from slimctl.report.benchmark import benchmark_page
from slimctl.report.curves import Curve, curve_chart
from tests.report.reader import read


def model(name: str, scale: float) -> dict[str, Any]:
    numbers = {f"{key}_ms": scale for key in ("p50", "p90", "p99", "mean", "cpu", "load")}
    quantiles = [scale * (1 + share / 100) for share in range(101)]
    return numbers | {
        "model": name,
        "runs": 90,
        "samples_per_second": 1000 / scale,
        "quantiles_ms": quantiles,
    }


def load(rate: float, batch: int, *, stable: bool = True) -> dict[str, Any]:
    times = {f"{key}_ms": rate for key in ("p50", "p90", "p99", "queue_delay")}
    rest = {"rate": rate, "max_batch": batch, "mean_batch": 1.0, "busy": 0.5, "stable": stable}
    return times | rest | {"queue_delay_ms": 1.0}


def found() -> dict[str, Any]:
    return {
        "batch_size": 1,
        "threads": 0,
        "models": [model("<a>.onnx", 2.0), model("b.onnx", 4.0)],
        "speedup": {"value": 2.0, "low": 1.9, "high": 2.1},
        "verdict": {"outcome": "too noisy", "decided": False, "noise": 1, "reason": "it shakes"},
        "profile": {
            "advice": [{"action": "quantize", "share": 0.75, "nodes": 3}],
            "nodes": [
                {
                    "name": "conv<1>",
                    "op_type": "Conv",
                    "seconds": 1e-3,
                    "share": 0.75,
                    "bound": "compute",
                    "attained": 0.5,
                    "advice": "quantize",
                    "reason": "it computes in float",
                },
                {"name": "relu", "op_type": "Relu", "seconds": 2e-3, "share": 0.25},
            ],
        },
        "machine": None,
        "load": {
            "batch_fixed": None,
            "batches": [],
            "closed_loop": [],
            "open_loop": [load(10, 1), load(20, 1), load(30, 1, stable=False), load(10, 8)],
        },
    }


def test_page_says_what_was_found() -> None:
    reader = read(benchmark_page(found()))
    for text in ("No verdict: too noisy; it shakes.", "2.00x", "conv<1>", "overloaded", "75.0%"):
        assert text in reader.text
    assert reader.text.index("relu") < reader.text.index("conv<1>")  # slowest first
    assert reader.tags.isdisjoint({"script", "link", "img"})


def test_page_without_anything_else() -> None:
    least = found() | {"speedup": None, "verdict": None, "profile": None, "load": None}
    text = read(benchmark_page(least)).text
    assert "Latency" in text and "Operators" not in text and "erdict" not in text


def test_rates_that_overload_are_no_points_of_a_curve() -> None:
    page = benchmark_page(found())
    lines = re.findall(r'polyline class="line line-\d" points="([^"]*)"', page)
    assert [len(points.split()) for points in lines] == [100, 100, 2, 1]


def test_curves_lie_where_their_numbers_are() -> None:
    drawn = curve_chart([Curve("a", [(0, 0), (10, 50)])], across="x", up="y")
    points = re.search(r'points="([^"]*)"', drawn)
    assert points is not None
    assert points[1] == "56.0,266.0 944.0,26.0"  # the corners of the frame
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    assert labels == ["0", "10", "20", "30", "40", "50", "y", "0", "2", "4", "6", "8", "10", "x"]


@pytest.mark.parametrize("points", [[(0, 0)], [(1e-6, 3e-9)], [(1e9, 1e9)]])
def test_any_scale_is_drawn(points: list[tuple[float, float]]) -> None:
    assert read(curve_chart([Curve("a", points)], across="x", up="y")).text
