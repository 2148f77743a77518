"""``slimctl diff``: two results side by side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from slimctl.cli import words
from slimctl.cli.options import DEFAULT_STORE, Json, Store
from slimctl.cli.output import Output
from slimctl.cli.table import Block, Table, Warned

if TYPE_CHECKING:
    from slimctl.store.diff import Diff, Measured, StepEffect

Side: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="VERSION",
        help="net@3, net@production, or net for the current version; or an artifact: its folder, "
        ".onnx file or manifest.",
        show_default=False,
    ),
]


def diff(before: Side, after: Side, *, store: Store = DEFAULT_STORE, json: Json = False) -> None:
    """Compare two versions: what went in, what came out."""
    from slimctl.store.diff import diff_manifests

    found = diff_manifests(_manifest(before, store), _manifest(after, store))
    Output(json=json).result(
        {"before": before, "after": after, **vars(found)}, list(_blocks(found, before, after))
    )


def _manifest(side: str, store: str) -> dict[str, Any]:
    from slimctl.store.ledger import open_ledger

    if not _is_path(side):
        ledger = open_ledger(store)
        return ledger.document(ledger.find(side))
    from slimctl.pipeline.artifact import manifest_path
    from slimctl.pipeline.manifest import read_manifest

    path = Path(side)
    return read_manifest(path if path.suffix == ".json" else manifest_path(path)).document()


def _is_path(side: str) -> bool:
    """Whether an artifact on disk is meant; ``@`` always stands before a version."""
    path = Path(side)
    is_file = path.suffix.lower() in (".onnx", ".json")
    return is_file or len(path.parts) > 1 or ("@" not in side and path.is_dir())


def _blocks(found: Diff, before: str, after: str) -> Iterator[Block]:
    if len(found.things) > 1:
        yield Warned(
            f"{len(found.things)} things changed at once ({', '.join(found.things)}): what made "
            "the difference cannot be told; change one at a time"
        )
    yield _changes(found, before, after)
    yield Table(
        ("result", f">{before}", f">{after}", ">change"),
        [_measured(row) for row in found.measured],
    )
    yield Table(
        (
            "step",
            f">weights {before}",
            f">{after}",
            f">SQNR {before}",
            f">{after}",
            f">metric {before}",
            f">{after}",
        ),
        [(row.name, *_side_by_side(row.before, row.after)) for row in found.steps],
        title="After each step; in brackets what it did to the metric",
    )
    if found.gates:
        yield Table(
            ("gate", before, after),
            [(row.gate, _verdict(row.before), _verdict(row.after)) for row in found.gates],
        )


def _changes(found: Diff, before: str, after: str) -> Block:
    from slimctl.store.changes import value_in_words

    if not found.changes:
        same = "the models are the same bytes" if found.same_model else "the models differ"
        return f"nothing that went in differs; {same}"
    return Table(
        ("changed", before, after),
        [
            (change.path, value_in_words(change.before), value_in_words(change.after))
            for change in found.changes
        ],
    )


_BYTES = frozenset({"size_bytes", "weight_bytes"})


def _measured(row: Measured) -> tuple[str, ...]:
    return (row.what, _value(row, row.before), _value(row, row.after), _difference(row))


def _value(row: Measured, value: Any) -> str:
    if value is None:
        return "-"
    return words.size(value) if row.what in _BYTES else f"{value:g}"


def _difference(row: Measured) -> str:
    before, after = row.before, row.after
    if not (isinstance(before, int | float) and isinstance(after, int | float)):
        return "-"
    if before == after:
        return "none"
    if row.what in _BYTES:
        return f"{100 * (after - before) / before:+.1f} %" if before else "-"
    return f"{after - before:+.4g}"


def _side_by_side(before: StepEffect | None, after: StepEffect | None) -> tuple[str, ...]:
    sides = (before, after)
    return (
        *("-" if side is None else words.size(side.weight_bytes) for side in sides),
        *("-" if side is None else words.decibel(side.sqnr_db) for side in sides),
        *("-" if side is None else _metric(side) for side in sides),
    )


def _metric(effect: StepEffect) -> str:
    if effect.metric is None:
        return "-"
    change = "" if effect.metric_change is None else f" ({effect.metric_change:+g})"
    return f"{effect.metric:g}{change}"


def _verdict(gate: dict[str, Any] | None) -> str:
    if gate is None:
        return "-"
    found = "not measured" if gate["found"] is None else f"{gate['found']:g}"
    return f"{'passed' if gate['passed'] else 'FAILED'}: {found} against {gate['bound']:g}"
