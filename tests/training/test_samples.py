"""In which order samples come, and that all of them come."""

# ruff: noqa: E402 # the check for torch comes before what needs it
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is an extra")

from slimctl.core.contract import SilentProgress
from slimctl.core.errors import ModelExecutionError, SourceError
from slimctl.data.batch import Batch
from slimctl.training.samples import MEMORY_BYTES, Part, Samples, fixed_batch
from tests.training.training_data import Listed, cut

COUNT = 23
X = np.arange(COUNT, dtype=np.float32)[:, None] * np.ones(4, np.float32)
LABELS = np.arange(COUNT) * 10
_SAMPLE_BYTES = X[0].nbytes


def samples(
    data: Listed, size: int = 5, *, fixed: int | None = None, memory: int = MEMORY_BYTES
) -> Samples:
    return Samples(data, size, fixed=fixed, progress=SilentProgress(), memory=memory)


def alike(sizes: Sequence[int] = (8, 8, 7)) -> Listed:
    return cut({"x": X}, LABELS, sizes)


def varied() -> Listed:
    """Batches whose samples have other shapes than those of the next."""
    sizes, first, batches = (3, 1, 4, 2), 0, []
    for width, size in enumerate(sizes, start=1):
        rows = np.arange(first, first + size)
        x = rows[:, None].astype(np.float32) * np.ones(width, np.float32)
        batches.append(Batch({"x": x}, rows * 10, first, size))
        first += size
    return Listed(batches)


def rows(batches: Sequence[list[Part]]) -> list[int]:
    return [int(row) for batch in batches for part in batch for row in part.rows]


def check(batches: Sequence[list[Part]]) -> None:
    """Feeds, labels and numbers belong together."""
    for part in (part for batch in batches for part in batch):
        assert part.size == len(part.rows)
        np.testing.assert_array_equal(part.feeds["x"][:, 0].numpy(), part.rows)
        assert part.labels is not None
        np.testing.assert_array_equal(part.labels.numpy(), part.rows * 10)


def test_every_sample_comes_once_in_an_epoch() -> None:
    given = samples(alike())
    batches = list(given.epoch(0, 0))
    assert sorted(rows(batches)) == list(range(COUNT))
    assert [sum(part.size for part in batch) for batch in batches] == [5, 5, 5, 5, 3]
    assert (given.count, given.steps) == (COUNT, 5)
    check(batches)


def test_the_order_follows_from_seed_and_epoch() -> None:
    given = samples(alike())
    orders = {key: rows(list(given.epoch(*key))) for key in ((0, 0), (0, 1), (1, 0))}
    assert orders[0, 0] == rows(list(samples(alike()).epoch(0, 0)))
    assert len({tuple(order) for order in orders.values()}) == 3
    assert list(range(COUNT)) not in orders.values()


def test_how_the_source_cuts_them_does_not_matter() -> None:
    orders = [rows(list(samples(alike(s)).epoch(3, 1))) for s in ((8, 8, 7), (23,), (1, 22))]
    assert orders[0] == orders[1] == orders[2]


@pytest.mark.parametrize("skip", [0, 1, 4, 5])
@pytest.mark.parametrize("memory", [MEMORY_BYTES, 8 * _SAMPLE_BYTES])
def test_an_epoch_can_be_continued(skip: int, memory: int) -> None:
    given = samples(alike(), memory=memory)
    whole = list(given.epoch(0, 2))
    assert rows(list(given.epoch(0, 2, skip=skip))) == rows(whole[skip:])


def test_what_fits_into_memory_is_read_once() -> None:
    data = alike()
    given = samples(data)
    for number in range(3):
        list(given.epoch(0, number))
    assert data.passes == 1


