"""A package of its own offers a pass; it is really installed, by pip, into a folder on the path."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from slimctl.core.errors import ConfigError, OptionError
from slimctl.core.registry import find_pass, pass_names
from slimctl.recipe.json_schema import recipe_json_schema
from slimctl.recipe.run import run_recipe

PACKAGE = Path(__file__).parent / "plugin_package"

RECIPE = """\
version: 1
name: halved
model: network.onnx
steps:
  - halve: {minimum_size: 6}
gates:
  size: {max_ratio: 0.9}
output: {path: halved.onnx}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source") / "plugin"
    shutil.copytree(PACKAGE, source)  # building leaves files in the source tree
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, *offline, "--target", str(target), str(source)], check=True)
    return target


@pytest.fixture(autouse=True)
def on_the_path(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed))
    importlib.invalidate_caches()


def test_the_pass_is_found_behind_the_built_in_ones() -> None:
    names = pass_names()
    assert names[0] == "fuse"
    assert names[-3:] == ["broken", "halve", "stranger"]
    assert find_pass("halve").summary.startswith("Store weights as float16")


def test_a_recipe_uses_it(tmp_path: Path, network: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    result = run_recipe(recipe)
    result.raise_for_gates()
    (step,) = result.manifest.steps
    assert (step.name, step.options, step.changed) == ("halve", {"minimum_size": 6}, {"weights": 2})
    assert [(item.node, item.reason) for item in step.skipped] == [("b", "too small")]
    halved = onnx.load(tmp_path / "halved.onnx")
    types = {tensor.name: tensor.data_type for tensor in halved.graph.initializer}
    assert types == {
        "w_half": onnx.TensorProto.FLOAT16,
        "g_half": onnx.TensorProto.FLOAT16,
        "b": onnx.TensorProto.FLOAT,
    }
    original = onnx.load(network)
    expected = onnx.numpy_helper.to_array(original.graph.initializer[1]).astype(np.float16)
    stored = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in halved.graph.initializer
    }
    np.testing.assert_array_equal(stored["g_half"], expected)


def test_a_misspelled_option_of_a_plugin_names_the_line(tmp_path: Path, network: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("minimum_size", "minimum_sise"))
    with pytest.raises(ConfigError, match="Unknown key 'minimum_sise'") as caught:
        run_recipe(recipe)
    assert caught.value.where.endswith("recipe.yaml:5")
    assert "did you mean 'minimum_size'?" in caught.value.fix


def test_a_plugin_that_cannot_be_imported_names_its_package() -> None:
    with pytest.raises(ConfigError, match="'broken' cannot be imported") as caught:
        find_pass("broken")
    assert caught.value.where == "slimctl_halve.missing:Broken"


def test_a_plugin_that_is_no_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match="'stranger' is not a subclass"):
        find_pass("stranger")


def test_the_nearest_name_may_be_a_plugins() -> None:
    with pytest.raises(OptionError) as caught:
        find_pass("halv")
    assert caught.value.fix == "did you mean 'halve'?"


def test_a_broken_plugin_does_not_hide_the_schema_of_the_others() -> None:
    text = str(recipe_json_schema())
    assert "Smaller weights are left alone." in text
    assert "'broken' cannot be imported" in text
