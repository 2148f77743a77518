"""Layers that compute channels: what may go, and that the rest computes what it did."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from tests.graph.channels.exactness import AssertExact
from tests.graph.channels.table import Case, Weight, check, dense, images, ints, scalar, tokens

CONVOLUTIONS = [
    images("Conv", "u = Relu(t)"),
    images("Conv without a bias", "[c3] u = Conv(t, W3)", {"c1": 8, "c3": 6}, W3=(6, 8, 3, 3),
           reads=6),
    images("Conv, dilated, strided, padded",
           "[c3] u = Conv<dilations = [2,1], strides = [2,2], pads = [2,1,0,1]>(t, W3, B3)",
           {"c1": 8, "c3": 6}, W3=(6, 8, 3, 3), B3=(6,), reads=6),
    images("Conv with auto_pad", "[c3] u = Conv<auto_pad = \"SAME_UPPER\">(t, W3)",
           {"c1": 8, "c3": 6}, W3=(6, 8, 3, 3), reads=6),
    images("Conv with auto_pad does not take constants",
           "a = Sigmoid(t) [c3] u = Conv<auto_pad = \"SAME_LOWER\">(a, W3)",
           {"c3": 6}, "behind 'Sigmoid'", W3=(6, 8, 3, 3), reads=6),
    images("Conv with auto_pad VALID takes constants",
           "a = Sigmoid(t) [c3] u = Conv<auto_pad = \"VALID\">(a, W3)",
           {"c1": 8, "c3": 6}, W3=(6, 8, 3, 3), reads=6),
    images("Conv takes constants, with a kernel and strides",
           "a = Sigmoid(t) [c3] u = Conv<strides = [2,2]>(a, W3, B3)",
           {"c1": 8, "c3": 6}, W3=(6, 8, 3, 3), B3=(6,), reads=6),
    images("Conv in groups", "[c3] u = Conv<group = 2>(t, W3, B3)", {"c1": 4, "c3": 3},
           W3=(6, 4, 1, 1), B3=(6,), reads=6),
    images("Conv in groups takes constants", "a = Sigmoid(t) [c3] u = Conv<group = 2>(a, W3)",
           {"c1": 4, "c3": 3}, W3=(6, 4, 1, 1), reads=6),
    images("Conv in groups with one output each", "[c3] u = Conv<group = 4>(t, W3)",
           {"c1": 2, "c3": 1}, W3=(4, 2, 1, 1), reads=4),
    images("Conv in groups behind a part that is fixed",
           "a = Concat<axis = 1>(x, t, x, x, x) b = Slice(a, k0, k16, k1) "
           "[c3] u = Conv<group = 2>(b, W3)", {"c3": 4}, "does not change",
           k0=ints(0), k16=ints(16), k1=ints(1), W3=(8, 8, 1, 1)),
    images("depthwise Conv", "[d] u = Conv<group = 8, pads = [1,1,1,1]>(t, Wd, Bd)",
           8, Wd=(8, 1, 3, 3), Bd=(8,)),
    images("depthwise Conv, behind a Sigmoid", "a = Sigmoid(t) [d] u = Conv<group = 8>(a, Wd)",
           8, Wd=(8, 1, 3, 3)),
    images("depthwise Conv with two outputs each", "[d] u = Conv<group = 8>(t, Wd, Bd)",
           8, Wd=(16, 1, 3, 3), Bd=(16,), reads=16),
    images("depthwise Conv behind a part that is fixed",
           "a = Concat<axis = 1>(t, x) [d] u = Conv<group = 11>(a, Wd, Bd)", 8,
           Wd=(11, 1, 3, 3), Bd=(11,), reads=11),
    images("depthwise Conv of an input", "[d] a = Conv<group = 3>(x, Wd) "
           "[c3] b = Conv<pads = [1,1,1,1]>(a, W3) [c4] e = Conv(b, W4) c = ReduceMean(e) "
           "u = Add(t, c)", {"c3": 8, "c4": 2}, "behind", Wd=(3, 1, 1, 1), W3=(8, 3, 1, 1),
           W4=(2, 8, 1, 1)),
    images("two Conv with one weight", "[c3] s = Conv<pads = [1,1,1,1]>(x, W1) v = Relu(s) "
           "u = Concat<axis = 1>(t, v)", {"c1": 8, "c3": 8}, reads=16),
    images("a weight that is also read elsewhere", "n = ReduceMax(W1) u = Mul(t, n)", 0,
           "'W1' is read elsewhere"),
    images("a bias that is also read elsewhere", "n = ReduceMax(B1) u = Mul(t, n)", 0,
           "'B1' is read elsewhere"),
    images("a weight that is computed", "a = ReduceMax<keepdims = 1, axes = [0, 2, 3]>(t) "
           "b = Reshape(a, s) [c3] u = Conv<group = 8>(t, b)", 0, "computed at run time",
           s=ints(8, 1, 1, 1)),
    Case("Conv of one and of three dimensions",
         """(float[N,3,L] x) => (float[a,b,c] y) {
           [c1] t = Conv<pads = [1,1]>(x, W1) r = Relu(t)
           f = Unsqueeze(r, axes) [c3] v = Conv<pads = [0,0,1,0,0,1]>(f, W3) g = Squeeze(v, axes)
           [c2] y = Conv(g, W2) }""",
         {"W1": (8, 3, 3), "W3": (6, 8, 1, 1, 3), "W2": (5, 6, 1), "axes": ints(2, 3)},
         {"c1": 8, "c3": 6}),
    images("ConvTranspose", "[c3] u = ConvTranspose<strides = [2,2]>(t, W3, B3)",
           {"c1": 8, "c3": 6}, W3=(8, 6, 2, 2), B3=(6,), reads=6),
    images("ConvTranspose, cut and filled up", "[c3] u = ConvTranspose<strides = [2,2], "
           "pads = [1,0,1,0], output_padding = [1,1]>(t, W3)",
           {"c1": 8, "c3": 6}, W3=(8, 6, 3, 3), reads=6),
    images("ConvTranspose does not take constants", "a = Sigmoid(t) [c3] u = ConvTranspose(a, W3)",
           {"c3": 6}, "behind 'Sigmoid'", W3=(8, 6, 3, 3), reads=6),
    images("ConvTranspose in groups", "[c3] u = ConvTranspose<group = 2>(t, W3, B3)",
           {"c1": 4, "c3": 3}, W3=(8, 3, 2, 2), B3=(6,), reads=6),
    images("depthwise ConvTranspose", "[d] u = ConvTranspose<group = 8>(t, Wd, Bd)",
           8, Wd=(8, 1, 2, 2), Bd=(8,)),
    images("depthwise ConvTranspose with two outputs each",
           "[d] u = ConvTranspose<group = 8>(t, Wd, Bd)",
           8, Wd=(8, 2, 2, 2), Bd=(16,), reads=16),
]  # fmt: skip


def _gemm(
    name: str,
    nodes: str,
    free: int | Mapping[str, int] = 8,
    reason: str = "",
    batch: str = "N",
    **more: Weight,
) -> Case:
    known: dict[str, Weight] = {"W1": (6, 8), "B1": (8,), "W2": (8, 5)}
    return dense(name, nodes, free, reason, batch=batch, **{**known, **more})


def _folded(c: str, attributes: str = "", **more: Weight) -> Case:
    """The constants behind a Sigmoid move into a C of some kind."""
    nodes = f"""
      row = ReduceMean<axes = [0], keepdims = 0>(x) cut = Slice(row, k0, k5)
      column = ReduceMean<axes = [1]>(x)
      [m1] t = Gemm(x, W1, B1) u = Sigmoid(t) y = Gemm{attributes}(u, W2{c and ", " + c})"""
    known: dict[str, Weight] = {
        "k0": ints(0), "k5": ints(5), "vector": (5,), "matrix": (4, 5), "high": (4, 1),
        "wide": (1, 5), "number": scalar(0.4),
    }  # fmt: skip
    name = f"Gemm{attributes}: a constant moves into {c or 'a new C'}"
    return _gemm(name, nodes, batch="4", **{**known, **more})


GEMM = [
    _gemm("Gemm", "[m1] t = Gemm(x, W1, B1) u = Relu(t) y = Gemm(u, W2, B2)", B2=(5,)),
    _gemm("Gemm, transB", "[m1] t = Gemm<transB = 1>(x, W1, B1) u = Relu(t) "
          "y = Gemm<transB = 1>(u, W2)", W1=(8, 6), W2=(5, 8)),
    _gemm("Gemm, transA", "[m1] t = Gemm(x, W1, B1) u = Transpose(t) y = Gemm<transA = 1>(u, W2)"),
    _gemm("Gemm, a constant on the left", "c = Transpose(x) [m1] t = Gemm(W1, c, C1) "
          "u = Transpose(t) y = MatMul(u, W2)", W1=(8, 6), C1=(8, 1)),
    _gemm("Gemm, transA of a constant on the left", "c = Transpose(x) "
          "[m1] t = Gemm<transA = 1>(W1, c) u = Transpose(t) y = MatMul(u, W2)"),
    _gemm("Gemm, a constant on the left and a vector for the columns", "c = Transpose(x) "
          "[m1] t = Gemm(W1, c, C1) u = Transpose(t) y = MatMul(u, W2)", 0, "behind 'm1'", "4",
          W1=(8, 6), C1=(4,)),
    _gemm("Gemm, a constant on the left that reads channels", "[m1] t = Gemm(x, W1, B1) "
          "u = Transpose(t) z = Gemm(W2, u) y = Transpose(z)", W2=(5, 8)),
    _gemm("Gemm, a constant on the left takes no constants", "[m1] t = Gemm(x, W1, B1) "
          "v = Transpose(t) u = Sigmoid(v) z = Gemm(W2, u) y = Transpose(z)", 0, "behind",
          W2=(5, 8)),
    _gemm("Gemm, alpha and beta", "[m1] t = Gemm<alpha = 0.5, beta = 2.0>(x, W1, B1) "
          "y = Gemm<alpha = 0.25, beta = 3.0>(t, W2, B2)", B2=(5,)),
    _gemm("Gemm, a row as C", "[m1] t = Gemm(x, W1, C1) y = Gemm(t, W2)", C1=(1, 8)),
    _gemm("Gemm, a matrix as C", "[m1] t = Gemm(x, W1, C1) y = Gemm(t, W2)", batch="4",
          C1=(4, 8)),
    _gemm("Gemm, a number as C", "[m1] t = Gemm<beta = 0.5>(x, W1, C1) y = Gemm(t, W2)",
          C1=scalar(0.3)),
    _gemm("Gemm, one number as C", "[m1] t = Gemm(x, W1, C1) y = Gemm(t, W2)", C1=(1, 1)),
    _gemm("Gemm, zero as C", "[m1] t = Gemm(x, W1, C1) y = Gemm(t, W2)", C1=scalar(0)),
    _gemm("Gemm, a number for each row as C", "[m1] t = Gemm(x, W1, C1) y = Gemm(t, W2)", 0,
          "behind 'm1'", "4", C1=(4, 1)),
    _gemm("Gemm, a computed number for each row as C", "c = ReduceMean<axes = [1]>(x) "
          "[m1] t = Gemm(x, W1, c) y = Gemm(t, W2)", 0, "behind 'm1'"),
    _gemm("Gemm, channels as C", "[m3] c = MatMul(x, W3) [m1] t = Gemm(x, W1, c) y = Gemm(t, W2)",
          {"m1": 8, "m3": 8}, W3=(6, 8)),
    _gemm("Gemm, channels as C, behind a Sigmoid", "[m3] d = MatMul(x, W3) c = Sigmoid(d) "
          "[m1] t = Gemm<beta = 2.0>(x, W1, c) y = Gemm(t, W2)", {"m1": 8, "m3": 8}, W3=(6, 8)),
    _gemm("Gemm, an input as C", "c = Concat<axis = 1>(x, x) [m1] t = Gemm(x, W1, c) "
          "y = Gemm(t, W2)", 0, "does not change", W1=(6, 12), W2=(12, 5)),
    _gemm("Gemm, channels as C of a product without channels", "c = Concat<axis = 0>(x, x) "
          "d = Transpose(x) e = Transpose(c) [m1] f = Gemm(x, W1) t = Gemm(d, x, f) "
          "y = Gemm(t, W2)", 0, "does not change", "6", W1=(6, 6), W2=(6, 5)),
    _folded(""),
    _folded("", "<alpha = 0.5>"),
    _folded("vector"),
    _folded("vector", "<beta = 2.0>"),
    _folded("vector", "<beta = 0.0>"),
    _folded("matrix"),
    _folded("high"),
    _folded("wide"),
    _folded("number"),
    _folded("cut"),
    _folded("column", "<beta = 2.0>"),
    _folded("vector", "<transB = 1>", W2=(5, 8)),
]  # fmt: skip

MATMUL = [
    tokens("MatMul", "u = Relu(t)"),
    tokens("MatMul and a bias", "a = Add(t, B1) u = Relu(a)", B1=(8,)),
    tokens("MatMul takes constants, without a bias behind it", "u = Sigmoid(t)"),
    tokens("MatMul takes constants, with a bias behind it", "a = Sigmoid(t) [m3] b = MatMul(a, W3) "
           "c = Add(b, B3) u = Relu(c)", {"m1": 8, "m3": 7}, reads=7, W3=(8, 7), B3=(7,)),
    dense("MatMul of a matrix", "[m1] t = MatMul(x, W1) y = MatMul(t, W2)", W1=(6, 8), W2=(8, 5)),
    Case("MatMul of a vector", """(float[6] x) => (float[a] y) {
           [m1] t = MatMul(x, W1) u = Sigmoid(t) y = MatMul(u, W2) }""",
         {"W1": (6, 8), "W2": (8, 5)}, {"m1": 8}),
    Case("MatMul of a vector by itself", """(float[6] x) => (float y) {
           [m1] t = MatMul(x, W1) y = MatMul(t, t) }""", {"W1": (6, 8)}, {"m1": 8}),
    Case("MatMul by a vector", """(float[N,S,6] x) => (float[a,b] y) {
           [m1] t = MatMul(x, W1) y = MatMul(t, w) }""", {"W1": (6, 8), "w": (8,)}, {"m1": 8}),
    Case("MatMul by a vector takes no constants", """(float[N,S,6] x) => (float[a,b] y) {
           [m1] t = MatMul(x, W1) u = Sigmoid(t) y = MatMul(u, w) }""",
         {"W1": (6, 8), "w": (8,)}, {}, "behind 'Sigmoid'"),
    Case("MatMul of a constant vector", """(float[N,6,L] x) => (float[a,b] y) {
           [m1] t = MatMul(W1, x) y = MatMul(w, t) }""", {"W1": (8, 6), "w": (8,)}, {"m1": 8}),
    Case("MatMul with a constant on the left", """(float[N,6,L] x) => (float[a,b,c] y) {
           [m1] t = MatMul(W1, x) u = Relu(t) y = MatMul(W2, u) }""",
         {"W1": (8, 6), "W2": (5, 8)}, {"m1": 8}),
    Case("MatMul with a constant on the left takes no constants",
         """(float[N,6,L] x) => (float[a,b,c] y) {
           [m1] t = MatMul(W1, x) u = Sigmoid(t) y = MatMul(W2, u) }""",
         {"W1": (8, 6), "W2": (5, 8)}, {}, "behind 'Sigmoid'"),
    Case("MatMul with a stack", """(float[N,4,S,6] x) => (float[a,b,c,d] y) {
           [m1] t = MatMul(x, W1) u = Relu(t) y = MatMul(u, W2) }""",
         {"W1": (4, 6, 8), "W2": (4, 8, 5)}, {"m1": 8}),
    Case("MatMul with a stack takes no constants", """(float[N,4,S,6] x) => (float[a,b,c,d] y) {
           [m1] t = MatMul(x, W1) u = Sigmoid(t) y = MatMul(u, W2) }""",
         {"W1": (4, 6, 8), "W2": (4, 8, 5)}, {}, "behind 'Sigmoid'"),
    Case("MatMul of a matrix with a stack", """(float[S,6] x) => (float[a,b,c] y) {
           [m1] t = MatMul(x, W1) u = Relu(t) y = MatMul(u, W2) }""",
         {"W1": (4, 6, 8), "W2": (4, 8, 5)}, {"m1": 8}),
    Case("MatMul of a vector with a stack", """(float[6] x) => (float[a,b,c] y) {
           [m1] t = MatMul(x, W1) u = Unsqueeze(t, one) y = MatMul(u, W2) }""",
         {"W1": (4, 6, 8), "W2": (4, 8, 5), "one": ints(1)}, {"m1": 8}),
    images("MatMul beside the channels", "u = MatMul(t, k)", width="5", k=(5, 7),
           last="<pads = [1,1,1,1]>"),
    images("MatMul beside the channels, behind a Sigmoid", "a = Sigmoid(t) u = MatMul(a, k)", 0,
           "behind 'Sigmoid'", width="5", k=(5, 7)),
    images("MatMul with a matrix for each channel", "u = MatMul(t, k)", width="5", k=(8, 5, 7),
           last="<pads = [1,1,1,1]>"),
    images("MatMul with a matrix for each channel on the left", "u = MatMul(k, t)", height="5",
           k=(8, 7, 5), last="<pads = [1,1,1,1]>"),
    images("MatMul of a vector beside the channels", "a = MatMul(t, k) u = Unsqueeze(a, axis)",
           width="5", k=(5,), axis=ints(3), last="<pads = [1,1,1,1]>"),
    images("MatMul of a tensor by its transpose", "a = Transpose<perm = [0,1,3,2]>(t) "
           "u = MatMul(t, a)", last="<pads = [1,1,1,1]>"),
    images("MatMul of channels by those of another layer", "[c3] s = Conv<pads = [1,1,1,1]>(x, W3) "
           "a = Transpose<perm = [0,1,3,2]>(s) b = Sigmoid(t) u = MatMul(b, a)",
           {"c1": 8, "c3": 8}, W3=(8, 3, 3, 3), last="<pads = [1,1,1,1]>"),
    images("MatMul of channels by what has none", "a = Concat<axis = 1>(x, x, x) "
           "b = Slice(a, k0, k8, one) c = Transpose<perm = [0,1,3,2]>(b) u = MatMul(t, c)", 0,
           "does not change", k0=ints(0), k8=ints(8), one=ints(1)),
    images("MatMul of channels by one plane", "m = ReduceMean<axes = [1]>(x) "
           "c = Transpose<perm = [0,1,3,2]>(m) u = MatMul(t, c)", last="<pads = [1,1,1,1]>"),
    dense("MatMul of one tensor by itself", "[m1] t = MatMul(x, W1) a = MatMul(t, t) "
          "y = MatMul(a, W2)", 0, "does not change", batch="6", W1=(6, 6), W2=(6, 5)),
    Case("MatMul over channels of two layers", """(float[N,S,6] x) => (float[a,b,c] y) {
           [m1] t = MatMul(x, W1) [m3] k = MatMul(x, W3) c = Transpose<perm = [0,2,1]>(k)
           y = MatMul(t, c) }""", {"W1": (6, 8), "W3": (6, 8)}, {"m1": 8, "m3": 8}),
    Case("MatMul over channels, of which one layer is not zero at rest",
         """(float[N,S,6] x) => (float[a,b,c] y) {
           [m1] t = MatMul(x, W1) [m3] k = MatMul(x, W3) s = Sigmoid(t)
           c = Transpose<perm = [0,2,1]>(k) y = MatMul(s, c) }""",
         {"W1": (6, 8), "W3": (6, 8)}, {"m1": 8, "m3": 8}),
    Case("MatMul over channels that are not zero at rest",
         """(float[N,S,6] x) => (float[a,b,c] y) {
           [m1] t = MatMul(x, W1) [m3] k = MatMul(x, W3) s = Sigmoid(t) r = Sigmoid(k)
           c = Transpose<perm = [0,2,1]>(r) y = MatMul(s, c) }""",
         {"W1": (6, 8), "W3": (6, 8)}, {}, "behind 'Sigmoid'"),
    Case("MatMul over channels that are zero on this side or on that",
         """(float[N,S,6] x) => (float[a,b,c] y) {
           [m1] t = MatMul(x, W1) [m3] k = MatMul(x, W3) s = Add(t, left) r = Max(k, right)
           c = Transpose<perm = [0,2,1]>(r) y = MatMul(s, c) }""",
         {"W1": (6, 8), "W3": (6, 8), "left": scalar(0.5),
          "right": np.array([0, 0, 0, 0, 0.1, 0.1, 0.2, 0.3], np.float32)},
         {"m1": 4, "m3": 4}, "behind 'Add'"),
    Case("one matrix for two layers", """(float[N,6] x, float[N,6] z) => (float[a,b] y) {
           [m1] t = MatMul(x, W1) [m3] s = MatMul(z, W1) p = MatMul(t, W2) q = MatMul(s, W3)
           y = Add(p, q) }""", {"W1": (6, 8), "W2": (8, 5), "W3": (8, 5)}, {"m1": 8, "m3": 8}),
    Case("one matrix that computes channels and reads them",
         """(float[N,8] x) => (float[a,b] y) { [m1] t = MatMul(x, W1) [m3] y = MatMul(t, W1) }""",
         {"W1": (8, 8)}, {}, "output"),
    Case("one vector that is added here and multiplied with there",
         """(float[N,6] x) => (float[a,b] y) {
           [m1] t = MatMul(x, W1) a = Add(t, k) [m3] s = MatMul(x, W3) g = Sigmoid(s)
           b = Mul(g, k) p = MatMul(a, W2) q = MatMul(b, W2) y = Add(p, q) }""",
         {"W1": (6, 8), "W3": (6, 8), "W2": (8, 5), "k": (8,)}, {}, "'k'"),
    Case("one vector that is added here and divided by there",
         """(float[N,6] x) => (float[a,b] y) {
           [m1] t = MatMul(x, W1) a = Add(t, k) [m3] s = MatMul(x, W3)
           b = Div(s, k) p = MatMul(a, W2) q = MatMul(b, W2) y = Add(p, q) }""",
         {"W1": (6, 8), "W3": (6, 8), "W2": (8, 5), "k": (8,)}, {}, "'k'"),
    Case("a table that embeds", """(int64[N,S] i) => (float[a,b,c] y) {
           [e] t = Gather(E, i) u = Sigmoid(t) y = MatMul(u, W2) }""",
         {"E": (20, 8), "W2": (8, 5)}, {"e": 8}),
    Case("one table that embeds and reads, constants move",
         """(int64[N] i) => (float[a,b] y) {
           [e] t = Gather(E, i) u = Sigmoid(t) y = Gemm<transB = 1>(u, E) }""",
         {"E": (20, 8)}, {}, "'E'"),
    Case("one table that embeds and reads", """(int64[N] i) => (float[a,b] y) {
           [e] t = Gather(E, i) u = Relu(t) y = Gemm<transB = 1>(u, E) }""",
         {"E": (20, 8)}, {"e": 8}),
]  # fmt: skip


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolution(case: Case, assert_exact: AssertExact) -> None:
    check(case, assert_exact)


@pytest.mark.parametrize("case", GEMM, ids=str)
def test_gemm(case: Case, assert_exact: AssertExact) -> None:
    check(case, assert_exact)


@pytest.mark.parametrize("case", MATMUL, ids=str)
def test_matmul(case: Case, assert_exact: AssertExact) -> None:
    check(case, assert_exact)