@pytest.mark.parametrize("sizes", [(8, 8, 7), (1,) * 23, (23,), (3, 20)])
def test_windows_give_every_sample_once(sizes: Sequence[int]) -> None:
    data = alike(sizes)
    given = samples(data, memory=8 * _SAMPLE_BYTES)
    batches = list(given.epoch(0, 0))
    assert sorted(rows(batches)) == list(range(COUNT))
    check(batches)
    assert data.passes == 2
    assert len(batches) <= given.steps
    assert rows(batches) != rows(list(given.epoch(0, 1)))


def test_a_window_holds_no_more_than_fits() -> None:
    """The first eight samples come before all others."""
    given = samples(alike((1,) * 23), memory=8 * _SAMPLE_BYTES)
    order = rows(list(given.epoch(0, 0)))
    assert sorted(order[:8]) == list(range(8))
    assert order[:8] != list(range(8))


# shapes that differ


@pytest.mark.parametrize("memory", [MEMORY_BYTES, 20])
def test_batches_of_other_shapes_are_parts(memory: int) -> None:
    given = samples(varied(), 4, memory=memory)
    batches = list(given.epoch(0, 0))
    assert sorted(rows(batches)) == list(range(10))
    check(batches)
    assert all(sum(part.size for part in batch) >= 4 for batch in batches[:-1])


def test_their_order_changes_as_well() -> None:
    given = samples(varied(), 4)
    assert len({tuple(rows(list(given.epoch(0, number)))) for number in range(6)}) > 1


def test_steps_are_counted_by_what_the_source_gives() -> None:
    """Parts larger than a batch are batches: the learning rate must not end half way."""
    assert samples(varied(), 1).steps == 4
    assert samples(varied(), 100).steps == 1


def test_axis_0_of_something_else_is_not_that_of_samples() -> None:
    """One tensor for all samples of a batch, or another number of rows."""
    x = np.zeros((6, 2), np.float32)
    batches = [Batch({"x": x, "k": np.float32(1)}, None, 0, 3), Batch({"x": x}, None, 3, 3)]
    for batch in batches:
        (part,), *rest = samples(Listed([batch]), 3).epoch(0, 0)
        assert not rest
        np.testing.assert_array_equal(part.feeds["x"], x)
        assert part.labels is None


# a model that fixes how many samples it takes


def test_parts_have_the_size_that_the_model_takes() -> None:
    given = samples(alike(), 5, fixed=2)
    batches = list(given.epoch(0, 0))
    assert {part.size for batch in batches for part in batch} == {2}
    assert [len(batch) for batch in batches] == [3, 3, 3, 2]
    assert given.steps == 4
    assert len(set(rows(batches))) == 22  # one is left over, another one in each epoch
    left = [set(range(COUNT)) - set(rows(list(given.epoch(0, number)))) for number in range(4)]
    assert len({tuple(rest) for rest in left}) > 1


def test_fewer_samples_than_the_model_takes_are_refused() -> None:
    with pytest.raises(SourceError, match="takes 32 samples at a time, and there are 23"):
        samples(alike(), fixed=32)


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        ({"x": (4, 3), "y": (4,)}, 4),
        ({"x": ("N", 3)}, None),
        ({"x": (4, 3), "y": (2,)}, None),
        ({"x": (4, 3), "y": ("N",)}, None),
        ({"x": (4, 3), "rate": ()}, 4),
        ({"x": (None, 3)}, None),
        ({"x": None}, None),
    ],
)
def test_the_size_is_that_of_the_first_axis(shapes: Any, size: int | None) -> None:
    assert fixed_batch(shapes) == size


# types


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("uint8", "int64"), ("bool", "int64"), ("float64", "float32"), ("float16", "float32")],
)
def test_labels_are_what_losses_want(kind: str, wanted: str) -> None:
    data = cut({"x": X}, np.ones(COUNT, kind), [COUNT])
    (part,) = next(iter(samples(data).epoch(0, 0)))
    assert part.labels is not None
    assert str(part.labels.dtype) == f"torch.{wanted}"


def test_labels_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ModelExecutionError, match="cannot be learned from"):
        samples(cut({"x": X}, np.full(COUNT, "cat"), [COUNT]))
