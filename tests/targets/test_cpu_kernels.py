"""The operator lists of the CPU profiles against what onnxruntime really fuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from slimctl.core.errors import ConfigError, OptionError
from slimctl.targets import load_target, target_names

CPU_TARGETS = ["cpu", "cpu-avx2", "cpu-arm64"]
X = [1, 8, 6, 6]
INT64 = np.int64

# operator: (inputs, attributes, weight shape and axis, constant inputs, outputs, same scale behind)
FORMS: dict[str, dict[str, Any]] = {
    "Conv": {"weight": ((16, 8, 3, 3), 0, True)},
    "ConvTranspose": {"weight": ((8, 16, 3, 3), 1, True)},
    "Gemm": {"inputs": [[4, 8]], "weight": ((8, 16), 1, True)},
    "MatMul": {"inputs": [[2, 4, 8]], "weight": ((8, 16), 1, False)},
    "Add": {"inputs": [X, X]},
    "Mul": {"inputs": [X, X]},
    "Sub": {"inputs": [X, X]},
    "Div": {"inputs": [X, X]},
    "Concat": {"inputs": [X, X], "attributes": {"axis": 1}},
    "AveragePool": {"attributes": {"kernel_shape": [2, 2]}},
    "GlobalAveragePool": {},
    "LeakyRelu": {},
    "Sigmoid": {},
    "Softmax": {},
    "Tanh": {},
    "HardSigmoid": {},
    "Elu": {},
    "Erf": {},
    "PRelu": {"constants": [np.full((8, 1, 1), 0.1, np.float32)]},
    "Pad": {"constants": [np.array([0, 0, 1, 1, 0, 0, 1, 1], INT64)]},
    "MaxPool": {"attributes": {"kernel_shape": [2, 2]}, "moves": True},
    "Reshape": {"constants": [np.array([1, -1], INT64)], "moves": True},
    "Transpose": {"attributes": {"perm": [0, 2, 3, 1]}, "moves": True},
    "Flatten": {"moves": True},
    "Identity": {"moves": True},
    "Squeeze": {"inputs": [[1, 8]], "constants": [np.array([0], INT64)], "moves": True},
    "Unsqueeze": {"constants": [np.array([0], INT64)], "moves": True},
    "Slice": {
        "constants": [np.array([0], INT64), np.array([2], INT64), np.array([1], INT64)],
        "moves": True,
    },
    "Split": {
        "attributes": {"axis": 1},
        "constants": [np.array([4, 4], INT64)],
        "outputs": 2,
        "moves": True,
    },
    "Gather": {"attributes": {"axis": 1}, "constants": [np.array([0, 1], INT64)], "moves": True},
    "Expand": {"inputs": [[1, 8, 1, 1]], "constants": [np.array(X, INT64)], "moves": True},
    "Tile": {"constants": [np.array([1, 2, 1, 1], INT64)], "moves": True},
    "DepthToSpace": {"attributes": {"blocksize": 2}, "moves": True},
    "SpaceToDepth": {"attributes": {"blocksize": 2}, "moves": True},
    "ReduceMax": {"attributes": {"axes": [2, 3]}, "moves": True},
    "ReduceMin": {"attributes": {"axes": [2, 3]}, "moves": True},
    "ReduceMean": {"attributes": {"axes": [2, 3]}},
    "Resize:nearest": {
        "attributes": {"mode": "nearest"},
        "constants": [np.zeros(0, np.float32), np.float32([1, 1, 2, 2])],
        "moves": True,
    },
    "Resize:linear": {
        "attributes": {"mode": "linear"},
        "constants": [np.zeros(0, np.float32), np.float32([1, 1, 2, 2])],
        "moves": True,
    },
}


class _Builder:
    """One operator between Q/DQ pairs."""

    def __init__(self, zero_point: np.ndarray) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.constant("z", zero_point)
        self.constant("s", np.asarray(0.05, np.float32))
        self.constant("other", np.asarray(0.07, np.float32))

    def constant(self, name: str, array: np.ndarray) -> str:
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def pair(self, source: str, scale: str) -> str:
        self.nodes.append(helper.make_node("QuantizeLinear", [source, scale, "z"], [source + "_q"]))
        return self.restore(source + "_q", scale, "z", source + "_d")

    def restore(self, source: str, scale: str, zero: str, name: str, **attributes: int) -> str:
        inputs = [source, scale, zero] if zero else [source, scale]
        self.nodes.append(helper.make_node("DequantizeLinear", inputs, [name], **attributes))
        return name

    def weight(self, shape: tuple[int, ...], axis: int, bias: bool) -> list[str]:
        rng = np.random.default_rng(0)
        self.constant("w", rng.integers(-90, 90, shape).astype(np.int8))
        self.constant("ws", np.full(shape[axis], 0.02, np.float32))
        self.constant("wz", np.zeros(shape[axis], np.int8))
        names = [self.restore("w", "ws", "wz", "w_d", axis=axis)]
        if bias:
            self.constant("b", np.arange(shape[axis], dtype=np.int32))
            self.constant("bs", np.full(shape[axis], 0.001, np.float32))
            names.append(self.restore("b", "bs", "", "b_d", axis=0))
        return names


def _model(name: str, form: dict[str, Any], zero_point: np.ndarray) -> onnx.ModelProto:
    build = _Builder(zero_point)
    shapes = form.get("inputs", [X])
    arguments = [build.pair(f"x{i}", "s") for i in range(len(shapes))]
    if "weight" in form:
        arguments += build.weight(*form["weight"])
    for index, array in enumerate(form.get("constants", [])):
        arguments.append(build.constant(f"c{index}", array))
    outputs = [f"y{i}" for i in range(form.get("outputs", 1))]
    operator = name.split(":", maxsplit=1)[0]
    build.nodes.append(helper.make_node(operator, arguments, outputs, **form.get("attributes", {})))
    results = [build.pair(y, "s" if form.get("moves") else "other") for y in outputs]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        build.nodes,
        "g",
        [value(f"x{i}", TensorProto.FLOAT, shape) for i, shape in enumerate(shapes)],
        [value(name, TensorProto.FLOAT, None) for name in results],
        build.constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _computes_in_integers(model: onnx.ModelProto, folder: Path) -> bool:
    """Whether no DQ stands before the operator once onnxruntime has optimized the graph."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(folder / "optimized.onnx").graph
    outputs = {output.name for output in graph.output}
    return all(
        node.output[0] in outputs for node in graph.node if node.op_type == "DequantizeLinear"
    )


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("target_name", CPU_TARGETS)
def test_profile_lists_what_onnxruntime_computes_in_integers(
    name: str, target_name: str, tmp_path: Path
) -> None:
    target = load_target(target_name)
    zero = np.asarray(128, np.uint8) if target.activation_type == "uint8" else np.zeros((), np.int8)
    operator, _, mode = name.partition(":")
    listed = operator in (
        *target.weighted,
        *target.elementwise,
        *target.unary,
        *target.data_movement,
    ) and (not mode or mode in target.resize_modes)
    assert _computes_in_integers(_model(name, FORMS[name], zero), tmp_path) == listed


def test_every_listed_operator_is_tried() -> None:
    tried = {name.split(":")[0] for name in FORMS}
    for name in CPU_TARGETS:
        target = load_target(name)
        listed = {*target.weighted, *target.elementwise, *target.unary, *target.data_movement}
        assert listed <= tried


@pytest.mark.parametrize("operator", ["Gemm", "MatMul"])
def test_float_output_needs_no_q_behind(operator: str, tmp_path: Path) -> None:
    model = _model(operator, FORMS[operator], np.asarray(128, np.uint8))
    del model.graph.node[-2:]
    model.graph.output[0].name = "y0"
    assert _computes_in_integers(model, tmp_path)
    assert operator in load_target("cpu").float_output


def test_names_and_unknown_names() -> None:
    assert set(CPU_TARGETS) <= set(target_names())
    with pytest.raises(OptionError, match="cpu-avx2"):
        load_target("cpu-avx")


def test_own_profile_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    text = (Path(__file__).parents[2] / "slimctl/targets/cpu.yaml").read_text(encoding="utf-8")
    file.write_text(text.replace("name: cpu", "name: mine"), encoding="utf-8")
    assert load_target(str(file)).name == "mine"
    file.write_text("name: broken\nunknown: 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="unknown"):
        load_target(str(file))
