"""Latency, CPU time and memory of models, measured so that ratios can be trusted.

Machines are noisy: only numbers from one interleaved run are compared. Each round runs every model
for a short block, in alternating order; the first run of a block re-warms the caches that the other
models emptied and does not count. The uncertainty of a ratio comes from resampling whole rounds,
since runs of one block are not independent.

Peak memory is measured in a fresh process per model, from the moment when everything is imported:
it is what the session and its runs add.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

import slimctl
from slimctl.core.contract import Feeds, Progress, SilentProgress
from slimctl.core.errors import ModelExecutionError, OptionError
from slimctl.evaluate.resampling import bounds
from slimctl.graph.save import save_model
from slimctl.graph.session import Level, Products, open_session, run

BLOCK_SECONDS = 0.05
"""A block is long against the switch between models and short against drifts of the clock rate."""

MAX_BLOCK = 32
MIN_ROUNDS = 3
MEMORY_TIMEOUT = 120.0
"""Seconds that measuring one model's memory may take."""

STABLE = 0.05
"""Warm-up ends when the median of a window is within 5 % of the window before."""

_WINDOW = 5
_RESAMPLES = 1000
_CELLS = 1 << 20
"""Latencies in memory at a time while resampling, 8 MB of them."""


@dataclass(frozen=True)
class BenchResult:
    """One model's measurements; times in milliseconds, sizes in bytes.

    Attributes:
        p50: Median latency of a run.
        p90: Exceeded by one run of ten.
        p99: Exceeded by one run of a hundred.
        mean: Mean latency.
        cpu: CPU time of a run, all threads together.
        load: Time to open the session.
        runs: Number of runs measured.
        rounds: Number of rounds that they come from.
        peak_memory: Resident memory that the session and its runs add, None if not measured.
        latencies: All latencies, [rounds, runs per round].
        warmup: Runs before measuring, which do not count.
        settled: Whether the latency was stable when they ended.
    """

    p50: float
    p90: float
    p99: float
    mean: float
    cpu: float
    load: float
    runs: int
    rounds: int
    peak_memory: int | None
    latencies: NDArray[np.float64]
    warmup: int = 0
    settled: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Everything but the single latencies, JSON types only."""
        values = {name: value for name, value in vars(self).items() if name != "latencies"}
        return {f"{k}_ms" if k in _TIMES else k: v for k, v in values.items()}

    def quantiles(self) -> list[float]:
        """The percentiles 0 to 100 of the latencies, in milliseconds."""
        found: list[float] = np.percentile(self.latencies, np.arange(101)).tolist()
        return found


_TIMES = frozenset({"p50", "p90", "p99", "mean", "cpu", "load"})


class Ratio(NamedTuple):
    """How many times faster one model is than another, with a 95 % confidence interval."""

    value: float
    low: float
    high: float


class _Runner:
    """One model under measurement."""

    def __init__(self, model: ir.Model | Path, feeds: Feeds, threads: int, level: Level) -> None:
        start = time.perf_counter()
        self._session = open_session(model, level=level, threads=threads, products=Products.NATIVE)
        self.load = time.perf_counter() - start
        self._feeds = feeds
        run(self._session, feeds)  # reports what is wrong with the model or the inputs
        self.latencies: list[list[float]] = []
        self.cpu = 0.0
        self.block = 1
        self.warmup = 0
        self.settled = False

    def once(self) -> float:
        """Seconds of one run."""
        start = time.perf_counter()
        self._session.run(None, self._feeds)
        return time.perf_counter() - start

    def warm_up(self, limit: int, deadline: float) -> None:
        """Runs until the latency is stable, then decides how many runs make a block."""
        times: list[float] = []
        while len(times) < limit and time.perf_counter() < deadline:
            times.append(self.once())
            if len(times) >= 2 * _WINDOW and _is_stable(times):
                self.settled = True
                break
        self.warmup = len(times)
        typical = float(np.median(times[-_WINDOW:])) if times else self.once()
        self.block = min(max(math.ceil(BLOCK_SECONDS / max(typical, 1e-9)), 1), MAX_BLOCK)

    def measure(self) -> None:
        """One block."""
        if self.block > 1:
            self.once()
        cpu = time.process_time()
        self.latencies.append([self.once() for _ in range(self.block)])
        self.cpu += time.process_time() - cpu

    def result(self, peak_memory: int | None) -> BenchResult:
        """What all blocks say."""
        latencies = np.array(self.latencies) * 1e3
        p50, p90, p99 = (float(value) for value in np.percentile(latencies, [50, 90, 99]))
        return BenchResult(
            p50=p50,
            p90=p90,
            p99=p99,
            mean=float(latencies.mean()),
            cpu=self.cpu * 1e3 / latencies.size,
            load=self.load * 1e3,
            runs=latencies.size,
            rounds=latencies.shape[0],
            peak_memory=peak_memory,
            latencies=latencies,
            warmup=self.warmup,
            settled=self.settled,
        )


def _is_stable(times: Sequence[float]) -> bool:
    before = float(np.median(times[-2 * _WINDOW : -_WINDOW]))
    last = float(np.median(times[-_WINDOW:]))
    return abs(last - before) <= STABLE * before


def benchmark(
    models: Sequence[ir.Model | Path],
    feeds: Feeds,
    *,
    threads: int = 0,
    rounds: int = 30,
    warmup: int = 50,
    max_seconds: float = 30.0,
    memory: bool = True,
    level: Level = Level.ALL,
    progress: Progress | None = None,
) -> list[BenchResult]:
    """Measures models against each other on the same inputs.

    Args:
        models: Models in memory or files.
        feeds: Inputs of one run, the same for all models.
        threads: Threads of onnxruntime; 0 for all cores.
        rounds: Blocks per model, at least 3 of which are measured whatever the time limit.
        warmup: Largest number of runs before measuring; fewer when the latency is stable earlier.
        max_seconds: Warm-up takes at most a quarter of it, and no round begins after it. Measuring
            memory comes on top.
        memory: Also measure peak memory.
        level: Graph optimizations of onnxruntime.
        progress: Where to say how far the work is.

    Raises:
        OptionError: A number makes no sense.
        ModelExecutionError: onnxruntime refuses a model or the inputs.
    """
    if rounds < 1 or warmup < 0 or max_seconds <= 0:
        raise OptionError("--rounds", "Rounds and seconds must be positive", fix="use 1 or more")
    start = time.perf_counter()
    runners = [_Runner(model, feeds, threads, level) for model in models]
    for index, runner in enumerate(runners, start=1):
        runner.warm_up(warmup, start + max_seconds / 4 * index / len(runners))
    tracked = (progress or SilentProgress()).track(
        iter(range(rounds)), total=rounds, label="benchmark"
    )
    for index in tracked:
        if index >= MIN_ROUNDS and time.perf_counter() - start > max_seconds:
            break
        for runner in runners if index % 2 == 0 else reversed(runners):
            runner.measure()
    peaks = [
        peak_memory(m, feeds, threads=threads, level=level) if memory else None for m in models
    ]
    return [runner.result(peak) for runner, peak in zip(runners, peaks, strict=True)]


def speedup(
    base: BenchResult, other: BenchResult, *, percentile: float = 50.0, seed: int = 0
) -> Ratio:
    """How many times faster ``other`` is than ``base``: the ratio of the medians.

    The interval is the 95 % percentile bootstrap over rounds, each resampled round contributing its
    block of both models (Efron and Tibshirani 1993, chapter 13).

    Args:
        base: From the same run of :func:`benchmark` as the other.
        other: The model to judge.
        percentile: Which percentile of the latencies to compare, in percent.
        seed: Of the resampling.
    """
    count = min(base.rounds, other.rounds)
    picks = np.random.default_rng(seed).integers(0, count, (_RESAMPLES, count))
    ratios = _percentiles(base, picks, percentile) / _percentiles(other, picks, percentile)
    low, high = bounds(ratios)
    value = float(
        np.percentile(base.latencies, percentile) / np.percentile(other.latencies, percentile)
    )
    # With few rounds the resampled medians may all lie on one side of the measured one.
    return Ratio(value, min(low, value), max(high, value))


def _percentiles(
    result: BenchResult, picks: NDArray[np.int64], percentile: float
) -> NDArray[np.float64]:
    """A latency for each row of round numbers [r, n]; some rows at a time, to stay small."""
    step = max(_CELLS // (picks.shape[1] * result.latencies.shape[1]), 1)
    blocks = (picks[start : start + step] for start in range(0, len(picks), step))
    # [b, n, runs per round] -> [b, n * runs per round]
    drawn = (result.latencies[rows].reshape(len(rows), -1) for rows in blocks)
    return np.concatenate([np.percentile(values, percentile, axis=1) for values in drawn])


def self_difference(result: BenchResult, *, percentile: float = 50.0, seed: int = 0) -> float:
    """By how much a model seems to differ from itself: the A/A test that goes with every A/B test.

    Of each two rounds that follow each other, one goes to either half, by chance; the halves are
    compared as two models would be. Neighbors, since a slow drift hits both models of a pair alike
    and is no difference. A half has half the rounds, so this errs on the side of caution.

    Args:
        result: What was measured.
        percentile: Which percentile of the latencies is compared, in percent.
        seed: Of the choices.

    Returns:
        The 95th percentile of ``|ln(one half / other half)|``, about the relative difference.
        Infinite for a single round.
    """
    pairs = result.rounds // 2
    if pairs == 0:
        return math.inf
    chosen = np.random.default_rng(seed).integers(0, 2, (_RESAMPLES, pairs))
    first = 2 * np.arange(pairs)
    one = _percentiles(result, first + chosen, percentile)
    other = _percentiles(result, first + 1 - chosen, percentile)
    return float(np.quantile(np.abs(np.log(one / other)), 0.95))


SAME = 0.05
"""Ratios within 5 % are called the same: what is less is not worth changing a model for."""

LEAST_ROUNDS = 6
"""Fewest rounds that can decide at 95 %: all of them agree by chance in 2 of 2^6 cases, 3.1 %,
but in 6.3 % with five (the sign test)."""


class Outcome(StrEnum):
    """What a comparison says about a bound, which is 1 when two models are compared."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    TOO_NOISY = "too noisy"
    TOO_FEW_ROUNDS = "too few rounds"


