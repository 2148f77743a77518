"""Attention, and the rotation of queries and keys."""

from __future__ import annotations

from typing import Any

import ml_dtypes
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
from slimctl.runtime.floats import in_float32, is_narrow
from slimctl.runtime.registry import Array, operator

_PRECISIONS: dict[int, Any] = {
    1: np.float32,
    10: np.float16,
    11: np.float64,
    16: ml_dtypes.bfloat16,
}
"""softmax_precision, by ONNX's number of the type."""


@operator("Attention", since=23)
@in_float32
def attention(
    q: Array,
    k: Array,
    v: Array,
    attn_mask: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    nonpad_kv_seqlen: Array | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
) -> tuple[Array, Array, Array, Array]:
    """softmax(softcap(Q K^T scale) + mask) V, by heads (ONNX, Attention).

    Narrow floats are computed in float32, the softmax in the type of softmax_precision. A query
    that may see no key has the result 0.
    """
    merged = q.ndim == 3
    if merged:
        q, k, v = (
            split_heads(x, heads or 0)
            for x, heads in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads))
        )
    if past_key is not None and past_value is not None:
        k, v = np.concatenate((past_key, k), axis=2), np.concatenate((past_value, v), axis=2)
    products = scores_of(q, k, scale)
    limited = capped(products, softcap)
    first = _first_position(q.shape[2], past_key, nonpad_kv_seqlen)
    right = 0 if is_causal else right_window_size
    seen = within_reach(
        first, q.shape[2], k.shape[2], left=_bound(left_window_size), right=_bound(right)
    )
    if nonpad_kv_seqlen is not None:
        seen = seen & (np.arange(k.shape[2]) < nonpad_kv_seqlen.reshape(-1, 1, 1, 1))
    biased = _masked(limited, attn_mask, seen)
    weights = _softmax_in(biased, softmax_precision)
    y = weighted_values(weights, v)
    shown = (products, limited, biased, weights)[qk_matmul_output_mode]
    return merge_heads(y) if merged else y, k, v, shown


def _bound(window_size: int) -> int | None:
    """A reach as within_reach takes it: -1 is none."""
    return None if window_size < 0 else window_size


def _first_position(queries: int, past: Array | None, lengths: Array | None) -> Array | int:
    """Where the first query stands among the keys: after those of the cache."""
    if past is not None:
        return int(past.shape[2])
    return 0 if lengths is None else lengths - queries


def _masked(scores: Array, mask: Array | None, seen: Array) -> Array:
    """Scores, minus infinity where a key is not seen; [batch, heads, queries, keys]."""
    if mask is not None and mask.shape[-1] < scores.shape[-1]:
        missing = scores.shape[-1] - mask.shape[-1]
        nothing: Any = False if mask.dtype == np.bool_ else -np.inf
        edges = [(0, 0)] * (mask.ndim - 1) + [(0, missing)]
        mask = np.pad(mask, edges, constant_values=nothing)
    if mask is not None and mask.dtype == np.bool_:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask
    return scores if seen.all() else np.where(seen, scores, scores.dtype.type(-np.inf))


def _softmax_in(scores: Array, precision: int | None) -> Array:
    """The softmax in one of ONNX's types, as the type of the scores."""
    if precision is None:
        return softmax_rows(scores)
    if precision not in _PRECISIONS:
        raise ValueError(f"softmax_precision is {precision}, not one of {sorted(_PRECISIONS)}")
    inner = scores.astype(_PRECISIONS[precision])
    if is_narrow(inner):  # rounded before and after, as in_float32 does it
        return softmax_rows(inner.astype(np.float32)).astype(inner.dtype).astype(scores.dtype)
    return softmax_rows(inner).astype(scores.dtype)


@operator("RotaryEmbedding", since=23)
@in_float32
def rotary_embedding(
    x: Array,
    cos_cache: Array,
    sin_cache: Array,
    position_ids: Array | None = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Array:
    """Turns pairs of channels by the angles of their positions (ONNX, RotaryEmbedding).

    The caches have one row for each position, or without position_ids one for each token.
    """
    heads = x if x.ndim == 4 else split_heads(x, num_heads or 0)
    turned = rotary_embedding_dim or heads.shape[3]
    if cos_cache.shape[-1] != turned // 2:
        raise ValueError(f"the caches hold {cos_cache.shape[-1]} angles for {turned} channels")
    if position_ids is not None:
        cos_cache, sin_cache = cos_cache[position_ids], sin_cache[position_ids]
    # [batch, sequence, pairs] -> [batch, 1, sequence, pairs]
    result = rotated(heads, cos_cache[:, None], sin_cache[:, None], interleaved=bool(interleaved))
    return result if x.ndim == 4 else merge_heads(result)
