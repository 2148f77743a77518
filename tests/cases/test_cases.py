"""Every public bug report, through the path that the commands use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from slimctl.core.errors import SampleError
from slimctl.passes.fuse import Fuse
from slimctl.passes.prune import Prune
from slimctl.passes.quantize import Quantize
from slimctl.recipe.run import run_passes
from slimctl.recipe.schema import DataSpec
from tests.cases.oracle import Case, cases, violations

METHODS = ["auto", "minmax", "kl", "mse", "percentile"]


def _folder_source(case: Case, folder: Path) -> str:
    """The calibration samples as a folder of npz files."""
    source = folder / "calibration"
    source.mkdir()
    for index, feeds in enumerate(case.feeds("calibration")):
        np.savez(source / f"{index}.npz", **feeds)
    return str(source)


def _quantize(case: Case, folder: Path, method: str, **options: bool) -> Path:
    output = folder / "out.onnx"
    run_passes(
        case.model,
        [Quantize.model_validate({"calibration": method})],
        output=output,
        calibration=DataSpec(source=_folder_source(case, folder), **options),
        use_cache=False,
    )
    return output


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", cases("quant_static"), ids=lambda case: case.id)
def test_static_quantization(case: Case, method: str, tmp_path: Path) -> None:
    output = _quantize(case, tmp_path, method, skip_bad_samples=True)
    assert violations(case, output, "quant_static") == []


def test_sample_with_nan_is_named_unless_it_may_be_skipped(tmp_path: Path) -> None:
    (case,) = [case for case in cases("quant_static") if case.id == "B18"]
    with pytest.raises(SampleError, match="NaN"):
        _quantize(case, tmp_path, "minmax")
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("case", [*cases("fuse"), *cases("quant_static")], ids=lambda case: case.id)
def test_fusion(case: Case, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    run_passes(case.model, [Fuse()], output=output)
    found = violations(case, output, "fuse")
    assert found == []


@pytest.mark.parametrize("with_data", [False, True], ids=["weights only", "with data"])
@pytest.mark.parametrize("structure", ["channel", "head"])
@pytest.mark.parametrize("case", cases("prune"), ids=lambda case: case.id)
def test_pruning(case: Case, structure: str, with_data: bool, tmp_path: Path) -> None:
    if structure == "head" and case.id == "B49":
        pytest.skip("it has no attention")
    output = tmp_path / "out.onnx"
    run_passes(
        case.model,
        [Prune(structure=structure, sparsity=0.5, round_to=1, min_channels=1)],
        output=output,
        calibration=DataSpec(source=_folder_source(case, tmp_path)) if with_data else None,
    )
    assert violations(case, output, "prune") == []


def test_training_batch_normalization_is_reported(tmp_path: Path) -> None:
    (case,) = cases("fuse")
    result = run_passes(case.model, [Fuse()], output=tmp_path / "out.onnx")
    (step,) = result.records
    assert any("training" in item.reason for item in step.report.skipped)


def test_oracle_sees_a_broken_result(tmp_path: Path) -> None:
    """The oracle itself can fail: a scale that is twice too large, and a renamed output."""
    (case,) = [case for case in cases("quant_static") if case.id == "B05"]
    output = _quantize(case, tmp_path, "minmax")
    model = onnx.load(output)
    for item in model.graph.initializer:
        if item.name.startswith("W_scale"):
            item.CopyFrom(
                onnx.numpy_helper.from_array(2 * onnx.numpy_helper.to_array(item), item.name)
            )
    onnx.save(model, output)
    assert any("dB" in problem for problem in violations(case, output, "quant_static"))
