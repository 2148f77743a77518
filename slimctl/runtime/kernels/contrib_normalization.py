"""Layer normalizations with what onnxruntime fuses into them: sums, embeddings."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from slimctl.runtime.kernels.normalization import (
    BFLOAT16,
    divided_by_size,
    last_axes,
    standardized,
    widened,
)
from slimctl.runtime.registry import MICROSOFT, Array, operator


@operator("SimplifiedLayerNormalization", since=1, domain=MICROSOFT)
def simplified_layer_normalization(
    x: Array, scale: Array, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Array, Array]:
    """X / sqrt(mean(x^2) + epsilon) times scale, over the axes from ``axis`` on; scale's type."""
    result, inverse = divided_by_size(widened(x), last_axes(x, axis), epsilon)
    result *= scale
    kind = ml_dtypes.bfloat16 if stash_type == BFLOAT16 else np.float32
    return result.astype(scale.dtype, copy=False), inverse.astype(kind)


@operator("SkipLayerNormalization", since=1, domain=MICROSOFT)
def skip_layer_normalization(
    input: Array,
    skip: Array,
    gamma: Array,
    beta: Array | None = None,
    bias: Array | None = None,
    *,
    epsilon: float = 1e-12,
) -> tuple[Array, Array, Array, Array]:
    """Layer normalization of input + skip + bias; the sum is the last result."""
    total = _sum(input, skip, bias)
    result, mean, inverse = standardized(total, (-1,), epsilon)
    result *= gamma
    if beta is not None:
        result += beta
    kind = input.dtype
    return result.astype(kind, copy=False), mean, inverse, total.astype(kind, copy=False)


@operator("SkipSimplifiedLayerNormalization", since=1, domain=MICROSOFT)
def skip_simplified_layer_normalization(
    input: Array, skip: Array, gamma: Array, bias: Array | None = None, *, epsilon: float = 1e-12
) -> tuple[Array, None, Array, Array]:
    """RMS normalization of input + skip + bias; it has no mean; the sum is the last result."""
    total = _sum(input, skip, bias)
    result, inverse = divided_by_size(total, (-1,), epsilon)
    result *= gamma
    kind = input.dtype
    return result.astype(kind, copy=False), None, inverse, total.astype(kind, copy=False)


def _sum(x: Array, skip: Array, bias: Array | None) -> Array:
    """A new array; narrow floats in float32."""
    total: Array = widened(x) + widened(skip)  # the skip may lack the batch
    if bias is not None:
        total += bias
    return total


@operator("EmbedLayerNormalization", since=1, domain=MICROSOFT)
def embed_layer_normalization(
    input_ids: Array,
    segment_ids: Array | None,
    word_embedding: Array,
    position_embedding: Array,
    segment_embedding: Array | None,
    gamma: Array,
    beta: Array,
    mask: Array | None = None,
    position_ids: Array | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int | None = None,
) -> tuple[Array, Array, Array]:
    """Layer normalization of the sum of the embeddings of words, positions and segments.

    The second result is the number of words of each sequence, by the mask; 0 without one.
    """
    del mask_index_type
    batch, length = input_ids.shape
    positions = np.arange(length)[None] if position_ids is None else position_ids
    total = widened(word_embedding[input_ids]) + widened(position_embedding[positions])
    if segment_ids is not None and segment_embedding is not None:
        total += segment_embedding[segment_ids]
    result, _, _ = standardized(total, (-1,), epsilon)
    result *= gamma
    result += beta
    words = np.zeros(batch, np.int32) if mask is None else (mask == 1).sum(axis=1, dtype=np.int32)
    kind = word_embedding.dtype
    return result.astype(kind, copy=False), words, total.astype(kind, copy=False)
