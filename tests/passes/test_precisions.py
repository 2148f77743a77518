"""Precisions beside those of Q/DQ pairs: weights of 4 bits in blocks, float16, and the table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import yaml
from onnx import numpy_helper

from slimctl.core.errors import OptionError, PassFailedError
from slimctl.graph.load import load_model
from slimctl.graph.save import weight_bytes
from slimctl.graph.session import Level, open_session, optimized, run
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._attempt import Work
from slimctl.passes._mixed_frontier import frontier
from slimctl.passes._plan import Plan
from slimctl.passes._precision import Carrier, Kind, Layers
from slimctl.passes._precisions import PRECISIONS
from slimctl.passes.quantize import Quantize
from slimctl.recipe.run import RunResult, run_passes
from slimctl.recipe.schema import DataSpec
from tests.sensitivity.network import LAYERS, small_network

_BODY = """
<ir_version: 9, opset_import: ["" : 21]>
mixed (float[N,64] x) => (float[N,64] y) {
    a = MatMul(x, robust)
    ra = Relu(a)
    b = Gemm(ra, first, bias)
    rb = Relu(b)
    y = MatMul(rb, second)
}
"""
MATRICES = ("robust", "first", "second")
_WIDTH = 64


@pytest.fixture
def matrices(tmp_path: Path) -> Path:
    """Three products; all weights of the first are among 15 levels."""
    model = onnx.parser.parse_model(_BODY)
    random = np.random.default_rng(2)
    for name in MATRICES:
        weight = random.standard_normal((_WIDTH, _WIDTH)) / 8
        if name == "robust":
            weight = np.clip(np.rint(weight * 24), -7, 7) / 24
        model.graph.initializer.append(numpy_helper.from_array(weight.astype(np.float32), name))
    bias = random.standard_normal(_WIDTH).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(bias, "bias"))
    names = iter(MATRICES)
    for node in model.graph.node:
        node.name = next(names) if node.op_type in ("Gemm", "MatMul") else f"other_{node.output[0]}"
    path = tmp_path / "matrices.onnx"
    onnx.save(model, path)
    return path


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """The convolutions of the tests of scans; per tensor conv1 does not bear 8 bits."""
    path = tmp_path / "small.onnx"
    onnx.save(small_network(), path)
    return path


@pytest.fixture
def quantize(tmp_path: Path) -> Callable[..., RunResult]:
    """Quantizes a model to ``made.onnx``."""

    def run(path: Path, target: str = "cpu", **options: Any) -> RunResult:
        model = onnx.load(path)
        shape = [dim.dim_value or 24 for dim in model.graph.input[0].type.tensor_type.shape.dim]
        samples = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
        np.savez(tmp_path / "samples.npz", allow_pickle=False, x=samples)
        settings = {"per_channel": False, "calibration": "minmax", "bias_correction": False}
        step = Quantize.model_validate({**settings, "legalize": False, **options})
        return run_passes(
            path,
            [step],
            output=tmp_path / "made.onnx",
            force=True,
            target=target,
            calibration=DataSpec(source=str(tmp_path / "samples.npz")),
            threads=1,
            use_cache=False,
        )

    return run


@pytest.fixture
def planned(tmp_path: Path, quantize: Callable[..., RunResult]) -> Callable[..., RunResult]:
    """Quantizes by a plan that is written here."""

    def run(path: Path, layers: dict[str, str], target: str = "cpu", **options: Any) -> RunResult:
        plan = tmp_path / "own.yaml"
        plan.write_text(yaml.safe_dump({"version": 2, "layers": layers}))
        return quantize(path, target, plan=str(plan), **options)

    return run


def _layers(result: RunResult) -> dict[str, str]:
    plan = next(r.report.facts["plan"] for r in result.records if "plan" in r.report.facts)
    return dict(plan["layers"])


def _notes(result: RunResult) -> str:
    return " ".join(note for record in result.records for note in record.report.notes)


def _written(tmp_path: Path) -> dict[str, str]:
    """What is in front of the weight of each layer, and its type: ``DequantizeLinear int8``."""
    model = load_model(tmp_path / "made.onnx")
    infer_shapes(model)
    return {node.name or "": _form(node) for node in model.graph if len(node.inputs) > 1}


def _form(node: ir.Node) -> str:
    if node.op_type == "MatMulNBits":
        return f"MatMulNBits {node.attributes['bits'].as_int()}"
    value = node.inputs[1]
    maker = None if value is None else value.producer()
    if maker is None:
        return "" if value is None or value.dtype is None else value.dtype.name
    stored = maker.inputs[0]
    assert stored is not None and stored.dtype is not None
    return f"{maker.op_type} {stored.dtype.name}"


def _runs(tmp_path: Path, path: Path, worst_db: float) -> None:
    """Both without and with optimizations, and near to the float model."""
    shape = [d.dim_value or 8 for d in onnx.load(path).graph.input[0].type.tensor_type.shape.dim]
    feeds = {"x": np.random.default_rng(1).standard_normal(shape).astype(np.float32)}
    expected = run(open_session(path, threads=1), feeds)
    for level in (Level.DISABLED, Level.ALL):
        found = run(open_session(tmp_path / "made.onnx", level=level, threads=1), feeds)
        for name, wanted in expected.items():
            noise = np.square(found[name].astype(np.float64) - wanted).sum()
            assert 10 * np.log10(np.square(wanted).sum() / max(noise, 1e-30)) > worst_db


# choosing


def test_what_bears_4_bits_gets_them_where_bytes_are_short(
    matrices: Path, quantize: Callable[..., RunResult], tmp_path: Path
) -> None:
    """8 bits everywhere are a quarter; only two of three layers can have them."""
    result = quantize(matrices, mixed_precision=True, max_size=0.24, min_sqnr=0.0)
    layers = _layers(result)
    assert layers["robust"] == "int4"
    assert "int4" not in (layers["first"], layers["second"])
    assert _written(tmp_path)["robust"] == "MatMulNBits 4"
    made, before = load_model(tmp_path / "made.onnx"), load_model(matrices)
    assert weight_bytes(made) <= 0.24 * weight_bytes(before)
    _runs(tmp_path, matrices, 25.0)


def test_the_smallest_precision_that_keeps_the_bound_is_chosen(
    matrices: Path, quantize: Callable[..., RunResult]
) -> None:
    """Beside trying all choices of precisions."""
    bound = 24.0
    result = quantize(matrices, mixed_precision=True, minimize="size", min_sqnr=bound)
    chosen = _layers(result)
    bits = sum(PRECISIONS[kind].stored_bits for kind in chosen.values())
    assert (result.records[-1].sqnr_db or 0.0) >= bound
    assert set(chosen.values()) != {"int4"}
    words = ("int8", "int4", "int8-weights")
    smaller = [
        kinds
        for kinds in product(words, repeat=3)
        if sum(PRECISIONS[kind].stored_bits for kind in kinds) < bits
    ]
    assert smaller
    for kinds in smaller:
        plan = _plan_file(matrices, dict(zip(MATRICES, kinds, strict=True)))
        found = quantize(matrices, plan=plan)
        assert (found.records[-1].sqnr_db or 0.0) < bound


def _plan_file(path: Path, layers: dict[str, str]) -> str:
    plan = path.parent / "tried.yaml"
    plan.write_text(yaml.safe_dump({"version": 2, "layers": layers}))
    return str(plan)


def test_everything_becomes_4_bits_where_that_is_enough(
    matrices: Path, quantize: Callable[..., RunResult]
) -> None:
    result = quantize(matrices, mixed_precision=True, minimize="size", min_sqnr=5.0)
    assert set(_layers(result).values()) == {"int4"}
    assert "what costs least keeps the bounds" in _notes(result)


def test_a_sensitive_layer_becomes_float16_on_a_gpu(
    network: Path, quantize: Callable[..., RunResult], tmp_path: Path
) -> None:
    """Nobody says --mode static, though the target would take fp16 for all by itself."""
    result = quantize(network, "cuda", mixed_precision=True, minimize="size", min_sqnr=30.0)
    assert _layers(result) == {**dict.fromkeys(LAYERS, "int8-weights"), "conv1": "fp16"}
    written = _written(tmp_path)
    assert written["conv1"] == "FLOAT16"
    assert {written[name] for name in LAYERS if name != "conv1"} == {"DequantizeLinear INT8"}
    _runs(tmp_path, network, 25.0)


def test_a_sensitive_layer_between_integers_becomes_float16(
    network: Path, quantize: Callable[..., RunResult], tmp_path: Path
) -> None:
    result = quantize(network, "tensorrt", mixed_precision=True, min_sqnr=30.0)
    assert _layers(result) == {**dict.fromkeys(LAYERS, "int8"), "conv1": "fp16"}
    assert _written(tmp_path)["conv1"] == "FLOAT16"
    _runs(tmp_path, network, 25.0)


def test_neighbors_in_float16_have_no_casts_between_them(
    network: Path, planned: Callable[..., RunResult], tmp_path: Path
) -> None:
    planned(network, dict.fromkeys(LAYERS, "fp16"), "cuda")
    model = load_model(tmp_path / "made.onnx")
    casts = [node for node in model.graph if node.op_type == "Cast"]
    around = {use.node.op_type for cast in casts for use in cast.outputs[0].uses()}
    assert "Relu" not in around
    assert {value.dtype for value in model.graph.outputs} == {ir.DataType.FLOAT}
    _runs(tmp_path, network, 50.0)


def test_a_target_without_integers_has_float16(
    network: Path, quantize: Callable[..., RunResult], tmp_path: Path
) -> None:
    result = quantize(network, "coreml", mixed_precision=True)
    assert set(_layers(result).values()) == {"fp16"}
    assert not any("Linear" in node.op_type for node in load_model(tmp_path / "made.onnx").graph)


def test_on_processors_float16_saves_bytes_and_is_not_looked_at_for_time(
    network: Path, quantize: Callable[..., RunResult], tmp_path: Path
) -> None:
    by_time = quantize(network, mixed_precision=True, min_sqnr=30.0)
    assert "fp16" not in _layers(by_time).values()
    by_size = quantize(network, mixed_precision=True, min_sqnr=30.0, minimize="size")
    assert _layers(by_size)["conv1"] == "fp16"
    assert _written(tmp_path)["conv1"] == "Cast FLOAT16"
    _runs(tmp_path, network, 25.0)
    # onnxruntime computes the Cast when it loads the model, and leaves the layer in float.
    fast = optimized(load_model(tmp_path / "made.onnx"), Level.EXTENDED)
    assert "Cast" not in {node.op_type for node in fast.graph}
    operators = {node.name: node.op_type for node in fast.graph}
    assert operators["conv1"] in ("Conv", "FusedConv")


@pytest.mark.parametrize("share", [0.5, 0.51])
def test_half_the_bytes_are_float16(
    network: Path, quantize: Callable[..., RunResult], share: float
) -> None:
    result = quantize(network, mixed_precision=True, max_size=share, min_sqnr=0.0)
    assert set(_layers(result).values()) == {"fp16"}


def test_latency_of_float16_elsewhere_is_not_made_up(
    network: Path, quantize: Callable[..., RunResult]
) -> None:
    result = quantize(network, "cuda", mixed_precision=True, max_latency=50.0, min_sqnr=0.0)
    assert "fp16" not in _layers(result).values()
    assert "says nothing about CUDAExecutionProvider" in _notes(result)
    with pytest.raises(PassFailedError, match="says nothing about CoreML") as caught:
        quantize(network, "coreml", mixed_precision=True, max_latency=50.0)
    assert "leave --max-latency out" in caught.value.fix


# plans


def test_all_precisions_stand_side_by_side(
    network: Path, planned: Callable[..., RunResult], tmp_path: Path
) -> None:
    layers = {
        "conv0": "int8",
        "conv1": "fp16",
        "conv2": "int8-weights",
        "conv3": "int16",
        "head": "int4",
    }
    result = planned(network, layers)
    assert _layers(result) == layers
    written = _written(tmp_path)
    assert written["conv0"] == written["conv2"] == written["conv3"] == "DequantizeLinear INT8"
    assert written["conv1"] == "Cast FLOAT16"
    assert written["head"] == "MatMulNBits 4"
    _runs(tmp_path, network, 15.0)
    left = {item.node for record in result.records for item in record.report.skipped}
    assert left.isdisjoint({"conv1", "conv2", "head"})
    # Given back, it makes the same.
    before = (tmp_path / "made.onnx").read_bytes()
    (tmp_path / "made.plan.yaml").rename(tmp_path / "kept.yaml")
    text = (tmp_path / "kept.yaml").read_text()
    assert all(f"#   {word}" in text for word in PRECISIONS)
    assert Plan.model_validate(yaml.safe_load(text)).version == 2
    planned(network, yaml.safe_load(text)["layers"])
    assert (tmp_path / "made.onnx").read_bytes() == before


@pytest.mark.parametrize(("target", "half"), [("cpu", "Cast FLOAT16"), ("cuda", "FLOAT16")])
def test_layers_without_a_precision_of_their_own_stay_float(
    matrices: Path, planned: Callable[..., RunResult], tmp_path: Path, target: str, half: str
) -> None:
    planned(matrices, {"robust": "int4", "first": "float", "second": "fp16"}, target)
    written = _written(tmp_path)
    assert [written[name] for name in MATRICES] == ["MatMulNBits 4", "FLOAT", half]
    _runs(tmp_path, matrices, 20.0)


class Wrong(NamedTuple):
    """A word that a layer cannot have, what is said about it, and what could be written."""

    layer: str
    word: str
    said: str
    others: str = "int8"
    target: str = "cpu"
    options: Mapping[str, Any] = MappingProxyType({})


@pytest.mark.parametrize(
    "wrong",
    [
        Wrong("conv1", "int4", "no convolution with weights in blocks"),
        Wrong("head", "int4", "openvino does not run that", target="openvino"),
        Wrong("head", "int4", "does not", "int8', or int8-weights, or fp16, or float", "tensorrt"),
        Wrong("conv1", "int8-weights", "has no Conv with weights", "float', or fp16", "coreml"),
        Wrong("conv1", "fp16", "Nnapi.* does not compute in float16", target="nnapi"),
        Wrong("conv1", "int8", "no integer kernel", "int8-weights', or fp16", "cuda"),
        Wrong("conv1", "int16", "--format qoperator has", options={"format": "qoperator"}),
        Wrong("head", "int4", "training has no weights in blocks", options={"mode": "qat"}),
        Wrong("head", "fp16", "training computes in float32", options={"mode": "qat"}),
    ],
    ids=lambda wrong: f"{wrong.word}-{wrong.target}",
)
def test_a_precision_that_a_layer_cannot_have_is_refused(
    network: Path, planned: Callable[..., RunResult], wrong: Wrong
) -> None:
    with pytest.raises(OptionError, match=wrong.said) as caught:
        planned(network, {wrong.layer: wrong.word}, wrong.target, **wrong.options)
    assert f"layer '{wrong.layer}' cannot be {wrong.word}:" in caught.value.what
    assert f"write '{wrong.layer}: {wrong.others}" in caught.value.fix


def test_float16_that_would_overflow_is_refused(
    network: Path, planned: Callable[..., RunResult]
) -> None:
    model = onnx.load(network)
    for item in model.graph.initializer:
        if item.name == "w0":
            item.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(item) * 3e4, "w0"))
    onnx.save(model, network)
    for layer in ("conv0", "conv1"):
        with pytest.raises(OptionError, match=f"'{layer}' cannot be fp16: .* end of float16"):
            planned(network, {layer: "fp16"}, "cuda")


def test_the_operators_of_qoperator_stand_beside_other_precisions(
    network: Path, planned: Callable[..., RunResult], tmp_path: Path
) -> None:
    layers = {
        "conv0": "int8",
        "conv1": "fp16",
        "conv2": "int8",
        "conv3": "int8-weights",
        "head": "int4",
    }
    planned(network, layers, format="qoperator")
    model = load_model(tmp_path / "made.onnx")
    kinds = {node.name: node.op_type for node in model.graph}
    assert kinds["conv0"] == kinds["conv2"] == "QLinearConv"
    assert kinds["head"] == "MatMulNBits"
    _runs(tmp_path, network, 15.0)


@pytest.mark.parametrize("word", ["fp16", "int4"])
def test_passes_behind_find_nothing_to_do_where_there_are_no_integers(
    matrices: Path, planned: Callable[..., RunResult], tmp_path: Path, word: str
) -> None:
    more = {"bias_correction": True, "rounding": "second-order", "format": "qoperator"}
    planned(matrices, dict.fromkeys(MATRICES, word), **more)
    _runs(tmp_path, matrices, 12.0)


# the table


def test_a_new_precision_is_an_entry_of_the_table(
    network: Path,
    planned: Callable[..., RunResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Zero(Kind):
        name: ClassVar[str] = "zero"
        meaning: ClassVar[str] = "all weights are 0"
        stored_bits: ClassVar[float] = 0
        multiplied_bits: ClassVar[int] = 0
        carrier: ClassVar[Carrier] = "real"

        def against(self, layer: str, layers: Layers) -> str:
            return "" if layers.nodes[layer].op_type == "MatMul" else "it is no MatMul"

        def write(self, model: ir.Model, layers: Collection[str], work: Work) -> None:
            for node in [node for node in model.graph if node.name in layers]:
                weight = node.inputs[1]
                assert weight is not None and weight.const_value is not None
                weight.const_value = ir.tensor(np.zeros_like(weight.const_value.numpy()))

    monkeypatch.setitem(PRECISIONS, "zero", Zero())  # type: ignore[arg-type]  # a dict
    assert _layers(planned(network, {"head": "zero"}))["head"] == "zero"
    stored = {v.name: v for v in load_model(tmp_path / "made.onnx").graph.initializers.values()}
    weight = stored["w4"].const_value
    assert weight is not None and not weight.numpy().any()
    with pytest.raises(OptionError, match="'conv0' cannot be zero: it is no MatMul"):
        planned(network, {"conv0": "zero"})


def test_every_entry_is_known_by_its_name() -> None:
    assert {name: kind.name for name, kind in PRECISIONS.items()} == {n: n for n in PRECISIONS}
    assert all(kind.meaning for kind in PRECISIONS.values())


# the knapsack


def _kinds(random: np.random.Generator, layers: int, kinds: int) -> Iterator[dict[str, float]]:
    for _ in range(layers):
        yield {str(kind): float(random.uniform(0, 1)) for kind in range(kinds)}


@pytest.mark.parametrize("seed", range(20))
def test_the_frontier_is_what_trying_every_choice_finds(seed: int) -> None:
    random = np.random.default_rng(seed)
    cost = dict(zip("abcde", _kinds(random, 5, 4), strict=True))
    noise = dict(zip("abcde", _kinds(random, 5, 4), strict=True))

    def total(of: dict[str, dict[str, float]], choice: dict[str, str]) -> float:
        return sum(of[layer][kind] for layer, kind in choice.items())

    every = [dict(zip("abcde", kinds, strict=True)) for kinds in product("0123", repeat=5)]
    found = frontier(cost, noise)
    assert total(cost, found[0]) == pytest.approx(min(total(cost, c) for c in every), abs=0.01)
    assert total(noise, found[-1]) == pytest.approx(min(total(noise, c) for c in every), rel=0.02)
    for choice in found[1:]:
        cheaper = [c for c in every if total(cost, c) <= total(cost, choice) - 0.01]
        least = min((total(noise, c) for c in cheaper), default=np.inf)
        assert total(noise, choice) <= least * 1.02


def test_costs_that_are_all_the_same_leave_the_order_of_precisions() -> None:
    noise = {"a": {"x": 0.0, "y": 0.0}, "b": {"x": 2.0, "y": 1.0}}
    cost = {name: {"x": 1.0, "y": 1.0} for name in noise}
    assert frontier(cost, noise) == [{"a": "x", "b": "y"}]
