"""Q/DQ regions: what runs as integers, and that it computes what is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from slimctl.graph._normalize import normalize
from slimctl.graph.session import Level, open_session, run
from slimctl.runtime.session import Arithmetic, Runtime

_RANDOM = np.random.default_rng(0)


def _codes(*shape: int, low: int = -127, high: int = 127) -> np.ndarray:
    return _RANDOM.integers(low, high, shape, endpoint=True).astype(np.int8)


class _Graph:
    """Builds a model of one operator between Q/DQ pairs."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def constant(self, name: str, values: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def restored(self, name: str, codes: np.ndarray, scale: Any, axis: int = 0) -> str:
        scales = np.asarray(scale, np.float32)
        inputs = [self.constant(f"{name}_q", codes), self.constant(f"{name}_s", scales)]
        inputs.append(self.constant(f"{name}_z", np.zeros(scales.shape, codes.dtype)))
        made = helper.make_node("DequantizeLinear", inputs, [name], f"{name}_dq", axis=axis)
        self.nodes.append(made)
        return name

    def paired(self, name: str, scale: float, zero: int) -> str:
        """A Q/DQ pair on a real tensor."""
        parameters = [
            self.constant(f"{name}_scale", np.float32(scale)),
            self.constant(f"{name}_zero", np.uint8(zero)),
        ]
        codes, back = f"{name}_codes", f"{name}_restored"
        self.nodes.append(
            helper.make_node("QuantizeLinear", [name, *parameters], [codes], f"{name}_q")
        )
        self.nodes.append(
            helper.make_node("DequantizeLinear", [codes, *parameters], [back], f"{name}_dq2")
        )
        return back

    def add(self, op_type: str, inputs: list[str], name: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [name], f"{name}_node", **attributes))
        return name

    def model(self, shape: list[int], output: str) -> ir.Model:
        graph = helper.make_graph(
            self.nodes,
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
            self.weights,
        )
        imports = [helper.make_opsetid("", 17)]
        proto = helper.make_model(graph, opset_imports=imports, ir_version=9)
        model = ir.serde.deserialize_model(proto)
        normalize(model)
        return model


def _conv(graph: _Graph, x: str) -> str:
    weights = graph.restored("w", _codes(6, 4, 3, 3), np.linspace(0.01, 0.02, 6))
    bias = _RANDOM.integers(-900, 900, 6).astype(np.int32)
    scales = np.linspace(0.01, 0.02, 6).astype(np.float32) * np.float32(0.05)
    return graph.add("Conv", [x, weights, graph.restored("b", bias, scales)], "y", pads=[1] * 4)


def _conv_transpose(graph: _Graph, x: str) -> str:
    weights = graph.restored("w", _codes(4, 3, 3, 3), np.linspace(0.01, 0.02, 3), axis=1)
    return graph.add("ConvTranspose", [x, weights], "y", group=2, strides=[2, 2], pads=[1] * 4)


def _max_pool(graph: _Graph, x: str) -> str:
    return graph.add("MaxPool", [x], "y", kernel_shape=[3, 3], pads=[1] * 4, ceil_mode=1)


def _average_pool(graph: _Graph, x: str) -> str:
    return graph.add("AveragePool", [x], "y", kernel_shape=[2, 2], strides=[2, 2])


def _global_average_pool(graph: _Graph, x: str) -> str:
    return graph.add("GlobalAveragePool", [x], "y")


def _add(graph: _Graph, x: str) -> str:
    return graph.add("Add", [x, graph.restored("w", _codes(4, 1, 1), 0.03)], "y")


def _mul(graph: _Graph, x: str) -> str:
    return graph.add("Mul", [x, graph.restored("w", _codes(4, 1, 1), 0.03)], "y")


def _concat(graph: _Graph, x: str) -> str:
    return graph.add("Concat", [x, graph.restored("w", _codes(1, 2, 8, 8), 0.03)], "y", axis=1)


def _matmul(graph: _Graph, x: str) -> str:
    return graph.add(
        "MatMul", [x, graph.restored("w", _codes(8, 5), np.full(5, 0.02), axis=1)], "y"
    )


