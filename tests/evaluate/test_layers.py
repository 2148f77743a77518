"""Layers against the reference where passes scaled channels of the tensors between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from benchmarks.planted import FAULTS, names_of
from slimctl.evaluate.verification import verify_model
from slimctl.graph.edit import clone_model
from slimctl.graph.load import load_model
from slimctl.graph.save import save_model
from slimctl.graph.scaled import KEY, record_scaling, recorded_scaling
from slimctl.passes.quantize import Quantize
from slimctl.passes.quantize_static import QuantizeStatic
from slimctl.passes.smooth import Smooth
from slimctl.recipe.run import run_passes
from slimctl.recipe.schema import DataSpec
from tests.passes import test_equalize, test_smooth


def test_records_multiply_and_are_saved_with_the_model(tmp_path: Path) -> None:
    model = test_equalize._network(1.0)
    value = next(v for node in model.graph for v in node.outputs if v.name == "a")
    first, second = np.array([1 / 3, 1, 7e-5]), np.array([3, 1, 2.0])
    record_scaling(value, 1, first)
    record_scaling(value, 1, second)
    record_scaling(value, -1, np.array([0.5, 1.0]))
    save_model(model, tmp_path / "model.onnx")
    loaded = load_model(tmp_path / "model.onnx")
    again = next(v for node in loaded.graph for v in node.outputs if v.name == "a")
    factors = recorded_scaling(again, 4)
    assert factors is not None
    assert factors.shape == (1, 3, 1, 2)
    wanted = first.astype(np.float32) * second
    np.testing.assert_allclose(factors[0, :, 0, 1], wanted, rtol=1e-7)
    np.testing.assert_array_equal(factors[0, :, 0, 0], factors[0, :, 0, 1] / 2)


def test_what_is_taken_back_leaves_no_record() -> None:
    value = ir.Value(name="x")
    record_scaling(value, 0, np.array([2.0, 4.0]))
    record_scaling(value, 0, np.array([0.5, 0.25]))
    assert KEY not in value.metadata_props
    assert recorded_scaling(value, 2) is None


def _records(model: ir.Model) -> int:
    return sum(KEY in value.metadata_props for node in model.graph for value in node.outputs)


def _quantized(model: ir.Model, data: Path, folder: Path, **options: object) -> ir.Model:
    ir.save(model, folder / "model.onnx")
    run_passes(
        folder / "model.onnx",
        [Quantize.model_validate({"calibration": "minmax", "min_sqnr": 0.0, **options})],
        output=folder / "made.onnx",
        calibration=DataSpec(source=str(data)),
        use_cache=False,
    )
    return load_model(folder / "made.onnx")


@pytest.fixture
def equalized(tmp_path: Path) -> tuple[ir.Model, ir.Model, list[dict[str, np.ndarray]]]:
    original = test_equalize._network(2.0)
    samples = test_equalize._samples(8, 1)
    np.savez(tmp_path / "calib.npz", x=samples)
    made = _quantized(original, tmp_path / "calib.npz", tmp_path, equalize=True)
    return made, load_model(tmp_path / "model.onnx"), [{"x": samples[i : i + 1]} for i in range(2)]


def test_an_equalized_model_has_no_faults(equalized: tuple) -> None:  # type: ignore[type-arg]
    made, original, samples = equalized
    assert _records(made) > 3
    found = verify_model(made, samples, reference=original)
    assert not found.faults
    assert len(found.layers) > 6


@pytest.mark.parametrize("fault", ["weights negated", "bias dropped", "weight scales doubled"])
def test_faults_of_an_equalized_model_are_found(fault: str, equalized: tuple) -> None:  # type: ignore[type-arg]
    made, original, samples = equalized
    names = names_of(made, "Conv_a")
    FAULTS[fault](made, "Conv_a")
    found = verify_model(made, samples, reference=original)
    assert found.faults
    assert found.faults[0].node in names


@pytest.mark.parametrize("form", ["normalization", "scale and shift", "two readers"])
def test_a_smoothed_model_has_no_faults(form: str, plain_context: Callable[..., Any]) -> None:
    original, feeds = test_smooth._model(form), test_smooth._feeds()
    made = clone_model(original)
    Smooth(alpha=0.5).apply(made, plain_context(feeds, made))
    assert _records(made) > 0
    quantize = QuantizeStatic(calibration="minmax", min_sqnr=0.0, default_exclusions=False)
    quantize.apply(made, plain_context(feeds, made))
    found = verify_model(made, feeds[:2], reference=original)
    assert found.layers
    assert not found.faults
