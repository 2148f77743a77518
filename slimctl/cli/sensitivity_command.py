"""``slimctl sensitivity``: what each layer costs at each precision or sparsity."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from slimctl.cli.options import (
    BatchSize,
    Calibration,
    Data,
    Json,
    Model,
    Preprocess,
    Quiet,
    Samples,
    Seed,
    SkipBadSamples,
    TargetName,
    Threads,
    complete_metric,
    optional,
)
from slimctl.cli.output import Output
from slimctl.cli.table import Block, Facts, Table

if TYPE_CHECKING:
    from slimctl.recipe.schema import DataSpec
    from slimctl.sensitivity.run import Scan
    from slimctl.sensitivity.scan import Finding

_TOP = 20
"""Rows of a table when nothing else is asked for."""


def sensitivity(
    model: Model,
    *,
    data: Data,
    calibration: Calibration = None,
    options: Annotated[
        str,
        typer.Option(
            "--options",
            metavar="LIST",
            help="What is tried on each layer, separated by commas: int8, int16, int4 (weights "
            "only), fp16, sparse:0.5 (any share).",
        ),
    ] = "int8",
    converse: Annotated[
        bool,
        typer.Option(
            "--converse", help="Also change everything but the layer: what leaving it alone gains."
        ),
    ] = False,
    by: Annotated[
        Literal["layer", "type", "scope"],
        typer.Option(
            "--by",
            help="What is changed together: single layers, all of one operator, or all in one "
            "scope of names (up to the last slash or dot).",
        ),
    ] = "layer",
    metric: Annotated[
        str | None,
        optional(
            "--metric",
            "METRIC",
            "Also measure what this loses, on all samples: a name from 'slimctl eval "
            "--list', or module:function.",
            autocompletion=complete_metric,
        ),
    ] = None,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast",
            help="Estimate on one sample, by adding to the layer's output the error that it makes "
            "by itself.",
        ),
    ] = False,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance",
            metavar="DB",
            min=0.0,
            help="Take samples until the 95 % interval of the SQNR reaches at most so far to "
            "either side; 0 takes all.",
        ),
    ] = 1.5,
    include: Annotated[
        list[str] | None,
        optional(
            "--include",
            "PATTERN",
            "Look at matching nodes only: name glob, op:TYPE or re:REGEX; repeatable.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        optional(
            "--exclude", "PATTERN", "Do not look at matching nodes: as --include; repeatable."
        ),
    ] = None,
    executor: Annotated[
        str,
        typer.Option(
            "--executor",
            metavar="local|processes:N|dask:ADDRESS",
            help="Where probes run. A Dask cluster must see the same files (extra 'dask').",
        ),
    ] = "local",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--no-resume",
            help="Use what an earlier scan of the same model, data and options found.",
        ),
    ] = True,
    rows: Annotated[
        int, typer.Option("--top", metavar="N", min=0, help="Rows of the table; 0 shows all.")
    ] = _TOP,
    csv_file: Annotated[
        Path | None,
        optional("--csv", "FILE", "Write all findings as CSV."),
    ] = None,
    report: Annotated[
        Path | None,
        optional("--report", "FILE", "Write a page with a plot."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    target: TargetName = "cpu",
    samples: Samples = None,
    batch_size: BatchSize = None,
    preprocess: Preprocess = None,
    skip_bad_samples: SkipBadSamples = False,
    seed: Seed = 0,
    threads: Threads = 0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rank layers by what they cost at each precision or sparsity."""
    from slimctl.core.files import check_output, write_atomic
    from slimctl.recipe.resolve import located_target
    from slimctl.recipe.schema import DataSpec
    from slimctl.sensitivity.executors import open_executor
    from slimctl.sensitivity.run import scan
    from slimctl.sensitivity.setup import Setup

    output = Output(json=json, quiet=quiet)
    for path in (csv_file, report):
        if path is not None:
            check_output(path, force=force)

    def spec(source: str) -> DataSpec:
        return DataSpec(
            source=source,
            samples=samples,
            batch_size=batch_size,
            preprocess=preprocess,
            skip_bad_samples=skip_bad_samples,
        )

    setup = Setup(
        model=model,
        data=spec(data),
        calibration=None if calibration is None else spec(calibration),
        changes=_names(options),
        directions=("alone", "except") if converse else ("alone",),
        grouping=by,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        target=located_target(target, Path.cwd()),
        metric=metric,
        fast=fast,
        tolerance_db=tolerance,
        seed=seed,
        threads=threads,
    )
    found = scan(setup, executor=open_executor(executor), resume=resume, progress=output.progress())
    if csv_file is not None:
        write_atomic(csv_file, to_csv(found.findings).encode())
        output.note(f"findings: {csv_file}")
    if report is not None:
        from slimctl.report.sensitivity import sensitivity_page

        write_atomic(report, sensitivity_page(found.to_dict()).encode())
        output.note(f"report: {report}")
    output.result(found.to_dict(), list(blocks(found, rows)))


