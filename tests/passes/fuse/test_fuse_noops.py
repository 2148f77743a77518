"""Nodes that change nothing."""

from __future__ import annotations

import numpy as np
import pytest

HEAD = "g (float[N,3,4] x) => (float[N,3,4] y)"
CONSTANTS = """<int64[3] same = {0,3,4}, int64[3] open = {-1,3,4}, int64[3] ones = {1,1,1},
    int64[6] none = {0,0,0,0,0,0}, int64[1] zero = {0}, int64[1] two = {2}, int64[1] four = {4},
    int64[1] far = {9223372036854775807}, int64[1] minus4 = {-4}, float low = {-inf},
    float high = {inf},
    float f0 = {0}, float f1 = {1}, float[3,4] m1, float[1,1,1] t0 = {0},
    float[3] scales = {1,1,1}, float ratio = {0.5}, bool no = {0}, int64[1] part = {4}>"""


@pytest.mark.parametrize(
    "node",
    [
        "Identity(r)",
        "Dropout(r)",
        "Dropout(r, ratio)",
        "Dropout(r, ratio, no)",
        "Cast<to=1>(r)",
        "CastLike(r, f0)",
        "Transpose<perm=[0,1,2]>(r)",
        "Reshape(r, same)",
        "Reshape(r, open)",
        "Expand(r, ones)",
        "Expand(r, two_ones)",
        "Tile(r, ones)",
        "Pad(r, none)",
        'Pad<mode="reflect">(r, none)',
        "Slice(r, zero, far, zero)",
        "Slice(r, zero, four, two)",
        "Slice(r, minus4, far, two)",
        "Clip(r)",
        "Clip(r, low)",
        "Clip(r, low, high)",
        "Concat<axis=1>(r)",
        "Sum(r)",
        "Max(r)",
        "Mean(r)",
        "Add(r, f0)",
        "Add(t0, r)",
        "Sub(r, t0)",
        "Mul(r, f1)",
        "Mul(m1, r)",
        "Div(r, f1)",
        "Pow(r, f1)",
        "Relu(r)",
    ],
)
def test_removed(fuse_text, node):
    constants = CONSTANTS.replace("int64[3] ones", "int64[2] two_ones = {3,1}, int64[3] ones")
    fused = fuse_text(
        f"""{HEAD} {constants} {{
            [relu] r = Relu(x)
            [noop] n = {node}
            [neg] y = Neg(n)
        }}""",
        {"m1": np.ones((3, 4), np.float32)},
    )
    assert fused.lines == ["[relu] r = Relu (x)", "[neg] y = Neg (r)"]
    op_type = node.split("(")[0].split("<")[0]
    assert fused.report.changed[f"{op_type} removed"] == 1


@pytest.mark.parametrize(
    "node",
    [
        "Transpose<perm=[0,2,1]>(r)",
        "Transpose(r)",
        "Reshape<allowzero=1>(r, literal)",
        "Reshape(r, flat)",
        "Expand(r, wider)",
        "Pad(r, some)",
        "Slice(r, zero, three, two)",
        "Slice(r, one, far, two)",
        "Slice(r, zero, far, two, back)",
        "Slice(r, minus, far, two)",
        "Clip(r, f0)",
        "Clip(r, lowest)",
        "Add(r, row)",
        "Add(r, widen)",
        "Sub(f0, r)",
        "Div(f1, r)",
        "Pow(f1, r)",
        "Mul(r, f0)",
        "Concat<axis=1>(r, r)",
        "Sum(r, r)",
    ],
)
def test_stays(fuse_text, node):
    fused = fuse_text(
        f"""g (float[N,3,4] x) => (float[A,B,C] y) <int64[3] literal = {{0,3,4}},
            int64[3] flat = {{0,-1,1}}, int64[4] wider = {{2,1,1,1}},
            int64[6] some = {{0,0,1,0,0,0}},
            int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}},
            int64[1] three = {{3}}, int64[1] far = {{9223372036854775807}},
            int64[1] back = {{-1}}, int64[1] minus = {{-1}},
            float f0 = {{0}}, float f1 = {{1}}, float lowest = {{-3.4028234663852886e38}},
            float[3,4] row, float[2,1,1,1] widen = {{0,0}}> {{
            [abs] r = Neg(x)
            [op] n = {node}
            [neg] y = Sigmoid(n)
        }}""".replace("float[A,B,C] y", "float[A,B,C,D] y" if "wide" in node else "float[A,B,C] y"),
        run="literal" not in node,
    )
    assert len(fused.op_types) == 3


