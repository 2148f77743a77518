"""Siblings about what surrounds a layer: calibration, graphs within graphs, names, ranges."""

from __future__ import annotations

import numpy as np
import onnx

from tests.cases.siblings import Feeds, build, normal, sibling

MLP = "h = MatMul(x, W) r = Relu(h) y = MatMul(r, V)"

# B18: values that are not finite


def _spoil(name: str, *values: float) -> object:
    """Puts values into one calibration sample."""

    def change(kind: str, index: int, feeds: Feeds) -> None:
        if kind == "calibration" and index == 2:
            feeds[name].ravel()[: len(values)] = values

    return change


@sibling("B18", "infinities of both signs", change=_spoil("x", np.inf, -np.inf), sqnr=20)
def _() -> onnx.ModelProto:
    text = """g (float[1,3,8,8] x) => (float[1,4,6,6] y) { h = Conv(x, W, b) y = Relu(h) }"""
    return build(17, text, W=normal(4, 3, 3, 3), b=normal(4))


@sibling("B18", "NaN in a second input", change=_spoil("z", np.nan), sqnr=20)
def _() -> onnx.ModelProto:
    text = """g (float[3,8] x, float[3,8] z) => (float[3,6] y) {
        h = MatMul(x, W) k = Gemm(z, V) s = Add(h, k) y = Relu(s)
    }"""
    return build(13, text, W=normal(8, 6), V=normal(8, 6, seed=1))


def _not_negative(kind: str, index: int, feeds: Feeds) -> None:
    """The logarithm of what is left is finite but for one calibration sample."""
    feeds["x"][...] = np.abs(feeds["x"]) + 0.1
    if kind == "calibration" and index == 2:
        feeds["x"][0, :3] = (0.0, -1.0, np.finfo(np.float32).max)


@sibling("B18", "infinities that the network makes", change=_not_negative, sqnr=20)
def _() -> onnx.ModelProto:
    text = """g (float[3,8] x) => (float[3,6] y) {
        l = Log(x) q = Mul(x, x) h = MatMul(l, W) k = MatMul(q, U) s = Add(h, k) r = Relu(s)
        y = MatMul(r, V)
    }"""
    return build(17, text, W=normal(8, 8), U=normal(8, 8, seed=1), V=normal(8, 6))


# B20: tensors without elements


@sibling("B20", "an empty part of a Split", sqnr=30)
def _() -> onnx.ModelProto:
    text = """g (float[1,4,8] x) => (float[1,4,6] y) {
        a, e = Split<axis = 1>(x, sizes) n = Relu(e) c = Concat<axis = 1>(n, a) y = MatMul(c, W)
    }"""
    return build(18, text, sizes=np.array([4, 0]), W=normal(8, 6))


@sibling("B20", "an empty image through a convolution", sqnr=30)
def _() -> onnx.ModelProto:
    text = """g (float[2,3,6,6] x) => (float[2,4,4,4] y) {
        s = Slice(x, zero, zero) e = Conv(s, W) f = Conv(x, W) y = Concat<axis = 0>(e, f)
    }"""
    return build(13, text, zero=np.array([0]), W=normal(4, 3, 3, 3))


