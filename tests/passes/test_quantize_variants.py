"""Static quantization in its variants: types, symmetry, powers of two, weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper
from pydantic import ValidationError

from slimctl.core.errors import SourceError
from slimctl.evaluate.metrics import sqnr_db
from slimctl.graph.session import Level, open_session, run
from slimctl.passes.quantize import Quantize
from slimctl.recipe.run import run_passes
from slimctl.recipe.schema import DataSpec

TEXT = """
    a = Conv<pads=[1,1,1,1]>(x, w1, b1)
    r = Relu(a)
    d = Conv<pads=[1,1,1,1], group=16>(r, w2, b2)
    s = Add(r, d)
    m = MaxPool<kernel_shape=[2,2], strides=[2,2]>(s)
    g = GlobalAveragePool(m)
    f = Flatten(g)
    h = Gemm<transB=1>(f, w3, b3)
    p = Sigmoid(h)
    y = MatMul(p, w4)
"""
SHAPES = {"w1": (16, 3, 3, 3), "w2": (16, 1, 3, 3), "w3": (20, 16), "w4": (20, 8)}
BIASES = {"b1": 16, "b2": 16, "b3": 20}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small network, and data for it."""
    folder = tmp_path_factory.mktemp("variants")
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N,3,12,12] x) => (float[N,8] y) '
        f"{{ {TEXT} }}"
    )
    rng = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        array = rng.normal(0, 1.5 / np.sqrt(np.prod(shape[1:])), shape)
        # Channels of unlike strength, as real networks have them.
        array *= 2.0 ** rng.uniform(-2, 2, (shape[0],) + (1,) * (len(shape) - 1))
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    for name, size in BIASES.items():
        array = rng.normal(0, 0.2, size).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, folder / "m.onnx")
    np.savez(folder / "c.npz", x=rng.normal(0, 1, (24, 3, 12, 12)).astype(np.float32))
    return folder / "m.onnx", folder / "c.npz"


