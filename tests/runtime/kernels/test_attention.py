from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slimctl.runtime.attend import softmax_rows, within_reach
from slimctl.runtime.kernels.attention import attention, rotary_embedding
from tests.runtime.kernels.one_node import assert_agrees, assert_close

_RNG = np.random.default_rng(16)

_BATCH, _HEADS, _QUERIES, _KEYS, _SIZE = 2, 6, 3, 5, 4


def _floats(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape, dtype=np.float32)


def _softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _qkv(key_heads: int = _HEADS, keys: int = _KEYS) -> list[np.ndarray]:
    kv = [_floats(_BATCH, key_heads, keys, _SIZE) for _ in range(2)]
    return [_floats(_BATCH, _HEADS, _QUERIES, _SIZE), *kv]


@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize(
    "node",
    [
        {},
        {"scale": 0.3},
        {"is_causal": 1},
        {"softcap": 1.5},
        {"is_causal": 1, "softcap": 1.5, "scale": 0.3},
    ],
)
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_attention_as_onnxruntime(key_heads: int, node: dict[str, Any], mask: str | None) -> None:
    q, k, v = _qkv(key_heads)
    masks: dict[str | None, Any] = {
        None: None,
        "bool": _RNG.random((_QUERIES, _KEYS)) < 0.7,
        "float": _floats(_BATCH, 1, _QUERIES, _KEYS),
    }
    if mask == "bool":
        masks["bool"][:, 0] = True  # every query sees a key
    assert_agrees("Attention", [q, k, v, masks[mask]], opset=23, **node)
    cache = [_floats(_BATCH, key_heads, 2, _SIZE) for _ in range(2)]
    if mask is None:
        assert_agrees("Attention", [q, k, v, None, *cache], opset=23, outputs=3, **node)
        external = [q, k, v, None, None, None, np.array([5, 4])]
        assert_agrees("Attention", external, opset=24, **node)
        window = {"left_window_size": 1, "right_window_size": 1}
        assert_agrees("Attention", [q, k, v], opset=25, **window, **node)


def test_merged_heads_as_onnxruntime() -> None:
    q, k, v = (_floats(_BATCH, n, h * _SIZE) for n, h in ((_QUERIES, 6), (_KEYS, 2), (_KEYS, 2)))
    node = {"opset": 23, "q_num_heads": 6, "kv_num_heads": 2}
    assert_agrees("Attention", [q, k, v], **node)
    for mode in range(4):
        more = {"outputs": 4, "qk_matmul_output_mode": mode}
        assert_agrees("Attention", [q, k, v, _floats(_QUERIES, _KEYS)], **node, **more)


def test_the_stages_are_those_of_the_modes() -> None:
    q, k, v = _qkv()
    mask = _floats(_QUERIES, _KEYS)
    products = q.astype(np.float64) @ k.swapaxes(2, 3) / np.sqrt(_SIZE)
    limited = 1.5 * np.tanh(products / 1.5)
    stages = [products, limited, limited + mask, _softmax(limited + mask)]
    for mode, expected in enumerate(stages):
        y, _, _, found = attention(q, k, v, mask, softcap=1.5, qk_matmul_output_mode=mode)
        assert_close(found, expected.astype(np.float32), rtol=1e-6)
    assert_close(y, (stages[3] @ v).astype(np.float32), rtol=1e-6)


def test_a_query_that_sees_nothing_has_the_result_0() -> None:
    q, k, v = _qkv()
    mask = np.ones((_QUERIES, _KEYS), np.bool_)
    mask[1] = False
    y, _, _, weights = attention(q, k, v, mask, qk_matmul_output_mode=3)
    assert not y[:, :, 1].any()
    assert not weights[:, :, 1].any()
    assert_close(y[:, :, 0], attention(q, k, v)[0][:, :, 0], rtol=1e-6)


@pytest.mark.parametrize(("left", "right"), [(-1, -1), (1, -1), (-1, 0), (2, 1), (0, 0)])
def test_windows_hide_keys(left: int, right: int) -> None:
    q, k, v = _qkv(keys=_QUERIES)
    past = [_floats(_BATCH, _HEADS, 2, _SIZE) for _ in range(2)]
    every_k, every_v = (np.concatenate(pair, axis=2) for pair in zip(past, (k, v), strict=True))
    seen = np.zeros((_QUERIES, _QUERIES + 2), np.bool_)
    for query in range(_QUERIES):
        position = 2 + query  # after the cache
        low = 0 if left < 0 else max(position - left, 0)
        seen[query, low : None if right < 0 else position + right + 1] = True
    found = attention(q, k, v, None, *past, left_window_size=left, right_window_size=right)
    assert_close(found[0], attention(q, every_k, every_v, seen)[0], rtol=1e-6)
    np.testing.assert_array_equal(found[1], every_k)


