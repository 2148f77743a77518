"""What onnxruntime's decoders of language models use: rotations, grouped queries with a cache."""

from __future__ import annotations

import numpy as np

from slimctl.runtime.attend import (
    capped,
    merge_heads,
    rotated,
    scores_of,
    softmax_rows,
    split_heads,
    weighted_values,
    within_reach,
)
from slimctl.runtime.floats import in_float32
from slimctl.runtime.registry import MICROSOFT, Array, operator


@operator("RotaryEmbedding", since=1, domain=MICROSOFT)
@in_float32
def rotary_embedding(
    input: Array,
    position_ids: Array,
    cos_cache: Array,
    sin_cache: Array,
    *,
    interleaved: int | None = None,
    is_packed_batching: int | None = None,
    num_heads: int | None = None,
    rotary_embedding_dim: int | None = None,
    scale: float | None = None,
) -> Array:
    """Turns pairs of channels by the angles of their positions.

    One position is that of the first token; the others follow it. onnxruntime's CPU kernel knows
    no scale and no packed batches.
    """
    if is_packed_batching or scale not in (None, 1):
        raise ValueError("packed batches and scales of rotations are not supported")
    if input.ndim == 4:
        heads = input
    elif rotary_embedding_dim:
        heads = split_heads(input, num_heads or 0)
    else:
        heads = split_heads(input, input.shape[2] // (2 * cos_cache.shape[1]))
    if position_ids.size == 1 and position_ids.ndim == 1:
        position_ids = position_ids + np.arange(heads.shape[2])[None]
    turned = _turned(heads, cos_cache, sin_cache, position_ids, interleaved)
    return turned if input.ndim == 4 else merge_heads(turned)


def _turned(
    x: Array, cos_cache: Array, sin_cache: Array, positions: Array, interleaved: int | None
) -> Array:
    """Turns [batch, heads, sequence, size] by rows of the caches; positions [batch, sequence]."""
    cosines, sines = cos_cache[positions][:, None], sin_cache[positions][:, None]
    return rotated(x, cosines, sines, interleaved=bool(interleaved))


@operator("GroupQueryAttention", since=1, domain=MICROSOFT)
@in_float32
def group_query_attention(
    query: Array,
    key: Array | None,
    value: Array | None,
    past_key: Array | None,
    past_value: Array | None,
    seqlens_k: Array,
    total_sequence_length: Array,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    position_ids: Array | None = None,
    attention_bias: Array | None = None,
    head_sink: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    q_norm_weight: Array | None = None,
    k_norm_weight: Array | None = None,
    query_seqlens: Array | None = None,
    *,
    causal: int = 1,
    do_rotary: int | None = None,
    k_norm_epsilon: float | None = None,
    k_quant_type: str = "NONE",
    kv_cache_bit_width: int | None = None,
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    q_norm_epsilon: float | None = None,
    qk_norm_epsilon: float = 1e-6,
    qk_output: int = 0,
    rotary_interleaved: int | None = None,
    scale: float | None = None,
    sliding_window_cache: int = 0,
    smooth_softmax: int = -1,
    softcap: float | None = None,
    v_quant_type: str = "NONE",
) -> tuple[Array, Array, Array, Array | None]:
    """Attention with a cache of keys and values, which groups of heads share.

    Sequence b has seqlens_k[b] + 1 keys. The new ones are the last of them, or with as many as
    total_sequence_length all: then the cache is empty, and what follows the end of a sequence is
    padding. The cache is returned as long as it was given, or as long as the longest sequence.
    """
    del k_norm_epsilon, q_norm_epsilon, qk_norm_epsilon, kv_cache_bit_width
    unsupported = (k_scale, v_scale, q_norm_weight, k_norm_weight, query_seqlens)
    quantized = (k_quant_type, v_quant_type) != ("NONE", "NONE")
    if quantized or sliding_window_cache or any(value is not None for value in unsupported):
        raise ValueError(
            "quantized and windowed caches, normalized queries and query_seqlens are not supported"
        )
    q, k, v = _heads(query, key, value, num_heads, kv_num_heads)
    news, total = q.shape[2], int(total_sequence_length.reshape(-1)[0])
    lengths = seqlens_k.reshape(-1) + 1  # [batch]
    first = np.zeros_like(lengths) if news == total else lengths - news
    if do_rotary and cos_cache is not None and sin_cache is not None:
        if position_ids is None:
            position_ids = np.maximum(first, 0)[:, None] + np.arange(news)  # [batch, new]
        elif news == total:  # a prompt: only the first one counts, as the schema says
            position_ids = position_ids.reshape(-1)[:1, None] + np.arange(news)
        q, k = (_turned(x, cos_cache, sin_cache, position_ids, rotary_interleaved) for x in (q, k))
    k, v = _appended(past_key, k, first, total), _appended(past_value, v, first, total)
    scores = capped(scores_of(q, k[:, :, :total], scale), softcap or 0)
    if attention_bias is not None:
        scores = scores + attention_bias
    left = None if local_window_size < 0 else local_window_size - 1
    seen = within_reach(first, news, total, left=left, right=0 if causal else None)
    seen &= np.arange(total) < lengths.reshape(-1, 1, 1, 1)
    masked = np.where(seen, scores, scores.dtype.type(-np.inf))
    weights = softmax_rows(masked, _sink(head_sink, smooth_softmax, scores))
    y = merge_heads(weighted_values(weights, v[:, :, :total]))
    return y, k, v, (None, np.where(seen, scores, 0), weights)[qk_output]


def _heads(
    query: Array, key: Array | None, value: Array | None, heads: int, key_heads: int
) -> tuple[Array, Array, Array]:
    """[batch, heads, sequence, size] each; without a key the query holds all three."""
    if key is None or value is None:
        size = query.shape[2] // (heads + 2 * key_heads)
        query, key, value = np.split(query, (heads * size, (heads + key_heads) * size), axis=2)
    return split_heads(query, heads), split_heads(key, key_heads), split_heads(value, key_heads)


def _appended(past: Array | None, new: Array, first: Array, total: int) -> Array:
    """A cache with new rows after the first ones of each sequence; 0 after them.

    Args:
        past: [batch, heads, capacity, size].
        new: [batch, heads, new, size].
        first: Rows of each sequence before the new ones, [batch].
        total: Rows of the longest sequence.
    """
    capacity = max(total, 0 if past is None else past.shape[2])
    result = np.zeros((*new.shape[:2], capacity, new.shape[3]), new.dtype)
    for sequence, begin in enumerate(np.maximum(first, 0)):
        if past is not None:
            result[sequence, :, :begin] = past[sequence, :, :begin]
        result[sequence, :, begin : begin + new.shape[2]] = new[sequence, :, : capacity - begin]
    return result


def _sink(head_sink: Array | None, smooth_softmax: int, scores: Array) -> Array | None:
    """A further exponent in every sum of a softmax: one for each head, or 0 with smooth_softmax."""
    if head_sink is not None:
        return head_sink.reshape(1, -1, 1, 1)
    return np.zeros((1, 1, 1, 1), scores.dtype) if smooth_softmax > 0 else None
