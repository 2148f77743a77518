"""``slimctl bench``: latency, memory, bounds of operators and behavior under load."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from slimctl.cli.options import BatchSize, Json, Model, Preprocess, Quiet, Seed, Threads, optional
from slimctl.cli.output import Output
from slimctl.core.errors import GateFailedError, OptionError

if TYPE_CHECKING:
    from slimctl.cli.bench_summary import Found
    from slimctl.core.contract import Feeds, Progress
    from slimctl.evaluate.contrast import KindChange
    from slimctl.evaluate.machine import Machine
    from slimctl.evaluate.profile import Profile
    from slimctl.evaluate.roofline import Placed
    from slimctl.evaluate.study import LoadStudy, Questions
    from slimctl.graph.edit import Port

_LOAD = "Load"
_Number = TypeVar("_Number", int, float)


def bench(
    model: Model,
    *,
    against: Annotated[
        Path | None,
        optional(
            "--against",
            "OTHER",
            "A second model, measured in turns with the first on the same inputs.",
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
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Time of each operator, from onnxruntime's profiler. With --against of both "
            "models, with what --roofline adds, and what the difference comes from.",
        ),
    ] = False,
    roofline: Annotated[
        bool,
        typer.Option(
            "--roofline",
            help="Profile, measure this machine's peaks, and say what bounds each operator and "
            "what to do next.",
        ),
    ] = False,
    batch_sizes: Annotated[
        str | None,
        optional(
            "--batch-sizes",
            "LIST",
            "Latency and throughput at these batch sizes, such as 1,2,4,8.",
            panel=_LOAD,
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        optional(
            "--concurrency",
            "LIST",
            "Closed loop: latency with so many clients at the same time on one session.",
            panel=_LOAD,
        ),
    ] = None,
    rate: Annotated[
        str | None,
        optional(
            "--rate",
            "LIST",
            "Open loop: latency at these requests per second, simulated from measured times "
            "with dynamic batching.",
            panel=_LOAD,
        ),
    ] = None,
    p99_ms: Annotated[
        float | None,
        optional(
            "--p99-ms",
            "X",
            "Suggest queue delay and batch that keep P99 below X at the largest --rate.",
            panel=_LOAD,
            min=0.001,
        ),
    ] = None,
    serving: Annotated[
        Path | None,
        optional(
            "--serving",
            "FILE",
            "Write the suggestion as JSON; exit code 1 when no setting meets the bound.",
            panel=_LOAD,
        ),
    ] = None,
    report: Annotated[
        Path | None,
        optional("--report", "FILE", "Write an HTML page with latency distributions and bounds."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing report or serving file.")
    ] = False,
    seed: Seed = 0,
    threads: Threads = 0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure latency, memory, bounds and load."""
    from slimctl.cli.bench_summary import Found, blocks, document
    from slimctl.core.files import check_output
    from slimctl.data.sources import open_source
    from slimctl.evaluate.benchmark import benchmark, judge_speedup
    from slimctl.evaluate.load import SECONDS
    from slimctl.evaluate.study import Questions
    from slimctl.graph.edit import interface
    from slimctl.graph.load import load_model

    output = Output(json=json, quiet=quiet)
    questions = Questions(
        batch_sizes=number_list("--batch-sizes", batch_sizes, int),
        clients=number_list("--concurrency", concurrency, int),
        rates=number_list("--rate", rate, float),
        p99=None if p99_ms is None else p99_ms / 1e3,
        max_seconds=max_seconds,
        client_seconds=min(SECONDS, max_seconds),
        seed=seed,
    )
    _check_needs(questions, serving)
    for path in (report, serving):
        if path is not None:
            check_output(path, force=force)
    models = [model] if against is None else [model, against]
    ports = [interface(load_model(path)) for path in models]  # onnxruntime reads the files itself
    source = open_source(
        data, interface=ports[0], batch_size=batch_size, preprocess=preprocess, seed=seed
    )
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
    verdict = None if against is None else judge_speedup(results[1], results[0], seed=seed)
    profiles, kinds = _profiles(models, batch.feeds, threads) if profile or roofline else ([], None)
    roof = roofline or kinds is not None
    machine, placed = _under_roof(profiles, threads) if roof else (None, [])
    found = Found(
        models=models,
        results=results,
        batch_size=batch.size,
        threads=threads,
        verdict=verdict,
        profiles=profiles,
        machine=machine,
        placed=placed,
        kinds=kinds,
        questions=questions,
        load=_load(
            model,
            batch.feeds,
            ports[0].inputs,
            questions,
            threads=threads,
            progress=output.progress(),
        ),
    )
    output.result(document(found), list(blocks(found)))
    _write(found, report, serving, output)


