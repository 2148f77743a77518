"""Numbers in words, as pages say them."""

from __future__ import annotations

from slimctl.evaluate.metrics import LIMIT_DB


def decibel(value: float | None) -> str:
    """An SQNR; 200 dB is what identical tensors have by definition."""
    if value is None:
        return "-"
    return "identical" if value >= LIMIT_DB else f"{value:.1f} dB"


def share(value: float | None) -> str:
    """A share as a percentage; one that is almost 0 or 1 does not look as if it were."""
    if value is None:
        return "-"
    text = f"{value:.2%}"
    if text == "0.00%" and value > 0:
        return "< 0.01%"
    return "> 99.99%" if text == "100.00%" and value < 1 else text


def size(count: float) -> str:
    """Bytes with the digits that mean something."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:  # more would be rounded to 1e+03
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
