"""Siblings about float16, and about statistics that are taken from the batch."""

from __future__ import annotations

import numpy as np
import onnx

from tests.cases.siblings import Feeds, build, normal, sibling

LOWEST = np.finfo(np.float32).min

# B37: inputs that must stay float32


@sibling("B37", "sizes and a region", sqnr_fp16=40)
def _() -> onnx.ModelProto:
    text = """g (float[1,3,8] x) => (float[1,2,5] y) {
        c = Conv(x, w)
        r = Resize<mode = "linear", coordinate_transformation_mode = "tf_crop_and_resize">
            (c, roi, , sizes)
        y = Conv(r, v)
    }"""
    arrays = {"roi": [0, 0, 0.1, 1, 1, 0.8], "sizes": np.array([1, 3, 5])}
    return build(13, text, w=normal(3, 3, 1), v=normal(2, 3, 1), **arrays)


@sibling("B37", "Upsample of an old model", sqnr_fp16=40)
def _() -> onnx.ModelProto:
    text = """g (float[1,2,4,4] x) => (float[1,2,8,8] y) {
        c = Conv(x, w) u = Upsample<mode = "nearest">(c, s) y = Conv(u, w)
    }"""
    return build(9, text, w=normal(2, 2, 1, 1), s=[1.0, 1, 2, 2])


@sibling("B37", "scales of opset 10, shared with an ordinary operator", sqnr_fp16=40)
def _() -> onnx.ModelProto:
    text = """g (float[1,2,4,4] x) => (float[1,2,8,8] y, float[4] z) {
        c = Conv(x, w) u = Resize<mode = "linear">(c, s) y = Conv(u, w) z = Mul(s, s)
    }"""
    return build(10, text, w=normal(2, 2, 1, 1), s=[1.0, 1, 2, 2])


@sibling("B37", "scales that are computed", sqnr_fp16=40)
def _() -> onnx.ModelProto:
    text = """g (float[1,2,4,4] x, float[1,2,6,8] like) => (float[1,2,A,B] y) {
        c = Conv(x, w) a = Shape(like) b = Shape(c) f = Cast<to = 1>(a) g = Cast<to = 1>(b)
        s = Div(f, g) r = Resize<mode = "nearest">(c, , s) y = Conv(r, w)
    }"""
    return build(17, text, w=normal(2, 2, 1, 1))


@sibling("B37", "inside a branch, cubic", sqnr_fp16=40)
def _() -> onnx.ModelProto:
    text = """g (float[1,2,6,6] x, bool b) => (float[1,2,9,9] y) {
        c = Conv(x, w)
        y = If (b) <
            then_branch = t () => (float[1,2,9,9] p) { p = Resize<mode = "cubic">(c, , s) },
            else_branch = e () => (float[1,2,9,9] q) { q = Resize<mode = "nearest">(c, , s) } >
    }"""
    return build(19, text, w=normal(2, 2, 1, 1), s=[1.0, 1, 1.5, 1.5])


# B39: types that attributes state


@sibling("B39", "of a comparison, within branches", sqnr_fp16=40)
def _() -> onnx.ModelProto:
    text = """g (float[2,8] x, bool b) => (float[2,8] y) {
        h = MatMul(x, w)
        m = If (b) <
            then_branch = t () => (float[2,8] p) { g = Greater(h, zero) p = Cast<to = 1>(g) },
            else_branch = e () => (float[2,8] q) { q = Sigmoid(h) } >
        k = Mul(m, h) y = MatMul(k, w)
    }"""
    return build(17, text, w=normal(8, 8), zero=np.float32(0))


@sibling("B39", "constants made at run time", sqnr_fp16=40)
def _() -> onnx.ModelProto:
    text = """g (float[3,8] x, int64[3] i) => (float[3,8] y) {
        h = MatMul(x, w) s = Shape(h)
        f = ConstantOfShape<value = float[1] {0.5}>(s)
        o = OneHot(i, depth, values) e = EyeLike<dtype = 1>(x)
        a = Sum(h, f, o, e) y = MatMul(a, w)
    }"""
    return build(17, text, w=normal(8, 8), depth=np.array(8), values=[0.0, 2.0])


@sibling("B39", "from double and back, CastLike", sqnr_fp16=40)
def _() -> onnx.ModelProto:
    text = """g (float[2,8] x, double[2,8] d, int32[2,8] i) => (double[2,8] y, float[2,8] z) {
        h = MatMul(x, w) a = Cast<to = 1>(d) b = CastLike(i, h) s = Sum(h, a, b)
        z = MatMul(s, w) y = Cast<to = 11>(z)
    }"""
    return build(19, text, w=normal(8, 8))


@sibling("B39", "a Cast that is an output and read as well", sqnr_fp16=40)
def _() -> onnx.ModelProto:
    text = """g (int64[2,8] i, float[2,8] x) => (float[2,8] f, float[2,8] y) {
        f = Cast<to = 1>(i) h = MatMul(x, w) m = Mul(f, h) y = MatMul(m, w)
    }"""
    return build(11, text, w=normal(8, 8))


# B41: masks


