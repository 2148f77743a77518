"""Each of many faults, planted at one node of a sound model, is found at that node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from benchmarks.planted import FAULTS, names_of
from slimctl.evaluate.verification import Verdict, verify_model
from slimctl.graph._normalize import normalize
from slimctl.graph.edit import clone_model
from slimctl.passes.bias_correction import BiasCorrection
from slimctl.passes.quantize_static import QuantizeStatic

PLACE = "square"


def _network() -> ir.Model:
    random = np.random.default_rng(0)
    weights: list[onnx.TensorProto] = []

    def constant(name: str, shape: tuple[int, ...], fan_in: int) -> str:
        values = random.normal(scale=(2 / fan_in) ** 0.5, size=shape).astype(np.float32)
        weights.append(numpy_helper.from_array(values, name))
        return name

    def conv(name: str, x: str, shape: tuple[int, ...], **attributes: Any) -> list[onnx.NodeProto]:
        fan_in = int(np.prod(shape[1:]))
        inputs = [x, constant(f"{name}.w", shape, fan_in), constant(f"{name}.b", shape[:1], 4)]
        made = helper.make_node("Conv", inputs, [f"{name}_out"], name, **attributes)
        relu = helper.make_node("Relu", [f"{name}_out"], [f"{name}_relu"], f"{name}.relu")
        return [made, relu]

    nodes = [
        *conv("stem", "x", (16, 3, 3, 3), pads=[1, 1, 1, 1]),
        *conv("depthwise", "stem_relu", (16, 1, 3, 3), pads=[1, 1, 1, 1], group=16),
        *conv("square", "depthwise_relu", (16, 16, 3, 3), pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["square_relu", "stem_relu"], ["sum"], "add"),
        *conv("wide", "sum", (32, 16, 1, 1), strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["wide_relu"], ["pooled"], "pool"),
        helper.make_node("Flatten", ["pooled"], ["flat"], "flatten"),
        helper.make_node(
            "Gemm",
            ["flat", constant("fc.w", (32, 10), 32), constant("fc.b", (10,), 9)],
            ["y"],
            "fc",
        ),
    ]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 3, 16, 16])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 10])
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    model = ir.serde.deserialize_model(proto)
    normalize(model)
    return model


@pytest.fixture(scope="module")
def original() -> ir.Model:
    return _network()


@pytest.fixture(scope="module")
def samples() -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    return [{"x": random.normal(size=(1, 3, 16, 16)).astype(np.float32)} for _ in range(8)]


@pytest.fixture
def sound(original: ir.Model, samples: Any, plain_context: Callable[..., Any]) -> ir.Model:
    context = plain_context(samples, original)
    quantized = clone_model(original)
    QuantizeStatic(calibration="minmax", min_sqnr=0).apply(quantized, context)
    BiasCorrection().apply(quantized, context)
    return quantized


def test_a_sound_model_has_no_faults(sound: ir.Model, original: ir.Model, samples: Any) -> None:
    found = verify_model(sound, samples[:2], reference=original)
    assert not found.faults
    assert len(found.layers) >= 7


@pytest.mark.parametrize("fault", FAULTS)
def test_finds_the_node(fault: str, sound: ir.Model, original: ir.Model, samples: Any) -> None:
    names = names_of(sound, PLACE)
    FAULTS[fault](sound, PLACE)
    found = verify_model(sound, samples[:2], reference=original)
    assert found.faults, "the fault is not noticed"
    assert found.faults[0].node in names
    assert found.faults[0].verdict is Verdict.MODEL
