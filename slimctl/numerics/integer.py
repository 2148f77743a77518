"""Integer arithmetic on arrays: exact sums of products at the speed of float32, and requantization.

Products of 8-bit integers that are summed in float32 are exact as long as no partial sum can reach
2^24, whatever the order of summation and with or without fused multiply-add. A reduction is split
into parts for which that holds, and the parts are added in float64, which is exact up to 2^53.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slimctl.numerics.affine import Integer, QuantizedType

EXACT = 2**24
"""Up to here float32 holds every integer."""

INT32 = np.iinfo(np.int32)

Round: TypeAlias = Callable[..., Any]
"""As ``np.rint``: values and ``out``."""

Accumulators: TypeAlias = NDArray[Any]
"""Integers held in float32 (each below 2^24 in magnitude) or in float64."""


def largest(codes: Integer, zero_point: Integer | int = 0) -> int:
    """The largest magnitude of ``codes - zero_point`` that the type of the codes allows."""
    limits = np.iinfo(codes.dtype)
    zero_points = np.asarray(zero_point).astype(np.int64)
    if not zero_points.size:
        return 0
    return int(max(limits.max - zero_points.min(), zero_points.max() - limits.min))


def centered(codes: Integer, zero_point: Integer | int = 0) -> NDArray[np.float32]:
    """``codes - zero_point`` as float32, exact for types of up to 16 bits."""
    shift = np.asarray(zero_point).astype(np.float32)
    if not shift.any():
        return codes.astype(np.float32)
    return np.subtract(codes, shift, dtype=np.float32)


class Reduction(NamedTuple):
    """How a sum of products is computed.

    Attributes:
        parts: Slices of the reduced axis whose partial sums float32 holds exactly.
        bound: Largest magnitude that the whole sum can have.
    """

    parts: list[slice]
    bound: float


def exact_reduction(weight: NDArray[np.float32], bound: int) -> Reduction:
    """Parts of a reduction whose partial sums stay exact.

    Args:
        weight: Centered weights [..., terms], the reduced axis last.
        bound: Largest magnitude of what they are multiplied with.

    Returns:
        One part is enough for most trained layers: what counts is the actual sum of the weights'
        magnitudes, not the worst that the type allows.

    Raises:
        OverflowError: A single product does not fit.
    """
    terms = weight.shape[-1]
    flat = np.abs(weight.reshape(prod(weight.shape[:-1]), terms)).astype(np.float64)
    sums = np.zeros((flat.shape[0], terms + 1))
    np.cumsum(flat, axis=1, out=sums[:, 1:])
    parts: list[slice] = []
    start = 0
    while start < terms:
        reach = (sums - sums[:, start : start + 1]).max(axis=0, initial=0.0) * bound  # [terms + 1]
        stop = int(np.searchsorted(reach, EXACT, side="right")) - 1
        if stop <= start:
            raise OverflowError(f"a product of {bound} does not fit into float32")
        parts.append(slice(start, stop))
        start = stop
    return Reduction(parts or [slice(0, 0)], float(sums[:, -1].max(initial=0.0) * bound))


def uniform_reduction(terms: int, first: int, second: int) -> Reduction:
    """The same for factors of which only the largest magnitudes are known."""
    step = max(EXACT // max(first * second, 1), 1)
    parts = [slice(i, min(i + step, terms)) for i in range(0, terms, step)]
    return Reduction(parts or [slice(0, 0)], float(first * second * terms))


def exact_product(
    a: NDArray[np.float32], b: NDArray[np.float32], parts: Sequence[slice]
) -> Accumulators:
    """The matrix product of integers.

    Args:
        a: Centered values [..., m, terms].
        b: Centered values [..., terms, n].
        parts: Of the reduced axis, of a :class:`Reduction`.

    Returns:
        [..., m, n]: float32 from one part, float64 from several.
    """
    if len(parts) == 1:
        return np.asarray(np.matmul(a, b))
    total: Any = None
    for part in parts:
        product = np.matmul(a[..., part], b[..., part, :]).astype(np.float64)
        total = product if total is None else np.add(total, product, out=total)
    return np.asarray(total)


def float_parts(integers: NDArray[Any], bound: float) -> tuple[NDArray[np.float32], ...] | None:
    """Integers as float32 numbers that may be added to sums in float32, one after the other.

    Only the last addition rounds, and as the conversion of an int32 register to float32 does: to
    the nearest, ties to even. Those before it have results below 2^24.

    Args:
        integers: Of up to 32 bits.
        bound: Largest magnitude of the sums that they are added to, below 2^24.

    Returns:
        None where a total might not fit into int32.
    """
    exact = integers.astype(np.float64)
    high = exact.astype(np.float32)
    low = (exact - high).astype(np.float32)  # at most 2^7: float32 rounds 2^31 to multiples of 2^8
    if bound + float(np.abs(exact).max(initial=0.0)) > INT32.max:
        return None
    if not low.any():
        return (high,)
    return (low, high) if bound + float(np.abs(low).max()) < EXACT else None


def add_bias(accumulators: Accumulators, bias: Integer, bound: float) -> Accumulators:
    """Adds int32 biases that broadcast.

    Args:
        accumulators: From :func:`exact_product`; may be written into.
        bias: int32.
        bound: Largest magnitude that an accumulator can have.

    Returns:
        Exact in float64; in float32 rounded once.
    """
    parts = float_parts(bias, bound) if accumulators.dtype == np.float32 else None
    if parts is None:
        return np.add(accumulators, bias, dtype=np.float64)
    for part in parts:
        np.add(accumulators, part, out=accumulators)
    return accumulators


def _magnitude(values: Accumulators) -> float:
    return float(max(values.max(initial=0.0), -values.min(initial=0.0)))


def wrapped(accumulators: Accumulators) -> tuple[Accumulators, int]:
    """What is left of sums in int32 registers, and how many did not fit."""
    if accumulators.dtype == np.float32 or _magnitude(accumulators) <= INT32.max:
        return accumulators, 0
    sums = accumulators.astype(np.int64)
    outside = int(np.count_nonzero((sums > INT32.max) | (sums < INT32.min)))
    return sums.astype(np.int32).astype(np.float64), outside


def half_away(values: NDArray[Any], out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Rounds to the nearest integer, ties away from zero."""
    whole = np.trunc(values)
    # The rest is exact. Adding a half instead would round: 0.5 - 2^-25 and 0.5 are 1 in float32.
    away = np.abs(values - whole) >= 0.5
    return np.asarray(np.add(whole, np.copysign(away.astype(values.dtype), values), out=out))


