from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from onnx import TensorProto, helper, numpy_helper

from slimctl.core.errors import ConfigError
from slimctl.recipe.parse import parse_recipe
from slimctl.recipe.presets import (
    find_recipe,
    init_recipe,
    preset_names,
    preset_path,
    preset_text,
    presets,
)
from slimctl.recipe.resolve import check_complete, resolve_recipe
from slimctl.recipe.run import run_recipe


def test_the_presets() -> None:
    assert preset_names() == [
        "distill-int8-cpu",
        "fp16",
        "fuse-only",
        "int4-weights",
        "int8-cpu",
        "int8-cpu-accurate",
        "prune-int8-cpu",
    ]
    assert [preset.name for preset in presets()] == preset_names()
    assert presets()[4].steps == ("fuse", "quantize")


@pytest.mark.parametrize("name", preset_names())
class TestEveryPreset:
    def test_is_a_valid_recipe_of_its_own_name(self, name: str) -> None:
        parsed = parse_recipe(preset_text(name), preset_path(name))
        job = resolve_recipe(parsed)
        assert job.name == name
        assert job.description
        assert job.model is None

    def test_becomes_a_recipe_that_lacks_nothing(self, name: str, tmp_path: Path) -> None:
        text = init_recipe(name, name="mine", model="a b: c.onnx", calibration="my data")
        path = tmp_path / "recipe.yaml"
        parsed = parse_recipe(text, path)
        check_complete(parsed)
        job = resolve_recipe(parsed)
        assert job.model == tmp_path / "a b: c.onnx"
        assert job.output == tmp_path / "artifacts" / "mine"
        if name not in ("fp16", "fuse-only"):
            assert job.calibration is not None
            assert job.calibration.source == str(tmp_path / "my data")

    def test_keeps_its_comments_when_it_is_copied(self, name: str) -> None:
        comments = re.findall(r"#.*", preset_text(name))
        assert comments
        assert re.findall(r"#.*", init_recipe(name, name="mine")) == comments


def test_only_a_recipe_that_looks_at_data_asks_for_some() -> None:
    assert "data" not in yaml.safe_load(init_recipe("fuse-only", name="a"))
    assert yaml.safe_load(init_recipe("int8-cpu", name="a"))["data"] == {
        "calibration": {"source": "calib.npz"}
    }


def test_unknown_presets_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Unknown preset 'int8'") as caught:
        preset_text("int8")
    assert "did you mean 'int8-cpu'?" in caught.value.fix


def test_a_recipe_is_a_path_or_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "int8-cpu"
    path.touch()
    assert find_recipe(str(path)) == path
    assert find_recipe("none.yaml") == Path("none.yaml")
    assert find_recipe("int8-cpu") == preset_path("int8-cpu")
    with pytest.raises(ConfigError, match="Unknown preset"):
        find_recipe(str(tmp_path / "none"))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder with model.onnx, a small convolutional network, and calib.npz."""
    random = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> TensorProto:
        scale = np.sqrt(2.0 / np.prod(shape[1:]))
        array = (random.standard_normal(shape) * scale).astype(np.float32)
        return numpy_helper.from_array(array, name)

    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w1"], ["c1"], name="conv1", pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c1"], ["r1"], name="relu1"),
            helper.make_node("Identity", ["r1"], ["i"], name="identity"),
            helper.make_node("Conv", ["i", "w2"], ["c2"], name="conv2", pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c2"], ["r2"], name="relu2"),
            helper.make_node("GlobalAveragePool", ["r2"], ["p"], name="pool"),
            helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
            helper.make_node("Gemm", ["f", "w3"], ["y"], name="gemm", transB=1),
        ],
        "images",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 10])],
        [weight("w1", 32, 3, 3, 3), weight("w2", 64, 32, 3, 3), weight("w3", 10, 64)],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "model.onnx")
    np.savez(tmp_path / "calib.npz", x=random.standard_normal((16, 3, 16, 16)).astype(np.float32))
    return tmp_path


NEED_TORCH = ("distill-int8-cpu",)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_runs(name: str, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIMCTL_CACHE", str(images / "cache"))
    if name in NEED_TORCH:
        pytest.importorskip("torch")
    recipe = images / "recipe.yaml"
    recipe.write_text(init_recipe(name, name="mine"))
    result = run_recipe(recipe)
    result.raise_for_gates()
    assert result.artifact is not None
    operators = {node.op_type for node in onnx.load(result.artifact.model).graph.node}
    assert "Identity" not in operators
    marks = {"fp16": "Cast", "fuse-only": "Relu", "int4-weights": "MatMulNBits"}
    assert marks.get(name, "QuantizeLinear") in operators
    if "int8" in name:
        assert result.manifest.results.size_ratio < 0.5


def test_a_preset_runs_by_name(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(images)
    result = run_recipe("fuse-only", ["model=model.onnx"], output=Path("small.onnx"))
    assert result.artifact is not None
    assert (images / "small.onnx").is_file()
