"""Static quantization with weights of 4 bits: stored as int4, computed in integers as int8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from slimctl.core.errors import OptionError
from slimctl.evaluate.layers import layer_errors
from slimctl.evaluate.metrics import sqnr_db
from slimctl.graph.cost import node_costs
from slimctl.graph.load import load_model
from slimctl.graph.session import Level, open_session, optimized, run
from slimctl.numerics.affine import (
    INT8_NARROW,
    Affine,
    QuantizedType,
    fake_quantize,
    symmetric_scales,
)
from slimctl.numerics.scale_search import least_squares_scales
from slimctl.passes.quantize import Quantize
from slimctl.passes.quantize_static import QuantizeStatic
from slimctl.recipe.run import run_passes
from slimctl.recipe.schema import DataSpec
from slimctl.runtime.session import Runtime
from slimctl.targets.load import load_target, target_names
from slimctl.targets.units import unit_of

INT4 = QuantizedType(np.dtype(np.int8), -7, 7)

NETWORK = """
<ir_version: 8, opset_import: ["": 17]> g (float[N,3,8,8] x) => (float[N,6] y)
{
  a = Conv<pads=[1,1,1,1]>(x, w1, b1)
  b = Relu(a)
  c = Conv<pads=[1,1,1,1], group=8>(b, w2, b2)
  d = Relu(c)
  e = MaxPool<kernel_shape=[2,2], strides=[2,2]>(d)
  f = Flatten(e)
  h = Gemm<transB=1>(f, w3, b3)
  i = Relu(h)
  j = MatMul(i, w4)
  y = Add(j, b4)
}
"""
SHAPES = {"w1": (8, 3, 3, 3), "w2": (8, 1, 3, 3), "w3": (12, 128), "w4": (12, 6)}
BIASES = {"b1": 8, "b2": 8, "b3": 12, "b4": 6}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A network with every kind of layer, and data."""
    model = onnx.parser.parse_model(NETWORK)
    rng = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        spread = 1.0 / np.sqrt(np.prod(shape[1:]) if name != "w4" else shape[0])
        array = rng.standard_t(5, shape).astype(np.float32) * np.float32(spread)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    for name, size in BIASES.items():
        array = rng.normal(0, 0.1, size).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "c.npz", x=rng.normal(size=(64, 3, 8, 8)).astype(np.float32))
    return tmp_path / "m.onnx", tmp_path / "c.npz"


def _made(files: tuple[Path, Path], **options: Any) -> Path:
    model, data = files
    output = model.with_name("o.onnx")
    settings = {
        **{"weight_type": "int4", "calibration": "minmax", "min_sqnr": 0.0},
        **{"equalize": False, "smooth": 0.0, **options},
    }
    run_passes(
        model,
        [Quantize.model_validate(settings)],
        output=output,
        calibration=DataSpec(source=str(data)),
        use_cache=False,
        force=True,
    )
    return output


def _feeds(files: tuple[Path, Path]) -> dict[str, NDArray[Any]]:
    with np.load(files[1]) as arrays:
        return {"x": arrays["x"]}


def _codes(path: Path) -> dict[str, NDArray[np.int8]]:
    """Stored weights of 4 bits by name."""
    stored = onnx.load(path).graph.initializer
    return {
        tensor.name: numpy_helper.to_array(tensor).astype(np.int8)
        for tensor in stored
        if tensor.data_type == TensorProto.INT4
    }


