"""``quantize --target T`` makes what T takes: types, axes, scales, biases."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from slimctl.core.errors import PassFailedError
from slimctl.graph.edit import clone_model, const_array
from slimctl.graph.opset import raise_opset
from slimctl.passes.legalize import Legalize
from slimctl.passes.quantize_static import QuantizeStatic
from slimctl.targets import load_target
from slimctl.targets.check import check_placement
from slimctl.targets.demands import broken_demand
from slimctl.targets.units import Unit, operator_of, unit_of
from tests.targets.graphs import network, to_ir

WHOLE = ["qnn-htp", "tensorrt", "openvino", "nnapi", "vitisai", "xnnpack"]


@pytest.fixture
def quantize(plain_context):
    """A quantized copy of a model, the SQNR of its output, and the report."""

    def apply(model: ir.Model, name: str, **options: Any) -> tuple[ir.Model, float, Any]:
        target = load_target(name)
        shape = [d if isinstance(d, int) else 1 for d in model.graph.inputs[0].shape or ()]
        rng = np.random.default_rng(3)
        feeds = [{"x": rng.normal(0, 1, shape).astype(np.float32)} for _ in range(3)]
        context = plain_context(feeds, model, target=target)
        step = QuantizeStatic(calibration="minmax", min_sqnr=0, **options).resolve(target)
        made = raise_opset(clone_model(model), step.minimum_opset(model, target))
        report = step.apply(made, context)
        Legalize().resolve(target).apply(made, context)
        onnx.checker.check_model(ir.to_proto(made), full_check=True)
        return made, min(context.fidelity(made).values()), report

    return apply


def units(model: ir.Model) -> dict[str, Unit]:
    return {node.name or "": unit_of(node) for node in model.graph}


@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    residual=st.booleans(),
    deconv=st.booleans(),
    width=st.sampled_from([4, 8]),
    batch=st.sampled_from(["N", 1]),
)
@pytest.mark.parametrize("name", WHOLE)
def test_nothing_falls_back(
    name: str, quantize, *, residual: bool, deconv: bool, width: int, batch: Any
) -> None:
    """But for operators that the provider does not know: no form of them would help."""
    target = load_target(name)
    model = network(batch, residual=residual, deconv=deconv, width=width)
    made, sqnr, _ = quantize(model, name)
    report = check_placement(made, target)
    served = {"QuantizeLinear", "DequantizeLinear", "Relu"}  # go with what they stand beside
    for node in report.fallbacks:
        known = {*target.operators.names, *target.integer_operators}
        assert node.operator in served or node.operator not in known
    unknown = {operator_of(node) for node in model.graph} - {
        *target.operators.names,
        *target.integer_operators,
        "Relu",
    }
    assert bool(report.fallbacks) == bool(unknown)
    assert sqnr > 15


def test_the_whole_network_runs_on_most(quantize) -> None:
    for name in ("qnn-htp", "tensorrt", "openvino", "vitisai"):
        made, _, report = quantize(network("N"), name)
        assert check_placement(made, load_target(name)).fallbacks == ()
        assert any("nodes run on" in note for note in report.notes)
        assert report.facts["placement"]["fallbacks"] == {} or name == "vitisai"


def test_tensorrt_form(quantize) -> None:
    made, _, _ = quantize(network(1), "tensorrt")
    found = units(made)
    for name in ("c0", "c1", "c2", "t", "fc"):
        assert found[name].bias is None
        assert {item.type for item in found[name].activations} == {"int8"}
    for unit in found.values():
        for item in (*unit.activations, *unit.weights):
            assert item.zero_point is not None
            assert not item.zero_point.any()
    assert found["c0"].weights[0].axis == 0
    assert found["t"].weights[0].axis == 0  # input channels
    assert found["t"].weights[0].scale.shape == (8,)


def test_a_residual_sum_joins_the_convolution_for_tensorrt(quantize) -> None:
    """The branch from elsewhere is quantized, the convolution hands its sum over in float."""
    make = helper.make_node
    nodes = [make("Conv", ["x", "w"], ["r0"], "first", pads=[1] * 4)]
    for index in range(2):
        nodes += [
            make("Conv", [f"r{index}", "w"], [f"c{index}"], f"c{index}", pads=[1] * 4),
            make("Add", [f"r{index}", f"c{index}"], [f"a{index}"], f"add{index}"),
            make("Relu", [f"a{index}"], [f"r{index + 1}"], f"relu{index}"),
        ]
    nodes.append(make("Conv", ["r2", "w"], ["y"], "last", pads=[1] * 4))
    weight = np.random.default_rng(0).normal(0, 0.1, (8, 8, 3, 3)).astype(np.float32)
    made, _, _ = quantize(to_ir(nodes, {"x": [1, 8, 6, 6]}, ["y"], {"w": weight}), "tensorrt")
    found = units(made)
    for index in range(2):
        residual, convolved = found[f"add{index}"].inputs
        assert (residual is not None, convolved is None) == (True, True)
    assert check_placement(made, load_target("tensorrt")).groups() == []


def test_everything_is_quantized_where_float_runs_elsewhere(quantize) -> None:
    make = helper.make_node
    nodes = [
        make("Conv", ["x", "w"], ["a"], "conv", pads=[1] * 4),
        make("GlobalAveragePool", ["a"], ["g"], "pool"),
        make("Mul", ["a", "g"], ["m"], "mul"),
        make("Flatten", ["m"], ["f"], "flat"),
        make("Softmax", ["f"], ["y"], "softmax"),
    ]
    weight = np.random.default_rng(0).normal(0, 0.1, (8, 8, 3, 3)).astype(np.float32)
    model = to_ir(nodes, {"x": [1, 8, 6, 6]}, ["y"], {"w": weight})
    made, _, _ = quantize(model, "qnn-htp")
    report = check_placement(made, load_target("qnn-htp"))
    assert (report.fallbacks, report.groups()) == ((), [])
    assert all(units(made)[name].is_quantized for name in ("pool", "mul", "flat", "softmax"))


def test_qnn_form(quantize) -> None:
    made, _, _ = quantize(network(1), "qnn-htp")
    found = units(made)
    assert found["c0"].weights[0].axis == 0
    assert found["t"].weights[0].axis == 1
    assert found["fc"].weights[0].axis is None
    assert found["c0"].bias.type == "int32"
    assert {item.type for unit in found.values() for item in unit.activations} == {"uint8"}


def sequence() -> ir.Model:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "matmul"),
        helper.make_node("Sigmoid", ["a"], ["s"], "sigmoid"),
        helper.make_node("Reshape", ["s", "shape"], ["r"], "reshape"),
        helper.make_node("MatMul", ["r", "w"], ["b"], "second"),
        helper.make_node("Tanh", ["b"], ["t"], "tanh"),
        helper.make_node("MatMul", ["t", "w"], ["y"], "third"),
    ]
    constants = {
        "w": np.random.default_rng(0).normal(0, 0.3, (8, 8)).astype(np.float32),
        "shape": np.array([4, 8]),
    }
    return to_ir(nodes, {"x": [4, 8]}, ["y"], constants)


def test_scales_that_qnn_fixes(quantize) -> None:
    made, sqnr, _ = quantize(sequence(), "qnn-htp", activation_type="uint16")
    found = units(made)
    sigmoid, moved, tanh = (found[n].outputs[0] for n in ("sigmoid", "reshape", "tanh"))
    assert (float(sigmoid.scale), int(sigmoid.zero_point)) == (2**-16, 0)
    assert (float(moved.scale), int(moved.zero_point)) == (2**-16, 0)
    assert (float(tanh.scale), int(tanh.zero_point)) == (2**-15, 32768)
    assert [item.type for item in found["matmul"].weights] == ["uint8"]  # of MatMul pairs
    assert check_placement(made, load_target("qnn-htp")).fallbacks == ()
    assert sqnr > 30


def test_a_sigmoid_for_nnapi(quantize) -> None:
    made, _, _ = quantize(sequence(), "nnapi")
    sigmoid = units(made)["sigmoid"].outputs[0]
    assert (float(sigmoid.scale), int(sigmoid.zero_point)) == (2**-8, 0)
    assert check_placement(made, load_target("nnapi")).fallbacks == ()


def test_xnnpack_gets_a_dq_for_each_reader(quantize) -> None:
    made, _, _ = quantize(network(1), "xnnpack")
    pairs = [node for node in made.graph if node.op_type == "DequantizeLinear"]
    assert {len(node.outputs[0].uses()) for node in pairs} <= {0, 1}
    assert {item.type for item in units(made)["c1"].weights} == {"uint8"}


def test_vitisai_scales_are_powers_of_two(quantize) -> None:
    made, _, _ = quantize(network(1), "vitisai")
    for unit in units(made).values():
        for item in (*unit.activations, *unit.weights):
            assert item.axis is None
            assert np.all(np.frexp(item.scale)[0] == 0.5)


def test_the_add_behind_a_matmul_stays_where_sum_is_unknown(quantize) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "matmul"),
        helper.make_node("Add", ["a", "b"], ["y"], "add"),
    ]
    constants = {
        "w": np.random.default_rng(0).normal(0, 0.3, (8, 8)).astype(np.float32),
        "b": np.ones(8, np.float32),
    }
    model = to_ir(nodes, {"x": [4, 8]}, ["y"], constants)
    for name, operator in (("openvino", "Sum"), ("nnapi", "Add"), ("qnn-htp", "Add")):
        made, _, _ = quantize(model, name)
        assert units(made)["add"].node.op_type == operator


def test_a_float_bias_keeps_its_factor(quantize) -> None:
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], "gemm", alpha=0.5, beta=0.25)
    constants = {
        "w": np.random.default_rng(0).normal(0, 0.3, (8, 8)).astype(np.float32),
        "b": np.full(8, 4, np.float32),
    }
    model = to_ir([node], {"x": [4, 8]}, ["y"], constants)
    made, sqnr, _ = quantize(model, "tensorrt")
    assert sqnr > 30
    assert const_array(units(made)["gemm"].node.inputs[2])[0] == 4


@pytest.mark.parametrize(("name", "one"), [("openvino", True), ("qnn-htp", False)])
def test_a_concat_has_one_scale_where_the_target_wants_it(name: str, one: bool, quantize) -> None:
    """Whoever else reads an input of it, and with a Relu in front."""
    rng = np.random.default_rng(4)
    make = helper.make_node
    constants = {
        key: rng.normal(0, deviation, (8, 8, 3, 3)).astype(np.float32)
        for key, deviation in (("w0", 0.1), ("w1", 0.3), ("w2", 0.1))
    }
    constants["w3"] = rng.normal(0, 0.1, (8, 16, 3, 3)).astype(np.float32)
    nodes = [
        make("Conv", ["x", "w0"], ["c0"], "c0", pads=[1] * 4),
        make("Relu", ["c0"], ["r0"], "r0"),
        make("Conv", ["r0", "w1"], ["c1"], "c1", pads=[1] * 4),
        make("Concat", ["r0", "c1"], ["k"], "concat", axis=1),
        make("Conv", ["r0", "w2"], ["c2"], "c2", pads=[1] * 4),
        make("Conv", ["k", "w3"], ["c3"], "c3", pads=[1] * 4),
        make("Add", ["c2", "c3"], ["y"], "add"),
    ]
    made, sqnr, _ = quantize(to_ir(nodes, {"x": [1, 8, 6, 6]}, ["y"], constants), name)
    unit = units(made)["concat"]
    assert len(unit.activations) == 2
    assert (broken_demand(unit, "same_scales", True) is None) == one
    assert sqnr > 25
    assert not [g for g in check_placement(made, load_target(name)).groups() if one]


@pytest.mark.parametrize("name", ["cuda", "directml"])
def test_where_integers_are_of_no_use_it_is_said(name: str, quantize) -> None:
    _, _, report = quantize(network(1), name)
    assert any("--mode fp16" in warning for warning in report.warnings)


def test_core_ml_takes_no_integers(quantize) -> None:
    with pytest.raises(PassFailedError, match="quantize --mode fp16"):
        quantize(network(1), "coreml")
