"""Bias correction against what onnxruntime really computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.core.contract import PassReport
from slimctl.core.errors import UnsupportedModelError
from slimctl.graph.edit import add_initializer, const_array, interface
from slimctl.passes._layers import Layer, expected_output, linear_input, recognize
from slimctl.passes.bias_correction import BiasCorrection
from slimctl.passes.quantize_static import QuantizeStatic

# Name: (ONNX text of one layer, shapes of x, w and b)
LAYERS: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "conv": ("Conv<pads=[1,1,1,1]>(x, w, b)", {"x": (1, 4, 7, 7), "w": (6, 4, 3, 3), "b": (6,)}),
    "strided": (
        "Conv<strides=[2,2],pads=[0,1,2,1]>(x, w, b)",
        {"x": (1, 4, 9, 8), "w": (6, 4, 3, 3), "b": (6,)},
    ),
    "dilated": (
        "Conv<dilations=[2,1],pads=[2,1,2,1]>(x, w, b)",
        {"x": (1, 4, 9, 8), "w": (6, 4, 3, 3), "b": (6,)},
    ),
    "depthwise": (
        "Conv<group=4,pads=[1,1,1,1]>(x, w, b)",
        {"x": (1, 4, 7, 7), "w": (4, 1, 3, 3), "b": (4,)},
    ),
    "grouped": ("Conv<group=2>(x, w, b)", {"x": (1, 4, 7, 7), "w": (6, 2, 3, 3), "b": (6,)}),
    "one_dimension": ("Conv<pads=[1,1]>(x, w, b)", {"x": (1, 4, 20), "w": (6, 4, 3), "b": (6,)}),
    "no_bias": ("Conv(x, w)", {"x": (1, 4, 7, 7), "w": (6, 4, 3, 3)}),
    "gemm": ("Gemm<alpha=0.5,beta=2.0>(x, w, b)", {"x": (5, 8), "w": (8, 6), "b": (6,)}),
    "gemm_transposed": ("Gemm<transB=1>(x, w, b)", {"x": (5, 8), "w": (6, 8), "b": (6,)}),
    "gemm_no_bias": ("Gemm(x, w)", {"x": (5, 8), "w": (8, 6)}),
}


def _model(body: str, shapes: dict[str, tuple[int, ...]], rows: str = "y = ") -> ir.Model:
    rng = np.random.default_rng(2)
    x = ",".join(map(str, shapes["x"]))
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[{x}] x) => (float y) {{ {rows}{body} }}'
    )
    for index, node in enumerate(model.graph.node):
        node.name = f"layer{index}"
    model.graph.output[0].type.tensor_type.ClearField("shape")
    for name, shape in shapes.items():
        if name != "x":
            array = rng.normal(0, 0.5, shape).astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(array, name))
    return ir.from_proto(model)


def _feeds(
    shape: tuple[int, ...], mean: float = 2.0, count: int = 12
) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    # A mean far from zero, different in each channel, is what the correction is about.
    offset = rng.normal(0, mean, (1, shape[1], *[1] * (len(shape) - 2)))
    return [{"x": (rng.normal(0, 1, shape) + offset).astype(np.float32)} for _ in range(count)]


@pytest.fixture
def corrected(
    plain_context: Callable[..., Any],
) -> Callable[..., tuple[ir.Model, ir.Model, PassReport]]:
    def apply(model: ir.Model, feeds: Any) -> tuple[ir.Model, ir.Model, PassReport]:
        """The quantized model, the corrected one, and the report of the correction."""
        context = plain_context(feeds, model)
        quantized = model.clone()
        # Coarse weights make the effect plain: per tensor, one scale for all.
        QuantizeStatic(per_channel=False).apply(quantized, context)
        result = quantized.clone()
        report = BiasCorrection().apply(result, context)
        assert interface(result) == interface(model)
        return quantized, result, report

    return apply


@pytest.mark.parametrize("name", LAYERS)
def test_expected_output_equals_the_mean_of_a_real_run(
    name: str, plain_context: Callable[..., Any]
) -> None:
    body, shapes = LAYERS[name]
    # The mean of a bias is the bias: without one the weights are all that there is to see.
    model = _model(body.replace(", b)", ")"), {k: v for k, v in shapes.items() if k != "b"})
    layer = recognize(model.graph[0])
    assert isinstance(layer, Layer)
    context = plain_context(_feeds(shapes["x"]), model)
    means = context.input_means(model, [linear_input(layer)])
    expected = expected_output(layer, layer.weight(), means["layer0"].both)
    outputs = np.stack(context.observe(model, ["y"])["y"])  # [sample, ...]
    channel_axis = 2 if layer.node.op_type == "Conv" else outputs.ndim - 1
    axes = tuple(axis for axis in range(outputs.ndim) if axis != channel_axis)
    np.testing.assert_allclose(expected, outputs.mean(axis=axes), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_mean_error_of_the_output_goes(
    name: str, corrected: Callable[..., Any], plain_context: Callable[..., Any]
) -> None:
    body, shapes = LAYERS[name]
    model = _model(body, shapes)
    feeds = _feeds(shapes["x"])
    before, after, report = corrected(model, feeds)
    assert report.changed == {"bias": 1} and not report.skipped

    def mean_error(other: ir.Model) -> np.ndarray:
        ours = np.stack(plain_context(feeds, model).observe(model, ["y"])["y"])
        theirs = np.stack(plain_context(feeds, model).observe(other, ["y"])["y"])
        axis = 2 if "Conv" in body else ours.ndim - 1
        return (theirs - ours).mean(axis=tuple(a for a in range(ours.ndim) if a != axis))

    # Half an activation step of noise averages out over positions; weight error does not.
    assert np.abs(mean_error(after)).mean() < 0.35 * np.abs(mean_error(before)).mean()


def test_matmul_corrects_the_add_behind_it(
    corrected: Callable[..., Any], plain_context: Callable[..., Any]
) -> None:
    model = _model(
        "Add(m, b)", {"x": (2, 5, 8), "w": (8, 6), "b": (6,)}, rows="m = MatMul(x, w) y = "
    )
    feeds = _feeds((2, 5, 8))
    feeds = [{"x": feed["x"] + 3} for feed in feeds]
    before, after, report = corrected(model, feeds)
    assert report.changed == {"bias": 1}
    ours, first, second = (
        np.stack(plain_context(feeds, model).observe(m, ["y"])["y"]) for m in (model, before, after)
    )
    error = [np.abs((other - ours).mean(axis=(0, 1, 2))).mean() for other in (first, second)]
    assert error[1] < 0.35 * error[0]


def test_matmul_without_add_is_named(corrected: Callable[..., Any]) -> None:
    model = _model("MatMul(x, w)", {"x": (5, 8), "w": (8, 6)})
    _, _, report = corrected(model, _feeds((5, 8)))
    assert [item.node for item in report.skipped] == ["layer0"]
    assert "no bias" in report.skipped[0].reason


def test_correction_that_does_not_hold_on_the_other_half_is_dropped(
    corrected: Callable[..., Any],
) -> None:
    body, shapes = LAYERS["conv"]
    base = _feeds(shapes["x"], count=1)[0]["x"]
    # The two halves of the data (even and odd samples here) have opposite means.
    feeds = [{"x": base if index % 2 else -base} for index in range(8)]
    before, after, report = corrected(_model(body, shapes), feeds)
    assert report.changed == {"bias": 0}
    assert "does not help" in report.skipped[0].reason
    assert [n.op_type for n in before.graph] == [n.op_type for n in after.graph]


def test_integer_bias_moves_by_the_expected_steps(
    corrected: Callable[..., Any], plain_context: Callable[..., Any]
) -> None:
    body, shapes = LAYERS["conv"]
    model, feeds = _model(body, shapes), _feeds(shapes["x"])
    before, after, _ = corrected(model, feeds)
    layer = recognize(model.graph[0])
    assert isinstance(layer, Layer)
    mean = plain_context(feeds, model).input_means(model, [linear_input(layer)])["layer0"].both
    conv = {m: next(n for n in m.graph if n.op_type == "Conv") for m in (before, after)}
    codes = {m: const_array(conv[m].inputs[2].producer().inputs[0]) for m in (before, after)}
    scale = const_array(conv[after].inputs[2].producer().inputs[1])
    weight = conv[after].inputs[1].producer()
    restored = const_array(weight.inputs[0]).astype(np.float64) * float(
        const_array(weight.inputs[1])
    )
    shift = expected_output(layer, restored - layer.weight(), mean)
    moved = codes[after].astype(np.int64) - codes[before]
    assert np.abs(moved + shift / scale).max() <= 1.0  # two roundings of half a step each


def test_model_without_quantized_weights_is_refused() -> None:
    model = _model("Conv(x, w)", {"x": (1, 4, 7, 7), "w": (6, 4, 3, 3)})
    with pytest.raises(UnsupportedModelError, match="behind quantize"):
        BiasCorrection().requires(model)


def test_layer_that_the_float_model_does_not_have_is_named(
    corrected: Callable[..., Any], plain_context: Callable[..., Any]
) -> None:
    body, shapes = LAYERS["conv"]
    model, feeds = _model(body, shapes), _feeds(shapes["x"])
    quantized, _, _ = corrected(model, feeds)
    other = _model(body, shapes)
    other.graph[0].name = "renamed"
    report = BiasCorrection().apply(quantized, plain_context(feeds, other))
    assert "no layer of this name" in report.skipped[0].reason


def test_shared_bias_of_another_layer_is_not_touched(plain_context: Callable[..., Any]) -> None:
    model = _model("Conv(x, w, b)", {"x": (1, 4, 7, 7), "w": (6, 4, 3, 3), "b": (6,)})
    graph = model.graph
    second = ir.Node(
        "",
        "Conv",
        [
            graph.inputs[0],
            add_initializer(graph, "v", np.zeros((6, 4, 3, 3), np.float32)),
            graph.initializers["b"],
        ],
        name="second",
    )
    second.outputs[0].name = "z"
    second.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    graph.append(second)
    graph.outputs.append(second.outputs[0])
    context = plain_context(_feeds((1, 4, 7, 7)), model)
    result = model.clone()
    QuantizeStatic().apply(result, context)
    report = BiasCorrection().apply(result, context)
    # The zero weight has no error; its bias stays as it was.
    assert [item.node for item in report.skipped] == ["second"]
