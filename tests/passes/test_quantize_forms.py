"""Forms of operators that onnxruntime treats specially, found by trying to break the pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.core.contract import PassReport
from slimctl.core.errors import PassFailedError
from slimctl.graph.edit import const_array
from slimctl.graph.session import Level
from slimctl.passes.bias_correction import BiasCorrection
from slimctl.passes.quantize_static import QuantizeStatic

X = "(float[2,4,8,8] x) => "
WEIGHTS = {
    "w1": (4, 4, 3, 3),
    "w2": (4, 4, 1, 1),
    "w3": (4, 8, 1, 1),
    "m1": (16, 16),
    "m2": (16, 16),
    "b": (16,),
}
SCALARS = {"zero": 0.0, "one": 1.0, "six": 6.0, "tiny": 1e-38}

# Name: (signature, body, how many integer kernels for Conv and MatMul there must be)
FORMS: dict[str, tuple[str, str, int]] = {
    "static_matmul_bias": (
        "(float[2,3,16] x) => (float[2,3,16] y)",
        "m = MatMul(x, m1) a = Add(m, b) r = Tanh(a) n = MatMul(r, m2) y = Add(n, b)",
        2,
    ),
    "matmul_residual": (
        "(float[4,16] x) => (float[4,16] y)",
        "h = Tanh(x) m = MatMul(h, m1) y = Add(m, h)",
        1,
    ),
    "relu_beside_signed_concat": (
        X + "(float[2,4,8,8] y)",
        "p = Conv<pads=[1,1,1,1]>(x, w1) r = Relu(p) q = Conv(x, w2) "
        "c = Concat<axis=1>(r, q) y = Conv(c, w3)",
        3,
    ),
    "pooled_relu_beside_signed_concat": (
        X + "(float[2,4,4,4] y)",
        "p = Conv<pads=[1,1,1,1]>(x, w1) r = Relu(p) "
        "o = MaxPool<kernel_shape=[2,2],strides=[2,2]>(r) q = Conv<strides=[2,2]>(x, w2) "
        "c = Concat<axis=1>(o, q) y = Conv(c, w3)",
        3,
    ),
    "clip_without_zero": (
        X + "(float[2,4,8,8] y)",
        "p = Conv<pads=[1,1,1,1]>(x, w1) c = Clip(p, one, six) y = Conv(c, w2)",
        2,
    ),
    "clip_to_a_point": (
        X + "(float[2,4,8,8] y)",
        "p = Conv<pads=[1,1,1,1]>(x, w1) c = Clip(p, one, one) y = Conv(c, w2)",
        2,
    ),
    "dilated_average_pool": (
        X + "(float[2,4,6,6] y)",
        "p = Conv<pads=[1,1,1,1]>(x, w1) a = AveragePool<kernel_shape=[2,2],dilations=[2,2]>(p) "
        "y = Conv(a, w2)",
        2,
    ),
    "average_pool_that_rounds_up": (
        X + "(float[2,4,5,5] y)",
        "p = Conv<pads=[1,1,1,1]>(x, w1) "
        "a = AveragePool<kernel_shape=[3,3],strides=[2,2],pads=[1,1,1,1],ceil_mode=1,"
        "count_include_pad=1>(p) y = Conv(a, w2)",
        2,
    ),
    "output_that_feeds_a_concat": (
        X + "(float[2,4,8,8] a, float[2,4,8,8] y)",
        "a = Conv(x, w2) e = Conv<pads=[1,1,1,1]>(x, w1) s = Mul(e, six) t = Mul(s, six) "
        "c = Concat<axis=1>(a, t) y = Conv(c, w3)",
        3,
    ),
}


def _model(name: str) -> ir.Model:
    signature, body, _ = FORMS[name]
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 19]> g {signature} {{ {body} }}'
    )
    rng = np.random.default_rng(0)
    used = {value for node in model.graph.node for value in node.input}
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    arrays = {k: rng.normal(0, 0.4, shape) for k, shape in WEIGHTS.items()}
    for key, array in {**arrays, **SCALARS}.items():
        if key in used:
            tensor = numpy_helper.from_array(np.asarray(array, np.float32), key)
            model.graph.initializer.append(tensor)
    onnx.checker.check_model(model)
    return ir.from_proto(model)


def _feeds(model: ir.Model) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    (x,) = model.graph.inputs
    shape = [int(size) for size in x.shape or ()]
    return [{"x": rng.normal(0, 1, shape).astype(np.float32)} for _ in range(8)]


def _quantize(
    model: ir.Model, plain_context: Callable[..., Any], feeds: Any = None
) -> tuple[ir.Model, PassReport]:
    result = model.clone()
    context = plain_context(feeds or _feeds(model), model)
    return result, QuantizeStatic(min_sqnr=0).apply(result, context)


@pytest.mark.parametrize("name", FORMS)
def test_form_fuses_and_keeps_its_values(
    name: str, plain_context: Callable[..., Any], outputs_of: Callable[..., Any]
) -> None:
    model = _model(name)
    result, report = _quantize(model, plain_context)
    assert report.facts["fusion"]["unfused"] == []
    kernels = report.facts["fusion"]["kernels"]
    fused = sum(kernels.get(k, 0) for k in ("QLinearConv", "QLinearMatMul", "MatMulIntegerToFloat"))
    assert fused == FORMS[name][2]
    feeds = _feeds(model)
    for level in (Level.DISABLED, Level.ALL):
        for ours, theirs in zip(
            outputs_of(model, feeds), outputs_of(result, feeds, level), strict=True
        ):
            noise = max(float(np.mean((ours - theirs) ** 2)), 1e-30)
            assert 10 * np.log10(np.mean(ours**2) / noise) > 25


def test_operator_excluded_by_the_user_stays_float(
    plain_context: Callable[..., Any], outputs_of: Callable[..., Any]
) -> None:
    model = ir.from_proto(
        onnx.parser.parse_model(
            '<ir_version: 9, opset_import: ["": 19]> g (float[1,4,8,8] x) => (float[1,4,8,8] y) '
            "{ a = Conv(x, w) b = Conv(a, w) s = Add(a, b) y = Conv(s, w) }"
        )
    )
    weight = ir.Value(
        name="w",
        const_value=ir.Tensor(np.random.default_rng(0).normal(0, 0.5, (4, 4, 1, 1)).astype("f4")),
    )
    model.graph.register_initializer(weight)
    for node in model.graph:
        for index, value in enumerate(node.inputs):
            if value is not None and value.name == "w":
                node.replace_input_with(index, weight)
        node.name = node.outputs[0].name
    rng = np.random.default_rng(1)
    feeds = [{"x": rng.normal(0, 1, (1, 4, 8, 8)).astype(np.float32)} for _ in range(4)]
    result = model.clone()
    report = QuantizeStatic(exclude=("op:Add",)).apply(result, plain_context(feeds, model))
    assert "QLinearAdd" not in report.facts["fusion"]["kernels"]
    assert report.facts["shielded"] == ["s"]
    assert outputs_of(result, feeds)[0].shape == outputs_of(model, feeds)[0].shape


def test_relu_in_a_branch_that_never_ran_ends_with_a_reason(
    plain_context: Callable[..., Any],
) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[1,4,6,6] x, bool flag) => (float[1,4,6,6] y)
    {
        y = If(flag) <
            then_branch = a () => (float[1,4,6,6] t) { t = Neg(x) },
            else_branch = b () => (float[1,4,6,6] e) { c = Conv(x, w) r = Relu(c) e = Conv(r, w) }
        >
    }"""
    model = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).normal(0, 0.5, (4, 4, 1, 1)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    loaded = ir.from_proto(model)
    rng = np.random.default_rng(1)
    x = rng.normal(0, 1, (1, 4, 6, 6)).astype(np.float32)
    feeds = [{"x": x, "flag": np.array(True)} for _ in range(3)]
    with pytest.raises(PassFailedError, match="no usable range"):
        QuantizeStatic().apply(loaded.clone(), plain_context(feeds, loaded))


def test_weights_without_a_usable_scale_stay_float(plain_context: Callable[..., Any]) -> None:
    model = _model("clip_without_zero")
    weight = model.graph.initializers["w2"]
    small = (const_array(weight) * 1e-37).astype(np.float32)
    weight.const_value = ir.Tensor(small, name="w2")
    _, report = _quantize(model, plain_context)
    assert any("too small" in item.reason for item in report.skipped)


def test_float16_inside_branches(
    plain_context: Callable[..., Any], outputs_of: Callable[..., Any]
) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float16[1,4,6,6] x, bool flag) => (float16[1,4,6,6] y)
    {
        y = If(flag) <
            then_branch = a () => (float16[1,4,6,6] t) { t = Conv(x, w) },
            else_branch = b () => (float16[1,4,6,6] e) { e = Conv(x, v) }
        >
    }"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name in ("w", "v"):
        array = rng.normal(0, 0.5, (4, 4, 1, 1)).astype(np.float16)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    loaded = ir.from_proto(model)
    for index, node in enumerate(loaded.graph.all_nodes()):
        node.name = f"n{index}"
    feeds = [
        {"x": rng.normal(0, 1, (1, 4, 6, 6)).astype(np.float16), "flag": np.array(bool(i % 2))}
        for i in range(8)
    ]
    result, context = loaded.clone(), plain_context(feeds, loaded)
    QuantizeStatic(min_sqnr=0).apply(result, context)
    BiasCorrection().apply(result, context)
    ours, theirs = (outputs_of(m, feeds)[0].astype(np.float64) for m in (loaded, result))
    assert 10 * np.log10(np.mean(ours**2) / np.mean((ours - theirs) ** 2)) > 30


