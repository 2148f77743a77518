"""What ``slimctl verify`` says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimctl.cli import words
from slimctl.cli.table import Block, Table, Warned

if TYPE_CHECKING:
    from slimctl.evaluate.compare import Comparison, OutputComparison
    from slimctl.evaluate.drops import LayerDrop, MetricDrops
    from slimctl.evaluate.layers import LayerError
    from slimctl.evaluate.verification import Judgment, Verification

_SHOWN = 10
"""Rows of a table without ``--verbose``."""


@dataclass(frozen=True)
class Summary:
    """All that one run of the command found.

    Attributes:
        model: As the user gave it.
        sha256: Hash of the model's file.
        reference: The original, None without one.
        data: As the user gave it, None without data.
        random_data: The inputs are made up.
        integrity: What the manifest says about the files.
        comparison: Outputs against the reference's.
        verification: What was found node by node.
        drops: What the metric loses; None where it was not asked for.
        failures: Bounds that do not hold, in words.
    """

    model: Path
    sha256: str
    reference: Path | None
    data: str | None
    random_data: bool
    integrity: str
    comparison: Comparison | None
    verification: Verification | None
    drops: MetricDrops | None
    failures: tuple[str, ...]


def to_document(summary: Summary) -> dict[str, Any]:
    """The summary as JSON types."""
    from slimctl.evaluate.verification import to_dict

    found, comparison = summary.verification, summary.comparison
    return {
        "model": summary.model,
        "sha256": summary.sha256,
        "reference": summary.reference,
        "data": summary.data,
        "random_data": summary.random_data,
        "integrity": summary.integrity,
        "passed": not summary.failures,
        "failures": list(summary.failures),
        **({} if comparison is None else comparison.to_dict()),
        "metric": None if summary.drops is None else summary.drops.to_dict(),
        "nodes": None if found is None else to_dict(found),
    }


def blocks(summary: Summary, *, verbose: bool) -> Iterator[Block]:
    """The summary for people."""
    yield summary.integrity
    if summary.comparison is not None:
        yield from _outputs(summary.comparison, summary.drops)
    if summary.drops is not None:
        yield from _metric(summary.drops, verbose=verbose)
    if summary.verification is not None:
        yield from _nodes(summary.verification, verbose=verbose)
    if summary.data is None:
        yield Warned("no data were given: the runtimes were compared on random inputs")
    elif summary.random_data:
        yield Warned("the data are random, so these numbers say little about real inputs")


def _outputs(comparison: Comparison, drops: MetricDrops | None) -> Iterator[Block]:
    header = ("output", ">SQNR", ">cosine", ">max error", ">same top-1", ">equal", ">non-finite")
    yield Table(
        header if drops is None else (*header, f">drop of {drops.metric}"),
        [(*_output_row(out), *_lost(out.name, drops)) for out in comparison.outputs],
        title=f"Outputs against the reference, {comparison.samples} samples",
    )
    for skipped in comparison.skipped:
        yield f"output '{skipped.node}' was not compared: {skipped.reason}"
    yield from _divergence(comparison)


def _output_row(out: OutputComparison) -> tuple[str, ...]:
    def digits(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        out.name,
        words.decibel(out.sqnr_db),
        digits(out.cosine, ".6f"),
        digits(out.max_abs_error, ".4g"),
        words.percent(out.top1_agreement),
        words.percent(out.equal),
        str(out.non_finite),
    )


def _lost(output: str, drops: MetricDrops | None) -> tuple[str, ...]:
    """The last cell of an output's row, where there is such a column."""
    if drops is None:
        return ()
    drop = drops.at(output)
    return ("-" if drop is None else f"{drop.drop:+.4f}",)


def _metric(drops: MetricDrops, *, verbose: bool) -> Iterator[Block]:
    for drop in drops.outputs:
        place = f" at output '{drop.output}'" if len(drops.outputs) > 1 else ""
        yield f"{drops.metric}{place}: {drop.reference:.4f} -> {drop.model:.4f}"
    if not drops.layers:
        return
    shown = drops.layers if verbose else drops.layers[:_SHOWN]
    yield Table(
        ("layer", "operator", ">SQNR alone", "output", f">{drops.metric}", ">drop"),
        [_metric_row(layer) for layer in shown],
        title=f"{drops.metric} with one layer quantized, the {len(drops.layers)} of the lowest "
        "SQNR, those that cost most first",
    )


