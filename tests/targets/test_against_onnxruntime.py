"""What the profiles claim against what the installed onnxruntime does.

ONNX's own node tests are the models: every operator, in every element type that ONNX tests it with.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx.backend.test.loader import load_model_tests
from onnxruntime.capi import onnxruntime_pybind11_state

from slimctl.graph.kernels import why_no_kernel
from slimctl.graph.session import installed_providers, registered_kernels
from slimctl.targets import load_target, target_names
from slimctl.targets.check import check_placement
from tests.targets.graphs import convolution, network

FAILURES = tuple(
    kind
    for kind in vars(onnxruntime_pybind11_state).values()
    if isinstance(kind, type) and issubclass(kind, Exception)
)

EVERY = 7  # of ONNX's 1900 node tests, to keep this short

DIFFERENT = (
    # Expanded into operators of which one has no kernel.
    "test_bernoulli",
    "test_swiglu",
    # An optional input that is absent.
    "test_optional_has_element_empty",
    # Kernels that refuse attributes or the machine's locale when they are made.
    "test_strnormalizer",
    # Expanded into operators that do take bfloat16.
    "test_castlike",
    "test_range_bfloat16",
)
"""Node tests that the check judges otherwise than onnxruntime, and why."""


def node_tests() -> list[onnx.backend.test.case.test_case.TestCase]:
    cases = sorted(load_model_tests(kind="node"), key=lambda case: case.name)
    return [case for case in cases if not case.name.startswith(DIFFERENT)][::EVERY]


def loads(model: onnx.ModelProto) -> bool:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except FAILURES:
        return False
    return True


@pytest.mark.filterwarnings("ignore")
def test_the_cpu_takes_what_loads_and_nothing_else() -> None:
    target = load_target("cpu")
    wrong, refused = [], 0
    for case in node_tests():
        model = case.model or onnx.load(Path(case.model_dir) / "model.onnx")
        there = loads(model)
        refused += not there
        if there != (not check_placement(ir.from_proto(model), target).fallbacks):
            wrong.append(case.name)
    assert wrong == []
    assert refused > 10  # both answers were wanted


@pytest.mark.parametrize("name", [n for n in target_names() if n.startswith("cpu")])
def test_listed_operators_have_kernels(name: str) -> None:
    """Every operator that the quantizer makes integer exists in float, in every version."""
    kernels = {kernel.op_type for kernel in registered_kernels() if not kernel.domain}
    assert load_target(name).integer_operators <= kernels


def test_versions_of_kernels() -> None:
    """Scatter went with version 11, and Gelu came with version 20."""
    for op_type, opset, there in (
        ("Scatter", 9, True),
        ("Scatter", 11, False),
        ("Gelu", 19, False),
    ):
        node = ir.Node("", op_type, [])
        assert (why_no_kernel(node, opset) is None) == there


@pytest.mark.parametrize(
    "name", [n for n in target_names() if load_target(n).provider in installed_providers()]
)
@pytest.mark.parametrize("quantized", [False, True])
def test_placement_is_that_of_the_provider(name: str, quantized: bool, tmp_path: Path) -> None:
    """Where a provider is installed, its nodes are those that the check says it takes."""
    target = load_target(name)
    model = convolution().model() if quantized else network(1)
    report = check_placement(model, target)
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=[target.provider]
    )
    inputs = {i.name: np.zeros(i.shape, np.float32) for i in session.get_inputs()}
    session.run(None, inputs)
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    ran = {
        event["name"].removesuffix("_kernel_time"): event["args"]["provider"] == target.provider
        for event in events
        if event["name"].endswith("_kernel_time")
    }
    assert {node.name: node.taken for node in report.nodes if node.name in ran} == ran
