"""``slimctl verify``: what it refuses, what it judges, how it ends."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from slimctl.cli.main import run
from slimctl.cli.verify_command import _broken_drops
from slimctl.evaluate import verification
from slimctl.evaluate.drops import Drop, MetricDrops
from slimctl.runtime import plan
from tests.cli.models import CLASSES, classifier, images, write_inputs

SMALL = ("verify", "small.onnx")
COMPARED = (*SMALL, "--against", "model.onnx", "--data", "calib.npz")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model quantized, as a file with its manifest and as an artifact."""
    folder = tmp_path_factory.mktemp("made")
    write_inputs(folder)
    here = Path.cwd()
    os.chdir(folder)
    try:
        for output in ("small.onnx", "artifact/"):
            arguments = ("quantize", "model.onnx", "--calib", "calib.npz", "-o", output)
            assert run([*arguments, "--no-cache", "-q", "--json"]) == 0
    finally:
        os.chdir(here)
    return folder


@pytest.fixture(autouse=True)
def quantized(made: Path, inputs: Path) -> Path:
    """The current folder, with all of it."""
    shutil.copytree(made, inputs, dirs_exist_ok=True)
    return inputs


def parsed(ended: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


def write_worse(path: Path) -> None:
    """The model with its classes in reverse order: every top-1 class is another."""
    model = classifier()
    for tensor in model.graph.initializer:
        if tensor.name.startswith("fc."):
            values = onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values[..., ::-1].copy(), tensor.name))
    onnx.save(model, path)


# what is compared ------------------------------------------------------------------------------


def test_a_quantized_model_against_its_original(slimctl) -> None:
    ended = slimctl(*COMPARED)
    assert ended.code == 0, ended.stderr
    for part in (
        "1 file as the manifest describes",
        "Outputs against the reference, 16 samples",
        "onnxruntime against the built-in runtime, 4 runs",
        "layers against the reference, worst first",
    ):
        assert part in ended.stdout
    assert "random" not in ended.stdout


def test_json_is_one_document(slimctl) -> None:
    ended = slimctl(*COMPARED, "--json", "-q")
    document = parsed(ended)
    assert (ended.code, ended.stderr) == (0, "")
    assert document["passed"] is True
    assert document["random_data"] is False
    runtimes = document["nodes"]["runtimes"]
    assert {"disabled", "basic", "all"} <= {one["level"] for one in runtimes}
    layers = {layer["node"]: layer for layer in document["nodes"]["layers"]}
    assert sum(layers["conv"]["histogram"]) == 4 * 8 * 64
    assert layers["conv"]["low"] < layers["conv"]["high"]


def test_without_data_the_runtimes_are_compared_on_random_inputs(slimctl) -> None:
    ended = slimctl(*SMALL)
    assert ended.code == 0, ended.stderr
    assert "WARNING: no data were given" in ended.stdout
    assert "onnxruntime against the built-in runtime" in ended.stdout
    assert "reference" not in ended.stdout
    document = parsed(slimctl(*SMALL, "--json"))
    assert (document["data"], document["random_data"]) == (None, True)
    assert document["nodes"]["layers"] == []
    assert document["nodes"]["runtimes"][0]["codes"] > 0


def test_random_data_that_were_asked_for_are_warned_of(slimctl) -> None:
    ended = slimctl(*SMALL, "--against", "model.onnx", "--data", "random")
    assert ended.code == 0
    assert "WARNING: the data are random" in ended.stdout


def test_a_reference_needs_data(slimctl) -> None:
    ended = slimctl(*SMALL, "--against", "model.onnx")
    assert (ended.code, ended.stdout) == (2, "")
    assert "Comparing with a reference needs data" in ended.stderr


def test_nodes_can_be_left_out(slimctl) -> None:
    ended = slimctl(*COMPARED, "--no-nodes")
    assert ended.code == 0
    assert "Outputs against the reference" in ended.stdout
    assert "built-in runtime" not in ended.stdout
    assert parsed(slimctl(*COMPARED, "--no-nodes", "--json"))["nodes"] is None