@pytest.mark.parametrize("per_channel", [True, False])
def test_weights_are_stored_in_four_bits_without_the_lowest(
    files: tuple[Path, Path], per_channel: bool
) -> None:
    model = onnx.load(_made(files, per_channel=per_channel))
    assert model.opset_import[0].version >= 21
    codes = _codes(files[0].with_name("o.onnx"))
    assert sorted(array.shape for array in codes.values()) == sorted(SHAPES.values())
    assert {int(np.abs(array).max()) for array in codes.values()} == {7}
    raw = {t.name: len(t.raw_data) for t in model.graph.initializer}
    assert all(raw[name] == -(-array.size // 2) for name, array in codes.items())
    casts = [node for node in model.graph.node if node.op_type == "Cast"]
    assert {node.input[0] for node in casts} == set(codes)


def test_onnxruntime_computes_them_with_its_integer_kernels(files: tuple[Path, Path]) -> None:
    output = _made(files)
    kinds = [node.op_type for node in optimized(load_model(output)).graph]
    assert kinds.count("QLinearConv") == 2
    assert "QGemm" in kinds
    assert "Cast" not in kinds and "Conv" not in kinds and "Gemm" not in kinds


def test_all_levels_and_our_runtime_compute_the_same(files: tuple[Path, Path]) -> None:
    output, feeds = _made(files), _feeds(files)
    model = load_model(output)
    found = [run(open_session(model, level=level), feeds)["y"] for level in Level]
    found.append(Runtime(model).run(feeds)["y"])
    for array in found:
        assert sqnr_db(found[0], array) > 35  # of what is left are roundings that flip
    assert sqnr_db(run(open_session(files[0]), feeds)["y"], found[0]) > 8


def test_better_rounding_and_biases_help(files: tuple[Path, Path]) -> None:
    expected = run(open_session(files[0]), _feeds(files))["y"]
    reached = []
    for options in (
        {"bias_correction": False},
        {"bias_correction": True},
        {"bias_correction": False, "rounding": "second-order"},
    ):
        output = _made(files, **options)
        codes = _codes(output)
        assert len(codes) == 4
        assert max(int(np.abs(array).max()) for array in codes.values()) == 7
        reached.append(sqnr_db(expected, run(open_session(output), _feeds(files))["y"]))
    assert reached[1] > reached[0] - 0.01  # it is dropped where it does not help
    assert reached[2] > reached[0] + 1


def test_integer_weights_of_eight_bits_stay_as_they_were(files: tuple[Path, Path]) -> None:
    output = _made(files, weight_type="int8")
    assert not _codes(output)
    stored = {t.name: numpy_helper.to_array(t) for t in onnx.load(output).graph.initializer}
    with_floats = {t.name: numpy_helper.to_array(t) for t in onnx.load(files[0]).graph.initializer}
    scale = symmetric_scales(with_floats["w1"], 0, INT8_NARROW)
    np.testing.assert_array_equal(stored["w1_scale"], scale)


def test_costs_rules_and_comparisons_see_through_the_cast(files: tuple[Path, Path]) -> None:
    model, feeds = load_model(_made(files)), _feeds(files)
    cost = next(cost for cost in node_costs(model) if cost.op_type == "Gemm")
    assert cost.parameters == 12 * 128 + 12
    assert cost.weight_bytes == 12 * 128 // 2 + 12 * 4
    gemm = next(node for node in model.graph if node.op_type == "Gemm")
    assert [weight.type for weight in unit_of(gemm).weights] == ["int8"]
    assert len(unit_of(gemm).activations) == 1
    reference = load_model(files[0])
    four = {error.node: error for error in layer_errors(model, reference, [feeds])}
    eight_bits = load_model(_made(files, weight_type="int8"))
    eight = {error.node: error for error in layer_errors(eight_bits, reference, [feeds])}
    name = gemm.name or ""
    assert four[name].expected_steps > 4 * eight[name].expected_steps


def test_targets_that_do_not_widen_refuse(files: tuple[Path, Path]) -> None:
    widening = {name for name in target_names() if load_target(name).narrow_weights}
    assert widening == {"cpu", "cpu-avx2", "cpu-arm64"}
    step = QuantizeStatic(weight_type="int4")
    for name in sorted(set(target_names()) - widening):
        with pytest.raises(OptionError, match="does not widen int4"):
            step.resolve(load_target(name))


def test_operators_on_integers_want_eight_bits() -> None:
    with pytest.raises(ValueError, match="weights of 8 bits"):
        Quantize(weight_type="int4", format="qoperator")


# the search for scales


@pytest.mark.parametrize("axis", [0, 1, None])
def test_searched_scales_leave_less_than_the_largest_weight_does(axis: int | None) -> None:
    weight = np.random.default_rng(0).standard_t(5, (6, 400)).astype(np.float32)

    def error(scale: NDArray[np.float32]) -> NDArray[np.float64]:
        zero = np.zeros(scale.shape, np.int8)
        difference = fake_quantize(weight, Affine(scale, zero, INT4), axis) - weight
        others = None if axis is None else 1 - axis
        return np.asarray(np.sum(difference.astype(np.float64) ** 2, axis=others))

    found = least_squares_scales(weight, axis, INT4)
    assert found.shape == ((weight.shape[axis],) if axis is not None else ())
    largest = error(symmetric_scales(weight, axis, INT4))
    assert np.all(error(found) <= largest)
    assert error(found).sum() < 0.95 * largest.sum()
    if axis == 1:  # six weights: whichever scale happens to hit them
        return
    grid = [error(found * np.float32(share)) for share in np.linspace(0.5, 2.0, 601)]
    assert np.all(error(found) <= 1.02 * np.min(grid, axis=0))


def test_weights_on_a_grid_are_found_exactly() -> None:
    codes = np.array([[-7, 3, 0, 5], [0, 0, 0, 0], [1, -1, 2, 7]], np.float32)
    scale = np.array([0.25, 1.0, 0.0625], np.float32)
    found = least_squares_scales(codes * scale[:, None], 0, INT4)
    np.testing.assert_array_equal(found[[0, 2]], scale[[0, 2]])
    assert found[1] == 0.25  # a channel of zeros has the largest of the others
