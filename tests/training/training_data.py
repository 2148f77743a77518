"""Samples and small models for tests of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import numpy_helper

from slimctl.core.contract import TrainingBatch
from slimctl.data.batch import Batch

COUNT, FEATURES, CLASSES = 30, 4, 3


class Listed:
    """Training data out of a list of batches; counts how often it is read."""

    def __init__(self, batches: Sequence[TrainingBatch]) -> None:
        self._batches = batches
        self.passes = 0

    @property
    def sample_count(self) -> int | None:
        return sum(batch.size for batch in self._batches)

    def batches(self) -> Iterator[TrainingBatch]:
        self.passes += 1
        yield from self._batches

    def content_hash(self) -> str:
        return "listed"


def cut(
    feeds: dict[str, NDArray[Any]], labels: NDArray[Any] | None, sizes: Sequence[int]
) -> Listed:
    """Arrays cut into batches of these sizes along axis 0."""
    batches, first = [], 0
    for size in sizes:
        rows = slice(first, first + size)
        part = {name: array[rows] for name, array in feeds.items()}
        batches.append(Batch(part, None if labels is None else labels[rows], first, size))
        first += size
    return Listed(batches)


def separable(seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Points around one center for each class, and their classes."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, COUNT)
    centers = random.standard_normal((CLASSES, FEATURES)) * 2
    points = centers[labels] + random.standard_normal((COUNT, FEATURES))
    return points.astype(np.float32), labels


def classifier(seed: int = 0) -> ir.Model:
    """A normalization between two linear layers."""
    text = f"""
    <ir_version: 8, opset_import: ["": 17]>
    g (float[N,{FEATURES}] x) => (float[N,{CLASSES}] y) {{
        a = Gemm (x, w, b)
        n = BatchNormalization (a, s, t, m, v)
        r = Relu (n)
        y = Gemm (r, u, c)
    }}
    """
    random = np.random.default_rng(seed)
    shapes = {"w": (FEATURES, 8), "b": 8, "s": 8, "t": 8, "m": 8, "u": (8, CLASSES), "c": CLASSES}
    weights = {n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    weights["v"] = np.ones(8, np.float32)
    model = onnx.parser.parse_model(text)
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    return ir.from_proto(model)
