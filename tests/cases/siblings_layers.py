"""Siblings about one layer: axes of channels, shared and hidden weights, channels of nothing."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from tests.cases.siblings import build, normal, sibling

# B01: output channels of ConvTranspose


@sibling("B01", "groups", axis={"W": 1}, sqnr=30)
def _() -> onnx.ModelProto:
    text = """g (float[1,4,7,7] x) => (float[1,6,9,9] y) {
        y = ConvTranspose<group = 2>(x, W, b)
    }"""
    spread = normal(4, 3, 3, 3) * np.array([0.02, 0.3, 1.0]).reshape(1, 3, 1, 1)
    return build(17, text, W=spread, b=normal(6))


@sibling("B01", "one spatial axis, old opset", axis={"W": 1}, n_scales={"W": 8}, sqnr=30)
def _() -> onnx.ModelProto:
    text = """g (float[2,3,9] x) => (float[2,8,19] y) {
        y = ConvTranspose<strides = [2], output_padding = [1], pads = [0,1]>(x, W, b)
    }"""
    return build(11, text, W=normal(3, 8, 3) * np.logspace(-3, 0, 8)[None, :, None], b=normal(8))


@sibling("B01", "three spatial axes, between layers", axis={"W": 1}, n_scales={"W": 5}, sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[1,2,3,4,5] x) => (float[1,3,4,5,6] y) {
        h = ConvTranspose(x, W) r = Relu(h) y = Conv(r, V, b)
    }"""
    return build(21, text, W=normal(2, 5, 2, 2, 2), V=normal(3, 5, 1, 1, 1), b=normal(3))


@sibling("B01", "depthwise", axis={"W": 1}, n_scales={"W": 1}, sqnr=30)
def _() -> onnx.ModelProto:
    text = """g (float[1,4,5,5] x) => (float[1,4,10,10] y) {
        y = ConvTranspose<group = 4, strides = [2,2]>(x, W, b)
    }"""
    return build(13, text, W=normal(4, 1, 2, 2), b=normal(4))


# B03: Gemm in all its forms


@sibling("B03", "bias of two dimensions", axis={"B": 1}, n_scales={"B": 24}, sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[N,8] x) => (float[N,24] y) { y = Gemm<alpha = -0.5, beta = 2.0>(x, B, c) }"""
    return build(17, text, B=normal(8, 24), c=normal(1, 24))


@sibling("B03", "both sides transposed", axis={"B": 0, "D": 0}, sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[8,6] x) => (float[6,4] y) {
        h = Gemm<transA = 1, transB = 1>(x, B, c) k = Tanh(h) t = Transpose(k)
        y = Gemm<transA = 1, transB = 1, alpha = 3.0, beta = 0.0>(t, D, d)
    }"""
    return build(11, text, B=normal(24, 8), c=normal(24), D=normal(4, 24), d=normal(4))