def number_list(
    option: str, text: str | None, kind: Callable[[str], _Number]
) -> tuple[_Number, ...]:
    """Positive numbers of a list such as ``1,2,4``, ascending; empty for no list.

    Raises:
        OptionError: Something in it is no positive number.
    """
    if text is None:
        return ()
    try:
        numbers = {kind(part) for part in text.split(",")}
    except ValueError:
        numbers = set()
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise OptionError(
            option, f"'{text}' is not a list of positive numbers", fix="such as 1,2,4"
        )
    return tuple(sorted(numbers))


def _check_needs(questions: Questions, serving: Path | None) -> None:
    if questions.p99 is not None and not questions.rates:
        raise OptionError("--p99-ms", "A bound needs a load", fix="add --rate")
    if serving is not None and questions.p99 is None:
        raise OptionError("--serving", "There is nothing to suggest", fix="add --rate and --p99-ms")


def _profiles(
    models: Sequence[Path], feeds: Feeds, threads: int
) -> tuple[list[Profile], list[KindChange] | None]:
    """The profile of each model, and what the difference comes from where there are two."""
    from slimctl.evaluate.contrast import contrast
    from slimctl.evaluate.profile import profile, profile_in_turns

    if len(models) == 1:
        return [profile(models[0], feeds, threads=threads)], None
    turns = profile_in_turns(models, feeds, threads=threads)
    return [one.whole for one in turns], contrast(*turns)


def _under_roof(profiles: Sequence[Profile], threads: int) -> tuple[Machine, list[list[Placed]]]:
    from slimctl.evaluate.machine import measure_machine
    from slimctl.evaluate.roofline import roofline

    machine = measure_machine(threads)
    return machine, [roofline(profile, machine) for profile in profiles]


def _load(
    model: Path,
    feeds: Feeds,
    inputs: Sequence[Port],
    questions: Questions,
    *,
    threads: int,
    progress: Progress,
) -> LoadStudy | None:
    from slimctl.evaluate.study import study_load

    if not (questions.batch_sizes or questions.clients or questions.rates):
        return None
    return study_load(model, feeds, inputs, questions, threads=threads, progress=progress)


def _write(found: Found, report: Path | None, serving: Path | None, output: Output) -> None:
    """Writes what was asked for.

    Raises:
        GateFailedError: A serving file was asked for, and no setting meets the bound.
    """
    from slimctl.cli.bench_summary import document
    from slimctl.cli.output import plain
    from slimctl.core.files import write_atomic

    if report is not None:
        from slimctl.report.benchmark import benchmark_page

        write_atomic(report, benchmark_page(plain(document(found))).encode())
        output.note(f"report: {report}")
    if serving is None:
        return
    chosen = found.serving
    if chosen is None:
        raise GateFailedError(
            "No queue delay and batch meet the bound of --p99-ms",
            where=str(serving),
            fix="loosen the bound, lower --rate, or make the model faster",
        )
    from slimctl.evaluate.serving import write_serving

    write_serving(serving, chosen)
    output.note(f"serving: {serving}")
