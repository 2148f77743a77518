"""How long a run takes at each batch size, and what that makes of throughput."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

MIN_RUNS = 3
ROUNDS = 100
"""Runs of each size at most: the 99th percentile is then one of them."""


@dataclass(frozen=True)
class BatchTimes:
    """Runs of one batch size.

    Attributes:
        size: Samples per run.
        seconds: Time of each run.
    """

    size: int
    seconds: NDArray[np.float64]

    @property
    def per_second(self) -> float:
        """Samples per second of runs that follow each other at once."""
        return float(self.size / self.seconds.mean())

    def to_dict(self) -> dict[str, Any]:
        """As JSON types; latencies in milliseconds."""
        p50, p90, p99 = (float(v) * 1e3 for v in np.percentile(self.seconds, [50, 90, 99]))
        return {
            "batch_size": self.size,
            "p50_ms": p50,
            "p90_ms": p90,
            "p99_ms": p99,
            "runs": len(self.seconds),
            "samples_per_second": self.per_second,
        }


Call: TypeAlias = Callable[[int], object]
"""Runs a model on that many samples."""


def batch_times(
    call: Call,
    sizes: Sequence[int],
    *,
    max_seconds: float,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> list[BatchTimes]:
    """Measures batch sizes in turns, in alternating order, so that drifts hit all of them alike.

    Args:
        call: Runs the model. The first call of each size does not count.
        sizes: Samples per run.
        max_seconds: No turn begins after it, once each size has run three times.
        rounds: Turns at most.
        clock: Seconds.
    """
    for size in sizes:
        call(size)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    start = clock()
    for index in range(rounds):
        if index >= MIN_RUNS and clock() - start > max_seconds:
            break
        for size in sizes if index % 2 == 0 else reversed(sizes):
            before = clock()
            call(size)
            times[size].append(clock() - before)
    return [BatchTimes(size, np.array(seconds)) for size, seconds in times.items()]
