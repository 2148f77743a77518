"""Chooses nodes by pattern: the ``--include`` and ``--exclude`` options of every command."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, TypeAlias

import onnx_ir as ir
from pydantic import AfterValidator

from slimctl.core.errors import OptionError


def _matches(pattern: str, node: ir.Node) -> bool:
    if pattern.startswith("op:"):
        return fnmatchcase(node.op_type, pattern[3:])
    names = [node.name or "", *(value.name or "" for value in node.outputs)]
    if pattern.startswith("re:"):
        return any(re.search(pattern[3:], name) for name in names)
    return any(fnmatchcase(name, pattern) for name in names)


_FLOAT_KEY = "slimctl.float"


def keep_float(node: ir.Node, reason: str) -> None:
    """Marks a node that passes leave in float, and says why."""
    node.metadata_props[_FLOAT_KEY] = reason


def check_patterns(patterns: Sequence[str]) -> tuple[str, ...]:
    """The patterns, if every regular expression among them compiles.

    Raises:
        OptionError: A regular expression is malformed.
    """
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise OptionError(
                    "--include/--exclude",
                    f"'{pattern[3:]}' is not a regular expression: {error}",
                    fix="escape special characters with a backslash",
                ) from error
    return tuple(patterns)


Patterns: TypeAlias = Annotated[tuple[str, ...], AfterValidator(check_patterns)]
"""The type of an option that names nodes."""


@dataclass
class Selection:
    """Which nodes a pass may touch.

    A pattern is a glob over node names and names of output tensors, ``op:Softmax`` for an operator
    type (also a glob), or ``re:...`` for a regular expression searched in the names.

    Attributes:
        include: Only matching nodes are touched; empty means all.
        exclude: Matching nodes are left alone, also if included.
        reasons: Nodes that are left alone for another reason, by exact name.
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set)

    def reason_against(self, node: ir.Node) -> str | None:
        """Why a node must be left alone, or None when it may be touched."""
        if _FLOAT_KEY in node.metadata_props:
            return node.metadata_props[_FLOAT_KEY]
        if node.name and node.name in self.reasons:
            return self.reasons[node.name]
        for pattern in self.exclude:
            if _matches(pattern, node):
                self._used.add(pattern)
                return f"excluded by '{pattern}'"
        hits = [pattern for pattern in self.include if _matches(pattern, node)]
        self._used.update(hits)
        if self.include and not hits:
            return "not among the included nodes"
        return None

    def is_named(self, node: ir.Node) -> bool:
        """Whether the user included this very node, by its name or that of an output."""
        names = {node.name, *(value.name for value in node.outputs)}
        return any(pattern in names for pattern in self.include)

    def unused(self) -> list[str]:
        """Patterns that matched no node asked about so far: most likely misspelled."""
        return [p for p in (*self.include, *self.exclude) if p not in self._used]
