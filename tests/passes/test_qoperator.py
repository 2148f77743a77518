"""QOperator format: onnxruntime computes what it computes from the Q/DQ graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from slimctl.core.contract import PassReport
from slimctl.core.errors import UnsupportedModelError
from slimctl.core.registry import find_pass
from slimctl.graph.edit import all_nodes, clone_model, interface
from slimctl.graph.session import Level, registered_kernels
from slimctl.passes._qoperator_rules import MOVEMENT, RULES
from slimctl.passes.bias_correction import BiasCorrection
from slimctl.passes.qoperator import QOperator
from slimctl.passes.quantize import Quantize
from slimctl.passes.quantize_static import QuantizeStatic

ONE_STEP = 1.001  # quotient of two float32 numbers


class PairGraph:
    """Builds Q/DQ graphs by hand, so that the pass is not tested on its own family only."""

    def __init__(self, kind: str = "uint8", opset: int = 17) -> None:
        self.kind, self.opset = np.dtype(kind), opset
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self.inputs: dict[str, tuple[int, ...]] = {}
        self.rng = np.random.default_rng(0)

    def constant(self, name: str, array: Any, kind: Any = np.float32) -> str:
        self.weights[name] = np.asarray(array, kind)
        return name

    def node(self, op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [output], output, **attributes))
        return output

    def pair(self, name: str, scale: float = 0.05, zero: int | None = None) -> str:
        """Q and DQ behind a float tensor."""
        middle = (128 if self.kind == np.uint8 else 0) if zero is None else zero
        parameters = [
            self.constant(f"{name}_s", scale),
            self.constant(f"{name}_z", middle, self.kind),
        ]
        self.node("QuantizeLinear", [name, *parameters], f"{name}_q")
        return self.node("DequantizeLinear", [f"{name}_q", *parameters], f"{name}_dq")

    def input(self, name: str, shape: tuple[int, ...], scale: float = 0.05) -> str:
        self.inputs[name] = shape
        return self.pair(name, scale)

    def weight(
        self,
        name: str,
        shape: tuple[int, ...],
        axis: int | None,
        kind: str = "int8",
        zero: Any = None,
    ) -> str:
        info = np.iinfo(kind)
        self.constant(name, self.rng.integers(info.min + 1, info.max + 1, shape), kind)
        count = () if axis is None else (shape[axis],)
        scale = np.full(count, 0.02) if axis is None else self.rng.uniform(0.01, 0.03, count)
        self.constant(f"{name}_s", scale)
        middle = (128 if kind == "uint8" else 0) if zero is None else zero
        self.constant(f"{name}_z", np.broadcast_to(middle, count), kind)
        attributes = {} if axis is None else {"axis": axis}
        return self.node(
            "DequantizeLinear", [name, f"{name}_s", f"{name}_z"], f"{name}_dq", **attributes
        )

    def bias(self, name: str, weight: str, size: int, factor: float = 1.0) -> str:
        scale = np.float32(0.05) * self.weights[f"{weight}_s"] * np.float32(factor)
        self.constant(name, self.rng.integers(-2000, 2000, size), np.int32)
        self.constant(f"{name}_s", scale)
        return self.node("DequantizeLinear", [name, f"{name}_s"], f"{name}_dq", axis=0)

    def model(self, *outputs: str) -> ir.Model:
        graph = helper.make_graph(
            self.nodes,
            "g",
            [
                helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
                for n, s in self.inputs.items()
            ],
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
            [numpy_helper.from_array(a, n) for n, a in self.weights.items()],
        )
        opsets = [helper.make_opsetid("", self.opset)]
        proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        proto = onnx.shape_inference.infer_shapes(proto)
        onnx.checker.check_model(proto)
        return ir.from_proto(proto)

    def feeds(self, count: int = 3) -> list[dict[str, np.ndarray]]:
        rng = np.random.default_rng(1)
        return [
            {n: rng.normal(0, 2, s).astype(np.float32) for n, s in self.inputs.items()}
            for _ in range(count)
        ]


def _turned(model: ir.Model) -> tuple[ir.Model, PassReport]:
    result = clone_model(model)
    report = QOperator().apply(result, None)  # type: ignore[arg-type]  # it uses no context
    onnx.checker.check_model(ir.to_proto(result))
    assert interface(result) == interface(model)
    return result, report


def _operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in all_nodes(model))


IMAGE, MATRIX = (1, 4, 6, 6), (5, 16)


def _unary(g: PairGraph, op_type: str, shape: Any = IMAGE, scale: float = 0.03, **a: Any) -> str:
    g.node(op_type, [g.input("x", shape)], "y", **a)
    zero = (0 if g.kind == np.uint8 else -128) if op_type in ("Sigmoid", "Softmax") else None
    return g.pair("y", 1 / 256 if op_type in ("Sigmoid", "Softmax") else scale, zero)


def _moved(g: PairGraph, op_type: str, *others: Any, shape: Any = IMAGE, **a: Any) -> str:
    names = [g.constant(f"p{i}", o, np.asarray(o).dtype) for i, o in enumerate(others)]
    g.node(op_type, [g.input("x", shape), *names], "y", **a)
    return g.pair("y")


def _conv(g: PairGraph, shape: Any, weight: Any, kind: str = "int8", **attributes: Any) -> str:
    x, w = g.input("x", shape), g.weight("w", weight, 0, kind)
    g.node("Conv", [x, w, g.bias("b", "w", weight[0])], "y", **attributes)
    return g.pair("y", 0.5)


def _gemm(g: PairGraph, *, quantized: bool, trans: int = 0, **attributes: Any) -> str:
    w = g.weight("w", (8, 16) if trans else (16, 8), 1 - trans)
    bias = g.bias("b", "w", 8)
    g.node("Gemm", [g.input("x", MATRIX), w, bias], "y", transB=trans, **attributes)
    return g.pair("y", 0.5) if quantized else "y"


def _matmul(g: PairGraph, axis: int | None, *, quantized: bool, weight: Any = (16, 8)) -> str:
    shape = MATRIX if len(weight) == 2 else (2, 5, 16)
    g.node("MatMul", [g.input("x", shape), g.weight("w", weight, axis)], "y")
    return g.pair("y", 0.5) if quantized else "y"


def _product(g: PairGraph, *, quantized: bool) -> str:
    g.node("MatMul", [g.input("a", (2, 3, 5, 8)), g.input("b", (2, 3, 8, 4), 0.03)], "y")
    return g.pair("y", 0.5) if quantized else "y"


def _biased_product(g: PairGraph) -> str:
    _matmul(g, 1, quantized=False)
    return g.node("Sum", ["y", g.constant("b", np.arange(8))], "z")


def _two(g: PairGraph, op_type: str, second: Any = IMAGE, *, constant: bool = False) -> str:
    kind = str(g.kind)
    other = g.weight("c", second, None, kind) if constant else g.input("b", second, 0.03)
    g.node(op_type, [g.input("a", IMAGE), other], "y")
    return g.pair("y", 0.2)


def _concat(g: PairGraph, scales: tuple[float, ...], axis: int = 1) -> str:
    parts = [g.input(f"x{i}", IMAGE, scale) for i, scale in enumerate(scales)]
    g.node("Concat", parts, "y", axis=axis)
    return g.pair("y", 0.05)


def _pad(g: PairGraph, value: float | None, mode: str = "constant") -> str:
    pads = g.constant("pads", [0, 0, 1, 1, 0, 0, 1, 0], np.int64)
    given = [] if value is None else [g.constant("value", value)]
    g.node("Pad", [g.input("x", IMAGE), pads, *given], "y", mode=mode)
    return g.pair("y")


def _resize(g: PairGraph, **attributes: Any) -> str:
    scales = g.constant("scales", [1, 1, 2, 2])
    g.node("Resize", [g.input("x", IMAGE), "", scales], "y", mode="nearest", **attributes)
    return g.pair("y")


# Name: (how it is built, the integer operator)
OPERATORS: dict[str, tuple[Callable[[PairGraph], str], str]] = {
    "conv": (lambda g: _conv(g, IMAGE, (8, 4, 3, 3), pads=[1, 1, 1, 1]), "QLinearConv"),
    "conv_depthwise": (lambda g: _conv(g, IMAGE, (4, 1, 3, 3), group=4), "QLinearConv"),
    "conv_1d": (lambda g: _conv(g, (1, 4, 9), (6, 4, 3), auto_pad="SAME_UPPER"), "QLinearConv"),
    "conv_3d": (lambda g: _conv(g, (1, 2, 4, 4, 4), (3, 2, 2, 2, 2)), "QLinearConv"),
    "conv_strided": (
        lambda g: _conv(g, IMAGE, (8, 2, 3, 3), group=2, strides=[2, 2], dilations=[1, 2]),
        "QLinearConv",
    ),
    "gemm": (lambda g: _gemm(g, quantized=True), "QGemm"),
    "gemm_transposed": (lambda g: _gemm(g, quantized=True, trans=1), "QGemm"),
    "gemm_float": (lambda g: _gemm(g, quantized=False, trans=1), "QGemm"),
    "matmul": (lambda g: _matmul(g, 1, quantized=True), "QLinearMatMul"),
    "matmul_stack": (
        lambda g: _matmul(g, None, quantized=True, weight=(2, 16, 4)),
        "QLinearMatMul",
    ),
    "matmul_float": (lambda g: _matmul(g, 1, quantized=False), "MatMulIntegerToFloat"),
    "matmul_one_scale": (lambda g: _matmul(g, None, quantized=False), "MatMulIntegerToFloat"),
    "matmul_bias": (_biased_product, "MatMulIntegerToFloat"),
    "product": (lambda g: _product(g, quantized=True), "QLinearMatMul"),
    "product_float": (lambda g: _product(g, quantized=False), "MatMulIntegerToFloat"),
    "add": (lambda g: _two(g, "Add"), "QLinearAdd"),
    "add_broadcast": (lambda g: _two(g, "Add", (4, 1, 1)), "QLinearAdd"),
    "add_constant": (lambda g: _two(g, "Add", (1, 4, 1, 1), constant=True), "QLinearAdd"),
    "mul": (lambda g: _two(g, "Mul"), "QLinearMul"),
    "mul_gate": (lambda g: _two(g, "Mul", (1, 4, 1, 1)), "QLinearMul"),
    "concat": (lambda g: _concat(g, (0.05, 0.02, 0.07)), "QLinearConcat"),
    "concat_last": (lambda g: _concat(g, (0.05, 0.05), axis=-1), "QLinearConcat"),
    "average_pool": (
        lambda g: _unary(
            g,
            "AveragePool",
            kernel_shape=[3, 3],
            strides=[2, 2],
            pads=[1, 1, 1, 1],
            count_include_pad=1,
        ),
        "QLinearAveragePool",
    ),
    "average_pool_up": (
        lambda g: _unary(g, "AveragePool", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1),
        "QLinearAveragePool",
    ),
    "global_average_pool": (lambda g: _unary(g, "GlobalAveragePool"), "QLinearGlobalAveragePool"),
    "leaky_relu": (lambda g: _unary(g, "LeakyRelu", alpha=0.2), "QLinearLeakyRelu"),
    "relu": (lambda g: _unary(g, "Relu"), "QLinearLeakyRelu"),
    "sigmoid": (lambda g: _unary(g, "Sigmoid"), "QLinearSigmoid"),
    "softmax": (lambda g: _unary(g, "Softmax"), "QLinearSoftmax"),
    "softmax_channels": (lambda g: _unary(g, "Softmax", axis=1), "QLinearSoftmax"),
    "max_pool": (
        lambda g: _moved(g, "MaxPool", kernel_shape=[2, 2], pads=[1, 1, 0, 0]),
        "MaxPool",
    ),
    "reshape": (lambda g: _moved(g, "Reshape", np.array([1, -1])), "Reshape"),
    "transpose": (lambda g: _moved(g, "Transpose", perm=[0, 2, 3, 1]), "Transpose"),
    "squeeze": (lambda g: _moved(g, "Squeeze", np.array([0])), "Squeeze"),
    "unsqueeze": (lambda g: _moved(g, "Unsqueeze", np.array([0])), "Unsqueeze"),
    "flatten": (lambda g: _moved(g, "Flatten"), "Flatten"),
    "identity": (lambda g: _moved(g, "Identity"), "Identity"),
    "slice": (lambda g: _moved(g, "Slice", np.array([1]), np.array([3]), np.array([1])), "Slice"),
    "gather": (lambda g: _moved(g, "Gather", np.array([2, 0]), axis=1), "Gather"),
    "tile": (lambda g: _moved(g, "Tile", np.array([1, 2, 1, 1])), "Tile"),
    "expand": (lambda g: _moved(g, "Expand", np.array([2, 4, 6, 6])), "Expand"),
    "depth_to_space": (lambda g: _moved(g, "DepthToSpace", blocksize=2), "DepthToSpace"),
    "space_to_depth": (lambda g: _moved(g, "SpaceToDepth", blocksize=2), "SpaceToDepth"),
    "reduce_max": (lambda g: _moved(g, "ReduceMax", axes=[2, 3]), "ReduceMax"),
    "reduce_min": (lambda g: _moved(g, "ReduceMin", axes=[1], keepdims=0), "ReduceMin"),
    "resize": (_resize, "Resize"),
    "pad": (lambda g: _pad(g, None), "Pad"),
    "pad_with_a_number": (lambda g: _pad(g, -1.23), "Pad"),
    "pad_reflected": (lambda g: _pad(g, None, "reflect"), "Pad"),
}


def _steps_apart(a: list[np.ndarray], b: list[np.ndarray], scale: float) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True)) / scale


@pytest.mark.parametrize("kind", ["uint8", "int8"])
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_computes_what_the_pairs_say(
    name: str, kind: str, outputs_of: Callable[..., Any]
) -> None:
    g = PairGraph(kind)
    build, expected = OPERATORS[name]
    output = build(g)
    model = g.model(output)
    result, report = _turned(model)
    assert report.skipped == ()
    operators = _operators(result)
    assert operators[expected] == 1
    quantized = output.endswith("_dq")
    # One Q for each input, one DQ behind the result, and nothing else.
    assert operators["QuantizeLinear"] == len(g.inputs)
    assert operators["DequantizeLinear"] == int(quantized)
    assert sum(operators.values()) == 1 + len(g.inputs) + int(quantized)
    # Kernels that write float differ in the order of float sums, below a thousandth of a step.
    scale = float(g.weights["y_s"]) if quantized else 1e-3
    feeds = g.feeds()
    pairs = [outputs_of(model, feeds, level) for level in (Level.DISABLED, Level.ALL)]
    for level in Level:
        found = outputs_of(result, feeds, level)
        assert float(np.ptp(found[0])) > scale  # the test shows something
        assert all(_steps_apart(found, ours, scale) <= ONE_STEP for ours in pairs)


@pytest.mark.parametrize("kinds", [("uint8", "uint8"), ("uint8", "int8"), ("int8", "int8")])
@pytest.mark.parametrize("op_type", ["Conv", "MatMul", "Gemm"])
def test_combinations_of_types(
    op_type: str, kinds: tuple[str, str], outputs_of: Callable[..., Any]
) -> None:
    g = PairGraph(kinds[0])
    if op_type == "Conv":
        output = _conv(g, IMAGE, (8, 4, 3, 3), kinds[1])
    else:
        inputs = [g.input("x", MATRIX), g.weight("w", (16, 8), 1, kinds[1])]
        g.node(op_type, inputs, "y")
        output = g.pair("y", 0.5)
    model = g.model(output)
    result, report = _turned(model)
    assert report.skipped == ()
    for level in (Level.DISABLED, Level.ALL):
        found, expected = (outputs_of(m, g.feeds(), level) for m in (result, model))
        assert _steps_apart(found, expected, float(g.weights["y_s"])) <= ONE_STEP


def test_split_writes_integers_to_every_reader(outputs_of: Callable[..., Any]) -> None:
    g = PairGraph()
    x, sizes = g.input("x", IMAGE), g.constant("sizes", [1, 2, 1], np.int64)
    g.nodes.append(helper.make_node("Split", [x, sizes], ["a", "b", "unused"], "s", axis=1))
    model = g.model(g.pair("a"), g.pair("b"))
    result, report = _turned(model)
    assert report.skipped == ()
    assert _operators(result)["QuantizeLinear"] == 1
    for ours, theirs in zip(
        outputs_of(model, g.feeds()), outputs_of(result, g.feeds()), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


# what is left alone


def _float_reader(g: PairGraph) -> str:
    _conv(g, IMAGE, (8, 4, 3, 3))
    g.node("Tanh", ["y"], "t")
    return g.node("Add", ["t", "y_dq"], "z")


def _other_scale(g: PairGraph) -> str:
    g.node("Transpose", [g.input("x", IMAGE, 0.05)], "y")
    return g.pair("y", 0.06)


def _uneven_zero_points(g: PairGraph) -> str:
    w = g.weight("w", (2, 4, 1, 1), 0, "uint8", [128, 127])
    g.node("Conv", [g.input("x", IMAGE), w], "y")
    return g.pair("y", 0.5)


def _foreign_bias(g: PairGraph, factor: float) -> str:
    x, w = g.input("x", IMAGE), g.weight("w", (8, 4, 3, 3), 0)
    g.node("Conv", [x, w, g.bias("b", "w", 8, factor)], "y")
    return g.pair("y", 0.5)


def _float_bias(g: PairGraph) -> str:
    x, w = g.input("x", IMAGE), g.weight("w", (8, 4, 3, 3), 0)
    g.node("Conv", [x, w, g.constant("b", np.ones(8))], "y")
    return g.pair("y", 0.5)


def _wrong_axis(g: PairGraph) -> str:
    g.node("Conv", [g.input("x", IMAGE), g.weight("w", (8, 4, 3, 3), 1)], "y")
    return g.pair("y", 0.5)


def _transposed(g: PairGraph) -> str:
    g.node("ConvTranspose", [g.input("x", IMAGE), g.weight("w", (4, 2, 2, 2), 1)], "y")
    return g.pair("y", 0.5)


def _only_stored(g: PairGraph) -> str:
    g.inputs["x"] = IMAGE
    return g.node("Conv", ["x", g.weight("w", (8, 4, 3, 3), 0)], "y")


def _read_as_float_too(g: PairGraph) -> str:
    _two(g, "Add")
    g.node("Tanh", ["y"], "t")
    return g.node("Mul", ["t", "y_dq"], "z")


def _linear_resize(g: PairGraph) -> str:
    g.node("Resize", [g.input("x", IMAGE), "", g.constant("s", [1, 1, 2, 2])], "y", mode="linear")
    return g.pair("y")


LEFT: dict[str, tuple[Callable[[PairGraph], str], str, str]] = {
    "float_reader": (_float_reader, "uint8", "its output goes to Tanh without a Q"),
    "other_scale": (_other_scale, "uint8", "different scales"),
    "uneven_zero_points": (_uneven_zero_points, "uint8", "zero points of its weight differ"),
    "foreign_bias": (lambda g: _foreign_bias(g, 1.01), "uint8", "the scale of its bias is not"),
    "float_bias": (_float_bias, "uint8", "its bias is not int32"),
    "wrong_axis": (_wrong_axis, "uint8", "along an axis"),
    "convtranspose": (_transposed, "uint8", "no integer kernel: the weight is stored"),
    "only_stored": (_only_stored, "uint8", "its input is not quantized"),
    "read_as_float_too": (_read_as_float_too, "uint8", "goes to Tanh without a Q"),
    "signed_by_unsigned": (
        lambda g: _conv(g, IMAGE, (8, 4, 3, 3), "uint8"),
        "int8",
        "no integer kernel for int8 x uint8",
    ),
    "other_operator": (lambda g: _unary(g, "Tanh"), "uint8", "there is no integer Tanh"),
    "dilated_pool": (
        lambda g: _unary(g, "AveragePool", kernel_shape=[2, 2], dilations=[2, 2]),
        "uint8",
        "no dilations",
    ),
    "linear_resize": (_linear_resize, "uint8", "computes values between"),
    "scaled_gemm": (lambda g: _gemm(g, quantized=True, alpha=0.5), "uint8", "a factor"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_has_no_kernel_stays_and_is_named(name: str, outputs_of: Callable[..., Any]) -> None:
    build, kind, reason = LEFT[name]
    g = PairGraph(kind, opset=19 if name == "dilated_pool" else 17)
    model = g.model(build(g))
    result, report = _turned(model)
    (item,) = report.skipped
    assert item.node == "y"
    assert reason in item.reason
    assert report.changed == {}
    assert _operators(result) == _operators(model)
    np.testing.assert_array_equal(
        outputs_of(model, g.feeds(), Level.DISABLED), outputs_of(result, g.feeds(), Level.DISABLED)
    )


def test_wide_activations_stay(outputs_of: Callable[..., Any]) -> None:
    g = PairGraph("int16", opset=21)
    _two(g, "Add")
    model = g.model("y_dq")
    result, report = _turned(model)
    assert [item.reason for item in report.skipped] == [
        "its input is int16: integer kernels take 8 bits"
    ]
    assert outputs_of(result, g.feeds())[0].size


# chains, through the pass that writes them

CHAIN = """
    a = Conv<pads=[1,1,1,1]>(x, w1, b1) r = Relu(a) p = MaxPool<kernel_shape=[2,2],strides=[2,2]>(r)
    c = Conv(p, w2) q = Conv(p, w2) g = GlobalAveragePool(c) e = Conv(g, w2) s = Sigmoid(e)
    m = Mul(c, s) n = Add(m, q) k = Concat<axis=1>(n, p) d = Conv(k, w3)
    f = Flatten(d) y = Gemm<transB=1>(f, w4, b4)
