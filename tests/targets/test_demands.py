"""Each demand against a node that meets it and one that does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from slimctl.core.rules import Demand
from slimctl.graph.shapes import with_sizes
from slimctl.targets.demands import broken
from slimctl.targets.units import unit_of
from tests.targets.graphs import IMAGE, Pairs, convolution, to_ir

U8, I8, U16 = np.asarray(128, np.uint8), np.asarray(0, np.int8), np.asarray(0, np.uint16)


def conv(**changes: Any) -> ir.Model:
    return convolution(**changes).model()


def sigmoid(scale: float = 1 / 65536) -> ir.Model:
    build = Pairs(activation=U16, output_scale=scale)
    build.operator("Sigmoid", [build.quantize("x")])
    build.quantize("y", "sy", "zy")
    return build.model()


def matmul(left: np.ndarray, weight: type) -> ir.Model:
    build = Pairs(activation=left)
    data = build.quantize("x")
    build.constant("w", np.full((6, 6), 3, weight), 0.5)
    build.operator("MatMul", [data, "w"])
    build.quantize("y", "sy", "zy")
    return build.model()


def half_open() -> ir.Model:
    build = Pairs()
    build.operator("Sigmoid", [build.quantize("x")])
    build.nodes.append(helper.make_node("Identity", ["y"], ["y_d"]))
    return build.model()


def plain(op_type: str, shape: Any = IMAGE, *more: str, **attributes: Any) -> ir.Model:
    constants = {
        "front": np.array([0, 1]),
        "back": np.array([-1, 0]),
        "k": np.ones((8, 8, 3, 3), np.float32),
    }
    node = helper.make_node(op_type, ["x", *more], ["y"], op_type, **attributes)
    inputs = {"x": shape, **{name: shape for name in more if name not in constants}}
    return to_ir([node], inputs, ["y"], {k: v for k, v in constants.items() if k in more})


def pooled_twice() -> ir.Model:
    node = helper.make_node("MaxPool", ["x"], ["y", "i"], "MaxPool", kernel_shape=[2, 2])
    return to_ir([node], {"x": IMAGE}, ["y", "i"])


def shared() -> ir.Model:
    build = Pairs()
    data = build.quantize("x")
    build.operator("Sigmoid", [data])
    build.nodes.append(helper.make_node("Tanh", [data], ["t"], "Tanh"))
    build.quantize("y", "sy", "zy")
    return build.model()


def computed_scale() -> ir.Model:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], "dynamic"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], "DQ"),
        helper.make_node("Sigmoid", ["d"], ["y"], "Sigmoid"),
    ]
    return to_ir(nodes, {"x": IMAGE}, ["y"])


def other_output() -> ir.Model:
    build = Pairs(activation=U8, output_zero=I8)
    build.operator("Sigmoid", [build.quantize("x")])
    build.quantize("y", "sy", "zy")
    return build.model()


def other_zero() -> ir.Model:
    build = Pairs(output_zero=np.asarray(7, np.uint8))
    build.operator("Sigmoid", [build.quantize("x")])
    build.quantize("y", "sy", "zy")
    return build.model()


def moved_weights() -> ir.Model:
    build = convolution()
    build.constants["w_zero"] = np.full(8, 5, np.int8)
    return build.model()


FIXED = {"uint16": {"scale": 1 / 65536, "zero_point": 0}}
WRITTEN = {"kernel_shape": [3, 3], "pads": [0] * 4}

# demand: (what is demanded, operator, a model that meets it, one that does not, what is found)
Case = tuple[Any, str, Callable[[], ir.Model], Callable[[], ir.Model], str]
CASES: dict[str, Case] = {
    "quantized": (True, "Conv", conv, lambda: plain("Conv", IMAGE, "k"), "are float"),
    "complete": (True, "Sigmoid", sigmoid, half_open, "output 'y' is float"),
    "complete, bias": (True, "Conv", conv, lambda: conv(bias=float), "input 'b' is float"),
    "types": (["int64"], "Abs", lambda: plain("Abs"), lambda: plain("Abs"), "'x' is float"),
    "activation_types": (["uint8"], "Conv", conv, lambda: conv(activation=I8), "are int8"),
    "weight_types": (["int8"], "Conv", conv, lambda: conv(weight=np.uint8), "are uint8"),
    "type_pairs": (
        [["uint8", "uint8"], ["int8", "int8"]],
        "MatMul",
        lambda: matmul(U8, np.uint8),
        lambda: matmul(I8, np.uint8),
        "int8 and uint8",
    ),
    "same_types": (
        True,
        "Sigmoid",
        sigmoid,
        other_output,
        "int8 and uint8",
    ),
    "same_scales": (True, "Sigmoid", lambda: sigmoid(0.125), sigmoid, "have different scales"),
    "same_scales, zero point": (
        True,
        "Sigmoid",
        lambda: sigmoid(0.125),
        other_zero,
        "have different scales",
    ),
    "symmetric_activations": (
        True,
        "Conv",
        conv,
        lambda: conv(activation=np.asarray(7, np.uint8)),
        "zero point 7, not 128",
    ),
    "symmetric_weights": (True, "Conv", conv, moved_weights, "zero point 5, not 0"),
    "narrow_weights": (True, "Conv", conv, lambda: conv(lowest=-128), "hold -128"),
    "weight_axes": ([0], "Conv", conv, lambda: conv(channels=1), "axis 1"),
    "weight_axes, none": ([], "Conv", lambda: conv(channels=None), conv, "axis 0"),
    "per_tensor": (True, "Sigmoid", sigmoid, conv, "axis 0"),
    "power_of_two": (True, "Conv", conv, lambda: conv(scale=0.1), "0.1 is no power"),
    "constant_scales": (True, "Sigmoid", sigmoid, computed_scale, "'DQ' has a computed scale"),
    "output_scale": (FIXED, "Sigmoid", sigmoid, lambda: sigmoid(1 / 65535), "1.5259e-05"),
    "bias": ("int32", "Conv", conv, lambda: conv(bias=float), "its bias is float"),
    "bias, float": ("float", "Conv", lambda: conv(bias=float), conv, "its bias is int32"),
    "own_dequantize": (True, "Sigmoid", sigmoid, shared, "'x_DQ' serves other"),
    "static_shapes": (
        True,
        "Abs",
        lambda: plain("Abs"),
        lambda: plain("Abs", ("N", 3, None)),
        "'x' is [N, 3, ?]",
    ),
    "ranks": ([4], "Abs", lambda: plain("Abs"), lambda: plain("Abs", (1, 2)), "2 dimensions"),
    "constant_inputs": (
        [1],
        "Conv",
        conv,
        lambda: plain("Conv", IMAGE, "computed"),
        "'computed' is computed",
    ),
    "nonnegative_inputs": (
        [1],
        "Gather",
        lambda: plain("Gather", IMAGE, "front"),
        lambda: plain("Gather", IMAGE, "back"),
        "holds -1",
    ),
    "attributes": (
        {"mode": ["DCR"]},
        "DepthToSpace",
        lambda: plain("DepthToSpace", IMAGE, blocksize=2),  # the default
        lambda: plain("DepthToSpace", IMAGE, blocksize=2, mode="CRD"),
        "mode is CRD",
    ),
    "explicit_attributes": (
        ["kernel_shape", "pads"],
        "Conv",
        lambda: plain("Conv", IMAGE, "k", **WRITTEN),
        lambda: plain("Conv", IMAGE, "k", pads=[0] * 4),
        "kernel_shape not written",
    ),
    "last_axis": (
        True,
        "Softmax",
        lambda: plain("Softmax"),
        lambda: plain("Softmax", axis=1),
        "axis is 1 of 4",
    ),
    "single_output": (
        True,
        "MaxPool",
        lambda: plain("MaxPool", kernel_shape=[2, 2]),
        pooled_twice,
        "'i' is used",
    ),
    "never": (True, "Abs", sigmoid, lambda: plain("Abs"), "it is Abs"),
}


def found(model: ir.Model, operator: str, demand: Demand) -> list[str]:
    """What is broken at nodes of an operator; of all operators where it is not there."""
    model = with_sizes(model, {})
    nodes = [n for n in model.graph if n.op_type == operator] or [
        node for node in model.graph if node.op_type == "Conv"
    ]
    results = [broken(unit_of(node), demand, model.opset_imports[""]) for node in nodes]
    return [result for result in results if result]


@pytest.mark.parametrize("name", CASES)
def test_demand(name: str) -> None:
    wanted, operator, good, bad, text = CASES[name]
    demand = Demand.model_validate({name.partition(",")[0]: wanted})
    if name == "types":
        assert found(good(), operator, Demand(types=("float",))) == []
    elif name != "never":
        assert found(good(), operator, demand) == []
    assert any(text in result for result in found(bad(), operator, demand))


def test_every_demand_has_a_case() -> None:
    assert {name.partition(",")[0] for name in CASES} == set(Demand.model_fields)


def test_a_relu_is_seen_through() -> None:
    build = Pairs()
    data = build.quantize("x")
    build.constant("w", np.ones((8, 8, 3, 3), np.int8), 0.5)
    build.nodes.append(helper.make_node("Conv", [data, "w"], ["c"], "Conv"))
    build.operator("Relu", ["c"])
    build.quantize("y", "sy", "zy")
    model = build.model()
    units = {node.op_type: unit_of(node, ["Conv"]) for node in model.graph}
    assert unit_of(units["Conv"].node).outputs[0] is None
    assert units["Relu"].leader is units["Conv"].node
    assert units["Conv"].outputs[0] is not None
    assert units["Relu"].is_quantized
    assert broken(units["Conv"], Demand(complete=True), 21) is None
    assert broken(units["Relu"], Demand(complete=True), 21) is None


def test_parameters_are_no_data() -> None:
    build = Pairs()
    build.constants |= {"low": np.float32(0), "high": np.float32(6)}
    build.operator("Clip", [build.quantize("x"), "low", "high"])
    build.quantize("y", "sy", "zy")
    clip = next(node for node in build.model().graph if node.op_type == "Clip")
    assert broken(unit_of(clip), Demand(complete=True), 21) is None


def test_weights_stored_as_float_behind_q_are_weights() -> None:
    build = Pairs()
    data = build.quantize("x")
    build.constants["w"] = np.ones((8, 8, 3, 3), np.float32)
    weight = build.quantize("w", "s", "zw")
    build.constants["zw"] = I8
    build.operator("Conv", [data, weight])
    build.quantize("y", "sy", "zy")
    conv_node = next(node for node in build.model().graph if node.op_type == "Conv")
    assert [item.type for item in unit_of(conv_node).weights] == ["int8"]
