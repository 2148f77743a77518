"""The recipes that ship with slimctl, and new recipes made from them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import yaml

from slimctl import recipes
from slimctl.core.errors import ConfigError, nearest

_FOLDER = Path(recipes.__file__).parent


class Preset(NamedTuple):
    """One preset.

    Attributes:
        name: By which it is run.
        description: One line.
        steps: Names of its steps.
    """

    name: str
    description: str
    steps: tuple[str, ...]


def preset_names() -> list[str]:
    """Names of all presets, sorted."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def presets() -> list[Preset]:
    """All presets for a list."""
    return [_preset(name) for name in preset_names()]


def _preset(name: str) -> Preset:
    document = yaml.safe_load(preset_text(name))
    steps = (step if isinstance(step, str) else next(iter(step)) for step in document["steps"])
    return Preset(name, document["description"], tuple(steps))


def preset_path(name: str) -> Path:
    """The file of a preset.

    Raises:
        ConfigError: There is no such preset; names the nearest.
    """
    if name not in preset_names():
        raise ConfigError(f"Unknown preset '{name}'", fix=nearest(name, preset_names()))
    return _FOLDER / f"{name}.yaml"


def preset_text(name: str) -> str:
    """A preset's YAML.

    Raises:
        ConfigError: There is no such preset; names the nearest.
    """
    return preset_path(name).read_text(encoding="utf-8")


def find_recipe(name: str) -> Path:
    """The recipe file that somebody means: a path, or the name of a preset.

    Raises:
        ConfigError: Neither; names the nearest preset.
    """
    path = Path(name)
    if path.exists() or path.suffix in (".yaml", ".yml"):
        return path  # reading it says what is wrong with it
    return preset_path(name)


def init_recipe(
    preset: str, *, name: str, model: str = "model.onnx", calibration: str = "calib.npz"
) -> str:
    """A recipe to start from: a preset with a name, a model, data and an output filled in.

    Args:
        preset: Which one.
        name: Of the result.
        model: The model's path, relative to where the recipe will stand.
        calibration: The source of the calibration data, likewise.

    Raises:
        ConfigError: There is no such preset.
    """
    filled = [f"name: {_scalar(name)}", f"model: {_scalar(model)}"]
    if _needs_data(preset):
        filled += ["data:", f"  calibration: {{source: {_scalar(calibration)}}}"]
    text = re.sub(r"^name:.*$", lambda _: "\n".join(filled), preset_text(preset), flags=re.M)
    return text.rstrip("\n") + "\noutput: {store: artifacts}\n"


def _scalar(text: str) -> str:
    """A text as it stands in YAML, quoted where needed."""
    return yaml.safe_dump(text, allow_unicode=True, width=10**6).removesuffix("...\n").strip()


def _needs_data(preset: str) -> bool:
    from slimctl.recipe.parse import load_recipe

    return any(step.requires_data() for step in load_recipe(preset_path(preset)).steps)