def _metric_row(layer: LayerDrop) -> tuple[str, ...]:
    worst = layer.worst
    return (
        layer.node,
        layer.op_type,
        words.decibel(layer.own_db),
        worst.output or "-",
        f"{worst.model:.4f}",
        f"{worst.drop:+.4f}",
    )


def _divergence(comparison: Comparison) -> Iterator[Block]:
    found = comparison.divergence
    if found is None:
        return
    if found.first is None:
        yield f"none of {found.tensors} common tensors falls below {found.bound_db:g} dB for good"
    else:
        yield f"the models differ from {_tensor(found.first)} on, below {found.bound_db:g} dB"
    if found.largest_drop is not None and (found.largest_drop.drop_db or 0) > 0:
        drop = words.decibel(found.largest_drop.drop_db)
        yield f"the largest fall, {drop}, is at {_tensor(found.largest_drop)}"
    if found.optimizer is not None:
        yield Warned(found.optimizer)


def _tensor(difference: Any) -> str:
    return (
        f"tensor '{difference.tensor}' ({difference.op_type} '{difference.node}', "
        f"{words.decibel(difference.sqnr_db)})"
    )


def _nodes(found: Verification, *, verbose: bool) -> Iterator[Block]:
    yield Table(
        ("provider", "optimizations", ">codes", ">identical", ">steps apart", ">outputs"),
        [
            (
                one.provider.removesuffix("ExecutionProvider"),
                one.level.value,
                f"{one.codes:,}",
                f"{one.identical:.4%}",
                str(one.steps),
                words.decibel(min(one.outputs.values(), default=None)),
            )
            for one in found.replays
        ],
        title=f"onnxruntime against the built-in runtime, {found.samples} runs, "
        "each node on the same inputs",
    )
    yield from _parting(found)
    yield from _judgments(found, verbose=verbose)
    yield from _layers(found.layers, verbose=verbose)


def _parting(found: Verification) -> Iterator[Block]:
    if found.faults:
        nodes = list(dict.fromkeys(fault.node for fault in found.faults))
        first = found.faults[0]
        yield Warned(f"the model is wrong at node '{first.node}': {first.reason}")
        if len(nodes) > 1:
            yield f"{len(nodes)} nodes are wrong"
    parting = found.parting
    if parting is None:
        yield "the runtimes agree at every node, but for rounding"
    else:
        yield Warned(
            f"the runtimes part at node '{parting.node}' ({parting.verdict}): {parting.reason}"
        )
        if parting.verdict == "saturation":
            yield "such processors run what `slimctl quantize --target cpu-avx2` makes exactly"


def _judgments(found: Verification, *, verbose: bool) -> Iterator[Block]:
    ranked = sorted(found.judgments, key=_rank)
    if not ranked:
        return
    shown = ranked if verbose else ranked[:_SHOWN]
    yield Table(
        ("node", "operator", "verdict", "why"),
        [(one.node, one.op_type, one.verdict.value, _why(one)) for one in shown],
        title=f"Verdicts: {len(ranked)} nodes and levels",
    )
    if len(shown) < len(ranked):
        yield f"{len(ranked) - len(shown)} more with -v"


def _rank(one: Judgment) -> tuple[bool, float]:
    from slimctl.evaluate.verification import Verdict

    return one.verdict is not Verdict.MODEL, -one.steps


def _why(one: Judgment) -> str:
    return one.reason if one.level is None else f"{one.level.value}: {one.reason}"


def _layers(layers: tuple[LayerError, ...], *, verbose: bool) -> Iterator[Block]:
    if not layers:
        return
    ranked = sorted(layers, key=lambda layer: -layer.rms_steps)
    shown = ranked if verbose else ranked[:_SHOWN]
    yield Table(
        ("layer", "operator", ">alone", ">best", ">in all", ">cosine", ">mean", ">rms", ">clipped"),
        [_layer_row(layer) for layer in shown],
        title=f"{len(layers)} layers against the reference, worst first: SQNR alone, at best and "
        "in the whole model; differences in quantization steps",
    )


def _layer_row(layer: LayerError) -> tuple[str, ...]:
    return (
        layer.node,
        layer.op_type,
        words.decibel(layer.own_db),
        words.decibel(layer.best_db),
        words.decibel(layer.total_db),
        f"{layer.cosine:.5f}",
        f"{layer.mean_steps:+.3f}",
        f"{layer.rms_steps:.3f}",
        words.percent(layer.clipped),
    )