@sibling("B20", "detections of which there may be none", sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[6,8] x, float[6] score) => (float[N,4] y, float[6,8] z) {
        m = Greater(score, limit) f = Compress<axis = 0>(x, m) h = MatMul(f, W) y = Relu(h)
        z = MatMul(x, V)
    }"""
    return build(17, text, limit=np.float32(1.0), W=normal(8, 4), V=normal(8, 8))


# B22: float16 with small values


@sibling("B22", "convolution")
def _() -> onnx.ModelProto:
    text = """g (float16[1,3,8,8] x) => (float16[1,4,4,4] y) {
        h = Conv(x, W) t = Mul(h, big) y = Conv(t, V)
    }"""
    small = (1e-6 * normal(4, 3, 3, 3)).astype(np.float16)
    return build(13, text, W=small, big=np.float16(1e4), V=normal(4, 4, 3, 3).astype(np.float16))


@sibling("B22", "Gemm with a bias, one row")
def _() -> onnx.ModelProto:
    text = """g (float16[1,8] x) => (float16[1,4] y) {
        h = Gemm(x, W, b) t = Div(h, small) k = Sigmoid(t) y = Gemm<transB = 1>(k, V, c)
    }"""
    small = np.float16(1e-4)
    half = {"W": 1e-5 * normal(8, 6), "b": 1e-5 * normal(6), "V": normal(4, 6), "c": normal(4)}
    arrays = {name: array.astype(np.float16) for name, array in half.items()}
    return build(17, text, small=small, **arrays)


@sibling("B22", "values that never change")
def _() -> onnx.ModelProto:
    text = """g (float16[2,8] x) => (float16[2,4] y) {
        n = Sub(x, x) s = Add(n, tiny) h = MatMul(s, W) t = Mul(h, big) y = MatMul(t, V)
    }"""
    arrays = {"W": normal(8, 8).astype(np.float16), "V": normal(8, 4).astype(np.float16)}
    return build(21, text, tiny=np.float16(6e-8), big=np.float16(1e4), **arrays)


# B24: weights that several graphs use


@sibling("B24", "a loop and what surrounds it", sqnr=22)
def _() -> onnx.ModelProto:
    text = """g (float[3,8] x) => (float[3,8] y) {
        h = MatMul(x, W)
        k = Loop (count, , h) < body = b (int64 i, bool go, float[3,8] v)
            => (bool on, float[3,8] w) { on = Identity(go) m = MatMul(v, W) w = Tanh(m) } >
        y = MatMul(k, W)
    }"""
    return build(17, text, count=np.array(2), W=normal(8, 8))


@sibling("B24", "a branch within a branch", sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[1,3,6,6] x, bool c, bool d) => (float[1,4,4,4] y) {
        y = If (c) <
            then_branch = t () => (float[1,4,4,4] p) {
                p = If (d) <
                    then_branch = tt () => (float[1,4,4,4] pp) { pp = Conv(x, W, b) },
                    else_branch = te () => (float[1,4,4,4] pq) { o = Neg(x) pq = Conv(o, W, b) } >
            },
            else_branch = e () => (float[1,4,4,4] q) { a = Conv(x, W, b) q = Relu(a) } >
        z = Conv(x, W)
    }"""
    return build(13, text, W=normal(4, 3, 3, 3), b=normal(4))


@sibling("B24", "Gemm, in and out of branches of an old model", sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[3,8] x, bool c) => (float[3,8] y, float[3,8] z) {
        z = Gemm(x, W, b)
        y = If (c) <
            then_branch = t () => (float[3,8] p) { p = Gemm<transB = 1>(z, W) },
            else_branch = e () => (float[3,8] q) { m = MatMul(z, W) q = Add(m, b) } >
    }"""
    return build(11, text, W=normal(8, 8), b=normal(8))


# B26: operators of many inputs that have one


@sibling("B26", "Sum and Max", sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[1,3,6,6] x) => (float[1,5,4,4] y) {
        h = Conv(x, W) s = Sum(h) m = Max(s) y = Conv(m, V)
    }"""
    return build(17, text, W=normal(4, 3, 3, 3), V=normal(5, 4, 1, 1))


@sibling("B26", "Concat at both ends", sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[2,8] x) => (float[2,4] y) {
        a = Concat<axis = 1>(x) h = MatMul(a, W) y = Concat<axis = 0>(h)
    }"""
    return build(11, text, W=normal(8, 4))


@sibling("B26", "Concat with itself and with nothing", sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[2,8] x) => (float[2,4] y) {
        h = MatMul(x, U) t = Concat<axis = -1>(h, h) e = Concat<axis = 1>(none, t)
        y = MatMul(e, W)
    }"""
    return build(21, text, U=normal(8, 4), none=np.zeros((2, 0)), W=normal(8, 4))


# B28: names that look like those of a tool


def _name(model: onnx.ModelProto, *names: str) -> onnx.ModelProto:
    for node, name in zip(model.graph.node, names, strict=True):
        node.name = name
    return model