@sibling("B03", "scalar bias, stale names of sizes", axis={"B": 0}, n_scales={"B": 24}, sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[N,8] x) => (float[N,6] y) <float[M,K] h, float[M,K] k> {
        h = Gemm<transB = 1>(x, B, c) k = Relu(h) y = MatMul(k, D)
    }"""
    return build(13, text, B=normal(24, 8), c=np.float32(0.5), D=normal(24, 6))


# B05: operator sets without an axis


@sibling("B05", "depthwise at opset 9", min_opset=13, axis={"W": 0}, n_scales={"W": 6}, sqnr=28)
def _() -> onnx.ModelProto:
    text = """g (float[1,6,7,7] x) => (float[1,6,7,7] y) {
        h = Conv<group = 6, pads = [1,1,1,1]>(x, W, b) n = BatchNormalization(h, s, c, m, v)
        y = Clip<min = 0.0, max = 6.0>(n)
    }"""
    one = np.ones(6)
    weights = normal(6, 1, 3, 3) * np.logspace(-2, 0, 6).reshape(6, 1, 1, 1)
    return build(9, text, W=weights, b=normal(6), s=one, c=normal(6), m=0.1 * one, v=one)


@sibling("B05", "matrices at opset 10", min_opset=13, axis={"W": 1}, n_scales={"W": 12}, sqnr=28)
def _() -> onnx.ModelProto:
    text = """g (float[2,5,8] x) => (float[2,5,4] y) {
        h = MatMul(x, W) r = Relu(h) k = MatMul(r, V) t = Slice(k, start, end, axis)
        y = Softmax<axis = 2>(t)
    }"""
    number = np.array([0]), np.array([4]), np.array([2])
    names = dict(zip(("start", "end", "axis"), number, strict=True))
    return build(10, text, W=normal(8, 12), V=normal(12, 6), **names)


@sibling("B05", "transposed convolution at opset 12", min_opset=13, axis={"W": 1}, sqnr=28)
def _() -> onnx.ModelProto:
    text = """g (float[1,3,5,5] x) => (float[1,1,8] y) {
        h = ConvTranspose(x, W) p = GlobalAveragePool(h) s = Squeeze<axes = [2,3]>(p)
        y = Unsqueeze<axes = [0]>(s)
    }"""
    return build(12, text, W=normal(3, 8, 2, 2))


# B08: names that tools take for free


@sibling("B08", "a shared weight and taken names", axis={"W": 0}, sqnr=20)
def _() -> onnx.ModelProto:
    text = """g (float[1,4,6,6] W_scale) => (float[1,4,6,6] y) {
        W_quantized = Conv<pads = [1,1,1,1]>(W_scale, W, b)
        W_zero_point = Relu(W_quantized)
        b_quantized = Conv<pads = [1,1,1,1]>(W_zero_point, W, b)
        y = Neg(b_quantized)
    }"""
    return build(17, text, W=normal(4, 4, 3, 3), b=normal(4))


@sibling("B08", "matrices that share a bias", sqnr=20)
def _() -> onnx.ModelProto:
    text = """g (float[3,8] x) => (float[3,8] y, float[3,8] x_QuantizeLinear_Output) {
        b0 = Identity(b)
        b_quantized_scale = Gemm(x, W, b)
        x_DequantizeLinear_Output = Gemm<transB = 1>(b_quantized_scale, V, b)
        x_QuantizeLinear_Output = Relu(x_DequantizeLinear_Output)
        y = Add(x_QuantizeLinear_Output, b0)
    }"""
    return build(13, text, W=normal(8, 8), V=normal(8, 8, seed=1), b=normal(8))


@sibling("B08", "names taken inside a branch", int8_weights=1, sqnr=20)
def _() -> onnx.ModelProto:
    text = """g (float[3,8] x, bool c) => (float[3,8] y) {
        h = MatMul(x, W)
        y = If (c) <
            then_branch = t () => (float[3,8] p) { W_quantized = Relu(h) p = Neg(W_quantized) },
            else_branch = e () => (float[3,8] q) { W_scale = Neg(h) h_scale = Add(W_scale, b)
                q = Relu(h_scale) } >
    }"""
    return build(17, text, W=normal(8, 8), b=normal(8))


# B10: weights that are listed among the inputs


def _listed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Every initializer is an input as well."""
    for item in model.graph.initializer:
        info = onnx.helper.make_tensor_value_info(item.name, item.data_type, list(item.dims))
        model.graph.input.append(info)
    return model


@sibling("B10", "matrices at opset 9", inputs=["x"], int8_weights=2, sqnr=28)
def _() -> onnx.ModelProto:
    text = """g (float[N,6] x) => (float[N,4] y) {
        h = Gemm<transB = 1>(x, W, b) r = Relu(h) k = MatMul(r, V) y = Add(k, c)
    }"""
    model = build(9, text, ir_version=3, W=normal(12, 6), b=normal(12), V=normal(12, 4), c=[0.5])
    return _listed(model)


@sibling("B10", "defaults that a caller could override", inputs=["x"], sqnr=28)
def _() -> onnx.ModelProto:
    text = """g (float[1,3,8,8] x) => (float[1,4,1,1] y) {
        h = Conv(x, W) n = BatchNormalization(h, s, c, m, v) r = Clip(n, low, high)
        y = GlobalAveragePool(r)
    }"""
    one = np.ones(4)
    names = {"s": one, "c": normal(4), "m": 0.0 * one, "v": one}
    bounds = {"low": np.float32(0), "high": np.float32(6)}
    return _listed(build(17, text, W=normal(4, 3, 3, 3), **names, **bounds))


