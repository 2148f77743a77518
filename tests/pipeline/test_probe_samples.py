"""Which samples the checks run on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.data.batch import Batch
from slimctl.graph.edit import Interface, Port
from slimctl.pipeline.probe import MOST_SAMPLES, SAMPLES, spread_samples

INTERFACE = Interface((Port("x", ir.DataType.FLOAT, ("N", None)),), ())


def _batches(count: int, size: int, width: int) -> Iterator[Batch]:
    for first in range(0, count, size):
        rows = np.arange(first, min(first + size, count), dtype=np.float32)
        feeds = {"x": np.repeat(rows[:, None], width, axis=1)}
        yield Batch(feeds, None, first, len(rows))


@pytest.mark.parametrize("size", [1, 7, 100])
@pytest.mark.parametrize(
    ("count", "width", "most"),
    [
        *((count, 10, MOST_SAMPLES) for count in (1, 3, 5, 40, 64, 1000)),
        *((count, 200_000, SAMPLES) for count in (1, 3, 5, 40)),
    ],
)
def test_a_few_samples_evenly_spread(size: int, width: int, most: int, count: int) -> None:
    spread = spread_samples(_batches(count, size, width), INTERFACE)
    found = [int(feeds["x"][0, 0]) for feeds in spread.few]
    others = [int(feeds["x"][0, 0]) for feeds in spread.more]
    assert not set(found) & set(others)
    assert len(found) + len(others) <= MOST_SAMPLES
    assert 1 <= len(found) <= most
    assert len(found) >= min(count, most) // 2
    gaps = np.diff(found)
    assert len(set(gaps.tolist())) <= 1 and found[0] == 0
    seen = min(count, 64)
    assert found[-1] >= seen // 2 or seen < 3


def test_no_data_no_samples() -> None:
    assert spread_samples([], INTERFACE) == ((), ())


def test_reading_stops_early() -> None:
    read = []

    def batches() -> Iterator[Batch]:
        for batch in _batches(1000, 1, 10):
            read.append(batch.first)
            yield batch

    spread_samples(batches(), INTERFACE)
    assert len(read) <= 65
