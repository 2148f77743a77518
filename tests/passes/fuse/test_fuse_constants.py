"""Constant folding: what is computed at once, and what is left for run time."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from slimctl.graph.session import Level, open_session, run, tapped
from slimctl.passes._fuse_constants import RANDOM
from slimctl.passes.fuse import Fuse


def test_a_chain_runs_as_one(fuse_text):
    fused = fuse_text(
        """g (float[2,3] x) => (float[2,3] y) <float[3] a, float[3] b> {
            [mul] c = Mul(a, b)
            [exp] d = Exp(c)
            [add] y = Add(x, d)
        }"""
    )
    assert fused.lines == ["[add] y = Add (x, d)"]
    assert fused.report.changed == {
        "Exp folded to a constant": 1,
        "Mul folded to a constant": 1,
        "Unused node or initializer removed": 2,
    }


def test_values_are_those_of_onnxruntime_to_the_last_bit(fuse_text):
    fused = fuse_text(
        """g (float[64] x) => (float[64] y) <float[64] a> {
            [tanh] b = Tanh(a)
            [softmax] c = Softmax(b)
            [add] y = Add(x, c)
        }"""
    )
    feeds = {"x": np.zeros(64, np.float32)}
    session = open_session(tapped(fused.before, ["c"]), level=Level.DISABLED, threads=1)
    assert fused.array("c").tobytes() == run(session, feeds)["c"].tobytes()


def test_several_outputs_of_which_one_is_read(fuse_text):
    fused = fuse_text(
        """g (float[1,3] x) => (float[1,3] y) <float[4,3] a, int64[2] parts = {1,3}> {
            [split] b, c = Split<axis=0>(a, parts)
            [add] y = Add(x, b)
        }"""
    )
    assert fused.lines == ["[add] y = Add (x, b)"]
    assert set(fused.after.graph.initializers) == {"b"}


def test_left_out_inputs_and_outputs(fuse_text):
    fused = fuse_text(
        """g (float[1,1,4] x) => (float[1,1,4] y)
            <float[2,1,3] a, float[1,16,3] w, float[1,16,4] r> {
            [lstm] , h, = LSTM<hidden_size=4>(a, w, r)
            [add] y = Add(x, h)
        }"""
    )
    assert fused.lines == ["[add] y = Add (x, h)"]


def test_a_graph_output_stays_the_output_of_a_node(fuse_text):
    fused = fuse_text(
        """g (float[3] x) => (float[3] y, float[3] z) <float[3] a> {
            [neg] y = Neg(a)
            [add] z = Add(x, y)
        }"""
    )
    assert fused.lines == ["[neg_constant] y = Identity (y_constant)", "[add] z = Add (x, y)"]


def test_in_subgraphs(fuse_text):
    """Both the constants of the branch and those of the graph around it count."""
    fused = fuse_text(
        """g (float[3] x, bool flag) => (float[3] y) <float[3] outer> {
            [if] y = If(flag) <
                then_branch = yes () => (float[3] p) <float[3] inner> {
                    [mul] m = Mul(outer, inner)
                    [add] p = Add(x, m)
                },
                else_branch = no () => (float[3] q) { [neg] q = Neg(outer) }
            >
        }"""
    )
    assert fused.op_types == ["If", "Add", "Identity"]


def test_loop_state_is_not_constant(fuse_text):
    """The body's inputs start from constants and change with each iteration."""
    fused = fuse_text(
        """g (float[3] x) => (float[3] y) <int64 count = {4}, bool go = {1}, float[3] start,
            float[3] step> {
            [loop] s = Loop(count, go, start) <
                body = b (int64 i, bool c, float[3] state) => (bool d, float[3] next) {
                    [keep] d = Identity(c)
                    [half] h = Mul(step, step)
                    [add] next = Add(state, h)
                }
            >
            [add2] y = Add(x, s)
        }"""
    )
    assert fused.op_types == ["Loop", "Identity", "Add", "Add"]
    assert fused.report.changed["Mul folded to a constant"] == 1


def test_shapes_may_differ_between_iterations(fuse_text):
    """The state grows, whatever is declared; its shape must be asked in each iteration."""
    fused = fuse_text(
        """g (float[1,2] x) => (float[5,2] y, int64[2] z) <int64 count = {4}, bool go = {1},
            int64[2] start> {
            [loop] y, z = Loop(count, go, x, start) <
                body = b (int64 i, bool c, float[1,2] s, int64[2] t)
                    => (bool d, float[M,2] next, int64[2] u) {
                    [keep] d = Identity(c)
                    [shape] u = Shape(s)
                    [grow] next = Concat<axis=0>(s, x)
                }
            >
        }""",
        run=False,
    )
    assert "Shape" in fused.op_types


