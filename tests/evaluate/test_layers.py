"""Layers against the reference where passes scaled channels of the tensors between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from benchmarks.planted import FAULTS, names_of
from slimctl.core.contract import Outlook
from slimctl.evaluate import weights
from slimctl.evaluate.divergence import locate
from slimctl.evaluate.verification import verify_model
from slimctl.evaluate.weights import check_weights
from slimctl.graph.edit import clone_model
from slimctl.graph.load import load_model
from slimctl.graph.save import save_model
from slimctl.graph.scaled import KEY, record_scaling, recorded_scaling
from slimctl.graph.session import open_session, run
from slimctl.passes.equalize import Equalize
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


@pytest.mark.parametrize("name", ["n_r", "n_s"])
def test_a_tensor_that_could_not_be_scaled_has_no_record(
    name: str, plain_context: Callable[..., Any]
) -> None:
    """Where a multiplication is added instead, the tensor in front of it stays what it was."""
    form = {"n_r": "activation", "n_s": "shared shift"}[name]
    original, feeds = test_smooth._model(form), test_smooth._feeds()
    made = clone_model(original)
    report = Smooth(alpha=0.5).apply(made, plain_context(feeds, made))
    assert report.changed["Mul added"] == 1
    kept = {value.name for node in original.graph for value in node.outputs}
    scaled = {v.name for node in made.graph for v in node.outputs if KEY in v.metadata_props}
    assert len(scaled) == 1
    assert not scaled & kept
    quantize = QuantizeStatic(calibration="minmax", min_sqnr=0.0, default_exclusions=False)
    quantize.apply(made, plain_context(feeds, made))
    assert not verify_model(made, feeds[:2], reference=original).faults


@pytest.mark.parametrize("options", [{"rounding": "second-order"}, {"calibration": "kl"}])
def test_later_passes_keep_the_records(options: dict[str, Any], tmp_path: Path) -> None:
    original = test_equalize._network(2.0)
    np.savez(tmp_path / "calib.npz", allow_pickle=False, x=test_equalize._samples(8, 1))
    made = _quantized(original, tmp_path / "calib.npz", tmp_path, equalize=True, **options)
    records = {v.name for node in made.graph for v in node.outputs if KEY in v.metadata_props}
    assert {"a", "d1", "s1", "d2", "s2", "r"} <= records


def test_integer_operators_of_an_equalized_model_have_no_faults(tmp_path: Path) -> None:
    """Their tensors of codes have no counterpart in the reference, and need no record."""
    original = test_equalize._network(2.0)
    samples = test_equalize._samples(8, 1)
    np.savez(tmp_path / "calib.npz", allow_pickle=False, x=samples)
    made = _quantized(original, tmp_path / "calib.npz", tmp_path, equalize=True, format="qoperator")
    reference = load_model(tmp_path / "model.onnx")
    feeds = [{"x": samples[i : i + 1]} for i in range(2)]
    assert not verify_model(made, feeds, reference=reference).faults


def test_weights_of_an_equalized_model_are_compared(equalized: tuple) -> None:  # type: ignore[type-arg]
    """Rounding toward zero shows in weights whose inputs were scaled, too."""
    made, original, _ = equalized
    assert check_weights(made, original) == []
    FAULTS["weights rounded toward zero"](made, "Conv_h1")
    found = check_weights(made, original)
    assert [finding.node for finding in found] == ["Conv_h1"]


def test_divergence_compares_with_what_a_tensor_means(plain_context: Callable[..., Any]) -> None:
    original = test_equalize._network(2.0)
    feeds = [{"x": array[None]} for array in test_equalize._samples(4, 1)]
    made = clone_model(original)
    context = plain_context(feeds, original)
    context.outlook = lambda model, other, changed: Outlook(20.0, 30.0)
    Equalize().apply(made, context)
    assert _records(made) > 3
    found = locate(original, made, feeds, threads=1)
    assert found.first is None
    for node in made.graph:
        for value in node.outputs:
            value.metadata_props.pop(KEY, None)
    assert locate(original, made, feeds, threads=1).first is not None


WEIGHTS = {
    "Conv": ("Conv(x, w)", (8, 6, 3, 3), (2, 6, 5, 5), 1),
    "Conv, groups": ("Conv<group=2>(x, w)", (8, 3, 3, 3), (2, 6, 5, 5), 1),
    "ConvTranspose": ("ConvTranspose(x, w)", (6, 8, 2, 2), (2, 6, 5, 5), 1),
    "Gemm": ("Gemm(x, w)", (6, 8), (2, 6), 1),
    "Gemm, transposed": ("Gemm<transB=1>(x, w)", (8, 6), (2, 6), 1),
    "MatMul": ("MatMul(x, w)", (6, 8), (2, 3, 6), 2),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_input_factors_take_back_what_the_input_was_multiplied_with(name: str) -> None:
    call, weight_shape, shape, axis = WEIGHTS[name]
    rng = np.random.default_rng(0)
    factors = rng.uniform(0.1, 10.0, 6)
    w, x = (rng.normal(0, 1, each).astype(np.float32) for each in (weight_shape, shape))
    wide = factors.reshape([-1 if i == axis else 1 for i in range(len(shape))])

    def outputs(weight: np.ndarray, data: np.ndarray) -> np.ndarray:
        sizes = ",".join(map(str, shape))
        proto = onnx.parser.parse_model(
            f'<ir_version: 8, opset_import: ["": 17]> g (float[{sizes}] x) => (float y) '
            f"{{ y = {call} }}"
        )
        proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
        return run(open_session(ir.from_proto(proto), threads=1), {"x": data})["y"]

    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float{list(shape)} x, float w) => (float y) '
        f"{{ y = {call} }}"
    )
    node = next(iter(ir.from_proto(proto).graph))
    record_scaling(node.inputs[0], axis, factors)
    own = (w / weights._input_factors(node, w.shape)).astype(np.float32)
    scaled = (x * wide).astype(np.float32)
    np.testing.assert_allclose(outputs(own, scaled), outputs(w, x), rtol=1e-3, atol=1e-4)