@sibling("B10", "weights before the data", inputs=["x"], sqnr=28)
def _() -> onnx.ModelProto:
    text = """g (float[2,4,6] x) => (float[2,4,5] y) { y = MatMul(x, W) }"""
    model = _listed(build(13, text, W=normal(6, 5)))
    first, second = list(model.graph.input)
    del model.graph.input[:]
    model.graph.input.extend([second, first])
    return model


# B12: weights in Constant nodes


def _constant(graph: onnx.GraphProto, tensor: onnx.TensorProto) -> None:
    """A Constant node as the first node of a graph."""
    graph.node.insert(0, onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))


def _constants(model: onnx.ModelProto) -> onnx.ModelProto:
    """Every initializer becomes a Constant node."""
    for tensor in model.graph.initializer:
        _constant(model.graph, tensor)
    del model.graph.initializer[:]
    return model


@sibling("B12", "Gemm, Conv of one axis, old opset", int8_weights=2, sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[1,3,6] x) => (float[1,6] y) {
        h = Conv(x, W, b) p = GlobalAveragePool(h) f = Flatten(p) y = Gemm(f, V, c)
    }"""
    return _constants(build(11, text, W=normal(8, 3, 2), b=normal(8), V=normal(8, 6), c=[0.5]))


@sibling("B12", "ConvTranspose between matrices", int8_weights=2, sqnr=22)
def _() -> onnx.ModelProto:
    text = """g (float[1,3,6] x) => (float[1,4,5] y) {
        h = MatMul(x, U) k = ConvTranspose(h, W) y = MatMul(k, V)
    }"""
    return _constants(build(17, text, U=normal(6, 6), W=normal(3, 4, 2), V=normal(7, 5)))


@sibling("B12", "computed from Constant nodes", int8_weights=2, sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[2,5,8] x) => (float[2,5,6] y) {
        t = Transpose<perm = [1,0]>(W) i = Identity(t) h = MatMul(x, i) r = Relu(h)
        v = Reshape(V, s) y = MatMul(r, v)
    }"""
    return _constants(build(17, text, W=normal(10, 8), V=normal(60), s=np.array([10, 6])))


