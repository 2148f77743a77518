"""Normalization and per-channel arithmetic folded into the layer before."""

from __future__ import annotations

import numpy as np
import pytest

BN = "float[4] gamma, float[4] beta, float[4] mean, float[4] variance"
POSITIVE = {"variance": np.array([0.5, 1.5, 1e-3, 2.0], np.float32)}


def test_batch_normalization_into_conv(fuse_text):
    fused = fuse_text(
        f"""g (float[N,3,8,8] x) => (float[N,4,6,6] y) <float[4,3,3,3] w, float[4] b, {BN}> {{
            [conv] c = Conv(x, w, b)
            [bn] y = BatchNormalization<epsilon=0.001>(c, gamma, beta, mean, variance)
        }}""",
        POSITIVE,
    )
    assert fused.lines == ["[conv] y = Conv (x, w, b)"]
    assert fused.report.changed["BatchNormalization folded into Conv"] == 1
    assert fused.after.graph[0].metadata_props == {"slimctl.pass": "fuse"}


def test_values_by_hand(fuse_text):
    """gamma / sqrt(variance + epsilon) = 6 / sqrt(8 + 1) = 2."""
    fused = fuse_text(
        """g (float[1,1,2,2] x) => (float[1,1,2,2] y) <
            float[1,1,1,1] w = {3}, float[1] b = {5}, float[1] gamma = {6}, float[1] beta = {7},
            float[1] mean = {11}, float[1] variance = {8}> {
            [conv] c = Conv(x, w, b)
            [bn] y = BatchNormalization<epsilon=1.0>(c, gamma, beta, mean, variance)
        }"""
    )
    assert fused.array("w").item() == 6.0
    assert fused.array("b").item() == 2.0 * (5 - 11) + 7


def test_weights_are_rounded_once(fuse_text):
    """1/3 * 3 in double precision, not in single."""
    fused = fuse_text(
        """g (float[1,1,2,2] x) => (float[1,1,2,2] y) <
            float[1,1,1,1] w = {0.1}, float[1] a = {0.3}, float[1] c = {0.7}> {
            [conv] z = Conv(x, w)
            [m] m = Mul(z, a)
            [d] y = Div(m, c)
        }"""
    )
    single = [np.float32(value) for value in (0.1, 0.3, 0.7)]
    exact = float(single[0]) * float(single[1]) / float(single[2])
    assert fused.array("w").item() == np.float32(exact)


def test_conv_without_bias_gets_one(fuse_text):
    fused = fuse_text(
        f"""g (float[1,3,8,8] x) => (float[1,4,6,6] y) <float[4,3,3,3] w, {BN}> {{
            [conv] c = Conv(x, w)
            [bn] y = BatchNormalization(c, gamma, beta, mean, variance)
        }}""",
        POSITIVE,
    )
    assert fused.lines == ["[conv] y = Conv (x, w, conv_bias)"]


def test_grouped_and_depthwise_conv(fuse_text):
    fused = fuse_text(
        f"""g (float[1,4,8,8] x) => (float[1,4,6,6] y) <float[4,2,3,3] w, float[4,1,1,1] d, {BN}> {{
            [grouped] a = Conv<group=2>(x, w)
            [one] b = BatchNormalization(a, gamma, beta, mean, variance)
            [depthwise] c = Conv<group=4>(b, d)
            [two] y = BatchNormalization(c, gamma, beta, mean, variance)
        }}""",
        POSITIVE,
    )
    assert fused.op_types == ["Conv", "Conv"]


@pytest.mark.parametrize(("group", "outputs"), [(1, 4), (2, 2), (4, 1)])
def test_conv_transpose_scales_axis_1_within_each_group(fuse_text, group, outputs):
    fused = fuse_text(
        f"""g (float[2,8,5,5] x) => (float[2,4,11,11] y) <float[8,{outputs},3,3] w, {BN}> {{
            [up] c = ConvTranspose<group={group}, strides=[2,2]>(x, w)
            [bn] y = BatchNormalization(c, gamma, beta, mean, variance)
        }}""",
        POSITIVE,
    )
    assert fused.op_types == ["ConvTranspose"]


