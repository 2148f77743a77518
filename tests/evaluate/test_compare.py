from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from slimctl.core.errors import UnsupportedModelError
from slimctl.data.batch import Batch
from slimctl.evaluate import divergence
from slimctl.evaluate.compare import compare_models, likely_scores, outputs_of
from slimctl.evaluate.divergence import common_tensors, locate
from slimctl.graph.save import save_model
from slimctl.graph.session import Level


def node(op_type, inputs, outputs, **attributes):
    return helper.make_node(op_type, inputs, outputs, f"node_{outputs[0]}", **attributes)


def constant(name, values, dtype=np.float32):
    return numpy_helper.from_array(np.asarray(values, dtype), name)


def test_equal_models(chain, batches):
    result = compare_models(chain(), chain(), batches, find_divergence=True, threads=1)
    (output,) = result.outputs
    assert (output.name, output.elements, result.samples) == ("y", 96, 12)
    assert (output.sqnr_db, output.cosine, output.max_abs_error) == (200.0, pytest.approx(1), 0.0)
    assert output.top1_agreement == 1.0 and output.equal is None
    assert result.worst_sqnr_db == 200.0 and result.worst_agreement == 1.0
    assert result.divergence.first is None and result.divergence.optimizer is None
    assert result.divergence.tensors == 9


def test_measures_against_plain_formulas(chain, batches):
    one, two = chain(), chain(noisy=2)
    (output,) = compare_models(one, two, batches, threads=1).outputs
    a, b = (
        np.concatenate([outputs_of(m, batch.feeds, threads=1)["y"] for batch in batches])
        for m in (one, two)
    )
    assert output.sqnr_db == pytest.approx(10 * np.log10((a**2).sum() / ((a - b) ** 2).sum()), 1e-5)
    assert output.max_abs_error == pytest.approx(np.abs(a - b).max())
    assert output.top1_agreement == (a.argmax(1) == b.argmax(1)).mean()


@pytest.mark.parametrize("disturbed", [0, 1, 3])
def test_first_diverging_tensor(chain, batches, disturbed):
    found = locate(chain(), chain(noisy=disturbed), [b.feeds for b in batches], threads=1)
    assert found.first.tensor == f"h{disturbed}"
    assert (found.first.node, found.first.op_type) == (f"mm{disturbed}", "MatMul")
    if disturbed:
        assert found.largest_drop == found.first
        assert found.first.drop_db > 150
    else:
        assert found.first.drop_db is None  # nothing before it


def test_files_are_compared_as_models_in_memory(chain, batches, tmp_path):
    paths = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    for model, path in zip((chain(), chain(noisy=1)), paths, strict=True):
        save_model(model, path)
    from_files = compare_models(*paths, batches, find_divergence=True, threads=1)
    in_memory = compare_models(chain(), chain(noisy=1), batches, find_divergence=True, threads=1)
    assert from_files == in_memory
    assert from_files.divergence.first.tensor == "h1"


def test_one_pass_over_the_data(chain, batches):
    """A generator is enough: callers may stream."""
    result = compare_models(
        chain(), chain(noisy=1), (batch for batch in batches), find_divergence=True, threads=1
    )
    assert result.samples == 12 and result.divergence.first.tensor == "h1"


@pytest.mark.parametrize("chunk_bytes", [1, 300, 1000])
def test_chunks_do_not_change_the_result(chain, batches, monkeypatch, chunk_bytes):
    feeds = [batch.feeds for batch in batches]
    whole = locate(chain(), chain(noisy=1), feeds, threads=1)
    monkeypatch.setattr(divergence, "CHUNK_BYTES", chunk_bytes)
    assert locate(chain(), chain(noisy=1), feeds, threads=1) == whole


def test_chunks_hold_each_tensor_once_and_are_bounded(monkeypatch):
    monkeypatch.setattr(divergence, "CHUNK_BYTES", 100)
    sizes = {"a": 60, "b": 40, "c": 1, "d": 500, "e": 30, "f": 30}
    assert list(divergence._chunks(sizes)) == [["a", "b"], ["c"], ["d"], ["e", "f"]]


def test_the_models_are_not_changed(chain, batches):
    model, other = chain(), chain(noisy=1)
    before = [ir.to_proto(m).SerializeToString() for m in (model, other)]
    compare_models(model, other, batches, find_divergence=True, threads=1)
    assert [ir.to_proto(m).SerializeToString() for m in (model, other)] == before


def quantized_without_relu(to_ir, chain):
    """r0 is quantized before the Relu, which saturation at zero replaces."""
    weights = list(ir.to_proto(chain(layers=1)).graph.initializer)
    weights += [constant("scale", 0.06), constant("zero", 0, np.uint8)]
    return to_ir(
        [
            node("MatMul", ["x", "w0"], ["r0"]),
            node("QuantizeLinear", ["r0", "scale", "zero"], ["codes"]),
            node("DequantizeLinear", ["codes", "scale", "zero"], ["restored"]),
            node("MatMul", ["restored", "w_last"], ["y"]),
        ],
        weights,
        8,
    )