def test_an_operator_that_the_built_in_runtime_does_not_know(
    slimctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    truly = plan.find_kernel
    monkeypatch.setattr(
        plan, "find_kernel", lambda *named: None if "Flatten" in named else truly(*named)
    )
    ended = slimctl(*SMALL)
    assert (ended.code, ended.stdout) == (2, "")
    assert "no function for Flatten" in ended.stderr
    assert "add --no-nodes and --against REFERENCE" in ended.stderr
    assert "add --no-nodes: " in slimctl(*COMPARED).stderr
    held = slimctl(*COMPARED, "--no-nodes", "--metric", "agreement")
    assert held.code == 0
    assert "agreement: 1.0000 -> " in held.stdout


# whether it is what it claims to be ------------------------------------------------------------


def test_a_folder_is_an_artifact(slimctl) -> None:
    ended = slimctl("verify", "artifact", "--json")
    assert ended.code == 0, ended.stderr
    assert "1 file as the manifest describes; made for cpu" in parsed(ended)["integrity"]
    assert parsed(ended)["nodes"]["runtimes"][0]["codes"] > 0


def test_a_folder_without_a_manifest_is_none(quantized: Path, slimctl) -> None:
    (quantized / "empty").mkdir()
    ended = slimctl("verify", "empty")
    assert (ended.code, ended.stdout) == (2, "")
    assert "manifest" in ended.stderr


@pytest.mark.parametrize("model", ["small.onnx", "artifact"])
def test_a_changed_model_is_refused(model: str, quantized: Path, slimctl) -> None:
    file = quantized / model if model.endswith(".onnx") else quantized / model / "model.onnx"
    changed = onnx.load(file)
    changed.producer_name = "somebody else"
    onnx.save(changed, file)
    ended = slimctl("verify", model)
    assert (ended.code, ended.stdout) == (2, "")
    assert file.name in ended.stderr
    assert "  fix:   " in ended.stderr


def test_a_model_without_a_manifest_is_said_to_be_unchecked(slimctl) -> None:
    ended = slimctl("verify", "model.onnx")
    assert ended.code == 0
    assert "no manifest beside the model: its hash was not checked" in ended.stdout


# bounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bound",
    [
        ("--min-sqnr", "1"),
        ("--min-cosine", "0.5"),
        ("--min-agreement", "0.5"),
        ("--max-error", "9"),
        ("--max-metric-drop", "1"),
        ("--metric", "agreement"),
    ],
    ids=lambda bound: bound[0],
)
def test_bounds_on_a_comparison_need_a_reference(bound: tuple[str, str], slimctl) -> None:
    ended = slimctl(*SMALL, *bound)
    assert (ended.code, ended.stdout) == (2, "")
    assert f"{bound[0]} compares with an original" in ended.stderr
    assert "--against" in ended.stderr