"""
WEIGHTS = {
    "w1": (8, 4, 3, 3),
    "b1": (8,),
    "w2": (8, 8, 1, 1),
    "w3": (4, 16, 1, 1),
    "w4": (5, 64),
    "b4": (5,),
}
BRANCHES = """
    t = Conv(x, w)
    y = If(flag) <
        then_branch = a () => (float[1,4,6,6] u) { c = Conv(t, w) r = Relu(c) u = Conv(r, w) },
        else_branch = b () => (float[1,4,6,6] v) { d = Conv(t, w) e = Add(d, t) v = Conv(e, w) }
    >
"""


def _parsed(signature: str, body: str, weights: dict[str, tuple[int, ...]]) -> ir.Model:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g {signature} {{ {body} }}'
    )
    rng = np.random.default_rng(0)
    for name, shape in weights.items():
        array = rng.normal(0, 0.4, shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    loaded = ir.from_proto(model)
    for index, node in enumerate(all_nodes(loaded)):
        node.name = f"{node.op_type}_{index}"
    return loaded


@pytest.fixture
def quantized(plain_context: Callable[..., Any]) -> Callable[..., ir.Model]:
    def apply(model: ir.Model, feeds: Any, *, corrected: bool = True, **options: Any) -> ir.Model:
        result = clone_model(model)
        context = plain_context(feeds, model)
        QuantizeStatic(min_sqnr=0, **options).apply(result, context)
        if corrected:
            BiasCorrection().apply(result, context)
        return result

    return apply


def _images(count: int, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(1)
    return (rng.normal(0, 1, shape).astype(np.float32) for _ in range(count))


@pytest.mark.parametrize(
    "options",
    [{}, {"activation_type": "int8", "symmetric_activations": True}, {"weight_type": "uint8"}],
    ids=["uint8", "int8_symmetric", "uint8_weights"],
)
def test_chain_computes_what_onnxruntime_makes_of_the_pairs(
    options: dict[str, Any], quantized: Callable[..., ir.Model], outputs_of: Callable[..., Any]
) -> None:
    model = _parsed("(float[1,4,8,8] x) => (float[1,5] y)", CHAIN, WEIGHTS)
    feeds = [{"x": x} for x in _images(6, (1, 4, 8, 8))]
    pairs = quantized(model, feeds, **options)
    result, report = _turned(pairs)
    assert report.skipped == ()
    assert set(_operators(result)) <= {
        "QuantizeLinear",
        "QLinearConv",
        "QLinearLeakyRelu",
        "MaxPool",
        "QLinearGlobalAveragePool",
        "QLinearSigmoid",
        "QLinearMul",
        "QLinearAdd",
        "QLinearConcat",
        "Flatten",
        "QGemm",
    }
    assert _operators(result)["QuantizeLinear"] == 1
    # The same kernels; the head writes float, and may add in another order.
    expected = outputs_of(pairs, feeds, Level.ALL)
    tolerance = 1e-5 * float(np.abs(expected[0]).max())
    if not options:  # float Relu between pairs is a step of rounding elsewhere
        for level in Level:
            np.testing.assert_allclose(
                outputs_of(result, feeds, level), expected, rtol=0, atol=tolerance
            )
    ours = outputs_of(model, feeds)[0]
    noise = [
        float(np.mean((outputs_of(m, feeds, level)[0] - ours) ** 2))
        for m in (pairs, result)
        for level in (Level.DISABLED, Level.ALL)
    ]
    assert 10 * np.log10(max(noise) / min(noise)) < 1.0


def test_branches_share_what_is_outside(
    quantized: Callable[..., ir.Model], outputs_of: Callable[..., Any]
) -> None:
    signature = "(float[1,4,6,6] x, bool flag) => (float[1,4,6,6] y)"
    model = _parsed(signature, BRANCHES, {"w": (4, 4, 1, 1)})
    feeds = [
        {"x": x, "flag": np.array(bool(i % 2))} for i, x in enumerate(_images(6, (1, 4, 6, 6)))
    ]
    pairs = quantized(model, feeds, corrected=False)
    result, report = _turned(pairs)
    assert report.skipped == ()
    operators = _operators(result)
    assert operators["QLinearConv"] == 5
    assert operators["QLinearAdd"] == 1
    # x is quantized once, t is read as integers in both branches; each branch gives float.
    assert operators["QuantizeLinear"] == 1
    assert operators["DequantizeLinear"] == 2
    for level in Level:
        np.testing.assert_array_equal(
            outputs_of(result, feeds, level), outputs_of(pairs, feeds, Level.ALL)
        )
    assert _stored(result) == _stored(pairs)


def _stored(model: ir.Model) -> list[int]:
    """Sizes of the integer constants, those of branches included."""
    graphs = (model.graph, *model.graph.subgraphs())
    values = [v for graph in graphs for v in graph.initializers.values()]
    kinds = (ir.DataType.INT8, ir.DataType.INT32)
    return sorted(v.const_value.size for v in values if v.const_value and v.dtype in kinds)


def test_nodes_keep_their_names_and_bytes_are_the_same(
    quantized: Callable[..., ir.Model],
) -> None:
    model = _parsed("(float[1,4,8,8] x) => (float[1,5] y)", CHAIN, WEIGHTS)
    pairs = quantized(model, [{"x": x} for x in _images(4, (1, 4, 8, 8))])
    first, second = (
        ir.to_proto(_turned(pairs)[0]).SerializeToString(deterministic=True) for _ in range(2)
    )
    assert first == second
    names = {node.name for node in _turned(pairs)[0].graph}
    assert {node.name for node in model.graph if node.op_type in ("Conv", "Gemm")} <= names


def test_float_models_are_refused() -> None:
    model = _parsed("(float[1,4,8,8] x) => (float[1,5] y)", CHAIN, WEIGHTS)
    with pytest.raises(UnsupportedModelError, match="no QuantizeLinear or DequantizeLinear"):
        QOperator().requires(model)


def test_table_against_the_kernels_of_onnxruntime() -> None:
    """Operators that move values run on both types in every operator set that may come."""
    kernels = [k for k in registered_kernels() if not k.domain]
    for op_type in (*MOVEMENT, "MaxPool", "Resize", "Pad"):
        for opset in range(13, 24):
            here = [k for k in kernels if k.op_type == op_type and k.since <= opset <= k.until]
            types = {kind for k in here for kinds in k.types.values() for kind in kinds}
            assert {"tensor(uint8)", "tensor(int8)"} <= types, (op_type, opset)


def test_facade_appends_the_pass() -> None:
    assert find_pass("qoperator") is QOperator
    steps = Quantize(format="qoperator", calibration="minmax").expand()
    assert isinstance(steps[-1], QOperator)
    assert any(isinstance(step, BiasCorrection) for step in steps[:-1])
    for usual in (Quantize(), Quantize(format="qdq")):
        assert not any(isinstance(step, QOperator) for step in usual.expand())


@pytest.mark.parametrize(
    ("mode", "format"),
    [("static", "nbits"), ("weight-only", "qoperator"), ("dynamic", "qdq"), ("fp16", "qoperator")],
)
def test_formats_that_do_not_fit_the_mode_are_refused(mode: Any, format: Any) -> None:
    with pytest.raises(ValueError, match="format"):
        Quantize(mode=mode, format=format)


def test_every_rule_is_tested() -> None:
    found = {"Split"}
    for build, _ in OPERATORS.values():
        g = PairGraph()
        build(g)
        found |= {node.op_type for node in g.nodes}
    assert set(RULES) <= found
