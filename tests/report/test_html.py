from __future__ import annotations

from typing import Any

import pytest

from slimctl.report.html import render
from tests.report.reader import read

EVIL = "<script>alert('x')</script>&\""


def document(**changes: Any) -> dict[str, Any]:
    gate = {"gate": "size", "bound": 0.3, "found": 0.4, "passed": False, "message": EVIL}
    step = {
        "name": "quantize",
        "effect": "approximate",
        "options": {"calibration": EVIL, "percentile": None, "exclude": ["op:Softmax"]},
        "changed": {"Conv": 3},
        "skipped": [{"node": EVIL, "reason": EVIL}],
        "notes": [EVIL],
        "facts": {},
        "weight_bytes": 1_500_000,
        "nodes": 9,
        "sqnr_db": "inf",
        "metric": 0.98,
        "exact_error": None,
    }
    file = {"name": EVIL, "sha256": "ab" * 32, "size_bytes": 123456}
    model = {"content_hash": "c", "size_bytes": 1_500_000, "weight_bytes": 8, "nodes": 2}
    times = {"p50_ms": 1.23456, "p90_ms": 2.0, "p99_ms": 3.0}
    return {
        "name": EVIL,
        "versions": {"slimctl": "1"},
        "source": {**model, "size_bytes": 6_000_000, "files": [file]},
        "model": model,
        "files": [file],
        "target": "cpu",
        "seed": 0,
        "steps": [step],
        "calibration": {"source": EVIL, "samples": 4},
        "evaluation": None,
        "uncalibrated": True,
        "results": {
            "size_ratio": 0.25,
            "sqnr_db": 20.5,
            "sqnr_samples": 4,
            "metric": "top1",
            "metric_original": 0.99,
            "metric_result": 0.98,
            "gates": [gate],
        },
        "manifest_hash": "h",
        "run": {
            "started": "now",
            "notes": ["P50 3.21 ms on " + EVIL],
            "host": EVIL,
            "platform": "p",
            "gates": [{**gate, "gate": "latency", "passed": True}],
            "latency": {"original": times, "result": times},
            "files": [],
        },
        **changes,
    }


def test_everything_that_comes_from_outside_is_escaped() -> None:
    reader = read(render(document()))
    assert "script" not in reader.tags
    assert reader.text.count(EVIL) >= 8
    assert not any(name.startswith("on") for name, _ in reader.attributes)


def test_the_page_needs_nothing_else() -> None:
    reader = read(render(document()))
    assert not {"link", "script", "img", "iframe"} & reader.tags
    assert not {"src", "href"} & {name for name, _ in reader.attributes}


@pytest.mark.parametrize(
    "expected",
    [
        "1.5 MB",
        "was 6 MB",
        "25.0%",
        "20.5 dB",
        "SQNR on 4 samples",
        "top1, was 0.99",
        "failed",
        "passed",
        "3 Conv",
        "Candidates left as they are: 1",
        'exclude=["op:Softmax"]',
        "P50 3.21 ms",
        "1.235",
        "123,456",
        "Uncalibrated",
    ],
)
def test_what_the_page_says(expected: str) -> None:
    assert expected in read(render(document())).text


def test_a_bare_manifest() -> None:
    results = {**document()["results"], "sqnr_db": None, "metric": None, "gates": []}
    run = {**document()["run"], "gates": [], "latency": None}
    plain = document(results=results, run=run, steps=[], calibration=None, uncalibrated=False)
    text = read(render(plain)).text
    for absent in ("Gates", "Latency", "Left alone", "Calibration data", "Uncalibrated", "SQNR on"):
        assert absent not in text


def test_what_was_pruned_is_drawn() -> None:
    groups = [
        {"layers": [EVIL, "conv2"], "kept": 24, "total": 32, "why": EVIL},
        {"layers": ["conv3"], "kept": 8, "total": 8, "why": "more important than others"},
    ]
    step = {**document()["steps"][0], "name": "prune", "facts": {"groups": groups}}
    reader = read(render(document(steps=[step])))
    assert "Kept by prune" in reader.text
    assert "24 of 32" in reader.text
    widths = [value for name, value in reader.attributes if name == "style"]
    assert widths[-2:] == ["width:75.0%", "width:100.0%"]
    assert "script" not in reader.tags
