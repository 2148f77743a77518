"""Closed-loop load: some clients, each of which sends its next request when it has its answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

SECONDS = 2.0
"""Time for each number of clients."""


@dataclass(frozen=True)
class ClosedLoop:
    """What clients see.

    Attributes:
        clients: Their number.
        requests: Answers that all of them got.
        seconds: Time that it took.
        p50: Seconds from request to answer, median.
        p90: The same, 90th percentile.
        p99: The same, 99th percentile.
        mean: The same, mean.
    """

    clients: int
    requests: int
    seconds: float
    p50: float
    p90: float
    p99: float
    mean: float

    @property
    def per_second(self) -> float:
        """Answers per second. By Little's law ``clients >= per_second * mean``."""
        return self.requests / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """As JSON types; latencies in milliseconds."""
        return {
            "concurrency": self.clients,
            "requests": self.requests,
            "p50_ms": self.p50 * 1e3,
            "p90_ms": self.p90 * 1e3,
            "p99_ms": self.p99 * 1e3,
            "mean_ms": self.mean * 1e3,
            "requests_per_second": self.per_second,
        }


def closed_loop(
    call: Callable[[], object],
    clients: int,
    *,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> ClosedLoop:
    """Lets some threads call at the same time, on one session as servers do.

    Args:
        call: One request. What it raises is raised here.
        clients: Number of threads.
        seconds: No request begins after this time; each client sends one at least.
        clock: Seconds.
    """
    together = threading.Barrier(clients)

    def client() -> tuple[float, float, list[float]]:
        together.wait()
        start = now = clock()
        times: list[float] = []
        while not times or now - start < seconds:
            before = clock()
            call()
            now = clock()
            times.append(now - before)
        return start, now, times

    call()  # the first run fills caches and memory pools
    with ThreadPoolExecutor(clients) as pool:
        parts = [future.result() for future in [pool.submit(client) for _ in range(clients)]]
    latencies = np.concatenate([times for _, _, times in parts])
    p50, p90, p99 = (float(value) for value in np.percentile(latencies, [50, 90, 99]))
    return ClosedLoop(
        clients=clients,
        requests=len(latencies),
        seconds=max(end for _, end, _ in parts) - min(start for start, _, _ in parts),
        p50=p50,
        p90=p90,
        p99=p99,
        mean=float(latencies.mean()),
    )
