"""``slimctl history``: the versions of a result, newest last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from slimctl.cli import words
from slimctl.cli.options import DEFAULT_STORE, Json, Store
from slimctl.cli.output import Output
from slimctl.cli.table import Block, Table, Warned

if TYPE_CHECKING:
    from slimctl.store.ledger import Ledger
    from slimctl.store.state import State, Version
    from slimctl.store.sweep import Damage


def history(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Name of the result; without it all names are listed."),
    ] = None,
    *,
    store: Store = DEFAULT_STORE,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Read every object, and exit with 1 where the ledger is damaged."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Show the versions of a result."""
    from slimctl.store.ledger import open_ledger
    from slimctl.store.summary import history_document

    ledger, said = open_ledger(store), Output(json=json)
    if check:
        _check(ledger, name, said)
    elif name is None:
        _list_names(ledger, said)
    else:
        state = ledger.known(name)
        said.result(history_document(ledger.place, state), list(_blocks(ledger, state)))


def _check(ledger: Ledger, name: str | None, said: Output) -> None:
    from slimctl.core.errors import GateFailedError
    from slimctl.store.sweep import check_ledger

    names = [ledger.known(name).name] if name else ledger.names()
    damages = check_ledger(ledger, names) if names else []
    said.result(
        {"store": ledger.place, "names": names, "damaged": damages},
        [_damages(damages)] if damages else [f"whole: {', '.join(names) or 'no versions yet'}"],
    )
    if damages:
        count = "1 version" if len(damages) == 1 else f"{len(damages)} versions"
        raise GateFailedError(
            f"The ledger is damaged: {count} cannot be read",
            where=ledger.place,
            fix="restore what is named from a copy of the store, or run those recipes again",
        )


def _damages(damages: Sequence[Damage]) -> Table:
    return Table(("version", "damage"), [(item.version, item.problem) for item in damages])


def _list_names(ledger: Ledger, said: Output) -> None:
    states = [ledger.state(name) for name in ledger.names()]
    rows = [
        (
            state.name,
            str(len(state.versions)),
            str(state.current.number) if state.current else "-",
            _moment(state.versions[-1].entry.at),
        )
        for state in states
        if state.versions
    ]
    said.result(
        {
            "store": ledger.place,
            "names": [
                {"name": name, "versions": int(count), "current": _number(current), "newest": at}
                for name, count, current, at in rows
            ],
        },
        [Table(("name", ">versions", ">current", "newest"), rows)]
        if rows
        else [f"no versions in '{ledger.place}' yet"],
    )


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _blocks(ledger: Ledger, state: State) -> Iterator[Block]:
    metric = next((v.entry.summary.metric for v in reversed(state.versions)), None)
    yield Table(
        (
            "",
            ">version",
            "when",
            "verdict",
            ">size",
            ">SQNR",
            f">{metric or 'metric'}",
            "changed",
            "labels",
        ),
        [_row(version, metric) for version in state.versions],
    )
    if not ledger.owns_folder(state.name):
        yield Warned(
            f"{ledger.folder(state.name)} was changed by hand; 'slimctl rollback {state.name} "
            "current --force' puts the current version there"
        )


def _row(version: Version, metric: str | None) -> tuple[str, ...]:
    entry, summary = version.entry, version.entry.summary
    return (
        "*" if version.current else "",
        str(version.number),
        _moment(entry.at),
        "accepted" if entry.accepted else f"rejected: {', '.join(summary.failed_gates)}",
        words.size(summary.size_bytes),
        words.decibel(summary.sqnr_db),
        _metric(version, metric),
        "; ".join(summary.changes) if summary.changes is not None else words.UNKNOWN,
        ", ".join([*version.labels, *([] if version.has_files else ["no files"])]),
    )


def _moment(at: str) -> str:
    """A time in UTC to the minute."""
    return at[:16].replace("T", " ")


def _metric(version: Version, metric: str | None) -> str:
    summary = version.entry.summary
    if summary.metric_result is None:
        return "-"
    other = "" if summary.metric == metric else f" {summary.metric}"
    return f"{summary.metric_result:g}{other}"
