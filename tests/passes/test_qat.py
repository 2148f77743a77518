"""Quantization-aware training: what is trained is what onnxruntime computes afterwards."""

# ruff: noqa: E402 # the check for torch comes before what needs it
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

torch = pytest.importorskip("torch", reason="torch is an extra")

from slimctl.core.errors import OptionError, SampleError, UnsupportedModelError
from slimctl.evaluate.metrics import sqnr_db
from slimctl.graph.edit import clone_model, const_array
from slimctl.graph.load import load_model
from slimctl.graph.select import Selection
from slimctl.graph.session import Level, open_session, run
from slimctl.passes._qat_graph import TrainingCopy
from slimctl.passes._qat_write import write_learned
from slimctl.passes.qat import Qat, _scales
from slimctl.passes.quantize import Quantize
from slimctl.recipe.run import run_passes
from slimctl.recipe.schema import DataSpec
from slimctl.targets.load import load_target
from slimctl.training.module import TrainableGraph
from slimctl.training.scales import Bound, Scales, Step, learned_arrays

IMAGES = """
<ir_version: 8, opset_import: ["": 17]> g (float[N,3,8,8] x) => (float[N,6] y)
{
  a = Conv<pads=[1,1,1,1]>(x, w1, b1)
  b = Relu(a)
  c = Conv<pads=[1,1,1,1], group=8>(b, w2, b2)
  d = Add(b, c)
  e = MaxPool<kernel_shape=[2,2], strides=[2,2]>(d)
  f = Conv(e, w3, b3)
  g1 = Sigmoid(f)
  h = Concat<axis=1>(g1, e)
  i = GlobalAveragePool(h)
  j = Flatten(i)
  y = Gemm<transB=1, alpha=0.5>(j, w4, b4)
}
"""
IMAGE_WEIGHTS = {"w1": (8, 3, 3, 3), "b1": (8,), "w2": (8, 1, 3, 3), "b2": (8,),
                 "w3": (4, 8, 1, 1), "b3": (4,), "w4": (6, 12), "b4": (6,)}  # fmt: skip
ROWS = """
<ir_version: 8, opset_import: ["": 17]> g (float[N,5,24] x) => (float[N,5,6] y)
{
  a = MatMul(x, w1)
  b = Add(a, b1)
  c = Relu(b)
  d = MatMul(c, w2)
  e = Add(d, b2)
  y = Softmax<axis=-1>(e)
}
"""
ROW_WEIGHTS = {"w1": (24, 16), "b1": (16,), "w2": (16, 6), "b2": (6,)}
UP = """
<ir_version: 8, opset_import: ["": 17]> g (float[N,4,6,6] x) => (float[N,6,12,12] y)
{
  a = Conv<pads=[1,1,1,1]>(x, w1, b1)
  b = Relu(a)
  y = ConvTranspose<strides=[2,2], group=2>(b, w2, b2)
}
"""
UP_WEIGHTS = {"w1": (8, 4, 3, 3), "b1": (8,), "w2": (8, 3, 2, 2), "b2": (6,)}
MODELS = {
    "images": (IMAGES, IMAGE_WEIGHTS, (3, 8, 8)),
    "rows": (ROWS, ROW_WEIGHTS, (5, 24)),
    "up": (UP, UP_WEIGHTS, (4, 6, 6)),
}


def written(folder: Path, kind: str, count: int = 96) -> tuple[Path, Path]:
    """A model and data for it."""
    text, weights, shape = MODELS[kind]
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, size in weights.items():
        fan_in = np.prod(size[1:]) if name.startswith("w") else 4
        array = rng.standard_t(5, size).astype(np.float32) / np.float32(np.sqrt(fan_in))
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, folder / "m.onnx")
    x = rng.normal(size=(count, *shape))
    if kind == "rows":  # inputs that go together: a weight can make good for the error of another
        x = x[..., :4] @ rng.normal(size=(4, shape[-1])) + 0.1 * x
    np.savez(folder / "c.npz", x=x.astype(np.float32))
    return folder / "m.onnx", folder / "c.npz"


def quantized(files: tuple[Path, Path], name: str = "q.onnx", **options: Any) -> Any:
    """Runs the quantize command."""
    model, data = files
    settings = {"calibration": "minmax", "min_sqnr": 0.0, "equalize": False, "smooth": 0.0}
    training = options.pop("training", None)
    return run_passes(
        model,
        [Quantize.model_validate({**settings, **options})],
        output=model.with_name(name),
        target=options.pop("target", "cpu"),
        calibration=DataSpec(source=str(data)),
        training=training,
        use_cache=False,
        force=True,
    )