@pytest.mark.parametrize(
    ("declared", "node", "removed"),
    [
        ("float[4] scales = {1,1,1,1}", 'Resize<mode="linear">(r, , scales)', True),
        ("int64[4] sizes = {1,3,6,6}", 'Resize<mode="cubic">(r, , , sizes)', True),
        ("float[4] scales = {1,1,2,1}", "Resize(r, , scales)", False),
        ("int64[4] sizes = {1,3,6,7}", "Resize(r, , , sizes)", False),
        (
            "float[4] scales = {1,1,1,1}",
            'Resize<coordinate_transformation_mode="tf_half_pixel_for_nn">(r, , scales)',
            False,
        ),
    ],
)
def test_resize(fuse_text, declared, node, removed):
    fused = fuse_text(
        f"""g (float[1,3,6,6] x) => (float[1,3,A,B] y) <{declared}> {{
            [relu] r = Relu(x)
            [resize] n = {node}
            [neg] y = Neg(n)
        }}"""
    )
    assert ("Resize" not in fused.op_types) == removed


def test_split_into_one(fuse_text):
    fused = fuse_text(
        """g (float[3,4] x) => (float[3,4] y) <int64[1] parts = {4}> {
            [split] s = Split<axis=1>(x, parts)
            [neg] y = Neg(s)
        }"""
    )
    assert fused.lines == ["[neg] y = Neg (x)"]


def test_empty_parts_of_a_concat(fuse_text):
    fused = fuse_text(
        """g (float[1,2,4] x) => (float[1,2,4] y) <int64[1] zero = {0}, int64[1] one = {1}> {
            [none] e = Slice(x, zero, zero, one)
            [join] j = Concat<axis=1>(e, x)
            [neg] y = Neg(j)
        }"""
    )
    assert fused.lines == ["[neg] y = Neg (x)"]


def test_flatten_of_two_axes(fuse_text):
    fused = fuse_text(
        """g (float[N,4] x) => (float[N,4] y) { [flat] f = Flatten(x) [neg] y = Neg(f) }"""
    )
    assert fused.lines == ["[neg] y = Neg (x)"]


@pytest.mark.parametrize("before", ["Sigmoid(x)", "Relu(x)", "Clip(x, zero)", "Softmax(x)"])
def test_relu_of_what_is_not_negative(fuse_text, before):
    fused = fuse_text(
        f"""g (float[N,4] x) => (float[N,4] y) <float zero = {{0}}> {{
            [first] f = {before}
            [relu] y = Relu(f)
        }}"""
    )
    assert len(fused.op_types) == 1
    assert fused.after.graph[0].outputs[0].name == "y"


def test_relu_after_a_clip_that_lets_negative_values_through(fuse_text):
    fused = fuse_text(
        """g (float[N,4] x) => (float[N,4] y) <float low = {-0.5}> {
            [clip] f = Clip(x, low)
            [relu] y = Relu(f)
        }"""
    )
    assert fused.op_types == ["Clip", "Relu"]


# Dropout


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ("d = Dropout(x, ratio, yes)", "it is in training mode"),
        ("d = Dropout(x, ratio, flag)", "whether it is in training mode is decided at run time"),
    ],
)
def test_dropout_in_training(fuse_text, node, reason):
    fused = fuse_text(
        f"""g (float[4] x, bool flag) => (float[4] y) <float ratio = {{0.5}}, bool yes = {{1}}> {{
            [drop] {node}
            [neg] y = Neg(d)
        }}""",
        run=False,
    )
    assert fused.op_types == ["Dropout", "Neg"]
    assert fused.reasons["drop"] == reason


def test_dropout_whose_mask_is_read(fuse_text):
    fused = fuse_text(
        """g (float[4] x) => (float[4] y, bool[4] mask) { [drop] y, mask = Dropout(x) }"""
    )
    assert fused.op_types == ["Dropout"]
    assert fused.reasons["drop"] == "more than its first output is read"


def test_dropout_of_old_operator_sets(fuse_text):
    fused = fuse_text(
        """<ir_version: 4, opset_import: ["" : 9]>
        g (float[4] x) => (float[4] y) { [drop] d = Dropout(x) [neg] y = Neg(d) }"""
    )
    assert fused.op_types == ["Neg"]


def test_clip_of_old_operator_sets_bounds_infinity(fuse_text):
    fused = fuse_text(
        """<ir_version: 4, opset_import: ["" : 9]>
        g (float[4] x) => (float[4] y) { [clip] d = Clip(x) [neg] y = Neg(d) }"""
    )
    assert fused.op_types == ["Clip", "Neg"]


# Names


def test_an_output_keeps_its_name(fuse_text):
    fused = fuse_text(
        """g (float[4] x) => (float[4] y) { [relu] r = Relu(x) [same] y = Identity(r) }"""
    )
    assert fused.lines == ["[relu] y = Relu (x)"]


