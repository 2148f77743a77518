"""Pooling, reductions, normalizations: what may go, and that the rest computes what it did."""

from __future__ import annotations

import numpy as np
import pytest

from tests.graph.channels.exactness import AssertExact
from tests.graph.channels.table import Case, check, images, ints, scalar, tokens

PADDED = "<pads = [1,1,1,1]>"


def _takes(name: str, op_type: str, attributes: str = "") -> list[Case]:
    """Pooling beside the channels, of zeros and of what is some number at rest."""
    return [
        images(name, f"u = {op_type}{attributes}(t)", last=PADDED),
        images(f"{name}, behind a Sigmoid", f"a = Sigmoid(t) u = {op_type}{attributes}(a)"),
    ]


POOLS = [
    *_takes("MaxPool", "MaxPool", "<kernel_shape = [3,3], strides = [2,2], pads = [1,1,1,1]>"),
    *_takes("MaxPool, dilated", "MaxPool", "<kernel_shape = [2,2], dilations = [2,2]>"),
    *_takes("AveragePool", "AveragePool", "<kernel_shape = [3,3], pads = [1,1,1,1]>"),
    *_takes("AveragePool, rounded up", "AveragePool",
            "<kernel_shape = [2,2], strides = [2,2], ceil_mode = 1>"),
    *_takes("AveragePool with auto_pad", "AveragePool",
            '<kernel_shape = [2,2], auto_pad = "SAME_UPPER">'),
    *_takes("GlobalAveragePool", "GlobalAveragePool"),
    *_takes("GlobalMaxPool", "GlobalMaxPool"),
    images("AveragePool that counts the padding", "u = AveragePool<kernel_shape = [3,3], "
           "pads = [1,1,1,1], count_include_pad = 1>(t)", last=PADDED),
    images("AveragePool that counts the padding, behind a Sigmoid", "a = Sigmoid(t) "
           "u = AveragePool<kernel_shape = [3,3], pads = [1,1,1,1], count_include_pad = 1>(a)", 0,
           "behind 'Sigmoid'"),
    images("LpPool", "u = LpPool<kernel_shape = [2,2], p = 2>(t)", last=PADDED),
    images("LpPool, behind a Sigmoid", "a = Sigmoid(t) u = LpPool<kernel_shape = [2,2]>(a)", 0,
           "behind 'Sigmoid'"),
    images("GlobalLpPool", "u = GlobalLpPool<p = 1>(t)", last=PADDED),
    Case("MaxPool whose indices are read", """(float[N,3,H,W] x) => (float[a,b,c,d] y,
           int64[a,b,c,d] i) {
           [c1] t = Conv(x, W1) u, i = MaxPool<kernel_shape = [2,2]>(t) y = Conv(u, W2) }""",
        {"W1": (8, 3, 3, 3), "W2": (5, 8, 1, 1)}, {}, "indices"),
    Case("pooling over an axis that shrinks", """(float[N,3,7] x) => (float[a,b,c] y) {
           [m1] t = MatMul(x, W1) u = MaxPool<kernel_shape = [2]>(t) y = MatMul(u, W2) }""",
         {"W1": (7, 8), "W2": (7, 5)}, {}, "pooled over this axis"),
]  # fmt: skip


def _reduction(op_type: str, opset: int, beside: int = 8) -> list[Case]:
    """Beside the channels, with and without the axes that were reduced."""
    kept = "axes" if opset >= 18 or (op_type == "ReduceSum" and opset >= 13) else ""
    attribute = "" if kept else "axes = [2, -1], "
    call = f"({{}}{', axes' if kept else ''})"
    name = f"{op_type} of opset {opset}"
    weights = {"axes": ints(2, -1)} if kept else {}
    return [
        images(name, f"u = {op_type}<{attribute}keepdims = 1>{call.format('t')}", beside,
               opset=opset, **weights),
        images(f"{name}, axes dropped", f"a = {op_type}<{attribute}keepdims = 0>{call.format('t')} "
               f"u = Reshape(a, s)", beside, opset=opset, s=ints(-1, 8, 1, 1), **weights),
    ]  # fmt: skip


