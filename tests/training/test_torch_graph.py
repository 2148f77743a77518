"""A graph in torch: what is refused, what is given back, what gradients are of."""

# ruff: noqa: E402 # the check for torch comes before what needs it
from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

torch = pytest.importorskip("torch", reason="torch is an extra")

from slimctl.core.errors import ModelExecutionError, UnsupportedModelError
from slimctl.graph.save import content_hash
from slimctl.training.graph import TorchGraph
from tests.training.operator_cases import case, normal, recurrent

_SHARED = """
<ir_version: 8, opset_import: ["": 11]>
shared (float[N,3] x) => (float[N,3] y, float[3,3] v) {
    v = Identity(w)
    a = MatMul(x, w)
    b = Relu(a)
    y = MatMul(b, v)
}
"""


def parsed(text: str, **weights: np.ndarray) -> ir.Model:
    model = onnx.parser.parse_model(text)
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    model.graph.initializer.extend(numpy_helper.from_array(a, k) for k, a in weights.items())
    return ir.from_proto(model)


# refused


def test_an_operator_without_a_function_is_named_with_its_node() -> None:
    text = """
    <ir_version: 8, opset_import: ["": 17]>
    g (float[N,3] x) => (float[N,3] y) { a = Relu(x)  y = Hardmax(a) }
    """
    with pytest.raises(UnsupportedModelError, match="Hardmax of operator set 17 cannot") as caught:
        TorchGraph(parsed(text))
    assert caught.value.where == "node 'Hardmax_1'"
    assert "--importance" in caught.value.fix


def test_an_operator_of_another_domain_is_not_mistaken_for_its_namesake() -> None:
    text = """
    <ir_version: 8, opset_import: ["": 17, "com.example": 1]>
    g (float[N,3] x) => (float[N,3] y) { y = com.example.Relu(x) }
    """
    with pytest.raises(UnsupportedModelError, match=r"com\.example::Relu of operator set 1 "):
        TorchGraph(parsed(text))


def test_the_operator_set_is_the_one_that_the_user_has() -> None:
    text = """
    <ir_version: 8, opset_import: ["": 11]>
    g (float[N,3] x) => (float[N,3] y) { a = Relu(x)  y = Hardmax<axis=1>(a) }
    """
    with pytest.raises(UnsupportedModelError, match="Hardmax of operator set 11") as caught:
        TorchGraph(parsed(text), remedy="leave it out")
    assert caught.value.where == "node 'Hardmax_1'"
    assert caught.value.fix.startswith("leave it out, or add the operator")


def test_loops_are_refused() -> None:
    text = """
    <ir_version: 8, opset_import: ["": 17]>
    g (int64 n, float[3] x) => (float[3] y) {
        y = Loop (n, , x) <body = b (int64 i, bool c, float[3] a) => (bool d, float[3] e) {
            d = Identity(c)
            e = Relu(a)
        }>
    }
    """
    with pytest.raises(UnsupportedModelError, match="it runs a graph of its own") as caught:
        TorchGraph(parsed(text))
    assert caught.value.where == "node 'Loop_0'"


X = normal(1, 2, 4, 4)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (case("AveragePool", X, kernel_shape=[2, 2], dilations=[2, 2]), "dilated"),
        (case("MaxPool", X, kernel_shape=[2, 2], outputs=2), "output 2 is read"),
        (case("Pad", np.zeros(3, np.float32), [1, 1], mode="median"), "mode is 'median'"),
        (case("Resize", X, None, None, [1, 2, 2, 2], antialias=1, mode="linear"), "antialias is 1"),
        (recurrent("LSTM", 4, 1, 2, clip=1.0), "clip is 1.0"),
        (recurrent("GRU", 3, 1, 1, activations=["Relu", "Tanh"]), "activations are relu, tanh"),
        (
            case(*("GRU", normal(2, 1, 3), normal(1, 6, 3), normal(1, 6, 2), None),
                 np.array([2], np.int32), hidden_size=2),
            "sequence_lens is given",
        ),
        (case("Cast", X, to=onnx.TensorProto.FLOAT8E5M2), "it makes FLOAT8E5M2 of its input"),
        (case("Conv", normal(1, 1, *(2,) * 4), normal(1, 1, *(1,) * 4)), "4 spatial axes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_form_that_is_not_implemented_is_refused(refused: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        TorchGraph(refused.model())
    assert caught.value.where == "node 'node'"


def test_types_that_torch_does_not_compute_with_are_refused() -> None:
    node = helper.make_node("Identity", ["x"], ["y"], "node")
    ports = [helper.make_tensor_value_info(name, onnx.TensorProto.STRING, [2]) for name in "xy"]
    graph = helper.make_graph([node], "g", ports[:1], ports[1:])
    opsets = [helper.make_opsetid("", 17)]
    model = ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=8))
    with pytest.raises(UnsupportedModelError, match="STRING") as caught:
        TorchGraph(model)
    assert caught.value.where == "tensor 'x'"


# run


def test_inputs_that_do_not_fit_name_the_node() -> None:
    graph = TorchGraph(parsed(_SHARED, w=normal(3, 3)))
    with pytest.raises(ModelExecutionError, match="torch cannot run MatMul") as caught:
        graph.run({"x": normal(2, 4)}, ["y"])
    assert caught.value.where == "node 'MatMul_1'"


def test_whatever_is_asked_for_is_given_back_and_the_model_stays() -> None:
    w, x = normal(3, 3), normal(2, 3)
    model = parsed(_SHARED, w=w)
    before = content_hash(model)
    found = TorchGraph(model).run({"x": x}, ["x", "w", "b", "y"])
    assert content_hash(model) == before
    b = np.maximum(x @ w, 0)
    for name, array in {"x": x, "w": w, "b": b, "y": b @ w}.items():
        np.testing.assert_allclose(found[name].detach().numpy(), array, rtol=1e-5, atol=1e-6)


def test_gradients_of_shared_weights_add_up() -> None:
    """By hand: y = relu(x w) w, and the loss is the sum of y."""
    w, x = normal(3, 3), normal(2, 3)
    found = TorchGraph(parsed(_SHARED, w=w)).run({"x": x}, ["w", "b", "y"])
    gradient, behind = torch.autograd.grad(found["y"].sum(), [found["w"], found["b"]])
    ones = np.ones((2, 3), np.float32)
    into_b = ones @ w.T
    expected = x.T @ (into_b * (x @ w > 0)) + np.maximum(x @ w, 0).T @ ones
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(behind.numpy(), into_b, rtol=1e-5)


def test_half_precision_is_computed_in_single() -> None:
    text = """
    <ir_version: 8, opset_import: ["": 17]>
    g (float16[N,3] x) => (float16[N,3] y) { a = MatMul(x, w)  y = Cast<to=10>(a) }
    """
    w, x = normal(3, 3).astype(np.float16), normal(2, 3).astype(np.float16)
    found = TorchGraph(parsed(text, w=w)).run({"x": x}, ["y"])["y"]
    np.testing.assert_allclose(
        found.detach().numpy(), x.astype(np.float32) @ w.astype(np.float32), rtol=1e-6
    )
