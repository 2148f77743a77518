"""``slimctl target check``, and what it checks: quantized for a target, legalized, gated."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import yaml

from slimctl.graph.load import load_model
from slimctl.targets import load_target, target_names
from tests.cli.models import classifier, images


def parsed(ended) -> dict:
    return json.loads(ended.stdout)


def test_everything_taken_is_exit_code_zero(inputs: Path, slimctl) -> None:
    ended = slimctl("target", "check", "model.onnx", "--target", "tensorrt")
    assert (ended.code, ended.stderr) == (0, "")
    for part in (
        "TensorrtExecutionProvider",
        "fall back:",
        "0",
        "no rule of the profile is broken",
    ):
        assert part in ended.stdout


def test_fall_backs_are_grouped_by_rule(inputs: Path, slimctl) -> None:
    ended = slimctl("target", "check", "model.onnx", "--target", "qnn-htp")
    assert ended.code == 1
    assert "static-shapes" in ended.stdout
    assert "conv, relu, pool and 2 more" in ended.stdout
    assert "fix open sizes: the pass legalize" in ended.stdout
    assert "https://onnxruntime.ai/docs/execution-providers/QNN" in ended.stdout
    assert "5 nodes, inputs or outputs do not run on QNNExecutionProvider; 0 may" in ended.stderr
    everything = slimctl("target", "check", "model.onnx", "--target", "qnn-htp", "-v")
    assert "conv, relu, pool, flatten, fc" in everything.stdout


def test_as_if_a_size_were_fixed(inputs: Path, slimctl) -> None:
    ended = slimctl("target", "check", "model.onnx", "--target", "qnn-htp", "--dim", "N=1")
    assert ended.code == 0
    assert "float-as-half" in ended.stdout  # advice


def test_some_may_fall_back(inputs: Path, slimctl) -> None:
    onnx.save(classifier(custom_operator=True), inputs / "custom.onnx")
    check = ("target", "check", "custom.onnx", "--target", "tensorrt")
    assert slimctl(*check).code == 1
    ended = slimctl(*check, "--max-fallback", "1")
    assert (ended.code, ended.stderr) == (0, "")
    assert "frob" in ended.stdout


@pytest.mark.parametrize("code", [0, 1])
def test_json_is_one_document(code: int, inputs: Path, slimctl) -> None:
    target = ("cpu", "qnn-htp")[code]
    ended = slimctl("target", "check", "model.onnx", "--target", target, "--json")
    assert ended.code == code
    document = parsed(ended)
    assert document["target"] == target
    assert document["nodes"] == len(document["placements"]) == 5
    assert document["fallbacks"] == 5 * code
    assert {"partitions", "transitions", "macs", "macs_taken", "problems"} <= set(document)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.onnx"], "nothing.onnx"),
        (["model.onnx", "--target", "qnn"], "did you mean 'qnn-htp'?"),
        (["model.onnx", "--target", "cpu", "--dim", "N"], "NAME=N"),
        (["model.onnx", "--max-fallback", "-1"], "--max-fallback"),
    ],
)
def test_bad_input_is_exit_code_two(arguments: list[str], said: str, inputs: Path, slimctl) -> None:
    ended = slimctl("target", "check", *arguments)
    assert (ended.code, ended.stdout) == (2, "")
    assert said in ended.stderr


@pytest.mark.parametrize("name", target_names())
def test_show_lists_the_rules(name: str, slimctl) -> None:
    ended = slimctl("target", "show", name)
    assert ended.code == 0
    for rule in load_target(name).rules:
        assert rule.name in ended.stdout
        assert rule.fix in ended.stdout
    assert parsed(slimctl("target", "show", name, "--json"))["name"] == name


def recipe(folder: Path, steps: list, target: str) -> None:
    document = {
        "version": 1,
        "name": "made",
        "model": "model.onnx",
        "target": target,
        "data": {"calibration": {"source": "calib.npz"}},
        "steps": steps,
        "gates": {"placement": {"max_fallback_nodes": 0}},
        "output": {"path": "made.onnx"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")


STATIC = {"quantize-static": {"calibration": "minmax", "min_sqnr": 0}}


@pytest.mark.parametrize("name", ["qnn-htp", "tensorrt", "openvino", "vitisai"])
def test_quantized_and_legalized_runs_whole(name: str, inputs: Path, slimctl) -> None:
    recipe(inputs, ["fuse", STATIC, "legalize"], name)
    ended = slimctl("run", "recipe.yaml")
    assert ended.code == 0, ended.stderr
    assert slimctl("target", "check", "made.onnx", "--target", name).code == 0
    shape = load_model(inputs / "made.onnx").graph.inputs[0].shape
    fixed = name in ("qnn-htp", "vitisai")
    assert shape is not None
    assert (shape[0] == 1) == fixed
    data = images(1)
    before, after = (
        ort.InferenceSession((inputs / file).read_bytes()).run(None, {"image": data})[0]
        for file in ("model.onnx", "made.onnx")
    )
    assert np.abs(before - after).max() < 0.2 * np.abs(before).max()


def test_the_gate_fails_a_run(inputs: Path, slimctl) -> None:
    recipe(inputs, ["fuse", STATIC], "qnn-htp")
    ended = slimctl("run", "recipe.yaml")
    assert ended.code == 1
    assert "placement" in ended.stderr
    assert "fall back; at most 0 allowed" in ended.stderr
    assert not (inputs / "made.onnx").exists()
