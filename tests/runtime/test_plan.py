"""What a plan makes of a graph: strings, operators of onnxruntime's optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from slimctl.core.errors import UnsupportedModelError
from slimctl.graph._normalize import normalize
from slimctl.graph.session import Level, open_session, run
from slimctl.runtime.session import Runtime


def model_of(
    nodes: list[onnx.NodeProto],
    feeds: dict[str, Any],
    outputs: dict[str, int],
    weights: dict[str, Any] | None = None,
    opset: int = 17,
) -> ir.Model:
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
            )
            for name, array in feeds.items()
        ],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [
            numpy_helper.from_array(np.asarray(array), name)
            for name, array in (weights or {}).items()
        ],
    )
    imports = [helper.make_opsetid("", opset)]
    model = ir.serde.deserialize_model(
        helper.make_model(graph, opset_imports=imports, ir_version=9)
    )
    normalize(model)
    return model


def test_strings_are_text() -> None:
    """An initializer, and tensors in attributes, which a file holds as bytes."""
    texts = np.array(["\u00e4", "b"], object)
    value = helper.make_tensor("", onnx.TensorProto.STRING, [2], [t.encode() for t in texts])
    model = model_of(
        [
            helper.make_node("Gather", ["texts", "index"], ["chosen"]),
            helper.make_node("Constant", [], ["constant"], value=value),
            helper.make_node("Equal", ["constant", "chosen"], ["same"]),
        ],
        {"index": np.array([1, 0])},
        {"chosen": onnx.TensorProto.STRING, "same": onnx.TensorProto.BOOL},
        {"texts": texts},
        opset=19,
    )
    feeds = {"index": np.array([1, 0])}
    found = Runtime(model).run(feeds)
    assert found["chosen"].tolist() == ["b", "\u00e4"]
    assert found["chosen"].tolist() == run(open_session(model), feeds)["chosen"].tolist()
    assert found["same"].tolist() == [False, False]


@pytest.mark.parametrize("op_type", ["LayerNormalization", "SimplifiedLayerNormalization"])
def test_normalizations_that_onnxruntime_writes_into_older_sets(op_type: str) -> None:
    feeds = {"x": np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)}
    weights = {"scale": np.linspace(0.5, 2, 8, dtype=np.float32)}
    node = helper.make_node(op_type, ["x", "scale"], ["y"], epsilon=1e-3, axis=-1)
    model = model_of([node], feeds, {"y": onnx.TensorProto.FLOAT}, weights, opset=12)
    found = Runtime(model).run(feeds)["y"]
    expected = run(open_session(model, level=Level.DISABLED), feeds)["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_an_operator_without_a_function_is_named_before_anything_runs() -> None:
    node = helper.make_node("RandomNormal", [], ["y"], "dice", shape=[2])
    model = model_of([node], {}, {"y": onnx.TensorProto.FLOAT})
    with pytest.raises(UnsupportedModelError, match="no function for RandomNormal") as caught:
        Runtime(model)
    assert caught.value.where == "node 'dice'"
