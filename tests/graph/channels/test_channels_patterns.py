"""Whole patterns of networks, control flow, and models that are unusual as a whole."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from slimctl.graph.channels import analyze, group_units
from slimctl.graph.shapes import infer_shapes
from tests.graph.channels.exactness import AssertExact
from tests.graph.channels.table import Case, Weight, check, images, ints, parsed, scalar, tokens

PADDED = "<pads = [1,1,1,1]>"
_ATTENTION = {"k": ints(0, 0, 4, 2), "l": ints(0, 0, 8), "root": scalar(1.4142135)}
_QKV = {"Wq": (6, 8), "Wk": (6, 8), "Wv": (6, 8)}


def _attention(
    name: str,
    split: str,
    free: Mapping[str, int],
    *,
    scale: str = "c = Div(s, root)",
    merge: str = "o = Transpose<perm = [0,2,1,3]>(w) u = Reshape(o, l)",
    whole_blocks: bool = False,
    **weights: Weight,
) -> Case:
    """Attention with four heads of width 2; q, k and v come from x by the nodes in ``split``."""
    text = f"""(float[N,S,6] x) => (float[a,b,c] y) {{
      {split}
      s = MatMul(qh, kh) {scale} p = Softmax(c) w = MatMul(p, vh)
      {merge}
      y = MatMul(u, Wo) }}"""
    return Case(
        name, text, {**_ATTENTION, "Wo": (8, 5), **weights}, free, whole_blocks=whole_blocks
    )


_LAYERS = "[q] q0 = MatMul(x, Wq) [k] k0 = MatMul(x, Wk) [v] v0 = MatMul(x, Wv)"
_HEADS = """q1 = Reshape(q0, k) k1 = Reshape(k0, k) v1 = Reshape(v0, k)
  qh = Transpose<perm = [0,2,1,3]>(q1) kh = Transpose<perm = [0,2,3,1]>(k1)
  vh = Transpose<perm = [0,2,1,3]>(v1)"""
_STACKED = """[qkv] z = MatMul(x, Wz) r = Reshape(z, five) e = Transpose<perm = [2,0,3,1,4]>(r)
  qh = Gather(e, n0) k1 = Gather(e, n1) vh = Gather(e, n2) kh = Transpose<perm = [0,1,3,2]>(k1)"""
_SCALE = """d = Shape(qh) last = Gather(d, minus) f = Cast<to = 1>(last) g = Sqrt(f)
  c = Div(s, g)"""
_INDICES = {"n0": np.array(0), "n1": np.array(1), "n2": np.array(2), "five": ints(0, 0, 3, 4, 2)}

ATTENTION = [
    _attention("attention, width of the heads", _LAYERS + _HEADS, {"q": 2, "k": 2, "v": 2}, **_QKV),
    _attention("attention, whole heads", _LAYERS + _HEADS, {"q": 4, "k": 4, "v": 4},
               whole_blocks=True, **_QKV),
    _attention("attention, scaled by the width", _LAYERS + _HEADS, {"q": 2, "k": 2, "v": 2},
               scale=_SCALE, minus=np.array(-1), **_QKV),
    _attention("attention with a mask", _LAYERS + _HEADS, {"q": 4, "k": 4, "v": 4},
                    scale="a = Div(s, root) n = Shape(x) i = Gather(n, one) j = Range(nil, i, one) "
                    "row = Unsqueeze(j, zero) column = Unsqueeze(j, first) "
                    "b = Less(column, row) c = Where(b, far, a)",
                    one=np.array(1), nil=np.array(0), zero=ints(0), first=ints(1),
                    far=scalar(-1e9), whole_blocks=True, **_QKV),
    _attention("attention with biases", _LAYERS.replace("q0 =", "q9 =") + "q0 = Add(q9, Bq)"
               + _HEADS, {"q": 2, "k": 2, "v": 2}, Bq=(8,), **_QKV),
    _attention("attention, one matrix split", "[qkv] z = MatMul(x, Wz) "
               "q0, k0, v0 = Split<axis = -1>(z)" + _HEADS, {"qkv": 4}, Wz=(6, 24)),
    _attention("attention, one matrix split, whole heads", "[qkv] z = MatMul(x, Wz) "
               "q0, k0, v0 = Split<axis = -1>(z)" + _HEADS, {"qkv": 4}, Wz=(6, 24),
               whole_blocks=True),
    _attention("attention, one matrix in three by Reshape", _STACKED, {"qkv": 2}, Wz=(6, 24),
               **_INDICES),
    _attention("attention, one matrix in three by Reshape, whole heads", _STACKED, {"qkv": 4},
               Wz=(6, 24), whole_blocks=True, **_INDICES),
    _attention("attention over heads in the batch", _LAYERS + """
      n = Shape<end = 2>(x) m = Concat<axis = 0>(n, four, two)
      q1 = Reshape(q0, m) k1 = Reshape(k0, m) v1 = Reshape(v0, m)
      q2 = Transpose<perm = [0,2,1,3]>(q1) k2 = Transpose<perm = [0,2,3,1]>(k1)
      v2 = Transpose<perm = [0,2,1,3]>(v1)
      qh = Identity(q2) kh = Identity(k2) vh = Identity(v2)""", {"q": 2, "k": 2, "v": 2},
               four=ints(4), two=ints(2), **_QKV),
    _attention("attention with one head", _LAYERS + "qh = Identity(q0) vh = Identity(v0) "
               "kh = Transpose<perm = [0,2,1]>(k0)", {"q": 8, "k": 8, "v": 8},
               merge="u = Identity(w)", **_QKV),
    _attention("attention with shared keys and values", "[q] q0 = MatMul(x, Wq) "
               "[k] k1 = MatMul(x, Wk) [v] v1 = MatMul(x, Wv) q1 = Reshape(q0, k) "
               "qh = Transpose<perm = [0,2,1,3]>(q1) k2 = Transpose<perm = [0,2,1]>(k1) "
               "kh = Unsqueeze(k2, axis) vh = Unsqueeze(v1, axis)", {"q": 2, "k": 2, "v": 2},
               axis=ints(1), Wq=(6, 8), Wk=(6, 2), Wv=(6, 2)),
]  # fmt: skip

STREAMS = [
    images("residual", """
      r = Relu(t) [c3] a = Conv<pads = [1,1,1,1]>(r, W3) b = Relu(a)
      [c4] c = Conv<pads = [1,1,1,1]>(b, W4) d = Add(c, t) e = Relu(d)
      [c5] f = Conv<pads = [1,1,1,1]>(e, W5) u = Add(d, f)""",
           {"c1": 8, "c3": 6, "c4": 8, "c5": 8}, last=PADDED, W3=(6, 8, 3, 3), W4=(8, 6, 3, 3),
           W5=(8, 8, 3, 3)),
    images("inverted residual", """
      [e] a = Conv(t, We) b = Clip(a, zero, six) [d] c = Conv<group = 24, pads = [1,1,1,1]>(b, Wd)
      f = Clip(c, zero, six) [p] g = Conv(f, Wp) u = Add(t, g)""", {"c1": 8, "e": 24, "p": 8},
           last=PADDED, We=(24, 8, 1, 1), Wd=(24, 1, 3, 3), Wp=(8, 24, 1, 1), zero=scalar(0),
           six=scalar(6)),
    tokens("transformer block without a norm", """
      [f1] a = MatMul(t, Wf) b = Add(a, Bf) c = Erf(b) d = Mul(b, c) [f2] e = MatMul(d, Wg)
      u = Add(t, e)""", {"m1": 8, "f1": 16, "f2": 8}, Wf=(8, 16), Bf=(16,), Wg=(16, 8)),
    tokens("transformer block with a norm", """
      n = LayerNormalization(t, s, o) [f1] a = MatMul(n, Wf) b = Relu(a) [f2] e = MatMul(b, Wg)
      u = Add(t, e)""", {"f1": 16}, "it normalizes over", Wf=(8, 16), Wg=(16, 8), s=(8,), o=(8,)),
    tokens("gated unit", "[g] a = MatMul(t, Wg) b = Sigmoid(a) c = Mul(a, b) "
           "[h] d = MatMul(t, Wh) u = Mul(c, d)", {"m1": 8, "g": 9, "h": 9}, Wg=(8, 9), Wh=(8, 9),
           reads=9),
    tokens("gated linear unit, split", "[g] a = MatMul(t, Wg) b, c = Split<axis = -1>(a) "
           "d = Sigmoid(b) u = Mul(c, d)", {"m1": 8, "g": 9}, Wg=(8, 18), reads=9),
    Case("an output in between", """(float[N,3,H,W] x) => (float[a,b,c,d] y, float[e,f,g,h] r) {
           [c1] t = Conv<pads = [1,1,1,1]>(x, W1) r = Relu(t)
           [c3] s = Conv<pads = [1,1,1,1]>(r, W3) u = Relu(s) y = Conv(u, W2) }""",
         {"W1": (8, 3, 3, 3), "W3": (8, 8, 3, 3), "W2": (5, 8, 1, 1)}, {"c3": 8},
         "r: it is an output"),
    Case("an output in between that ties a stream",
         """(float[N,3,H,W] x) => (float[a,b,c,d] y, float[e,f,g,h] r) {
           [c1] t = Conv<pads = [1,1,1,1]>(x, W1) [c3] s = Conv<pads = [1,1,1,1]>(t, W3)
           r = Add(t, s) y = Conv(r, W2) }""",
         {"W1": (8, 3, 3, 3), "W3": (8, 8, 3, 3), "W2": (5, 8, 1, 1)}, {}, "r: it is an output"),
    Case("a bias that is an output", """(float[N,3,H,W] x) => (float[a,b,c,d] y, float[8] B1) {
           t = Conv(x, W1, B1) y = Conv(t, W2) }""",
         {"W1": (8, 3, 3, 3), "B1": (8,), "W2": (5, 8, 1, 1)}, {}, "'B1' is read elsewhere"),
    Case("two channels everywhere", """(float[N,3,H,W] x) => (float[a,b] y) {
           [c1] t = Conv<pads = [1,1,1,1]>(x, W1, B1) n = BatchNormalization(t, s, b, m, v)
           p = PRelu(n, q) k = Add(p, o) [d] e = Conv<group = 2, pads = [1,1,1,1]>(k, Wd, Bd)
           i = InstanceNormalization(e, s2, b2) z = GlobalAveragePool(i) [g] h = Conv(z, Wg, Bg)
           j = Sigmoid(h) r = Mul(i, j) sh = Shape(r) ex = Expand(z, sh) w = Add(r, ex)
           cc = Concat<axis = 1>(w, t) f = GlobalMaxPool(cc) fl = Flatten(f) y = Gemm(fl, W2, B2)
         }""",
         {"W1": (2, 3, 3, 3), "B1": (2,), "s": (2,), "b": (2,), "m": (2,), "v": ints(1, 2).astype(
          np.float32), "q": (2, 1, 1), "o": (1, 2, 1, 1), "Wd": (2, 1, 3, 3), "Bd": (2,),
          "s2": (2,), "b2": (2,), "Wg": (2, 2, 1, 1), "Bg": (2,), "W2": (4, 5), "B2": (5,)},
         {"c1": 2, "g": 2}),
    Case("two units everywhere", """(float[N,S,6] x) => (float[a,b,c] y) {
           [m1] t = MatMul(x, W1) a = Reshape(t, k) b = Transpose<perm = [0,2,1,3]>(a)
           c = Relu(b) d = Transpose<perm = [0,2,1,3]>(c) e = Reshape(d, l) f = Sigmoid(e)
           g = Gather<axis = -1>(f, order) y = MatMul(g, W2) }""",
         {"W1": (6, 2), "W2": (2, 5), "k": ints(0, 0, 1, 2), "l": ints(0, 0, 2),
          "order": ints(1, 0)}, {"m1": 2}),
    Case("dimensions of one name", """(float[4,4,6] x) => (float[a,b,c] y) {
           [m1] t = MatMul(x, W1) n = Shape<end = 2>(x) d = Concat<axis = 0>(n, two, four)
           a = Reshape(t, d) b = Transpose<perm = [1,0,2,3]>(a) c = Relu(b)
           e = Concat<axis = 0>(n, open) u = Reshape(c, e) y = MatMul(u, W2) }""",
         {"W1": (6, 8), "W2": (8, 5), "two": ints(2), "four": ints(4), "open": ints(-1)},
         {"m1": 4}),
    Case("dimensions that change places without a Transpose",
         """(float[N,S,6] x) => (float[a,b,c] y) {
           [m1] t = MatMul(x, W1) n = Shape(x) m = Gather(n, back) d = Concat<axis = 0>(m, eight)
           a = Reshape(t, d) u = Relu(a) y = MatMul(u, W2) }""",
         {"W1": (6, 8), "W2": (8, 5), "back": ints(1, 0), "eight": ints(8)}, {"m1": 8}),
]  # fmt: skip

CONTROL_FLOW = [
    Case("branches of an If", """(float[N,3,H,W] x, bool q) => (float[a,b,c,d] y) {
           [c1] t = Conv(x, W1) y = If(q) <
             then_branch = yes () => (float[a,b,c,d] p) {
               [c3] k = Conv(t, W3) l = Sigmoid(k) p = Conv(l, W4) },
             else_branch = no () => (float[a,b,c,d] o) { r = Relu(t) o = Conv(r, W2) }> }""",
         {"W1": (8, 3, 3, 3), "W2": (5, 8, 1, 1), "W3": (6, 8, 1, 1), "W4": (5, 6, 1, 1)},
         {"c1": 8, "c3": 6}),
    Case("branches that give channels", """(float[N,3,H,W] x, bool q) => (float[a,b,c,d] y) {
           [c1] t = Conv(x, W1) u = If(q) <
             then_branch = yes () => (float[a,b,c,d] p) { p = Relu(t) },
             else_branch = no () => (float[a,b,c,d] o) { o = Tanh(t) }>
           y = Conv(u, W2) }""",
         {"W1": (8, 3, 3, 3), "W2": (5, 8, 1, 1)}, {}, "an output of a branch"),
    Case("body of a Loop", """(float[N,3,H,W] x, float[N,5,H,W] z) => (float[a,b,c,d] y) {
           [c1] t = Conv(x, W1) [c3] s = Conv(x, W3) w = Relu(s) v = Conv(w, W2) g = Add(v, z)
           y = Loop(three, true, g) <body = step (int64 i, bool a, float[a,b,c,d] f)
             => (bool e, float[a,b,c,d] h) { e = Identity(a) k = Conv(t, W2) h = Add(f, k) }> }""",
         {"W1": (8, 3, 1, 1), "W2": (5, 8, 1, 1), "W3": (8, 3, 1, 1), "three": np.array(3),
          "true": np.array(True)}, {}, "goes into the body of a loop"),
    Case("a layer beside a Loop", """(float[N,3,H,W] x) => (float[a,b,c,d] y) {
           [c1] t = Conv(x, W1) r = Relu(t) v = Conv(r, W2)
           y = Loop(three, true, v) <body = step (int64 i, bool a, float[a,b,c,d] f)
             => (bool e, float[a,b,c,d] h) { e = Identity(a) h = Add(f, f) }> }""",
         {"W1": (8, 3, 1, 1), "W2": (5, 8, 1, 1), "three": np.array(3), "true": np.array(True)},
         {"c1": 8}),
    Case("a weight that a Loop reads too", """(float[N,3,H,W] x, float[N,8,H,W] z)
           => (float[a,b,c,d] y, float[e,f,g,h] w) {
           [c1] t = Conv(x, W1, B1) y = Conv(t, W2)
           w = Loop(three, true, z) <body = step (int64 i, bool a, float[a,b,c,d] f)
             => (bool e, float[a,b,c,d] h) { e = Identity(a) k = Unsqueeze(B1, axes)
               h = Add(f, k) }> }""",
         {"W1": (8, 3, 1, 1), "B1": (8,), "W2": (5, 8, 1, 1), "three": np.array(3),
          "true": np.array(True), "axes": ints(1, 2)}, {}, "'B1' is read elsewhere"),
]  # fmt: skip


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention(case: Case, assert_exact: AssertExact) -> None:
    check(case, assert_exact)


@pytest.mark.parametrize("case", STREAMS, ids=str)
def test_streams(case: Case, assert_exact: AssertExact) -> None:
    check(case, assert_exact)


@pytest.mark.parametrize("case", CONTROL_FLOW, ids=str)
def test_control_flow(case: Case, assert_exact: AssertExact) -> None:
    check(case, assert_exact)


def test_an_operator_without_a_rule_is_named() -> None:
    case = images("", "v = my.own.Twist(t) [c3] w = Conv(v, W3) u = Relu(w)", W3=(8, 8, 1, 1))
    model = ir.from_proto(case.proto())
    infer_shapes(model)
    channels = analyze(model)
    reasons = {block.reason for block in channels.blocked().values()}
    assert "there is no rule for the operator Twist" in reasons
    names = {node.name: group for group in group_units(channels) for node in group.layers}
    assert len(names["c1"].free) == 0
    assert len(names["c3"].free) == 8


def _in_constant_nodes(proto: onnx.ModelProto, *, as_lists: bool) -> onnx.ModelProto:
    """The same model with its weights in Constant nodes, vectors as plain lists of numbers."""
    moved = onnx.ModelProto()
    moved.CopyFrom(proto)
    nodes = []
    for item in moved.graph.initializer:
        array = numpy_helper.to_array(item)
        if as_lists and array.ndim == 1 and array.dtype == np.float32:
            nodes.append(helper.make_node("Constant", [], [item.name], value_floats=list(array)))
        elif as_lists and array.ndim == 1 and array.dtype == np.int64:
            nodes.append(helper.make_node("Constant", [], [item.name], value_ints=list(array)))
        else:
            nodes.append(helper.make_node("Constant", [], [item.name], value=item))
    layers = list(moved.graph.node)
    del moved.graph.initializer[:], moved.graph.node[:]
    moved.graph.node.extend([*nodes, *layers])
    return moved


@pytest.mark.parametrize("as_lists", [False, True])
def test_constant_nodes(as_lists: bool, assert_exact: AssertExact) -> None:
    case = images(
        "",
        """a = Add(t, k) s = Sigmoid(a) f = Reshape(s, l) [g] h = Gemm(f, W3, B3)
           u = Unsqueeze(h, axes)""",
        height="3", width="2", reads=6, k=(8, 1, 1), l=ints(0, 48), W3=(48, 6), B3=(6,),
        axes=ints(2, 3),
    )  # fmt: skip
    found = assert_exact(_in_constant_nodes(case.proto(), as_lists=as_lists))
    assert (found.free_of("c1"), found.free_of("g")) == (8, 6)
    assert found.removed == 7


NARROW = """(KIND[N,3,H,W] x) => (KIND[a,b] y) {
  [c1] t = Conv<pads = [1,1,1,1]>(x, W1, B1) s = Sigmoid(t) [c3] c = Conv(s, W3, B3) r = Relu(c)
  p = GlobalAveragePool(r) f = Flatten(p) m = ReduceMean<axes = [1]>(f) g = Mul(f, m)
  h = Sigmoid(g) [g] y = Gemm<alpha = 0.5, beta = 0.5>(h, W2, B2) }"""


@pytest.mark.parametrize("kind", ["float16", "float", "double"])
def test_types(kind: str, assert_exact: AssertExact) -> None:
    dtype = {"float16": np.float16, "float": np.float32, "double": np.float64}[kind]
    weights: dict[str, Weight] = {
        "W1": (8, 3, 3, 3), "B1": (8,), "W3": (6, 8, 2, 2), "B3": (6,), "W2": (6, 5), "B2": (5,),
    }  # fmt: skip
    text = NARROW.replace("KIND", kind)
    if kind == "double":  # onnxruntime has no Conv for it
        text = """(double[N,6] x) => (double[a,b] y) { [c1] t = Gemm(x, V1, B1) s = Sigmoid(t)
          [c3] f = Gemm(s, V3, B3) m = ReduceMean<axes = [1]>(f) h = Mul(f, m)
          y = Gemm<alpha = 0.5, beta = 0.5>(h, W2, B2) }"""
        weights |= {"V1": (6, 8), "V3": (8, 6)}
    proto = parsed(text, weights, dtype=dtype)
    found = assert_exact(proto)
    assert (found.free_of("c1"), found.free_of("c3")) == (8, 6)
    kinds = {v.dtype for v in found.model.graph.initializers.values() if v.shape and len(v.shape)}
    assert kinds == {ir.DataType.from_numpy(np.dtype(dtype))}


@pytest.mark.parametrize("ratio", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_other_ratios(ratio: float, seed: int, assert_exact: AssertExact) -> None:
    """What stays can be irregular, or a single channel."""
    for case in (
        images("", "a = Slice(t, k1, k7, k1) u = Slice(a, k0, k6, k1, k2)", reads=3, k0=ints(0),
               k1=ints(1), k2=ints(2), k6=ints(6), k7=ints(7)),
        images("", "a = Slice(t, far, k0, k1, back) b = Relu(a) u = Slice(b, k0, far2, k1, k3)",
               reads=3, far=ints(7), k0=ints(0), k1=ints(1), k3=ints(3), far2=ints(2**60),
               back=ints(-1)),
        images("", "a, b = Split<axis = 1>(t) c = Concat<axis = 1>(b, t, a) "
               "u = Gather<axis = 1>(c, k)", reads=5, k=ints(15, 1, 8, -7, 3)),
    ):  # fmt: skip
        found = assert_exact(case.proto(), ratio=ratio, seed=seed)
        assert found.removed > 0


def test_a_backward_slice_may_have_to_reach_the_first_channel(assert_exact: AssertExact) -> None:
    """Its end cannot be written as a number: -1 is the last."""
    case = images("", "u = Slice(t, k7, far, k1, back)", k7=ints(7), far=ints(-9), k1=ints(1),
                  back=ints(-1))  # fmt: skip
    assert assert_exact(case.proto(), ratio=1.0).removed == 7


def test_positions_that_are_irregular_are_gathered(assert_exact: AssertExact) -> None:
    case = images("", "u = Slice(t, k0, k8, k1, k2)", reads=4, k0=ints(0), k8=ints(8), k1=ints(1),
                  k2=ints(2))  # fmt: skip
    kinds = set()
    for seed in range(6):
        found = assert_exact(case.proto(), ratio=0.25, seed=seed)
        kinds |= {node.op_type for node in found.model.graph}
    assert "Gather" in kinds


def test_nothing_is_rewritten_where_nothing_goes(assert_exact: AssertExact) -> None:
    """A model without free units comes back as it was."""
    case = images(
        "", """a = Slice(t, k1, k7, k1) b, c = Split<axis = 1>(a) d = Concat<axis = 1>(b, c)
        m = ReduceMean<axes = [1]>(d) e = Mul(d, m) f = Gather<axis = 1>(e, k) u = Relu(f)""",
        reads=4, k1=ints(1), k7=ints(7), k=ints(0, 1, 2, 3),
    )  # fmt: skip
    found = assert_exact(case.proto(), ratio=0.0)
    assert found.free > 0
    assert [n.op_type for n in found.model.graph] == [n.op_type for n in case.proto().graph.node]
    assert sorted(found.model.graph.initializers) == sorted(case.weights.keys())
