"""``slimctl rollback``, ``promote``, ``checkout`` and ``gc``: what changes or reads a ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from slimctl.cli import words
from slimctl.cli.options import DEFAULT_STORE, Force, Json, Store, optional, output_option
from slimctl.cli.output import Output

Name: TypeAlias = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the result.", show_default=False)
]
Which: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="VERSION",
        help="A number, a label, current, or latest for the newest.",
        show_default=False,
    ),
]


def rollback(
    name: Name,
    version: Which,
    *,
    store: Store = DEFAULT_STORE,
    force: Force = False,
    json: Json = False,
) -> None:
    """Make an earlier version the current one."""
    from slimctl.recipe.stored import check_folder
    from slimctl.store.ledger import open_ledger

    ledger = open_ledger(store)
    check_folder(ledger, name, force=force)
    before = ledger.known(name).current
    chosen = ledger.rollback(name, version)
    folder = ledger.publish(name, force=force)
    was = None if before is None else before.number
    place = "" if folder is None else f"; its files are in {folder}"
    Output(json=json).result(
        {"name": name, "before": was, "current": chosen.number, "folder": folder},
        [f"{chosen.reference} is the current version{place}"],
    )


def promote(
    name: Name,
    version: Which,
    *,
    label: Annotated[
        str,
        optional("--label", "LABEL", "The label; the version that has it now loses it."),
    ],
    store: Store = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Give a version a label such as production."""
    from slimctl.store.ledger import open_ledger

    chosen = open_ledger(store).promote(name, version, label)
    Output(json=json).result(
        {"name": name, "version": chosen.number, "label": label, "labels": chosen.labels},
        [f"{chosen.reference} is {label}"],
    )


def checkout(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@VERSION]",
            help="The version: net@3, net@production, or net for the current one.",
            show_default=False,
        ),
    ],
    *,
    output: Annotated[
        Path,
        output_option("DIR", "The folder to write."),
    ],
    store: Store = DEFAULT_STORE,
    force: Force = False,
    json: Json = False,
) -> None:
    """Take the files of a version out."""
    from slimctl.core.errors import OptionError
    from slimctl.pipeline.artifact import check_artifact_output, is_file_output
    from slimctl.store.ledger import open_ledger

    if is_file_output(output):
        raise OptionError("-o", "A version is a folder of files", fix=f"-o {output.stem}/")
    check_artifact_output(output, force=force)
    ledger = open_ledger(store)
    version = ledger.find(reference)
    ledger.checkout(version, output)
    Output(json=json).result(
        {
            "version": version.reference,
            "output": output,
            "files": [output / file.name for file in version.entry.files],
        },
        [f"{version.reference} is in {output}"],
    )


def collect(
    *,
    keep: Annotated[
        int,
        typer.Option(
            "--keep",
            metavar="N",
            min=0,
            help="Newest versions of each name that keep their files, besides the current one and "
            "those with labels.",
        ),
    ] = 10,
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            metavar="MINUTES",
            min=0,
            help="Objects younger than this stay: on object storage a run may be about to name "
            "them.",
        ),
    ] = 60.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")
    ] = False,
    store: Store = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Remove what no kept version needs."""
    from slimctl.store.ledger import open_ledger
    from slimctl.store.sweep import sweep

    swept = sweep(open_ledger(store), keep=keep, grace=60 * grace, dry_run=dry_run)
    verb = "would be removed" if dry_run else "removed"
    lines = [
        f"{swept.objects} objects ({words.size(swept.size_bytes)}) {verb}, "
        f"{swept.kept_objects} kept"
    ]
    if swept.versions:
        given = "would give up their files" if dry_run else "gave up their files"
        lines.insert(0, f"{', '.join(swept.versions)} {given}; manifests and recipes stay")
    if swept.young_objects:
        lines.append(
            f"{swept.young_objects} objects are needed by no version, and younger than "
            f"{grace:g} minutes"
        )
    Output(json=json).result({"dry_run": dry_run, **vars(swept)}, lines)
