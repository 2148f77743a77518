"""Models whose interfaces exports have to describe."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = Sequence[int | str]

WORDS, WIDTH, HEADS, SIZE = 32, 16, 2, 8


def through(
    inputs: dict[str, Shape],
    *,
    kind: int = TensorProto.FLOAT,
    outputs: dict[str, Shape] | None = None,
) -> onnx.ModelProto:
    """Each input x doubled is an output y_x, with the shape it has or the one that is claimed."""
    claimed = outputs or {f"y_{name}": shape for name, shape in inputs.items()}
    pairs = list(zip(inputs, claimed, strict=True))
    return _model(
        [helper.make_node("Add", [x, x], [y]) for x, y in pairs],
        [helper.make_tensor_value_info(n, kind, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, kind, s) for n, s in claimed.items()],
    )


def mean_over_rows(*, kept: int) -> onnx.ModelProto:
    """x [N,3] -> its mean over the first axis, which is no batch then; an axis of 1 may be kept."""
    return _model(
        [helper.make_node("ReduceMean", ["x"], ["y"], axes=[0], keepdims=kept)],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["M", 3] if kept else ["M"])],
    )


def scaled_by_batch() -> onnx.ModelProto:
    """x [N,3] divided by the largest value of the whole batch: requests see each other."""
    return _model(
        [
            helper.make_node("Abs", ["x"], ["a"]),
            helper.make_node("ReduceMax", ["a"], ["m"], keepdims=1),
            helper.make_node("Div", ["x", "m"], ["y"]),
        ],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])],
    )


def decoder(*, layers: int = 2, leave_out: Sequence[str] = ()) -> onnx.ModelProto:
    """Tokens [B,S] -> logits [B,S,WORDS]; each layer appends to a cache and reads its mean."""
    random = np.random.default_rng(0)
    weights = [numpy_helper.from_array(random.standard_normal((WORDS, WIDTH)).astype("f"), "table")]
    weights.append(numpy_helper.from_array(np.array([0, 0, HEADS, SIZE], np.int64), "split"))
    weights.append(
        numpy_helper.from_array(random.standard_normal((WIDTH, WORDS)).astype("f"), "head")
    )
    weights.append(numpy_helper.from_array(np.array([0, 0, WIDTH], np.int64), "flat"))
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["h0"])]
    shape, longer = (["B", HEADS, at, SIZE] for at in ("past", "total"))
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "S"])
    mask = helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["B", "total"])
    inputs, outputs = [ids, mask], []
    for layer in range(layers):
        h = f"h{layer}"
        nodes += [
            helper.make_node("Reshape", [h, "split"], [f"r{layer}"]),
            helper.make_node("Transpose", [f"r{layer}"], [f"t{layer}"], perm=[0, 2, 1, 3]),
        ]
        for part in ("key", "value"):
            past, present = f"past_key_values.{layer}.{part}", f"present.{layer}.{part}"
            nodes.append(helper.make_node("Concat", [past, f"t{layer}"], [present], axis=2))
            inputs.append(helper.make_tensor_value_info(past, TensorProto.FLOAT, shape))
            outputs.append(helper.make_tensor_value_info(present, TensorProto.FLOAT, longer))
        nodes += [
            helper.make_node("ReduceMean", [f"present.{layer}.value"], [f"m{layer}"], axes=[2]),
            helper.make_node("Add", [f"t{layer}", f"m{layer}"], [f"a{layer}"]),
            helper.make_node("Transpose", [f"a{layer}"], [f"b{layer}"], perm=[0, 2, 1, 3]),
            helper.make_node("Reshape", [f"b{layer}", "flat"], [f"h{layer + 1}"]),
        ]
    # The mask is read, so that it stays an input.
    nodes += [
        helper.make_node("Cast", ["attention_mask"], ["mf"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMax", ["mf"], ["seen"], keepdims=0),
        helper.make_node("MatMul", [f"h{layers}", "head"], ["raw"]),
        helper.make_node("Mul", ["raw", "seen"], ["logits"]),
    ]
    outputs.append(helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "S", WORDS]))
    return _model(nodes, inputs, [o for o in outputs if o.name not in leave_out], weights)


def _model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
