"""Integer arithmetic of one step: exact sums, a device's sums, requantization, counting."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from slimctl.numerics.affine import QuantizedType, along
from slimctl.numerics.integer import Accumulators, Round, add_bias, requantize, wrapped
from slimctl.runtime.counts import Counts
from slimctl.runtime.device import EXACT, Device, Sums

Array = NDArray[Any]
_T = TypeVar("_T")


class Summed(NamedTuple):
    """Sums of products of codes.

    Attributes:
        accumulators: Exact sums.
        bound: Largest magnitude that one can have.
        again: The same sums by the arithmetic of a device, in float64.
        mixed: Whether unsigned codes are multiplied with signed weights.
        depthwise: Whether each output depends on one channel only.
    """

    accumulators: Accumulators
    bound: float
    again: Callable[[Sums], Array]
    mixed: bool
    depthwise: bool = False


class Target(NamedTuple):
    """What accumulators become.

    Attributes:
        multiplier: Real value of an accumulator in steps of the output; broadcasts.
        zero_point: Of the output, a scalar.
        channel_axis: Axis of the output's channels, None if there is none.
    """

    multiplier: NDArray[np.float32]
    zero_point: Array
    channel_axis: int | None = None


@dataclass
class Engine:
    """Integer arithmetic of one step.

    Attributes:
        device: Whose arithmetic it is.
        counts: What was counted; None where nobody asked.
        tracing: Whether the values that were last rounded are kept.
        in_region: Whether the operator stands for Q/DQ nodes.
        exact: Those values in steps of the output, without its zero point; None before.
    """

    device: Device = EXACT
    counts: Counts | None = None
    tracing: bool = False
    in_region: bool = False
    exact: Array | None = field(default=None, repr=False)
    _memo: dict[str, tuple[tuple[Any, ...], Any]] = field(default_factory=dict, repr=False)
    _parts: dict[str, Engine] = field(default_factory=dict, repr=False)

    def prepared(self, key: str, sources: tuple[Any, ...], make: Callable[[], _T]) -> _T:
        """What depends on some arrays; made once where all of them are constants.

        Args:
            key: Tells the uses within one step apart.
            sources: The arrays. Constants are read-only and the same objects in every run.
            make: Makes it.
        """
        known, result = self._memo.get(key, ((), None))
        if len(known) == len(sources) and all(map(_is_same, known, sources)):
            return result  # type: ignore[no-any-return]  # what ``make`` gave under this key
        result = make()
        if all(source is None or not source.flags.writeable for source in sources):
            self._memo[key] = sources, result
        return result

    def part(self, name: str) -> Engine:
        """The engine of one of several products of this step, with constants of its own."""
        if name not in self._parts:
            self._parts[name] = Engine(self.device, self.counts)
        return self._parts[name]

    def codes(self, summed: Summed, bias: Array | None, target: Target) -> Array:
        """Accumulators as codes of the output, in this device's arithmetic.

        Args:
            summed: Sums of products.
            bias: int32, broadcasts; None if there is none.
            target: What they become.
        """
        device = self.device
        if self.tracing:
            reals = summed.accumulators.astype(np.float64)
            self.exact = (reals if bias is None else reals + bias) * target.multiplier
        kept = summed.accumulators if device.is_exact else summed.accumulators.astype(np.float64)
        exact, outside = _codes(summed.accumulators, bias, summed.bound, target, np.rint)
        if self.counts is not None:
            self.counts.overflowed += outside
            self.counts.add(exact, target.channel_axis)
        if device.is_exact:
            return exact
        sums = self._device_sums(summed)
        if sums is not None:
            kept = summed.again(sums)
        if not device.zero_points:
            target = target._replace(zero_point=np.zeros_like(target.zero_point))
        found, _ = _codes(kept, bias, summed.bound, target, device.rounding)
        if self.counts is not None:
            self.counts.add_device(exact, found)
        return found

    def seen(self, codes: Array, zero_point: Array) -> tuple[Array, Array]:
        """Codes and zero point as a device's matrix kernel gets them.

        On x86 onnxruntime makes int8 activations between Q/DQ pairs uint8 (QDQS8ToU8Transformer).
        """
        if not self.in_region or codes.dtype != np.int8:
            return codes, zero_point
        return codes.view(np.uint8) ^ np.uint8(128), zero_point.view(np.uint8) ^ np.uint8(128)

    def sums(self, summed: Summed) -> NDArray[np.int32]:
        """Accumulators as int32."""
        exact, outside = wrapped(summed.accumulators)
        if self.counts is not None:
            self.counts.overflowed += outside
        sums = self._device_sums(summed)
        return (exact if sums is None else summed.again(sums)).astype(np.int32)

    def values(
        self, summed: Summed, bias: Array | None, scale: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Accumulators as real numbers: ``float32(accumulator) * scale``.

        Args:
            summed: Sums of products.
            bias: int32, broadcasts; None if there is none.
            scale: Real value of one accumulator step; broadcasts.
        """
        sums = self._device_sums(summed)
        accumulators = summed.accumulators if sums is None else summed.again(sums)
        total = accumulators if bias is None else add_bias(accumulators, bias, summed.bound)
        total, outside = wrapped(total)
        if self.counts is not None:
            self.counts.overflowed += outside
        return np.asarray(total.astype(np.float32) * scale)

    def _device_sums(self, summed: Summed) -> Sums | None:
        """How the device adds these products, None where that is exact."""
        device = self.device
        exact = device.only_mixed and not summed.mixed
        exact |= device.direct_depthwise and summed.depthwise
        return None if exact else device.sums

    def counted(self, codes: Array, channel_axis: int | None) -> Array:
        """Codes that were made without sums, counted."""
        if self.counts is not None:
            self.counts.add(codes, channel_axis)
        return codes

    def requantized(
        self, values: Array, zero_point: Array, channel_axis: int | None = None
    ) -> Array:
        """Real numbers in steps of the output as codes.

        Args:
            values: float32 or float64; overwritten.
            zero_point: Of the output, a scalar; its type is the output's.
            channel_axis: Axis of the output's channels, None if there is none.
        """
        if self.tracing:
            self.exact = values.astype(np.float64)
        target = Target(np.ones((), values.dtype), zero_point)
        copy = None if self.device.rounding is np.rint else values.copy()
        exact, _ = _codes(values, None, 0.0, target, np.rint)
        if self.counts is not None:
            self.counts.add(exact, channel_axis)
        if copy is None:
            return exact
        found, _ = _codes(copy, None, 0.0, target, self.device.rounding)
        if self.counts is not None:
            self.counts.add_device(exact, found)
        return found