@sibling("B28", "nodes without names, tensors with a tool's", int8_weights=2, sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[2,8] x_QuantizeLinear_Input) => (float[2,4] output_quantized) {
        x_scale = MatMul(x_QuantizeLinear_Input, V_zero_point)
        x_zero_point = Relu(x_scale)
        output_quantized = MatMul(x_zero_point, V_zero_point_scale)
    }"""
    return build(17, text, V_zero_point=normal(8, 6), V_zero_point_scale=normal(6, 4))


@sibling("B28", "nodes with the names of what quantizes them", int8_weights=2, sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[1,3,6,6] x) => (float[1,5] y) {
        h = Conv(x, W) r = Relu(h) p = GlobalAveragePool(r) f = Flatten(p) y = Gemm(f, V)
    }"""
    model = build(12, text, W=normal(4, 3, 3, 3), V=normal(4, 5))
    names = ("W_DequantizeLinear", "h_QuantizeLinear", "h_DequantizeLinear", "", "V_quantized")
    return _name(model, *names)


@sibling("B28", "names with signs and of other languages", int8_weights=2, sqnr=25)
def _() -> onnx.ModelProto:
    text = f"g (float[2,8] x) => (float[2,4] y) {{ {MLP} }}"
    model = build(13, text, W=normal(8, 6), V=normal(6, 4))
    model.graph.node[0].input[1] = model.graph.initializer[0].name = "层/重み:0 [a]*?"
    return _name(model, "op:MatMul", "", "re:.*/{}\\")


# B30: recurrent layers


@sibling("B30", "GRU", sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[5,2,8] x) => (float[5,2,4] y) {
        h, l = GRU<hidden_size = 6, linear_before_reset = 1, layout = 0>(x, W, R, B)
        s = Squeeze(h, one) y = MatMul(s, V)
    }"""
    weights = {"W": normal(18, 8)[None], "R": normal(18, 6)[None], "B": 0.1 * normal(1, 36)}
    return build(14, text, V=normal(6, 4), one=np.array([1]), **weights)


@sibling("B30", "both directions, peepholes, an output that nobody names", sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[5,2,8] x, float[2,2,6] c0) => (float[2,2,4] y) {
        , l, c = LSTM<hidden_size = 6, direction = "bidirectional">(x, W, R, , , , c0, P)
        a = Add(l, c) y = MatMul(a, V)
    }"""
    stack = {"W": normal(2, 24, 8), "R": normal(2, 24, 6), "P": 0.1 * normal(2, 18)}
    return build(14, text, V=normal(6, 4), **stack)


@sibling("B30", "batch first by layout is refused by onnxruntime, Transpose is not", sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[2,5,8] x) => (float[2,5,4] y) {
        t = Transpose<perm = [1,0,2]>(x)
        h = LSTM<hidden_size = 6, activations = ["Sigmoid", "Tanh", "Tanh"]>(t, W, R, B)
        s = Squeeze(h, one) b = Transpose<perm = [1,0,2]>(s) y = MatMul(b, V)
    }"""
    weights = {"W": normal(24, 8)[None], "R": normal(24, 6)[None], "B": 0.1 * normal(1, 48)}
    return build(22, text, V=normal(6, 4), one=np.array([1]), **weights)


@sibling("B30", "RNN of an old model", sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[5,2,8] x) => (float[2,4] y) {
        , l = RNN<hidden_size = 6>(x, W, R) s = Squeeze<axes = [0]>(l) y = Gemm(s, V, b)
    }"""
    return build(9, text, W=normal(6, 8)[None], R=normal(6, 6)[None], V=normal(6, 4), b=normal(4))


# B32: operators that shape inference does not know


@sibling("B32", "functions within functions", int8_weights=2, sqnr=20)
def _() -> onnx.ModelProto:
    text = """g (float[2,8] x) => (float[2,4] y) {
        h = MatMul(x, W) k = my.own.Outer<alpha = 1.5>(h) y = MatMul(k, V)
    }
    <domain: "my.own", opset_import: ["": 17, "my.own": 1]>
    Outer <alpha> (a) => (b) { s = my.own.Inner(a) b = Elu<alpha: float = @alpha>(s) }
    <domain: "my.own", opset_import: ["": 17]>
    Inner (a) => (b) { s = Sigmoid(a) b = Mul(a, s) }"""
    return build(17, text, header='"my.own": 1', W=normal(8, 6), V=normal(6, 4))


