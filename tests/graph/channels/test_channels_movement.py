"""Operators that move elements: what may go, and that the rest computes what it did."""

from __future__ import annotations

import numpy as np
import pytest

from tests.graph.channels.exactness import AssertExact
from tests.graph.channels.table import Case, check, dense, images, ints, scalar, tokens

PADDED = "<pads = [1,1,1,1]>"

JOINED = [
    images("Concat with an input", "u = Concat<axis = 1>(x, t)", reads=11, last=PADDED),
    images("Concat on a negative axis", "u = Concat<axis = -3>(t, x, t)", reads=19, last=PADDED),
    images("Concat of the same tensor twice", "u = Concat<axis = 1>(t, t)", reads=16, last=PADDED),
    images("Concat of two layers", "[c3] s = Conv<pads = [1,1,1,1]>(x, W3) "
           "u = Concat<axis = 1>(t, s)", {"c1": 8, "c3": 4}, W3=(4, 3, 3, 3), reads=12,
           last=PADDED),
    images("Concat of what is zero and what is not", "a = Sigmoid(t) u = Concat<axis = 1>(a, t)",
           reads=16),
    Case("Concat with a constant", """(float[1,3,6,5] x) => (float[a,b,c,d] y) {
           [c1] t = Conv<pads = [1,1,1,1]>(x, W1) u = Concat<axis = 1>(k, t)
           y = Conv(u, W2) }""",
        {"W1": (8, 3, 3, 3), "W2": (5, 10, 1, 1), "k": (1, 2, 6, 5)}, {"c1": 8}),
    images("Concat along another axis", "a = Relu(t) u = Concat<axis = 2>(t, a)", last=PADDED),
    images("Concat along another axis ties two layers", "[c3] s = Conv<pads = [1,1,1,1]>(x, W3) "
           "u = Concat<axis = 3>(t, s)", {"c1": 8, "c3": 8}, W3=(8, 3, 3, 3), last=PADDED),
    images("Concat along another axis, of other rests", "a = Sigmoid(t) "
           "[k] u = Concat<axis = 2>(t, a)", 0, "behind 'Sigmoid'"),
    images("Concat along another axis with an input", "a = Concat<axis = 1>(x, x, x) "
           "b = Slice(a, k0, k8, k1) u = Concat<axis = 2>(b, t)", 0, "does not change",
           k0=ints(0), k8=ints(8), k1=ints(1)),
    Case("Concat along another axis with a constant for each channel",
         """(float[1,S,6] x) => (float[a,b,c] y) {
           [m1] t = MatMul(x, W1) u = Concat<axis = 1>(k, t) y = MatMul(u, W2) }""",
         {"W1": (6, 8), "W2": (8, 5), "k": (1, 1, 8)}, {"m1": 8}),
    images("DenseNet", """
      [c3] a = Conv<pads = [1,1,1,1]>(t, W3) b = Concat<axis = 1>(t, a) r = Relu(b)
      [c4] c = Conv<pads = [1,1,1,1]>(r, W4) d = Concat<axis = 1>(b, c)
      e = BatchNormalization(d, s, o, m, v) [c5] f = Conv<pads = [1,1,1,1]>(e, W5)
      u = Concat<axis = 1>(d, f)""", {"c1": 8, "c3": 4, "c4": 4, "c5": 4}, reads=20,
           W3=(4, 8, 3, 3), W4=(4, 12, 3, 3), W5=(4, 16, 3, 3), last=PADDED,
           s=(16,), o=(16,), m=(16,), v=np.ones(16, np.float32)),
]  # fmt: skip

