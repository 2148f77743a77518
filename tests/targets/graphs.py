"""Graphs for the tests of targets: a node between Q/DQ pairs, and a small network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

IMAGE = (1, 8, 6, 6)


def to_ir(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, Any],
    outputs: Sequence[str],
    constants: dict[str, np.ndarray] | None = None,
    *,
    opset: int = 17,
    kind: int = TensorProto.FLOAT,
) -> ir.Model:
    """A model from nodes; ``inputs`` gives shapes, those of outputs are inferred."""
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    for value in graph.output:
        value.ClearField("type")
    versions = {"": opset, "com.microsoft": 1, "com.example": 1}
    domains = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    proto = helper.make_model(graph, opset_imports=domains, ir_version=10)
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


class Pairs:
    """Builds one operator between Q/DQ pairs, one property at a time off the usual."""

    def __init__(
        self,
        activation: np.ndarray | None = None,
        scale: float = 0.125,
        output_scale: float = 0.125,
        output_zero: np.ndarray | None = None,
    ) -> None:
        self.zero = np.asarray(128, np.uint8) if activation is None else activation
        self.constants: dict[str, np.ndarray] = {
            "z": self.zero,
            "zy": self.zero if output_zero is None else output_zero,
            "s": np.asarray(scale, np.float32),
            "sy": np.asarray(output_scale, np.float32),
        }
        self.nodes: list[onnx.NodeProto] = []

    def quantize(self, name: str, scale: str = "s", zero: str = "z") -> str:
        self.nodes += [
            helper.make_node("QuantizeLinear", [name, scale, zero], [f"{name}_q"], f"{name}_Q"),
            helper.make_node(
                "DequantizeLinear", [f"{name}_q", scale, zero], [f"{name}_d"], f"{name}_DQ"
            ),
        ]
        return f"{name}_d"

    def constant(self, name: str, codes: np.ndarray, scale: Any, axis: int = 1) -> str:
        zero = np.full(np.shape(scale), 128 if codes.dtype == np.uint8 else 0, codes.dtype)
        self.constants |= {
            f"{name}_codes": codes,
            f"{name}_scale": np.asarray(scale, np.float32),
            f"{name}_zero": zero,
        }
        inputs = [f"{name}_codes", f"{name}_scale", f"{name}_zero"]
        self.nodes.append(
            helper.make_node("DequantizeLinear", inputs, [name], f"{name}_DQ", axis=axis)
        )
        return name

    def operator(self, op_type: str, inputs: Sequence[str], **attributes: Any) -> None:
        self.nodes.append(helper.make_node(op_type, inputs, ["y"], op_type, **attributes))

    def model(self, *, inputs: Sequence[str] = ("x",), shape: Any = IMAGE) -> ir.Model:
        return to_ir(self.nodes, dict.fromkeys(inputs, shape), ["y_d"], self.constants, opset=21)


def convolution(
    *,
    weight: type = np.int8,
    channels: int | None = 0,
    bias: type | None = np.int32,
    op_type: str = "Conv",
    lowest: int = -127,
    **attributes: Any,
) -> Pairs:
    """Pairs around a convolution with an 8x8 weight."""
    build = Pairs(
        **{key: attributes.pop(key) for key in ("activation", "scale") if key in attributes}
    )
    data = build.quantize("x")
    codes = np.full((8, 8, 3, 3), lowest if weight is np.int8 else 3, weight)
    build.constant("w", codes, 0.25 if channels is None else [0.25] * 8, channels or 0)
    inputs = [data, "w"]
    if bias is np.int32:
        inputs.append(build.constant("b", np.zeros(8, np.int32), [0.03125] * 8, 0))
    elif bias is not None:
        build.constants["b"] = np.zeros(8, np.float32)
        inputs.append("b")
    build.operator(op_type, inputs, **attributes)
    build.quantize("y", "sy", "zy")
    return build


def network(
    batch: Any = "N", *, residual: bool = True, deconv: bool = True, width: int = 8
) -> ir.Model:
    """A float convolutional network, with a residual sum and a transposed convolution."""
    rng = np.random.default_rng(width)
    shapes = {
        "w0": (width, 3, 3, 3),
        "b0": (width,),
        "w1": (width, width, 3, 3),
        "b1": (width,),
        "w2": (width, width, 3, 3),
        "b2": (width,),
        "wt": (width, 4, 2, 2),
        "bt": (4,),
        "fc": (4 if deconv else width, 5),
        "bf": (5,),
    }
    weights = {k: rng.normal(0, 0.3, s).astype(np.float32) for k, s in shapes.items()}
    make = helper.make_node
    nodes = [
        make("Conv", ["x", "w0", "b0"], ["c0"], "c0", pads=[1] * 4),
        make("Relu", ["c0"], ["r0"], "r0"),
        make("Conv", ["r0", "w1", "b1"], ["c1"], "c1", pads=[1] * 4),
        make("Relu", ["c1"], ["r1"], "r1"),
        make("Conv", ["r1", "w2", "b2"], ["c2"], "c2", auto_pad="SAME_UPPER"),
    ]
    last = "c2"
    if residual:
        nodes += [make("Add", ["r0", "c2"], ["a"], "add"), make("Relu", ["a"], ["r2"], "r2")]
        last = "r2"
    nodes.append(make("MaxPool", [last], ["m"], "pool", kernel_shape=[2, 2], strides=[2, 2]))
    last = "m"
    if deconv:
        nodes.append(make("ConvTranspose", ["m", "wt", "bt"], ["t"], "t", strides=[2, 2]))
        last = "t"
    nodes += [
        make("AveragePool", [last], ["g"], "gap", kernel_shape=[8, 8] if deconv else [4, 4]),
        make("Flatten", ["g"], ["f"], "flat"),
        make("Gemm", ["f", "fc", "bf"], ["y"], "fc"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "network",
        [value("x", TensorProto.FLOAT, [batch, 3, 8, 8])],
        [value("y", TensorProto.FLOAT, [batch, 5])],
        [numpy_helper.from_array(v, k) for k, v in weights.items()],
    )
    return ir.from_proto(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    )