def test_quantized_tensors_are_compared_as_their_readers_see_them(chain, to_ir, batches):
    reference, other = chain(layers=1), quantized_without_relu(to_ir, chain)
    assert common_tensors(reference, other) == {"r0": "restored", "y": "y"}
    found = locate(reference, other, [b.feeds for b in batches], threads=1)
    assert found.first is None and found.tensors == 2


def test_a_name_with_another_meaning_is_no_divergence(to_ir, batches):
    """A scale moved from behind a MatMul into its weights: h changes its meaning, y does not."""
    weight = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    before = to_ir(
        [
            node("MatMul", ["x", "w"], ["h"]),
            node("Mul", ["h", "k"], ["m"]),
            node("Relu", ["m"], ["y"]),
        ],
        [constant("w", weight), constant("k", 4.0)],
        8,
    )
    after = to_ir(
        [
            node("MatMul", ["x", "w"], ["h"]),
            node("Identity", ["h"], ["m"]),
            node("Relu", ["m"], ["y"]),
        ],
        [constant("w", weight * 4)],
        8,
    )
    found = locate(before, after, [b.feeds for b in batches], threads=1)
    assert found.first is None and found.tensors == 3


def test_optimizer_at_fault_is_told_apart(chain, batches):
    model = chain()
    feeds = [b.feeds for b in batches]
    found = locate(model, chain(), feeds, threads=1, outputs_db=12.0)
    assert "12.0 dB" in found.optimizer and found.first is None
    assert locate(model, chain(), feeds, threads=1, outputs_db=150.0).optimizer is None
    disturbed = chain(noisy=1)
    honest = compare_models(model, disturbed, batches, threads=1).worst_sqnr_db
    assert locate(model, disturbed, feeds, threads=1, outputs_db=honest).optimizer is None


def test_outputs_that_are_no_floats(to_ir, batches):
    def classifier(scale):
        graph = helper.make_graph(
            [
                node("Mul", ["x", "k"], ["scores"]),
                node("ArgMax", ["scores"], ["best"], axis=1, keepdims=0),
            ],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 8])],
            [helper.make_tensor_value_info("best", TensorProto.INT64, ["N"])],
            [constant("k", scale)],
        )
        opset = [helper.make_opsetid("", 17)]
        return ir.from_proto(helper.make_model(graph, opset_imports=opset, ir_version=8))

    result = compare_models(classifier([1] * 8), classifier([1] * 7 + [-9]), batches, threads=1)
    (output,) = result.outputs
    assert output.sqnr_db is None and result.worst_sqnr_db is None
    x = np.concatenate([batch.feeds["x"] for batch in batches])
    wanted = (x.argmax(1) == (x * ([1] * 7 + [-9])).argmax(1)).mean()
    assert output.equal == pytest.approx(wanted) and 0 < wanted < 1


def test_sequences_are_class_scores_only_if_they_are_probabilities():
    logits = np.random.default_rng(0).normal(size=(2, 5, 7)).astype(np.float32)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert likely_scores(logits) is None
    assert likely_scores(probabilities) is not None
    assert likely_scores(probabilities.astype(np.float16)) is not None
    assert likely_scores(logits[0]) is not None
    assert likely_scores(np.full((2, 5, 7), np.nan, np.float32)) is None


def test_nan_in_one_model_only(to_ir, batches):
    def root(offset):
        return to_ir(
            [node("Add", ["x", "k"], ["s"]), node("Sqrt", ["s"], ["y"])], [constant("k", offset)], 8
        )

    result = compare_models(root(10.0), root(0.0), batches, find_divergence=True, threads=1)
    assert result.outputs[0].non_finite > 0 and result.worst_sqnr_db == -200.0
    json.dumps(result.to_dict(), allow_nan=False)


def test_json(chain, batches):
    result = compare_models(chain(), chain(noisy=0), batches, find_divergence=True, threads=1)
    values = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert values["outputs"][0]["name"] == "y"
    assert values["divergence"]["first"]["tensor"] == "h0"
    assert values["worst_sqnr_db"] == values["outputs"][0]["sqnr_db"]


def renamed(model, old, new):
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.name == old:
            value.name = new
    return model


@pytest.mark.parametrize(("old", "kind"), [("x", "input"), ("y", "output")])
def test_different_interfaces(chain, batches, old, kind):
    with pytest.raises(UnsupportedModelError, match=f"different {kind}s: '{old}"):
        compare_models(chain(), renamed(chain(), old, f"{old}_new"), batches, threads=1)


def test_different_output_shapes(chain, to_ir, batches):
    other = to_ir(
        [node("Concat", ["x", "x"], ["y"], axis=1)],
        [],
        8,
    )
    other.graph.outputs[0].shape = ir.Shape(["N", None])
    with pytest.raises(UnsupportedModelError, match=r"'y' has the shape \[4, 8\].*\[4, 16\]"):
        compare_models(chain(), other, batches, threads=1, level=Level.DISABLED)


def test_samples_looked_at_inside_are_few(chain, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "slimctl.evaluate.compare.locate",
        lambda reference, other, feeds, **options: seen.append(len(feeds)),
    )
    feeds = {"x": np.ones((1, 8), np.float32)}
    stream = (Batch(feeds, None, index, 1) for index in range(50))
    assert compare_models(chain(), chain(), stream, find_divergence=True, threads=1).samples == 50
    assert seen == [divergence.SAMPLES]