CUT = [
    images("Split", "a, b = Split<axis = 1>(t) u = Add(a, b)", 4, reads=4, opset=13, last=PADDED),
    images("Split into parts of their own", "a, b = Split<axis = 1>(t) c = Relu(a) d = Tanh(b) "
           "u = Concat<axis = 1>(d, c)", opset=13, last=PADDED),
    Case("Split into unequal parts", """(float[N,3,H,W] x) => (float[a,b,c,d] y) {
           [c1] t = Conv<pads = [1,1,1,1]>(x, W1) a, b, c = Split<axis = 1>(t, k) d = Tanh(b)
           u = Concat<axis = -3>(d, a) y = Conv(u, W2) }""",
        {"W1": (8, 3, 3, 3), "W2": (5, 6, 1, 1), "k": ints(2, 4, 2)}, {"c1": 8}),
    Case("Split with a part of one channel", """(float[N,3,H,W] x) => (float[a,b,c,d] y) {
           [c1] t = Conv<pads = [1,1,1,1]>(x, W1) g, u = Split<axis = 1>(t, k) v = Mul(u, g)
           y = Conv(v, W2) }""",
        {"W1": (8, 3, 3, 3), "W2": (5, 7, 1, 1), "k": ints(1, 7)}, {"c1": 7},
        "it is the only channel"),
    images("Split by the number of outputs", "a, b, c = Split<axis = 1, num_outputs = 3>(t) "
           "u = Concat<axis = 1>(c, a, b)", opset=18, last=PADDED),
    images("Split by an attribute", "a, b = Split<axis = 1, split = [5, 3]>(t) c = Tanh(b) "
           "u = Concat<axis = 1>(c, a)", opset=11, last=PADDED),
    images("Split beside the channels", "a, b = Split<axis = 2>(t) u = Add(a, b)", height="6",
           opset=13, last=PADDED),
    Case("Split with a part that is an output", """(float[N,3,H,W] x) => (float[a,b,c,d] y,
           float[e,f,g,h] p) {
           [c1] t = Conv<pads = [1,1,1,1]>(x, W1) p, u = Split<axis = 1>(t) y = Conv(u, W2) }""",
         {"W1": (8, 3, 3, 3), "W2": (5, 4, 1, 1)}, {"c1": 4}, "p: it is an output"),
    images("Split at computed places", "s = Shape(x) b = Slice(s, k1, k2) c = Mul(b, k1) "
           "e = Sub(k8, c) f = Concat<axis = 0>(c, e) a, b2 = Split<axis = 1>(t, f) "
           "u = Concat<axis = 1>(b2, a)", 0, "where it is split", k1=ints(1), k2=ints(2),
           k8=ints(8)),
    images("Slice", "u = Slice(t, k2, k7, k1)", reads=5, k1=ints(1), k2=ints(2), k7=ints(7),
           last=PADDED),
    images("Slice with steps", "u = Slice(t, k1, end, k1, k2)", reads=4, k1=ints(1), k2=ints(2),
           end=ints(2**62), last=PADDED),
    images("Slice backwards", "a = Slice(t, last_one, far, k1, back) u = Add(t, a)", 4,
           last_one=ints(-1), far=ints(-(2**63)), back=ints(-1), k1=ints(1), last=PADDED),
    images("Slice backwards in steps", "u = Slice(t, k7, k0, k1, back)", reads=4, k7=ints(7),
           k0=ints(0), back=ints(-2), k1=ints(1), last=PADDED),
    images("Slice on several axes", "u = Slice(t, begin, end, axes, steps)", reads=4,
           begin=ints(0, 6, -2), end=ints(2**40, -9, -(2**63)), axes=ints(0, 1, -1),
           steps=ints(1, -2, -1)),
    images("Slice without axes", "u = Slice(t, begin, end)", reads=5, begin=ints(0, 1),
           end=ints(2**40, 6)),
    images("Slice from the end", "u = Slice(t, begin, end, k1)", reads=3, begin=ints(-5),
           end=ints(-2), k1=ints(1)),
    images("Slice of everything", "u = Slice(t, k0, end, k1)", k0=ints(0), end=ints(2**31 - 1),
           k1=ints(1)),
    images("Slice by attributes", "u = Slice<axes = [1, -2], starts = [2, 1], "
           "ends = [1000, -1]>(t)", reads=6, opset=9),
    images("Slice by attributes without axes", "u = Slice<starts = [0, -6], "
           "ends = [1000, 1000]>(t)", reads=6, opset=9),
    images("Slice at computed places beside the channels", "s = Shape(x) h = Gather(s, two) "
           "u = Slice(t, k0, h, two)", k0=ints(0), two=ints(2)),
    images("Slice at computed places", "s = Shape(x) h = Gather(s, one) u = Slice(t, k0, h, one)",
           0, "where it is cut", reads=3, k0=ints(0), one=ints(1)),
    images("Slice of nothing", "a = Slice(t, k3, k3, one) u = Concat<axis = 1>(a, x)", 0,
           "nothing of it", reads=3, k3=ints(3), one=ints(1)),
    Case("Gather in another order", """(float[N,3,H,W] x) => (float[a,b,c,d] y) {
           [c1] t = Conv<pads = [1,1,1,1]>(x, W1) u = Gather<axis = 1>(t, k) v = Relu(u)
           y = Conv(v, W2) }""",
        {"W1": (8, 3, 3, 3), "W2": (5, 8, 1, 1), "k": ints(3, 2, 1, 0, -1, -2, -3, -4)},
        {"c1": 8}),
    images("Gather of some, some twice", "u = Gather<axis = 1>(t, k)", reads=6,
           k=ints(5, 5, 0, -1, 2, -3), last=PADDED),
    images("Gather of some by int32", "u = Gather<axis = -3>(t, k)", reads=4,
           k=np.array([1, 3, 5, 7], np.int32), last=PADDED),
    images("Gather of one", "a = Gather<axis = 1>(t, k) b = Unsqueeze(a, one) u = Mul(t, b)", 7,
           "it is selected", k=np.array(-3), one=ints(1), last=PADDED),
    images("Gather by a table", "a = Gather<axis = 1>(t, k) "
           "u = ReduceSum<keepdims = 0>(a, one)", 0, "are a table", reads=2,
           k=np.array([[0, 1], [2, 3]]), one=ints(1)),
    images("Gather by what is computed", "a = ArgMax<axis = 1, keepdims = 0>(x) "
           "b = Reshape(a, all) c = Slice(b, k0, two, k0) u = Gather<axis = 1>(t, c)", 0,
           "are computed", reads=2, all=ints(-1), k0=ints(0), two=ints(2)),
    images("Gather beside the channels", "u = Gather<axis = 2>(t, k)", k=ints(0, 2, 1),
           last=PADDED),
    Case("a table of vectors", """(int64[N,S] i) => (float[a,b,c] y) {
           [e] t = Gather(E, i) u = Relu(t) y = MatMul(u, W2) }""",
         {"E": (20, 8), "W2": (8, 5)}, {"e": 8}),
    Case("a table of vectors and one of positions", """(int64[N,S] i) => (float[a,b,c] y) {
           [e] t = Gather(E, i) s = Shape(i) n = Gather(s, one) l = Slice(R, zero, n, zero)
           [p] q = Gather(P, l) u = Add(t, q) v = Relu(u) y = MatMul(v, W2) }""",
         {"E": (20, 8), "P": (16, 8), "W2": (8, 5), "R": np.arange(16), "one": ints(1),
          "zero": ints(0)}, {"e": 8, "p": 8}),
]  # fmt: skip

