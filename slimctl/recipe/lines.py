"""YAML with the line of every key and value, so that an error can name its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml

from slimctl.core.errors import RecipeError

Place: TypeAlias = tuple[str | int, ...]
"""Keys and indices from the top of a document to one value: ``("steps", 1, "quantize")``."""


class Document(NamedTuple):
    """A YAML document as plain values, and where each stands.

    Attributes:
        values: What the document says.
        lines: First line of each place, from 1; of a mapping's entry, the line of its key.
    """

    values: dict[str, Any]
    lines: dict[Place, int]

    def line(self, place: Place) -> int | None:
        """The line of a place, or of the nearest enclosing place that has one."""
        for length in range(len(place), -1, -1):
            if place[:length] in self.lines:
                return self.lines[place[:length]]
        return None


def read_document(text: str, path: Path | str) -> Document:
    """Reads one YAML mapping.

    Raises:
        RecipeError: Not YAML, not a mapping, or a key stands twice.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2024-99-99
        raise _syntax_error(path, error) from error
    if not isinstance(root, yaml.MappingNode):
        raise RecipeError(
            path, 1, "A recipe is a mapping of keys", fix="start with 'version: 1' and 'name: ...'"
        )
    lines: dict[Place, int] = {(): 1}
    for place, node in _walk(root, (), path, set()):
        lines.setdefault(place, node.start_mark.line + 1)
    return Document(values, lines)


def _syntax_error(path: Path | str, error: Exception) -> RecipeError:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return RecipeError(
        path,
        None if mark is None else mark.line + 1,
        f"Not valid YAML: {problem}",
        fix="check the indentation and quote texts that hold ': ' or '#'",
    )


def _walk(
    node: yaml.Node, place: Place, path: Path | str, seen: set[int]
) -> Iterator[tuple[Place, yaml.Node]]:
    if id(node) in seen:  # an alias: walked where its anchor stands, and possibly its own part
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*place, index), item
            yield from _walk(item, (*place, index), path, seen)
    elif isinstance(node, yaml.MappingNode):
        _refuse_repeated_keys(node, path)
        for key, value in node.value:
            yield (*place, str(key.value)), key
            yield from _walk(value, (*place, str(key.value)), path, seen)


def _refuse_repeated_keys(node: yaml.MappingNode, path: Path | str) -> None:
    # PyYAML keeps the last of two equal keys without a word.
    names: set[str] = set()
    for key, _ in node.value:
        name = str(key.value)
        if name in names:
            line = key.start_mark.line + 1
            raise RecipeError(path, line, f"Key '{name}' stands twice", fix="remove one of them")
        names.add(name)
