"""What a metric loses at each output, and through each layer alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks.planted import FAULTS
from slimctl.core.errors import OptionError, SourceError
from slimctl.data.sources import DataSource, open_source
from slimctl.evaluate import drops
from slimctl.evaluate.drops import Drop, MetricDrops, metric_drops, worst, worst_layers
from slimctl.evaluate.layers import LayerError, layer_errors
from slimctl.evaluate.similarity import sqnr_db
from slimctl.graph._normalize import normalize
from slimctl.graph.edit import clone_model, interface
from slimctl.passes.quantize_static import QuantizeStatic
from slimctl.runtime.session import Runtime

SAMPLES = 24


def _network() -> ir.Model:
    """Three convolutions, one of them beside a shortcut, then two outputs with class scores."""
    random = np.random.default_rng(0)
    weights: list[onnx.TensorProto] = []

    def constant(name: str, *shape: int) -> str:
        values = random.normal(scale=0.4, size=shape).astype(np.float32)
        weights.append(numpy_helper.from_array(values, name))
        return name

    def conv(name: str, x: str, channels: int) -> list[onnx.NodeProto]:
        inputs = [x, constant(f"{name}.w", 8, channels, 3, 3), constant(f"{name}.b", 8)]
        made = helper.make_node("Conv", inputs, [f"{name}_out"], name, pads=[1, 1, 1, 1])
        return [made, helper.make_node("Relu", [f"{name}_out"], [f"{name}_relu"], f"{name}.relu")]

    def head(name: str, classes: int) -> onnx.NodeProto:
        inputs = ["flat", constant(f"{name}.w", 8, classes), constant(f"{name}.b", classes)]
        return helper.make_node("Gemm", inputs, [name], f"{name}.fc")

    nodes = [
        *conv("stem", "x", 3),
        *conv("middle", "stem_relu", 8),
        helper.make_node("Add", ["middle_relu", "stem_relu"], ["sum"], "add"),
        *conv("last", "sum", 8),
        helper.make_node("GlobalAveragePool", ["last_relu"], ["pooled"], "pool"),
        helper.make_node("Flatten", ["pooled"], ["flat"], "flatten"),
        head("kind", 10),
        head("color", 6),
    ]
    outputs = (("kind", 10), ("color", 6))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", size]) for n, size in outputs],
        weights,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    model = ir.serde.deserialize_model(proto)
    normalize(model)
    return model


@pytest.fixture(scope="module")
def original() -> ir.Model:
    return _network()


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(SAMPLES, 3, 8, 8)).astype(np.float32)


@pytest.fixture
def source(original: ir.Model, x: np.ndarray, tmp_path: Path) -> DataSource:
    np.savez(tmp_path / "x.npz", x=x)
    return open_source(str(tmp_path / "x.npz"), interface=interface(original), batch_size=5)


@pytest.fixture
def quantized(original: ir.Model, x: np.ndarray, plain_context: Callable[..., Any]) -> ir.Model:
    """With 7-bit weights: no processor's products saturate."""
    made = clone_model(original)
    quantize = QuantizeStatic(calibration="minmax", min_sqnr=0, reduce_range="all")
    quantize.apply(made, plain_context([{"x": x}], original))
    return made


@pytest.fixture
def layers(quantized: ir.Model, original: ir.Model, x: np.ndarray) -> tuple[LayerError, ...]:
    return layer_errors(quantized, original, [{"x": x}])


def changed(model: ir.Model, name: str, change: Callable[[np.ndarray], np.ndarray]) -> ir.Model:
    """A clone with another initializer."""
    clone = clone_model(model)
    value = clone.graph.initializers[name]
    assert value.const_value is not None
    value.const_value = ir.tensor(change(value.const_value.numpy()), name=name)
    return clone


def labeled(model: ir.Model, x: np.ndarray, folder: Path, label: int) -> DataSource:
    """The samples, each with the same label."""
    np.savez(folder / "labeled.npz", x=x, labels=np.full(SAMPLES, label))
    return open_source(str(folder / "labeled.npz"), interface=interface(model))


# outputs ---------------------------------------------------------------------------------------


def test_each_output_has_its_own_drop(original: ir.Model, source: DataSource) -> None:
    worse = changed(original, "color.w", lambda weights: -weights)
    found = metric_drops(worse, original, source, "agreement", threads=1)
    assert [drop.output for drop in found.outputs] == ["kind", "color"]
    kind, color = found.outputs
    assert (kind.reference, kind.model, kind.drop) == (1.0, 1.0, 0.0)
    assert (color.reference, color.drop) == (1.0, 1.0 - color.model)
    assert color.model < 0.5
    document = found.to_dict()
    assert (document["metric"], document["output"]) == ("agreement", "color")
    assert document["drop"] == color.drop
    assert len(document["outputs"]) == 2


