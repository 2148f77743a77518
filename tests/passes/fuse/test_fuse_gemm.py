"""MatMul and Add to Gemm."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("bias", ["[4]", "[1,4]", "[1]", "[1,1]", ""])
@pytest.mark.parametrize("order", ["m, b", "b, m"])
def test_becomes_gemm(fuse_text, bias, order):
    fused = fuse_text(
        f"""g (float[N,3] x) => (float[N,4] y) <float[3,4] w, float{bias} b> {{
            [product] m = MatMul(x, w)
            [bias] y = Add({order})
        }}"""
    )
    node = fused.after.graph[0]
    assert (node.name, node.op_type, node.outputs[0].name) == ("product", "Gemm", "y")
    assert list(node.inputs[2].shape) == [4]
    assert fused.report.changed["MatMul and Add to Gemm"] == 1


def test_the_bias_of_others_keeps_its_shape(fuse_text):
    fused = fuse_text(
        """g (float[N,3] x, float[5,4] z) => (float[N,4] y, float[5,4] u) <float[3,4] w,
            float[1,4] b> {
            [product] m = MatMul(x, w)
            [bias] y = Add(m, b)
            [add] u = Add(z, b)
        }"""
    )
    assert fused.lines == [
        "[product] y = Gemm (x, w, product_bias)",
        "[add] u = Add (z, b)",
    ]


@pytest.mark.parametrize("dtype", ["float16", "double"])
def test_other_float_types(fuse_text, dtype):
    fused = fuse_text(
        f"""g ({dtype}[N,3] x) => ({dtype}[N,4] y) <{dtype}[3,4] w, {dtype}[4] b> {{
            [product] m = MatMul(x, w)
            [bias] y = Add(m, b)
        }}"""
    )
    assert fused.op_types == ["Gemm"]


@pytest.mark.parametrize(
    ("shape", "bias", "reason"),
    [
        ("N,2,3", "[4]", "its input has 3 axes"),
        ("3", "[4]", "its input has 1 axes"),
        ("4,3", "[4,1]", "not one number per column"),
        ("2,3", "[2,4]", "not one number per column"),
        ("4,3", "[1,1,4]", "not one number per column"),
    ],
)
def test_stays(fuse_text, shape, bias, reason):
    result = {"3": "4", "4,3": "1,4,4" if bias == "[1,1,4]" else "4,4"}.get(shape)
    result = result or shape.replace("3", "4")
    fused = fuse_text(
        f"""g (float[{shape}] x) => (float[{result}] y) <float[3,4] w, float{bias} b> {{
            [product] m = MatMul(x, w)
            [bias] y = Add(m, b)
        }}"""
    )
    assert fused.op_types == ["MatMul", "Add"]
    assert reason in fused.reasons["product"]


@pytest.mark.parametrize(
    "text",
    [
        # no constant weights
        "g (float[2,3] x, float[3,4] w) => (float[2,4] y) <float[4] b>",
        # no constant bias
        "g (float[2,3] x, float[4] b) => (float[2,4] y) <float[3,4] w>",
        # no kernel
        "g (int32[2,3] x) => (int32[2,4] y) <int32[3,4] w, int32[4] b>",
        # a stack of matrices
        "g (float[2,3] x) => (float[5,2,4] y) <float[5,3,4] w, float[4] b>",
    ],
)
def test_no_candidates(fuse_text, text):
    fused = fuse_text(f"{text} {{ [product] m = MatMul(x, w) [bias] y = Add(m, b) }}")
    assert fused.op_types == ["MatMul", "Add"]
    assert not fused.report.skipped


def test_another_reader_of_the_product(fuse_text):
    fused = fuse_text(
        """g (float[2,3] x) => (float[2,4] y, float[2,4] z) <float[3,4] w, float[4] b> {
            [product] m = MatMul(x, w)
            [bias] y = Add(m, b)
            [neg] z = Neg(m)
        }"""
    )
    assert fused.op_types == ["MatMul", "Add", "Neg"]


def test_rank_from_a_computed_reshape(fuse_text):
    """No size of the tensor is known, but the target has two entries."""
    fused = fuse_text(
        """g (float[N,M,2] x) => (float[A,4] y) <int64 first = {0}, int64[1] zero = {0},
            int64[1] minus = {-1}, float[6,4] w, float[4] b> {
            [shape] s = Shape(x)
            [one] i = Gather(s, first)
            [lift] u = Unsqueeze(i, zero)
            [join] j = Concat<axis=0>(u, minus)
            [flat] f = Reshape(x, j)
            [product] m = MatMul(f, w)
            [bias] y = Add(m, b)
        }"""
    )
    assert fused.op_types[-1] == "Gemm"


def test_quantized_product_is_left_to_its_pattern(fuse_text):
    fused = fuse_text(
        """g (float[2,3] x) => (float[2,4] y) <int8[3,4] w, float s = {0.1}, int8 z = {0},
            float[4] b> {
            [dq] d = DequantizeLinear(w, s, z)
            [product] m = MatMul(x, d)
            [bias] y = Add(m, b)
        }"""
    )
    assert fused.op_types == ["DequantizeLinear", "MatMul", "Add"]


def test_bias_of_gemm_is_flattened(fuse_text):
    fused = fuse_text(
        """g (float[2,3] x) => (float[2,4] y) <float[3,4] w, float[1,4] b> {
            [gemm] y = Gemm<beta=0.5>(x, w, b)
        }"""
    )
    assert list(fused.after.graph[0].inputs[2].shape) == [4]
    assert fused.after.graph[0].attributes.get_float("beta") == 0.5