_ZERO_STAYS = ["ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
               "ReduceSum", "ReduceSumSquare"]  # fmt: skip
_SUMS = ["ReduceL1", "ReduceL2", "ReduceMean", "ReduceSum", "ReduceSumSquare"]
_COMPARES = ["ReduceMax", "ReduceMin", "ReduceProd", "ReduceLogSum", "ReduceLogSumExp"]


def _over(op_type: str, free: int, reason: str = "") -> list[Case]:
    """Over the channels, with and without their axis, alone and with the plane."""
    return [
        images(f"{op_type} over the channels", f"d = Relu(t) c = {op_type}(d, one) "
               "u = Mul(t, c)", free, reason, opset=18, one=ints(1)),
        images(f"{op_type} over the channels, axis dropped",
               f"d = Relu(t) c = {op_type}<keepdims = 0>(d, one) e = Unsqueeze(c, one) "
               "u = Mul(t, e)", free, reason, opset=18, one=ints(-3)),
        images(f"{op_type} over everything",
               f"d = Abs(t) c = {op_type}<keepdims = 0>(d) u = Mul(t, c)", free, reason,
               opset=18, height="6", width="5"),
    ]  # fmt: skip


REDUCTIONS = [
    *(case for op_type in _ZERO_STAYS for case in _reduction(op_type, 11)),
    *(case for op_type in _ZERO_STAYS for case in _reduction(op_type, 18)),
    *_reduction("ReduceSum", 13),
    *(case for op_type in _SUMS for case in _over(op_type, 8)),
    *(case for op_type in _COMPARES for case in _over(op_type, 0, "compares these channels")),
    images("ReduceMean, behind a Sigmoid", "a = Sigmoid(t) u = ReduceMean<axes = [2, 3]>(a)"),
    images("ReduceSum, behind a Sigmoid", "a = Sigmoid(t) u = ReduceSum(a, k)", 0, "behind",
           k=ints(2, 3)),
    images("ReduceSum over channels that are not zero at rest", "a = Sigmoid(t) "
           "c = ReduceSum(a, k) u = Mul(t, c)", 0, "behind 'Sigmoid'", k=ints(1)),
    images("ReduceMean over channels that are not zero at rest", "a = Sigmoid(t) "
           "c = ReduceMean<axes = [1]>(a) u = Mul(t, c)", 0, "behind 'Sigmoid'"),
    images("ReduceLogSum beside the channels", "a = Abs(t) b = ReduceLogSum<axes = [2, 3]>(a) "
           "u = Mul(t, b)", 0, "the logarithm of zero"),
    images("ReduceLogSumExp beside the channels", "b = ReduceLogSumExp<axes = [2, 3]>(t) "
           "u = Mul(t, b)"),
    images("a reduction over nothing", "u = ReduceSum<noop_with_empty_axes = 1>(t)",
           last=PADDED),
    images("a reduction over axes that are computed", "s = Shape(x) a = Slice(s, k1, k2) "
           "b = Div(a, a) c = ReduceSum(t, b) u = Mul(t, c)", 0, "what it reduces", k1=ints(1),
           k2=ints(2)),
    images("ReduceMean of whole numbers", "a = Cast<to = 6>(t) b = ReduceMean<axes = [1]>(a) "
           "c = Cast<to = 1>(b) u = Mul(t, c)", 0, "compares"),
    Case("ReduceMean that is an output", """(float[N,3,H,W] x) => (float[a,b] y) {
           [c1] t = Conv(x, W1) r = Relu(t) y = ReduceMean<axes = [1, 2], keepdims = 0>(r) }""",
         {"W1": (8, 3, 3, 3)}, {"c1": 8}),
    images("ArgMax over the channels", "a = ArgMax<axis = 1>(t) b = Cast<to = 1>(a) u = Mul(t, b)",
           0, "the position among"),
    images("ArgMax beside the channels", "a = ArgMax<axis = -1, keepdims = 1>(t) "
           "b = Cast<to = 1>(a) u = Mul(t, b)"),
    images("ArgMin beside the channels, axis dropped", "a = ArgMin<axis = 2, keepdims = 0>(t) "
           "b = Cast<to = 1>(a) c = Unsqueeze(b, k) u = Mul(t, c)", k=ints(2)),
    images("CumSum beside the channels", "u = CumSum(t, k)", k=np.array(-1)),
    images("CumSum along the channels", "u = CumSum(t, k)", 0, "runs along", k=np.array(1)),
]  # fmt: skip