def requantize(
    accumulators: Accumulators,
    multiplier: NDArray[np.floating[Any]],
    zero_point: Integer,
    kind: QuantizedType,
    rounding: Round = np.rint,
) -> NDArray[np.floating[Any]]:
    """``saturate(round(float32(accumulator) * multiplier) + zero_point)``.

    Args:
        accumulators: Any shape; overwritten where their type is that of the multiplier.
        multiplier: ``input scale * weight scale / output scale``, computed in float32 in this order
            as onnxruntime does (MlasRequantizeOutput); broadcasts.
        zero_point: Of the output, a scalar.
        kind: Type of the output.
        rounding: Ties to even unless a device does otherwise.

    Returns:
        Codes in the type of the multiplier, which holds them exactly.
    """
    # As a register is converted: rounded once to float32. Reals of another source stay as wide as
    # they are where the multiplier is.
    exact = accumulators.dtype == multiplier.dtype
    values = accumulators if exact else accumulators.astype(multiplier.dtype)
    np.multiply(values, multiplier, out=values)
    rounding(values, out=values)
    # The zero point is added after rounding and before saturation: both are integers in float32.
    shift = values.dtype.type(zero_point)
    if shift:
        np.add(values, shift, out=values)
    return values.clip(values.dtype.type(kind.low), values.dtype.type(kind.high), out=values)
