from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

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


def test_the_three_presets() -> None:
    assert preset_names() == ["fuse-only", "int8-cpu", "int8-cpu-accurate"]
    assert [preset.name for preset in presets()] == preset_names()
    assert presets()[1].steps == ("fuse", "quantize")


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
        if name != "fuse-only":
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