NORMALIZATIONS = [
    images("BatchNormalization", "u = BatchNormalization(t, s, b, m, v)", last=PADDED, s=(8,),
           b=(8,), m=(8,), v=np.linspace(0.5, 2, 8, dtype=np.float32)),
    images("BatchNormalization of a constant", "a = Sigmoid(t) "
           "u = BatchNormalization(a, s, b, m, v)", last=PADDED, s=(8,), b=(8,), m=(8,),
           v=np.linspace(0.5, 2, 8, dtype=np.float32)),
    images("two BatchNormalizations that share all", "a = BatchNormalization(t, s, b, m, v) "
           "c = Relu(a) u = BatchNormalization(c, s, b, m, v)", last=PADDED, s=(8,), b=(8,),
           m=(8,), v=np.linspace(0.5, 2, 8, dtype=np.float32)),
    images("BatchNormalization with one constant for two", "u = BatchNormalization(t, s, s, m, v)",
           last=PADDED, s=(8,), m=(8,), v=np.linspace(0.5, 2, 8, dtype=np.float32)),
    images("BatchNormalization with one constant for what goes and what stays",
           "u = BatchNormalization(t, s, m, m, v)", 0, "scales them there", s=(8,), m=(8,),
           v=np.linspace(0.5, 2, 8, dtype=np.float32)),
    images("InstanceNormalization", "u = InstanceNormalization(t, s, b)", last=PADDED, s=(8,),
           b=(8,)),
    images("LayerNormalization over the channels", "a = Transpose<perm = [0,2,3,1]>(t) "
           "b = LayerNormalization(a, s, o) u = Transpose<perm = [0,3,1,2]>(b)", 0,
           "it normalizes over", s=(8,), o=(8,)),
    images("LayerNormalization beside the channels", "a = LayerNormalization(t, s, o) "
           "u = Mul(a, t)", width="5", s=(5,), o=(5,)),
    images("LayerNormalization beside the channels whose mean is read",
           "a, m = LayerNormalization(t, s, o) b = ReduceMax(m) c = Mul(a, t) u = Mul(c, b)", 0,
           "its mean", width="5", s=(5,), o=(5,)),
    Case("LayerNormalization whose scale has channels", """(float[4,8] x, float[6] z) =>
           (float[a,b] y) { [m1] s = MatMul(z, W1) y = LayerNormalization(x, s) }""",
        {"W1": (6, 8)}, {}, "needs all of this input", opset=17),
    tokens("LayerNormalization in parts", """
      m = ReduceMean<axes = [-1]>(t) d = Sub(t, m) q = Pow(d, two) v = ReduceMean<axes = [-1]>(q)
      w = Add(v, e) r = Sqrt(w) n = Div(d, r) g = Mul(n, s) u = Add(g, o)""", 0, "normalizes",
           two=scalar(2), e=scalar(1e-5), s=(8,), o=(8,)),
    tokens("root mean square in parts", """
      q = Mul(t, t) v = ReduceMean<axes = [-1]>(q) w = Add(v, e) r = Sqrt(w) n = Div(t, r)
      u = Mul(n, s)""", e=scalar(1e-5), s=(8,)),
    tokens("RMSNormalization", "u = RMSNormalization<epsilon = 0.1>(t, s)", opset=23, s=(8,)),
    tokens("RMSNormalization, two with one scale", "a = RMSNormalization(t, s) b = Tanh(a) "
           "u = RMSNormalization<epsilon = 0.2>(b, s)", opset=23, s=(8,)),
    tokens("RMSNormalization of what is not zero at rest", "a = Sigmoid(t) "
           "u = RMSNormalization(a, s)", 0, "behind 'Sigmoid'", opset=23, s=(8,)),
    tokens("RMSNormalization with one factor", "u = RMSNormalization(t, s)", 0,
           "it normalizes over", opset=23, s=(1,)),
    tokens("RMSNormalization over several axes", "u = RMSNormalization<axis = 1>(t, s)", 0,
           "it normalizes over", opset=23, length="4", s=(4, 8)),
    images("RMSNormalization beside the channels", "u = RMSNormalization(t, s)", opset=23,
           width="5", s=(5,), last=PADDED),
    Case("SimplifiedLayerNormalization", """(float[N,S,6] x) => (float[a,b,c] y)
           <float[N,S,8] u> {
           [m1] t = MatMul(x, W1) u = SimplifiedLayerNormalization(t, s) y = MatMul(u, W2) }""",
         {"W1": (6, 8), "W2": (8, 5), "s": (8,)}, {"m1": 8}),
    images("LpNormalization over the channels", "u = LpNormalization<axis = 1>(t)", last=PADDED),
    images("LpNormalization over the channels, the first norm",
           "u = LpNormalization<axis = -3, p = 1>(t)", last=PADDED),
    images("LpNormalization beside the channels", "u = LpNormalization<axis = -1>(t)",
           last=PADDED),
    images("LpNormalization over what is not zero at rest", "a = Sigmoid(t) "
           "u = LpNormalization<axis = 1>(a)", 0, "behind 'Sigmoid'"),
    images("GroupNormalization", "u = GroupNormalization<num_groups = 2>(t, s, b)", 0,
           "it normalizes over", opset=21, s=(8,), b=(8,)),
    images("MeanVarianceNormalization", "u = MeanVarianceNormalization<axes = [2, 3]>(t)", 0,
           "it divides by the deviation"),
    images("LRN", "u = LRN<size = 3>(t)", 0, "neighboring channels"),
    images("Softmax over the channels", "u = Softmax<axis = 1>(t)", 0, "it normalizes over"),
    images("Softmax beside the channels", "a = Softmax(t) u = Mul(a, t)"),
    images("Softmax beside the channels is not zero at rest", "[f] u = Softmax(t)", 0,
           "behind 'f'"),
    images("Softmax of opset 11 runs over everything behind its axis", "u = Softmax<axis = 1>(t)",
           0, "it normalizes over", opset=11, height="6", width="5"),
    tokens("Softmax of opset 11 before the channels", "a = Softmax<axis = 1>(t) u = Mul(a, t)", 0,
           "it normalizes over", opset=11),
    images("Softmax of opset 11 beside the channels", "a = Softmax<axis = 3>(t) u = Mul(a, t)",
           opset=11),
    images("LogSoftmax and Hardmax", "a = LogSoftmax<axis = 2>(t) b = Hardmax(a) u = Mul(b, t)"),
]  # fmt: skip


@pytest.mark.parametrize("case", POOLS, ids=str)
def test_pooling(case: Case, assert_exact: AssertExact) -> None:
    check(case, assert_exact)


@pytest.mark.parametrize("case", REDUCTIONS, ids=str)
def test_reduction(case: Case, assert_exact: AssertExact) -> None:
    check(case, assert_exact)


@pytest.mark.parametrize("case", NORMALIZATIONS, ids=str)
def test_normalization(case: Case, assert_exact: AssertExact) -> None:
    check(case, assert_exact)