@sibling("B12", "inside a branch", int8_weights=1, sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[3,8] x, bool c) => (float[3,6] y) {
        h = MatMul(x, U)
        y = If (c) <
            then_branch = t () => (float[3,6] p) { p = MatMul(h, W) },
            else_branch = e () => (float[3,6] q) { q = Gemm(h, V) } >
    }"""
    model = _constants(build(13, text, U=normal(8, 8)))
    branches = {attribute.name: attribute.g for attribute in model.graph.node[-1].attribute}
    _constant(branches["then_branch"], numpy_helper.from_array(normal(8, 6, seed=1), "W"))
    _constant(branches["else_branch"], numpy_helper.from_array(normal(8, 6, seed=2), "V"))
    return model


# B13: channels next to nothing, with a bias


def _faint(weight: np.ndarray, axis: int, *channels: int) -> np.ndarray:
    """The weight with some channels of 1e-10."""
    moved = np.moveaxis(weight.copy(), axis, 0)
    for channel in channels:
        moved[channel] = 1e-10 * np.sign(moved[channel])
    return np.moveaxis(moved, 0, axis)


def _bias(count: int, **values: float) -> np.ndarray:
    """A small bias with some values of its own: ``c2=5.0``."""
    bias = 0.1 * normal(count)
    for name, value in values.items():
        bias[int(name[1:])] = value
    return bias


@sibling("B13", "Gemm", channel_value={"y": {"2": 5.0, "5": -4.5}}, tol=0.08, sqnr=30)
def _() -> onnx.ModelProto:
    text = "g (float[N,16] x) => (float[N,6] y) { y = Gemm<transB = 1>(x, W, b) }"
    return build(13, text, W=_faint(normal(6, 16), 0, 2, 5), b=_bias(6, c2=5.0, c5=-4.5))


@sibling("B13", "ConvTranspose", channel_value={"y": {"1": 5.0}}, tol=0.08, sqnr=30)
def _() -> onnx.ModelProto:
    text = "g (float[1,3,6] x) => (float[1,4,8] y) { y = ConvTranspose(x, W, b) }"
    return build(17, text, W=_faint(normal(3, 4, 3), 1, 1), b=_bias(4, c1=5.0))


@sibling("B13", "folded normalization", channel_value={"y": {"2": 5.0}}, tol=0.08, sqnr=30)
def _() -> onnx.ModelProto:
    text = """g (float[1,4,8,8] x) => (float[1,4,6,6] y) {
        h = Conv<group = 4>(x, W) y = BatchNormalization(h, s, b, m, v)
    }"""
    scale = np.array([1.0, 0.7, 1e-11, 1.3])
    mean, variance = np.zeros(4), np.ones(4)
    return build(12, text, W=normal(4, 1, 3, 3), s=scale, b=_bias(4, c2=5.0), m=mean, v=variance)


@sibling("B13", "MatMul and Add", channel_value={"y": {"0": -4.5}}, tol=0.08, sqnr=30)
def _() -> onnx.ModelProto:
    text = "g (float[N,16] x) => (float[N,6] y) { h = MatMul(x, W) y = Add(b, h) }"
    return build(21, text, W=_faint(normal(16, 6), 1, 0), b=_bias(6, c0=-4.5))


# B15: channels of zeros


def _empty(weight: np.ndarray, axis: int, *channels: int) -> np.ndarray:
    moved = np.moveaxis(weight.copy(), axis, 0)
    moved[list(channels)] = 0.0
    return np.moveaxis(moved, 0, axis)


@sibling("B15", "Gemm", channel_value={"y": {"1": 0.3, "4": 0.3}}, tol=0.05, sqnr=30)
def _() -> onnx.ModelProto:
    text = "g (float[N,16] x) => (float[N,6] y) { y = Gemm<transB = 1>(x, W, b) }"
    return build(11, text, W=_empty(normal(6, 16), 0, 1, 4), b=_bias(6, c1=0.3, c4=0.3))


@sibling("B15", "MatMul", channel_value={"y": {"0": 0.0}}, tol=0.05, sqnr=30)
def _() -> onnx.ModelProto:
    text = "g (float[N,16] x) => (float[N,6] y) { y = MatMul(x, W) }"
    return build(17, text, W=_empty(normal(16, 6), 1, 0))


@sibling("B15", "depthwise", channel_value={"y": {"3": 0.3}}, tol=0.05, sqnr=30)
def _() -> onnx.ModelProto:
    text = "g (float[1,4,9] x) => (float[1,4,7] y) { y = Conv<group = 4>(x, W, b) }"
    return build(13, text, W=_empty(normal(4, 1, 3), 0, 3), b=_bias(4, c3=0.3))


@sibling("B15", "a branch that was pruned away", int8_weights=2, sqnr=28)
def _() -> onnx.ModelProto:
    text = """g (float[N,16] x) => (float[N,6] y) {
        h = MatMul(x, V) k = MatMul(x, W) a = Add(h, b) y = Add(a, k)
    }"""
    return build(17, text, V=normal(16, 6), W=np.zeros((16, 6)), b=normal(6))


@sibling("B15", "an input of zeros", channel_value={"y": {"1": 0.3, "2": -0.07}}, tol=0.01, sqnr=40)
def _() -> onnx.ModelProto:
    """The scale of the input decides how fine the bias can be."""
    text = """g (float[N,16] x) => (float[N,6] y) {
        h = Gemm(x, V, low) r = Relu(h) y = Gemm(r, W, b)
    }"""
    low = np.full(6, -50.0)
    return build(13, text, V=normal(16, 6), low=low, W=normal(6, 6), b=_bias(6, c1=0.3, c2=-0.07))


@sibling("B15", "LSTM", sqnr=25)
def _() -> onnx.ModelProto:
    text = """g (float[6,1,8] x) => (float[6,5] y) {
        h = LSTM<hidden_size = 6>(x, W, R) s = Squeeze(h, axes) y = MatMul(s, V)
    }"""
    gates = _empty(normal(24, 8), 0, 0, 7).reshape(1, 24, 8)
    recurrent = _empty(normal(24, 6), 0, 3).reshape(1, 24, 6)
    return build(14, text, W=gates, R=recurrent, V=normal(6, 5), axes=np.array([1, 2]))
