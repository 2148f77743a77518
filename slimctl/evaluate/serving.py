"""How a model is to be served, in the words of Triton's model configuration."""

from __future__ import annotations

import math
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from slimctl.core.files import write_atomic
from slimctl.evaluate.queueing import Load

_MICROSECONDS = 1e6


class Serving(BaseModel):
    """Dynamic batching of one model.

    ``max_batch_size`` stands in a configuration's first level, the others in its
    ``dynamic_batching``. The last four say what the choice rests on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_batch_size: int = Field(ge=1, description="Largest batch.")
    preferred_batch_size: tuple[int, ...] = Field(description="Batches that do not wait for more.")
    max_queue_delay_microseconds: int = Field(ge=0, description="Longest wait for more requests.")
    rate: float = Field(gt=0, description="Requests per second that it is made for.")
    p99_bound_ms: float = Field(gt=0, description="What the 99th percentile may take.")
    p99_ms: float = Field(gt=0, description="What it takes in the simulation.")
    threads: int = Field(ge=0, description="Threads of onnxruntime; 0 for all cores.")


def serving(load: Load, p99_bound: float, threads: int) -> Serving:
    """The configuration of a setting that was found.

    Args:
        load: The setting and what requests see with it.
        p99_bound: Seconds that the 99th percentile may take.
        threads: Of onnxruntime when service times were measured.
    """
    size = load.batcher.max_batch
    return Serving(
        max_batch_size=size,
        preferred_batch_size=(size,) if size > 1 else (),
        # Rounded down: the simulated delay met the bound, a longer one may not.
        max_queue_delay_microseconds=math.floor(load.batcher.delay * _MICROSECONDS),
        rate=load.rate,
        p99_bound_ms=p99_bound * 1e3,
        p99_ms=load.p99 * 1e3,
        threads=threads,
    )


def write_serving(path: Path, chosen: Serving) -> None:
    """Writes a configuration as JSON.

    Raises:
        OutputError: The file cannot be written.
    """
    write_atomic(path, (chosen.model_dump_json(indent=2) + "\n").encode())
