"""Where the bytes of the weights are: by data type, before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slimctl.report.bars import PARTS, stacked_bars
from slimctl.report.page import Document, Markup, join, section, table, tag
from slimctl.report.words import size

_TITLE = "Weights by data type"


def dtype_section(document: Document) -> Markup:
    """A bar for the original and one for the result, and the numbers."""
    before, after = (document[key].get("dtype_bytes") or {} for key in ("source", "model"))
    if not before and not after:
        why = "The manifest does not say: it is older than this plot, or there are no weights."
        return section(_TITLE, tag("p", why, class_="dim"))
    kinds = sorted(
        {*before, *after}, key=lambda kind: -max(before.get(kind, 0), after.get(kind, 0))
    )
    rows = [
        (kind, *(size(side[kind]) if kind in side else "-" for side in (before, after)))
        for kind in kinds
    ]
    drawn = _bars({"original": before, "result": after}, kinds)
    return section(_TITLE, join([drawn, _details(rows)]))


def _details(rows: Sequence[Sequence[str]]) -> Markup:
    listed = table(("data type", "original", "result"), rows, ".nn")
    return tag("details", join([tag("summary", "Numbers"), listed]))


def _bars(sides: Mapping[str, Mapping[str, int]], kinds: Sequence[str]) -> Markup:
    """All on one scale; kinds without a color of their own are one part."""
    shown, rest = list(kinds), []
    if len(kinds) > PARTS:
        shown, rest = list(kinds[: PARTS - 1]), list(kinds[PARTS - 1 :])
    most = max(sum(side.values()) for side in sides.values())
    rows = []
    for label, side in sides.items():
        counts = [side.get(kind, 0) for kind in shown]
        if rest:
            counts.append(sum(side.get(kind, 0) for kind in rest))
        rows.append((label, size(sum(counts)), [count / most for count in counts]))
    return stacked_bars(rows, [*shown, *(["others"] if rest else [])])
