"""Latency against offered load, with dynamic batching, simulated from measured service times.

Requests of one sample arrive at random moments (a Poisson process: independent users) and wait in
one queue before one server. The server takes a batch as soon as it is free and either the largest
batch is complete or the oldest request has waited for the queue delay: what Triton's dynamic
batcher does with one instance. How long a batch takes is drawn from what was measured at its size;
sizes between those that were measured are interpolated, quantile by quantile.

Events are followed one by one instead of a formula: for batches with a delay there is none. With
constant service times and batches of one it is an M/D/1 queue, whose mean wait is known
(``rho * s / (2 * (1 - rho))``, Pollaczek and Khinchine); the tests hold the simulation to it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slimctl.evaluate.throughput import BatchTimes

REQUESTS = 20_000
"""Simulated requests: 200 of them lie beyond the 99th percentile."""

FRACTIONS = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0)
"""Queue delays that are tried, as shares of one forward pass of one sample."""

_QUANTILES = 200
_DRAWS = 1000


class Batcher(NamedTuple):
    """How requests are put together.

    Attributes:
        max_batch: Largest number of requests in a run.
        delay: Seconds that the oldest request may wait for others while the server is free.
    """

    max_batch: int
    delay: float


class Service:
    """How long a batch of each size takes, as a distribution."""

    def __init__(self, times: Sequence[BatchTimes]) -> None:
        """From the measured times of one or more sizes."""
        ordered = sorted(times, key=lambda item: item.size)
        self.largest = ordered[-1].size
        grid = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
        measured = np.array([np.quantile(item.seconds, grid) for item in ordered])  # [sizes, q]
        sizes = [item.size for item in ordered]
        wanted = np.arange(1, self.largest + 1)
        # [largest, q]
        self.table = np.stack([np.interp(wanted, sizes, column) for column in measured.T], axis=1)

    @property
    def forward(self) -> float:
        """Seconds of one forward pass of one sample, median."""
        return float(np.median(self.table[0]))

    def drawn(self, seed: int) -> Iterator[Sequence[float]]:
        """For one batch after the other, its seconds at each size from 1 on."""
        generator = np.random.default_rng(seed)
        rows = self.table.T.tolist()  # [q, largest]
        while True:
            yield from (rows[pick] for pick in generator.integers(0, _QUANTILES, _DRAWS))


@dataclass(frozen=True)
class Load:
    """What requests see at one offered rate.

    Attributes:
        rate: Requests per second that arrive.
        batcher: How they are put together.
        p50: Seconds from arrival to answer, median.
        p90: The same, 90th percentile.
        p99: The same, 99th percentile.
        wait: Mean seconds in the queue.
        batch: Mean number of requests in a run.
        busy: Share of the time in which the server works.
        stable: Whether the queue stays bounded: at the end of the simulation requests wait about as
            long as in its middle.
    """

    rate: float
    batcher: Batcher
    p50: float
    p90: float
    p99: float
    wait: float
    batch: float
    busy: float
    stable: bool

    def to_dict(self) -> dict[str, Any]:
        """As JSON types; latencies in milliseconds."""
        return {
            "rate": self.rate,
            "max_batch": self.batcher.max_batch,
            "queue_delay_ms": self.batcher.delay * 1e3,
            "p50_ms": self.p50 * 1e3,
            "p90_ms": self.p90 * 1e3,
            "p99_ms": self.p99 * 1e3,
            "mean_wait_ms": self.wait * 1e3,
            "mean_batch": self.batch,
            "busy": self.busy,
            "stable": self.stable,
        }


def arrivals(rate: float, count: int = REQUESTS, *, seed: int = 0) -> NDArray[np.float64]:
    """Moments in seconds of a Poisson process with some requests per second, ascending."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def simulate(
    service: Service,
    rate: float,
    batcher: Batcher,
    *,
    requests: int = REQUESTS,
    seed: int = 0,
) -> Load:
    """Follows some requests through queue and server.

    The same seed gives the same arrivals and draws for every setting, so that settings are compared
    on equal terms.

    Args:
        service: How long batches take; its largest size bounds ``max_batch``.
        rate: Requests per second that arrive.
        batcher: How they are put together.
        requests: How many to follow.
        seed: Of arrivals and service times.
    """
    moments = arrivals(rate, requests, seed=seed)
    served = list(_served(moments.tolist(), service.drawn(seed + 1), batcher))
    sizes = np.array([batch.size for batch in served])
    starts = np.repeat([batch.start for batch in served], sizes)
    ends = np.repeat([batch.end for batch in served], sizes)
    latency, wait = ends - moments, starts - moments
    p50, p90, p99 = (float(value) for value in np.percentile(latency, [50, 90, 99]))
    return Load(
        rate=rate,
        batcher=batcher,
        p50=p50,
        p90=p90,
        p99=p99,
        wait=float(wait.mean()),
        batch=float(sizes.mean()),
        busy=float(sum(batch.end - batch.start for batch in served) / ends[-1]),
        stable=_is_stable(moments, ends),
    )


_BEHIND = 0.02


def _is_stable(moments: NDArray[np.float64], ends: NDArray[np.float64]) -> bool:
    """Whether answers keep up with requests: the last is late by less than 2 % of all the time.

    A queue that gets less than it is offered falls behind by a constant share of the time.
    """
    return bool(ends[-1] - moments[-1] <= _BEHIND * moments[-1])


class _Batch(NamedTuple):
    size: int
    start: float
    end: float


def _served(
    moments: Sequence[float], seconds: Iterator[Sequence[float]], batcher: Batcher
) -> Iterator[_Batch]:
    """Batches in the order in which they run."""
    first, free = 0, 0.0
    while first < len(moments):
        start = max(free, _ready(moments, first, batcher))
        last = min(first + batcher.max_batch, len(moments))
        size = bisect_right(moments, start, first, last) - first
        free = start + next(seconds)[size - 1]
        yield _Batch(size, start, free)
        first += size


def _ready(moments: Sequence[float], first: int, batcher: Batcher) -> float:
    """When a batch may begin: it is complete, or its oldest request has waited long enough."""
    last = first + batcher.max_batch - 1
    expires = moments[first] + batcher.delay
    return min(expires, moments[last]) if last < len(moments) else expires


def settings(service: Service, sizes: Sequence[int]) -> Iterator[Batcher]:
    """Settings worth trying: each measured size with each delay; a batch of one needs none."""
    for size in sorted(sizes):
        for fraction in FRACTIONS if size > 1 else FRACTIONS[:1]:
            yield Batcher(size, fraction * service.forward)


def suggest(
    service: Service, sizes: Sequence[int], rate: float, p99: float, *, seed: int = 0
) -> Load | None:
    """The setting that meets a bound and keeps the server least busy.

    Least busy, since that is what is left for more load; then the shortest delay and the smallest
    batch.

    Args:
        service: How long batches take.
        sizes: Largest batches to try.
        rate: Requests per second.
        p99: Seconds that the 99th percentile may take.
        seed: Of the simulation.

    Returns:
        What requests see with it; None where no setting meets the bound.
    """
    tried = (simulate(service, rate, setting, seed=seed) for setting in settings(service, sizes))
    found = [load for load in tried if load.stable and load.p99 <= p99]
    return min(found, key=lambda load: (round(load.busy, 2), *reversed(load.batcher)), default=None)
