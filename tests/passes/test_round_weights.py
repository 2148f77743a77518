"""Rounding for what a layer computes, as a pass: what it changes, leaves and gains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from slimctl.core.errors import ConfigError
from slimctl.evaluate.metrics import sqnr_db
from slimctl.graph.load import load_model
from slimctl.graph.session import Level, open_session, run
from slimctl.passes.quantize import Quantize
from slimctl.passes.round_weights import RoundWeights
from slimctl.recipe.run import run_passes
from slimctl.recipe.schema import DataSpec

FORMS = {
    "conv": ("float[N,8,10,10] x", "y = Conv<pads=[1,1,1,1]>(x, w, b)", (12, 8, 3, 3), 12),
    "depthwise": ("float[N,8,10,10] x", "y = Conv<group=8>(x, w, b)", (8, 1, 3, 3), 8),
    "grouped": ("float[N,8,10,10] x", "y = Conv<group=2>(x, w, b)", (6, 4, 3, 3), 6),
    "gemm": ("float[N,24] x", "y = Gemm(x, w, b)", (24, 10), 10),
    "gemm, transposed": ("float[N,24] x", "y = Gemm<transB=1, alpha=0.5>(x, w, b)", (10, 24), 10),
    "matmul": ("float[N,5,24] x", "h = MatMul(x, w) y = Add(h, b)", (24, 10), 10),
    "matmul alone": ("float[N,5,24] x", "y = MatMul(x, w)", (24, 10), 0),
}  # fmt: skip


def _correlated(shape: tuple[int, ...], channel_axis: int, seed: int) -> NDArray[Any]:
    """Channels that go together, with means of their own."""
    rng = np.random.default_rng(seed)
    channels = shape[channel_axis]
    mix = np.random.default_rng(5).normal(size=(3, channels))
    common = np.moveaxis(rng.normal(size=shape), channel_axis, -1)[..., :3] @ mix
    # Neighbors in space go together, too.
    offset = 1.5 * rng.normal(size=(shape[0], *(1,) * (common.ndim - 2), channels))
    noise = 0.2 * rng.normal(size=common.shape)
    values = common + offset + noise + np.linspace(0, 2, channels)
    return np.ascontiguousarray(np.moveaxis(values, -1, channel_axis)).astype(np.float32)


@pytest.fixture(params=FORMS)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, Path]:
    """A model of one layer, calibration data and other data."""
    signature, body, shape, biases = FORMS[request.param]
    if "10,10" in signature:
        result = "float[N,M,P,Q] y"
    else:
        result = "float[N,10] y" if "Gemm" in body else "float[N,5,10] y"
    header = f'<ir_version: 8, opset_import: ["": 17]> g ({signature}) => ({result})'
    model = onnx.parser.parse_model(f"{header} {{ {body} }}")
    rng = np.random.default_rng(1)
    weight = rng.normal(0, 0.3, shape).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    if biases:
        bias = rng.normal(0, 0.3, biases).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(bias, "b"))
    onnx.save(model, tmp_path / "m.onnx")
    dims = [int(d) for d in signature[signature.index("[") + 3 : signature.index("]")].split(",")]
    axis = 1 if "10,10" in signature else -1
    count = 64 if axis == 1 else 512
    for name, seed in (("c", 2), ("e", 3)):
        np.savez(tmp_path / f"{name}.npz", x=_correlated((count, *dims), axis, seed))
    return tmp_path / "m.onnx", tmp_path / "c.npz", tmp_path / "e.npz"


def _made(files: tuple[Path, Path, Path], **options: Any) -> tuple[Path, Any]:
    """A quantized model; weights dominate the error since activations have 16 bits."""
    model, data, _ = files
    output = model.with_name("o.onnx")
    settings = {"min_sqnr": 0.0, "activation_type": "uint16", "equalize": False, "smooth": 0.0}
    result = run_passes(
        model,
        [Quantize.model_validate({**settings, **options})],
        output=output,
        calibration=DataSpec(source=str(data)),
        use_cache=False,
        force=True,
    )
    return output, result


def _sqnr(files: tuple[Path, Path, Path], output: Path, level: Level = Level.ALL) -> float:
    with np.load(files[2]) as arrays:
        feeds = {"x": arrays["x"]}
    expected = run(open_session(files[0]), feeds)["y"]
    return sqnr_db(expected, run(open_session(output, level=level), feeds)["y"])


@pytest.mark.parametrize("rounding", ["second-order", "adaround"])
def test_outputs_on_other_data_gain(files: tuple[Path, Path, Path], rounding: str) -> None:
    output, _ = _made(files)
    plain = {i.name: i for i in onnx.load(output).graph.initializer}
    # onnxruntime would compute some of the products with 8-bit activations at other levels.
    before = _sqnr(files, output, Level.DISABLED)
    output, result = _made(files, rounding=rounding)
    step = next(r for r in result.records if r.step.name == "round-weights")
    assert step.step.method == rounding
    assert sum(step.report.changed.values()) == 1
    (left,) = step.report.facts["error_left"].values()
    assert left < 0.7
    assert _sqnr(files, output, Level.DISABLED) > before + 0.2
    after = {i.name: i for i in onnx.load(output).graph.initializer}
    scales = [name for name in plain if name.startswith("w") and name.endswith("_scale")]
    assert scales
    assert all(plain[name] == after[name] for name in scales)


def test_the_same_again_has_the_same_bytes(files: tuple[Path, Path, Path]) -> None:
    first = _made(files, rounding="second-order")[0].read_bytes()
    assert _made(files, rounding="second-order")[0].read_bytes() == first


@pytest.mark.parametrize("weight_type", ["int8", "uint8"])
@pytest.mark.parametrize("per_channel", [True, False])
def test_codes_stay_within_a_step_or_two_of_the_weights(
    files: tuple[Path, Path, Path], weight_type: str, per_channel: bool
) -> None:
    output, _ = _made(
        files, rounding="second-order", weight_type=weight_type, per_channel=per_channel,
        activation_type="uint8",
    )  # fmt: skip
    arrays = {i.name: numpy_helper.to_array(i) for i in onnx.load(output).graph.initializer}
    codes = next(a for n, a in arrays.items() if "_rounded" in n or n == "w_quantized")
    assert codes.dtype == np.dtype(weight_type)
    middle = 128 if weight_type == "uint8" else 0
    assert np.abs(codes.astype(int) - middle).max() <= 127
    assert _sqnr(files, output) > 25


def test_a_step_without_data_or_before_quantization_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="round-weights"):
        run_passes(tmp_path / "m.onnx", [RoundWeights()], output=tmp_path / "o.onnx")


def test_shared_weights_are_left_alone(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N,24] x) => (float[N,24] y) '
        "{ a = MatMul(x, w) r = Relu(a) y = MatMul(r, w) }"
    )
    weight = np.random.default_rng(0).normal(0, 0.2, (24, 24)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "c.npz", x=_correlated((64, 24), -1, 2))
    files = (tmp_path / "m.onnx", tmp_path / "c.npz", tmp_path / "c.npz")
    output, result = _made(files, rounding="second-order")
    step = next(r for r in result.records if r.step.name == "round-weights")
    reasons = {item.reason for item in step.report.skipped}
    stored = [i.name for i in load_model(output).graph.initializers.values() if i.dtype is not None]
    assert reasons == {"several layers share its weights"} or len(step.report.changed) == 1
    assert stored