def _names(options: str) -> tuple[str, ...]:
    """The changes of a list.

    Raises:
        OptionError: One is unknown, or there is none.
    """
    from slimctl.core.errors import OptionError
    from slimctl.passes._changes import check_change

    names = [name.strip() for name in options.split(",") if name.strip()]
    if not names:
        raise OptionError("--options", "Nothing is to be tried", fix="for example --options int8")
    return tuple(dict.fromkeys(check_change(name) for name in names))


_COLUMNS = (
    "change", "direction", "group", "op_types", "parameters", "macs", "sqnr_db", "low_db",
    "high_db", "samples", "metric_drop", "metric_low", "metric_high",
)  # fmt: skip


def to_csv(findings: Sequence[Finding]) -> str:
    """All findings, one a line, as ranked."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for found in findings:
        told = found.to_dict() | {"op_types": " ".join(found.op_types)}
        loss = found.metric
        told |= {
            "metric_drop": None if loss is None else loss.drop,
            "metric_low": None if loss is None else loss.low,
            "metric_high": None if loss is None else loss.high,
        }
        writer.writerow([told[column] for column in _COLUMNS])
    return text.getvalue()


def blocks(found: Scan, rows: int) -> Iterator[Block]:
    """The scan for people."""
    looked = [finding.samples for finding in found.findings]
    facts = {
        "probes": f"{len(found.findings)}"
        + (f", {found.kept} known from an earlier scan" if found.kept else ""),
        "samples": f"{min(looked)} to {max(looked)} of {found.samples}",
    }
    yield Facts(facts)
    for direction, title in (
        ("alone", "Only this changed: the least SQNR first"),
        ("except", "All changed but this: what helps most first"),
    ):
        chosen = [finding for finding in found.findings if finding.direction == direction]
        if chosen:
            yield _table(chosen, rows, title)
    for change, items in found.skipped.items():
        if items:
            reasons = sorted({item.reason for item in items})
            more = f", and {len(reasons) - 1} other reasons" if len(reasons) > 1 else ""
            yield f"{change}: {len(items)} nodes cannot be changed ({reasons[0]}{more}; --json)"


def _table(findings: Sequence[Finding], rows: int, title: str) -> Table:
    shown = findings[: rows or None]
    more = len(findings) - len(shown)
    measured = any(finding.metric is not None for finding in findings)
    columns = ["group", "operator", "change", ">SQNR dB", ">95 %", ">weights", ">MACs"]
    return Table(
        [*columns, *([">metric drop", ">95 %"] if measured else [])],
        [_row(finding, measured=measured) for finding in shown],
        f"{title}{f' ({more} more with --top 0)' if more else ''}",
    )


def _row(finding: Finding, *, measured: bool) -> list[str]:
    known = finding.low_db is not None and finding.high_db is not None
    row = [
        finding.group,
        " ".join(finding.op_types),
        finding.change,
        f"{finding.sqnr_db:.1f}",
        f"{finding.low_db:.1f} to {finding.high_db:.1f}" if known else "estimate",
        f"{finding.parameters:,}",
        "" if finding.macs is None else f"{finding.macs:,}",
    ]
    if measured and finding.metric is not None:
        loss = finding.metric
        row.append(f"{loss.drop:.4f}")
        row.append("" if loss.low is None else f"{loss.low:.4f} to {loss.high:.4f}")
    return row
