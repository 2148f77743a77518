"""How a model behaves under load: batch sizes, clients at the same time, offered rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from slimctl.core.contract import Feeds, Progress, SilentProgress
from slimctl.evaluate.batching import resized, why_fixed
from slimctl.evaluate.load import SECONDS, ClosedLoop, closed_loop
from slimctl.evaluate.queueing import Batcher, Load, Service, simulate, suggest
from slimctl.evaluate.throughput import BatchTimes, Call, batch_times
from slimctl.graph.edit import Port
from slimctl.graph.session import Products, open_session, run

BATCH_SIZES = (1, 2, 4, 8)
"""Sizes that are measured for a simulation when none are asked for."""


@dataclass(frozen=True)
class Questions:
    """What is asked about a model's behavior under load.

    Attributes:
        batch_sizes: Samples per run to measure; empty for none.
        clients: Numbers of clients at the same time.
        rates: Requests per second to simulate.
        p99: Seconds that the 99th percentile may take at the largest of these rates.
        max_seconds: For measuring all batch sizes together.
        client_seconds: For each number of clients.
        seed: Of the simulation.
    """

    batch_sizes: tuple[int, ...] = ()
    clients: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    p99: float | None = None
    max_seconds: float = 30.0
    client_seconds: float = SECONDS
    seed: int = 0


@dataclass(frozen=True)
class LoadStudy:
    """The answers.

    Attributes:
        fixed: Why the model takes one batch size only; None where it takes any.
        batches: Runs of each size. Of one size where it is fixed.
        clients: What clients see, for each number of them.
        offered: What requests see at each rate, for each way to put them together.
        suggestion: The setting that meets the bound; None where none does or there is no bound.
    """

    fixed: str | None
    batches: tuple[BatchTimes, ...]
    clients: tuple[ClosedLoop, ...]
    offered: tuple[Load, ...]
    suggestion: Load | None


def study_load(
    model: ir.Model | Path,
    feeds: Feeds,
    inputs: Sequence[Port],
    questions: Questions,
    *,
    threads: int = 0,
    progress: Progress | None = None,
) -> LoadStudy:
    """Measures and simulates one model under load, in one session.

    A request is one sample; where the batch size is fixed, it is one run.

    Args:
        model: A model in memory, or a file.
        feeds: Inputs of one run.
        inputs: What the model asks for.
        questions: What to find out.
        threads: Threads of onnxruntime per run; 0 for all cores.
        progress: Where to say how far the work is.

    Raises:
        ModelExecutionError: onnxruntime refuses the model, or a batch size that it claims to take.
    """
    fixed = why_fixed(inputs)
    session = open_session(model, threads=threads, products=Products.NATIVE)
    sizes = _sizes(questions, fixed)
    prepared = {size: feeds if fixed else resized(feeds, size) for size in (1, *sizes)}
    for fitting in prepared.values():
        run(session, fitting)  # says what is wrong, in our words

    def call(size: int) -> object:
        return session.run(None, prepared[size])

    clients = _clients(lambda: call(1), questions, progress or SilentProgress())
    return _answers(call, sizes, fixed, questions, clients)


def _clients(
    request: Callable[[], object], questions: Questions, progress: Progress
) -> list[ClosedLoop]:
    counts = questions.clients
    if not counts:
        return []
    tracked = progress.track(iter(counts), total=len(counts), label="clients")
    return [closed_loop(request, count, seconds=questions.client_seconds) for count in tracked]


def _sizes(questions: Questions, fixed: str | None) -> tuple[int, ...]:
    """Batch sizes to measure; a simulation needs one sample among them."""
    if fixed is not None:
        return (1,) if questions.rates else ()
    wanted = set(questions.batch_sizes)
    if questions.rates:
        wanted = (wanted or set(BATCH_SIZES)) | {1}
    return tuple(sorted(wanted))


def _answers(
    call: Call,
    sizes: Sequence[int],
    fixed: str | None,
    questions: Questions,
    clients: Sequence[ClosedLoop],
) -> LoadStudy:
    batches = batch_times(call, sizes, max_seconds=questions.max_seconds) if sizes else []
    offered: list[Load] = []
    suggestion = None
    if questions.rates:
        service = Service(batches)
        if questions.p99 is not None:
            rate = max(questions.rates)
            suggestion = suggest(service, sizes, rate, questions.p99, seed=questions.seed)
        offered = [
            simulate(service, rate, batcher, seed=questions.seed)
            for batcher in _compared(service, suggestion)
            for rate in questions.rates
        ]
    return LoadStudy(fixed, tuple(batches), tuple(clients), tuple(offered), suggestion)


def _compared(service: Service, suggestion: Load | None) -> list[Batcher]:
    """One request after the other, whatever has come while the server was busy, the suggestion."""
    found = [Batcher(1, 0.0), Batcher(service.largest, 0.0)]
    if suggestion is not None:
        found.append(suggestion.batcher)
    return list(dict.fromkeys(found))
