"""``slimctl eval``: a metric on labeled data, with what chance does to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    complete_metric,
    optional,
)
from slimctl.cli.output import Output
from slimctl.cli.table import Block, Facts, Table

if TYPE_CHECKING:
    from slimctl.evaluate.accuracy import Score
    from slimctl.evaluate.significance import Difference, Interval


@dataclass(frozen=True)
class Evaluation:
    """All that one run of the command found.

    Attributes:
        model: As the user gave it.
        data: As the user gave it.
        against: The other model, None without one.
        score: Of the model.
        interval: Of that score; None when there is one record only.
        difference: Against the other model; None without one, or when the metric itself compares.
    """

    model: Path
    data: str
    against: Path | None
    score: Score
    interval: Interval | None
    difference: Difference | None


def list_metrics(wanted: bool) -> None:
    """Prints the metrics with their options, and leaves."""
    if not wanted:
        return
    from slimctl.evaluate.metrics import metric_kinds, options_of

    rows = [
        (name, " ".join(options_of(kind)), kind.summary) for name, kind in metric_kinds().items()
    ]
    rows.append(("module:function", "", "The user's own function of outputs and labels"))
    Output().result({}, [Table(("metric", "options", "what it is"), rows)])
    raise typer.Exit


def evaluate(
    model: Model,
    *,
    data: Data,
    metric: Annotated[
        str,
        typer.Option(
            "--metric",
            metavar="METRIC",
            help="A name from --list, name:OUTPUT?option=value&option=value, or module:function.",
            autocompletion=complete_metric,
        ),
    ] = "top1",
    against: Annotated[
        Path | None,
        optional(
            "--against",
            "REFERENCE",
            "A model to compare with on the same data; the one to agree with for metrics "
            "such as agreement.",
        ),
    ] = None,
    listed: Annotated[
        bool,
        typer.Option(
            "--list",
            help="List the metrics and their options, and leave.",
            callback=list_metrics,
            is_eager=True,
            show_default=False,
        ),
    ] = False,
    samples: Samples = None,
    batch_size: BatchSize = None,
    preprocess: Preprocess = None,
    skip_bad_samples: SkipBadSamples = False,
    seed: Seed = 0,
    threads: Threads = 0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a metric on labeled data."""
    from slimctl.data.sources import open_source
    from slimctl.evaluate.accuracy import accuracy
    from slimctl.evaluate.metrics import open_metric
    from slimctl.evaluate.significance import interval, paired
    from slimctl.graph.edit import interface
    from slimctl.graph.load import load_model
    from slimctl.graph.session import Products

    del listed
    output = Output(json=json, quiet=quiet)
    needs = open_metric(metric).needs  # a misspelled metric is said before the data are opened
    source = open_source(
        data,
        interface=interface(load_model(model)),
        samples=samples,
        batch_size=batch_size,
        preprocess=preprocess,
        seed=seed,
        skip_bad=skip_bad_samples,
    )

    def measure(path: Path) -> Score:
        return accuracy(
            path,
            source,
            metric,
            reference=against,
            threads=threads,
            products=Products.NATIVE,
            progress=output.progress(),
        )

    score = measure(model)
    compared = against is not None and needs != "reference"
    difference = paired(measure(against), score, seed=seed) if against and compared else None
    found = Evaluation(model, data, against, score, interval(score, seed=seed), difference)
    output.result(to_document(found), list(blocks(found)))


def to_document(found: Evaluation) -> dict[str, Any]:
    """The evaluation as JSON types."""
    score, difference = found.score, found.difference
    return {
        "model": found.model,
        "data": found.data,
        "against": found.against,
        "metric": score.metric,
        "value": score.value,
        "samples": score.samples,
        "higher_is_better": score.higher_is_better,
        "interval": None if found.interval is None else asdict(found.interval),
        "difference": None
        if difference is None
        else {**asdict(difference), "verdict": difference.verdict},
    }


def blocks(found: Evaluation) -> Iterator[Block]:
    """The evaluation for people."""
    score = found.score
    yield Facts(
        {
            score.metric: f"{score.value:.4f}",
            "95 % interval": _interval(found),
            "samples": str(score.samples),
            "better": "higher" if score.higher_is_better else "lower",
        }
    )
    if found.difference is not None:
        yield Facts(dict(_difference(found.difference)), title=f"Compared with '{found.against}'")


def _interval(found: Evaluation) -> str:
    interval, measured = found.interval, found.score.measured
    if interval is None:
        by_batch = measured is not None and measured.metric.unit == "batches"
        return (
            "unknown, there is one batch only" if by_batch else "unknown, there is one sample only"
        )
    by = "" if interval.unit == "samples" else f", over {interval.unit}"
    return f"{interval.low:.4f} to {interval.high:.4f}{by}"


def _difference(difference: Difference) -> Iterator[tuple[str, str]]:
    yield "reference", f"{difference.reference:.4f}"
    yield "drop", f"{difference.drop:.4f}"
    if difference.low is not None and difference.high is not None:
        yield "95 % interval", f"{difference.low:.4f} to {difference.high:.4f}"
    if difference.p_value is not None:
        yield "p-value", f"{difference.p_value:.3g} ({difference.test})"
    yield "the difference is", difference.verdict
