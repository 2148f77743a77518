"""Inputs for the checks: a few real samples if there are any, and random ones of their shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slimctl.core.contract import Feeds
from slimctl.data.batch import Batch
from slimctl.data.random_data import random_feeds
from slimctl.graph.edit import Dimension, Interface, Port

SAMPLES = 4
"""Real samples that are run after every step: enough to see a broken step, cheap enough to do it
every time. Gates and ``slimctl verify`` judge with all of the data."""

MOST_SAMPLES = 16
"""As many where two models are told apart, and for every step where they are small, up to
:data:`_VALUES` in all: a frame of sound says little."""

_VALUES = 600_000

_WORK = 50_000_000_000
"""Multiply-accumulates that samples of tokens may take in all after every step, one per token and
weight: a few seconds on two cores. Large models are run on fewer and shorter samples."""

SHORT = 128
"""Tokens that are left of long samples of large models: predictions of more say little more about
a step, and logits of 512 tokens and 50,000 words are 100 MB, of several models at a time."""

_LOOK = 64
"""Samples from which those are taken, evenly: the first ones of a recording may be silence, and
decoding thousands of images to see four of them would take longer than everything else."""

_SIZES = (32, 64, 256, 512, 1)
"""What a dynamic dimension other than the batch may be, most likely first: many image models want
multiples of 32, speech models frames of 256 or 512."""


@dataclass(frozen=True)
class Probes:
    """What the checks feed to a model.

    Attributes:
        samples: Real inputs; SQNR is measured on these.
        random: Random inputs; EXACT claims are tested on these. None when no random input fits.
    """

    samples: tuple[Feeds, ...] = ()
    random: Feeds | None = None

    def chosen(self, *, exact: bool) -> tuple[Feeds, ...]:
        """What a step is judged on: random inputs only where EXACT is claimed, or all there is."""
        return self.all if exact or not self.samples else self.samples

    @property
    def all(self) -> tuple[Feeds, ...]:
        """All inputs, random ones last."""
        return self.samples if self.random is None else (*self.samples, self.random)


def random_like(sample: Feeds, seed: int) -> Feeds:
    """Random inputs with the shapes, types, mean and spread of a sample.

    Integers (token numbers, lengths, sample rates) and texts are taken over: most models accept
    few values there.
    """
    generator = np.random.default_rng(seed)
    return {name: _noise_like(array, generator) for name, array in sample.items()}


def same_feeds(one: Feeds, other: Feeds) -> bool:
    """Whether two inputs hold the same."""
    return all(np.array_equal(array, other[name]) for name, array in one.items())


def _noise_like(array: NDArray[Any], generator: np.random.Generator) -> NDArray[Any]:
    if not np.issubdtype(array.dtype, np.floating) or array.size == 0:
        return array
    values = array.astype(np.float64)
    spread = float(values.std()) or 1.0
    noise = generator.standard_normal(array.shape) * spread + float(values.mean())
    return np.asarray(noise.astype(array.dtype))


def random_candidates(interface: Interface, seed: int) -> Iterator[Feeds]:
    """Random inputs that may fit an interface, likeliest first; nothing for non-tensor inputs.

    An open first axis is a batch of one. All other open axes get one size; after that only the last
    axis of each input does and the others get 1, since they may be batches too (recurrent states).
    """
    if any(port.dtype is None or port.shape is None for port in interface.inputs):
        return
    for only_last in (False, True):
        for size in _SIZES:
            sizes = {port.name: _shape(port, size, only_last) for port in interface.inputs}
            yield random_feeds(interface, seed=seed, sizes=sizes)


def _shape(port: Port, size: int, only_last: bool) -> tuple[int, ...]:
    shape = port.shape or ()
    last = len(shape) - 1
    return tuple(
        dim if isinstance(dim, int) else 1 if axis == 0 or (only_last and axis < last) else size
        for axis, dim in enumerate(shape)
    )


def cut_samples(feeds: Feeds, interface: Interface, size: int) -> tuple[Feeds, ...]:
    """The single samples of a batch; the whole batch where it cannot be cut.

    Args:
        feeds: One batch.
        interface: The model's.
        size: Number of samples in the batch.
    """
    shapes = {port.name: port.shape for port in interface.inputs}
    if not all(_is_batch(array, shapes.get(name), size) for name, array in feeds.items()):
        return (feeds,)
    return tuple(
        {name: array[index : index + 1] for name, array in feeds.items()} for index in range(size)
    )


class Spread(NamedTuple):
    """Samples from all over the data.

    Attributes:
        few: For every step.
        more: Others, for telling models apart.
    """

    few: tuple[Feeds, ...]
    more: tuple[Feeds, ...]


def take_samples(batches: Iterable[Batch], interface: Interface) -> list[Feeds]:
    """At most :data:`MOST_SAMPLES` out of the first :data:`_LOOK`, evenly spread.

    Args:
        batches: Of a data source; as few as needed are read.
        interface: The model's.
    """
    singles = (one for batch in batches for one in cut_samples(batch.feeds, interface, batch.size))
    kept: list[Feeds] = []
    stride = 1
    for index, sample in enumerate(islice(singles, _LOOK)):
        if index % stride == 0:
            # A copy: a view of one sample would keep its whole batch in memory.
            kept.append({name: array.copy() for name, array in sample.items()})
        if len(kept) == 2 * MOST_SAMPLES:
            kept, stride = kept[::2], 2 * stride
    return kept[:: -(-len(kept) // MOST_SAMPLES)] if kept else []


def spread_samples(samples: Sequence[Feeds], parameters: int) -> Spread:
    """Samples for every step, evenly spread, and the others.

    Args:
        samples: From :func:`take_samples`.
        parameters: Elements of the model's weights.
    """
    step = -(-len(samples) // _number_for_every_step(samples, parameters)) if samples else 1
    others = (samples[i] for i in range(len(samples)) if i % step)
    return Spread(tuple(samples[::step]), tuple(others))


def _number_for_every_step(samples: Sequence[Feeds], parameters: int) -> int:
    size = sum(array.size for array in samples[0].values())
    number = min(max(_VALUES // max(size, 1), SAMPLES), MOST_SAMPLES)
    work = _tokens(samples[0]) * parameters
    return min(number, max(_WORK // work, 1)) if work else number


def _tokens(sample: Feeds) -> int:
    """Tokens of a sample that is nothing but numbers of tokens and the like, [1, tokens] each."""
    shapes = {array.shape for array in sample.values()}
    whole = all(array.dtype.kind in "iub" for array in sample.values())
    (shape,) = shapes if len(shapes) == 1 else ((),)
    return int(shape[1]) if whole and len(shape) == 2 and shape[0] == 1 else 0


def shortened(
    samples: Sequence[Feeds], interface: Interface, parameters: int
) -> list[Feeds] | None:
    """The beginnings of samples of tokens; None where whole ones are not too much work.

    Args:
        samples: From :func:`take_samples`.
        interface: The model's: tells whether it takes samples of any length.
        parameters: Elements of the model's weights.
    """
    longest = max(map(_tokens, samples), default=0)
    open_axes = all(p.shape and not isinstance(p.shape[-1], int) for p in interface.inputs)
    if not open_axes or longest <= SHORT or SAMPLES * longest * parameters <= _WORK:
        return None
    return [{name: array[:, :SHORT] for name, array in one.items()} for one in samples]


def _is_batch(array: NDArray[Any], shape: tuple[Dimension, ...] | None, size: int) -> bool:
    holds_samples = array.ndim > 0 and array.shape[0] == size
    return holds_samples and shape is not None and not isinstance(shape[0], int)
