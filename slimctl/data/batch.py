"""What flows out of a data source, and what each kind of source has to offer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from slimctl.core.contract import Feeds


@dataclass(frozen=True)
class Batch:
    """What one run of the model gets.

    Attributes:
        feeds: One array per model input.
        labels: One label per sample along axis 0, each a number or an array; None when the source
            has none.
        first: Index of the first sample, counted over the samples that are used.
        size: Number of samples.
    """

    feeds: Feeds
    labels: NDArray[Any] | None
    first: int
    size: int


@dataclass(frozen=True)
class Chunk:
    """What a reader yields: one sample, or one batch that the user put together.

    Attributes:
        feeds: One array per model input, of the model's rank.
        labels: One label per sample along axis 0, a number or an array, or None.
        place: Name for messages, such as ``calib.npz[17]``.
        size: Number of samples.
        divisible: The samples lie along axis 0 of every array, and the model takes any number.
    """

    feeds: Feeds
    labels: NDArray[Any] | None
    place: str
    size: int = 1
    divisible: bool = False

    def rows(self, wanted: Any) -> Chunk:
        """The chunk with some of its samples; ``wanted`` indexes axis 0 (a slice or a mask)."""
        feeds = {name: _rows(array, wanted) for name, array in self.feeds.items()}
        labels = None if self.labels is None else self.labels[wanted]
        size = len(range(self.size)[wanted]) if isinstance(wanted, slice) else int(wanted.sum())
        return Chunk(feeds, labels, self.place, size, self.divisible)


def _rows(array: NDArray[Any], wanted: Any) -> NDArray[Any]:
    # A scalar input has no samples axis: it is the same for all of them.
    return array if array.ndim == 0 else array[wanted]


class Reader(Protocol):
    """One kind of source. Readers check names, dtypes and shapes; values are checked once, later.

    Attributes:
        kind: Name of the kind, for the manifest.
        batched: Each chunk is a batch of its own and is never merged with another.
        fixed_batch: Batch size that the model demands of merged samples, or None.
        mergeable: Samples can be put together along axis 0.
        sample_count: Number of samples, None when only reading tells.
        labeled: Every chunk has labels.
        takes_images: It makes arrays of images, so that ``--preprocess`` has a meaning.
    """

    kind: str
    batched: bool
    fixed_batch: int | None
    mergeable: bool
    sample_count: int | None
    labeled: bool
    takes_images: bool

    def chunks(self) -> Iterator[Chunk]:
        """A new pass over the data, always the same."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the manifest should know besides counts, JSON types only."""
        ...

    def fingerprint(self, samples: int) -> str | None:
        """Hash that decides the first samples without decoding them, None when there is none."""
        ...
