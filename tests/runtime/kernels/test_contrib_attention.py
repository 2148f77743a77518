"""Attention operators of onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slimctl.runtime.kernels.contrib_attention import attention, multi_head_attention
from slimctl.runtime.kernels.contrib_decoder import group_query_attention, rotary_embedding
from slimctl.runtime.registry import MICROSOFT
from tests.runtime.kernels.one_node import assert_agrees, assert_close, ours, theirs

_RNG = np.random.default_rng(18)
_COMMON: dict[str, Any] = {"opset": 17, "domain": MICROSOFT}

_BATCH, _QUERIES, _KEYS, _HEADS, _SIZE = 2, 3, 5, 2, 4
_HIDDEN = _HEADS * _SIZE


def _floats(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape, dtype=np.float32)


def _masks(keys: int) -> dict[str, Any]:
    return {
        "none": None,
        "lengths": np.array([2, 3], np.int32),
        "ends and beginnings": np.array([3, 2, 1, 0], np.int32),
        "keys": _RNG.integers(0, 2, (_BATCH, keys), np.int32),
        "queries and keys": _RNG.integers(-1, 3, (_BATCH, _QUERIES, keys), np.int32),
        "dummy": np.zeros((_BATCH, 1), np.int32),
    }


_FORMS: list[dict[str, Any]] = [{}, {"scale": 0.3, "mask_filter_value": -3.0}]


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("past", [0, 2])
@pytest.mark.parametrize("mask", sorted(_masks(1)))
@pytest.mark.parametrize("form", [0, 1])
def test_attention_as_onnxruntime(causal: int, past: int, mask: str, form: int) -> None:
    keys = past + _QUERIES
    inputs = [
        _floats(_BATCH, _QUERIES, 5),
        _floats(5, 3 * _HIDDEN) / 2,
        _floats(3 * _HIDDEN),
        _masks(keys)[mask],
        _floats(2, _BATCH, _HEADS, past, _SIZE) if past else None,
    ]
    node = {"num_heads": _HEADS, "unidirectional": causal, **_FORMS[form], **_COMMON}
    # where all keys of a query are masked, -10000 takes three digits of its scores
    rtol = 1e-3 if mask == "queries and keys" and not form else 1e-5
    assert_agrees("Attention", inputs, outputs=2, rtol=rtol, **node)
    if not past:  # onnxruntime takes a bias or a past
        for shape in ((_BATCH, _HEADS), (1, 1), (1, _HEADS), (_BATCH, 1)):
            bias = _floats(*shape, _QUERIES, keys)
            assert_agrees("Attention", [*inputs, bias], outputs=2, rtol=rtol, **node)


def test_attention_with_other_sizes_and_without_a_bias() -> None:
    x, node = _floats(_BATCH, _QUERIES, 5), {"num_heads": _HEADS, **_COMMON}
    inputs = [x, _floats(5, 8 + 8 + 12), _floats(28)]
    assert_agrees("Attention", inputs, qkv_hidden_sizes=[8, 8, 12], **node)
    assert_agrees("Attention", [x, _floats(5, 3 * _HIDDEN)], **node)


@pytest.mark.parametrize(
    ("mask", "more"),
    [
        (np.ones((_BATCH, 1, 9, 9), np.int32), {}),
        (np.ones(3 * _BATCH + 2, np.int32), {}),
        (None, {"do_rotary": 1}),
        (None, {"past_present_share_buffer": 1}),
    ],
)
def test_what_attention_does_not_do_is_refused(mask: Any, more: dict[str, Any]) -> None:
    inputs = [_floats(_BATCH, _QUERIES, 5), _floats(5, 3 * _HIDDEN), None, mask]
    with pytest.raises(ValueError, match="not supported"):
        attention(*inputs, num_heads=_HEADS, **more)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("mask", ["none", "lengths", "keys", "queries and keys"])
@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize("with_bias", [False, True])
def test_multi_head_attention_as_onnxruntime(
    causal: int, mask: str, form: int, with_bias: bool
) -> None:
    keys = _QUERIES if causal else _KEYS  # see _without_later
    node = {"num_heads": _HEADS, "unidirectional": causal, **_FORMS[form], **_COMMON}
    rtol = 1e-3 if mask == "queries and keys" and not form else 1e-5  # as above
    bias = _floats(3 * _HIDDEN) if with_bias else None
    q = _floats(_BATCH, _QUERIES, _HIDDEN)
    merged = [_floats(_BATCH, keys, _HIDDEN) for _ in range(2)]
    split = [_floats(_BATCH, _HEADS, keys, _SIZE) for _ in range(2)]
    past = [_floats(_BATCH, _HEADS, 2, _SIZE) for _ in range(2)]
    masked, longer = _masks(keys)[mask], _masks(keys + 2)[mask]
    for scores in (None, _floats(_BATCH, _HEADS, _QUERIES, keys), _floats(1, 1, _QUERIES, keys)):
        for kv in (merged, split):
            inputs = [q, *kv, bias, masked, scores]
            assert_agrees("MultiHeadAttention", inputs, rtol=rtol, **node)
    inputs = [q, *merged, bias, masked]
    assert_agrees("MultiHeadAttention", inputs, outputs=3, rtol=rtol, **node)
    if keys == _QUERIES:
        inputs = [q, *merged, bias, longer, None, *past]
        assert_agrees("MultiHeadAttention", inputs, outputs=3, rtol=rtol, **node)


def test_values_may_have_another_size() -> None:
    q, k, v = (_floats(_BATCH, n, c) for n, c in ((_QUERIES, 8), (_KEYS, 8), (_KEYS, 12)))
    for bias in (None, _floats(28)):
        inputs = [q, k, v, bias]
        assert_agrees("MultiHeadAttention", inputs, num_heads=_HEADS, **_COMMON)


@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_inputs_are_the_separate_ones(with_bias: bool) -> None:
    """onnxruntime's CPU kernel has no packed inputs."""
    q, k, v = (_floats(_BATCH, _KEYS, _HIDDEN) for _ in range(3))
    bias = _floats(3 * _HIDDEN) if with_bias else None
    by_head = [x.reshape(_BATCH, _KEYS, _HEADS, 1, _SIZE) for x in (q, k, v)]
    expected = multi_head_attention(q, k, v, bias, num_heads=_HEADS)
    packed = np.concatenate(by_head, axis=3)
    found = multi_head_attention(packed, None, None, bias, num_heads=_HEADS)
    also = multi_head_attention(q, packed[:, :, :, 1:], None, bias, num_heads=_HEADS)
    for a, b, c in zip(expected, found, also, strict=True):
        assert_close(b, a, rtol=1e-6)
        assert_close(c, a, rtol=1e-6)


