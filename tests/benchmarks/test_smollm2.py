"""The decoder, against the formulas written out with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from benchmarks.language import negative_log_likelihood
from benchmarks.smollm2 import Sizes, halves_apart, smollm2

SIZES = Sizes(layers=2, width=24, heads=6, shared_heads=2, words=11, epsilon=1e-5, base=100.0)
INNER = 20

Array = np.ndarray[Any, Any]


def tensors(seed: int) -> dict[str, Array]:
    random, width = np.random.default_rng(seed), SIZES.width
    shared = SIZES.shared_heads * SIZES.head_width
    shapes = {
        "attn_q": (width, width), "attn_k": (shared, width), "attn_v": (shared, width),
        "attn_output": (width, width), "ffn_gate": (INNER, width), "ffn_up": (INNER, width),
        "ffn_down": (width, INNER), "attn_norm": (width,), "ffn_norm": (width,),
    }  # fmt: skip
    found = {"token_embd.weight": (SIZES.words, width), "output_norm.weight": (width,)}
    for layer in range(SIZES.layers):
        found |= {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    return {name: random.normal(0, 0.5, shape).astype(np.float32) for name, shape in found.items()}


def normalized(x: Array, weight: Array) -> Array:
    return np.asarray(weight * x / np.sqrt(np.mean(x**2, -1, keepdims=True) + SIZES.epsilon))


def attention(x: Array, w: dict[str, Array], prefix: str) -> Array:
    """Neighbors rotated as complex numbers, as llama.cpp does; one head and position at a time."""
    width, positions = SIZES.head_width, len(x)
    frequencies = SIZES.base ** (-np.arange(0, width, 2) / width)
    turns = np.exp(1j * np.outer(np.arange(positions), frequencies))  # [S, d/2]

    def turned(rows: Array) -> Array:
        return np.asarray((rows[:, 0::2] + 1j * rows[:, 1::2]) * turns)

    mixed = np.zeros((positions, SIZES.width))
    queries, keys, values = (x @ w[f"{prefix}.attn_{n}.weight"].T for n in "qkv")
    for head in range(SIZES.heads):
        own = slice(head * width, (head + 1) * width)
        group = head // (SIZES.heads // SIZES.shared_heads)
        of_group = slice(group * width, (group + 1) * width)
        scores = (turned(queries[:, own]) @ turned(keys[:, of_group]).conj().T).real
        for place in range(positions):
            weights = np.exp(scores[place, : place + 1] / np.sqrt(width))
            mixed[place, own] = weights / weights.sum() @ values[: place + 1, of_group]
    return mixed @ w[f"{prefix}.attn_output.weight"].T


def logits(tokens: list[int], w: dict[str, Array]) -> Array:
    x = w["token_embd.weight"][tokens].astype(np.float64)
    for layer in range(SIZES.layers):
        prefix = f"blk.{layer}"
        x = x + attention(normalized(x, w[f"{prefix}.attn_norm.weight"]), w, prefix)
        inner = normalized(x, w[f"{prefix}.ffn_norm.weight"])
        gate, up = (inner @ w[f"{prefix}.ffn_{name}.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{prefix}.ffn_down.weight"].T
    return normalized(x, w["output_norm.weight"]) @ w["token_embd.weight"].T


@pytest.fixture(scope="module")
def weights() -> dict[str, Array]:
    """As a GGUF holds them."""
    return tensors(0)


@pytest.fixture(scope="module")
def model(weights: dict[str, Array]) -> bytes:
    exported = dict(weights)
    for layer in range(SIZES.layers):
        for part, heads in (("attn_q", SIZES.heads), ("attn_k", SIZES.shared_heads)):
            name = f"blk.{layer}.{part}.weight"
            exported[name] = halves_apart(weights[name], heads)
    return bytes(smollm2(exported, SIZES).SerializeToString())


def test_computes_what_the_formulas_say(model: bytes, weights: dict[str, Array]) -> None:
    session = ort.InferenceSession(model)
    batch = [[1, 5, 2, 9, 10, 0, 7], [3, 3, 4, 8, 0, 6, 1]]
    (found,) = session.run(None, {"input_ids": np.array(batch)})
    assert found.shape == (2, 7, SIZES.words)
    # float32 against float64 through two layers of 24 inputs: a few hundred roundings of 6e-8
    for row, tokens in zip(found, batch, strict=True):
        np.testing.assert_allclose(row, logits(tokens, weights), rtol=2e-5, atol=2e-5)
    (short,) = session.run(None, {"input_ids": np.array([batch[0][:1]])})
    np.testing.assert_allclose(short[0], found[0, :1], rtol=2e-5, atol=2e-5)


def test_table_of_words_is_stored_once(model: bytes) -> None:
    import onnx

    proto = onnx.load_from_string(model)
    large = [t.name for t in proto.graph.initializer if SIZES.words in t.dims]
    assert large == ["token_embd.weight"]


def test_likelihood_by_hand() -> None:
    scores = np.log(np.array([[1, 1, 2], [3, 1, 4], [9, 9, 9]], np.float32))
    found = negative_log_likelihood(scores, np.array([0, 2, 1]))
    np.testing.assert_allclose(found, -np.log([2 / 4, 1 / 8]), rtol=1e-6)