def copied(
    files: tuple[Path, Path], selection: Selection | None = None, paired: bool = False
) -> tuple[ir.Model, TrainingCopy, TrainableGraph, Scales]:
    """The quantized model, and what is trained of it."""
    selection = selection or Selection()
    model, reference = load_model(files[0].with_name("q.onnx")), load_model(files[0])
    copy = TrainingCopy(model, reference, load_target("cpu"), selection, paired=paired)
    module = TrainableGraph(copy.model, selection, also=[scale.name for scale in copy.scales])
    return model, copy, module, _scales(module, copy)


def feeds_of(files: tuple[Path, Path]) -> dict[str, NDArray[Any]]:
    with np.load(files[1]) as arrays:
        return {"x": arrays["x"]}


def moved(module: TrainableGraph, by: float) -> None:
    """As if it had learned."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.weights:
            weight.mul_(1 + by * torch.randn(weight.shape, generator=generator))
    module.apply_masks()


def arrays_of(model: ir.Model) -> dict[str, NDArray[Any]]:
    found = {name: const_array(value) for name, value in model.graph.initializers.items()}
    return {name: array for name, array in found.items() if array is not None}


CASES = [
    ("images", {"weight_type": "int8"}),
    ("images", {"weight_type": "int4"}),
    ("images", {"weight_type": "uint8", "per_channel": False}),
    ("images", {"weight_type": "int8", "activation_type": "int8", "symmetric_activations": True}),
    ("images", {"weight_type": "int4", "rounding": "second-order"}),
    ("rows", {"weight_type": "int8", "per_channel": False}),
    ("rows", {"weight_type": "int4"}),
    ("up", {"weight_type": "int8"}),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_what_is_trained_is_what_onnxruntime_computes(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    files = written(tmp_path, kind)
    quantized(files, **options)
    model, copy, module, scales = copied(files)
    feeds = feeds_of(files)
    for by in (0.0, 0.1):
        moved(module, by)
        result = clone_model(model)
        write_learned(copy, learned_arrays(module.values()), scales.values(), result)
        module.eval()
        names = [node.outputs[0].name or "" for node in model.graph if _is_restored(node)]
        outputs = [value.name or "" for value in model.graph.outputs]
        given = {name: torch.from_numpy(array) for name, array in feeds.items()}
        with torch.no_grad():
            ours = {n: t.numpy() for n, t in module(given, [*names, *outputs]).items()}
        step = max(
            float(array.reshape(())) for name, array in scales_of(result).items() if array.size == 1
        )
        for level in Level:
            theirs = run(open_session(result, level=level, threads=1), feeds)
            for name in outputs:
                assert np.abs(ours[name] - theirs[name]).max() <= step
                assert np.abs(ours[name] - theirs[name]).mean() <= 0.02 * step
        if by == 0.0 and "rounding" not in options:
            assert_same_codes(model, result)
        assert [n.name for n in model.graph] == [n.name for n in result.graph]
        assert list(model.graph.initializers) == list(result.graph.initializers)


def _is_restored(node: ir.Node) -> bool:
    return node.op_type == "DequantizeLinear" and const_array(node.inputs[0]) is None


def scales_of(model: ir.Model) -> dict[str, NDArray[Any]]:
    """Scales of activations."""
    values = [node.inputs[1] for node in model.graph if node.op_type == "QuantizeLinear"]
    arrays = {value.name or "": const_array(value) for value in values if value is not None}
    return {name: array for name, array in arrays.items() if array is not None}


def assert_same_codes(model: ir.Model, other: ir.Model) -> None:
    """An untrained copy gives the integers that were there, one step at most apart for a scale's
    last bit."""
    before, after = arrays_of(model), arrays_of(other)
    for name, array in before.items():
        if array.dtype.kind == "f":
            np.testing.assert_allclose(after[name], array, rtol=1e-6)
        else:
            difference = np.abs(after[name].astype(np.int64) - array.astype(np.int64))
            bound = 1e-6 * np.abs(array.astype(np.int64)).max(initial=0) + 1
            assert difference.max(initial=0) <= bound
            assert array.dtype == np.int32 or np.mean(difference > 0) < 0.01


def test_pairs_of_activations_are_one_node_where_the_q_has_one_reader(tmp_path: Path) -> None:
    files = written(tmp_path, "images")
    quantized(files)
    model, copy, *_ = copied(files)
    of_activations = {node.name for node in model.graph if _is_restored(node)}
    assert of_activations
    assert not of_activations & {node.name for node in copy.model.graph}
    # Two readers share one Q: what the second gets must not be lost with the first.
    first = next(node for node in model.graph if node.op_type == "QuantizeLinear")
    restorer = next(iter(first.outputs[0].uses())).node
    second = ir.Node("", "DequantizeLinear", restorer.inputs, name="second")
    second.outputs[0].name, second.outputs[0].type = "again", restorer.outputs[0].type
    model.graph.insert_after(restorer, second)
    next(iter(restorer.outputs[0].uses())).node.replace_input_with(0, second.outputs[0])
    model.graph.outputs.append(restorer.outputs[0])
    other = TrainingCopy(model, load_model(files[0]), load_target("cpu"), Selection(), paired=False)
    assert {"second", restorer.name} <= {node.name for node in other.model.graph}


def test_equal_scales_where_values_are_moved_stay_equal(tmp_path: Path) -> None:
    files = written(tmp_path, "images")
    quantized(files)
    model, copy, module, scales = copied(files)
    moved(module, 0.1)
    result = clone_model(model)
    write_learned(copy, learned_arrays(module.values()), scales.values(), result)
    pool = next(node for node in result.graph if node.op_type == "MaxPool")
    read, written_as = pool.inputs[0].producer(), next(iter(pool.outputs[0].uses())).node
    assert read.op_type == "DequantizeLinear" and written_as.op_type == "QuantizeLinear"
    before, after = (const_array(node.inputs[1]) for node in (read, written_as))
    assert before == after
    assert before != arrays_of(model)[read.inputs[1].name]


def test_known_ranges_are_kept_and_said(tmp_path: Path) -> None:
    files = written(tmp_path, "images")
    quantized(files)
    model, copy, module, scales = copied(files)
    kept = {name for name, reason in copy.kept.items() if "Sigmoid" in reason}
    assert kept
    moved(module, 0.1)
    result = clone_model(model)
    write_learned(copy, learned_arrays(module.values()), scales.values(), result)
    before, after = arrays_of(model), arrays_of(result)
    assert all(before[name].tobytes() == after[name].tobytes() for name in kept)
    learned = {member for scale in copy.scales for member in scale.members}
    assert learned and not learned & set(copy.kept)


def test_powers_of_two_are_kept(tmp_path: Path) -> None:
    files = written(tmp_path, "rows")
    quantized(files, power_of_two=True)
    _, copy, _, _ = copied(files)
    assert not copy.scales
    assert set(copy.kept.values()) == {"scales are powers of two"}


def test_layers_that_are_not_selected_keep_their_integers(tmp_path: Path) -> None:
    files = written(tmp_path, "images")
    quantized(files, weight_type="int4", rounding="second-order")
    model = load_model(files[0].with_name("q.onnx"))
    last = next(node for node in model.graph if node.op_type == "Gemm")
    model, copy, module, scales = copied(files, Selection(exclude=[last.name or ""]))
    moved(module, 0.1)
    result = clone_model(model)
    write_learned(copy, learned_arrays(module.values()), scales.values(), result)
    before, after = arrays_of(model), arrays_of(result)
    changed = {n for n, a in before.items() if a.tobytes() != after[n].tobytes()}
    gemm = next(node for node in result.graph if node.op_type == "Gemm")
    stored = gemm.inputs[1].producer().inputs[0].producer().inputs[0]
    assert stored.name not in changed
    assert gemm.inputs[1].producer().inputs[1].name not in changed
    assert len(changed) > 8


def test_pruned_weights_stay_pruned(tmp_path: Path) -> None:
    files = written(tmp_path, "images")
    model = onnx.load(files[0])
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    weight = numpy_helper.to_array(stored["w1"]).copy()
    weight[np.random.default_rng(1).random(weight.shape) < 0.5] = 0
    stored["w1"].CopyFrom(numpy_helper.from_array(weight, "w1"))
    onnx.save(model, files[0])
    quantized(files, weight_type="int4")
    found, copy, module, scales = copied(files)
    index = module.learned.index("w1_scale_float")
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    given = {name: torch.from_numpy(array) for name, array in feeds_of(files).items()}
    module(given, ["y"])["y"].square().sum().backward()
    optimizer.step()
    module.apply_masks()
    scales.keep()
    assert bool((module.weights[index].detach().numpy()[weight == 0] == 0).all())
    result = clone_model(found)
    write_learned(copy, learned_arrays(module.values()), scales.values(), result)
    codes = arrays_of(result)["w1_quantized"].astype(int)
    assert not codes[weight == 0].any()
    assert codes[weight != 0].any()


def test_products_in_pairs_fit_sixteen_bits(tmp_path: Path) -> None:
    files = written(tmp_path, "images")
    quantized(files)
    model, copy, module, scales = copied(files, paired=True)
    moved(module, 0.3)
    result = clone_model(model)
    write_learned(copy, learned_arrays(module.values()), scales.values(), result)
    codes = [a for n, a in arrays_of(result).items() if a.dtype == np.int8 and a.ndim > 1]
    assert {int(np.abs(array).max()) for array in codes} == {64}


# learned step sizes


def small(name: str = "y") -> tuple[TrainableGraph, ir.Model]:
    """y = w1 x, where w1 is called a logarithm."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[N,3] x) => (float[N,3] y) '
        "{ s = Exp(t) y = Mul(x, s) }"
    )
    start = np.log(np.array([0.5, 0.25, 2.0], np.float32))
    model.graph.initializer.append(numpy_helper.from_array(start, "t"))
    loaded = ir.from_proto(model)
    return TrainableGraph(loaded, also=["t"]), loaded


