"""Small models and data for the command-line tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CHANNELS = 8
CLASSES = 4


def classifier(*, custom_operator: bool = False) -> onnx.ModelProto:
    """Conv, Relu, pooling and Gemm on 3x8x8 images, any batch size."""
    random = np.random.default_rng(1)
    weights = {
        "conv.weight": random.normal(0, 0.3, (CHANNELS, 3, 3, 3)),
        "conv.bias": random.normal(0, 0.1, CHANNELS),
        "fc.weight": random.normal(0, 0.4, (CHANNELS, CLASSES)),
        "fc.bias": random.normal(0, 0.1, CLASSES),
    }
    middle = (
        helper.make_node("Frobnicate", ["conv"], ["relu"], name="frob", domain="com.example")
        if custom_operator
        else helper.make_node("Relu", ["conv"], ["relu"], name="relu")
    )
    graph = helper.make_graph(
        [
            helper.make_node(
                "Conv", ["image", "conv.weight", "conv.bias"], ["conv"], name="conv", pads=[1] * 4
            ),
            middle,
            helper.make_node("GlobalAveragePool", ["relu"], ["pooled"], name="pool"),
            helper.make_node("Flatten", ["pooled"], ["flat"], name="flatten"),
            helper.make_node("Gemm", ["flat", "fc.weight", "fc.bias"], ["logits"], name="fc"),
        ],
        "classifier",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", CLASSES])],
        [numpy_helper.from_array(v.astype(np.float32), k) for k, v in weights.items()],
    )
    domains = [helper.make_opsetid("", 17)]
    if custom_operator:
        domains.append(helper.make_opsetid("com.example", 1))
    return helper.make_model(graph, opset_imports=domains, ir_version=9)


def images(count: int, *, seed: int = 0) -> np.ndarray:
    """Float32 images [count, 3, 8, 8]."""
    return np.random.default_rng(seed).normal(0, 1, (count, 3, 8, 8)).astype(np.float32)


def write_inputs(folder: Path) -> None:
    """``model.onnx``, ``calib.npz`` and labeled ``val.npz`` in a folder."""
    onnx.save(classifier(), folder / "model.onnx")
    np.savez(folder / "calib.npz", image=images(16))
    labels = np.arange(12) % CLASSES
    np.savez(folder / "val.npz", image=images(12, seed=1), labels=labels)