class Made:
    """A quantized model beside its original."""

    def __init__(self, files: tuple[Path, Path], output: Path, **options: Any) -> None:
        self.model, data = files
        settings = {"min_sqnr": 0.0, "calibration": "minmax", **options}
        source = None if options.get("activation_type") == "none" else DataSpec(source=str(data))
        if source is None:
            settings.pop("calibration")
        self.result = run_passes(
            self.model,
            [Quantize.model_validate(settings)],
            output=output,
            calibration=source,
            use_cache=False,
        )
        self.proto = onnx.load(output)
        self.output = output
        with np.load(data) as arrays:
            self.x = arrays["x"]
        self.arrays = {i.name: numpy_helper.to_array(i) for i in self.proto.graph.initializer}

    def run(self, path: Path, level: Level) -> NDArray[Any]:
        return np.asarray(run(open_session(path, level=level), {"x": self.x})["y"])

    def sqnr(self, level: Level = Level.ALL) -> float:
        return sqnr_db(self.run(self.model, Level.ALL), self.run(self.output, level))

    def pairs(self, weights: bool) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Scale and zero point of every DQ of weights, or of activations."""
        return [
            (self.arrays[node.input[1]], self.arrays[node.input[2]])
            for node in self.proto.graph.node
            if node.op_type == "DequantizeLinear" and len(node.input) > 2
            if (node.input[0] in self.arrays) == weights
        ]


VARIANTS: dict[str, dict[str, Any]] = {
    "int8 activations": {"activation_type": "int8"},
    "symmetric uint8": {"symmetric_activations": True},
    "symmetric int8": {"activation_type": "int8", "symmetric_activations": True},
    "uint8 weights": {"weight_type": "uint8"},
    "uint8 weights, one scale": {"weight_type": "uint8", "per_channel": False},
    "one scale": {"per_channel": False},
    "powers of two": {"power_of_two": True},
    "powers of two, symmetric, one scale": {
        "power_of_two": True,
        "symmetric_activations": True,
        "per_channel": False,
        "activation_type": "int8",
    },
    "powers of two, 7 bits": {"power_of_two": True, "reduce_range": "all"},
    "uint16 activations": {"activation_type": "uint16"},
    "int16 symmetric": {"activation_type": "int16", "symmetric_activations": True},
    "weights alone": {"activation_type": "none"},
}
FLOORS = {"powers of two, symmetric, one scale": 14.0, "one scale": 20.0, "powers of two": 20.0}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_runs_at_every_level_and_keeps_the_outputs(
    name: str, files: tuple[Path, Path], tmp_path: Path
) -> None:
    made = Made(files, tmp_path / "o.onnx", **VARIANTS[name])
    floor = FLOORS.get(name, 18.0 if "one scale" in name or "7 bits" in name else 24.0)
    for level in Level:
        assert made.sqnr(level) > floor
    scales = [scale for both in (True, False) for scale, _ in made.pairs(both)]
    assert scales
    assert all(np.all(scale > 0) and np.all(np.isfinite(scale)) for scale in scales)


@pytest.mark.parametrize("name", [name for name in VARIANTS if "weights alone" not in name])
def test_types_and_zero_points_are_as_asked_for(
    name: str, files: tuple[Path, Path], tmp_path: Path
) -> None:
    options = VARIANTS[name]
    made = Made(files, tmp_path / "o.onnx", **options)
    kind = np.dtype(options.get("activation_type", "uint8"))
    assert {zero.dtype for _, zero in made.pairs(False)} == {kind}
    middle = 0 if kind.kind == "i" else 2 ** (8 * kind.itemsize - 1)
    if options.get("symmetric_activations"):
        assert {int(zero) for _, zero in made.pairs(False)} == {middle}
    weights = np.dtype(options.get("weight_type", "int8"))
    for scale, zero in made.pairs(True):
        assert zero.dtype == weights
        assert np.all(zero == (128 if weights == np.uint8 else 0))
        assert scale.ndim == (0 if options.get("per_channel") is False else 1)


def test_powers_of_two_are_exact(files: tuple[Path, Path], tmp_path: Path) -> None:
    made = Made(files, tmp_path / "o.onnx", power_of_two=True)
    for scale, _ in (*made.pairs(True), *made.pairs(False)):
        mantissa, _ = np.frexp(scale)
        assert np.all(mantissa == 0.5)
    int32 = [
        made.arrays[node.input[1]]
        for node in made.proto.graph.node
        if node.op_type == "DequantizeLinear" and len(node.input) == 2
    ]
    assert len(int32) == 3  # biases, whose scales are products
    assert all(np.all(np.frexp(scale)[0] == 0.5) for scale in int32)


def test_each_channel_takes_the_better_neighbor(files: tuple[Path, Path], tmp_path: Path) -> None:
    """By brute force over a few powers: no other one has a lower squared error."""
    made = Made(files, tmp_path / "o.onnx", power_of_two=True, bias_correction=False, fuse=False)
    (name,) = [n for n in made.arrays if n.startswith("w1") and n.endswith("_scale")]
    original = {i.name: numpy_helper.to_array(i) for i in onnx.load(made.model).graph.initializer}
    weight = original["w1"].reshape(16, -1).astype(np.float64)

    def errors(exponents: NDArray[Any]) -> NDArray[Any]:
        scale = 2.0 ** exponents[:, None]
        codes = np.clip(np.rint(weight / scale), -127, 127)
        return np.asarray(((codes * scale - weight) ** 2).sum(axis=1))

    taken = np.log2(made.arrays[name].astype(np.float64))
    for shift in (-2, -1, 1, 2):
        assert np.all(errors(taken) <= errors(taken + shift) * (1 + 1e-9))


def test_sixteen_bits_leave_the_error_of_the_weights(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    wide = Made(files, tmp_path / "wide.onnx", activation_type="uint16", bias_correction=False)
    alone = Made(files, tmp_path / "alone.onnx", activation_type="none")
    narrow = Made(files, tmp_path / "narrow.onnx", bias_correction=False)
    assert abs(wide.sqnr(Level.DISABLED) - alone.sqnr(Level.DISABLED)) < 1.0
    assert wide.sqnr() > narrow.sqnr() + 1.0
    assert wide.proto.opset_import[0].version >= 21


def test_weights_alone_need_no_data_and_no_pairs_between_layers(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    made = Made(files, tmp_path / "o.onnx", activation_type="none")
    operators = [node.op_type for node in made.proto.graph.node]
    assert "QuantizeLinear" not in operators
    assert operators.count("DequantizeLinear") == 4
    stored = {array.dtype.name for array in made.arrays.values() if array.ndim > 1}
    assert stored == {"int8"}


def test_activations_need_data(files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="data"):
        run_passes(files[0], [Quantize()], output=tmp_path / "o.onnx")
    assert not (tmp_path / "o.onnx").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mode": "fp16", "calibration": "kl"}, "calibration has no meaning for mode fp16"),
        ({"mode": "fp16", "bias_correction": False}, "bias_correction"),
        ({"mode": "static", "keep_io": False}, "keep_io"),
        ({"mode": "bf16", "min_sqnr": 3.0}, "min_sqnr"),
    ],
)
def test_options_of_another_mode_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        Quantize.model_validate(options)