@pytest.mark.parametrize(
    "node",
    [
        "[random] r = RandomNormalLike(a)",
        "[random] r = RandomUniformLike(a)",
        "[random] r = Bernoulli(a)",
        "[random] r, mask = Dropout(a, ratio, training)",
    ],
)
def test_random_numbers_are_drawn_at_run_time(fuse_text, node):
    fused = fuse_text(
        f"""g (float[3] x) => (float[3] y) <float[3] a = {{0.5,0.5,0.5}}, float ratio = {{0.5}},
            bool training = {{1}}> {{
            {node}
            [add] y = Add(x, r)
        }}""",
        run=False,
    )
    assert len(fused.op_types) == 2
    assert "random" in fused.reasons


def test_the_list_of_random_operators_is_complete():
    """As far as this version of onnx says it; control flow is known by its subgraphs."""
    kind = onnx.defs.OpSchema.NodeDeterminism.NonDeterministic
    named = {
        schema.name
        for schema in onnx.defs.get_all_schemas()
        if not schema.domain and schema.node_determinism == kind
    }
    # AffineGrid is built from operators that draw nothing.
    assert named - {"If", "Loop", "Scan", "SequenceMap", "AffineGrid"} == RANDOM


def test_what_depends_on_random_numbers_stays(fuse_text):
    fused = fuse_text(
        """g (float[3] x) => (float[3] y) <float[3] a> {
            [random] r = RandomNormal<shape=[3]>()
            [mul] m = Mul(r, a)
            [add] y = Add(x, m)
        }""",
        run=False,
    )
    assert fused.op_types == ["RandomNormal", "Mul", "Add"]


def test_custom_operators_stay(fuse_text):
    fused = fuse_text(
        """<ir_version: 10, opset_import: ["" : 17, "my.domain": 1]>
        g (float[3] x) => (float[3] y) <float[3] a> {
            [custom] r = my.domain.Magic(a)
            [add] y = Add(x, r)
        }""",
        run=False,
    )
    assert fused.op_types == ["Magic", "Add"]
    assert "custom" in fused.reasons


def test_quantized_weights_stay_quantized(fuse_text):
    fused = fuse_text(
        """g (float[1,3,8,8] x) => (float[1,4,6,6] y) <float s = {0.1}, uint8 z = {128},
            int8[4,3,3,3] w, float[4] ws, int8[4] wz, int32[4] b, float[4] bs, int32[4] bz> {
            [q] xq = QuantizeLinear(x, s, z)
            [dq] xd = DequantizeLinear(xq, s, z)
            [dqw] wd = DequantizeLinear<axis=0>(w, ws, wz)
            [dqb] bd = DequantizeLinear<axis=0>(b, bs, bz)
            [conv] y = Conv(xd, wd, bd)
        }""",
        {
            "ws": np.full(4, 0.1, np.float32),
            "wz": np.zeros(4, np.int8),
            "bs": np.full(4, 0.01, np.float32),
            "bz": np.zeros(4, np.int32),
        },
    )
    assert fused.op_types == ["QuantizeLinear", *["DequantizeLinear"] * 3, "Conv"]
    assert not fused.report.changed
    assert not fused.report.skipped


def test_the_quantized_weights_themselves_may_be_rearranged(fuse_text):
    fused = fuse_text(
        """g (float[2,3] x) => (float[2,4] y) <int8[4,3] w, float s = {0.1}, int8 z = {0}> {
            [turn] t = Transpose<perm=[1,0]>(w)
            [dq] d = DequantizeLinear(t, s, z)
            [product] y = MatMul(x, d)
        }"""
    )
    assert fused.op_types == ["DequantizeLinear", "MatMul"]
    assert fused.array("t").dtype == np.int8


def test_quantized_constants_of_training_keep_their_pair(fuse_text):
    fused = fuse_text(
        """g (float[2,3] x) => (float[2,4] y) <float[3,4] w, float s = {0.1}, int8 z = {0}> {
            [q] q = QuantizeLinear(w, s, z)
            [dq] d = DequantizeLinear(q, s, z)
            [product] y = MatMul(x, d)
        }"""
    )
    assert fused.op_types == ["QuantizeLinear", "DequantizeLinear", "MatMul"]


# Size


def test_results_above_the_limit_stay(fuse_text):
    text = """g (float[100] x) => (float[100,100] y) <float[100,1] a, int64[2] s = {100,100}> {
        [expand] e = Expand(a, s)
        [add] y = Add(x, e)
    }"""
    assert fuse_text(text, fold_limit_bytes=40_000).op_types == ["Add"]
    fused = fuse_text(text, fold_limit_bytes=39_999)
    assert fused.op_types == ["Expand", "Add"]
    assert "40000 bytes exceeds fold_limit_bytes" in fused.reasons["expand"]


def test_a_huge_result_is_never_computed(fuse_text):
    fused = fuse_text(
        """g (float x) => (float y) <int64[3] s = {100000,100000,100000}> {
            [fill] f = ConstantOfShape(s)
            [sum] r = ReduceSum<keepdims=0>(f)
            [add] y = Add(x, r)
        }""",
        run=False,
    )
    assert fused.op_types == ["ConstantOfShape", "ReduceSum", "Add"]