def test_lengths_of_an_external_cache() -> None:
    q, k, v = _qkv()
    lengths = np.array([5, 4])
    found, _, _, _ = attention(q, k, v, None, None, None, lengths, is_causal=1)
    for image, length in enumerate(lengths):
        seen = np.arange(_KEYS) <= np.arange(_QUERIES)[:, None] + length - _QUERIES
        one = (value[image : image + 1] for value in (q, k, v))
        assert_close(found[image], attention(*one, seen)[0][0], rtol=1e-6)


def test_a_short_mask_hides_the_keys_after_it() -> None:
    q, k, v = _qkv()
    for mask in (np.ones((1, 3), np.bool_), np.zeros((_QUERIES, 3), np.float32)):
        found = attention(q, k, v, mask)[0]
        assert_close(found, attention(q, k[:, :, :3], v[:, :, :3])[0], rtol=1e-6)


@pytest.mark.parametrize(("number", "kind"), [(1, np.float32), (10, np.float16), (11, np.float64)])
def test_the_softmax_has_its_own_precision(number: int, kind: Any) -> None:
    q, k, v = _qkv()
    _, _, _, scores = attention(q, k, v, qk_matmul_output_mode=2)
    _, _, _, found = attention(q, k, v, qk_matmul_output_mode=3, softmax_precision=number)
    expected = _softmax(scores.astype(kind).astype(np.float64)).astype(kind).astype(np.float32)
    assert_close(found, expected, rtol=1e-3 if kind == np.float16 else 1e-6)
    assert found.dtype == np.float32
    with pytest.raises(ValueError, match="softmax_precision is 7"):
        attention(q, k, v, softmax_precision=7)


def test_large_scores_do_not_overflow() -> None:
    scores = np.array([[1e4, 1e4 - 1, -np.inf], [-np.inf] * 3], np.float32)
    found = softmax_rows(scores)
    share = np.float32(1 / (1 + np.exp(-1)))
    np.testing.assert_allclose(found, [[share, 1 - share, 0], [0, 0, 0]], rtol=1e-6)


def test_a_sink_takes_its_share() -> None:
    found = softmax_rows(np.zeros((2, 2), np.float32), np.array([[0.0], [np.log(2)]], np.float32))
    np.testing.assert_allclose(found, [[1 / 3, 1 / 3], [1 / 4, 1 / 4]], rtol=1e-6)


def test_reach_counts_from_each_position() -> None:
    seen = within_reach(1, 2, 4, left=1, right=0)
    np.testing.assert_array_equal(seen, [[1, 1, 0, 0], [0, 1, 1, 0]])
    seen = within_reach(np.array([0, 2]), 1, 4, left=None, right=0)
    np.testing.assert_array_equal(seen[:, 0], [[[1, 0, 0, 0]], [[1, 1, 1, 0]]])


@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_embedding_as_onnxruntime(interleaved: int) -> None:
    positions = _RNG.integers(0, 7, (_BATCH, _QUERIES))
    merged, split = _floats(_BATCH, _QUERIES, 2 * 8), _floats(_BATCH, 2, _QUERIES, 8)
    node = {"opset": 23, "interleaved": interleaved}
    caches = [_floats(7, 4), _floats(7, 4)]
    assert_agrees("RotaryEmbedding", [split, *caches, positions], **node)
    assert_agrees("RotaryEmbedding", [merged, *caches, positions], num_heads=2, **node)
    some = [_floats(7, 2), _floats(7, 2)]
    more = {"rotary_embedding_dim": 4, "num_heads": 2}
    assert_agrees("RotaryEmbedding", [merged, *some, positions], **node, **more)
    rows = [_floats(_BATCH, _QUERIES, 4), _floats(_BATCH, _QUERIES, 4)]
    assert_agrees("RotaryEmbedding", [split, *rows], **node)


def test_rotations_keep_lengths_and_need_their_angles() -> None:
    x, angles = _floats(1, 2, 3, 8), _floats(1, 3, 4)
    found = rotary_embedding(x, np.cos(angles), np.sin(angles))
    np.testing.assert_allclose(np.square(found).sum(-1), np.square(x).sum(-1), rtol=1e-5)
    with pytest.raises(ValueError, match="hold 3 angles for 8 channels"):
        rotary_embedding(x, angles[..., :3], angles[..., :3])


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be divided into 0 heads"):
        attention(*(_floats(1, 3, 8) for _ in range(3)))
    q, k, v = _qkv(4)
    with pytest.raises(ValueError, match="6 heads cannot share the keys of 4"):
        attention(q, k, v)
