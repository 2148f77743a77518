"""``slimctl bench`` beyond latency: profile, bounds, load, and what it writes or refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from slimctl.cli.bench_command import number_list
from slimctl.core.errors import OptionError
from slimctl.evaluate import benchmark, machine
from slimctl.evaluate.benchmark import BenchResult
from slimctl.evaluate.machine import Machine
from slimctl.evaluate.serving import Serving
from tests.cli.models import classifier

FAST = ("--threads", "1", "--rounds", "3", "--warmup", "1", "--max-seconds", "0.2", "--no-memory")
BENCH = ("bench", "model.onnx", *FAST, "-q")

PEAKS = Machine(1, {1_000: 8e9, 1_000_000: 2e9}, 10e9, 20e9, 3e9, 2e9, 1e-6)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "measure_machine", lambda threads: PEAKS)


@pytest.mark.usefixtures("inputs")
def test_plain_run_asks_for_nothing_more(slimctl: Callable[..., Any]) -> None:
    document = json.loads(slimctl(*BENCH, "--json").stdout)
    for name in (
        "speedup",
        "verdict",
        "profile",
        "profile_against",
        "difference",
        "machine",
        "load",
    ):
        assert document[name] is None
    assert document["models"][0]["warmup"] <= 1
    assert document["models"][0]["settled"] is False
    assert "had not settled after" in slimctl(*BENCH).stdout


@pytest.mark.usefixtures("inputs")
def test_profile_names_the_operators(slimctl: Callable[..., Any]) -> None:
    document = json.loads(slimctl(*BENCH, "--profile", "--json").stdout)
    nodes = document["profile"]["nodes"]
    covered = {name for node in nodes for name in node["covers"]}
    assert {"conv", "relu", "pool", "fc"} <= covered
    assert sum(node["share"] for node in nodes) == pytest.approx(1.0)
    assert document["machine"] is None and "bound" not in nodes[0]
    text = slimctl(*BENCH, "--profile").stdout
    assert "Operators as onnxruntime runs them" in text and "Conv" in text
    assert "attained" not in text


@pytest.mark.usefixtures("inputs")
def test_roofline_says_what_to_do(slimctl: Callable[..., Any]) -> None:
    document = json.loads(slimctl(*BENCH, "--roofline", "--json").stdout)
    assert document["machine"]["float_macs"] == PEAKS.float_macs
    for node in document["profile"]["nodes"]:
        assert node["bound"] in ("memory", "compute", "overhead", "unknown")
        assert node["advice"] and node["reason"]
    shares = sum(item["share"] for item in document["profile"]["advice"])
    assert shares == pytest.approx(1.0)
    text = slimctl(*BENCH, "--roofline").stdout
    assert "this machine: 10 G multiply-accumulates/s in float32, 20 in 8 bits" in text
    assert "next: " in text


def test_profile_of_two_models_says_what_the_difference_comes_from(
    inputs: Path, slimctl: Callable[..., Any]
) -> None:
    """The second model is the first one with another layer; both stand under the roof."""
    model = classifier()
    last = model.graph.output[0].name
    model.graph.node.append(onnx.helper.make_node("Softmax", [last], ["shares"], "softmax"))
    model.graph.output[0].name = "shares"
    onnx.save(model, inputs / "other.onnx")
    arguments = (*BENCH, "--against", "other.onnx", "--profile")
    document = json.loads(slimctl(*arguments, "--json").stdout)
    for side, has in (("profile", False), ("profile_against", True)):
        kinds = {node["op_type"] for node in document[side]["nodes"]}
        assert ("Softmax" in kinds) is has
        assert all(node["bound"] and node["reason"] for node in document[side]["nodes"])
        assert sum(item["share"] for item in document[side]["advice"]) == pytest.approx(1.0)
        assert document[side]["runs"] == 20
    (extra,) = (k for k in document["difference"]["kinds"] if k["kind"] == "Softmax")
    assert (extra["operators"], extra["operators_against"]) == ({}, {"Softmax": 1})
    assert extra["change"] == -extra["against"]
    assert "ms in kernels, 'other.onnx'" in document["difference"]["words"]
    text = slimctl(*arguments, "--report", "two.html").stdout
    for words in ("for 'model.onnx': ", "for 'other.onnx': ", "What the difference comes from"):
        assert words in text
    assert "next for 'model.onnx': " in text and "next for 'other.onnx': " in text
    page = Path("two.html").read_text("utf-8")
    assert "Operators of other.onnx" in page and "What the difference comes from" in page


@pytest.mark.usefixtures("inputs")
def test_load(slimctl: Callable[..., Any]) -> None:
    arguments = (*BENCH, "--batch-sizes", "1,2", "--concurrency", "1,2", "--rate", "1,2")
    document = json.loads(slimctl(*arguments, "--p99-ms", "60000", "--json").stdout)["load"]
    assert document["batch_fixed"] is None
    assert [item["batch_size"] for item in document["batches"]] == [1, 2]
    assert [item["concurrency"] for item in document["closed_loop"]] == [1, 2]
    assert {item["rate"] for item in document["open_loop"]} == {1.0, 2.0}
    assert document["suggestion"]["rate"] == 2.0
    text = slimctl(*arguments, "--p99-ms", "60000").stdout
    for title in ("Batch sizes", "Closed loop", "Open loop", "suggested: max batch"):
        assert title in text


@pytest.mark.usefixtures("inputs")
def test_serving_and_report_are_written(slimctl: Callable[..., Any]) -> None:
    arguments = (*BENCH, "--rate", "1", "--p99-ms", "60000", "--roofline", "--serving", "s.json")
    ended = slimctl(*arguments, "--against", "model.onnx", "--report", "found.html")
    assert (ended.code, ended.stderr) == (0, "")
    chosen = Serving.model_validate_json(Path("s.json").read_text("utf-8"))
    assert chosen.rate == 1.0 and chosen.p99_bound_ms == pytest.approx(60000)
    page = Path("found.html").read_text("utf-8")
    assert "<svg" in page and "Open loop" in page and "<script" not in page
    refused = slimctl(*arguments)
    assert (refused.code, "--force" in refused.stderr) == (2, True)
    assert slimctl(*arguments, "--force").code == 0


@pytest.mark.usefixtures("inputs")
def test_no_setting_meets_the_bound(slimctl: Callable[..., Any]) -> None:
    arguments = (*BENCH, "--rate", "1000000000", "--p99-ms", "0.001")
    ended = slimctl(*arguments)
    assert ended.code == 0
    assert "WARNING: no setting keeps P99 below 0.001 ms" in ended.stdout
    refused = slimctl(*arguments, "--serving", "s.json")
    assert (refused.code, Path("s.json").exists()) == (1, False)
    assert "No queue delay and batch meet the bound" in refused.stderr


def test_fixed_batch_is_said(inputs: Path, slimctl: Callable[..., Any]) -> None:
    model = classifier()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, inputs / "fixed.onnx")
    ended = slimctl("bench", "fixed.onnx", *FAST, "-q", "--batch-sizes", "1,2")
    assert ended.code == 0
    assert "one batch size only: the first axis of input 'image' is fixed at 1" in ended.stdout


def measured(level: float, spread: float, seed: int) -> BenchResult:
    generator = np.random.default_rng(seed)
    times = level * np.exp(spread * generator.normal(size=(20, 1))) * np.ones((1, 4))
    p50, p90, p99 = np.percentile(times, [50, 90, 99])
    return BenchResult(p50, p90, p99, times.mean(), 1.0, 1.0, times.size, 20, None, times)


@pytest.mark.usefixtures("inputs")
@pytest.mark.parametrize(
    ("spread", "outcome", "words"),
    [(0.001, "faster", "verdict: faster"), (1.0, "too noisy", "no verdict: too noisy")],
)
def test_verdict(
    spread: float,
    outcome: str,
    words: str,
    slimctl: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first model is half as slow; on a noisy machine that cannot be told."""
    level = 1.0 if outcome == "faster" else 1.9
    results = [measured(level, spread, 0), measured(2.0, spread, 1)]
    monkeypatch.setattr(benchmark, "benchmark", lambda *args, **kwargs: results)
    arguments = (*BENCH, "--against", "model.onnx")
    ended = slimctl(*arguments, "--json")
    assert ended.code == 0
    document = json.loads(ended.stdout)
    assert document["verdict"]["outcome"] == outcome
    assert document["verdict"]["decided"] is (outcome == "faster")
    assert document["speedup"]["low"] <= document["speedup"]["value"]
    assert words in slimctl(*arguments).stdout


@pytest.mark.parametrize("text", ["", "1,,2", "0", "-1,2", "x", "nan", "inf", "1.5"])
def test_lists_that_are_none(text: str) -> None:
    with pytest.raises(OptionError):
        number_list("--batch-sizes", text, int)
    if text != "1.5":
        with pytest.raises(OptionError):
            number_list("--rate", text, float)


def test_lists_are_ascending_and_unique() -> None:
    assert number_list("--batch-sizes", "4,1, 4", int) == (1, 4)
    assert number_list("--rate", None, float) == ()


@pytest.mark.usefixtures("inputs")
@pytest.mark.parametrize(
    ("options", "fix"),
    [
        (("--p99-ms", "5"), "--rate"),
        (("--serving", "s.json"), "--p99-ms"),
        (("--serving", "s.json", "--rate", "5"), "--p99-ms"),
        (("--report", "nowhere/found.html"), "create it first"),
        (("--rate", "fast"), "1,2,4"),
    ],
)
def test_options_that_do_not_fit(
    options: tuple[str, ...], fix: str, slimctl: Callable[..., Any]
) -> None:
    ended = slimctl(*BENCH, *options)
    assert (ended.code, ended.stdout) == (2, "")
    assert fix in ended.stderr
