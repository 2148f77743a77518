"""Collection on small models, against running them in onnxruntime and looking at everything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from slimctl.calibration import collect as collect_module
from slimctl.calibration.collect import Statistics, collect
from slimctl.core.contract import Feeds, LinearInput
from slimctl.core.errors import ModelExecutionError

RNG = np.random.default_rng(0)
SMALL = """
<ir_version: 8, opset_import: ["" : 13]>
net (float[N,3,H,W] x) => (float[N,M] y)
<float[4,3,3,3] w, float[4,4,1,1] v, float[4,5] u>
{
  a = Conv <kernel_shape=[3,3], pads=[1,1,0,0], strides=[2,1]> (x, w)
  b = Relu (a)
  c = Conv <kernel_shape=[1,1]> (b, v)
  d = GlobalAveragePool (c)
  e = Flatten (d)
  y = MatMul (e, u)
}
"""
SMALL_LAYERS = (
    LinearInput("first", "x", (3, 3), (2, 1), (1, 1), (1, 1, 0, 0)),
    LinearInput("second", "b", (1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
    LinearInput("third", "e", channel_axis=-1),
)


def _model(text: str, **weights: np.ndarray) -> ir.Model:
    proto = onnx.parser.parse_model(text)
    held = {item.name for item in proto.graph.initializer}
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(array, name)
        for name, array in weights.items()
        if name not in held
    )
    kept = [value for value in proto.graph.input if value.name not in weights]
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    return ir.serde.deserialize_model(proto)


def _small() -> ir.Model:
    text = SMALL.replace("\n<float[4,3,3,3] w, float[4,4,1,1] v, float[4,5] u>", "")
    return _model(
        text,
        w=RNG.normal(size=(4, 3, 3, 3)).astype(np.float32),
        v=RNG.normal(size=(4, 4, 1, 1)).astype(np.float32),
        u=RNG.normal(size=(4, 5)).astype(np.float32),
    )


def _samples(count: int, size: tuple[int, int] = (9, 8)) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(count, 3, *size)).astype(np.float32)


def _one_by_one(x: np.ndarray) -> list[Feeds]:
    return [{"x": x[i : i + 1]} for i in range(len(x))]


def _values(model: ir.Model, name: str, batches: list[Feeds]) -> np.ndarray:
    """A tensor's values from a session of our own making."""
    proto = ir.serde.serialize_model(model)
    proto.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.concatenate([session.run([name], feeds)[0] for feeds in batches])


