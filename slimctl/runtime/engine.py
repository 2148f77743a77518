"""Integer arithmetic of one step: exact sums, a device's sums, requantization, counting."""

from __future__ import annotations

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
        again: The same sums by the arithmetic of a device; int64, same shape.
        mixed: Whether unsigned codes are multiplied with signed weights.
    """

    accumulators: Accumulators
    bound: float
    again: Callable[[Sums], Array]
    mixed: bool


class Target(NamedTuple):
    """What accumulators become.

    Attributes:
        multiplier: Real value of an accumulator in steps of the output; broadcasts.
        zero_point: Of the output, a scalar.
        channel_axis: Axis of the output's channels, None if there is none.
        through_matrices: The device's matrix kernel computes the sums.
    """

    multiplier: NDArray[np.float32]
    zero_point: Array
    channel_axis: int | None = None
    through_matrices: bool = True


@dataclass
class Engine:
    """Integer arithmetic of one step.

    Attributes:
        device: Whose arithmetic it is.
        counts: What was counted; None where nobody asked.
        tracing: Whether the values that were last rounded are kept.
        exact: Those values in steps of the output, without its zero point; None before.
    """

    device: Device = EXACT
    counts: Counts | None = None
    tracing: bool = False
    exact: Array | None = field(default=None, repr=False)
    _memo: dict[str, tuple[tuple[Any, ...], Any]] = field(default_factory=dict, repr=False)

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

    def codes(self, summed: Summed, bias: Array | None, target: Target) -> Array:
        """Accumulators as codes of the output, in this device's arithmetic.

        Args:
            summed: Sums of products.
            bias: int32, broadcasts; None if there is none.
            target: What they become.
        """
        device = self.device
        kind = QuantizedType(target.zero_point.dtype, *_limits(target.zero_point))
        kept = summed.accumulators if device.is_exact else summed.accumulators.copy()
        total = summed.accumulators
        if bias is not None:
            total = add_bias(total, bias, summed.bound)
        total, outside = wrapped(total)
        if self.tracing:
            self.exact = total.astype(np.float64) * target.multiplier
        exact = _requantized(total, target, kind, np.rint)
        if self.counts is not None:
            self.counts.overflowed += outside
            self.counts.add(exact, target.channel_axis)
        if device.is_exact:
            return exact
        sums = self._device_sums(summed)
        if sums is not None and target.through_matrices:
            kept = summed.again(sums)
        kept = kept.astype(np.int64) + (0 if bias is None else bias.astype(np.int64))
        if not device.zero_points:
            target = target._replace(zero_point=np.zeros_like(target.zero_point))
        found = _requantized(kept, target, kind, device.rounding)
        if self.counts is not None:
            self.counts.add_device(exact, found)
        return found

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
        exact = self.device.only_mixed and not summed.mixed
        return None if exact else self.device.sums

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
        kind = QuantizedType(zero_point.dtype, *_limits(zero_point))
        one = np.asarray(1.0, values.dtype)
        if self.tracing:
            self.exact = values.astype(np.float64)
        copy = None if self.device.rounding is np.rint else values.copy()
        exact = _rounded(values, one, zero_point, kind, np.rint)
        if self.counts is not None:
            self.counts.add(exact, channel_axis)
        if copy is None:
            return exact
        found = _rounded(copy, one, zero_point, kind, self.device.rounding)
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


_CACHED = 1 << 17  # elements: four bytes of each stay in the second-level cache


def _requantized(
    total: Accumulators, target: Target, kind: QuantizedType, rounding: Round
) -> Array:
    return _rounded(total, target.multiplier, target.zero_point, kind, rounding)


def _rounded(
    total: Array, multiplier: Array, zero_point: Array, kind: QuantizedType, rounding: Round
) -> Array:
    """Requantizes block by block along axis 1: five passes over values that stay in the cache."""
    scalar = zero_point.reshape(-1)[0]
    if total.ndim < 2 or total.shape[0] != 1 or total.size <= _CACHED:
        return np.asarray(requantize(total, multiplier, scalar, kind, rounding))
    result = np.empty(total.shape, kind.dtype)
    step = max(_CACHED * total.shape[1] // total.size, 1)
    per_channel = multiplier.ndim == total.ndim and multiplier.shape[1] > 1
    for start in range(0, total.shape[1], step):
        part = (slice(None), slice(start, start + step))
        factor = multiplier[part] if per_channel else multiplier
        result[part] = requantize(total[part], factor, scalar, kind, rounding)
    return result