def test_weights_are_the_fourth_result() -> None:
    inputs = [_floats(_BATCH, _QUERIES, _HIDDEN), *(_floats(_BATCH, _KEYS, _HIDDEN) for _ in "kv")]
    _, k, v, weights = multi_head_attention(*inputs, num_heads=_HEADS)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)
    y = (weights @ v).transpose(0, 2, 1, 3).reshape(_BATCH, _QUERIES, _HIDDEN)
    assert_close(multi_head_attention(*inputs, num_heads=_HEADS)[0], y, rtol=1e-6)
    assert k.shape == v.shape == (_BATCH, _HEADS, _KEYS, _SIZE)


def test_the_last_query_sees_no_later_key() -> None:
    """onnxruntime 1.32 lets it see all keys."""
    q, k, v = (_floats(_BATCH, n, _HIDDEN) for n in (_QUERIES, _KEYS, _KEYS))
    found = multi_head_attention(q, k, v, num_heads=_HEADS, unidirectional=1)[0]
    some = multi_head_attention(q, k[:, :3], v[:, :3], num_heads=_HEADS, unidirectional=1)[0]
    assert_close(found, some, rtol=1e-6)


def test_missing_keys_and_values_are_refused() -> None:
    q = _floats(_BATCH, _QUERIES, _HIDDEN)
    with pytest.raises(ValueError, match="needs a key"):
        multi_head_attention(q, num_heads=_HEADS)
    with pytest.raises(ValueError, match="needs a value"):
        multi_head_attention(q, q, num_heads=_HEADS)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("positions", [[2], [[0, 6, 3], [1, 2, 5]]])
def test_rotary_embedding_as_onnxruntime(interleaved: int, positions: Any) -> None:
    node = {"interleaved": interleaved, **_COMMON}
    for x in (_floats(_BATCH, _QUERIES, 16), _floats(_BATCH, 2, _QUERIES, 8)):
        inputs = [x, np.array(positions), _floats(7, 4), _floats(7, 4)]
        assert_agrees("RotaryEmbedding", inputs, **node)
        inputs = [x, np.array(positions), _floats(7, 2), _floats(7, 2)]
        more = {"num_heads": 2, "rotary_embedding_dim": 4}
        assert_agrees("RotaryEmbedding", inputs, **more, **node)


