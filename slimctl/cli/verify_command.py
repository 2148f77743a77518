"""``slimctl verify``: two models on the same data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from slimctl.cli import words
from slimctl.cli.options import (
    BatchSize,
    Data,
    Json,
    Model,
    Preprocess,
    Quiet,
    Samples,
    Seed,
    SkipBadSamples,
    Threads,
)
from slimctl.cli.output import Output
from slimctl.cli.table import Block, Table, Warned
from slimctl.core.errors import GateFailedError

if TYPE_CHECKING:
    from slimctl.evaluate.compare import Comparison, OutputComparison

_BOUNDS = "Bounds (broken: exit code 1)"


class Bound(NamedTuple):
    """A bound on every output.

    Attributes:
        option: Its option.
        measure: Attribute of ``OutputComparison``.
        value: None when it is not set.
        is_minimum: Less is broken; otherwise more is.
    """

    option: str
    measure: str
    value: float | None
    is_minimum: bool = True


def verify(
    model: Model,
    *,
    against: Annotated[
        Path,
        typer.Option(
            "--against",
            metavar="REFERENCE",
            help="The original model.",
            show_default=False,
            readable=False,
        ),
    ],
    data: Data,
    samples: Samples = None,
    batch_size: BatchSize = None,
    preprocess: Preprocess = None,
    skip_bad_samples: SkipBadSamples = False,
    min_sqnr: Annotated[
        float | None,
        typer.Option(
            "--min-sqnr",
            metavar="DB",
            help="Least signal-to-quantization-noise ratio of every output.",
            rich_help_panel=_BOUNDS,
            show_default=False,
        ),
    ] = None,
    min_cosine: Annotated[
        float | None,
        typer.Option(
            "--min-cosine",
            metavar="NUMBER",
            help="Least cosine similarity of every output.",
            rich_help_panel=_BOUNDS,
            show_default=False,
        ),
    ] = None,
    min_agreement: Annotated[
        float | None,
        typer.Option(
            "--min-agreement",
            metavar="SHARE",
            help="Least share of samples with the same top-1 class, from 0 to 1.",
            rich_help_panel=_BOUNDS,
            show_default=False,
        ),
    ] = None,
    max_error: Annotated[
        float | None,
        typer.Option(
            "--max-error",
            metavar="NUMBER",
            help="Largest absolute difference of every output.",
            rich_help_panel=_BOUNDS,
            show_default=False,
        ),
    ] = None,
    divergence: Annotated[
        bool,
        typer.Option(
            "--divergence/--no-divergence",
            help="Look inside for the first tensor from which on the models differ.",
        ),
    ] = True,
    seed: Seed = 0,
    threads: Threads = 0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare a model with a reference on data."""
    from slimctl.data.sources import open_source
    from slimctl.evaluate.compare import compare_models
    from slimctl.graph.edit import interface
    from slimctl.graph.load import load_model

    output = Output(json=json, quiet=quiet)
    load_model(model)  # says what is wrong with the file; onnxruntime's messages are poorer
    source = open_source(
        data,
        interface=interface(load_model(against)),
        samples=samples,
        batch_size=batch_size,
        preprocess=preprocess,
        seed=seed,
        skip_bad=skip_bad_samples,
    )
    comparison = compare_models(
        against,
        model,
        source.batches(),
        find_divergence=divergence,
        threads=threads,
        progress=output.progress(),
    )
    bounds = (
        Bound("--min-sqnr", "sqnr_db", min_sqnr),
        Bound("--min-cosine", "cosine", min_cosine),
        Bound("--min-agreement", "top1_agreement", min_agreement),
        Bound("--max-error", "max_abs_error", max_error, is_minimum=False),
    )
    failures = [text for bound in bounds for text in broken(bound, comparison)]
    output.result(
        {
            "model": model,
            "reference": against,
            "data": data,
            "random_data": source.uncalibrated,
            "passed": not failures,
            "failures": failures,
            **comparison.to_dict(),
        },
        list(_blocks(comparison, random_data=source.uncalibrated)),
    )
    if failures:
        raise GateFailedError(
            "The model differs too much from its reference: " + "; ".join(failures),
            where=str(model),
            fix="look at the first tensor that differs, or loosen the bound on purpose",
        )


def broken(bound: Bound, comparison: Comparison) -> Iterator[str]:
    """Every output for which a bound does not hold, in words.

    An output that a measure does not apply to is passed over, but a bound that applies to no output
    at all is broken: it would protect nothing.
    """
    if bound.value is None:
        return
    found = [(out.name, getattr(out, bound.measure)) for out in comparison.outputs]
    if all(value is None for _, value in found):
        yield f"{bound.option} {bound.value:g} applies to no output"
    for name, value in found:
        if value is None:
            continue
        holds = value >= bound.value if bound.is_minimum else value <= bound.value
        if not holds:  # NaN breaks every bound
            yield f"output '{name}' has {value:.4g}, {bound.option} is {bound.value:g}"


def _blocks(comparison: Comparison, *, random_data: bool) -> Iterator[Block]:
    yield Table(
        ("output", ">SQNR", ">cosine", ">max error", ">same top-1", ">equal", ">non-finite"),
        [_row(out) for out in comparison.outputs],
        title=f"{comparison.samples} samples",
    )
    for skipped in comparison.skipped:
        yield f"output '{skipped.node}' was not compared: {skipped.reason}"
    yield from _divergence(comparison)
    if random_data:
        yield Warned("the data are random, so these numbers say little about real inputs")


def _row(out: OutputComparison) -> tuple[str, ...]:
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