@pytest.fixture
def seven_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtimes differ by 7 steps at 'conv': real kernels differ on some processors only."""
    truly = verification.verify_model

    def differing(*arguments: Any, **options: Any) -> verification.Verification:
        found = truly(*arguments, **options)
        for node in found.replays[-1].nodes:
            node.steps = 7 if node.node == "conv" else 0
        return replace(found, replays=found.replays[-1:])

    monkeypatch.setattr(verification, "verify_model", differing)


@pytest.mark.parametrize(("bound", "code"), [(0, 1), (6, 1), (7, 0), (255, 0)])
def test_max_step_difference(bound: int, code: int, seven_steps: None, slimctl) -> None:
    ended = slimctl(*SMALL, "--max-step-difference", bound)
    assert ended.code == code
    said = f"differ by 7 steps at node 'conv', --max-step-difference is {bound}" in ended.stderr
    assert said is (code == 1)


def test_a_bound_on_steps_that_protects_nothing_is_broken(slimctl) -> None:
    ended = slimctl("verify", "model.onnx", "--max-step-difference", "255")
    assert ended.code == 1
    assert "--max-step-difference 255 applies to no node" in ended.stderr


@pytest.mark.parametrize("text", ["-1", "1.5", "many"])
def test_steps_are_counted_in_whole_numbers(text: str, slimctl) -> None:
    ended = slimctl(*SMALL, "--max-step-difference", text)
    assert (ended.code, ended.stdout) == (2, "")
    assert "--max-step-difference" in ended.stderr


@pytest.fixture
def labeled(quantized: Path) -> Path:
    """Data whose labels are the original's classes, and a model that is right nowhere."""
    data = images(12, seed=5)
    session = ort.InferenceSession(str(quantized / "model.onnx"))
    labels = np.argmax(session.run(None, {"image": data})[0], axis=1)
    np.savez(quantized / "labeled.npz", image=data, labels=labels)
    write_worse(quantized / "worse.onnx")
    assert CLASSES % 2 == 0  # no class stays in the middle
    return quantized / "labeled.npz"


WORSE = ("verify", "worse.onnx", "--against", "model.onnx", "--no-nodes")


@pytest.mark.parametrize(
    ("data", "options", "metric"),
    [
        ("labeled.npz", (), "top1"),
        ("labeled.npz", ("--metric", "agreement"), "agreement"),
        ("calib.npz", (), "agreement"),
    ],
    ids=["labels", "labels not used", "no labels"],
)
def test_max_metric_drop(
    data: str, options: tuple[str, ...], metric: str, labeled: Path, slimctl
) -> None:
    arguments = (*WORSE, "--data", data, *options)
    ended = slimctl(*arguments, "--max-metric-drop", "0.99")
    assert ended.code == 1
    said = f"{metric} went from 1.0000 to 0.0000 at output 'logits', --max-metric-drop is 0.99"
    assert said in ended.stderr
    held = slimctl(*arguments, "--max-metric-drop", "1", "--json")
    assert held.code == 0
    lost = {"output": "logits", "reference": 1.0, "model": 0.0, "drop": 1.0}
    assert parsed(held)["metric"] == {"metric": metric, **lost, "outputs": [lost], "layers": []}


def test_every_output_must_hold_the_bound_on_the_metric() -> None:
    lost = (Drop("a", 1.0, 0.9, 0.1), Drop("b", 1.0, 0.5, 0.5), Drop("c", 1.0, math.nan, math.nan))
    failures = list(_broken_drops(0.2, MetricDrops("top1", lost)))
    assert [failure.split("'")[1] for failure in failures] == ["b", "c"]


def test_an_equal_model_loses_nothing(labeled: Path, slimctl) -> None:
    arguments = ("verify", "model.onnx", "--against", "model.onnx", "--data", "labeled.npz")
    ended = slimctl(*arguments, "--no-nodes", "--max-metric-drop", "0")
    assert ended.code == 0, ended.stderr
    assert "top1: 1.0000 -> 1.0000" in ended.stdout


