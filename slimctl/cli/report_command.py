"""``slimctl report``: an artifact's page, with history and with what was measured since."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimctl.cli.options import DEFAULT_STORE, Json
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
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="The page.",
            show_default="NAME.html in this folder",
            readable=False,
        ),
    ] = None,
    verify: Annotated[
        Path | None,
        typer.Option(
            "--verify",
            metavar="FILE",
            help="What 'slimctl verify' found: SQNR along the graph, the worst layers.",
            rich_help_panel=_ADDED,
            show_default=False,
            readable=False,
        ),
    ] = None,
    sensitivity: Annotated[
        Path | None,
        typer.Option(
            "--sensitivity",
            metavar="FILE",
            help="What 'slimctl sensitivity' found about the original.",
            rich_help_panel=_ADDED,
            show_default=False,
            readable=False,
        ),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(
            "--bench",
            metavar="FILE",
            help="What 'slimctl bench' found: the distribution of latencies.",
            rich_help_panel=_ADDED,
            show_default=False,
            readable=False,
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="STORE",
            envvar="SLIMCTL_STORE",
            help="The ledger, whose versions are drawn: a folder or a URL such as "
            f"s3://bucket/models. For a version such as net@3 it is '{DEFAULT_STORE}' by default.",
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
    from slimctl.cli.history_command import to_document
    from slimctl.pipeline.artifact import manifest_path, read_artifact
    from slimctl.store.ledger import open_ledger

    path = Path(artifact)
    if path.exists() or manifest_path(path).exists() or path.name != artifact:
        manifest: Document = read_artifact(path).manifest.document()
        if store is None:
            return manifest, None
        ledger = open_ledger(store)
        return manifest, to_document(ledger, ledger.state(manifest["name"]))
    ledger = open_ledger(store or DEFAULT_STORE)
    version = ledger.find(artifact)
    return ledger.document(version), to_document(ledger, ledger.known(version.name))
