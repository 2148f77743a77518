"""Attention operators of onnxruntime: with projections, packed inputs and masks of many shapes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from slimctl.runtime.attend import (
    merge_heads,
    scores_of,
    softmax_rows,
    split_heads,
    weighted_values,
    within_reach,
)
from slimctl.runtime.engine import Engine
from slimctl.runtime.floats import in_float32
from slimctl.runtime.kernels.qlinear_matmul import matmul_integer_to_float
from slimctl.runtime.registry import MICROSOFT, Array, operator

_FILTER = -10000.0
"""The default of mask_filter_value: what is added to the scores of masked keys."""


@operator("Attention", since=1, domain=MICROSOFT)
@in_float32
def attention(
    input: Array,
    weights: Array,
    bias: Array | None = None,
    mask_index: Array | None = None,
    past: Array | None = None,
    attention_bias: Array | None = None,
    past_sequence_length: Array | None = None,
    *,
    do_rotary: int | None = None,
    mask_filter_value: float | None = None,
    num_heads: int,
    past_present_share_buffer: int | None = None,
    qkv_hidden_sizes: tuple[int, ...] | None = None,
    rotary_embedding_dim: int | None = None,
    scale: float | None = None,
    unidirectional: int = 0,
) -> tuple[Array, Array | None]:
    """Self-attention of projections: Q, K, V = input weights + bias.

    The second result holds all keys and values, [2, batch, heads, keys, size], where their sizes
    are the same.
    """
    del rotary_embedding_dim
    if do_rotary or past_present_share_buffer or past_sequence_length is not None:
        raise ValueError("rotations and shared buffers of past and present are not supported")
    sizes = qkv_hidden_sizes or (weights.shape[1] // 3,) * 3
    projected = input @ weights
    if bias is not None:
        projected += bias
    parts = np.split(projected, np.cumsum(sizes[:2]), axis=2)
    q, k, v = (split_heads(part, num_heads) for part in parts)
    masks = _Masks(mask_index, attention_bias, mask_filter_value, bool(unidirectional))
    return _attended(q, k, v, past, masks, scale)


@operator("QAttention", since=1, domain=MICROSOFT)
def quantized_attention(
    input: Array,
    weight: Array,
    bias: Array,
    input_scale: Array,
    weight_scale: Array,
    mask_index: Array | None = None,
    input_zero_point: Array | None = None,
    weight_zero_point: Array | None = None,
    past: Array | None = None,
    *,
    do_rotary: int | None = None,
    mask_filter_value: float | None = None,
    num_heads: int,
    past_present_share_buffer: int | None = None,
    scale: float | None = None,
    unidirectional: int = 0,
    engine: Engine,
) -> tuple[Array, Array | None]:
    """Attention whose projections are products of codes; the rest is computed in floats."""
    if do_rotary or past_present_share_buffer:
        raise ValueError("rotations and shared buffers of past and present are not supported")
    projected = matmul_integer_to_float(
        input,
        weight,
        input_scale,
        weight_scale,
        input_zero_point,
        weight_zero_point,
        bias,
        engine=engine,
    )
    q, k, v = (split_heads(part, num_heads) for part in np.split(projected, 3, axis=2))
    masks = _Masks(mask_index, None, mask_filter_value, bool(unidirectional))
    return _attended(q, k, v, past, masks, scale)


class _Masks(NamedTuple):
    """What keeps queries from seeing keys; see the schema of Attention."""

    keys: Array | None
    bias: Array | None
    filter_value: float | None
    unidirectional: bool


def _attended(
    q: Array, k: Array, v: Array, past: Array | None, masks: _Masks, scale: float | None
) -> tuple[Array, Array | None]:
    """Values by attention, [batch, sequence, heads * size], and all keys and values."""
    if past is not None:
        k, v = np.concatenate((past[0], k), axis=2), np.concatenate((past[1], v), axis=2)
    scores = scores_of(q, k, scale)
    scores = _biased(scores, masks.keys, masks.bias, masks.filter_value)
    if masks.unidirectional:
        scores = _without_later(scores, past)
    y = merge_heads(weighted_values(softmax_rows(scores), v))
    return y, np.stack((k, v)) if k.shape == v.shape else None


@operator("MultiHeadAttention", since=1, domain=MICROSOFT)
@in_float32
def multi_head_attention(
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    bias: Array | None = None,
    key_padding_mask: Array | None = None,
    attention_bias: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    past_sequence_length: Array | None = None,
    cache_indirection: Array | None = None,
    *,
    mask_filter_value: float | None = None,
    num_heads: int,
    scale: float | None = None,
    unidirectional: int = 0,
) -> tuple[Array, Array, Array, Array]:
    """Attention of given queries, keys and values, to which their part of the bias is added.

    Keys and values, and the weights after the softmax, are the other results.
    """
    if past_sequence_length is not None or cache_indirection is not None:
        raise ValueError("shared buffers of past and present are not supported")
    q, k, v = _three(query, key, value, bias, num_heads)
    if past_key is not None and past_value is not None:
        k, v = np.concatenate((past_key, k), axis=2), np.concatenate((past_value, v), axis=2)
    scores = scores_of(q, k, scale)
    scores = _biased(scores, key_padding_mask, attention_bias, mask_filter_value)
    if unidirectional:
        scores = _without_later(scores, past_key)
    weights = softmax_rows(scores)
    return merge_heads(weighted_values(weights, v)), k, v, weights


def _three(
    query: Array, key: Array | None, value: Array | None, bias: Array | None, heads: int
) -> tuple[Array, Array, Array]:
    """Queries, keys and values by heads, [batch, heads, sequence, size], from all their layouts.

    - query [batch, sequence, heads, 3, size]: all three;
    - key [batch, sequence, heads, 2, size]: keys and values;
    - key and value [batch, heads, sequence, size]: they are used as they are, without a bias;
    - [batch, sequence, heads * size] else.
    """
    if query.ndim == 5:
        parts = [part.reshape(*part.shape[:2], -1) for part in np.moveaxis(query, 3, 0)]
    elif key is None:
        raise ValueError("a query that is not packed needs a key")
    elif key.ndim == 5:
        parts = [query, *(part.reshape(*part.shape[:2], -1) for part in np.moveaxis(key, 3, 0))]
    elif value is None:
        raise ValueError("a key that is not packed needs a value")
    else:
        parts = [query, key, value]
    if bias is not None:
        own = np.split(bias, (parts[0].shape[2], bias.size - _width(parts[2])))
        parts = [x if x.ndim == 4 else x + b for x, b in zip(parts, own, strict=True)]
    q, k, v = (x if x.ndim == 4 else split_heads(x, heads) for x in parts)
    return q, k, v


def _width(x: Array) -> int:
    """Channels of all heads together."""
    return int(x.shape[2] if x.ndim == 3 else x.shape[1] * x.shape[3])


def _biased(
    scores: Array, mask: Array | None, bias: Array | None, filter_value: float | None
) -> Array:
    """Scores plus a bias, and plus the filter's value where a key is masked."""
    if bias is not None:
        scores = scores + bias
    keys = scores.shape[3]
    if mask is None or (mask.ndim == 2 and mask.shape[1] == 1 != keys):  # as onnxruntime has it
        return scores
    value = scores.dtype.type(_FILTER if filter_value is None else filter_value)
    result: Array = scores + np.where(_kept(mask, scores.shape[0], keys), 0, value)
    return result


