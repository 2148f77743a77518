"""Exact products of quantized matrices."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimctl.numerics.integer import (
    Reduction,
    centered,
    exact_product,
    exact_reduction,
    largest,
    uniform_reduction,
)
from slimctl.runtime.device import Sums
from slimctl.runtime.engine import Engine
from slimctl.runtime.sums import Summed, array_blocks

Array = NDArray[Any]


def multiply(
    a: Array, a_zero_point: Array | None, b: Array, b_zero_point: Array | None, engine: Engine
) -> Summed:
    """The product of two stacks of matrices of codes.

    Args:
        a: Codes [..., m, terms].
        a_zero_point: A scalar, or per row [..., m, 1].
        b: Codes [..., terms, n].
        b_zero_point: A scalar, or per column [..., 1, n].
        engine: Keeps what depends on constants.

    Returns:
        Sums [..., m, n].
    """
    a_zero, b_zero = zero_of(a, a_zero_point), zero_of(b, b_zero_point)
    left_bound, right_bound = largest(a, a_zero), largest(b, b_zero)

    def prepare() -> tuple[Array, Reduction]:
        values = centered(b, b_zero)
        if b.flags.writeable:
            return values, uniform_reduction(b.shape[-2], left_bound, right_bound)
        return values, exact_reduction(np.swapaxes(values, -1, -2), left_bound)

    values, reduction = engine.prepared("right", (b, b_zero_point), prepare)
    left = centered(a, a_zero)
    product = exact_product(*_as_matrices(left, values), reduction.parts)

    seen, seen_zero = engine.seen(a, a_zero)

    def again(sums: Sums) -> Array:
        return stacked_sums(seen, b, seen_zero, b_zero, sums)

    sums = _as_product(product, a, b)
    mixed = are_mixed(seen, b)
    return Summed(sums.shape, lambda: array_blocks(sums), reduction.bound, again, mixed)


def are_mixed(codes: Array, weights: Array) -> bool:
    """Whether unsigned codes meet signed weights."""
    return codes.dtype.kind == "u" and weights.dtype.kind == "i"


def zero_of(codes: Array, zero_point: Array | None) -> Array:
    """A zero point; 0 where there is none."""
    return _zero(codes.dtype) if zero_point is None else zero_point


@cache
def _zero(kind: np.dtype[Any]) -> Array:
    """One array for each type, read-only as constants are: what is prepared from it is kept."""
    zero = np.zeros((), kind)
    zero.flags.writeable = False
    return zero


def _as_matrices(a: Array, b: Array) -> tuple[Array, Array]:
    """A stack of matrices times one matrix is one tall matrix times it: one product, not many."""
    if a.ndim > 2 and b.ndim == 2:
        return a.reshape(-1, a.shape[-1]), b
    return a, b


def _as_product(product: Array, a: Array, b: Array) -> Array:
    if a.ndim > 2 and b.ndim == 2:
        return product.reshape(*a.shape[:-1], b.shape[-1])
    return product


def stacked_sums(a: Array, b: Array, a_zero: Array, b_zero: Array, sums: Sums) -> Array:
    """What a device's arithmetic makes of a product, matrix by matrix.

    Raises:
        ValueError: The left codes have several zero points.
    """
    rank = max(a.ndim, b.ndim, 2)
    left, right = (m.reshape((1,) * (rank - m.ndim) + m.shape) for m in (a, b))
    stack = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left = np.broadcast_to(left, (*stack, *left.shape[-2:]))
    right = np.broadcast_to(right, (*stack, *right.shape[-2:]))
    result = np.empty((*stack, left.shape[-2], right.shape[-1]))
    for index in np.ndindex(*stack):
        result[index] = _with_zero_points(left[index], right[index], a_zero, b_zero, sums)
    return result


def _with_zero_points(a: Array, b: Array, a_zero: Array, b_zero: Array, sums: Sums) -> Array:
    """A device is told one zero point per matrix; columns of equal zero points go together."""
    zero = int(a_zero.reshape(-1)[0])
    if a_zero.size > 1 and np.any(a_zero != a_zero.reshape(-1)[0]):
        raise ValueError("a device's arithmetic is known for one zero point on the left only")
    columns = np.broadcast_to(b_zero.reshape(-1).astype(np.int64), (b.shape[1],))
    result = np.empty((a.shape[0], b.shape[1]))
    for other in np.unique(columns):
        chosen = columns == other
        result[:, chosen] = sums(a, b[:, chosen], zero, int(other))
    return result