def _sigmoid(graph: _Graph, x: str) -> str:
    return graph.add("Sigmoid", [x], "y")


FORMS = {
    "QLinearConv": _conv,
    "QLinearConvTranspose": _conv_transpose,
    "QLinearMaxPool": _max_pool,
    "QLinearAveragePool": _average_pool,
    "QLinearGlobalAveragePool": _global_average_pool,
    "QLinearAdd": _add,
    "QLinearMul": _mul,
    "QLinearConcat": _concat,
    "QLinearMatMul": _matmul,
    "QLinearSigmoid": _sigmoid,
}


def _model(form: str, clip: str = "") -> ir.Model:
    graph = _Graph()
    y = FORMS[form](graph, graph.paired("x", 0.05, 120))
    if clip == "Relu":
        y = graph.add("Relu", [y], "clipped")
    elif clip == "Clip":
        bounds = [graph.constant("low", np.float32(-0.4)), graph.constant("high", np.float32(1.0))]
        y = graph.add("Clip", [y, *bounds], "clipped")
    return graph.model([1, 4, 8, 8], graph.paired(y, 0.07, 90))


@pytest.mark.parametrize("clip", ["", "Relu", "Clip"])
@pytest.mark.parametrize("form", FORMS)
def test_computes_what_is_written(form: str, clip: str) -> None:
    model = _model(form, clip)
    integers, floats = Runtime(model), Runtime(model, arithmetic=Arithmetic.FLOAT)
    assert form in [step.op_type for step in integers.plan.steps]
    assert "DequantizeLinear" in [step.op_type for step in floats.plan.steps[:-1]]
    feeds = {"x": np.random.default_rng(1).normal(size=(1, 4, 8, 8)).astype(np.float32) * 3}
    (found,), (written,) = integers.run(feeds).values(), floats.run(feeds).values()
    (expected,) = run(open_session(model, level=Level.DISABLED), feeds).values()
    for values, other in ((written, expected), (found, expected)):
        # One step at ties: sums are integers, or floats in another order. Means of four codes are
        # ties more often than other values.
        steps = np.rint(np.abs(values - other) / np.float32(0.07))
        assert steps.max() <= 1
        assert np.mean(steps > 0) < 0.05


@pytest.mark.parametrize("form", ["QLinearConv", "QLinearMatMul"])
def test_scales_along_another_axis_stay_as_they_are_written(form: str) -> None:
    graph = _Graph()
    x = graph.paired("x", 0.05, 120)
    if form == "QLinearConv":
        weights = graph.restored("w", _codes(4, 4, 1, 1), np.linspace(0.01, 0.02, 4), axis=1)
        y = graph.add("Conv", [x, weights], "y")
    else:
        weights = graph.restored("w", _codes(8, 8), np.linspace(0.01, 0.02, 8), axis=0)
        y = graph.add("MatMul", [x, weights], "y")
    model = graph.model([1, 4, 8, 8], graph.paired(y, 0.07, 90))
    assert form not in [step.op_type for step in Runtime(model).plan.steps]


def test_a_tensor_that_is_read_elsewhere_stays() -> None:
    graph = _Graph()
    y = _conv(graph, graph.paired("x", 0.05, 120))
    graph.add("Neg", [y], "negated")
    both = graph.add("Add", [graph.paired(y, 0.07, 90), "negated"], "both")
    model = graph.model([1, 4, 8, 8], both)
    assert "Conv" in [step.op_type for step in Runtime(model).plan.steps]


def test_what_nobody_reads_does_not_run() -> None:
    steps = Runtime(_model("QLinearConv", "Relu")).plan.steps
    assert [step.op_type for step in steps] == ["QuantizeLinear", "QLinearConv", "DequantizeLinear"]


def test_counts_what_happens_at_the_output() -> None:
    runtime = Runtime(_model("QLinearConv"), counting=True)
    runtime.run({"x": np.full((1, 4, 8, 8), 6.0, np.float32)})
    (counts,) = runtime.counts().values()
    assert counts.elements == 6 * 8 * 8
    assert counts.at_low + counts.at_high > 0
    assert counts.overflowed == 0
    assert counts.used_range > 0.5
