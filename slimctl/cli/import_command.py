"""``slimctl import``: from a torch network to an ONNX model, compared with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimctl.cli.options import Force, Json, Quiet, Seed, optional, output_option
from slimctl.cli.output import Output
from slimctl.cli.table import Block, Facts, Table
from slimctl.cli.words import number, size
from slimctl.core.errors import GateFailedError, OptionError

if TYPE_CHECKING:
    from slimctl.graph.edit import Port
    from slimctl.training.import_parity import Check
    from slimctl.training.importing import Imported, Request

_OPSET = 18  # slimctl.training.import_export.DEFAULT_OPSET, which cannot be read without torch
_TOLERANCE = 1e-4  # slimctl.training.importing.DEFAULT_TOLERANCE, likewise
_NOTES = 5


def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="module:function that gives a torch.nn.Module (or names one), a .pt2 exported "
            "program, a TorchScript file or a pickled module.",
            show_default=False,
        ),
    ],
    *,
    output: Annotated[
        Path,
        output_option("PATH", "Output: a file x.onnx."),
    ],
    inputs: Annotated[
        list[str],
        optional(
            "--input",
            "NAME:SHAPE[:DTYPE]",
            "An input, such as x:1x3x224x224 or tokens:NxT:int64, once for each. A letter is "
            "a dynamic axis, H=224 one with the size to export with.",
        ),
    ],
    weights: Annotated[
        Path | None,
        optional(
            "--weights",
            "FILE",
            "State dict for the network of module:function; every name must fit.",
        ),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="Open a SOURCE file that can run code: all but module:function do."
        ),
    ] = False,
    output_names: Annotated[
        list[str] | None,
        typer.Option(
            "--output-name",
            metavar="NAME",
            help="Name of an output, once for each.",
            show_default="the keys of a dictionary, else output",
        ),
    ] = None,
    opset: Annotated[
        int, typer.Option("--opset", metavar="N", min=7, help="Version of the operator set.")
    ] = _OPSET,
    dynamo: Annotated[
        bool | None,
        typer.Option(
            "--dynamo/--no-dynamo",
            help="Export with torch.export, or by tracing.",
            show_default="torch.export where onnxscript is installed",
        ),
    ] = None,
    input_data: Annotated[
        str | None,
        optional(
            "--input-data",
            "SOURCE",
            "Inputs to compare on besides random ones: an npz file, or what --data takes "
            "elsewhere.",
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance",
            metavar="X",
            min=0.0,
            help="Largest difference from the network, as a share of the output's largest value.",
        ),
    ] = _TOLERANCE,
    seed: Seed = 0,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make an ONNX model from a torch network, compared with it."""
    from slimctl.training import require_torch

    require_torch("slimctl import")
    from slimctl.training.import_inputs import parse_inputs
    from slimctl.training.importing import Request, import_network

    if not math.isfinite(tolerance):
        raise OptionError("--tolerance", f"{tolerance} is no tolerance", fix="use for example 1e-4")
    request = Request(
        source=source,
        inputs=parse_inputs(inputs),
        weights=weights,
        trust=trust,
        output_names=output_names or (),
        opset=opset,
        dynamo=dynamo,
        tolerance=tolerance,
        seed=seed,
        data=input_data,
    )
    found = import_network(request, output, force=force)
    said = Output(json=json, quiet=quiet)
    said.result(to_document(request, output, found), list(blocks(output, found)))
    if not found.passed:
        raise _failed(found, tolerance)


def to_document(request: Request, output: Path, found: Imported) -> dict[str, Any]:
    """The import as JSON types."""
    return {
        "source": request.source,
        "output": output if found.passed else None,
        "passed": found.passed,
        "kind": found.kind,
        "exporter": found.exporter,
        "opset": request.opset,
        "inputs": [_port(port) for port in found.inputs],
        "outputs": [_port(port) for port in found.outputs],
        "tolerance": request.tolerance,
        "largest_difference": max(check.largest() for check in found.checks),
        "checks": [check._asdict() for check in found.checks],
        "files": found.files,
        "size_bytes": found.size_bytes,
        "parameters": found.parameters,
        "named_weights": found.named,
        "renamed_weights": found.renamed,
        "notes": found.notes,
    }


def _port(port: Port) -> dict[str, Any]:
    return {
        "name": port.name,
        "dtype": None if port.dtype is None else port.dtype.name,
        "shape": port.shape,
    }


def blocks(output: Path, found: Imported) -> Iterator[Block]:
    """The import for people."""
    yield Facts(
        {
            "output": f"{output} ({size(found.size_bytes)})" if found.passed else "not written",
            "made from": f"{found.kind}, by {found.exporter}",
            "parameters": number(found.parameters),
            "weights": f"{found.named} named as in the state dict, {found.renamed} otherwise",
        }
    )
    yield _outputs(found)
    rows = [
        (check.inputs, _sizes(check), check.problem or f"{check.largest():.1e}")
        for check in found.checks
    ]
    yield Table(("inputs", "sizes", "largest difference"), rows, title="Compared with the network")
    yield from (f"note: {note}" for note in found.notes[:_NOTES])
    if len(found.notes) > _NOTES:
        yield f"note: {len(found.notes) - _NOTES} more, see --json"


def _outputs(found: Imported) -> Table:
    compared = [check.differences for check in found.checks if check.differences is not None]
    rows = [
        (
            port.name,
            "?" if port.dtype is None else port.dtype.name.lower(),
            _shape(port),
            f"{max(each[place] for each in compared):.1e}" if compared else "-",
        )
        for place, port in enumerate(found.outputs)
    ]
    return Table(("output", "type", "shape", ">largest difference"), rows)


def _shape(port: Port) -> str:
    from slimctl.data.inputs import shape_text

    return shape_text(port.shape)


def _sizes(check: Check) -> str:
    return ", ".join(f"{dim}={count}" for dim, count in check.sizes.items()) or "-"


def _failed(found: Imported, tolerance: float) -> GateFailedError:
    """The exported graph is not the network."""
    worst = max(found.checks, key=lambda check: check.largest())
    where = ", ".join(text for text in (worst.inputs, _sizes(worst)) if text != "-")
    what = worst.problem or f"it differs by {worst.largest():.1e} of the largest output"
    fixes = ["export with the other of --dynamo and --no-dynamo"]
    if worst.problem:
        fixes.append("write a number for an axis that cannot be dynamic")
    else:
        fixes.append(f"raise --tolerance above {tolerance:g} if that is good enough")
    return GateFailedError(
        f"The exported graph does not compute what the network does: {what}",
        where=where,
        fix=", or ".join(fixes),
    )
