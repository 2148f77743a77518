"""MiniLM as ONNX computes what its authors publish, and what the formulas say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from benchmarks.minilm import HEADS, LAYERS, WIDTH, load_safetensors, minilm

pytestmark = pytest.mark.xdist_group("minilm")  # built once

Array = NDArray[np.float64]
BEGIN, END = "[CLS]", "[SEP]"
SENTENCES = (
    "the weather is lovely today .",
    "it ' s so sunny outside !",
    "he drove to the stadium .",
)
SIMILARITIES = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
"""Of these sentences, in the quickstart of the documentation at sbert.net."""


@pytest.fixture(scope="module")
def tensors(asset: Callable[[str], Path]) -> dict[str, NDArray[Any]]:
    return load_safetensors(asset("minilm"))


@pytest.fixture(scope="module")
def session(
    tensors: dict[str, NDArray[Any]], tmp_path_factory: pytest.TempPathFactory
) -> ort.InferenceSession:
    path = tmp_path_factory.mktemp("minilm") / "minilm.onnx"
    onnx.save(minilm(tensors), path)
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"])


def test_published_similarities(
    session: ort.InferenceSession, asset: Callable[[str], Path]
) -> None:
    """Means over the tokens of sentences of different lengths, side by side in one batch."""
    words = asset("minilm-vocabulary").read_text(encoding="utf-8").splitlines()
    rows = [[words.index(w) for w in (BEGIN, *text.split(), END)] for text in SENTENCES]
    length = max(map(len, rows))
    ids = np.array([row + [0] * (length - len(row)) for row in rows])
    mask = np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    (states,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
    pooled = (states * mask[..., np.newaxis]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
    pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
    np.testing.assert_allclose(pooled @ pooled.T, SIMILARITIES, rtol=0, atol=6e-5)


# the same in NumPy, one sequence at a time


def error_function(x: Array) -> Array:
    """Abramowitz and Stegun 7.1.26, within 1.5e-7."""
    t = 1 / (1 + 0.3275911 * np.abs(x))
    factors = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
    series = sum(factor * t ** (power + 1) for power, factor in enumerate(factors))
    return np.sign(x) * (1 - series * np.exp(-(x**2)))


class Reference:
    """Post-norm encoder of Vaswani et al. 2017 with the names of a BertModel."""

    def __init__(self, tensors: dict[str, NDArray[Any]]) -> None:
        self.tensors = tensors

    def linear(self, x: Array, name: str) -> Array:
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        return x @ weight.T.astype(np.float64) + bias

    def normalized(self, x: Array, name: str) -> Array:
        centered = x - x.mean(axis=-1, keepdims=True)
        deviation = np.sqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-12)
        return centered / deviation * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]

    def attention(self, x: Array, name: str) -> Array:
        query, key, value = (self.linear(x, f"{name}.self.{p}") for p in ("query", "key", "value"))
        width = WIDTH // HEADS
        mixed = np.empty_like(x)
        for start in range(0, WIDTH, width):
            part = slice(start, start + width)
            scores = query[:, part] @ key[:, part].T / np.sqrt(width)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed[:, part] = weights / weights.sum(axis=1, keepdims=True) @ value[:, part]
        out = self.linear(mixed, f"{name}.output.dense")
        return self.normalized(x + out, f"{name}.output.LayerNorm")

    def layer(self, x: Array, name: str) -> Array:
        x = self.attention(x, f"{name}.attention")
        inner = self.linear(x, f"{name}.intermediate.dense")
        inner = inner / 2 * (1 + error_function(inner / np.sqrt(2)))
        out = self.linear(inner, f"{name}.output.dense")
        return self.normalized(x + out, f"{name}.output.LayerNorm")

    def states(self, ids: NDArray[np.int64]) -> Array:
        """[S] -> [S, 384]"""
        table = "embeddings.{}_embeddings.weight"
        words, positions, types = (
            self.tensors[table.format(kind)] for kind in ("word", "position", "token_type")
        )
        x = words[ids].astype(np.float64) + positions[: len(ids)] + types[0]
        x = self.normalized(x, "embeddings.LayerNorm")
        for index in range(LAYERS):
            x = self.layer(x, f"encoder.layer.{index}")
        return x


@pytest.mark.parametrize("lengths", [(9,), (3, 14, 1)])
def test_formulas(
    session: ort.InferenceSession, tensors: dict[str, NDArray[Any]], lengths: tuple[int, ...]
) -> None:
    """A sequence is the same alone and beside longer ones."""
    random = np.random.default_rng(1)
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, np.newaxis]).astype(np.int64)
    ids = random.integers(1000, 20000, mask.shape)
    (states,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
    assert states.shape == (*mask.shape, WIDTH)
    reference = Reference(tensors)
    for row, length in enumerate(lengths):
        wanted = reference.states(ids[row, :length])
        np.testing.assert_allclose(states[row, :length], wanted, rtol=0, atol=1e-5)
