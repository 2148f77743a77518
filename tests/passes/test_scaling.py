"""Which channels may be scaled, and that the model then computes the same, in onnxruntime."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.graph.channels import analyze
from slimctl.graph.edit import clone_model, const_array
from slimctl.graph.session import Level, open_session, run, tapped
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._scaling import Scaling, find_scaling

Shapes = dict[str, tuple[int, ...]]

IMAGE = "(float[2,3,8,8] x) => (float[2,5,A,B] y)"
ROWS = "(float[2,6,8] x) => (float[2,6,4] y)"


class Net(NamedTuple):
    """A small network.

    Attributes:
        signature: Inputs and outputs in ONNX text.
        body: Nodes in ONNX text.
        weights: Shapes of random constants.
        free: How many channels may be scaled.
        constants: Other constants.
    """

    signature: str
    body: str
    weights: Shapes
    free: int
    constants: dict[str, Any] = {}  # noqa: RUF012 - never changed


SCALABLE: dict[str, Net] = {
    "relu": Net(
        IMAGE, "a = Conv(x,w,b) r = Relu(a) y = Conv(r,v)",
        {"w": (8, 3, 3, 3), "b": (8,), "v": (5, 8, 1, 1)}, 8,
    ),
    "residual": Net(
        IMAGE,
        """a = Conv(x,w,b) c = Conv(a,u,d) l = Clip(c,lo,hi) e = Conv(l,t,b) s = Add(a,e)
           y = Conv(s,v)""",
        {"w": (8, 3, 1, 1), "b": (8,), "u": (4, 8, 1, 1), "d": (4,), "t": (8, 4, 1, 1),
         "v": (5, 8, 1, 1)}, 8,
        {"lo": np.float32(0), "hi": np.float32(1)},
    ),
    "depthwise": Net(
        IMAGE, "a = Conv(x,w,b) d = Conv<group=8>(a,k,e) r = Relu(d) y = Conv(r,v)",
        {"w": (8, 3, 1, 1), "b": (8,), "k": (8, 1, 3, 3), "e": (8,), "v": (5, 8, 1, 1)}, 8,
    ),
    "depthwise_of_two": Net(
        IMAGE, "a = Conv(x,w) d = Conv<group=4>(a,k,e) y = Conv(d,v)",
        {"w": (4, 3, 1, 1), "k": (8, 1, 3, 3), "e": (8,), "v": (5, 8, 1, 1)}, 4,
    ),
    "grouped": Net(
        IMAGE, "a = Conv(x,w) d = Conv<group=2>(a,k,e) y = Conv<group=1>(d,v)",
        {"w": (8, 3, 1, 1), "k": (6, 4, 3, 3), "e": (6,), "v": (5, 6, 1, 1)}, 7,
    ),
    "transposed": Net(
        IMAGE, "a = ConvTranspose(x,w,b) d = ConvTranspose<group=4>(a,k,e) y = Conv(d,v)",
        {"w": (3, 4, 2, 2), "b": (4,), "k": (4, 1, 2, 2), "e": (4,), "v": (5, 4, 1, 1)}, 4,
    ),
    "slopes": Net(
        IMAGE, "a = Conv(x,w,b) p = PRelu(a,s) l = LeakyRelu(p) y = Conv(l,v)",
        {"w": (8, 3, 1, 1), "b": (8,), "s": (8, 1, 1), "v": (5, 8, 1, 1)}, 8,
    ),
    "joined_and_cut": Net(
        IMAGE,
        """a = Conv(x,w) b = Conv(x,u) c = Concat<axis=1>(a,b,a) p, q = Split<axis=1>(c,n)
           m = MaxPool<kernel_shape=[2,2]>(q) y = Conv(m,v) z = Conv(p,t)""",
        {"w": (4, 3, 1, 1), "u": (6, 3, 1, 1), "v": (5, 9, 1, 1), "t": (2, 5, 1, 1)}, 10,
        {"n": np.array([5, 9])},
    ),
    "factors_and_sums": Net(
        IMAGE,
        """a = Conv(x,w) m = Mul(a,f) s = Sub(m,d) e = Div(s,g) n = Neg(e) h = Abs(n)
           i = Sum(h,d,n) y = Conv(i,v)""",
        {"w": (8, 3, 1, 1), "f": (8, 1, 1), "d": (8, 1, 1), "g": (8, 1, 1), "v": (5, 8, 1, 1)}, 8,
    ),
    "normalized": Net(
        IMAGE, "a = Conv(x,w) n = BatchNormalization(a,g,b,m,q) y = Conv(n,v)",
        {"w": (8, 3, 1, 1), "g": (8,), "b": (8,), "m": (8,), "v": (5, 8, 1, 1)}, 8,
        {"q": np.linspace(0.5, 3, 8, dtype=np.float32)},
    ),
    "head": Net(
        "(float[2,3,8,8] x) => (float[2,4] y)",
        """a = Conv(x,w,b) r = Relu(a) p = GlobalAveragePool(r) f = Flatten(p)
           g = Gemm<alpha=0.5,beta=2.0>(f,u,c) y = Gemm<transB=1>(g,v,d)""",
        {"w": (8, 3, 1, 1), "b": (8,), "u": (8, 6), "c": (6,), "v": (4, 6), "d": (4,)}, 14,
    ),
    "flattened_positions": Net(
        "(float[2,3,2,2] x) => (float[2,4] y)",
        "a = Conv(x,w,b) r = Relu(a) f = Flatten(r) y = Gemm(f,v)",
        {"w": (8, 3, 1, 1), "b": (8,), "v": (32, 4)}, 8,
    ),
    "means": Net(
        "(float[2,3,8,8] x) => (float[2,4] y)",
        "a = Conv(x,w,b) m = ReduceMean<axes=[2,3],keepdims=0>(a) y = MatMul(m,v)",
        {"w": (8, 3, 1, 1), "b": (8,), "v": (8, 4)}, 8,
    ),
    "padded_and_resized": Net(
        IMAGE,
        'a = Conv(x,w,b) p = Pad(a,n) r = Resize<mode="linear">(p,,s) y = Conv(r,v)',
        {"w": (8, 3, 1, 1), "b": (8,), "v": (5, 8, 1, 1)}, 8,
        {"n": np.array([0, 0, 1, 0, 0, 0, 0, 2]), "s": np.array([1, 1, 2, 2], np.float32)},
    ),
    "channels_last": Net(
        ROWS,
        """h = MatMul(x,w) a = Add(h,b) r = Relu(a) t = Transpose<perm=[0,2,1]>(r)
           u = Transpose<perm=[0,2,1]>(t) y = MatMul(u,v)""",
        {"w": (8, 16), "b": (16,), "v": (16, 4)}, 16,
    ),
    "attention": Net(
        ROWS,
        """q = MatMul(x,wq) k = MatMul(x,wk) t = Transpose<perm=[0,2,1]>(k) s = MatMul(q,t)
           p = Softmax(s) w = MatMul(x,wv) m = MatMul(p,w) y = MatMul(m,wo)""",
        {"wq": (8, 8), "wk": (8, 8), "wv": (8, 8), "wo": (8, 4)}, 8,
    ),
    "embedding": Net(
        "(int64[2,6] x) => (float[2,6,4] y)",
        "e = Gather(table,x) s = Add(e,p) y = MatMul(s,v)",
        {"table": (10, 8), "p": (6, 8), "v": (8, 4)}, 8,
    ),
    "shared_weights": Net(
        IMAGE, "a = Conv(x,w) b = Conv(a,u) r = Relu(b) c = Conv(r,u) s = Add(b,c) y = Conv(s,v)",
        {"w": (8, 3, 1, 1), "u": (8, 8, 1, 1), "v": (5, 8, 1, 1)}, 8,
    ),
    "branches": Net(
        "(float[2,3,8,8] x, bool flag) => (float[2,5,A,B] y)",
        """a = Conv(x,w,b)
           y = If(flag) <then_branch = t () => (float[2,5,A,B] p) { r = Relu(a) p = Conv(r,v) },
                         else_branch = e () => (float[2,5,A,B] q) { q = Conv(a,v) }>""",
        {"w": (8, 3, 1, 1), "b": (8,), "v": (5, 8, 1, 1)}, 8,
    ),
}  # fmt: skip

ENDS = {"w": (8, 3, 1, 1), "v": (5, 8, 1, 1)}
BLOCKED: dict[str, tuple[Net, str]] = {
    "relu6": (
        Net(IMAGE, "a = Conv(x,w) c = Clip(a,lo,hi) y = Conv(c,v)", ENDS, 0,
            {"lo": np.float32(0), "hi": np.float32(6)}),
        "Clip does not pass on a factor",
    ),
    "gate": (
        Net(IMAGE, "a = Conv(x,w) s = Sigmoid(a) m = Mul(a,s) y = Conv(m,v)", ENDS, 0),
        "Sigmoid does not pass on a factor",
    ),
    "square": (
        Net(IMAGE, "a = Conv(x,w) m = Mul(a,a) y = Conv(m,v)", ENDS, 0),
        "two factors of a product",
    ),
    "one_number_added": (
        Net(IMAGE, "a = Conv(x,w) m = Add(a,n) y = Conv(m,v)", ENDS, 0, {"n": np.float32(1)}),
        "does not scale along",
    ),
    "bound_per_channel": (
        Net(IMAGE, "a = Conv(x,w) m = Max(a,n) y = Conv(m,v)", {**ENDS, "n": (8, 1, 1)}, 0),
        "does not scale along",
    ),
    "padded_with_ones": (
        Net(IMAGE, "a = Conv(x,w) p = Pad(a,n,o) y = Conv(p,v)", ENDS, 0,
            {"n": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "o": np.float32(1)}),
        "a channel is not zero when its layer",
    ),
    "strongest_channel": (
        Net("(float[2,3,8,8] x) => (float[2,1,8,8] y)",
            "a = Conv(x,w) y = ReduceMax<axes=[1]>(a)", {"w": (8, 3, 1, 1)}, 0),
        "ReduceMax c",
    ),
    "scores": (
        Net(ROWS, "q = MatMul(x,w) t = Transpose<perm=[0,2,1]>(q) s = MatMul(q,t) y = MatMul(s,v)",
            {"w": (8, 8), "v": (6, 4)}, 0),
        "two factors of a product",
    ),
    "tied_embedding": (
        Net("(int64[2,6] x) => (float[2,6,10] y)",
            "e = Gather(table,x) t = Transpose<perm=[1,0]>(table) y = MatMul(e,t)",
            {"table": (10, 8)}, 0),
        "what it is multiplied with does not change",
    ),
    "tied_head": (
        Net("(int64[6] x) => (float[6,10] y)", "e = Gather(table,x) y = Gemm<transB=1>(e,table)",
            {"table": (10, 8)}, 0),
        "read elsewhere",
    ),
    "output": (
        Net("(float[2,3,8,8] x) => (float[2,8,8,8] y)", "y = Conv(x,w)", {"w": (8, 3, 1, 1)}, 0),
        "output of the model",
    ),
}  # fmt: skip


def _model(net: Net, dtype: type = np.float32) -> ir.Model:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g {net.signature} {{ {net.body} }}'
    )
    if "z = " in net.body:
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info("z"))
        model.graph.output[-1].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    arrays = {name: rng.normal(0, 0.5, shape).astype(dtype) for name, shape in net.weights.items()}
    for name, array in {**arrays, **net.constants}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    loaded = ir.from_proto(model)
    infer_shapes(loaded)
    return loaded


def _scaling(model: ir.Model) -> Scaling:
    return find_scaling(model, analyze(model))


def _free(scaling: Scaling) -> list[int]:
    units = scaling.channels.units
    roots = np.unique(units.find(np.arange(len(units))))
    return [int(root) for root in roots if int(root) not in scaling.fixed]


def _feeds(model: ir.Model) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    feeds = {}
    for value in model.graph.inputs:
        shape = tuple(value.shape.numpy()) if value.shape is not None else ()
        kinds = {ir.DataType.INT64: rng.integers(0, 10, shape), ir.DataType.BOOL: np.array(True)}
        default = rng.normal(0, 1, shape).astype(np.float32)
        feeds[value.name or ""] = np.asarray(kinds.get(value.dtype, default))
    return feeds


@pytest.mark.parametrize("name", SCALABLE)
def test_scaled_channels_are_divided_and_outputs_stay(name: str) -> None:
    model = _model(SCALABLE[name])
    scaled = clone_model(model)
    scaling = _scaling(scaled)
    free = _free(scaling)
    assert len(free) == SCALABLE[name].free
    factors = np.ones(len(scaling.channels.units))
    factors[free] = np.exp(np.random.default_rng(2).normal(0, 1.5, len(free)))
    assert scaling.divide(factors)

    labeled = {
        value.name: axes
        for value, axes in scaling.channels.tensors.items()
        if not value.is_graph_output() and value.producer().graph is scaled.graph
    }
    outputs = [value.name for value in model.graph.outputs]
    before, after = (
        run(open_session(tapped(m, list(labeled)), level=Level.DISABLED, threads=1), _feeds(m))
        for m in (model, scaled)
    )
    for tensor, axes in labeled.items():
        expected = before[tensor].astype(np.float64)
        for axis, labels in axes.items():
            shape = [1] * expected.ndim
            shape[axis] = -1
            units = scaling.channels.units.find(labels.ids)
            expected = expected / np.where(units < 0, 1.0, factors[units]).reshape(shape)
        others = tuple(set(range(expected.ndim)) - set(axes))
        largest = np.abs(expected).max(axis=others, keepdims=True)
        assert np.all(np.abs(after[tensor] - expected) <= 1e-5 * np.maximum(largest, 1e-3))
    for output in outputs:
        np.testing.assert_allclose(
            after[output], before[output], atol=2e-5 * np.abs(before[output]).max()
        )


@pytest.mark.parametrize("flag", [True, False])
def test_branches_read_what_was_scaled_outside(flag: bool) -> None:
    model = _model(SCALABLE["branches"])
    scaled = clone_model(model)
    scaling = _scaling(scaled)
    factors = np.ones(len(scaling.channels.units))
    factors[_free(scaling)] = 4.0
    scaling.divide(factors)
    feeds = {**_feeds(model), "flag": np.array(flag)}
    before, after = (run(open_session(m, threads=1), feeds)["y"] for m in (model, scaled))
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BLOCKED)
def test_what_cannot_be_scaled_has_a_reason(name: str) -> None:
    net, reason = BLOCKED[name]
    scaling = _scaling(_model(net))
    assert not _free(scaling)
    assert any(reason in block.reason for block in scaling.fixed.values())


def test_clones_and_originals_do_not_share_what_was_scaled() -> None:
    model = _model(SCALABLE["relu"])
    weight = const_array(model.graph.initializers["w"])
    assert weight is not None
    before = weight.copy()
    scaling = _scaling(clone_model(model))
    scaling.divide(np.full(len(scaling.channels.units), 2.0))
    after = const_array(model.graph.initializers["w"])
    np.testing.assert_array_equal(after, before)


def test_only_constants_that_change_are_touched() -> None:
    model = _model(SCALABLE["depthwise"])
    kernel = model.graph.initializers["k"].const_value
    scaling = _scaling(model)
    factors = np.ones(len(scaling.channels.units))
    assert scaling.divide(factors) == []
    factors[_free(scaling)] = 2.0
    nodes = scaling.divide(factors)
    assert [node.name for node in nodes] == ["Conv_0", "Conv_1", "Conv_3"]  # the kernel's bias
    assert model.graph.initializers["k"].const_value is kernel


def test_constants_of_other_types_stay() -> None:
    net = Net(
        "(float16[2,3,8,8] x) => (float16[2,5,8,8] y)", "a = Conv(x,w) y = Conv(a,v)", ENDS, 0
    )
    scaling = _scaling(_model(net, np.float16))
    assert not _free(scaling)
    assert any("float32" in block.reason for block in scaling.fixed.values())