MOVED = [
    Case("Transpose", """(float[N,3,H,W] x) => (float[a,b,c,d] y) {
           [c1] t = Conv(x, W1) a = Transpose<perm = [0,2,3,1]>(t) [m] b = MatMul(a, k)
           u = Transpose<perm = [0,3,1,2]>(b) y = Conv(u, W2) }""",
        {"W1": (8, 3, 3, 3), "W2": (5, 6, 1, 1), "k": (8, 6)}, {"c1": 8, "m": 6}),
    dense("Transpose without an order", "[m1] t = MatMul(x, W1) a = Transpose(t) b = Relu(a) "
          "c = Transpose(b) y = MatMul(c, W2)", W1=(6, 8), W2=(8, 5)),
    images("Unsqueeze and Squeeze", "a = Unsqueeze(t, two) b = Relu(a) u = Squeeze(b, two)",
           two=ints(1, -1)),
    images("Unsqueeze and Squeeze by attributes", "a = Unsqueeze<axes = [1, 2]>(t) b = Relu(a) "
           "u = Squeeze<axes = [-5, 2]>(b)", opset=11),
    Case("Squeeze without axes, with two channels", """(float[2,3,6,6] x) => (float[a,b] y) {
           [c1] t = Conv(x, W1) p = GlobalAveragePool(t) s = Squeeze(p) y = Gemm(s, W2) }""",
         {"W1": (2, 3, 3, 3), "W2": (2, 5)}, {"c1": 2}),
    Case("Squeeze without axes, with two channels, before opset 13",
         """(float[2,3,6,6] x) => (float[a,b] y) {
           [c1] t = Conv(x, W1) p = GlobalAveragePool(t) s = Squeeze(p) y = Gemm(s, W2, B2) }""",
         {"W1": (2, 3, 3, 3), "W2": (2, 5), "B2": (5,)}, {"c1": 2}, opset=11),
    images("Squeeze of what may be of size one", "p = GlobalAveragePool(t) s = Squeeze(p) "
           "r = Reshape(s, k) u = Mul(t, r)", 0, "which axes go", k=ints(-1, 8, 1, 1)),
    images("Expand of a plane", "p = GlobalAveragePool(t) s = Shape(t) u = Expand(p, s)",
           last=PADDED),
    images("Expand to a constant shape", "p = GlobalAveragePool(t) u = Expand(p, k)",
           k=ints(1, 8, 7, 7), last=PADDED),
    images("Expand to a shape of lower rank", "p = GlobalAveragePool(t) u = Expand(p, k)",
           k=ints(8, 7, 7), last=PADDED),
    images("Expand to a shape of higher rank", "a = Expand(t, k) u = Squeeze(a, k0)",
           k=ints(1, 1, 8, 1, 1), k0=ints(0), last=PADDED),
    images("Expand to a computed shape", "p = GlobalAveragePool(t) s = Shape(x) "
           "a = Slice(s, k0, k1) b = Slice(s, k2, k4) c = Concat<axis = 0>(a, k8, b) "
           "u = Expand(p, c)", k0=ints(0), k1=ints(1), k2=ints(2), k4=ints(4), k8=ints(8),
           last=PADDED),
    images("Expand to a computed shape of lower rank", "p = GlobalAveragePool(t) s = Shape(x) "
           "b = Slice(s, k2, k4) c = Concat<axis = 0>(k8, b) u = Expand(p, c)", k2=ints(2),
           k4=ints(4), k8=ints(8), last=PADDED),
    images("Tile of the channels", "u = Tile(t, k)", reads=24, k=ints(1, 3, 1, 1), last=PADDED),
    images("Tile beside the channels", "u = Tile(t, k)", k=ints(1, 1, 2, 1), last=PADDED),
    images("Tile by a computed number", "s = Shape(x) a = Slice(s, k1, k2) b = Div(a, a) "
           "c = Concat<axis = 0>(b, b, b, b) u = Tile(t, c)", 0, "how often", k1=ints(1),
           k2=ints(2)),
    images("Pad of a plane", "u = Pad(t, k)", k=ints(0, 0, 1, 2, 0, 0, 0, 1), last=PADDED),
    images("Pad of a plane with numbers", "[p] u = Pad(t, k, n)", 0, "behind 'p'", n=scalar(0.5),
           k=ints(0, 0, 1, 2, 0, 0, 0, 1)),
    images("Pad of a plane with what a channel holds at rest", "a = Sigmoid(t) u = Pad(a, k, n)",
           n=scalar(0.5), k=ints(0, 0, 1, 2, 0, 0, 0, 1)),
    images("Pad of a plane with numbers, by attributes", "[p] u = Pad<pads = [0,0,1,1,0,0,1,1], "
           "value = 0.5>(t)", 0, "behind 'p'", opset=9),
    images("Pad of a plane with a computed number", "m = ReduceMax<keepdims = 0>(x) "
           "[p] u = Pad(t, k, m)", 0, "behind 'p'", k=ints(0, 0, 1, 1, 0, 0, 1, 1)),
    images("Pad of a plane by reflection", "a = Sigmoid(t) u = Pad<mode = \"reflect\">(a, k)",
           k=ints(0, 0, 1, 2, 0, 0, 0, 1)),
    images("Pad of the channels", "u = Pad(t, k)", k=ints(0, 1, 0, 0, 0, 3, 0, 0), reads=12,
           last=PADDED),
    images("Pad of the channels with numbers", "a = Sigmoid(t) u = Pad(a, k, n)", n=scalar(0.7),
           k=ints(0, 1, 0, 0, 0, 3, 0, 0), reads=12),
    images("Pad of listed axes", "u = Pad(t, k, n, axes)", opset=18, n=scalar(0.0),
           k=ints(1, 2, 0, 1), axes=ints(-1, 1), reads=11),
    images("Pad that cuts channels", "u = Pad(t, k)", 0, "or cut", k=ints(0, -1, 0, 0, 0, 0, 0, 0),
           reads=7),
    images("Pad of the channels by repetition", "u = Pad<mode = \"edge\">(t, k)", 0, "or cut",
           k=ints(0, 1, 0, 0, 0, 0, 0, 0), reads=9),
    images("Pad by a computed number", "s = Shape(x) a = Slice(s, k0, k1) b = Sub(a, a) "
           "c = Concat<axis = 0>(b, b, b, b, b, b, b, b) u = Pad(t, c)", 0, "how much",
           k0=ints(1), k1=ints(2)),
    Case("ResNet's shortcut without weights", """(float[N,3,H,W] x) => (float[a,b,c,d] y) {
           [c1] t = Conv<pads = [1,1,1,1]>(x, W1) a = Slice(t, k0, far, axes, steps) b = Pad(a, k)
           [c3] s = Conv<pads = [1,1,1,1], strides = [2,2]>(t, W3) u = Add(b, s)
           y = Conv(u, W2) }""",
        {"W1": (8, 3, 3, 3), "W2": (5, 16, 1, 1), "W3": (16, 8, 3, 3), "k0": ints(0, 0),
         "far": ints(2**40, 2**40), "axes": ints(2, 3), "steps": ints(2, 2),
         "k": ints(0, 4, 0, 0, 0, 4, 0, 0)}, {"c1": 8, "c3": 8}, "does not change"),
    images("DepthToSpace", "u = DepthToSpace<blocksize = 2>(t)", 2, reads=2, last=PADDED),
    images("DepthToSpace, columns first", "a = Sigmoid(t) "
           "u = DepthToSpace<blocksize = 2, mode = \"CRD\">(a)", 2, reads=2),
    images("SpaceToDepth", "u = SpaceToDepth<blocksize = 2>(t)", height="6", width="4", reads=32,
           last=PADDED),
    images("DepthToSpace and back", "a = DepthToSpace<blocksize = 2>(t) b = Relu(a) "
           "u = SpaceToDepth<blocksize = 2>(b)", 2, last=PADDED),
]  # fmt: skip

