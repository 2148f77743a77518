"""``--set steps.1.sparsity=0.4``: changes one value of a recipe before it is validated."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from slimctl.core.errors import OptionError
from slimctl.recipe.lines import Document, Place
from slimctl.store.backend import is_url

_PATHS: frozenset[Place] = frozenset({("model",), ("output", "store"), ("output", "path")})
"""Values that name a place on disk."""

_PATHS_OR_NAMES: frozenset[Place] = frozenset(
    ("data", part, key)
    for part in ("calibration", "training", "evaluation")
    for key in ("source", "preprocess")
) | {("target",)}
"""Values that may name a place on disk."""


class Override(NamedTuple):
    """One ``--set``.

    Attributes:
        text: As written on the command line.
        place: Which value, steps by index from 0.
        value: What it becomes.
    """

    text: str
    place: Place
    value: Any


def parse_override(text: str) -> Override:
    """Reads ``steps.1.sparsity=0.4``; the value is YAML, so 0.4 is a number and null nothing.

    Raises:
        OptionError: Not of that form.
    """
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise OptionError(f"--set {text}", "Not of the form KEY=VALUE", fix="--set seed=1")
    try:
        parsed = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError) as error:
        raise OptionError(
            f"--set {text}", "The value is not valid YAML", fix="put it in quotes"
        ) from error
    place = tuple(int(part) if part.isdecimal() else part for part in parts)
    return Override(text, place, _relative_to_here(place, parsed))


def _relative_to_here(place: Place, value: Any) -> Any:
    # What is typed in a shell is relative to the shell's folder, not to the recipe's.
    if not isinstance(value, str) or is_url(value):
        return value
    if place in _PATHS or (place in _PATHS_OR_NAMES and Path(value).exists()):
        return str(Path(value).absolute())
    return value


def apply_overrides(document: Document, overrides: Sequence[Override]) -> Document:
    """A new document with the overrides in place; the given one stays as it is.

    Raises:
        OptionError: An override points at nothing.
    """
    values = copy.deepcopy(document.values)
    lines = dict(document.lines)
    for override in overrides:
        _set(values, override, override.place)
        lines = {
            place: line
            for place, line in lines.items()
            if place[: len(override.place)] != override.place
        }
    return Document(values, lines)


def _set(container: Any, override: Override, rest: Place) -> None:
    key, *deeper = rest
    if isinstance(container, list):
        _set_in_list(container, override, key, tuple(deeper))
    elif not isinstance(container, dict):
        raise _nowhere(override, f"'{key}' is inside a single value")
    elif deeper:
        child = container.get(str(key))
        if child is None:
            child = container[str(key)] = {}
        _set(child, override, tuple(deeper))
    else:
        container[str(key)] = override.value


def _set_in_list(items: list[Any], override: Override, key: str | int, deeper: Place) -> None:
    if not isinstance(key, int) or key >= len(items):
        raise _nowhere(override, f"there are entries 0 to {len(items) - 1}, and no '{key}'")
    if not deeper:
        items[key] = override.value
        return
    if isinstance(items[key], str):  # a step without options
        items[key] = {items[key]: {}}
    _set(_options_of(items[key], deeper), override, deeper)


def _options_of(item: Any, deeper: Place) -> Any:
    # steps.1.sparsity speaks of the option; steps.1.prune.sparsity names the pass as well.
    if not (isinstance(item, dict) and len(item) == 1):
        return item
    name = next(iter(item))
    if deeper[0] == name:
        return item
    if item[name] is None:
        item[name] = {}
    return item[name]


def _nowhere(override: Override, why: str) -> OptionError:
    return OptionError(
        f"--set {override.text}",
        f"The override points at nothing: {why}",
        fix="steps are counted from 0: --set steps.1.sparsity=0.4",
    )
