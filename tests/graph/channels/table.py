"""Cases as rows of a table: a small model in ONNX text, and what may go from which layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from tests.graph.channels.exactness import AssertExact

Weight = tuple[int, ...] | np.ndarray
"""The shape of random numbers, or the numbers."""


@dataclass(frozen=True)
class Case:
    """A model and what the analysis must find in it.

    Attributes:
        name: Of the test.
        text: Inputs, outputs and nodes; layers to judge have names.
        weights: Initializers.
        free: Units that may go, by layer; layers that are not named here must keep all.
        reason: Part of a reason that must be given for a unit that stays.
        opset: Of the model; other domains get version 1.
        whole_blocks: See ``analyze``.
        removes: Whether half of the free units is anything at all.
    """

    name: str
    text: str
    weights: Mapping[str, Weight]
    free: Mapping[str, int]
    reason: str = ""
    opset: int = 17
    whole_blocks: bool = False
    removes: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def proto(self) -> onnx.ModelProto:
        """The model."""
        return parsed(self.text, self.weights, self.opset)

    def __str__(self) -> str:
        return self.name


def parsed(
    text: str, weights: Mapping[str, Weight], opset: int = 17, dtype: type = np.float32
) -> onnx.ModelProto:
    """A model from ONNX text and its initializers."""
    imports = f'"" : {opset}, "my.own" : 1, "com.microsoft" : 1'
    proto = onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{imports}]>\ng {text}")
    rng = np.random.default_rng(7)
    for name, weight in weights.items():
        array = weight
        if isinstance(array, tuple):  # narrow, so that activations stay near 1
            array = (rng.standard_normal(array) * 0.4).astype(dtype)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return proto


def ints(*numbers: int) -> np.ndarray:
    """A vector of int64."""
    return np.array(numbers, np.int64)


def scalar(number: float) -> np.ndarray:
    """A float32 without axes."""
    return np.array(number, np.float32)


def images(
    name: str,
    nodes: str,
    free: int | Mapping[str, int] = 8,
    reason: str = "",
    *,
    opset: int = 17,
    height: str = "H",
    width: str = "W",
    last: str = "",
    reads: int = 8,
    **weights: Weight,
) -> Case:
    """A convolution with 8 channels (c1: t), some nodes from t to u, and a convolution of u.

    Args:
        name: Of the test.
        nodes: ONNX text.
        free: Units of c1 that may go, or units by layer.
        reason: See :class:`Case`.
        opset: Of the model.
        height: Of the input.
        width: Of the input.
        last: Attributes of the last convolution.
        reads: Channels of u.
        weights: What the nodes read.
    """
    text = f"""(float[N,3,{height},{width}] x) => (float[a,b,c,d] y) {{
      [c1] t = Conv<pads = [1,1,1,1]>(x, W1, B1)
      {nodes}
      [c2] y = Conv{last}(u, W2, B2)
    }}"""
    known: dict[str, Weight] = {"W1": (8, 3, 3, 3), "B1": (8,), "W2": (5, reads, 1, 1), "B2": (5,)}
    if last:
        known["W2"] = (5, reads, 3, 3)
    return Case(name, text, {**known, **weights}, _by_layer(free, "c1"), reason, opset)


def tokens(
    name: str,
    nodes: str,
    free: int | Mapping[str, int] = 8,
    reason: str = "",
    *,
    opset: int = 17,
    reads: int = 8,
    length: str = "S",
    whole_blocks: bool = False,
    **weights: Weight,
) -> Case:
    """As :func:`images`, for [N, S, 6] and two matrices; the first layer is m1, t has width 8."""
    text = f"""(float[N,{length},6] x) => (float[a,b,c] y) {{
      [m1] t = MatMul(x, W1)
      {nodes}
      [m2] y = MatMul(u, W2)
    }}"""
    known: dict[str, Weight] = {"W1": (6, 8), "W2": (reads, 5)}
    return Case(
        name, text, {**known, **weights}, _by_layer(free, "m1"), reason, opset, whole_blocks
    )


def check(case: Case, assert_exact: AssertExact) -> None:
    """Everything that a row of the table says."""
    found = assert_exact(case.proto(), whole_blocks=case.whole_blocks)
    free = {
        name: count
        for name in {node.name for group in found.groups for node in group.layers}
        if (count := found.free_of(name))
    }
    assert free == dict(case.free), found.reasons
    assert bool(found.removed) == bool(case.free and case.removes)
    if case.reason:
        assert any(case.reason in reason for reason in found.reasons), found.reasons


def _by_layer(free: int | Mapping[str, int], layer: str) -> Mapping[str, int]:
    if isinstance(free, int):
        return {layer: free} if free else {}
    return free


def dense(
    name: str,
    nodes: str,
    free: int | Mapping[str, int] = 8,
    reason: str = "",
    *,
    batch: str = "N",
    opset: int = 17,
    **weights: Weight,
) -> Case:
    """Nodes from x [batch, 6] to a matrix y; the layer to judge is m1, with 8 units."""
    text = f"(float[{batch},6] x) => (float[a,b] y) {{ {nodes} }}"
    return Case(name, text, weights, _by_layer(free, "m1"), reason, opset)
