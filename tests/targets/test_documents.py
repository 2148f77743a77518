"""What the profiles of providers that are not installed claim, against what their documents say.

For CUDA and DirectML that is docs/OperatorKernels.md of onnxruntime, read in November 2026, and for
versions of CUDA kernels the registrations in onnxruntime-gpu 1.31.1. The documents on Core ML and
NNAPI come with onnxruntime.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from pydantic import ValidationError

from slimctl.core.rules import OperatorTable
from slimctl.graph.kernels import last_opset
from slimctl.targets import load_target
from slimctl.targets.check import check_placement
from slimctl.targets.demands import broken
from slimctl.targets.placement import NodePlacement
from slimctl.targets.units import unit_of_pair
from tests.targets.graphs import IMAGE, to_ir

FLOAT, HALF, BFLOAT = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16

LISTED = {
    "cuda": {
        *("Attention", "DeformConv", "Gelu", "HardSwish", "LpNormalization", "NonMaxSuppression"),
        *("DequantizeLinear", "MatMulInteger", "QuantizeLinear", "RMSNormalization", "Trilu"),
        *("com.microsoft:GatherBlockQuantized", "com.microsoft:MatMulNBits", "com.microsoft:QMoE"),
        *("com.microsoft:PagedAttention", "com.microsoft:SkipGroupNorm", "com.microsoft:BiasGelu"),
    },
    "directml": {
        *("BitwiseAnd", "ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv"),
        *("QLinearMatMul", "MeanVarianceNormalization", "STFT", "SequenceAt", "CastLike"),
        *("com.microsoft:MatMulNBits", "com.microsoft:QLinearAdd", "com.microsoft:QLinearConcat"),
        *("com.microsoft:QLinearSigmoid", "com.microsoft:MatMulIntegerToFloat"),
    },
    "openvino": {
        *("GRU", "GatherElements", "Gelu", "LayerNormalization", "NonMaxSuppression", "Trilu"),
        *("QLinearMatMul", "ConvInteger"),
    },
    "qnn-htp": {
        *("Ceil", "CumSum", "Einsum", "GatherElements", "GatherND", "GlobalMaxPool", "LSTM"),
        *("Reciprocal", "ScatterND", "Sum", "Upsample", "com.microsoft:FusedMatMul"),
    },
    "xnnpack": {"Conv", "ConvTranspose", "Gemm", "QLinearConv", "com.microsoft:QLinearSoftmax"},
    "tensorrt": {"CumSum", "GRU", "GridSample", "HardSwish", "Mod", "NonZero", "Shrink", "Trilu"},
}
"""Operators that the document names."""

ABSENT = {
    "cuda": {
        *("ConvInteger", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "Hardmax"),
        *("CastLike", "Celu", "STFT", "Acos", "BitwiseAnd", "com.microsoft:QLinearAdd"),
        *("com.microsoft:DynamicQuantizeMatMul", "com.microsoft:MatMulIntegerToFloat"),
    },
    "directml": {
        *("Attention", "Compress", "Gelu", "HardSwish", "Loop", "NonMaxSuppression", "Scan"),
        *("RMSNormalization", "com.microsoft:GatherBlockQuantized", "com.microsoft:QLinearMul"),
        *("com.microsoft:QLinearSoftmax", "com.microsoft:QLinearLeakyRelu", "com.microsoft:QMoE"),
    },
    "openvino": {"Hardmax", "IsNaN", "STFT", "com.microsoft:MatMulNBits"},
    "qnn-htp": {"Erf", "If", "Loop", "GRU", "NonZero", "ConvInteger", "QLinearConv"},
    "xnnpack": {"Add", "Relu", "QLinearMatMul", "com.microsoft:QLinearAdd"},
    "tensorrt": {
        *("BitShift", "Compress", "ConvInteger", "Det", "DynamicQuantizeLinear", "Hardmax"),
        *("MatMulInteger", "MaxUnpool", "QLinearConv", "QLinearMatMul", "Unique"),
    },
}
"""Operators that the document does not name, or says no to."""


@pytest.mark.parametrize("name", LISTED)
def test_listed_operators(name: str) -> None:
    claimed = set(load_target(name).operators.names)
    assert LISTED[name] - claimed == set()
    assert ABSENT[name] & claimed == set()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("coreml", "coreml_supported_mlprogram_ops.md"),
        ("nnapi", "nnapi_supported_ops.md"),
    ],
)
def test_the_lists_that_come_with_onnxruntime(name: str, file: str) -> None:
    spec = find_spec("onnxruntime")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "tools/mobile_helpers" / file).read_text(encoding="utf-8")
    rows = re.findall(r"^\|ai\.onnx:(\w+)\||^\|(com\.microsoft:\w+)\|", text, re.MULTILINE)
    spelled = {"Argmax": "ArgMax"}
    written = {spelled.get(own or other, own or other) for own, other in rows}
    assert set(load_target(name).operators.names) == written


def judged(
    name: str,
    op_type: str,
    *,
    opset: int = 21,
    kind: int = FLOAT,
    inputs: int = 1,
    domain: str = "",
    **attributes: Any,
) -> NodePlacement:
    """What the check says of one node that reads images."""
    names = [f"x{index}" for index in range(inputs)]
    node = helper.make_node(op_type, names, ["y"], "node", domain=domain, **attributes)
    model = to_ir([node], dict.fromkeys(names, IMAGE), ["y"], opset=opset, kind=kind)
    if model.graph.outputs[0].dtype is None:
        model.graph.outputs[0].dtype = ir.DataType(kind)
    return check_placement(model, load_target(name)).nodes[0]


POOL = {"kernel_shape": [2, 2]}


@pytest.mark.parametrize(
    ("name", "op_type", "attributes", "newest", "older"),
    [
        # (operator, newest opset whose version has a kernel, next that has none)
        ("cuda", "MaxPool", POOL, 21, 22),
        ("cuda", "Elu", {}, 21, 22),
        ("cuda", "Selu", {}, 21, 22),
        ("cuda", "ThresholdedRelu", {}, 21, 22),
        ("cuda", "AveragePool", POOL, 27, None),
        ("cuda", "GlobalAveragePool", {}, 27, None),
        ("cuda", "HardSwish", {}, 27, None),
        ("cuda", "Flatten", {}, 27, None),
        ("directml", "MaxPool", POOL, 21, 22),
        ("directml", "AveragePool", POOL, 21, 22),
        ("directml", "GlobalAveragePool", {}, 21, 22),
        ("directml", "Elu", {}, 21, 22),
        ("directml", "Flatten", {}, 22, 23),
        ("directml", "Relu", {}, 27, None),
        ("tensorrt", "MaxPool", POOL, 27, None),  # a parser knows no kernels
    ],
)
def test_newest_versions(
    name: str, op_type: str, attributes: dict[str, Any], newest: int, older: int | None
) -> None:
    assert judged(name, op_type, opset=newest, **attributes).taken
    if older is not None:
        node = judged(name, op_type, opset=older, **attributes)
        assert not node.taken
        (problem,) = node.problems
        assert problem.fix == f"export the model with opset {newest} or older"


@pytest.mark.parametrize(
    ("name", "op_type", "opset"),
    [("directml", "GridSample", 19), ("directml", "ScatterND", 17), ("directml", "If", 20)],
)
def test_operators_with_older_kernels(name: str, op_type: str, opset: int) -> None:
    newest = load_target(name).operators.newest_version(op_type)
    assert newest is not None
    assert last_opset(op_type, newest) == opset


def test_versions_are_versions_of_the_operators() -> None:
    """A typing error would go unnoticed: the next lower version counts."""
    schemas = onnx.defs.get_all_schemas_with_history()
    known = {(schema.name, schema.since_version) for schema in schemas if not schema.domain}
    for name in ("cuda", "directml"):
        assert set(load_target(name).operators.newest_versions.items()) <= known


def test_versions_of_unlisted_operators_are_refused() -> None:
    with pytest.raises(ValidationError, match="Erf"):
        OperatorTable(names=("Elu",), newest_versions={"Erf": 9}, fix="none", document="none")


@pytest.mark.parametrize(
    ("name", "op_type", "kind", "taken"),
    [
        ("cuda", "Relu", BFLOAT, True),
        ("cuda", "Softmax", BFLOAT, True),
        ("cuda", "GlobalAveragePool", HALF, True),
        ("cuda", "GlobalAveragePool", BFLOAT, False),
        ("cuda", "LeakyRelu", BFLOAT, False),
        ("directml", "Relu", HALF, True),
        ("directml", "Relu", BFLOAT, False),
        ("directml", "Gelu", FLOAT, False),
        ("coreml", "Tanh", HALF, True),
    ],
)
def test_types(name: str, op_type: str, kind: int, taken: bool) -> None:
    assert judged(name, op_type, kind=kind).taken == taken


@pytest.mark.parametrize(
    ("name", "op_type", "kind", "taken"),
    [
        ("cuda", "MatMulInteger", TensorProto.INT8, True),
        ("cuda", "MatMulInteger", TensorProto.UINT8, False),
        ("cuda", "GridSample", HALF, False),
        ("cuda", "GridSample", FLOAT, True),
        ("directml", "MatMulInteger", TensorProto.UINT8, True),
        ("directml", "ConvInteger", TensorProto.UINT8, True),
        ("cuda", "ConvInteger", TensorProto.INT8, False),
    ],
)
def test_types_of_two_inputs(name: str, op_type: str, kind: int, taken: bool) -> None:
    opset = 17  # the last before GridSample changed for DirectML
    assert judged(name, op_type, kind=kind, inputs=2, opset=opset).taken == taken


INT8, UINT8, INT4, UINT4 = (getattr(TensorProto, n) for n in ("INT8", "UINT8", "INT4", "UINT4"))
INT16, UINT16, INT32 = TensorProto.INT16, TensorProto.UINT16, TensorProto.INT32

WITH_KERNELS = {
    ("cuda", ""): {INT8, UINT8, INT4, UINT4},
    ("cuda", "com.microsoft"): {INT8, UINT8},
    ("directml", ""): {INT8, UINT8, INT4, UINT4},
    ("directml", "com.microsoft"): {INT8, UINT8},
    ("tensorrt", ""): {INT8},
}
"""Types that Q writes and DQ reads."""


@pytest.mark.parametrize("kind", [INT8, UINT8, INT4, UINT4, INT16, UINT16])
@pytest.mark.parametrize(("name", "domain"), WITH_KERNELS)
def test_types_of_pairs(name: str, domain: str, kind: int) -> None:
    dequantize = helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], "dq", domain=domain)
    add = helper.make_node("Add", ["x", "d"], ["y"], "add")
    report = check_placement(_dequantized([dequantize, add], kind), load_target(name))
    assert report.nodes[0].taken == (kind in WITH_KERNELS[name, domain])


@pytest.mark.parametrize(("name", "kind", "taken"), [("cuda", INT8, True), ("cuda", INT32, False)])
def test_scales_per_channel(name: str, kind: int, taken: bool) -> None:
    """CUDA kernels know them; and none reads int32, which is what biases are stored as."""
    dequantize = helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], "dq", axis=0)
    add = helper.make_node("Add", ["x", "d"], ["y"], "add")
    model = _dequantized([dequantize, add], kind, channels=8)
    values = {value.name: value for value in model.graph.inputs}
    constant = helper.make_tensor("q", kind, [8, 4], np.ones(32, np.int64))
    values["q"].const_value = ir.from_proto(constant)
    model.graph.inputs.remove(values["q"])
    model.graph.register_initializer(values["q"])
    # Alone it would be computed when the model is loaded: what matters is the rule.
    rule = next(rule for rule in load_target(name).rules if rule.name == "pair-types")
    unit = unit_of_pair(next(iter(model.graph)))
    assert (broken(unit, rule.require, 21) is None) == taken
    assert not load_target(name).asks("per_tensor", "DequantizeLinear")


def _dequantized(
    nodes: list[onnx.NodeProto], kind: int, *, channels: int | None = None
) -> ir.Model:
    """A model that reads integers ``q`` and a float ``x``."""
    shape = [] if channels is None else [channels]
    count = channels or 1
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("x", FLOAT, [8, 4]),
            helper.make_tensor_value_info("q", kind, [8, 4]),
        ],
        [helper.make_tensor_value_info("y", FLOAT, [8, 4])],
        [
            helper.make_tensor("s", FLOAT, shape, np.full(count, 0.5)),
            helper.make_tensor("z", kind, shape, np.zeros(count, np.int64)),
        ],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))
