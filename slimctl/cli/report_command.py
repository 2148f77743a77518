"""``slimctl report``: an artifact's page, with history and with what was measured since."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimctl.cli.options import DEFAULT_STORE, Json, optional, output_option
from slimctl.cli.output import Output
from slimctl.cli.table import Facts

if TYPE_CHECKING:
    from slimctl.report.page import Document

_ADDED = "From other commands, printed with --json"


def report(
    artifact: Annotated[
        str,
        typer.Argument(
            metavar="ARTIFACT",
            help="Artifact folder, .onnx file with its manifest beside it, or a version in the "
            "ledger such as net@3.",
            show_default=False,
        ),
    ],
    *,
    output_file: Annotated[
        Path | None,
        output_option("FILE", "The page.", shown="NAME.html in this folder"),
    ] = None,
    verify: Annotated[
        Path | None,
        optional(
            "--verify",
            "FILE",
            "What 'slimctl verify' found: SQNR along the graph, the worst layers.",
            panel=_ADDED,
        ),
    ] = None,
    sensitivity: Annotated[
        Path | None,
        optional(
            "--sensitivity",
            "FILE",
            "What 'slimctl sensitivity' found about the original.",
            panel=_ADDED,
        ),
    ] = None,
    bench: Annotated[
        Path | None,
        optional(
            "--bench",
            "FILE",
            "What 'slimctl bench' found: the distribution of latencies.",
            panel=_ADDED,
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="STORE",
            envvar="SLIMCTL_STORE",
            help="The ledger, whose versions are drawn: a folder or a URL such as "
            "s3://bucket/models. Without it, the one that the artifact lies in; for a version such "
            f"as net@3, '{DEFAULT_STORE}'.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing page.")] = False,
    json: Json = False,
) -> None:
    """Write an artifact's page, with versions and measurements."""
    from slimctl.core.files import check_output, write_atomic
    from slimctl.report.additions import ASKED, chapter_from
    from slimctl.report.html import HISTORY, full_page

    manifest, history = _look_up(artifact, store)
    path = output_file or Path(f"{manifest['name']}.html")
    check_output(path, force=force)
    given = {"--verify": verify, "--sensitivity": sensitivity, "--bench": bench}
    chapters = [
        chapter_from(option, file, manifest) for option, file in given.items() if file is not None
    ]
    missing = [] if history else [HISTORY]
    missing += [ASKED[option] for option, file in given.items() if file is None]
    write_atomic(path, full_page(manifest, history, chapters, missing).encode())
    found = {"artifact": manifest["name"], "report": path, "missing": [m.what for m in missing]}
    shown = {"report": str(path), "not on it": ", ".join(m.what for m in missing) or "nothing"}
    Output(json=json).result(found, [Facts(shown)])


def _look_up(artifact: str, store: str | None) -> tuple[Document, dict[str, Any] | None]:
    """The manifest, and the versions of its name where there is a ledger.

    Raises:
        OutputError: The artifact was changed.
        OptionError: There is neither such an artifact nor such a version.
    """
    from slimctl.pipeline.artifact import manifest_path, read_artifact
    from slimctl.store.ledger import ledger_around, open_ledger
    from slimctl.store.summary import history_document

    path = Path(artifact)
    if path.exists() or manifest_path(path).exists() or path.name != artifact:
        manifest: Document = read_artifact(path).manifest.document()
        ledger = open_ledger(store) if store else ledger_around(path)
        if ledger is None:
            return manifest, None
        return manifest, history_document(ledger.place, ledger.state(manifest["name"]))
    ledger = open_ledger(store or DEFAULT_STORE)
    version = ledger.find(artifact)
    return ledger.document(version), history_document(ledger.place, ledger.known(version.name))