def _kept(mask: Array, batch: int, keys: int) -> Array:
    """The keys that a mask leaves, to be broadcast to [batch, heads, queries, keys].

    - [batch]: lengths;
    - [2 * batch]: ends, then beginnings;
    - [batch, keys] and [batch, queries, keys]: above 0 where a key is left.
    """
    if mask.ndim == 1 and mask.size in (batch, 2 * batch):
        ends = mask[:batch].reshape(-1, 1, 1, 1)
        begins = mask[batch:].reshape(-1, 1, 1, 1) if mask.size > batch else 0
        return (np.arange(keys) >= begins) & (np.arange(keys) < ends)
    if mask.ndim == 2:
        return mask[:, None, None] > 0
    if mask.ndim == 3:
        return mask[:, None] > 0
    raise ValueError(f"masks of the shape {list(mask.shape)} are not supported")


def _without_later(scores: Array, past: Array | None) -> Array:
    """Scores, minus infinity for keys after the query; the first one follows those of the past.

    onnxruntime 1.32 lets the last query see all keys, which differs where there are more keys than
    queries.
    """
    first = 0 if past is None else past.shape[-2]
    seen = within_reach(first, *scores.shape[2:], left=None, right=0)
    return np.where(seen, scores, scores.dtype.type(-np.inf))