class Verdict(NamedTuple):
    """A ratio and what may be concluded from it.

    Attributes:
        outcome: Whether the ratio is above the bound, below, the same, or cannot be told.
        ratio: How many times faster the second model is, with its interval.
        noise: What the models seem to differ from themselves, the larger of the two.
        bound: What the ratio was compared with.
        reason: One sentence.
    """

    outcome: Outcome
    ratio: Ratio
    noise: float
    bound: float
    reason: str

    @property
    def decided(self) -> bool:
        """Whether there is a verdict at all."""
        return self.outcome not in (Outcome.TOO_NOISY, Outcome.TOO_FEW_ROUNDS)


def judge_speedup(
    base: BenchResult,
    other: BenchResult,
    *,
    bound: float = 1.0,
    percentile: float = 50.0,
    seed: int = 0,
) -> Verdict:
    """Whether a model is faster than another by a factor, and whether that can be told at all.

    FASTER and SLOWER need an interval that leaves the bound out, and a distance from it that
    exceeds what either model differs from itself. SAME needs an interval within 5 % of the bound.
    Everything else is TOO_NOISY: measuring longer, or on a calmer machine, is what helps.

    Args:
        base: From the same run of :func:`benchmark` as the other.
        other: The model to judge.
        bound: Factor to compare with.
        percentile: Which percentile of the latencies to compare, in percent.
        seed: Of the resampling.
    """
    ratio = speedup(base, other, percentile=percentile, seed=seed)
    noise = max(self_difference(one, percentile=percentile, seed=seed) for one in (base, other))
    outcome = _outcome(ratio, noise, bound, min(base.rounds, other.rounds))
    return Verdict(outcome, ratio, noise, bound, _reason(outcome, ratio, noise, bound))