def test_conv_transpose_with_output_padding(fuse_text):
    """Positions that no input reaches hold the bias, which is scaled and shifted as well."""
    fused = fuse_text(
        f"""g (float[1,2,3,3] x) => (float[1,4,7,7] y) <float[2,4,1,1] w, float[4] b, {BN}> {{
            [up] c = ConvTranspose<strides=[3,3]>(x, w, b)
            [bn] y = BatchNormalization(c, gamma, beta, mean, variance)
        }}""",
        POSITIVE,
    )
    assert fused.op_types == ["ConvTranspose"]


@pytest.mark.parametrize("rank", [1, 3])
def test_convolution_of_other_ranks(fuse_text, rank):
    space, kernel = ",".join("6" * rank), ",".join("3" * rank)
    result = ",".join("4" * rank)
    fused = fuse_text(
        f"""g (float[1,3,{space}] x) => (float[1,4,{result}] y) <float[4,3,{kernel}] w, {BN}> {{
            [conv] c = Conv(x, w)
            [bn] y = BatchNormalization(c, gamma, beta, mean, variance)
        }}""",
        POSITIVE,
    )
    assert fused.op_types == ["Conv"]


@pytest.mark.parametrize(
    ("attributes", "weight", "bias"),
    [
        ("alpha=1.0", "[3,4]", "[4]"),
        ("transB=1", "[4,3]", "[1,4]"),
        ("alpha=0.5, beta=3.0", "[3,4]", "[4]"),
        ("beta=3.0", "[3,4]", "[1]"),
    ],
)
def test_batch_normalization_into_gemm(fuse_text, attributes, weight, bias):
    fused = fuse_text(
        f"""g (float[N,3] x) => (float[N,4] y) <float{weight} w, float{bias} b, {BN}> {{
            [fc] c = Gemm<{attributes}>(x, w, b)
            [bn] y = BatchNormalization(c, gamma, beta, mean, variance)
        }}""",
        POSITIVE,
    )
    assert fused.op_types == ["Gemm"]
    assert fused.after.graph[0].attributes.get_float("beta", 1.0) == 1.0
    bias = fused.after.graph[0].inputs[2]
    assert list(bias.shape) == [4]


def test_gemm_with_a_bias_per_row_stays(fuse_text):
    fused = fuse_text(
        f"""g (float[2,3] x) => (float[2,4] y) <float[3,4] w, float[2,1] b, {BN}> {{
            [fc] c = Gemm(x, w, b)
            [bn] y = BatchNormalization(c, gamma, beta, mean, variance)
        }}""",
        POSITIVE,
    )
    assert fused.op_types == ["Gemm", "BatchNormalization"]
    assert "one number per channel" in fused.reasons["bn"]


def test_matmul_add_batch_normalization_becomes_gemm(fuse_text):
    fused = fuse_text(
        f"""g (float[N,3] x) => (float[N,4] y) <float[3,4] w, float[4] b, {BN}> {{
            [product] m = MatMul(x, w)
            [bias] a = Add(m, b)
            [bn] y = BatchNormalization(a, gamma, beta, mean, variance)
        }}""",
        POSITIVE,
    )
    assert fused.lines == ["[product] y = Gemm (x, w, product_bias)"]


def test_matmul_keeps_the_name_of_its_add(fuse_text):
    fused = fuse_text(
        """g (float[2,5,3] x) => (float[2,5,4] y) <float[3,4] w, float[4] b, float[4] s> {
            [product] m = MatMul(x, w)
            [bias] a = Add(m, b)
            [scale] y = Mul(a, s)
        }"""
    )
    assert fused.lines == [
        "[product] product_product = MatMul (x, w)",
        "[bias] y = Add (product_product, product_bias)",
    ]


