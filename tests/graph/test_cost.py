"""Costs against counts by hand and against a brute-force count of multiplications."""

from __future__ import annotations

from itertools import product

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from slimctl.graph.cost import ModelCost, OperatorCost, model_cost, node_costs
from slimctl.graph.edit import interface
from slimctl.graph.load import load_model
from slimctl.graph.save import model_to_bytes


def _proto(text: str, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(text)
    for name, shape in shapes.items():
        array = np.ones(shape, np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return proto


def _one(text: str, opset: int = 17, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    return _proto(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}', **shapes)


def _brute_force_convolution(size: int, kernel: int, stride: int, pad: int) -> int:
    """Positions of a square kernel on a square image, padding multiplied too."""
    starts = range(-pad, size + pad - kernel + 1, stride)
    return sum(1 for _ in product(starts, starts, range(kernel), range(kernel)))


def test_convolution(write):
    text = """g (float[2,4,9,9] x) => (float[2,6,5,5] y)
      { y = Conv<strides = [2,2], pads = [1,1,1,1], group = 2>(x, W, B) }"""
    (cost,) = node_costs(load_model(write(_one(text, W=(6, 2, 3, 3), B=(6,)))))
    assert cost.macs == 2 * 6 * 2 * _brute_force_convolution(9, 3, 2, 1)
    assert cost.parameters == 6 * 2 * 9 + 6
    assert cost.weight_bytes == 4 * cost.parameters
    assert cost.activation_bytes == 4 * (2 * 4 * 81 + 2 * 6 * 25)
    assert cost.output_shapes == ((2, 6, 5, 5),)


def test_transposed_convolution(write):
    text = """g (float[1,4,5,5] x) => (float[1,6,9,9] y)
      { y = ConvTranspose<strides = [2,2], pads = [1,1,1,1], group = 2>(x, W) }"""
    (cost,) = node_costs(load_model(write(_one(text, W=(4, 3, 3, 3)))))
    assert cost.macs == 4 * 25 * 3 * 9  # every input value meets three channels of nine weights


@pytest.mark.parametrize(
    ("body", "shapes", "macs"),
    [
        ("y = MatMul(x, W)", {"W": (4, 5)}, 2 * 3 * 4 * 5),
        ("y = MatMul(x, W)", {"W": (2, 4, 5)}, 2 * 3 * 4 * 5),
        ("y = MatMul(x, W)", {"W": (4,)}, 2 * 3 * 4),
        ("f = Flatten(x) y = Gemm(f, W)", {"W": (12, 7)}, 2 * 12 * 7),
        ("f = Flatten(x) y = Gemm<transA = 1>(f, W)", {"W": (2, 7)}, 2 * 12 * 7),
        ("f = Flatten(x) y = Gemm<transB = 1>(f, W, B)", {"W": (7, 12), "B": (7,)}, 2 * 12 * 7),
        ("y = Relu(x)", {}, 0),
    ],
)
def test_matrix_products(body, shapes, macs, write):
    text = f"g (float[2,3,4] x) => (float[] y) {{ {body} }}"
    assert model_cost(load_model(write(_one(text, **shapes)))).macs == macs


@pytest.mark.parametrize(("operator", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_recurrent(operator, gates, write):
    text = f"""g (float[5,2,3] x) => (float[] y)
      {{ y = {operator}<hidden_size = 4, direction = "bidirectional">(x, W, R) }}"""
    proto = _one(text, W=(2, gates * 4, 3), R=(2, gates * 4, 4))
    assert model_cost(load_model(write(proto))).macs == 5 * 2 * 2 * gates * (4 * 3 + 4 * 4)


QUANTIZED = """g (float[1,3,8,8] x) => (float[1,4,6,6] y)
  <float s = {0.1}, uint8 z = {128}, float[4] ws = {1,1,1,1}, int8[4] wz = {0,0,0,0}>
  {
    q = QuantizeLinear(x, s, z)
    d = DequantizeLinear(q, s, z)
    w = DequantizeLinear<axis = 0>(W, ws, wz)
    y = Conv(d, w)
  }"""


def test_weights_behind_dequantize_belong_to_their_user(write):
    proto = _one(QUANTIZED)
    weight = numpy_helper.from_array(np.ones((4, 3, 3, 3), np.int8), "W")
    proto.graph.initializer.append(weight)
    costs = {cost.op_type: cost for cost in node_costs(load_model(write(proto)))}
    convolution = costs["Conv"]
    assert convolution.macs == 4 * 36 * 27
    assert (convolution.parameters, convolution.weight_bytes) == (108, 108)
    assert convolution.activation_bytes == 4 * (3 * 64 + 4 * 36)
    assert costs["DequantizeLinear"].parameters == 0
    assert costs["QuantizeLinear"].activation_bytes == 4 * 192 + 192


def test_shared_weights_count_once(write):
    text = "g (float[2,4] x) => (float[2,4] y) { h = MatMul(x, W) y = MatMul(h, W) }"
    cost = model_cost(load_model(write(_one(text, W=(4, 4)))))
    assert (cost.parameters, cost.weight_bytes, cost.macs) == (16, 64, 64)


def test_indices_are_no_parameters(write):
    text = "g (float[2,4] x) => (float[8] y) <int64[1] s = {8}> { y = Reshape(x, s) }"
    cost = model_cost(load_model(write(_one(text))))
    assert (cost.parameters, cost.weight_bytes, cost.activation_bytes) == (0, 8, 0)


DYNAMIC = "g (float[N,4] x) => (float[N,5] y) { h = MatMul(x, W) y = Relu(h) }"


def test_unknown_is_unknown(write):
    model = load_model(write(_one(DYNAMIC, W=(4, 5))))
    before = interface(model), model_to_bytes(model)
    product_cost, activation = node_costs(model)
    assert product_cost.macs is None
    assert product_cost.activation_bytes is None
    assert product_cost.output_shapes == (("N", 5),)
    assert activation.macs == 0
    assert model_cost(model).unknown == 2
    assert (interface(model), model_to_bytes(model)) == before


def test_sizes_make_it_known(write):
    model = load_model(write(_one(DYNAMIC, W=(4, 5))))
    cost = model_cost(model, {"N": 3})
    assert cost == ModelCost(
        parameters=20,
        weight_bytes=80,
        macs=60,
        activation_bytes=4 * (3 * 4 + 3 * 5) + 4 * (3 * 5 + 3 * 5),
        unknown=0,
        operators={
            "MatMul": OperatorCost(count=1, macs=60, activation_bytes=4 * 27),
            "Relu": OperatorCost(count=1, macs=0, activation_bytes=4 * 30),
        },
    )


def test_shapes_that_an_old_model_calculates(write):
    """onnx follows them only in newer operator sets."""
    text = """g (float[N,3,4] x) => (float[] y)
      <int64[1] a = {0}, int64[1] b = {1}, int64[1] m = {-1}>
      { s = Shape(x) n = Slice(s, a, b) t = Concat<axis = 0>(n, m) f = Reshape(x, t)
        y = MatMul(f, W) }"""
    cost = model_cost(load_model(write(_one(text, opset=12, W=(12, 5)))), {"N": 2})
    assert (cost.macs, cost.unknown) == (2 * 12 * 5, 0)


def test_the_dearer_branch_counts(write):
    text = """g (float[2,4] x, bool c) => (float[2,4] y) {
      y = If (c) < then_branch = t () => (float[2,4] a) { h = MatMul(x, W) a = MatMul(h, W) },
                   else_branch = e () => (float[2,4] b) { b = MatMul(x, W) } > }"""
    assert model_cost(load_model(write(_one(text, W=(4, 4))))).macs == 2 * 2 * 4 * 4


@pytest.mark.parametrize(
    "body",
    [
        'y = Einsum<equation = "ij,ij->i">(x, x)',
        "y = Loop (n, go, x) < body = b (int64 i, bool k, float[2,4] v) => (bool ko, float[2,4] w)"
        " { ko = Identity(k) w = Neg(v) } >",
    ],
    ids=["einsum", "loop"],
)
def test_what_has_no_formula_is_unknown(body, write):
    text = f"g (float[2,4] x, int64 n, bool go) => (float[] y) {{ {body} }}"
    assert model_cost(load_model(write(_one(text)))).unknown == 1


def test_custom_operators_are_no_error(write):
    text = """<ir_version: 8, opset_import: ["" : 17, "strange" : 1]>
    g (float[2,4] x) => (float[2,4] y) { h = strange.Op(x) y = Neg(h) }"""
    assert [cost.op_type for cost in node_costs(load_model(write(text)))] == ["Op", "Neg"]