RESIZED = [
    images("Resize by scales", "u = Resize<mode = \"nearest\">(t,, k)",
           k=np.array([1, 1, 2, 2], np.float32), last=PADDED),
    images("Resize by scales takes constants", "a = Sigmoid(t) "
           "u = Resize<mode = \"linear\">(a,, k)", k=np.array([1, 1, 2, 1.5], np.float32)),
    Case("Resize by sizes", """(float[1,3,6,5] x) => (float[a,b,c,d] y) {
           [c1] t = Conv(x, W1) u = Resize<mode = "cubic">(t,,, k) y = Conv(u, W2) }""",
        {"W1": (8, 3, 3, 3), "W2": (5, 8, 1, 1), "k": ints(1, 8, 12, 9)}, {"c1": 8}),
    images("Resize by computed sizes", "s = Shape(t) a = Slice(s, k0, k2) "
           "b = Concat<axis = 0>(a, k7) u = Resize<mode = \"nearest\">(t,,, b)", k0=ints(0),
           k2=ints(2), k7=ints(7, 9), last=PADDED),
    images("Resize to the size of another", "s = Shape(t) a = Slice(s, k0, k2) "
           "r = Shape(x) c = Slice(r, k2, k4) b = Concat<axis = 0>(a, c) "
           "p = MaxPool<kernel_shape = [2,2], strides = [2,2]>(t) "
           "u = Resize<mode = \"nearest\">(p,,, b)", k0=ints(0), k2=ints(2), k4=ints(4),
           last=PADDED),
    images("Resize of listed axes", "u = Resize<mode = \"nearest\", axes = [-1, 2]>(t,,, k)",
           k=ints(7, 9), opset=18, last=PADDED),
    images("Resize of listed axes with that of the channels",
           "u = Resize<mode = \"nearest\", axes = [-1, -3]>(t,,, k)", k=ints(7, 8), opset=18,
           last=PADDED),
    images("Resize of opset 10", "u = Resize<mode = \"nearest\">(t, k)", opset=10,
           k=np.array([1, 1, 2, 2], np.float32), last=PADDED),
    images("Resize by computed scales", "m = ReduceMax<keepdims = 0>(x) n = Sub(m, m) "
           "a = Add(n, k) u = Resize<mode = \"nearest\">(t,, a)", 0, "it is resized",
           k=np.array([1, 1, 2, 2], np.float32)),
    images("Resize of the channels", "u = Resize<mode = \"nearest\">(t,, k)", 0, "it is resized",
           k=np.array([1, 2, 1, 1], np.float32), reads=16),
    images("Resize of the channels by so little that their number stays",
           "u = Resize<mode = \"nearest\", coordinate_transformation_mode = \"asymmetric\">(t,, k)",
           0, "it is resized", k=np.array([1, 1.1, 1, 1], np.float32)),
    images("Upsample", "u = Upsample<mode = \"nearest\">(t, k)", opset=9,
           k=np.array([1, 1, 2, 2], np.float32), last=PADDED),
    images("Upsample by attributes", "u = Upsample<mode = \"nearest\", scales = [1.0,1.0,2.0,2.0]>"
           "(t)", opset=7, last=PADDED),
]  # fmt: skip

