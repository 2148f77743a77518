"""``slimctl export``: an artifact in the forms that other runtimes and people take."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from slimctl.cli.derive import build_pass, default_value, flags, pass_fields, pass_parameters
from slimctl.cli.options import Force, Json, Quiet, completes, optional, output_option
from slimctl.cli.output import Output
from slimctl.cli.table import Block, Facts, Table
from slimctl.core.errors import OptionError
from slimctl.export import find_kind, kinds
from slimctl.export.common import Export, Exported, export_artifact

_ARTIFACT = Annotated[
    Path,
    typer.Argument(
        metavar="ARTIFACT",
        help="An artifact's folder, or a file x.onnx with x.manifest.json beside it.",
        show_default=False,
        readable=False,
    ),
]
_KIND = Annotated[
    str,
    optional(
        "--for",
        "|".join(kinds()),
        "What to write. " + " ".join(f"{name}: {kind.summary}." for name, kind in kinds().items()),
        autocompletion=completes(list(kinds())),
    ),
]
_OUTPUT = Annotated[
    Path,
    output_option("PATH", "Output: a file x.zip for zip, a folder for the others."),
]


def export(**values: Any) -> None:
    """Write an artifact for ORT format, Triton, genai or as a zip."""
    kind = _chosen(find_kind(values["kind"]), values)
    said = Output(json=values["json"], quiet=values["quiet"])
    result = export_artifact(values["artifact"], kind, values["output"], force=values["force"])
    said.result(_document(kind, values["artifact"], result), list(_blocks(result)))


def _signature() -> inspect.Signature:
    """The common options, and those of every kind once."""
    own = {p.name: p for kind in kinds().values() for p in pass_parameters(kind)}
    required = inspect.Parameter.empty
    return inspect.Signature(
        [
            _parameter("artifact", _ARTIFACT, required),
            _parameter("kind", _KIND, required),
            _parameter("output", _OUTPUT, required),
            *own.values(),
            _parameter("force", Force, False),
            _parameter("json", Json, False),
            _parameter("quiet", Quiet, False),
        ]
    )


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


export.__signature__ = _signature()  # type: ignore[attr-defined]  # functions take it, typeshed does not list it


def _chosen(kind: type[Export], values: Mapping[str, Any]) -> Export:
    """The kind with its options.

    Raises:
        OptionError: An option is of another kind.
    """
    for other in kinds().values():
        for name, field in pass_fields(other).items():
            given = values[name] not in (None, default_value(field))
            if given and name not in pass_fields(kind):
                option = flags(name, field)[0]
                raise OptionError(
                    option,
                    f"{option} is an option of --for {other.name}",
                    fix=f"leave it out, or export --for {other.name}",
                )
    return build_pass(kind, values)


def _document(kind: Export, artifact: Path, result: Exported) -> dict[str, Any]:
    return {"artifact": artifact, "kind": kind.name, **result._asdict()}


def _blocks(result: Exported) -> Iterator[Block]:
    yield Facts({"output": str(result.output)})
    rows = [(file.name, f"{file.size_bytes:,}", file.sha256[:12]) for file in result.files]
    yield Table(("file", ">bytes", "sha256"), rows)
    yield from (f"note: {note}" for note in result.notes)
