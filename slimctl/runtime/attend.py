"""Attention of queries to keys and values, and what surrounds it: heads, windows, rotations."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


def split_heads(x: Array, heads: int) -> Array:
    """[batch, sequence, heads * size] -> [batch, heads, sequence, size], a view."""
    batch, sequence, hidden = x.shape
    if heads < 1 or hidden % heads:
        raise ValueError(f"{hidden} channels cannot be divided into {heads} heads")
    return x.reshape(batch, sequence, heads, hidden // heads).transpose(0, 2, 1, 3)


def merge_heads(x: Array) -> Array:
    """[batch, heads, sequence, size] -> [batch, sequence, heads * size]."""
    batch, heads, sequence, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, sequence, heads * size)


def scores_of(q: Array, k: Array, scale: float | None) -> Array:
    """Queries times keys times the scale, which is 1 / sqrt(size) where it is None or 0.

    Args:
        q: [batch, heads, queries, size].
        k: [batch, key heads, keys, size]; the queries' heads share them in groups.
        scale: Of the products.

    Returns:
        [batch, heads, queries, keys].
    """
    factor = q.dtype.type(scale or 1 / np.sqrt(q.shape[-1]))
    products: Array = np.matmul(_grouped(q * factor, k.shape[1]), k[:, :, None].swapaxes(-1, -2))
    return products.reshape(*q.shape[:3], k.shape[2])


def weighted_values(weights: Array, v: Array) -> Array:
    """Sums of values: [batch, heads, queries, keys] and [batch, key heads, keys, size].

    Returns:
        [batch, heads, queries, size].
    """
    sums: Array = np.matmul(_grouped(weights, v.shape[1]), v[:, :, None])
    return sums.reshape(*weights.shape[:3], v.shape[3])


def _grouped(x: Array, groups: int) -> Array:
    """[batch, heads, ...] -> [batch, groups, heads / groups, ...]: heads that share keys."""
    if x.shape[1] % groups:
        raise ValueError(f"{x.shape[1]} heads cannot share the keys of {groups}")
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def capped(scores: Array, softcap: float) -> Array:
    """Softcap tanh(scores / softcap); the scores themselves for 0."""
    if not softcap:
        return scores
    limit = scores.dtype.type(softcap)
    result: Array = limit * np.tanh(scores / limit)
    return result


def softmax_rows(scores: Array, sink: Array | None = None) -> Array:
    """e^x / sum e^x over the last axis; 0 where the whole row is minus infinity.

    Args:
        scores: Any shape; not changed.
        sink: A further term of the sums, of which nothing is returned, broadcast to
            [..., 1]: the exponent that every row adds to its own.
    """
    largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    if sink is not None:
        largest = np.maximum(largest, sink)
    largest = np.where(np.isneginf(largest), scores.dtype.type(0), largest)
    powers: Array = scores - largest
    np.exp(powers, out=powers)
    sums = powers.sum(axis=-1, keepdims=True)
    if sink is not None:
        sums += np.exp(sink - largest)
    powers /= np.where(sums == 0, scores.dtype.type(1), sums)
    return powers


def within_reach(
    first: Array | int, queries: int, keys: int, *, left: int | None, right: int | None
) -> Array:
    """Which keys a query may see by their distance.

    Args:
        first: Position of the first query among the keys: one, or one for each image of a batch.
        queries: Number of queries; their positions follow each other.
        keys: Number of keys.
        left: Most keys before its own position; all where it is None.
        right: Most keys after its own position; all where it is None.

    Returns:
        [queries, keys], or [batch, 1, queries, keys].
    """
    ahead = np.arange(keys) - np.arange(queries)[:, None]  # [queries, keys]
    before = np.reshape(first, (-1, 1, 1, 1)) if np.ndim(first) else first
    ahead = ahead - before  # [queries, keys] or [batch, 1, queries, keys]
    seen = np.ones(ahead.shape, np.bool_)
    if left is not None:
        seen &= ahead >= -left
    if right is not None:
        seen &= ahead <= right
    return seen


def rotated(x: Array, cosines: Array, sines: Array, *, interleaved: bool) -> Array:
    """Turns pairs of channels by angles: RoFormer, arXiv 2104.09864.

    (a, b) -> (a cos - b sin, a sin + b cos). Channels beyond the pairs stay.

    Args:
        x: [batch, heads, sequence, size].
        cosines: [batch, 1, sequence, pairs].
        sines: [batch, 1, sequence, pairs].
        interleaved: Neighbors are pairs; else the first half goes with the second.
    """
    pairs = cosines.shape[-1]
    if x.shape[-1] < 2 * pairs:
        raise ValueError(f"{pairs} angles cannot turn {x.shape[-1]} channels")
    if interleaved:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    a, b, result = x[..., first], x[..., second], x.copy()
    result[..., first] = a * cosines - b * sines
    result[..., second] = a * sines + b * cosines
    return result