def channelwise(values: Array, ndim: int, axis: int) -> Array:
    """One value per channel, or one in all, so that it broadcasts; float32 stays float32."""
    flat = values.reshape(-1)
    return flat.reshape(()) if flat.size == 1 else along(flat, axis, ndim)


def _is_same(known: Any, source: Any) -> bool:
    return known is source


def _limits(zero_point: Array) -> tuple[int, int]:
    limits = np.iinfo(zero_point.dtype)
    return int(limits.min), int(limits.max)


_CACHED = 1 << 16
"""Elements of a block: with some temporary arrays it stays in the second-level cache."""


def _codes(
    accumulators: Accumulators,
    bias: Array | None,
    bound: float,
    target: Target,
    rounding: Round,
) -> tuple[Array, int]:
    """Codes, and how many accumulators did not fit into int32.

    Large arrays go block by block along axis 1: each of the passes over them finds its values in
    the cache.
    """
    zero = target.zero_point
    kind = QuantizedType(zero.dtype, *_limits(zero))
    blocks = _blocks(accumulators.shape)
    result = np.empty(accumulators.shape, kind.dtype)
    outside = 0
    for block in blocks:
        total = accumulators[block]
        if bias is not None:
            total = add_bias(total, _part(bias, block, total.ndim), bound)
        if bound:
            total, found = wrapped(total)
            outside += found
        factor = _part(target.multiplier, block, total.ndim)
        result[block] = requantize(total, factor, zero.reshape(-1)[0], kind, rounding)
    return result, outside


_Block = tuple[slice, ...]


def _blocks(shape: tuple[int, ...]) -> list[_Block]:
    """Parts of axis 1 of about the size of the cache; one for what has no axis 1."""
    size = math.prod(shape)
    if len(shape) < 2 or size <= _CACHED:
        return [()]
    step = max(_CACHED * shape[1] // size, 1)
    return [(slice(None), slice(i, i + step)) for i in range(0, shape[1], step)]


def _part(values: Array, block: _Block, rank: int) -> Array:
    """What belongs to a block, of values that broadcast to an array of some rank."""
    if not block:
        return values
    wide = values.reshape((1,) * (rank - values.ndim) + values.shape)
    return wide if wide.shape[1] == 1 else wide[block]