def test_a_metric_of_which_less_is_better(
    quantized: Path, slimctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    (quantized / "loss.py").write_text(
        "def score(outputs, labels):\n    return float((outputs['logits'] ** 2).sum())\n"
        "score.higher_is_better = False\n"
    )
    monkeypatch.syspath_prepend(str(quantized))
    model = classifier()
    bias = next(tensor for tensor in model.graph.initializer if tensor.name == "fc.bias")
    bias.raw_data = (np.frombuffer(bias.raw_data, np.float32) + np.float32(50)).tobytes()
    onnx.save(model, quantized / "louder.onnx")
    options = ("--data", "val.npz", "--metric", "loss:score", "--no-nodes")
    pair = ("verify", "louder.onnx", "--against", "model.onnx")
    other = ("verify", "model.onnx", "--against", "louder.onnx")
    assert slimctl(*pair, *options, "--max-metric-drop", "1").code == 1
    assert slimctl(*other, *options, "--max-metric-drop", "0").code == 0


def test_no_metric_is_measured_that_nobody_asked_for(labeled: Path, slimctl) -> None:
    ended = slimctl(*WORSE, "--data", "labeled.npz", "--json")
    assert (ended.code, parsed(ended)["metric"]) == (0, None)


def test_a_metric_without_a_bound_is_only_told(labeled: Path, slimctl) -> None:
    ended = slimctl(*WORSE, "--data", "labeled.npz", "--metric", "top1")
    assert ended.code == 0
    assert "top1: 1.0000 -> 0.0000" in ended.stdout
    header, row = ended.stdout.split("Outputs against the reference")[1].splitlines()[1:3]
    assert (header.split()[0], header[-12:]) == ("output", "drop of top1")
    assert (row.split()[0], row.split()[-1]) == ("logits", "+1.0000")


@pytest.mark.parametrize("count", [0, 2])
def test_a_metric_layer_by_layer(count: int, slimctl) -> None:
    options = ("--metric", "agreement", "--metric-layers", count)
    ended = slimctl(*COMPARED, *options, "--report", "report.html", "--force", "--json")
    document = parsed(ended)
    found = document["metric"]["layers"]
    assert (ended.code, len(found)) == (0, count)
    sqnr = sorted(layer["own_db"] for layer in document["nodes"]["layers"])
    assert sorted(layer["own_db"] for layer in found) == sqnr[:count]
    assert all(one["output"] == "logits" for layer in found for one in layer["drops"])
    said = slimctl(*COMPARED, *options).stdout
    assert (f"agreement with one layer quantized, the {count} of" in said) is (count > 0)
    page = Path("report.html").read_text(encoding="utf-8")
    assert "What is lost of agreement" in page
    assert ("With one layer quantized" in page) is (count > 0)


# the report ------------------------------------------------------------------------------------


def test_a_report_is_written(quantized: Path, slimctl) -> None:
    ended = slimctl(*COMPARED, "--report", "report.html")
    assert ended.code == 0, ended.stderr
    assert "report: report.html" in ended.stderr
    page = (quantized / "report.html").read_text(encoding="utf-8")
    for part in ("small.onnx", "passed", "SQNR along the graph", "Values of the worst layers"):
        assert part in page


def test_a_report_of_a_model_out_of_bounds_is_written_too(quantized: Path, slimctl) -> None:
    ended = slimctl(*COMPARED, "--min-sqnr", "150", "--report", "report.html", "-q")
    assert ended.code == 1
    assert "report:" not in ended.stderr
    page = (quantized / "report.html").read_text(encoding="utf-8")
    assert "--min-sqnr is 150" in page


def test_an_existing_report_needs_force(quantized: Path, slimctl) -> None:
    report = quantized / "report.html"
    report.write_text("mine")
    ended = slimctl(*SMALL, "--report", "report.html")
    assert (ended.code, ended.stdout) == (2, "")
    assert "--force" in ended.stderr
    assert report.read_text() == "mine"
    assert slimctl(*SMALL, "--report", "report.html", "--force").code == 0
    assert report.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not list(quantized.glob(".slimctl-*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--report", "no/where.html"), "does not exist"),
        (("--report", "report.html", "--no-nodes"), "--report is about nodes"),
        (("--report", "artifact", "--force"), "directory"),
    ],
    ids=["no folder", "no nodes", "a folder"],
)
def test_a_report_that_cannot_be_made(
    options: tuple[str, ...], message: str, quantized: Path, slimctl
) -> None:
    before = sorted(quantized.rglob("*"))
    ended = slimctl(*SMALL, *options)
    assert (ended.code, ended.stdout) == (2, "")
    assert message in ended.stderr
    assert sorted(quantized.rglob("*")) == before