def test_the_size_may_follow_from_what_was_folded(fuse_text):
    """The target of Expand is computed; without its values nothing bounds the result."""
    fused = fuse_text(
        """g (float[100] x) => (float[N,100] y) <float[1,100] a, int64[1] n = {7}, int64[1] m = {5},
            int64[1] one = {1}> {
            [max] r = Max(n, m)
            [join] s = Concat<axis=0>(r, one)
            [expand] e = Expand(a, s)
            [add] y = Add(x, e)
        }"""
    )
    assert fused.op_types == ["Add"]


def test_a_size_that_depends_on_values(fuse_text):
    fused = fuse_text(
        """g (int64[1] x) => (int64[1,N] y) <float[4] a = {0, 1, 0, 2}> {
            [find] f = NonZero(a)
            [add] y = Add(x, f)
        }"""
    )
    assert fused.op_types == ["Add"]
    assert fused.array("f").tolist() == [[1, 3]]


def test_what_replaces_as_much_as_it_adds_is_folded_at_any_size(fuse_text):
    text = """g (float[2,30] x) => (float[2,40] y) <float[40,30] w> {
        [turn] t = Transpose<perm=[1,0]>(w)
        [product] y = MatMul(x, t)
    }"""
    assert fuse_text(text, fold_limit_bytes=0).op_types == ["MatMul"]


def test_weights_stored_in_a_narrow_type_stay_narrow(fuse_text):
    fused = fuse_text(
        """g (float[2,30] x) => (float[2,40] y) <float16[30,40] w, float16[40] b> {
            [wide] t = Cast<to=1>(w)
            [bias] c = Cast<to=1>(b)
            [product] m = MatMul(x, t)
            [add] y = Add(m, c)
        }""",
    )
    assert fused.op_types == ["Cast", "MatMul", "Add"]
    assert fused.reasons["wide"] == "it widens a constant that is stored small"


# Shapes


def test_shape_of_a_known_shape(fuse_text):
    fused = fuse_text(
        """g (float[2,3,4] x) => (float[6,4] y) <int64[1] minus = {-1}, int64 axis = {2},
            int64[1] zero = {0}> {
            [shape] s = Shape(x)
            [last] l = Gather(s, axis)
            [lift] u = Unsqueeze(l, zero)
            [join] j = Concat<axis=0>(minus, u)
            [reshape] y = Reshape(x, j)
        }"""
    )
    assert fused.lines == ["[reshape] y = Reshape (x, j)"]
    assert fused.array("j").tolist() == [-1, 4]


def test_known_entries_of_an_open_shape(fuse_text):
    fused = fuse_text(
        """g (float[N,3,4] x) => (float[N,12] y) <int64[1] one = {1}, int64[1] three = {3},
            int64[1] zero = {0}, int64 first = {0}> {
            [shape] s = Shape(x)
            [batch] b = Gather(s, first)
            [lift] u = Unsqueeze(b, zero)
            [tail] t = Slice(s, one, three, zero)
            [all] p = ReduceProd<keepdims=1>(t)
            [join] j = Concat<axis=0>(u, p)
            [reshape] y = Reshape(x, j)
        }"""
    )
    assert fused.op_types == ["Shape", "Gather", "Unsqueeze", "Concat", "Reshape"]
    assert fused.array("p").tolist() == [12]


def test_part_of_a_shape_by_attributes(fuse_text):
    fused = fuse_text(
        """g (float[N,3,4] x) => (int64[2] y, int64 z) <int64 zero = {0}> {
            [shape] y = Shape<start=-2>(x)
            [size] s = Size(y)
            [add] z = Add(s, zero)
        }"""
    )
    assert "Shape" not in fused.op_types


def test_minus_one_in_a_declared_shape_is_no_size(fuse_text):
    fused = fuse_text(
        """g (float[N,3,4] x) => (int64[3] y) {
            [shape] y = Shape(x)
        }"""
    )
    model = fused.before.clone()
    model.graph.inputs[0].shape = ir.Shape([-1, 3, 4])
    assert not Fuse().apply(model, None).changed


def test_a_stale_statement_about_a_shape_is_not_believed(fuse_text):
    """The text says that the product has 9 rows; the weights say 2."""
    fused = fuse_text(
        """g (float[2,3] x) => (int64[2] y) <float[3,4] w, float[9,9] m> {
            [product] m = MatMul(x, w)
            [shape] y = Shape(m)
        }"""
    )
    assert fused.array("y_constant").tolist() == [2, 4]


def test_what_cannot_be_computed_is_left_for_the_runtime_to_report(fuse_text):
    """The failing node sits in a branch that may never run; what is around it is folded."""
    fused = fuse_text(
        """g (float[2] x, bool flag) => (float[N] y) <float[3] a, int64[1] i = {7}, float[2] b> {
            [neg] n = Neg(b)
            [if] y = If(flag) <
                then_branch = yes () => (float[M] p) {
                    [gather] o = Gather(a, i)
                    [exp] p = Exp(o)
                },
                else_branch = no () => (float[2] q) { [add] q = Add(x, n) }
            >
        }""",
        run=False,
    )
    assert "Gather" in fused.op_types and "Neg" not in fused.op_types
    assert "cannot be computed" in fused.reasons["gather"]