@sibling("B32", "operators of onnxruntime", int8_weights=2, sqnr=20)
def _() -> onnx.ModelProto:
    text = """g (float[2,3,8] x) => (float[2,3,4] y) {
        h = MatMul(x, W) k = com.microsoft.Gelu(h) n = com.microsoft.BiasGelu(k, b)
        y = MatMul(n, V)
    }"""
    return build(13, text, W=normal(8, 6), b=normal(6), V=normal(6, 4))


@sibling("B32", "a function that holds the layer", int8_weights=2, sqnr=20)
def _() -> onnx.ModelProto:
    text = """g (float[1,3,6,6] x) => (float[1,4,6,6] y) {
        h = my.own.Block(x, W) y = my.own.Block(h, V)
    }
    <domain: "my.own", opset_import: ["": 17]>
    Block (a, w) => (b) { c = Conv<pads = [1,1,1,1]>(a, w) b = Relu(c) }"""
    arrays = {"W": normal(4, 3, 3, 3), "V": normal(4, 4, 3, 3)}
    return build(17, text, header='"my.own": 1', **arrays)


# B34: bounds


@sibling("B34", "attributes of an old Clip", sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[1,3,6,6] x) => (float[1,4,4,4] y) {
        h = Conv(x, W) a = Clip<max = 1.0>(h) k = Conv(a, V) y = Clip<min = -0.5>(k)
    }"""
    return build(10, text, W=normal(4, 3, 3, 3), V=normal(4, 4, 1, 1))


@sibling("B34", "computed bounds, and none", sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[3,8] x) => (float[3,4] y) {
        top = ReduceMax<keepdims = 0>(x) h = MatMul(x, W) a = Clip(h, , top) b = Clip(a)
        y = MatMul(b, V)
    }"""
    return build(17, text, W=normal(8, 6), V=normal(6, 4))


@sibling("B34", "bounds that leave zero out", sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[3,8] x) => (float[3,4] y) {
        h = Gemm(x, W) a = Clip(h, low, high) k = MatMul(a, V) y = Clip(k, , low)
    }"""
    return build(
        13, text, W=normal(8, 6), low=np.float32(0.25), high=np.float32(0.75), V=normal(6, 4)
    )


@sibling("B34", "bounds within a branch", sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[3,8] x, bool c) => (float[3,6] y) {
        h = MatMul(x, W)
        y = If (c) <
            then_branch = t () => (float[3,6] p) { p = Clip(h, , high) },
            else_branch = e () => (float[3,6] q) { q = Clip(h, low) } >
    }"""
    return build(21, text, W=normal(8, 6), low=np.float32(-0.5), high=np.float32(1))


# B36: parameters of normalizations


@sibling("B36", "LayerNormalization", sqnr=20)
def _() -> onnx.ModelProto:
    text = """g (float[2,3,8] x) => (float[2,3,4] y) {
        h = MatMul(x, W) n = LayerNormalization(h, s, b) y = MatMul(n, V)
    }"""
    return build(17, text, W=normal(8, 8), s=1 + normal(8), b=normal(8), V=normal(8, 4))


@sibling("B36", "GroupNormalization and PRelu", sqnr=20)
def _() -> onnx.ModelProto:
    text = """g (float[1,3,6,6] x) => (float[1,5,4,4] y) {
        h = Conv(x, W) n = GroupNormalization<num_groups = 2>(h, s, b) p = PRelu(n, a)
        y = Conv(p, V)
    }"""
    norm = {"s": 1 + normal(4), "b": normal(4), "a": 0.1 * np.ones((4, 1, 1))}
    return build(21, text, W=normal(4, 3, 3, 3), V=normal(5, 4, 1, 1), **norm)


@sibling("B36", "a normalization before any layer", sqnr=20)
def _() -> onnx.ModelProto:
    text = """g (float[1,3,6,6] x) => (float[1,4,4,4] y) {
        n = BatchNormalization(x, s, b, m, v) r = Relu(n) i = InstanceNormalization(r, s, b)
        y = Conv(i, W)
    }"""
    norm = {"s": 1 + normal(3), "b": normal(3), "m": normal(3, seed=1), "v": np.ones(3)}
    return build(13, text, W=normal(4, 3, 3, 3), **norm)
