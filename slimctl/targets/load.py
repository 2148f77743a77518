"""Reads execution-provider profiles."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import ValidationError

from slimctl.core.errors import ConfigError, OptionError, nearest
from slimctl.core.target import Target

_FOLDER = Path(__file__).parent


def target_names() -> list[str]:
    """Names of the profiles that ship with slimctl, sorted."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def load_target(name: str) -> Target:
    """Loads a profile by name, or from a ``.yaml`` file of the user's own.

    Raises:
        OptionError: There is no such profile; names the nearest.
        ConfigError: The file is not a valid profile.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else _FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise OptionError("--target", f"Unknown target '{name}'", fix=nearest(name, target_names()))
    try:
        return Target.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(
            f"Not a valid target profile: {error}",
            where=str(path),
            fix="compare it with one of the built-in profiles ('slimctl target show cpu')",
        ) from error
