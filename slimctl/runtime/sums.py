"""Sums of products of codes, and what they become: computed a block at a time.

A block is small enough for the second-level cache, so that none of the passes that requantize it
goes to memory, and no array of all sums is ever needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slimctl.numerics.affine import QuantizedType, along
from slimctl.numerics.integer import (
    Accumulators,
    Round,
    add_bias,
    float_parts,
    requantize,
    wrapped,
)
from slimctl.runtime.channels_last import along_rows, empty_channels_last, is_channels_last
from slimctl.runtime.convolve import Block, put_block
from slimctl.runtime.device import Sums

Array: TypeAlias = NDArray[Any]
Place: TypeAlias = tuple[slice, ...]

_CACHED = 1 << 16
"""Elements of a block of an array: with some temporary arrays it stays in the cache."""


class Summed(NamedTuple):
    """Sums of products of codes.

    Attributes:
        shape: Of all of them.
        blocks: Computes exact sums without the offset; blocks may be overwritten.
        bound: Largest magnitude that one of those can have.
        again: All sums by the arithmetic of a device, in float64.
        mixed: Whether unsigned codes are multiplied with signed weights.
        depthwise: Whether each output depends on one channel only.
        offset: Integers to be added to the blocks; they broadcast.
        channels_last: Whether blocks have their channels side by side, as the codes shall.
        complete: Computes the blocks with the offset and the bias in them, where the products can
            add these as well.
    """

    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[Block]]
    bound: float
    again: Callable[[Sums], Array]
    mixed: bool
    depthwise: bool = False
    offset: Array | None = None
    channels_last: bool = False
    complete: Callable[[], Iterable[Block]] | None = None

    def empty(self, kind: np.dtype[Any]) -> Array:
        """A new array for what the sums become."""
        return (empty_channels_last if self.channels_last else np.empty)(self.shape, kind)

    def whole(self) -> NDArray[np.float64]:
        """All sums, the offset added, in a new array."""
        result = np.empty(self.shape)
        for place, sums in self.blocks():
            put_block(result, place, sums)
        return result if self.offset is None else np.add(result, self.offset, out=result)

    def replaced(self, sums: Array) -> Summed:
        """The same with other sums, float64 of the same shape."""
        return self._replace(
            blocks=lambda: array_blocks(sums), offset=None, channels_last=False, complete=None
        )

    def per_channel(self, values: Array) -> Array:
        """One value for each of the channels, or one in all, as blocks are combined with it."""
        flat = values.reshape(-1)
        if flat.size == 1:
            return flat.reshape(())
        return (
            along_rows(flat, self.shape[3])
            if self.channels_last
            else along(flat, 1, len(self.shape))
        )


class Target(NamedTuple):
    """What sums become.

    Attributes:
        multiplier: Real value of a sum in steps of the output; broadcasts.
        zero_point: Of the output, a scalar; its type is that of the codes.
        channel_axis: Axis of the output's channels, None if there is none.
    """

    multiplier: NDArray[np.floating[Any]]
    zero_point: Array
    channel_axis: int | None = None


class Total(NamedTuple):
    """A block of sums that are complete.

    Attributes:
        place: Where it belongs.
        sums: May be overwritten.
        outside: How many did not fit into int32.
    """

    place: Place
    sums: Accumulators
    outside: int = 0


def summed_at_once(sums: Accumulators, bound: float) -> Summed:
    """Sums that are there already, and the same on every device; they may be overwritten."""
    return Summed(
        sums.shape,
        lambda: array_blocks(sums),
        bound,
        lambda _: sums.astype(np.float64),
        mixed=False,
        channels_last=is_channels_last(sums),
    )


def array_blocks(values: Array) -> Iterator[Block]:
    """Parts of an array of about the size of the cache; all of it if it is small.

    They are parts of axis 1, or of the rows of an image whose channels lie side by side.
    """
    if values.ndim < 2 or values.size <= _CACHED:
        yield (), values
        return
    axis = 2 if is_channels_last(values) else 1
    step = max(_CACHED * values.shape[axis] // values.size, 1)
    for start in range(0, values.shape[axis], step):
        place = (*(slice(None),) * axis, slice(start, start + step))
        yield place, values[place]


class Added(NamedTuple):
    """What is added to sums of products: their offset, and a bias.

    Attributes:
        whole: Integers that broadcast, None for nothing.
        parts: The same for sums in float32, see ``float_parts``.
        bound: Largest magnitude of the sums.
    """

    whole: Array | None
    parts: tuple[Array, ...] | None
    bound: float

    @classmethod
    def of(cls, summed: Summed, bias: Array | None) -> Added:
        """The offset of sums, and a bias that broadcasts."""
        offset = summed.offset
        whole = bias if offset is None else offset if bias is None else offset + bias
        parts = () if whole is None else float_parts(whole, summed.bound)
        return cls(whole, parts, summed.bound)

    def to(self, sums: Array, place: Place) -> Array:
        """The sums of a place with what belongs there; they may be overwritten."""
        if self.whole is None:
            return sums
        if self.parts is None or sums.dtype != np.float32:
            return add_bias(sums, part_of(self.whole, place, sums.ndim), self.bound)
        for part in self.parts:
            np.add(sums, part_of(part, place, sums.ndim), out=sums)
        return sums


NOTHING = Added(None, (), 0.0)


def totals(summed: Summed, added: Added) -> Iterator[Total]:
    """Sums with what is added to them, as int32 registers hold them."""
    if summed.complete is not None:
        yield from itertools.starmap(Total, summed.complete())
        return
    for place, sums in summed.blocks():
        yield Total(place, *wrapped(added.to(sums, place)))


def part_of(values: Array, place: Place, rank: int) -> Array:
    """What belongs to a place, of values that broadcast to an array of some rank."""
    if not place or values.size == 1:
        return values
    axes = zip(place[rank - values.ndim :], values.shape, strict=False)  # the last may be whole
    return values[tuple([part if size > 1 else slice(None) for part, size in axes])]


def to_codes(
    blocks: Iterable[Total], summed: Summed, target: Target, rounding: Round = np.rint
) -> tuple[Array, int]:
    """Codes, and how many sums did not fit into int32.

    Args:
        blocks: Of all that is requantized.
        summed: Shape and order of the result.
        target: What they become.
        rounding: Ties to even unless a device does otherwise.
    """
    zero, kind = target.zero_point.reshape(-1)[0], _full_range(target.zero_point.dtype)
    result, outside = summed.empty(kind.dtype), 0
    for place, sums, more in blocks:
        factor = part_of(target.multiplier, place, sums.ndim)
        put_block(result, place, requantize(sums, factor, zero, kind, rounding))
        outside += more
    return result, outside


@cache
def _full_range(kind: np.dtype[Any]) -> QuantizedType:
    limits = np.iinfo(kind)
    return QuantizedType(kind, int(limits.min), int(limits.max))