def test_a_product_that_is_subtracted(fuse_text):
    fused = fuse_text(
        """g (float[2,5,3] x) => (float[2,5,4] y) <float[3,4] w, float[4] b> {
            [product] m = MatMul(x, w)
            [less] y = Sub(b, m)
        }"""
    )
    assert fused.op_types == ["MatMul", "Add"]
    assert (fused.array("w") == -fused.before.graph.initializers["w"].const_value.numpy()).all()


def test_batch_normalization_over_another_axis_than_the_columns_stays(fuse_text):
    """The result of the product is [2, 4, 4]: the channels of the normalization are its rows."""
    fused = fuse_text(
        f"""g (float[2,4,3] x) => (float[2,4,4] y) <float[3,4] w, {BN}> {{
            [product] m = MatMul(x, w)
            [bn] y = BatchNormalization(m, gamma, beta, mean, variance)
        }}""",
        POSITIVE,
    )
    assert fused.op_types == ["MatMul", "BatchNormalization"]
    assert "another axis" in fused.reasons["bn"]


def test_a_chain_is_folded_at_once(fuse_text):
    fused = fuse_text(
        f"""g (float[1,3,8,8] x) => (float[1,4,6,6] y) <float[4,3,3,3] w, {BN},
            float[1,4,1,1] s, float[4,1,1] t, float half = {{0.5}}> {{
            [conv] c = Conv(x, w)
            [mul] d = Mul(s, c)
            [add] e = Add(d, t)
            [bn] f = BatchNormalization(e, gamma, beta, mean, variance)
            [sub] h = Sub(half, f)
            [less] i = Sub(h, t)
            [div] y = Div(i, s)
        }}""",
        POSITIVE,
    )
    assert fused.lines == ["[conv] y = Conv (x, w, conv_bias)"]
    assert fused.report.changed["Sub folded into Conv"] == 2


@pytest.mark.parametrize(
    ("declared", "node"),
    [
        ("float[6,6] k", "Mul(c, k)"),  # one number per position
        ("float[6] k", "Add(c, k)"),  # aligned with the last axis
        ("float[2,4,1,1] k", "Add(c, k)"),  # one per sample
        ("float[1,1,4,1,1] k", "Mul(c, k)"),  # makes the result five-dimensional
        ("float[4,1,1] k", "Div(k, c)"),  # not affine
        ("float[4,1,1] k", "Pow(c, k)"),
    ],
)
def test_other_arithmetic_stays(fuse_text, declared, node):
    five = "5" if "1,1,4" in declared else ""
    shape = "1,2,4,6,6" if five else "2,4,6,6"
    fused = fuse_text(
        f"""g (float[2,3,8,8] x) => (float[{shape}] y) <float[4,3,3,3] w, {declared}> {{
            [conv] c = Conv(x, w)
            [other] y = {node}
        }}""",
        run="Pow" not in node,
    )
    assert len(fused.op_types) == 2
    assert not fused.report.changed


def test_one_channel_widened_by_broadcasting_stays(fuse_text):
    fused = fuse_text(
        """g (float[2,3,8,8] x) => (float[2,4,6,6] y) <float[1,3,3,3] w, float[4,1,1] k> {
            [conv] c = Conv(x, w)
            [mul] y = Mul(c, k)
        }"""
    )
    assert fused.op_types == ["Conv", "Mul"]


def test_division_by_zero_stays(fuse_text):
    fused = fuse_text(
        """g (float[1,1,2,2] x) => (float[1,2,2,2] y) <float[2,1,1,1] w,
            float[2,1,1] k = {1, 0}> {
            [conv] c = Conv(x, w)
            [div] y = Div(c, k)
        }""",
        run=False,
    )
    assert fused.reasons == {"div": "it divides by zero"}


