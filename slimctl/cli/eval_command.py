"""``slimctl eval``: a metric on labeled data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    completes,
)
from slimctl.cli.output import Output
from slimctl.cli.table import Facts


def evaluate(
    model: Model,
    *,
    data: Data,
    metric: Annotated[
        str,
        typer.Option(
            "--metric",
            metavar="METRIC",
            help="top1, top5, agreement (with the model after --against) or module:function.",
            autocompletion=completes(["top1", "top5", "agreement"]),
        ),
    ] = "top1",
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="REFERENCE",
            help="The model to agree with, for --metric agreement.",
            show_default=False,
            readable=False,
        ),
    ] = None,
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
    from slimctl.graph.edit import interface
    from slimctl.graph.load import load_model
    from slimctl.graph.session import Products

    output = Output(json=json, quiet=quiet)
    open_metric(metric)  # a misspelled metric is said before the data are opened
    source = open_source(
        data,
        interface=interface(load_model(model)),
        samples=samples,
        batch_size=batch_size,
        preprocess=preprocess,
        seed=seed,
        skip_bad=skip_bad_samples,
    )
    score = accuracy(
        model,
        source,
        metric,
        reference=against,
        threads=threads,
        products=Products.NATIVE,
        progress=output.progress(),
    )
    output.result(
        {"model": model, "data": data, **vars(score)},
        [
            Facts(
                {
                    score.metric: f"{score.value:.4f}",
                    "samples": str(score.samples),
                    "better": "higher" if score.higher_is_better else "lower",
                }
            )
        ],
    )
