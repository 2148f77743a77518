"""``slimctl bench``: latency and memory, two models in turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slimctl.cli import words
from slimctl.cli.options import BatchSize, Json, Model, Preprocess, Quiet, Seed, Threads
from slimctl.cli.output import Output
from slimctl.cli.table import Block, Table

if TYPE_CHECKING:
    from slimctl.evaluate.benchmark import BenchResult, Ratio


def bench(
    model: Model,
    *,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="OTHER",
            help="A second model, measured in turns with the first on the same inputs.",
            show_default=False,
            readable=False,
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="SOURCE",
            help="Where the inputs come from: the first batch of a data source.",
            rich_help_panel="Data",
        ),
    ] = "random",
    batch_size: BatchSize = None,
    preprocess: Preprocess = None,
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="N", min=1, help="Blocks of runs per model.")
    ] = 30,
    warmup: Annotated[
        int,
        typer.Option(
            "--warmup",
            metavar="N",
            min=0,
            help="Largest number of runs before measuring; fewer when the latency settles earlier.",
        ),
    ] = 50,
    max_seconds: Annotated[
        float,
        typer.Option(
            "--max-seconds", metavar="S", min=0.1, help="No round begins after this time."
        ),
    ] = 30.0,
    memory: Annotated[
        bool,
        typer.Option("--memory/--no-memory", help="Measure peak memory in a process of its own."),
    ] = True,
    seed: Seed = 0,
    threads: Threads = 0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure latency and memory in onnxruntime."""
    from slimctl.data.sources import open_source
    from slimctl.evaluate.benchmark import benchmark, speedup
    from slimctl.graph.edit import interface
    from slimctl.graph.load import load_model

    output = Output(json=json, quiet=quiet)
    models = [model] if against is None else [model, against]
    graphs = [load_model(path) for path in models]
    source = open_source(
        data,
        interface=interface(graphs[0]),
        batch_size=batch_size,
        preprocess=preprocess,
        seed=seed,
    )
    del graphs  # onnxruntime reads the files itself
    batch = next(source.batches())
    results = benchmark(
        models,
        batch.feeds,
        threads=threads,
        rounds=rounds,
        warmup=warmup,
        max_seconds=max_seconds,
        memory=memory,
        progress=output.progress(),
    )
    ratio = None if against is None else speedup(results[1], results[0])
    output.result(
        {
            "batch_size": batch.size,
            "threads": threads,
            "models": [
                {"model": path, **result.to_dict(), "samples_per_second": _rate(result, batch.size)}
                for path, result in zip(models, results, strict=True)
            ],
            "speedup": ratio,
        },
        list(_blocks(models, results, batch.size, ratio)),
    )


def _rate(result: BenchResult, batch_size: int) -> float:
    return batch_size / result.mean * 1e3


def _blocks(
    models: Sequence[Path], results: Sequence[BenchResult], batch_size: int, ratio: Ratio | None
) -> Iterator[Block]:
    yield Table(
        ("model", ">P50", ">P90", ">P99", ">mean", ">CPU", ">load", ">samples/s", ">peak memory"),
        [
            (
                str(path),
                *(
                    words.milliseconds(value)
                    for value in (
                        *(result.p50, result.p90, result.p99),
                        *(result.mean, result.cpu, result.load),
                    )
                ),
                f"{_rate(result, batch_size):.4g}",
                "-" if result.peak_memory is None else words.size(result.peak_memory),
            )
            for path, result in zip(models, results, strict=True)
        ],
        title=f"Milliseconds per run of {batch_size} "
        f"sample{'' if batch_size == 1 else 's'}, {results[0].runs} runs",
    )
    if ratio is not None:
        yield (
            f"'{models[0]}' is {ratio.value:.2f}x as fast as '{models[1]}' "
            f"(95 % interval {ratio.low:.2f} to {ratio.high:.2f})"
        )
