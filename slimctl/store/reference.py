"""How names, versions and labels are written: ``net@3``, ``net@production``, ``net``."""

from __future__ import annotations

import re
from typing import NamedTuple

from slimctl.core.errors import OptionError

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Of results. A name is also that of a folder, and ``@`` is none of its characters."""

LABEL_PATTERN = r"^[A-Za-z][A-Za-z0-9._-]*$"
"""Of labels; a number is always a version."""

CURRENT = "current"
LATEST = "latest"
RESERVED = frozenset({CURRENT, LATEST})
"""Words with a meaning of their own: the version in use, and the one with the highest number."""


class Reference(NamedTuple):
    """One version, as it was asked for.

    Attributes:
        name: Of the result.
        which: A number, a label or a reserved word.
    """

    name: str
    which: str


def check_name(name: str) -> str:
    """The name itself.

    Raises:
        OptionError: It cannot be a result's.
    """
    if not re.fullmatch(NAME_PATTERN, name):
        raise OptionError(
            name,
            "Not the name of a result",
            fix="letters, digits, '.', '_' and '-', beginning with a letter or digit",
        )
    return name


def check_label(label: str) -> str:
    """The label itself.

    Raises:
        OptionError: It cannot be a label, or is a word with a meaning of its own.
    """
    if label in RESERVED or not re.fullmatch(LABEL_PATTERN, label):
        raise OptionError(
            "--label",
            f"'{label}' cannot be a label",
            fix="a word such as production, and neither 'current' nor 'latest'",
        )
    return label


def parse_reference(text: str) -> Reference:
    """Reads ``net@3``; without ``@`` the current version is meant.

    Raises:
        OptionError: Not of that form.
    """
    name, at, which = text.partition("@")
    if at and not which:
        raise OptionError(text, "There is no version behind '@'", fix=f"such as {name}@1")
    return Reference(check_name(name), which or CURRENT)