def test_integers_stay(fuse_text):
    fused = fuse_text(
        """g (int32[2,3] x) => (int32[2,4] y) <int32[3,4] w, int32[4] k> {
            [product] m = MatMul(x, w)
            [mul] y = Mul(m, k)
        }"""
    )
    assert fused.op_types == ["MatMul", "Mul"]


# What must not be folded


@pytest.mark.parametrize("outputs", ["y", "y, m, v"])
def test_training_mode_stays(fuse_text, outputs):
    declared = "float[4] m, float[4] v" if "," in outputs else ""
    fused = fuse_text(
        f"""g (float[2,3,8,8] x) => (float[2,4,6,6] y{", " + declared if declared else ""})
            <float[4,3,3,3] w, {BN}> {{
            [conv] c = Conv(x, w)
            [bn] {outputs} = BatchNormalization<training_mode=1>(c, gamma, beta, mean, variance)
        }}""",
        POSITIVE,
        run=bool(declared),  # onnxruntime takes training mode with all outputs only
    )
    assert fused.op_types == ["Conv", "BatchNormalization"]
    assert "training mode" in fused.reasons["bn"]


def test_training_mode_of_old_operator_sets_stays(fuse_text):
    fused = fuse_text(
        f"""<ir_version: 4, opset_import: ["" : 9]>
        g (float[2,3,8,8] x) => (float[2,4,6,6] y) <float[4,3,3,3] w, {BN}> {{
            [conv] c = Conv(x, w)
            [bn] y, m, v, sm, sv = BatchNormalization(c, gamma, beta, mean, variance)
        }}""",
        POSITIVE,
        run=False,
    )
    assert fused.op_types == ["Conv", "BatchNormalization"]
    assert "training mode" in fused.reasons["bn"]


def test_another_use_of_the_convolution(fuse_text):
    fused = fuse_text(
        f"""g (float[1,3,8,8] x) => (float[1,4,6,6] y, float[1,4,6,6] z) <float[4,3,3,3] w, {BN}> {{
            [conv] c = Conv(x, w)
            [bn] y = BatchNormalization(c, gamma, beta, mean, variance)
            [relu] z = Relu(c)
        }}""",
        POSITIVE,
    )
    assert fused.op_types == ["Conv", "BatchNormalization", "Relu"]
    assert fused.reasons["bn"] == "its input is also read elsewhere"


def test_convolution_that_is_a_graph_output(fuse_text):
    fused = fuse_text(
        f"""g (float[1,3,8,8] x) => (float[1,4,6,6] c, float[1,4,6,6] y) <float[4,3,3,3] w, {BN}> {{
            [conv] c = Conv(x, w)
            [bn] y = BatchNormalization(c, gamma, beta, mean, variance)
        }}""",
        POSITIVE,
    )
    assert fused.op_types == ["Conv", "BatchNormalization"]
    assert "also read elsewhere" in fused.reasons["bn"]


def test_use_in_a_subgraph(fuse_text):
    fused = fuse_text(
        f"""g (float[1,3,8,8] x, bool flag) => (float[1,4,6,6] y, float[1,4,6,6] z)
            <float[4,3,3,3] w, {BN}> {{
            [conv] c = Conv(x, w)
            [bn] y = BatchNormalization(c, gamma, beta, mean, variance)
            [if] z = If(flag) <
                then_branch = yes () => (float[1,4,6,6] a) {{ [relu] a = Relu(c) }},
                else_branch = no () => (float[1,4,6,6] b) {{ [neg] b = Neg(y) }}
            >
        }}""",
        POSITIVE,
    )
    assert "BatchNormalization" in fused.op_types


def test_a_pad_in_between(fuse_text):
    """Padding puts zeros behind the bias; folded, the border would hold the shift instead."""
    fused = fuse_text(
        f"""g (float[1,3,8,8] x) => (float[1,4,8,8] y) <float[4,3,3,3] w, {BN},
            int64[8] pads = {{0,0,1,1,0,0,1,1}}> {{
            [conv] c = Conv(x, w)
            [pad] p = Pad(c, pads)
            [bn] y = BatchNormalization(p, gamma, beta, mean, variance)
        }}""",
        POSITIVE,
    )
    assert fused.op_types == ["Conv", "Pad", "BatchNormalization"]
    assert fused.reasons["bn"] == "no layer with weights comes right before"