def _mask(kind: str, index: int, feeds: Feeds) -> None:
    """The first position is open everywhere but in the last row, which is masked as a whole."""
    del kind, index
    feeds["m"][..., 0] = 1
    feeds["m"][..., -1, :] = 0


MASKED = {"ignore_rows": {"y": [3]}, "sqnr": 20, "sqnr_fp16": 30}


@sibling("B41", "a product", change=_mask, **MASKED)
def _() -> onnx.ModelProto:
    text = """g (float[1,4,8] x, int64[1,4,4] m) => (float[1,4,6] y) {
        q = MatMul(x, w) t = Transpose<perm = [0,2,1]>(x) s = MatMul(q, t)
        f = Cast<to = 1>(m) b = Min(f, one) n = Sub(one, b) a = Mul(n, lowest) h = Add(s, a)
        p = Softmax(h) o = MatMul(p, x) y = MatMul(o, v)
    }"""
    arrays = {"one": np.float32(1), "lowest": LOWEST}
    return build(13, text, w=normal(8, 8), v=normal(8, 6), **arrays)


@sibling("B41", "Where behind the scores, old Softmax", change=_mask, **MASKED)
def _() -> onnx.ModelProto:
    text = """g (float[1,4,8] x, bool[1,4,4] m) => (float[1,4,6] y) {
        q = MatMul(x, w) t = Transpose<perm = [0,2,1]>(x) s = MatMul(q, t)
        h = Where(m, s, low) p = Softmax<axis = 2>(h) o = MatMul(p, x) y = MatMul(o, v)
    }"""
    return build(11, text, w=normal(8, 8), v=normal(8, 6), low=np.float32(-1e9))


@sibling("B41", "heads of four dimensions", change=_mask, **MASKED)
def _() -> onnx.ModelProto:
    text = """g (float[1,4,8] x, bool[1,1,4,4] m) => (float[1,4,6] y) {
        q = MatMul(x, w) r = Reshape(q, split) a = Transpose<perm = [0,2,1,3]>(r)
        b = Transpose<perm = [0,2,3,1]>(r) s = MatMul(a, b) k = Where(m, zero, lowest)
        h = Add(s, k) p = Softmax(h) o = MatMul(p, a) u = Transpose<perm = [0,2,1,3]>(o)
        j = Reshape(u, join) y = MatMul(j, v)
    }"""
    arrays = {"split": np.array([1, 4, 2, 4]), "join": np.array([1, 4, 8])}
    lowest = {"zero": np.float32(0), "lowest": LOWEST}
    return build(21, text, w=normal(8, 8), v=normal(8, 6), **arrays, **lowest)


@sibling("B41", "two masks, one of them infinite", change=_mask, **MASKED)
def _() -> onnx.ModelProto:
    text = """g (float[1,4,8] x, bool[1,4,4] m) => (float[1,4,6] y) {
        q = MatMul(x, w) t = Transpose<perm = [0,2,1]>(x) s = MatMul(q, t)
        k = Where(m, zero, lowest) i = Where(m, zero, low) h = Add(s, k) g = Add(h, i)
        p = Softmax(g) o = MatMul(p, x) y = MatMul(o, v)
    }"""
    arrays = {"zero": np.float32(0), "lowest": LOWEST / 4, "low": LOWEST / 4}
    return build(17, text, w=normal(8, 8), v=normal(8, 6), **arrays)


# B43: statistics of the batch


@sibling("B43", "rows", max_abs=1e-4, bn_left=1)
def _() -> onnx.ModelProto:
    text = """g (float[16,6] x) => (float[16,4] y) {
        h = Gemm(x, w, b) n, p, q = BatchNormalization<training_mode = 1>(h, s, c, m, v)
        y = Relu(n)
    }"""
    norm = {"s": 1 + normal(4), "c": normal(4), "m": normal(4, seed=1), "v": np.ones(4)}
    return build(15, text, w=normal(6, 4), b=normal(4), **norm)


@sibling("B43", "its statistics are outputs", max_abs=1e-4, bn_left=1)
def _() -> onnx.ModelProto:
    text = """g (float[4,3,8] x) => (float[4,5,6] y, float[5] p, float[5] q) {
        h = Conv(x, w)
        y, p, q = BatchNormalization<training_mode = 1, momentum = 0.5>(h, s, c, m, v)
    }"""
    norm = {"s": 1 + normal(5), "c": normal(5), "m": normal(5, seed=1), "v": np.ones(5)}
    return build(17, text, w=normal(5, 3, 3), **norm)


@sibling("B43", "beside one that may be folded", max_abs=1e-4, bn_left=1)
def _() -> onnx.ModelProto:
    text = """g (float[4,3,6,6] x) => (float[4,5,4,4] y) {
        h = Conv(x, w) n, p, q = BatchNormalization<training_mode = 1>(h, s, c, m, v)
        k = Conv(n, u) y = BatchNormalization(k, s, c, m, v)
    }"""
    norm = {"s": 1 + normal(5), "c": normal(5), "m": normal(5, seed=1), "v": np.ones(5)}
    return build(17, text, w=normal(5, 3, 3, 3), u=normal(5, 5, 1, 1), **norm)
