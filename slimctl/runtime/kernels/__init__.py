"""One module per family of operators; each registers its functions when it is imported.

A new family is one new file here: :func:`load_all` finds it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules


@cache
def load_all() -> None:
    """Imports every module of this package."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