def _outcome(ratio: Ratio, noise: float, bound: float, rounds: int) -> Outcome:
    if rounds < LEAST_ROUNDS:
        return Outcome.TOO_FEW_ROUNDS
    if bound / (1 + SAME) <= ratio.low and ratio.high <= bound * (1 + SAME):
        return Outcome.SAME
    if ratio.low <= bound <= ratio.high or abs(math.log(ratio.value / bound)) <= noise:
        return Outcome.TOO_NOISY
    return Outcome.FASTER if ratio.value > bound else Outcome.SLOWER


def _reason(outcome: Outcome, ratio: Ratio, noise: float, bound: float) -> str:
    interval = f"the interval {ratio.low:.2f} to {ratio.high:.2f}"
    match outcome:
        case Outcome.TOO_FEW_ROUNDS:
            return f"fewer than {LEAST_ROUNDS} rounds cannot decide: allow more time"
        case Outcome.TOO_NOISY if ratio.low <= bound <= ratio.high:
            return (
                f"{interval} holds {bound:g} and is wider than {SAME:.0%}: measure longer, or on a "
                "calmer machine"
            )
        case Outcome.TOO_NOISY:
            return (
                f"a model differs from itself by {math.expm1(noise):.0%}, as much as from the "
                "other: measure longer, or on a calmer machine"
            )
        case Outcome.SAME:
            return f"{interval} lies within {SAME:.0%} of {bound:g}"
        case _:
            return f"{interval} leaves {bound:g} out, and a model differs from itself by less"


def peak_memory(
    model: ir.Model | Path, feeds: Feeds, *, threads: int = 0, level: Level = Level.ALL
) -> int | None:
    """Resident memory in bytes that a session and a few runs add to a fresh process.

    Returns:
        None where the operating system does not tell, or the model is too slow
        (:data:`MEMORY_TIMEOUT`).

    Raises:
        ModelExecutionError: The process ended early, most likely for want of memory.
    """
    if not Path("/proc/self/status").exists():
        return None
    with tempfile.TemporaryDirectory(prefix="slimctl-") as name:
        folder = Path(name)
        path = model if isinstance(model, Path) else save_model(model, folder / "model.onnx")[0]
        # Input names may hold characters that are no file names, so the arrays are numbered.
        np.savez(folder / "feeds.npz", *feeds.values())
        job = {
            "model": str(path.absolute()),
            "feeds": str(folder / "feeds.npz"),
            "names": list(feeds),
            "threads": threads,
            "level": level.value,
        }
        return _in_fresh_process(job)


def _in_fresh_process(job: dict[str, Any]) -> int | None:
    package_root = str(Path(slimctl.__file__).resolve().parent.parent)
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "slimctl.evaluate.memory_probe"],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            timeout=MEMORY_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        raise ModelExecutionError(
            f"The process that measures memory ended with code {done.returncode}:"
            f" {done.stderr.strip()[-300:]}",
            where=str(job["model"]),
            fix="free some memory, or leave the measurement out",
        )
    return int(done.stdout)
