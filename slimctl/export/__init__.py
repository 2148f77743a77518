"""Artifacts in the forms that other runtimes and people take: one module per kind, found by itself.

A new kind is one new file here, with a class as :mod:`slimctl.export.common` describes it; its
fields become options of ``slimctl export``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from slimctl.core.errors import OptionError, nearest
from slimctl.export.common import Export, registered

__all__ = ["Export", "find_kind", "kinds"]

OPTION = "--for"


@cache
def _load_all() -> None:
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")


def kinds() -> Mapping[str, type[Export]]:
    """Every kind by name."""
    _load_all()
    return dict(sorted(registered().items()))


def find_kind(name: str) -> type[Export]:
    """The class of a kind.

    Raises:
        OptionError: There is none of this name; the error names the nearest.
    """
    known = kinds()
    if name not in known:
        raise OptionError(
            OPTION,
            f"Unknown kind '{name}'",
            fix=f"{nearest(name, known)}; valid: {', '.join(known)}",
        )
    return known[name]