def test_scales_of_rotations_are_refused() -> None:
    """onnxruntime's CPU kernel does not look at them."""
    inputs = (_floats(1, 3, 8), np.array([0]), _floats(7, 4), _floats(7, 4))
    with pytest.raises(ValueError, match="scales of rotations are not supported"):
        rotary_embedding(*inputs, scale=2.0)


_CACHES: list[dict[str, Any]] = [
    {"new": 4, "past": 0, "lengths": [4, 4], "total": 4},
    {"new": 4, "past": 0, "lengths": [3, 2], "total": 4},  # padded prompts
    {"new": 4, "past": 6, "lengths": [3, 4], "total": 4},  # a prompt in a longer cache
    {"new": 1, "past": 3, "lengths": [4, 4], "total": 4},
    {"new": 1, "past": 6, "lengths": [4, 3], "total": 4},
    {"new": 2, "past": 5, "lengths": [4], "total": 4},
    {"new": 2, "past": 2, "lengths": [4], "total": 4},
]


def _grouped(
    cache: dict[str, Any], *, key_heads: int = 2, packed: bool = False, **more: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Inputs and attributes of GroupQueryAttention with 4 heads of 16 channels."""
    batch, new = len(cache["lengths"]), cache["new"]
    widths = [(4 + 2 * key_heads) * 16] if packed else [4 * 16, key_heads * 16, key_heads * 16]
    inputs: list[Any] = [_floats(batch, new, width) for width in widths]
    inputs += [None, None] if packed else []
    inputs += [_floats(batch, key_heads, cache["past"], 16) for _ in range(2)]
    inputs += [np.array(cache["lengths"], np.int32) - 1, np.array(cache["total"], np.int32)]
    inputs += [_floats(20, 8), _floats(20, 8)] if "do_rotary" in more else [None, None]
    positions = _RNG.integers(0, 16, (batch, new)) if more.pop("positions", False) else None
    bias = _floats(1, 4, new, cache["total"]) if more.pop("bias", False) else None
    sinks = _floats(4) if more.pop("sinks", False) else None
    inputs += [positions, bias, sinks]
    while inputs[-1] is None:
        inputs.pop()
    return inputs, {"num_heads": 4, "kv_num_heads": key_heads, **more, **_COMMON}


@pytest.mark.parametrize("cache", _CACHES)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"scale": 0.2},
        {"local_window_size": 2},
        {"softcap": 2.0},
        {"smooth_softmax": 1},
        {"causal": 0},
        {"do_rotary": 1},
        {"do_rotary": 1, "rotary_interleaved": 1},
        {"do_rotary": 1, "positions": True},
        {"sinks": True},
        {"bias": True},
        {"bias": True, "softcap": 1.0},
    ],
)
def test_grouped_queries_as_onnxruntime(cache: dict[str, Any], more: dict[str, Any]) -> None:
    inputs, node = _grouped(cache, **more)
    for shown in ({"outputs": 3}, {"outputs": 4, "qk_output": 1}, {"outputs": 4, "qk_output": 2}):
        found = ours("GroupQueryAttention", inputs, **node, **shown)
        expected = theirs("GroupQueryAttention", inputs, **node, **shown)
        for sequence, length in enumerate(cache["lengths"]):
            real = slice(length if cache["new"] == cache["total"] else None)  # padding follows
            assert_close(found[0][sequence, real], expected[0][sequence, real])
            for mine, other in zip(found[3:], expected[3:], strict=True):
                assert_close(mine[sequence, :, real], other[sequence, :, real])
        for mine, other in zip(found[1:3], expected[1:3], strict=True):
            assert_close(mine, other)


@pytest.mark.parametrize("cache", _CACHES)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_packed_queries_as_onnxruntime(cache: dict[str, Any], key_heads: int) -> None:
    inputs, node = _grouped(cache, key_heads=key_heads, packed=True)
    assert_agrees("GroupQueryAttention", inputs, outputs=3, **node)


def test_quantized_caches_are_refused() -> None:
    inputs, _ = _grouped(_CACHES[0])
    with pytest.raises(ValueError, match="not supported"):
        group_query_attention(*inputs, num_heads=4, kv_num_heads=2, k_quant_type="PER_TENSOR")
