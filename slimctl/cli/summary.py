"""What a run says when it is done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slimctl.cli import words
from slimctl.cli.table import Block, Facts, Table, Warned
from slimctl.core.registry import BUILT_IN

if TYPE_CHECKING:
    from slimctl.core.contract import Pass
    from slimctl.pipeline.manifest import Manifest, StepFacts
    from slimctl.pipeline.run import StepRecord
    from slimctl.recipe.run import RunResult
    from slimctl.recipe.stored import Stored

_GROUPS = 8
"""Reasons listed without --verbose."""

_ROWS = 12
"""Rows of a step's own table without --verbose."""

_NAMES = 3
"""Nodes named per reason without --verbose."""


def run_document(result: RunResult) -> dict[str, Any]:
    """Everything about a run, for ``--json``."""
    return {
        "output": result.artifact.path if result.artifact else None,
        "files": result.artifact.files if result.artifact else [],
        "version": _version(result.stored),
        "passed": not result.failed_gates,
        "gates": result.gates,
        "comparison": result.comparison.to_dict() if result.comparison else None,
        "manifest": result.manifest.document(),
    }


def run_blocks(result: RunResult, *, everything: bool) -> Iterator[Block]:
    """The summary of a run; ``everything`` lists every node that was left alone."""
    manifest = result.manifest
    yield from _warnings(manifest)
    yield _steps(result.records, manifest)
    yield from _notes(manifest.steps)
    yield from manifest.run.notes
    yield from _tables(result.records, everything=everything)
    yield from _left_alone(manifest.steps, everything=everything)
    yield Facts(dict(_facts(result)))
    if result.gates:
        yield Table(
            ("gate", "verdict", "why"),
            [
                (gate.gate, "passed" if gate.passed else "FAILED", gate.message)
                for gate in result.gates
            ],
        )


def _warnings(manifest: Manifest) -> Iterator[Block]:
    if manifest.uncalibrated:
        yield Warned(
            "UNCALIBRATED: the calibration data are random, so the accuracy of this artifact is "
            "unknown; do not ship it"
        )
    for step in manifest.steps:
        yield from (Warned(f"{step.name}: {warning}") for warning in step.warnings)


def _steps(records: Sequence[StepRecord], manifest: Manifest) -> Table:
    rows = [
        (
            step.name,
            words.size(step.weight_bytes),
            words.decibel(step.sqnr_db),
            f"{record.seconds:.1f}",
            str(len(step.skipped)),
            words.counts(step.changed),
        )
        for step, record in zip(manifest.steps, records, strict=True)
    ]
    return Table(("step", ">weights", ">SQNR", ">seconds", ">left alone", "changed"), rows)


def _notes(steps: Sequence[StepFacts]) -> Iterator[Block]:
    for step in steps:
        for note in step.notes:
            yield f"{step.name}: {note}"


def _tables(records: Sequence[StepRecord], *, everything: bool) -> Iterator[Block]:
    for record in records:
        for table in record.report.tables:
            rows = table.rows if everything else table.rows[:_ROWS]
            yield Table(table.columns, list(rows), title=table.title)
            if len(rows) < len(table.rows):
                yield f"{len(table.rows) - len(rows)} more rows; --verbose or --json lists them"


def _left_alone(steps: Sequence[StepFacts], *, everything: bool) -> Iterator[Block]:
    groups = [
        (step.name, reason, nodes) for step in steps for reason, nodes in _by_reason(step).items()
    ]
    if not groups:
        return
    shown = groups if everything else groups[:_GROUPS]
    limit = max(len(nodes) for _, _, nodes in groups) if everything else _NAMES
    total = sum(len(nodes) for _, _, nodes in groups)
    yield Table(
        ("step", ">nodes", "reason", "which"),
        [
            (step, str(len(nodes)), reason, words.first_of(nodes, limit))
            for step, reason, nodes in shown
        ],
        title=f"Left alone: {total}",
    )
    if len(shown) < len(groups):
        yield f"{len(groups) - len(shown)} more reasons; --verbose or --json lists them"


def _by_reason(step: StepFacts) -> Mapping[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for skipped in step.skipped:
        reasons.setdefault(skipped.reason, []).append(skipped.node)
    return dict(sorted(reasons.items(), key=lambda item: -len(item[1])))


def _facts(result: RunResult) -> Iterator[tuple[str, str]]:
    manifest, results = result.manifest, result.manifest.results
    yield "target", f"{manifest.target}: {result.job.target.title}"
    for record in result.records:
        if options := _options(record.step):
            yield record.step.name, options
    if manifest.calibration is not None:
        yield "calibration", _calibration(manifest)
    if manifest.training is not None:
        yield "training", f"{manifest.training['samples']} samples of {manifest.training['source']}"
    before, after = manifest.source.size_bytes, manifest.model.size_bytes
    yield (
        "size",
        f"{words.size(before)} -> {words.size(after)} ({words.percent(results.size_ratio)})",
    )
    if results.sqnr_db is not None:
        yield (
            "SQNR",
            f"{words.decibel(results.sqnr_db)}, worst output over {results.sqnr_samples} samples",
        )
    if results.metric is not None:
        yield results.metric, f"{results.metric_original} -> {results.metric_result}"
    if result.stored is not None:
        yield "version", _version_in_words(result.stored)
    yield "output", _output(result)


def _options(step: Pass) -> str:
    """A step's options, resolved; lists that say nothing new and names of other steps left out."""
    shown = {
        name: value
        for name, value in step
        if not (isinstance(value, tuple) and value == type(step).model_fields[name].default)
        and name.replace("_", "-") not in BUILT_IN
    }
    return words.setting(shown)


def _calibration(manifest: Manifest) -> str:
    data = manifest.calibration or {}
    text = f"{data.get('samples')} samples of {data.get('source')}"
    if skipped := data.get("skipped_bad"):
        text += f", {skipped} with NaN or Inf left out"
    seconds = manifest.run.seconds.get("calibration")
    return text if seconds is None else f"{text}, {seconds:.1f} s"


def _version(stored: Stored | None) -> dict[str, Any] | None:
    if stored is None:
        return None
    return {
        "store": stored.store,
        "reference": stored.version.reference,
        "new": stored.new,
        "current": stored.version.current,
        "accepted": stored.version.entry.accepted,
        "written_bytes": stored.written_bytes,
    }


def _version_in_words(stored: Stored) -> str:
    reference, written = stored.version.reference, words.size(stored.written_bytes)
    if not stored.new:
        return f"{reference}, as before: the same bytes from the same recipe"
    verdict = "current" if stored.version.entry.accepted else "rejected by its gates"
    return f"{reference}, {verdict}; {written} were new to the ledger in {stored.store}"


def _output(result: RunResult) -> str:
    if result.artifact is None and result.stored is not None and result.stored.version.has_files:
        return f"in the ledger; slimctl checkout {result.stored.version.reference} takes it out"
    if result.artifact is None:
        return "not written"
    return ", ".join(str(file) for file in result.artifact.files)
