"""Reads execution-provider profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from slimctl.core.errors import ConfigError, OptionError, nearest
from slimctl.core.target import Target

_FOLDER = Path(__file__).parent

_EXTENDS = "extends"
"""Key of a profile that takes from another built-in one what it does not say itself."""


def target_names() -> list[str]:
    """Names of the profiles that ship with slimctl, sorted."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def load_target(name: str) -> Target:
    """Loads a profile by name, or from a ``.yaml`` file of the user's own.

    Raises:
        OptionError: There is no such profile; names the nearest.
        ConfigError: The file is not a valid profile.
    """
    path = _path(name)
    try:
        return Target.model_validate(_document(path, seen=()))
    except (yaml.YAMLError, ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"Not a valid target profile: {error}",
            where=str(path),
            fix="compare it with one of the built-in profiles ('slimctl target show cpu')",
        ) from error


def _path(name: str) -> Path:
    path = Path(name) if name.endswith((".yaml", ".yml")) else _FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise OptionError("--target", f"Unknown target '{name}'", fix=nearest(name, target_names()))
    return path


def _document(path: Path, seen: tuple[Path, ...]) -> Any:
    """What a file says, on top of the profile that it extends."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or _EXTENDS not in document:
        return document
    base = _path(str(document.pop(_EXTENDS)))
    if base in (*seen, path):
        raise ConfigError(
            f"The profile extends itself by way of '{base.stem}'",
            where=str(path),
            fix="let it extend a profile that does not extend this one",
        )
    return _document(base, (*seen, path)) | document
