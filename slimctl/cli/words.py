"""Numbers in words, the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

UNKNOWN = "?"


def size(count: int | None) -> str:
    """Bytes in decimal units: ``18.6 MB``."""
    if count is None:
        return UNKNOWN
    if count < 1000:
        return f"{count} B"
    return _scaled(count, ("kB", "MB", "GB", "TB"))


def number(count: int | None) -> str:
    """A large count: ``4.7 M``."""
    if count is None:
        return UNKNOWN
    return str(count) if count < 1000 else _scaled(count, ("k", "M", "G", "T"))


def _scaled(count: int, units: Sequence[str]) -> str:
    value = float(count)
    for unit in units:
        value /= 1000
        if value < 999.5 or unit == units[-1]:
            break
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def decibel(value: float | None) -> str:
    """An SQNR; 200 dB is what identical tensors have by definition."""
    if value is None:
        return "-"
    return "identical" if value >= 200 else f"{value:.1f} dB"


def percent(share: float | None) -> str:
    """A share as a percentage."""
    return "-" if share is None else f"{100 * share:.1f} %"


def milliseconds(value: float) -> str:
    """A latency without its unit, with the digits that mean something."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def counts(changed: Mapping[str, int]) -> str:
    """Counts by name: ``49 Conv, 1 Gemm``."""
    return ", ".join(f"{count} {name}" for name, count in changed.items()) or "nothing"


def first_of(names: Sequence[str], limit: int) -> str:
    """The beginning of a list, and how many more there are."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def setting(value: object) -> str:
    """An option's value."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {setting(item)}" for key, item in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(str(item) for item in value)
    return str(value)
