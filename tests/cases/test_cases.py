"""Every public bug report, through the path that the commands use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from slimctl.core.errors import SampleError
from slimctl.passes.fuse import Fuse
from slimctl.passes.quantize import Quantize
from tests.cases.actions import act, output_in, pruning, static, weight_only
from tests.cases.oracle import Case, cases, violations

METHODS = ["auto", "minmax", "kl", "mse", "percentile"]
ACTIONS = ["quant_static", "quant_dynamic", "weight_only", "fp16", "fuse", "prune"]


def name(case: Case) -> str:
    return case.id


def found(case_id: str) -> Case:
    return next(case for action in ACTIONS for case in cases(action) if case.id == case_id)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", cases("quant_static"), ids=name)
def test_static_quantization(case: Case, method: str, tmp_path: Path) -> None:
    act(case, static(method), tmp_path, skip_bad_samples=True)
    assert violations(case, output_in(tmp_path), "quant_static") == []


@pytest.mark.parametrize("data", [False, True], ids=["no data", "with data"])
@pytest.mark.parametrize("target", ["cpu", "cpu-avx2", "cpu-arm64"])
@pytest.mark.parametrize("case", cases("quant_dynamic"), ids=name)
def test_dynamic_quantization(case: Case, target: str, data: bool, tmp_path: Path) -> None:
    act(case, Quantize(mode="dynamic"), tmp_path, data=data, target=target)
    assert violations(case, output_in(tmp_path), "quant_dynamic") == []


@pytest.mark.parametrize("target", ["cpu", "cpu-avx2"])
@pytest.mark.parametrize("case", cases("quant_dynamic"), ids=name)
def test_dynamic_quantization_of_convolutions(case: Case, target: str, tmp_path: Path) -> None:
    """What B12 and B15 are about is only met when convolutions become integers, too."""
    act(case, Quantize(mode="dynamic", conv=True), tmp_path, data=False, target=target)
    assert violations(case, output_in(tmp_path), "quant_dynamic_conv") == []


def test_a_convolution_left_alone_has_a_reason(tmp_path: Path) -> None:
    records = act(found("B15"), Quantize(mode="dynamic"), tmp_path, data=False).records
    step = next(record for record in records if record.step.name == "quantize-dynamic")
    assert any("'conv'" in item.reason for item in step.report.skipped)
    assert step.report.warnings


@pytest.mark.parametrize("kind", ["int4", "uint4", "int8"])
@pytest.mark.parametrize("form", ["nbits", "qdq"])
@pytest.mark.parametrize("case", cases("weight_only"), ids=name)
def test_weight_only_quantization(case: Case, form: str, kind: str, tmp_path: Path) -> None:
    act(case, weight_only(case, form, kind), tmp_path, data=False)
    assert violations(case, output_in(tmp_path), "weight_only") == []


@pytest.mark.parametrize("data", [False, True], ids=["no data", "with data"])
@pytest.mark.parametrize("case", cases("fp16"), ids=name)
def test_float16(case: Case, data: bool, tmp_path: Path) -> None:
    act(case, Quantize(mode="fp16"), tmp_path, data=data)
    assert violations(case, output_in(tmp_path), "fp16") == []


def test_sample_with_nan_is_named_unless_it_may_be_skipped(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="NaN"):
        act(found("B18"), static("minmax"), tmp_path)
    assert not output_in(tmp_path).exists()


@pytest.mark.parametrize("case", [*cases("fuse"), *cases("quant_static")], ids=name)
def test_fusion(case: Case, tmp_path: Path) -> None:
    act(case, Fuse(), tmp_path, data=False)
    assert violations(case, output_in(tmp_path), "fuse") == []


@pytest.mark.parametrize("data", [False, True], ids=["weights only", "with data"])
@pytest.mark.parametrize("structure", ["channel", "head"])
@pytest.mark.parametrize("case", cases("prune"), ids=name)
def test_pruning(case: Case, structure: str, data: bool, tmp_path: Path) -> None:
    if structure == "head" and case.id == "B49":
        pytest.skip("it has no attention")
    act(case, pruning(structure), tmp_path, data=data)
    assert violations(case, output_in(tmp_path), "prune") == []


def test_training_batch_normalization_is_reported(tmp_path: Path) -> None:
    (case,) = cases("fuse")
    (step,) = act(case, Fuse(), tmp_path, data=False).records
    assert any("training" in item.reason for item in step.report.skipped)


def _change(path: Path, suffix: str, factor: float) -> None:
    """Multiplies some initializers."""
    model = onnx.load(path)
    for item in model.graph.initializer:
        if item.name.endswith(suffix):
            array = (factor * numpy_helper.to_array(item)).astype(np.float32)
            item.CopyFrom(numpy_helper.from_array(array, item.name))
    onnx.save(model, path)


@pytest.mark.parametrize(
    ("case_id", "job", "step", "suffix"),
    [
        ("B05", "quant_static", Quantize.model_validate({"calibration": "minmax"}), "W_scale"),
        ("B15", "quant_dynamic_conv", Quantize(mode="dynamic", conv=True), "_scale"),
        ("B03", "quant_dynamic", Quantize(mode="dynamic"), "_scale"),
        ("B45", "weight_only", Quantize(mode="weight-only"), "_scale"),
    ],
)
def test_oracle_sees_a_broken_result(
    case_id: str, job: str, step: Quantize, suffix: str, tmp_path: Path
) -> None:
    """The oracle itself can fail: scales that are twice too large, or negative."""
    case = found(case_id)
    act(case, step, tmp_path)
    _change(output_in(tmp_path), suffix, 2.0)
    assert any("dB" in problem for problem in violations(case, output_in(tmp_path), job))
    _change(output_in(tmp_path), suffix, -1.0)
    assert any("scale" in problem for problem in violations(case, output_in(tmp_path), job))