def test_correction_that_harms_an_output_is_taken_back(plain_context: Callable[..., Any]) -> None:
    model = _model("relu_beside_signed_concat")
    feeds = _feeds(model)
    context = plain_context(feeds, model)
    quantized = model.clone()
    QuantizeStatic(min_sqnr=0).apply(quantized, context)
    # A context that sees the outputs get worse, whatever the correction does.
    values = iter([{"y": 31.0}, {"y": 30.5}, {"y": 30.0}, {"y": 29.0}])
    context.fidelity = lambda *_: next(values)
    before = ir.to_proto(quantized).SerializeToString(deterministic=True)
    report = BiasCorrection().apply(quantized, context)
    assert report.changed == {"bias": 0}
    assert any("30.0 to 29.0" in item.reason for item in report.skipped)
    assert ir.to_proto(quantized).SerializeToString(deterministic=True) == before


def test_few_samples_that_mislead_are_overruled(plain_context: Callable[..., Any]) -> None:
    model = _model("relu_beside_signed_concat")
    context = plain_context(_feeds(model), model)
    quantized = model.clone()
    QuantizeStatic(min_sqnr=0).apply(quantized, context)
    values = iter([{"y": 31.0}, {"y": 30.5}, {"y": 29.0}, {"y": 30.0}])
    context.fidelity = lambda *_: next(values)
    assert BiasCorrection().apply(quantized, context).changed["bias"] > 0