def test_parameters_or_weights_from_inputs(fuse_text):
    fused = fuse_text(
        f"""g (float[1,3,8,8] x, float[4,3,3,3] w, float[4] shift) => (float[1,4,4,4] y)
            <float[4,4,3,3] v, {BN}> {{
            [one] c = Conv(x, w)
            [bn1] d = BatchNormalization(c, gamma, beta, mean, variance)
            [two] e = Conv(d, v)
            [bn2] y = BatchNormalization(e, gamma, shift, mean, variance)
        }}""",
        POSITIVE,
    )
    assert fused.op_types.count("BatchNormalization") == 2
    assert "no constant float weights" in fused.reasons["bn1"]
    assert fused.reasons["bn2"] == "its parameters are not constant"


def test_an_initializer_that_is_also_an_input_can_be_fed(fuse_text):
    model_text = f"""g (float[1,3,8,8] x, float[4,3,3,3] w) => (float[1,4,6,6] y)
        <float[4,3,3,3] w, {BN}> {{
        [conv] c = Conv(x, w)
        [bn] y = BatchNormalization(c, gamma, beta, mean, variance)
    }}"""
    fused = fuse_text(model_text, POSITIVE)
    assert fused.op_types == ["Conv", "BatchNormalization"]


def test_variance_that_is_not_positive(fuse_text):
    fused = fuse_text(
        f"""g (float[1,3,8,8] x) => (float[1,4,6,6] y) <float[4,3,3,3] w, {BN}> {{
            [conv] c = Conv(x, w)
            [bn] y = BatchNormalization(c, gamma, beta, mean, variance)
        }}""",
        {"variance": np.array([1, -1, 1, 1], np.float32)},
        run=False,
    )
    assert fused.reasons == {"bn": "its variance is not positive"}


# Shared weights


SHARED = f"""g (float[1,3,8,8] x) => (float[1,4,6,6] y, float[1,4,6,6] z)
    <float[4,3,3,3] w, {BN}> {{
    [one] c = Conv(x, w)
    [bn] y = BatchNormalization(c, gamma, beta, mean, variance)
    [two] z = Conv(x, w)
}}"""


def test_shared_weights_are_copied(fuse_text):
    fused = fuse_text(SHARED, POSITIVE)
    assert fused.lines == ["[one] y = Conv (x, w_folded, one_bias)", "[two] z = Conv (x, w)"]


def test_shared_weights_above_the_limit_stay(fuse_text):
    fused = fuse_text(SHARED, POSITIVE, fold_limit_bytes=4 * 3 * 9 * 4 - 1)
    assert fused.op_types == ["Conv", "BatchNormalization", "Conv"]
    assert "shares its weights" in fused.reasons["bn"]
    assert fuse_text(SHARED, POSITIVE, fold_limit_bytes=4 * 3 * 9 * 4).op_types == ["Conv", "Conv"]


def test_copies_that_turn_out_equal_are_stored_once(fuse_text):
    fused = fuse_text(
        f"""g (float[1,3,8,8] x) => (float[1,4,6,6] y, float[1,4,6,6] z) <float[4,3,3,3] w, {BN}> {{
            [one] c = Conv(x, w)
            [bn1] y = BatchNormalization(c, gamma, beta, mean, variance)
            [two] d = Conv(x, w)
            [bn2] z = BatchNormalization(d, gamma, beta, mean, variance)
        }}""",
        POSITIVE,
    )
    assert fused.op_types == ["Conv", "Conv"]
    assert len(fused.after.graph.initializers) == 2


