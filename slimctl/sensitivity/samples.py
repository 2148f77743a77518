"""The samples of a scan: the first in memory, the others read again when a probe wants them."""

from __future__ import annotations

from collections.abc import Iterator

from slimctl.core.errors import SourceError
from slimctl.data.batch import Batch
from slimctl.data.sources import DataSource

LIMIT = 1 << 30
"""Bytes of samples in memory. Most probes know their error after a few samples, so those beyond are
read seldom: by ``--metric``, ``--tolerance 0``, and where single samples differ much."""


class Samples:
    """Batches by number, as if all were in a list; one of those beyond the limit is held at a time.

    Probes ask for them in ascending order, several times for the one they are at: a pass over the
    source goes on from there. Going back behind it begins another pass.

    Args:
        source: Where they come from. It is read once to count them.

    Raises:
        DataError: The source cannot be read, or does not fit the model.
    """

    def __init__(self, source: DataSource) -> None:
        self._source = source
        self._first: list[Batch] = []
        self._count = 0
        self.size = 0
        held, full = 0, False
        for batch in source.batches():
            self._count += 1
            self.size += batch.size
            held += sum(array.nbytes for array in batch.feeds.values())
            full = full or held > LIMIT
            if not full:
                self._first.append(batch)
        self._pass: Iterator[tuple[int, Batch]] = iter(())
        self._at: tuple[int, Batch] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < self._count:
            raise IndexError(index)
        if index < len(self._first):
            return self._first[index]
        if self._at is None or self._at[0] > index:
            self._at, self._pass = None, enumerate(self._source.batches())
        while self._at is None or self._at[0] < index:
            self._at = None  # not two of them while the next is read
            self._at = next(self._pass, None)
            if self._at is None:
                raise SourceError(
                    self._source.spec,
                    f"It gave {self._count} batches at first, and fewer when it was read again",
                    fix="give a source that does not change during a scan",
                )
        return self._at[1]