def test_a_step_moves_a_scale_as_in_the_paper() -> None:
    module, _ = small()
    Scales(module, [Step("t", 50, 7)], [], 2**30)
    x = torch.tensor([[1.0, -2.0, 0.5]])
    optimizer = torch.optim.SGD(module.parameters(), 1e-4)
    before = module.weights[0].detach().exp()
    module({"x": x}, ["y"])["y"].sum().backward()
    optimizer.step()
    found = module.weights[0].detach().exp() - before
    wanted = -1e-4 * x[0] / np.sqrt(50 * 7)  # -rate * g * dL/ds, g = 1 / sqrt(N Q_P)
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=0.02)


def test_scales_stay_where_they_began_to_a_factor_of_ten() -> None:
    module, _ = small()
    scales = Scales(module, [Step("t", 1, 7)], [], 2**30)
    with torch.no_grad():
        module.weights[0].add_(torch.tensor([100.0, -100.0, 0.1]))
    scales.keep()
    found = scales.values()["t"] / np.array([0.5, 0.25, 2.0])
    np.testing.assert_allclose(found, [10, 0.1, np.exp(0.1)], rtol=1e-5)


def test_a_scale_is_not_too_small_for_the_bias() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[N,4] x) => (float[N,4] y) '
        "{ s = Exp(t) b2 = Exp(u) a = Mul(b2, s) c = Concat<axis=0>(a, a) d = Mul(x, c) "
        "y = Add(d, b) }"
    )
    for name, array in (("t", np.zeros(2)), ("u", np.zeros(())), ("b", np.array([1, 2, 3, 0.5]))):
        tensor = numpy_helper.from_array(array.astype(np.float32), name)
        model.graph.initializer.append(tensor)
    module = TrainableGraph(ir.from_proto(model), also=["t", "u"])
    scales = Scales(module, [Step("t", 1, 7), Step("u", 1, 7)], [Bound("b", "t", "u")], 2)
    with torch.no_grad():
        module.weights[module.learned.index("t")].fill_(-2.0)
    scales.keep()
    np.testing.assert_allclose(scales.values()["t"], [1.5, 1.0], rtol=1e-5)  # max(|1|, |3|) / 2