def test_shared_bias_is_not_changed_for_the_other(fuse_text):
    """The name of the new bias is free: a tensor is called b_1 already."""
    fused = fuse_text(
        """g (float[1,3,8,8] x) => (float[1,4,6,6] y, float[1,4,6,6] z)
            <float[4,3,3,3] w, float[4,3,3,3] v, float[4] b, float[4,1,1] t> {
            [b] b_1 = Conv(x, w, b)
            [add] y = Add(b_1, t)
            [two] z = Conv(x, v, b)
        }"""
    )
    assert fused.op_types == ["Conv", "Conv"]
    biases = [node.inputs[2].name for node in fused.after.graph]
    assert biases == ["b_bias", "b"]


# Half precision


HALF = """g (float16[1,1,2,2] x) => (float16[1,2,2,2] y) <float16[2,1,1,1] w,
    float16[2,1,1] k> {
    [conv] c = Conv(x, w)
    [mul] y = Mul(c, k)
}"""


def half(*values: float) -> np.ndarray:
    return np.array(values, np.float16)


def test_half_precision_is_folded(fuse_text):
    fused = fuse_text(
        HALF, {"w": half(1.5, -2).reshape(2, 1, 1, 1), "k": half(3, 0.25).reshape(2, 1, 1)}
    )
    assert fused.op_types == ["Conv"]
    assert fused.array("w").dtype == np.float16


def test_half_precision_must_not_overflow(fuse_text):
    fused = fuse_text(
        HALF,
        {"w": half(60000, 1).reshape(2, 1, 1, 1), "k": half(2, 1).reshape(2, 1, 1)},
        run=False,
    )
    assert fused.reasons == {"mul": "the weights would not be finite in float16"}


def test_a_bias_in_half_precision_must_not_overflow(fuse_text):
    fused = fuse_text(
        """g (float16[1,1,2,2] x) => (float16[1,1,2,2] y) <float16[1,1,1,1] w, float16[1] b,
            float16[1] t> {
            [conv] c = Conv(x, w, b)
            [add] y = Add(c, t)
        }""",
        {"w": half(1).reshape(1, 1, 1, 1), "b": half(60000), "t": half(60000)},
        run=False,
    )
    assert fused.reasons == {"add": "the bias would not be finite in float16"}


def test_half_precision_must_not_fade(fuse_text):
    fused = fuse_text(
        HALF,
        {"w": half(1e-3, 1).reshape(2, 1, 1, 1), "k": half(1e-3, 1).reshape(2, 1, 1)},
    )
    assert fused.reasons == {"mul": "the weights would be too small for float16"}


def test_zero_channels_do_not_fade(fuse_text):
    fused = fuse_text(HALF, {"w": half(0, 1).reshape(2, 1, 1, 1), "k": half(1, 0).reshape(2, 1, 1)})
    assert fused.op_types == ["Conv"]


def test_half_precision_statistics_are_computed_in_double(fuse_text):
    """mean * gamma overflows float16, the folded bias does not."""
    fused = fuse_text(
        """g (float16[1,1,2,2] x) => (float16[1,1,2,2] y) <
            float16[1,1,1,1] w, float16[1] b, float16[1] gamma, float16[1] beta,
            float16[1] mean, float16[1] variance> {
            [conv] c = Conv(x, w, b)
            [bn] y = BatchNormalization(c, gamma, beta, mean, variance)
        }""",
        {
            "w": half(1).reshape(1, 1, 1, 1),
            "b": half(30000),
            "gamma": half(16),
            "beta": half(0),
            "mean": half(30016),
            "variance": half(256),
        },
    )
    assert fused.op_types == ["Conv"]
    assert fused.array("b").item() == -16


def test_double_precision(fuse_text):
    fused = fuse_text(
        """g (double[2,3] x) => (double[2,4] y) <double[3,4] w, double[4] s> {
            [product] m = MatMul(x, w)
            [mul] y = Mul(m, s)
        }"""
    )
    assert fused.lines == ["[product] y = MatMul (x, w)"]