def test_readers_of_the_renamed_tensor_follow(fuse_text):
    fused = fuse_text(
        """g (float[4] x) => (float[4] y, float[4] z) {
            [relu] r = Relu(x)
            [neg] z = Neg(r)
            [same] y = Identity(r)
        }"""
    )
    assert fused.lines == ["[relu] y = Relu (x)", "[neg] z = Neg (y)"]


@pytest.mark.parametrize(
    "nodes",
    [
        "[same] y = Identity(x) [neg] z = Neg(x)",  # an input
        "[same] y = Identity(k) [neg] z = Neg(x)",  # a constant
        "[neg] z = Neg(x) [same] y = Identity(z)",  # another output
    ],
)
def test_a_second_name_that_is_needed(fuse_text, nodes):
    fused = fuse_text(f"g (float[4] x) => (float[4] y, float[4] z) <float[4] k> {{ {nodes} }}")
    assert sorted(fused.op_types) == ["Identity", "Neg"]
    assert fused.reasons["same"] == "a graph output has its name from this node"


def test_results_of_a_branch_stay_in_the_branch(fuse_text):
    """A branch cannot give out a tensor of the graph around it."""
    fused = fuse_text(
        """g (float[4] x, bool flag) => (float[4] y) {
            [relu] r = Relu(x)
            [if] y = If(flag) <
                then_branch = yes () => (float[4] p) { [same] p = Identity(r) },
                else_branch = no () => (float[4] q) { [neg] n = Neg(r) [also] q = Identity(n) }
            >
        }"""
    )
    assert fused.op_types == ["Relu", "If", "Identity", "Neg"]


def test_integers_too(fuse_text):
    fused = fuse_text(
        """g (int64[4] x) => (int64[4] y) <int64 one = {1}, int64 zero = {0},
            int64 least = {-9223372036854775808}> {
            [mul] a = Mul(x, one)
            [add] b = Add(zero, a)
            [clip] c = Clip(b, least)
            [neg] y = Neg(c)
        }"""
    )
    assert fused.op_types == ["Neg"]


# Movement


def test_transposes_are_merged(fuse_text):
    fused = fuse_text(
        """g (float[2,3,4] x) => (float[3,4,2] y) {
            [one] a = Transpose<perm=[1,0,2]>(x)
            [two] y = Transpose<perm=[0,2,1]>(a)
        }"""
    )
    assert fused.lines == ["[two] y = Transpose <perm: ints = [1, 2, 0]> (x)"]


def test_transposes_that_cancel_out(fuse_text):
    fused = fuse_text(
        """g (float[2,3,4] x) => (float[2,3,4] y, float[2,4,3] z) {
            [one] a = Transpose<perm=[0,2,1]>(x)
            [two] b = Transpose<perm=[0,2,1]>(a)
            [neg] y = Neg(b)
            [abs] z = Neg(a)
        }"""
    )
    assert fused.op_types == ["Transpose", "Neg", "Neg"]


def test_transposes_in_reverse_order(fuse_text):
    fused = fuse_text(
        """g (float[2,3,4] x) => (float[2,3,4] y) {
            [one] a = Transpose(x)
            [two] b = Transpose(a)
            [neg] y = Neg(b)
        }"""
    )
    assert fused.lines == ["[neg] y = Neg (x)"]


@pytest.mark.parametrize("first", ["Reshape(x, six)", "Flatten(x)", "Unsqueeze(x, zero)"])
def test_only_the_last_reshape_counts(fuse_text, first):
    fused = fuse_text(
        f"""g (float[N,3,4] x) => (float[M,2,6] y) <int64[2] six = {{-1,6}}, int64[1] zero = {{0}},
            int64[3] last = {{-1,2,6}}> {{
            [one] a = {first}
            [two] y = Reshape(a, last)
        }}"""
    )
    assert fused.lines == ["[two] y = Reshape (x, last)"]


def test_a_reshape_that_copies_a_size_needs_the_one_before(fuse_text):
    fused = fuse_text(
        """g (float[N,3,4] x) => (float[M,2,3] y) <int64[2] six = {-1,6}, int64[3] last = {0,2,3}> {
            [one] a = Reshape(x, six)
            [two] y = Reshape(a, last)
        }"""
    )
    assert fused.op_types == ["Reshape", "Reshape"]


def test_a_scalar_output_keeps_its_shape(fuse_text):
    fused = fuse_text(
        """<ir_version: 10, opset_import: ["" : 17, "my.domain" : 1]>
        g (float x) => (float y) { [custom] r = my.domain.Magic(x) [same] y = Identity(r) }""",
        run=False,
    )
    assert fused.op_types == ["Magic"]
