"""Siblings about sizes: blocks that do not fit, channels that a Reshape packs together."""

from __future__ import annotations

import numpy as np
import onnx

from tests.cases.siblings import build, normal, sibling

# B45: columns that no block divides


@sibling("B45", "Gemm either way", sqnr_int4=12)
def _() -> onnx.ModelProto:
    text = """g (float[N,70] x) => (float[N,40] y) {
        h = Gemm<transB = 1>(x, W, b) r = Relu(h) y = Gemm<alpha = 0.5, beta = 2.0>(r, V, c)
    }"""
    return build(13, text, W=normal(50, 70), b=normal(50), V=normal(50, 40), c=normal(40))


@sibling("B45", "a stack of rows, fewer columns than a block", sqnr_int4=12)
def _() -> onnx.ModelProto:
    text = """g (float[2,3,100] x) => (float[2,3,64] y) {
        h = MatMul(x, W) k = MatMul(h, V) y = Tanh(k)
    }"""
    return build(17, text, W=normal(100, 20), V=normal(20, 64))


@sibling("B45", "a table of odd width", sqnr_int4=12)
def _() -> onnx.ModelProto:
    text = """g (int64[2,3] i) => (float[2,3,48] y) { e = Gather(T, i) y = MatMul(e, W) }"""
    return build(21, text, T=normal(30, 100), W=normal(100, 48))


@sibling("B45", "inside a branch of an old model", sqnr_int4=12)
def _() -> onnx.ModelProto:
    text = """g (float[4,100] x, bool c) => (float[4,48] y) {
        y = If (c) <
            then_branch = t () => (float[4,48] p) { p = MatMul(x, W) },
            else_branch = e () => (float[4,48] q) { n = Neg(x) q = MatMul(n, W) } >
    }"""
    return build(11, text, W=normal(100, 48))


# B47: blocks of 512


@sibling("B47", "fewer columns than the block", nonzero=True, sqnr_int4=12)
def _() -> onnx.ModelProto:
    text = "g (float[2,300] x) => (float[2,8] y) { y = MatMul(x, W) }"
    return build(21, text, W=normal(300, 8))


@sibling("B47", "Gemm, no multiple", nonzero=True, sqnr_int4=12)
def _() -> onnx.ModelProto:
    text = "g (float[N,1300] x) => (float[N,5] y) { y = Gemm<transB = 1>(x, W, b) }"
    return build(13, text, W=normal(5, 1300), b=normal(5))


@sibling("B47", "one output, behind another layer", nonzero=True, sqnr_int4=10)
def _() -> onnx.ModelProto:
    text = """g (float[2,3,64] x) => (float[2,3,1] y) {
        h = MatMul(x, W) r = Relu(h) y = MatMul(r, V)
    }"""
    return build(17, text, W=normal(64, 1024), V=normal(1024, 1))


# B49: one channel is many features


@sibling("B49", "a convolution seen as features")
def _() -> onnx.ModelProto:
    text = """g (float[N,3,6,6] x) => (float[N,5] y) {
        h = Conv(x, W, b) r = Relu(h) f = Flatten(r) y = Gemm<transB = 1>(f, V, c)
    }"""
    return build(17, text, W=normal(8, 3, 3, 3), b=normal(8), V=normal(5, 128), c=normal(5))


@sibling("B49", "one spatial axis, the batch is copied")
def _() -> onnx.ModelProto:
    text = """g (float[N,8] x) => (float[N,5,4] y) {
        h = MatMul(x, W) r = Reshape(h, s) y = Conv(r, V, b)
    }"""
    return build(13, text, W=normal(8, 24), s=np.array([0, 6, 4]), V=normal(5, 6, 1), b=normal(5))


@sibling("B49", "a Reshape whose size is computed, depthwise behind it")
def _() -> onnx.ModelProto:
    text = """g (float[N,8] x) => (float[N,5,2,2] y) {
        h = Gemm(x, W, b) n = Shape<end = 1>(x) s = Concat<axis = 0>(n, rest) r = Reshape(h, s)
        d = Conv<group = 6>(r, D) y = Conv(d, V)
    }"""
    arrays = {"rest": np.array([6, 2, 2]), "D": normal(6, 1, 1, 1), "V": normal(5, 6, 1, 1)}
    return build(17, text, W=normal(8, 24), b=normal(24), **arrays)


# B51: heads


ATTENTION = """
    a = Reshape(q, split) b = Reshape(k, split) c = Reshape(v, split)
    d = Transpose<perm = [0,2,1,3]>(a) e = Transpose<perm = [0,2,3,1]>(b)
    f = Transpose<perm = [0,2,1,3]>(c) g = MatMul(d, e) h = Mul(g, half) i = Softmax<axis = 3>(h)
    j = MatMul(i, f) l = Transpose<perm = [0,2,1,3]>(j) m = Reshape(l, join)
"""


@sibling("B51", "three matrices with biases")
def _() -> onnx.ModelProto:
    text = f"""g (float[1,6,16] x) => (float[1,6,16] y) {{
        qm = MatMul(x, Wq) q = Add(qm, bq) km = MatMul(x, Wk) k = Add(km, bk)
        vm = MatMul(x, Wv) v = Add(vm, bv) {ATTENTION} o = MatMul(m, Wo) y = Add(o, x)
    }}"""
    weights = {f"W{name}": normal(16, 16, seed=i) for i, name in enumerate("qkvo")}
    biases = {f"b{name}": normal(16, seed=i) for i, name in enumerate("qkv")}
    sizes = {"split": np.array([0, 0, 4, 4]), "join": np.array([0, 0, 16])}
    return build(13, text, half=np.float32(0.5), **weights, **biases, **sizes)


@sibling("B51", "sizes that are stated, a Split of opset 11")
def _() -> onnx.ModelProto:
    text = f"""g (float[1,6,16] x) => (float[1,6,16] y) {{
        w = MatMul(x, W) q, k, v = Split<axis = 2, split = [16,16,16]>(w) {ATTENTION}
        y = MatMul(m, Wo)
    }}"""
    sizes = {"split": np.array([1, 6, 4, 4]), "join": np.array([1, 6, 16])}
    return build(11, text, half=np.float32(0.5), W=normal(16, 48), Wo=normal(16, 16), **sizes)


@sibling("B51", "a leading axis of three instead of a Split")
def _() -> onnx.ModelProto:
    text = """g (float[1,6,16] x) => (float[1,6,16] y) {
        w = MatMul(x, W) r = Reshape(w, parts) t = Transpose<perm = [2,0,3,1,4]>(r)
        q = Gather<axis = 0>(t, zero) k = Gather<axis = 0>(t, one) v = Gather<axis = 0>(t, two)
        u = Transpose<perm = [0,1,3,2]>(k) s = MatMul(q, u) p = Softmax<axis = -1>(s)
        o = MatMul(p, v) j = Transpose<perm = [0,2,1,3]>(o) m = Reshape(j, join)
        y = MatMul(m, Wo)
    }"""
    sizes = {"parts": np.array([1, 6, 3, 4, 4]), "join": np.array([1, 6, 16])}
    axes = {name: np.array(index) for index, name in enumerate(("zero", "one", "two"))}
    return build(17, text, W=normal(16, 48), Wo=normal(16, 16), **sizes, **axes)