RESHAPED = [
    images("flattened", "p = GlobalAveragePool(t) f = Flatten(p) [g] h = Gemm(f, k) "
           "u = Unsqueeze(h, axes)", {"c1": 8, "g": 6}, reads=6, k=(8, 6), axes=ints(2, 3)),
    images("flattened with a plane", "f = Flatten(t) [g] h = Gemm(f, k) u = Unsqueeze(h, axes)",
           {"c1": 8, "g": 6}, height="3", width="2", reads=6, k=(48, 6), axes=ints(2, 3)),
    images("flattened by Reshape", "f = Reshape(t, s) [g] h = Gemm(f, k) u = Unsqueeze(h, axes)",
           {"c1": 8, "g": 6}, height="3", width="2", reads=6, k=(48, 6), axes=ints(2, 3),
           s=ints(-1, 48)),
    images("flattened by Reshape, the width left open",
           "f = Reshape(t, s) [g] h = Gemm(f, k) u = Unsqueeze(h, axes)",
           {"c1": 8, "g": 6}, height="3", width="2", reads=6, k=(48, 6), axes=ints(2, 3),
           s=ints(0, -1)),
    images("flattened by a computed shape", "d = Shape(x) n = Gather(d, zero) m = Unsqueeze(n, k0) "
           "s = Concat<axis = 0>(m, open) f = Reshape(t, s) [g] h = Gemm(f, k) "
           "u = Unsqueeze(h, axes)", {"c1": 8, "g": 6}, height="3", width="2", reads=6,
           k=(48, 6), axes=ints(2, 3), zero=np.array(0), k0=ints(0), open=ints(-1)),
    images("flattened behind a Sigmoid", "a = Sigmoid(t) f = Flatten(a) [g] h = Gemm(f, k) "
           "u = Unsqueeze(h, axes)", {"c1": 8, "g": 6}, height="3", width="2", reads=6,
           k=(48, 6), axes=ints(2, 3)),
    images("flattened with the batch", "f = Flatten<axis = 2>(t) s = Shape(t) "
           "u = Reshape(f, s)", 0, "flattened with axes of unknown"),
    images("flattened planes of unknown size", "f = Flatten(t) m = ReduceMax(f) u = Add(t, m)", 0,
           "flattened with axes of unknown"),
    images("planes in one axis", "a = Reshape(t, k) b = Relu(a) s = Shape(t) u = Reshape(b, s)",
           k=ints(0, 8, -1), last=PADDED),
    images("planes in one axis and back by a constant", "a = Reshape(t, k) b = Relu(a) "
           "u = Reshape(b, l)", height="6", width="5", k=ints(0, 0, -1), l=ints(-1, 8, 6, 5),
           last=PADDED),
    images("flattened and back", "a = Reshape(t, k) b = Relu(a) c = Reshape(b, l) "
           "u = MatMul(c, m)", height="6", width="5", k=ints(-1, 240), l=ints(0, 8, 6, 5),
           m=(5, 4), last=PADDED),
    images("blocks behind a part that is fixed", "a = Concat<axis = 1>(x, x, x, t) "
           "b = Slice(a, k1, end, k1) c = Reshape(b, k) d = ReduceSum<keepdims = 0>(c, k1) "
           "u = Relu(d)", 0, "does not change", height="6", width="5", k1=ints(1), end=ints(17),
           k=ints(0, 2, 8, 6, 5)),
    images("flattened behind a part that is fixed", "a = Concat<axis = 1>(x, t) f = Flatten(a) "
           "[g] h = Gemm(f, k) u = Unsqueeze(h, axes)", {"c1": 8, "g": 6}, height="3", width="2",
           reads=6, k=(66, 6), axes=ints(2, 3)),
    images("a sum of parts that are fixed and parts that are not", "a = Concat<axis = 1>(x, t) "
           "[c3] s = Conv<pads = [1,1,1,1]>(x, W3) u = Add(a, s)", {"c1": 8, "c3": 8},
           "does not change", reads=11, W3=(11, 3, 3, 3), last=PADDED),
    images("in blocks", "a = Reshape(t, k) b = ReduceSum<keepdims = 0>(a, two) u = Relu(b)", 4,
           height="6", width="5", reads=4, k=ints(0, 2, 4, 6, 5), two=ints(1)),
    images("in blocks and back", "a = Reshape(t, k) b = Relu(a) u = Reshape(b, l)", 4,
           height="6", width="5", k=ints(0, 2, 4, 6, 5), l=ints(0, 8, 6, 5)),
    images("channel shuffle", "a = Reshape(t, k) b = Transpose<perm = [0,2,1,3,4]>(a) "
           "u = Reshape(b, l)", 4, height="6", width="5", k=ints(-1, 2, 4, 6, 5),
           l=ints(-1, 8, 6, 5), last=PADDED),
    Case("channel shuffle between convolutions in groups",
        """(float[N,3,6,5] x) => (float[a,b,c,d] y) {
           [c1] t = Conv<pads = [1,1,1,1]>(x, W1) [g1] p = Conv<group = 2>(t, W3)
           a = Reshape(p, k) b = Transpose<perm = [0,2,1,3,4]>(a) c = Reshape(b, l)
           [g2] u = Conv<group = 2>(c, W4) y = Conv(u, W2) }""",
        {"W1": (8, 3, 3, 3), "W2": (5, 8, 1, 1), "k": ints(-1, 2, 4, 6, 5), "l": ints(-1, 8, 6, 5),
         "W3": (8, 4, 1, 1), "W4": (8, 4, 1, 1)}, {"c1": 4, "g1": 2, "g2": 4}),
    images("channel shuffle by a computed shape", "d = Shape(t) n = Slice(d, k0, k1) "
           "hw = Slice(d, k2, k4) s = Concat<axis = 0>(n, two, four, hw) a = Reshape(t, s) "
           "b = Transpose<perm = [0,2,1,3,4]>(a) u = Reshape(b, d)", 4, k0=ints(0), k1=ints(1),
           k2=ints(2), k4=ints(4), two=ints(2), four=ints(4), last=PADDED),
    Case("two Reshapes with one shape", """(float[N,8,6,3] x) => (float[a,b,c,d] y,
           float[N,24,M] z) {
           [c1] t = Conv(x, W1) a = Reshape(t, k) z = Reshape(x, k) b = Relu(a)
           u = Reshape(b, l) y = Conv(u, W2) }""",
        {"W1": (24, 8, 1, 1), "W2": (5, 24, 1, 1), "k": ints(0, 24, -1), "l": ints(0, 24, 6, 3)},
        {"c1": 24}),
    images("Shape with a start and an end", "d = Shape<start = 1>(t) n = Shape<end = -3>(t) "
           "s = Concat<axis = 0>(n, d) a = Reshape(t, s) u = Relu(a)", last=PADDED),
    Case("Shape that scales", """(float[N,3,H,W] x) => (float[a,b,c,d] y) {
           [c1] t = Conv(x, W1) d = Shape(t) n = Gather(d, one) f = Cast<to = 1>(n) r = Sqrt(f)
           u = Div(t, r) y = Conv(u, W2) }""",
        {"W1": (8, 3, 3, 3), "W2": (5, 8, 1, 1), "one": np.array(1)}, {"c1": 8}),
    Case("Shape that is an output", """(float[N,3,H,W] x) => (float[a,b,c,d] y, int64[4] s,
           int64[3] e) {
           [c1] t = Conv(x, W1) s = Shape(t) e = Shape<start = -3, end = 100>(t)
           y = Conv(t, W2) }""",
         {"W1": (8, 3, 3, 3), "W2": (5, 8, 1, 1)}, {"c1": 8}),
    Case("ConstantOfShape", """(float[N,3,H,W] x) => (float[a,b,c,d] y) {
           [c1] t = Conv(x, W1) d = Shape(t) k = ConstantOfShape(d) m = Greater(t, n)
           u = Where(m, t, k) y = Conv<pads = [1,1,1,1]>(u, W2) }""",
        {"W1": (8, 3, 3, 3), "W2": (5, 8, 3, 3), "n": scalar(0.1)}, {"c1": 8}),
    Case("ConstantOfShape, of ones", """(float[N,3,H,W] x) => (float[a,b,c,d] y) {
           [c1] t = Conv(x, W1) d = Shape(t) k = ConstantOfShape<value = float[1] {1.0}>(d)
           u = Add(t, k) y = Conv(u, W2) }""",
        {"W1": (8, 3, 3, 3), "W2": (5, 8, 1, 1)}, {"c1": 8}),
    Case("ConstantOfShape that is read twice", """(float[N,3,H,W] x) => (float[a,b,c,d] y) {
           [c1] t = Conv(x, W1) d = Shape(t) k = ConstantOfShape<value = float[1] {1.0}>(d)
           e = Add(t, k) u = Mul(e, k) y = Conv(u, W2) }""",
        {"W1": (8, 3, 3, 3), "W2": (5, 8, 1, 1)}, {}, "does not change"),
    images("Expand of a number to the channels", "d = Shape(t) e = Expand(k, d) "
           "m = Greater(t, n) g = Where(m, t, e) u = Mul(g, t)", k=scalar(-1), n=scalar(0.1)),
    images("Expand of a constant with channels", "s = Shape(x) a = Slice(s, k0, k1) "
           "b = Concat<axis = 0>(a, k8, k1, k1) e = Expand(k, b) u = Add(t, e)", k=(1, 8, 1, 1),
           k0=ints(0), k1=ints(1), k8=ints(8), last=PADDED),
    images("Expand of a constant with channels that scales", "a = Sigmoid(t) e = Expand(k, s) "
           "u = Mul(a, e)", k=(8, 1, 1), s=ints(1, 8, 1, 1)),
    images("Expand of a constant with channels that is read twice", "e = Expand(k, s) "
           "a = Mul(t, e) u = Add(a, e)", 0, "does not change", k=(8, 1, 1),
           s=ints(1, 8, 1, 1)),
    Case("a class token", """(float[N,S,6] x) => (float[a,b,c] y) {
           [m1] t = MatMul(x, W1) s = Shape(x) n = Slice(s, k0, k1)
           b = Concat<axis = 0>(n, k1, k8) e = Expand(k, b) u = Concat<axis = 1>(e, t)
           v = Relu(u) y = MatMul(v, W2) }""",
         {"W1": (6, 8), "W2": (8, 5), "k": (1, 1, 8), "k0": ints(0), "k1": ints(1),
          "k8": ints(8)}, {"m1": 8}),
    tokens("heads", "a = Reshape(t, k) b = Relu(a) u = Reshape(b, l)", 4, k=ints(0, 0, 2, 4),
           l=ints(0, 0, 8)),
    tokens("heads that go as a whole", "a = Reshape(t, k) b = Relu(a) u = Reshape(b, l)", 4,
           k=ints(0, 0, 4, 2), l=ints(0, 0, -1), whole_blocks=True),
    tokens("heads of two dimensions of one symbol", "s = Shape(x) n = Slice(s, k0, k2) "
           "e = Concat<axis = 0>(n, k) a = Reshape(t, e) b = Transpose<perm = [0,2,1,3]>(a) "
           "c = Relu(b) f = Transpose<perm = [0,2,1,3]>(c) g = Concat<axis = 0>(n, l) "
           "u = Reshape(f, g)", 4, k0=ints(0), k2=ints(2), k=ints(2, 4), l=ints(8)),
    Case("images from a vector", """(float[N,6] x) => (float[a,b,c,d] y) {
           [m1] t = Gemm(x, W1, B1) r = Reshape(t, k) u = Relu(r) y = ConvTranspose(u, W2) }""",
         {"W1": (6, 64), "B1": (64,), "W2": (4, 3, 3, 3), "k": ints(-1, 4, 4, 4)}, {"m1": 4}),
    Case("normalization of groups of channels", """(float[N,3,4,4] x) => (float[a,b,c,d] y) {
           [c1] t = Conv<pads = [1,1,1,1]>(x, W1) r = Reshape(t, k)
           i = InstanceNormalization(r, s, o) v = Reshape(i, l) u = Relu(v) y = Conv(u, W2) }""",
         {"W1": (8, 3, 3, 3), "W2": (5, 8, 3, 3), "k": ints(0, 4, -1), "l": ints(-1, 8, 4, 4),
          "s": np.ones(4, np.float32), "o": np.zeros(4, np.float32)}, {"c1": 4}),
    Case("two channel axes in one", """(float[N,3,7] x) => (float[a,b] y) {
           [c1] t = Conv(x, W1) [m1] v = MatMul(t, W3) f = Flatten(v) y = Gemm(f, W2) }""",
         {"W1": (8, 3, 1), "W3": (7, 4), "W2": (32, 5)}, {}, "unknown or changing"),
    Case("two channel axes in one, by Reshape", """(float[N,3,7] x) => (float[a,b] y) {
           [c1] t = Conv(x, W1) [m1] v = MatMul(t, W3) f = Reshape(v, k) y = Gemm(f, W2) }""",
         {"W1": (8, 3, 1), "W3": (7, 4), "W2": (32, 5), "k": ints(0, 32)}, {}, "two of the joined"),
]  # fmt: skip


@pytest.mark.parametrize("case", JOINED, ids=str)
def test_joined(case: Case, assert_exact: AssertExact) -> None:
    check(case, assert_exact)


@pytest.mark.parametrize("case", CUT, ids=str)
def test_cut(case: Case, assert_exact: AssertExact) -> None:
    check(case, assert_exact)


@pytest.mark.parametrize("case", MOVED, ids=str)
def test_moved(case: Case, assert_exact: AssertExact) -> None:
    check(case, assert_exact)


@pytest.mark.parametrize("case", RESIZED, ids=str)
def test_resized(case: Case, assert_exact: AssertExact) -> None:
    check(case, assert_exact)


@pytest.mark.parametrize("case", RESHAPED, ids=str)
def test_reshaped(case: Case, assert_exact: AssertExact) -> None:
    check(case, assert_exact)