def _equal(first: Statistics, second: Statistics) -> None:
    assert list(first.histograms) == list(second.histograms)
    for name, histogram in first.histograms.items():
        for key, array in histogram.to_arrays().items():
            np.testing.assert_array_equal(array, second.histograms[name].to_arrays()[key])
    assert first.means.keys() == second.means.keys()
    for name, mean in first.means.items():
        for ours, theirs in zip(mean, second.means[name], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_histograms_hold_what_the_tensors_held() -> None:
    model, batches = _small(), _one_by_one(_samples(6))
    found = collect(model, ["x", "b", "c", "y"], (), batches)
    assert list(found.histograms) == ["x", "b", "c", "y"] and not found.means
    for name in ("b", "c"):
        values = _values(model, name, batches)
        histogram = found.histograms[name]
        assert histogram.size == values.size
        assert histogram.minimum == pytest.approx(values.min(), rel=1e-6, abs=1e-9)
        assert histogram.maximum == pytest.approx(values.max(), rel=1e-6)
        mean = np.average(histogram.bins().center, weights=histogram.bins().weight)
        assert mean == pytest.approx(values.mean(), rel=1e-3, abs=1e-3)


def test_mean_inputs_are_those_of_the_tensors() -> None:
    model, batches = _small(), _one_by_one(_samples(6))
    found = collect(model, (), SMALL_LAYERS, batches)
    assert set(found.means) == {"first", "second", "third"} and not found.histograms
    hidden = _values(model, "b", batches)
    np.testing.assert_allclose(
        found.means["second"].both[:, 0, 0], hidden.mean(axis=(0, 2, 3)), rtol=1e-5
    )
    features = _values(model, "e", batches)
    np.testing.assert_allclose(found.means["third"].both, features.mean(axis=0), rtol=1e-5)


def test_order_of_samples_and_number_of_workers_do_not_matter() -> None:
    model, x = _small(), _samples(12)
    reference = collect(model, ["b", "c"], SMALL_LAYERS, _one_by_one(x), threads=1)
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(len(x))
        other = collect(model, ["b", "c"], SMALL_LAYERS, _one_by_one(x[order]), threads=3)
        _equal(reference, other)


@pytest.mark.parametrize("values_per_run", [1, 1000, 1 << 20])
def test_batches_of_several_samples_are_taken_apart(
    values_per_run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect_module, "_RUN_VALUES", values_per_run)
    model, x = _small(), _samples(12)
    reference = collect(model, ["b", "c"], SMALL_LAYERS, _one_by_one(x))
    joined = collect(model, ["b", "c"], SMALL_LAYERS, [{"x": x[:7]}, {"x": x[7:]}])
    for name, histogram in reference.histograms.items():
        other = joined.histograms[name]
        assert (histogram.size, histogram.rows) == (other.size, other.rows)
        assert other.maximum == pytest.approx(histogram.maximum, rel=1e-5)
    for name, mean in reference.means.items():
        for ours, theirs in zip(mean, joined.means[name], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


MIXING = """
<ir_version: 8, opset_import: ["" : 13]>
net (float[N,3] x) => (float[N,3] y)
{
  m = ReduceMean <axes=[0], keepdims=1> (x)
  y = Sub (x, m)
}
"""


def test_batches_whose_rows_see_each_other_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_module, "_RUN_VALUES", 1)
    x = np.random.default_rng(0).normal(5, 1, (8, 3)).astype(np.float32)
    found = collect(_model(MIXING), ["y"], (), [{"x": x}])
    # Row by row everything would be zero.
    assert found.histograms["y"].maximum == pytest.approx((x - x.mean(axis=0)).max(), rel=1e-5)


def test_a_fixed_batch_stays_together() -> None:
    model = _model(MIXING.replace("float[N,3]", "float[4,3]"))
    found = collect(model, ["y"], (), [{"x": np.eye(4, 3, dtype=np.float32)}])
    assert found.histograms["y"].size == 12


def test_batches_of_different_shapes() -> None:
    model = _small()
    batches = [{"x": _samples(1, size)} for size in ((9, 8), (5, 12), (16, 3))]
    found = collect(model, ["b"], SMALL_LAYERS, batches)
    positions = [_values(model, "b", [feeds])[0].reshape(4, -1) for feeds in batches]
    pixels = np.concatenate(positions, axis=1)
    assert found.histograms["b"].size == pixels.size
    np.testing.assert_allclose(found.means["second"].both[:, 0, 0], pixels.mean(axis=1), rtol=1e-5)


@pytest.mark.parametrize("count", [2, 5, 64])
def test_halves_hold_different_samples_and_make_up_the_whole(count: int) -> None:
    model, x = _small(), _samples(count)
    mean = collect(model, (), SMALL_LAYERS, _one_by_one(x)).means["second"]
    if mean.second is None:  # both samples happen to have hashes of one bucket
        assert count == 2
        return
    assert not np.allclose(mean.first, mean.second)
    # The halves are weighted means of the whole: the weight is the same everywhere.
    share = (mean.both - mean.second) / (mean.first - mean.second)
    np.testing.assert_allclose(share, share.flat[0], rtol=1e-4)
    assert 0.25 <= share.flat[0] <= 0.75


def test_one_sample_has_no_second_half() -> None:
    mean = collect(_small(), (), SMALL_LAYERS, _one_by_one(_samples(1))).means["first"]
    assert mean.second is None
    np.testing.assert_array_equal(mean.first, mean.both)


def test_layers_that_read_alike_share_one_sum() -> None:
    twin = LinearInput("twin", *list(vars(SMALL_LAYERS[1]).values())[1:])
    found = collect(_small(), (), [*SMALL_LAYERS, twin], _one_by_one(_samples(3)))
    assert found.means["twin"] is not None
    np.testing.assert_array_equal(found.means["twin"].both, found.means["second"].both)
    assert found.layers[-1] == twin


def test_samples_with_nan_count_as_left_out() -> None:
    x = _samples(4)
    clean = collect(_small(), ["x"], SMALL_LAYERS[:1], _one_by_one(x[1:]))
    x[0, 0, 0, 0] = np.nan
    found = collect(_small(), ["x"], SMALL_LAYERS[:1], _one_by_one(x))
    assert found.histograms["x"].nan_count == 1
    np.testing.assert_allclose(found.means["first"].both, clean.means["first"].both, rtol=1e-12)


def test_integers_and_empty_tensors_leave_no_range() -> None:
    model = _model(
        """
        <ir_version: 8, opset_import: ["" : 13]>
        net (float[N,3] x) => (float[N,3] y, int64[2] s, float[0,3] z)
        <int64[1] zero = {0}>
        {
          s = Shape (x)
          z = Slice (x, zero, zero)
          y = Relu (x)
        }
        """
    )
    found = collect(model, ["y", "s", "z"], (), [{"x": np.ones((2, 3), np.float32)}])
    assert found.histograms["s"].size == 0 and found.histograms["z"].empty
    assert found.histograms["y"].size == 6


def test_a_model_that_is_not_run_needs_no_session() -> None:
    found = collect(_small(), ["x"], SMALL_LAYERS[:1], _one_by_one(_samples(2)))
    assert found.histograms["x"].size == 2 * 3 * 9 * 8


def test_inputs_that_no_tensor_depends_on_may_be_there() -> None:
    model = _model(
        """
        <ir_version: 8, opset_import: ["" : 13]>
        net (float[N,3] x, float[2] unused) => (float[N,3] y, float[2] z)
        { y = Relu (x)  z = Neg (unused) }
        """
    )
    feeds = {"x": np.ones((1, 3), np.float32), "unused": np.ones(2, np.float32)}
    assert collect(model, ["y"], (), [feeds]).histograms["y"].maximum == 1.0


def test_batches_are_read_no_further_ahead_than_needed() -> None:
    taken: list[int] = []
    finished: list[int] = []

    class Watching:
        def track(self, items: Iterator[Any], *, total: int | None, label: str) -> Iterator[Any]:
            assert total == 20 and label
            for number, item in enumerate(items):
                taken.append(number)
                yield item
                finished.append(number)

    def batches() -> Iterator[Feeds]:
        for feeds in _one_by_one(_samples(20)):
            assert len(taken) - len(finished) <= 1
            yield feeds

    collect(_small(), ["b"], (), batches(), threads=2, progress=Watching(), total=20)
    assert len(finished) == 20


def test_a_batch_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ModelExecutionError):
        collect(_small(), ["b"], (), [{"x": np.zeros((1, 2, 9, 8), np.float32)}])