# the command


def test_training_brings_back_what_four_bits_cost(tmp_path: Path) -> None:
    files = written(tmp_path, "rows", 256)
    feeds = feeds_of(files)
    expected = run(open_session(files[0]), feeds)["y"]
    quantized(files, "p.onnx", weight_type="int4")
    training = DataSpec(source=str(files[1]))
    result = quantized(
        files, "t.onnx", weight_type="int4", mode="qat", epochs=8, train_batch_size=32,
        learning_rate=3e-3, training=training,
    )  # fmt: skip
    plain, trained = (
        sqnr_db(expected, run(open_session(files[0].with_name(name)), feeds)["y"])
        for name in ("p.onnx", "t.onnx")
    )
    assert trained > plain + 3
    report = result.records[-2].report
    assert report.changed["scale"] > 3 and report.changed["weight"] == 2
    assert any("the float model: y as classes" in note for note in report.notes)
    losses = report.facts["loss"]
    assert len(losses) == 8 and losses[-1] < 0.5 * losses[0]
    again = files[0].with_name("t.onnx").read_bytes()
    quantized(
        files, "t.onnx", weight_type="int4", mode="qat", epochs=8, train_batch_size=32,
        learning_rate=3e-3, training=training,
    )  # fmt: skip
    assert files[0].with_name("t.onnx").read_bytes() == again