def test_an_output_that_is_named_is_the_only_one(original: ir.Model, source: DataSource) -> None:
    found = metric_drops(original, original, source, "agreement:color", threads=1)
    assert found.outputs == (Drop("color", 1.0, 1.0, 0.0),)


def test_labels_say_which_outputs_are_meant(
    original: ir.Model, x: np.ndarray, tmp_path: Path
) -> None:
    """Class 9 is none of the 6 colors."""
    nines = labeled(original, x, tmp_path, 9)
    found = metric_drops(original, original, nines, "top1", threads=1)
    assert [drop.output for drop in found.outputs] == ["kind"]


def test_a_function_measures_the_model(
    original: ir.Model, source: DataSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "size_of.py").write_text(
        "def both(outputs, labels):\n"
        "    return float(abs(outputs['kind']).sum() + abs(outputs['color']).sum())\n"
        "both.higher_is_better = False\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    louder = changed(original, "kind.b", lambda bias: bias + 100)
    found = metric_drops(louder, original, source, "size_of:both", threads=1)
    (drop,) = found.outputs
    assert drop.output == ""
    assert drop.drop == drop.model - drop.reference > 100  # less is better


def test_a_metric_that_no_output_fits_says_what_it_wants(
    original: ir.Model, x: np.ndarray, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match="segmentation maps"):
        metric_drops(original, original, labeled(original, x, tmp_path, 0), "mean-iou", threads=1)


def test_labels_are_wanted_before_anything_runs(original: ir.Model, source: DataSource) -> None:
    with pytest.raises(SourceError, match="top1 needs labels"):
        metric_drops(original, original, source, "top1", threads=1)


def test_nan_is_the_worst_drop() -> None:
    nan = Drop("a", 1.0, float("nan"), float("nan"))
    assert worst([Drop("b", 1.0, 0.0, 1.0), nan, Drop("c", 1.0, 0.5, 0.5)]) is nan


# layers ----------------------------------------------------------------------------------------


def by_layer(found: MetricDrops) -> dict[str, Drop]:
    return {layer.node: layer.worst for layer in found.layers}


def test_the_layer_with_a_fault_costs_the_metric(
    quantized: ir.Model, original: ir.Model, source: DataSource, x: np.ndarray
) -> None:
    FAULTS["weight scales shifted by one channel"](quantized, "middle")
    layers = layer_errors(quantized, original, [{"x": x}])
    found = metric_drops(quantized, original, source, "agreement", layers=layers, threads=1)
    assert len(found.layers) == len(layers) >= 6
    assert found.layers[0].node == "middle"
    assert found.layers[0].worst.drop > 0.1
    lost = [layer.worst.drop for layer in found.layers]
    assert lost == sorted(lost, reverse=True)
    assert max(lost[1:]) < lost[0] / 2  # what follows it gets the reference's tensors


def test_a_layer_alone_is_what_the_built_in_runtime_makes_of_it(
    quantized: ir.Model, original: ir.Model, layers: tuple[LayerError, ...], x: np.ndarray
) -> None:
    codings = drops._codings(quantized, original)
    for layer in layers:
        alone = drops._Alone(
            codings[layer.node, layer.tensor], codings.values(), quantized, original, threads=1
        )
        found, reference = alone.outputs({"x": x})
        expected = with_one_layer(quantized, original, layer, x)
        for name in ("kind", "color"):
            assert sqnr_db(expected[name], found[name]) > 100, layer.node
            assert sqnr_db(reference[name], found[name]) < 100, layer.node


def with_one_layer(
    quantized: ir.Model, original: ir.Model, layer: LayerError, x: np.ndarray
) -> dict[str, np.ndarray]:
    """Through probes: no graph is cut, and onnxruntime is not asked."""
    codings = {c.codes: c for c in drops._codings(quantized, original).values()}
    runtime, ours = Runtime(original), Runtime(quantized)
    names = {name for step in runtime.plan.steps for name in step.outputs}
    real = {"x": x, **runtime.run({"x": x}, keep=sorted(names))}
    made = {}

    def feed(step: Any, name: str, value: Any) -> Any:
        coding = codings.get(name)
        if coding is None:
            return value
        if (coding.node, coding.tensor) == (layer.node, layer.tensor):
            made[layer.tensor] = coding.original(value, np.dtype(np.float32))
        return coding.quantized(coding.meant(real[coding.tensor]))

    ours.run({"x": x}, probe=feed)
    if layer.tensor == "x":
        return runtime.run(made)
    return runtime.run({"x": x}, probe=lambda step, name, value: made.get(name, value))


def test_the_lowest_sqnr_comes_first(layers: tuple[LayerError, ...]) -> None:
    chosen = worst_layers(layers, 3)
    assert len(chosen) == 3
    assert max(layer.own_db for layer in chosen) <= min(
        layer.own_db for layer in layers if layer not in chosen
    )
    assert worst_layers(layers, 0) == []
