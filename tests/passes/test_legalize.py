"""Legalize: the same function in a form that the provider takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper
from pydantic import ValidationError

from slimctl.core.contract import Effect, PassReport
from slimctl.core.errors import OptionError
from slimctl.graph.edit import interface
from slimctl.graph.session import Level, open_session, run
from slimctl.passes.legalize import Legalize
from slimctl.targets import load_target
from slimctl.targets.check import check_placement
from tests.targets.graphs import IMAGE, Pairs, convolution, network, to_ir


@pytest.fixture
def legalize(plain_context):
    """Legalizes a model in place for a target; checks that it stays valid and finishes the work."""

    def apply(model: ir.Model, name: str, **options: Any) -> PassReport:
        target = load_target(name)
        step = Legalize(**options).resolve(target)
        report = step.apply(model, plain_context([], model, target=target))
        again = step.model_copy(update={"dims": ()})
        assert not again.apply(model, plain_context([], model, target=target)).changed
        return report

    return apply


def outputs(model: ir.Model, seed: int = 0) -> list[np.ndarray]:
    session = open_session(model, level=Level.DISABLED, threads=1)
    rng = np.random.default_rng(seed)
    feeds = {
        port.name: rng.normal(size=[d if isinstance(d, int) else 1 for d in port.shape or ()])
        for port in interface(model).inputs
    }
    return list(run(session, {k: v.astype(np.float32) for k, v in feeds.items()}).values())


def operators(model: ir.Model, op_type: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == op_type]


# sizes


def test_the_batch_is_fixed_where_models_are_compiled(legalize) -> None:
    model = network("N")
    expected = outputs(model)
    report = legalize(model, "qnn-htp")
    assert report.changed == {"fixed sizes": 1}
    ports = interface(model)
    assert ports.inputs[0].shape == (1, 3, 8, 8)
    assert ports.outputs[0].shape == (1, 5)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    np.testing.assert_array_equal(outputs(model)[0], expected[0])
    assert check_placement(model, load_target("qnn-htp")).fallbacks == ()


def test_open_sizes_stay_where_nobody_minds(legalize) -> None:
    model = network("N")
    report = legalize(model, "cpu")
    assert (report.changed, report.skipped) == ({}, ())
    assert report.notes == ("cpu takes this form",)
    assert interface(model).inputs[0].shape == ("N", 3, 8, 8)


def test_sizes_by_symbol_and_by_place(legalize) -> None:
    node = helper.make_node("Relu", ["x"], ["y"], "relu")
    model = to_ir([node], {"x": ["N", "length", None]}, ["y"])
    report = legalize(model, "qnn-htp", dims=("length=7", "x[2]=5"))
    assert report.changed == {"fixed sizes": 3}
    assert interface(model).outputs[0].shape == (1, 7, 5)


def test_sizes_that_stay_open_are_said(legalize) -> None:
    node = helper.make_node("Relu", ["x"], ["y"], "relu")
    model = to_ir([node], {"x": ["N", "length"]}, ["y"])
    report = legalize(model, "nnapi", batch=4)
    assert interface(model).inputs[0].shape == (4, "length")
    assert [item.node for item in report.skipped] == ["input 'x'"]
    assert "length" in report.skipped[0].reason


def test_a_symbol_is_one_size_everywhere(legalize) -> None:
    node = helper.make_node("Add", ["a", "b"], ["y"], "add")
    model = to_ir([node], {"a": ["N", 3], "b": ["N", 3]}, ["y"])
    assert legalize(model, "cpu", dims=("N=2",)).changed == {"fixed sizes": 2}
    assert [port.shape for port in interface(model).inputs] == [(2, 3), (2, 3)]


def test_outputs_behind_unknown_operators_follow_their_symbol(legalize) -> None:
    proto = ir.to_proto(network("N"))
    proto.graph.node[-1].domain = "com.example"
    proto.opset_import.append(helper.make_opsetid("com.example", 1))
    model = ir.from_proto(proto)
    legalize(model, "qnn-htp")
    assert interface(model).outputs[0].shape == (1, 5)


def test_unknown_names_and_bad_sizes(legalize) -> None:
    with pytest.raises(OptionError, match="did you mean 'bach'"):
        legalize(network("bach"), "qnn-htp", dims=("batch=1",))
    for text in ("N", "N=0", "=1", "N=x"):
        with pytest.raises((ValidationError, OptionError)):
            Legalize(dims=(text,))


def test_the_effect_is_that_of_the_options() -> None:
    assert Legalize().resolve(load_target("cpu")).actual_effect() is Effect.EXACT
    assert Legalize().resolve(load_target("qnn-htp")).actual_effect() is Effect.INTERFACE
    assert Legalize(dims=("N=1",)).actual_effect() is Effect.INTERFACE
    assert Legalize(batch=0).resolve(load_target("qnn-htp")).actual_effect() is Effect.EXACT


# nodes


def test_a_float_bias_for_tensorrt(legalize) -> None:
    build = convolution(activation=np.asarray(0, np.int8))
    build.constants["b_codes"] = np.arange(-4, 4, dtype=np.int32) * 40
    model = build.model()
    expected = outputs(model)
    assert legalize(model, "tensorrt").changed == {"float bias": 1}
    np.testing.assert_array_equal(outputs(model)[0], expected[0])
    bias = operators(model, "Conv")[0].inputs[2]
    assert bias is not None
    np.testing.assert_array_equal(bias.const_value.numpy(), np.arange(-4, 4) * 40 * 0.03125)
    assert check_placement(model, load_target("tensorrt")).fallbacks == ()


def test_a_shared_dq_is_copied_for_xnnpack(legalize) -> None:
    build = Pairs()
    data = build.quantize("x")
    build.nodes.append(helper.make_node("Softmax", [data], ["a"], "first"))
    build.quantize("a")
    build.operator("AveragePool", [data], kernel_shape=[2, 2])
    build.quantize("y", "sy", "zy")
    model = to_ir(build.nodes, {"x": IMAGE}, ["y_d", "a_d"], build.constants, opset=21)
    expected = outputs(model)
    assert legalize(model, "xnnpack").changed == {"DQ of its own": 1}
    for ours, theirs in zip(outputs(model), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    readers = [len(node.outputs[0].uses()) for node in operators(model, "DequantizeLinear")]
    assert max(readers) == 1
    assert check_placement(model, load_target("xnnpack")).fallbacks == ()


def test_indices_are_counted_from_the_front(legalize) -> None:
    node = helper.make_node("Gather", ["x", "i"], ["y"], "gather", axis=1)
    other = helper.make_node("Gather", ["y", "i"], ["z"], "other", axis=0)
    model = to_ir([node, other], {"x": [4, 6]}, ["z"], {"i": np.array([-1, 2, -3])})
    expected = outputs(model)
    assert legalize(model, "qnn-htp").changed == {"positive indices": 2}
    np.testing.assert_array_equal(outputs(model)[0], expected[0])
    indices = [n.inputs[1].const_value.numpy().tolist() for n in operators(model, "Gather")]
    assert indices == [[5, 2, 3], [3, 2, 1]]


def test_an_axis_of_unknown_size_keeps_its_indices(legalize) -> None:
    node = helper.make_node("Gather", ["x", "i"], ["y"], "gather", axis=1)
    model = to_ir([node], {"x": [4, "L"]}, ["y"], {"i": np.array([-1])})
    report = legalize(model, "qnn-htp")
    reasons = {item.node: item.reason for item in report.skipped}
    assert "not known" in reasons["gather"]


@pytest.mark.parametrize("auto_pad", ["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("strides", [[1, 1], [2, 3]])
def test_attributes_are_written_out(auto_pad: str, strides: list[int], legalize) -> None:
    weight = np.random.default_rng(0).normal(size=(4, 8, 3, 2)).astype(np.float32)
    attributes: dict[str, Any] = {"auto_pad": auto_pad, "strides": strides}
    if not auto_pad.startswith("SAME"):  # onnxruntime refuses both together
        attributes["dilations"] = [1, 2]
    node = helper.make_node("Conv", ["x", "w"], ["y"], "conv", **attributes)
    model = to_ir([node], {"x": [1, 8, 7, 9]}, ["y"], {"w": weight})
    expected = outputs(model)
    assert legalize(model, "vitisai").changed == {"attributes written out": 1}
    conv = operators(model, "Conv")[0]
    assert set(conv.attributes) == {"kernel_shape", "strides", "pads", "dilations", "group"}
    np.testing.assert_array_equal(outputs(model)[0], expected[0])


def test_padding_that_depends_on_open_sizes_is_left(legalize) -> None:
    weight = np.ones((4, 8, 3, 3), np.float32)
    node = helper.make_node("Conv", ["x", "w"], ["y"], "conv", auto_pad="SAME_UPPER")
    model = to_ir([node], {"x": [1, 8, "H", 9]}, ["y"], {"w": weight})
    report = legalize(model, "vitisai")
    assert ("conv", "auto_pad SAME_UPPER needs known sizes") in report.skipped
    assert "auto_pad" in operators(model, "Conv")[0].attributes


def test_bodies_are_rewritten_too(legalize) -> None:
    body = helper.make_graph(
        [helper.make_node("Gather", ["x", "i"], ["g"], "gather")],
        "body",
        [],
        [helper.make_tensor_value_info("g", onnx.TensorProto.FLOAT, [1])],
    )
    other = helper.make_graph(
        [helper.make_node("Gather", ["x", "i"], ["h"], "other")],
        "else_body",
        [],
        [helper.make_tensor_value_info("h", onnx.TensorProto.FLOAT, [1])],
    )
    node = helper.make_node("If", ["c"], ["y"], "if", then_branch=body, else_branch=other)
    constants = {"i": np.array([-1]), "c": np.array(True)}
    model = to_ir([node], {"x": [3]}, ["y"], constants)
    assert legalize(model, "qnn-htp").changed == {"positive indices": 2}
    assert outputs(model)[0].shape == (1,)


# operators


@pytest.mark.parametrize("name", ["HardSwish", "HardSigmoid"])
def test_operators_are_expanded_where_they_are_unknown(name: str, legalize) -> None:
    attributes = {"alpha": 0.3, "beta": 0.4} if name == "HardSigmoid" else {}
    nodes = [
        helper.make_node(name, ["x"], ["a"], "first", **attributes),
        helper.make_node(name, ["a"], ["y"], "last"),
    ]
    model = to_ir(nodes, {"x": [2, 5]}, ["y"])
    expected = outputs(model)
    assert legalize(model, "nnapi").changed == {f"{name} expanded": 2}
    np.testing.assert_allclose(outputs(model)[0], expected[0], rtol=1e-6, atol=1e-6)
    assert model.graph.outputs[0].name == "y"
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert check_placement(model, load_target("nnapi")).fallbacks == ()


def test_operators_stay_where_they_are_known(legalize) -> None:
    node = helper.make_node("HardSwish", ["x"], ["y"], "swish")
    for name in ("tensorrt", "cpu", "vitisai", "xnnpack"):  # the last has no Mul
        model = to_ir([node], {"x": [2, 5]}, ["y"])
        assert not legalize(model, name, batch=0).changed


def test_the_operator_set_is_raised_for_parts() -> None:
    node = helper.make_node("HardSigmoid", ["x"], ["y"], "sigmoid")
    model = to_ir([node], {"x": [2]}, ["y"], opset=9)
    assert Legalize().minimum_opset(model, load_target("nnapi")) == 11
    assert Legalize().minimum_opset(model, load_target("cpu")) == 0
