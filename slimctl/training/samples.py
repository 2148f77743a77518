"""Samples in the order in which a model sees them: shuffled anew in every epoch, by seed.

Samples of one shape are put into an array in memory and drawn row by row. Where there are more
than fit, windows as large as fit are shuffled one after the other; where shapes differ, the
batches that the source gives are shuffled as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slimctl.core.contract import Progress, TrainingBatch, TrainingData
from slimctl.core.errors import ModelExecutionError, SourceError
from slimctl.training.tensors import to_torch

MEMORY_BYTES = 2 * 2**30
"""What samples may take."""


@dataclass(frozen=True)
class Part:
    """What is run at once.

    Attributes:
        feeds: Inputs by name.
        labels: One per sample along axis 0; None when there are none.
        rows: Numbers of the samples, counted over the source, [N].
        size: How many samples.
    """

    feeds: dict[str, Tensor]
    labels: Tensor | None
    rows: NDArray[np.int64]
    size: int

    def to(self, device: torch.device) -> Part:
        """The same on a device."""
        feeds = {name: tensor.to(device) for name, tensor in self.feeds.items()}
        labels = None if self.labels is None else self.labels.to(device)
        return Part(feeds, labels, self.rows, self.size)


class Samples:
    """Batches for training.

    A batch is a list of parts whose gradients are added up: one part where the model takes as many
    samples as there are in a batch, several where it fixes how many, or where shapes differ.

    Attributes:
        count: How many samples there are.
        steps: How many batches an epoch has; about, where shapes or windows decide that.

    Args:
        data: Where they come from.
        batch_size: Samples in a batch.
        fixed: Samples that the model takes at a time, if it fixes that.
        progress: Where to say how far reading is.
        memory: Bytes that samples may take.

    Raises:
        SourceError: There are fewer samples than the model takes at a time.
    """

    def __init__(
        self,
        data: TrainingData,
        batch_size: int,
        *,
        fixed: int | None,
        progress: Progress,
        memory: int = MEMORY_BYTES,
    ) -> None:
        self._data, self._batch_size, self._fixed = data, batch_size, fixed
        self._memory = memory
        self._window: list[TrainingBatch] = []
        batches = progress.track(
            data.batches(), total=data.sample_count, label="reading training samples"
        )
        self.count, size, whole = 0, 0, True
        sizes: list[int] = []
        first: TrainingBatch | None = None
        alike = True
        for batch in batches:
            first = first or batch
            alike = alike and _divisible(batch, first)
            sizes.append(batch.size)
            self.count += batch.size
            size += _bytes(batch)
            whole = whole and size <= memory
            if whole:
                self._window.append(batch)
        self._whole = _Rows.of(self._window) if whole else None
        if self._whole is not None or not whole:
            self._window = []
        self._in_memory = whole
        if fixed and self.count < fixed:
            raise SourceError(
                "training data",
                f"The model takes {fixed} samples at a time, and there are {self.count}",
                fix="give more samples, or export the model for any number of them",
            )
        if alike:
            part = fixed or batch_size
            sizes = [part] * (self.count // part)
            sizes += [] if fixed or not self.count % part else [self.count % part]
        self.steps = _batches(sizes, batch_size)

    def epoch(self, seed: int, number: int, *, skip: int = 0) -> Iterator[list[Part]]:
        """All samples once.

        Args:
            seed: Of the order.
            number: Of the epoch: each has an order of its own.
            skip: So many batches at the beginning are left out.
        """
        random = np.random.default_rng((seed, number))
        waiting: list[Part] = []
        held = index = 0
        for part in self._parts(random):
            waiting.append(part)
            held += part.size
            if held >= self._batch_size:
                if index >= skip:
                    yield waiting
                waiting, held, index = [], 0, index + 1
        if waiting and index >= skip:
            yield waiting

    def _parts(self, random: np.random.Generator) -> Iterator[Part]:
        if self._whole is not None:
            yield from self._whole.drawn(random, self._fixed or self._batch_size, self._fixed)
        elif self._in_memory:
            for index in random.permutation(len(self._window)):
                yield _part(self._window[index])
        else:
            for window in self._windows():
                rows = _Rows.of(window)
                if rows is None:
                    for index in random.permutation(len(window)):
                        yield _part(window[index])
                else:
                    yield from rows.drawn(random, self._fixed or self._batch_size, self._fixed)

    def _windows(self) -> Iterator[list[TrainingBatch]]:
        window: list[TrainingBatch] = []
        size = 0
        for batch in self._data.batches():
            window.append(batch)
            size += _bytes(batch)
            if size >= self._memory:
                yield window
                window, size = [], 0
        if window:
            yield window


class _Rows:
    """Samples along axis 0 of arrays."""

    def __init__(
        self, feeds: dict[str, Tensor], labels: Tensor | None, rows: NDArray[np.int64]
    ) -> None:
        self.feeds, self.labels, self.rows = feeds, labels, rows

    @classmethod
    def of(cls, batches: Sequence[TrainingBatch]) -> _Rows | None:
        """The samples of all batches; None where they do not fit together."""
        if not batches or not all(_divisible(batch, batches[0]) for batch in batches):
            return None
        feeds = {
            name: to_torch(np.concatenate([batch.feeds[name] for batch in batches]))
            for name in batches[0].feeds
        }
        labels = None
        if batches[0].labels is not None:
            labels = _labels(np.concatenate([batch.labels for batch in batches]))  # type: ignore[misc]  # all have labels, or none
        rows = np.concatenate([np.arange(b.first, b.first + b.size) for b in batches])
        return cls(feeds, labels, rows)

    def drawn(self, random: np.random.Generator, size: int, fixed: int | None) -> Iterator[Part]:
        """Random parts of ``size`` samples; what is left over is a smaller one, or left out."""
        order = random.permutation(len(self.rows))
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            if fixed and len(chosen) < fixed:
                return
            index = torch.from_numpy(chosen)
            feeds = {name: tensor[index] for name, tensor in self.feeds.items()}
            labels = None if self.labels is None else self.labels[index]
            yield Part(feeds, labels, self.rows[chosen], len(chosen))


def _batches(parts: Sequence[int], batch_size: int) -> int:
    """How many batches parts of these sizes make; about as many as in another order."""
    count = held = 0
    for size in parts:
        held += size
        if held >= batch_size:
            count, held = count + 1, 0
    return count + bool(held)


def _divisible(batch: TrainingBatch, first: TrainingBatch) -> bool:
    """Whether the samples lie along axis 0 of every array, shaped as those of another batch."""
    labels = batch.labels
    if labels is not None and first.labels is not None:
        if labels.shape[1:] != first.labels.shape[1:]:
            return False
    elif labels is not first.labels:
        return False
    return all(
        array.ndim > 0
        and array.shape[0] == batch.size
        and array.shape[1:] == first.feeds[name].shape[1:]
        for name, array in batch.feeds.items()
    )


def _part(batch: TrainingBatch) -> Part:
    feeds = {name: to_torch(array) for name, array in batch.feeds.items()}
    labels = None if batch.labels is None else _labels(batch.labels)
    rows = np.arange(batch.first, batch.first + batch.size)
    return Part(feeds, labels, rows, batch.size)


def _labels(array: NDArray[np.generic]) -> Tensor:
    """Integers as int64, as losses want them; anything else as float32."""
    if array.dtype.kind in "iub":
        return torch.from_numpy(array.astype(np.int64))
    if array.dtype.kind == "f":
        return torch.from_numpy(array.astype(np.float32))
    raise ModelExecutionError(
        f"Labels of type {array.dtype} cannot be learned from",
        fix="give numbers: classes as integers, targets as floats",
    )


def _bytes(batch: TrainingBatch) -> int:
    return sum(array.nbytes for array in batch.feeds.values())


def fixed_batch(shapes: Mapping[str, Sequence[int | str | None] | None]) -> int | None:
    """How many samples a model takes at a time, by the first axis of its inputs; None for any."""
    firsts = {shape[0] for shape in shapes.values() if shape}
    sizes = {size for size in firsts if isinstance(size, int)}
    return sizes.pop() if len(sizes) == 1 and len(firsts) == 1 else None
