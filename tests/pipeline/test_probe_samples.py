"""Which samples the checks run on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.data.batch import Batch
from slimctl.graph.edit import Interface, Port
from slimctl.pipeline.probe import (
    MOST_SAMPLES,
    SAMPLES,
    SHORT,
    shortened,
    spread_samples,
    take_samples,
)

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
    spread = spread_samples(take_samples(_batches(count, size, width), INTERFACE), 10**12)
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
    assert take_samples([], INTERFACE) == []
    assert spread_samples([], 1) == ((), ())
    assert shortened([], INTERFACE, 10**12) is None


def test_reading_stops_early() -> None:
    read = []

    def batches() -> Iterator[Batch]:
        for batch in _batches(1000, 1, 10):
            read.append(batch.first)
            yield batch

    take_samples(batches(), INTERFACE)
    assert len(read) <= 65


TOKENS = Interface((Port("ids", ir.DataType.INT64, ("N", "S")),), ())


def _texts(count: int, length: int) -> list[dict[str, np.ndarray]]:
    return [{"ids": np.arange(length)[None] + index} for index in range(count)]


@pytest.mark.parametrize(
    ("length", "parameters", "expected"),
    [
        (128, 22_000_000, MOST_SAMPLES),  # MiniLM: 16 * 128 * 22e6 = 4.5e10, just what is allowed
        (128, 135_000_000, 2),  # 128 * 135e6 = 1.7e10: two fit
        (512, 135_000_000, 1),
        (512, 7_000_000_000, 1),  # one is always run
    ],
)
def test_samples_of_tokens_are_as_many_as_their_work_allows(
    length: int, parameters: int, expected: int
) -> None:
    spread = spread_samples(_texts(16, length), parameters)
    assert len(spread.few) == expected
    assert len(spread.more) == 16 - expected


def test_long_samples_of_large_models_are_cut() -> None:
    cut = shortened(_texts(3, 512), TOKENS, 135_000_000)
    assert cut is not None
    for index, sample in enumerate(cut):
        np.testing.assert_array_equal(sample["ids"], np.arange(SHORT)[None] + index)


@pytest.mark.parametrize(
    ("samples", "ports", "parameters"),
    [
        (_texts(3, 512), TOKENS, 22_000_000),  # 4 * 512 * 22e6 = 4.5e10: not too much work
        (_texts(3, SHORT), TOKENS, 10**12),  # short as it is
        (_texts(3, 512), Interface((Port("ids", ir.DataType.INT64, ("N", 512)),), ()), 10**12),
        ([{"ids": np.ones((1, 512), np.float32)}], TOKENS, 10**12),  # no tokens
        ([{"ids": np.ones((2, 512), np.int64)}], TOKENS, 10**12),  # a batch that is not cut
        ([{"a": np.ones((1, 512), int), "b": np.ones((1, 9), int)}], TOKENS, 10**12),
    ],
)
def test_samples_that_stay_whole(
    samples: list[dict[str, np.ndarray]], ports: Interface, parameters: int
) -> None:
    assert shortened(samples, ports, parameters) is None
