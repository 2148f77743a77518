"""Samples of a scan: how many are in memory, and that it makes no difference."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slimctl.core.errors import SourceError
from slimctl.data.batch import Batch
from slimctl.data.sources import DataSource
from slimctl.evaluate import probing
from slimctl.sensitivity import samples as samples_module
from slimctl.sensitivity.samples import Samples
from slimctl.sensitivity.scan import Finding, Scanner
from slimctl.sensitivity.setup import Setup

ONE = 3 * 8 * 8 * 4
"""Bytes of one sample of the network."""


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The largest number of batches of any source that were alive at once, after each batch."""
    alive: list[weakref.ref[Any]] = []
    counts: list[int] = []
    read = DataSource.batches

    def watched(self: DataSource) -> Iterator[Batch]:
        for batch in read(self):
            array = np.array(batch.feeds["x"])  # not a view of something larger
            alive.append(weakref.ref(array))
            given = Batch({"x": array}, batch.labels, batch.first, batch.size)
            del array, batch
            counts.append(sum(one() is not None for one in alive))
            yield given
            del given

    monkeypatch.setattr(DataSource, "batches", watched)
    return counts


def found(setup: Setup) -> list[Finding]:
    scanner = Scanner(setup)
    return [scanner.run(task) for task in scanner.tasks()]


@pytest.fixture
def thorough(setup: Setup) -> Setup:
    """Probes of two layers look at all of the 24 samples, and both kinds of models are probed."""
    changes, directions = ("int8", "sparse:0.5"), ("alone", "except")
    return replace(setup, changes=changes, directions=directions, tolerance_db=0.0, metric="top1:y")


@pytest.mark.parametrize("held", [0, 3])
def test_only_some_samples_are_in_memory(
    held: int, thorough: Setup, most: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = found(thorough)
    assert max(most) >= 24  # all of them, below the limit
    assert all(one.samples == 24 for one in wanted)
    most.clear()
    monkeypatch.setattr(samples_module, "LIMIT", held * ONE)
    assert found(thorough) == wanted
    # Besides those that are held: the one that is looked at, and the next while it is read. The
    # calibration has a pass of its own before there are any.
    assert max(most) <= held + 2


def test_what_the_model_makes_of_them_is_bounded_too(
    thorough: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = found(thorough)
    opened: list[probing.Probing] = []

    class Watched(probing.Probing):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            opened.append(self)

    monkeypatch.setattr("slimctl.sensitivity.scan.Probing", Watched)
    scanner = Scanner(thorough)
    scanner.run(scanner.tasks()[0])
    each = max(kept.size_bytes for kept in opened[0]._kept.values())
    assert len(opened[0]._kept) == 24
    monkeypatch.setattr(probing, "_HELD", 2 * each)
    opened.clear()
    scanner = Scanner(thorough)
    assert [scanner.run(task) for task in scanner.tasks()] == wanted
    assert [len(one._kept) for one in opened] == [2] * len(opened)
    assert len(opened) == 3  # the model, and one for each change with everything changed


def source(count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[DataSource, list[int]]:
    """A source of numbers, and how many batches each pass over it gave."""
    passes: list[int] = []

    class Numbers:
        spec = "numbers"

        def batches(self) -> Iterator[Batch]:
            passes.append(0)
            for number in range(count):
                passes[-1] += 1
                yield Batch({"x": np.full(2, number, np.float32)}, None, number, 1)

    monkeypatch.setattr(samples_module, "LIMIT", 2 * 8)
    return Numbers(), passes  # type: ignore[return-value]


def test_batches_are_read_again_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, passes = source(6, monkeypatch)
    kept = Samples(numbers)
    assert (len(kept), kept.size) == (6, 6)
    for index in (0, 1, 2, 2, 3, 5, 1, 5):  # one pass: it is never behind
        assert kept[index].feeds["x"][0] == index
    assert passes == [6, 6]
    assert kept[2].feeds["x"][0] == 2
    assert passes == [6, 6, 3]
    with pytest.raises(IndexError):
        kept[6]


def test_a_source_that_shrinks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, _ = source(6, monkeypatch)
    kept = Samples(numbers)
    shorter, _ = source(3, monkeypatch)
    monkeypatch.setattr(numbers, "batches", shorter.batches, raising=False)
    assert kept[2].feeds["x"][0] == 2
    with pytest.raises(SourceError, match="fewer when it was read again"):
        kept[4]
