"""Data run through a model that changes from front to back: as if they ran from its start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.core.contract import Feeds
from slimctl.passes import _weights_walk
from slimctl.passes._weights_walk import Walk, depths, frontier

TEXT = """<ir_version: 8, opset_import: ["": 17]> g (float[N,8] x, float[N,8] m) => (float[N,8] y)
<float[8,8] w1, float[8,8] w2, float[8,8] w3> {
    a = MatMul(x, w1) r = Relu(a) b = MatMul(r, w2) s = Add(b, x) t = Mul(s, m)
    y = MatMul(t, w3)
}"""


def weights(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.3, (8, 8)).astype(np.float32)


@pytest.fixture
def model() -> ir.Model:
    proto = onnx.parser.parse_model(TEXT)
    for seed, name in enumerate(("w1", "w2", "w3")):
        proto.graph.initializer.append(numpy_helper.from_array(weights(seed), name))
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


@pytest.fixture
def feeds() -> list[Feeds]:
    rng = np.random.default_rng(9)
    return [{n: rng.normal(0, 1, (2 + i, 8)).astype(np.float32) for n in "xm"} for i in range(3)]


class Watched:
    """A context that notes which nodes run."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.ran = inner, []

    def activations(
        self, model: ir.Model, tensors: Sequence[str], feeds: Iterable[Feeds] | None = None
    ) -> Iterator[Feeds]:
        self.ran.append([node.op_type for node in model.graph])
        return self.inner.activations(model, tensors, feeds)


def test_the_frontier_is_what_is_read_behind(model: ir.Model) -> None:
    nodes = {node.outputs[0].name: node for node in model.graph}
    assert frontier(model, [nodes["a"]]) == ["x", "m"]
    assert frontier(model, [nodes["y"], nodes["b"]]) == ["x", "m", "r"]
    assert frontier(model, [nodes["y"]]) == ["t"]
    body = ir.Node("", "Neg", [nodes["a"].outputs[0]])
    ir.Graph([], [], nodes=[body])
    assert frontier(model, [nodes["y"], body]) == []


def test_depth_counts_what_the_data_have_passed(model: ir.Model) -> None:
    nodes = {node.outputs[0].name: node for node in model.graph}
    groups = [[nodes["a"]], [nodes["b"]], [nodes["y"]]]
    assert depths(model, groups) == [0, 1, 2]
    assert depths(model, groups[1:]) == [0, 1]
    assert depths(model, [[nodes["s"], nodes["a"]], [nodes["t"]]]) == [1, 2]
    body = ir.Node("", "Neg", [nodes["a"].outputs[0]])
    ir.Graph([], [], nodes=[body])
    assert depths(model, [[body], [nodes["a"]], [nodes["b"]]]) == [0, 0, 1]


def walked(model: ir.Model, context: Any) -> list[list[Feeds]]:
    """Inputs of each product, each doubled before the next is looked at."""
    walk, found = Walk(model, context), []
    for name, seen in (("w1", "x"), ("w2", "r"), ("w3", "t")):
        value = model.graph.initializers[name]
        (use,) = value.uses()
        found.append(list(walk.activations([seen], [use.node])))
        array = value.const_value.numpy()
        value.const_value = ir.tensor(2 * array)
    return found


@pytest.mark.parametrize("most_kept", [1 << 20, 0])
def test_each_portion_sees_what_those_before_compute(
    model: ir.Model,
    feeds: list[Feeds],
    plain_context: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    most_kept: int,
) -> None:
    monkeypatch.setattr(_weights_walk, "_MOST_KEPT", most_kept)
    context = Watched(plain_context(feeds, model))
    found = walked(model, context)
    w1, w2 = (2 * weights(seed) for seed in (0, 1))
    for index, feed in enumerate(feeds):
        r = np.maximum(feed["x"] @ w1, 0)
        t = (r @ w2 + feed["x"]) * feed["m"]
        for portion, name, expected in zip(found, "xrt", (feed["x"], r, t), strict=True):
            np.testing.assert_allclose(portion[index][name], expected, rtol=1e-5, atol=1e-5)
    whole = ["MatMul", "Relu", "MatMul", "Add", "Mul", "MatMul"]
    if most_kept:
        assert context.ran == [whole, whole[:2], whole[2:5]]
    else:
        assert context.ran == [whole] * 3
