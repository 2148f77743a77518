"""Small models that tests of measurements compare."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from slimctl.data.batch import Batch


def build_chain(*, layers: int = 4, noisy: int | None = None, channels: int = 8) -> ir.Model:
    """MatMul and Relu in turn; the weights of one layer may be disturbed.

    Tensors: x, h0 (MatMul), r0 (Relu), h1, r1, ..., and y, a last MatMul.
    """
    generator = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for index in range(layers):
        weight = generator.normal(size=(channels, channels)).astype(np.float32)
        if index == noisy:
            weight += np.random.default_rng(1).normal(size=weight.shape).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{index}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{index}"], [f"h{index}"], f"mm{index}"))
        nodes.append(helper.make_node("Relu", [f"h{index}"], [f"r{index}"], f"relu{index}"))
        last = f"r{index}"
    weights.append(numpy_helper.from_array(np.eye(channels, dtype=np.float32), "w_last"))
    nodes.append(helper.make_node("MatMul", [last, "w_last"], ["y"], "last"))
    return build(nodes, weights, channels)


def build(nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], channels: int) -> ir.Model:
    """A model from x [N, channels] to y [N, channels]."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", channels])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", channels])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return ir.from_proto(model)


@pytest.fixture
def chain() -> Callable[..., ir.Model]:
    return build_chain


@pytest.fixture
def to_ir() -> Callable[..., ir.Model]:
    return build


@pytest.fixture
def batches() -> list[Batch]:
    """Twelve samples in batches of four, with labels."""
    generator = np.random.default_rng(5)
    return [
        Batch(
            {"x": generator.normal(size=(4, 8)).astype(np.float32)},
            generator.integers(0, 8, 4),
            first,
            4,
        )
        for first in (0, 4, 8)
    ]
