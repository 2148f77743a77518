"""Integer arithmetic of one step: exact sums, a device's sums, requantization, counting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import is_
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from slimctl.numerics.affine import along
from slimctl.numerics.integer import Round
from slimctl.runtime.convolve import put_block
from slimctl.runtime.counts import Counts
from slimctl.runtime.device import EXACT, Device
from slimctl.runtime.sums import (
    NOTHING,
    Added,
    Summed,
    Target,
    Total,
    part_of,
    summed_at_once,
    to_codes,
    totals,
)

Array = NDArray[Any]
_T = TypeVar("_T")


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
            sources: The arrays, and what else it depends on. Constants are read-only; everything
                is the same object in every run, or is taken for something else.
            make: Makes it.
        """
        known, result = self._memo.get(key, ((), None))
        if len(known) == len(sources) and all(map(is_, known, sources)):
            return result  # type: ignore[no-any-return]  # what ``make`` gave under this key
        result = make()
        if all(map(_is_constant, sources)):
            if isinstance(result, np.ndarray):
                result.flags.writeable = False  # a constant, too
            self._memo[key] = sources, result
        return result

    def part(self, name: str) -> Engine:
        """The engine of one of several products of this step, with constants of its own."""
        if name not in self._parts:
            self._parts[name] = Engine(self.device, self.counts)
        return self._parts[name]

    def codes(self, summed: Summed, bias: Array | None, target: Target) -> Array:
        """Sums as codes of the output, in this device's arithmetic.

        Args:
            summed: Sums of products.
            bias: int32, broadcasts; None if there is none.
            target: What they become.
        """
        device = self.device
        if self.tracing or not device.is_exact:
            kept = summed.whole()
            summed = summed.replaced(kept)
            if self.tracing:
                self.exact = (kept if bias is None else kept + bias) * target.multiplier
        seen = self._by_device(summed)
        if seen is summed and device.rounding is np.rint and device.zero_points:
            return self._exact_codes(summed, bias, target)
        zero = target.zero_point if device.zero_points else np.zeros_like(target.zero_point)
        own = target._replace(zero_point=zero)
        found, _ = to_codes(totals(seen, Added.of(seen, bias)), seen, own, device.rounding)
        if self.counts is not None:
            self.counts.add_device(self._exact_codes(summed, bias, target), found)
        return found

    def _exact_codes(self, summed: Summed, bias: Array | None, target: Target) -> Array:
        added = NOTHING
        if summed.complete is None:
            sources = (summed.offset, bias, summed.bound)
            added = self.prepared("added", sources, lambda: Added.of(summed, bias))
        codes, outside = to_codes(totals(summed, added), summed, target)
        if self.counts is not None:
            self.counts.overflowed += outside
            self.counts.add(codes, target.channel_axis)
        return codes

    def seen(self, codes: Array, zero_point: Array) -> tuple[Array, Array]:
        """Codes and zero point as a device's matrix kernel gets them.

        On x86 onnxruntime makes int8 activations between Q/DQ pairs uint8 (QDQS8ToU8Transformer).
        """
        if self.device.sums is None or not self.in_region or codes.dtype != np.int8:
            return codes, zero_point
        return codes.view(np.uint8) ^ np.uint8(128), zero_point.view(np.uint8) ^ np.uint8(128)

    def sums(self, summed: Summed) -> NDArray[np.int32]:
        """Sums as int32."""
        result = np.empty(summed.shape, np.int32)
        seen = self._by_device(summed)
        for place, sums, outside in totals(seen, Added.of(seen, None)):
            put_block(result, place, sums)
            self._count_overflow(outside)
        return result

    def values(
        self, summed: Summed, bias: Array | None, scale: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Sums as real numbers: ``float32(sum) * scale``.

        Args:
            summed: Sums of products.
            bias: int32, broadcasts; None if there is none.
            scale: Real value of one step of the sums; broadcasts.
        """
        result = np.empty(summed.shape, np.float32)
        seen = self._by_device(summed)
        for place, sums, outside in totals(seen, Added.of(seen, bias)):
            reals = sums.astype(np.float32, copy=False)
            put_block(result, place, np.multiply(reals, part_of(scale, place, reals.ndim)))
            self._count_overflow(outside)
        return result

    def _count_overflow(self, outside: int) -> None:
        if self.counts is not None:
            self.counts.overflowed += outside

    def _by_device(self, summed: Summed) -> Summed:
        """The sums that the device computes; the same object where it adds exactly."""
        device = self.device
        exact = device.only_mixed and not summed.mixed
        exact |= device.direct_depthwise and summed.depthwise
        if exact or device.sums is None:
            return summed
        return summed.replaced(summed.again(device.sums))

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
        exact = _requantized(values, target, np.rint)
        if self.counts is not None:
            self.counts.add(exact, channel_axis)
        if copy is None:
            return exact
        found = _requantized(copy, target, self.device.rounding)
        if self.counts is not None:
            self.counts.add_device(exact, found)
        return found


def _requantized(values: Array, target: Target, rounding: Round) -> Array:
    summed = summed_at_once(values, 0.0)
    blocks = (Total(place, block) for place, block in summed.blocks())
    return to_codes(blocks, summed, target, rounding)[0]


def channelwise(values: Array, ndim: int, axis: int) -> Array:
    """One value per channel, or one in all, so that it broadcasts; float32 stays float32."""
    flat = values.reshape(-1)
    return flat.reshape(()) if flat.size == 1 else along(flat, axis, ndim)


def _is_constant(source: Any) -> bool:
    return not isinstance(source, np.ndarray) or not source.flags.writeable