def test_labels_are_learned_from_where_they_fit(tmp_path: Path) -> None:
    files = written(tmp_path, "rows", 64)
    feeds = feeds_of(files)
    labels = run(open_session(files[0]), feeds)["y"].argmax(-1).astype(np.int64)
    np.savez(files[1], **feeds, labels=labels[:, 0])
    with pytest.raises(SampleError, match="labels that fit an output of shape"):
        quantized(files, mode="qat", loss="cross-entropy", epochs=1)
    one_hot = np.eye(6, dtype=np.float32)[labels]
    np.savez(files[1], **feeds, labels=one_hot)
    report = quantized(files, mode="qat", loss="mse", epochs=1).records[-2].report
    assert "learned from labels, mse" in report.notes


def test_scores_are_classes_where_somebody_says_so(tmp_path: Path) -> None:
    files = written(tmp_path, "images")
    settings = {"weight_type": "int4", "mode": "qat", "epochs": 1}
    doubt = "if y holds scores of classes, --kind classes suits it better"
    found = {}
    for kind in ("auto", "classes"):
        report = quantized(files, f"{kind}.onnx", kind=kind, **settings).records[-2].report
        assert (doubt in report.notes) == (kind == "auto")
        found[kind] = report.facts["objective"], report.facts["loss"][0]
    assert found["auto"][0] == "the float model: y as values"
    assert found["classes"][0] == "the float model: y as classes"
    assert found["auto"][1] != found["classes"][1]


def test_what_outputs_hold_is_not_asked_where_labels_are_learned() -> None:
    with pytest.raises(ValueError, match="mode qat: kind is for learning from the float model"):
        Quantize(mode="qat", loss="mse", kind="classes")


@pytest.mark.parametrize(
    "options",
    [{"epochs": 3}, {"kind": "classes"}, {"loss": "mse"}, {"device": "cpu"}, {"learning_rate": 0.1},
     {"resume": True}, {"train_batch_size": 8}, {"augment": "flip"}],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["static", "dynamic", "weight-only", "fp16"])
def test_options_of_training_are_for_training(options: dict[str, Any], mode: str) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} has no meaning for mode {mode}"):
        Quantize.model_validate({"mode": mode, **options})
    assert Quantize.model_validate({"mode": "qat", **options}).requires_training()
    assert not Quantize.model_validate({"mode": mode}).requires_training()


def test_the_chain_trains_last_and_leaves_nothing_in_float() -> None:
    step = Quantize(mode="qat", weight_type="int4", epochs=3, rounding="second-order")
    names = [single.name for single in step.expand()]
    last = ["quantize-static", "round-weights", "bias-correction", "qat", "quantize-embeddings"]
    assert names[-5:] == last
    static = next(s for s in step.expand() if s.name == "quantize-static")
    assert static.min_sqnr == 0.0  # type: ignore[attr-defined]  # a QuantizeStatic
    assert step.expand()[-2].epochs == 3  # type: ignore[attr-defined]  # a Qat
    kept = Quantize(mode="qat", min_sqnr=20.0).expand()
    assert next(s for s in kept if s.name == "quantize-static").min_sqnr == 20.0  # type: ignore[attr-defined]


def test_a_wrong_value_is_refused_before_anything_runs() -> None:
    with pytest.raises(OptionError, match="no augmentation 'twist'"):
        Quantize(mode="qat", augment="twist")
    with pytest.raises(OptionError, match="no loss 'hinge'"):
        Quantize(mode="qat", loss="hinge")


def test_a_float_model_is_refused(tmp_path: Path) -> None:
    files = written(tmp_path, "rows")
    with pytest.raises(UnsupportedModelError, match="nothing to train for"):
        Qat().requires(load_model(files[0]))