def test_quantized_models_are_run_as_they_stand() -> None:
    # With all optimizations onnxruntime quantizes the float weight between Q/DQ pairs by itself.
    weight = RNG.normal(size=(4, 3, 3, 3)).astype(np.float32)
    weight[0] *= 300  # one scale for all channels would wipe out the others
    model = _model(
        """
        <ir_version: 8, opset_import: ["" : 13]>
        net (float[N,3,9,8] x) => (float[N,4,7,6] y)
        <float s = {0.02}, uint8 z = {128}, float t = {5.0}>
        {
          q = QuantizeLinear (x, s, z)
          d = DequantizeLinear (q, s, z)
          a = Conv <kernel_shape=[3,3]> (d, w)
          p = QuantizeLinear (a, t, z)
          r = DequantizeLinear (p, t, z)
          y = Relu (r)
        }
        """,
        w=weight,
    )
    x = _samples(2)
    found = collect(model, ["y"], (), _one_by_one(x)).histograms["y"]
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.serde.serialize_model(model).SerializeToString(), options)
    values = session.run(["y"], {"x": x})[0]
    levels, counts = np.unique(values, return_counts=True)
    assert found.bins().weight.tolist() == counts.tolist()
    np.testing.assert_allclose(found.bins().low, levels, rtol=1e-3)
