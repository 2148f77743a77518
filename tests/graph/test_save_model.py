"""Saved models are complete, equal to what was saved, and equal bytes for equal models."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from slimctl.core.errors import UnsupportedModelError
from slimctl.graph import _protobuf, save
from slimctl.graph.edit import add_initializer
from slimctl.graph.load import load_model
from slimctl.graph.save import (
    content_hash,
    model_to_bytes,
    save_model,
    stated_values,
    structure,
    weight_bytes,
)
from slimctl.graph.shapes import infer_shapes


def _proto(size: int = 40, seed: int = 0) -> onnx.ModelProto:
    """Two nodes that share a weight, and a branch with a weight of its own."""
    rng = np.random.default_rng(seed)
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 13]>
    g (float[N,{size}] x, bool c) => (float[N,{size}] y) {{
      h = MatMul(x, W)
      k = MatMul(h, W)
      y = If (c) < then_branch = t () => (float[N,{size}] a) {{ a = MatMul(k, V) }},
                   else_branch = e () => (float[N,{size}] b) {{ b = Relu(k) }} > }}""")
    weights = [rng.normal(size=(size, size)).astype(np.float32) / size for _ in range(2)]
    proto.graph.initializer.append(numpy_helper.from_array(weights[0], "W"))
    then = proto.graph.node[2].attribute[0].g
    then.initializer.append(numpy_helper.from_array(weights[1], "V"))
    return proto


@pytest.fixture
def small_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights count as large from 4 kB on, so that no test needs gigabytes."""
    monkeypatch.setattr(save, "EXTERNAL_THRESHOLD", 4096)


def _assert_runs_the_same(path: Path, run_raw) -> None:
    x = np.random.default_rng(1).normal(size=(2, 40)).astype(np.float32)
    for c in (True, False):
        feeds = {"x": x, "c": np.array(c)}
        np.testing.assert_array_equal(run_raw(path, feeds)["y"], run_raw(_proto(), feeds)["y"])


def test_one_file(write, run_raw, tmp_path):
    model = load_model(write(_proto()))
    target = tmp_path / "out.onnx"
    assert save_model(model, target) == [target]
    assert target.read_bytes() == model_to_bytes(model)
    onnx.checker.check_model(target, full_check=True)
    _assert_runs_the_same(target, run_raw)


def test_two_files(write, run_raw, tmp_path, small_threshold):
    model = load_model(write(_proto()))
    target = tmp_path / "out.onnx"
    assert save_model(model, target) == [target, tmp_path / "out.onnx.data"]
    assert target.stat().st_size < 2000
    assert (tmp_path / "out.onnx.data").stat().st_size == 2 * 40 * 40 * 4  # W is stored once
    onnx.checker.check_model(target, full_check=True)
    _assert_runs_the_same(target, run_raw)
    assert content_hash(load_model(target)) == content_hash(model)


def _stated(graph: onnx.GraphProto) -> list[str]:
    branches = [item.g for node in graph.node for item in node.attribute]
    return [info.name for info in graph.value_info] + [n for b in branches for n in _stated(b)]


@pytest.mark.parametrize("threshold", [1, 1 << 30])
def test_only_what_was_stated_is_written(write, run_raw, tmp_path, monkeypatch, threshold):
    monkeypatch.setattr(save, "EXTERNAL_THRESHOLD", threshold)
    proto = _proto()
    proto.graph.value_info.append(helper.make_tensor_value_info("k", TensorProto.FLOAT, ["N", 40]))
    model = load_model(write(proto))
    stated = stated_values(model)
    infer_shapes(model)
    save_model(model, tmp_path / "all.onnx")
    assert {"h", "k"} <= set(_stated(onnx.load(tmp_path / "all.onnx").graph))
    save_model(model, tmp_path / "out.onnx", stated=stated)
    assert _stated(onnx.load(tmp_path / "out.onnx").graph) == ["k"]
    _assert_runs_the_same(tmp_path / "out.onnx", run_raw)


def test_saving_leaves_the_model_as_it_was(write, tmp_path, small_threshold):
    model = load_model(write(_proto()))
    before = model.graph.initializers["W"].const_value
    save_model(model, tmp_path / "out.onnx")
    assert model.graph.initializers["W"].const_value is before


def test_equal_models_equal_bytes(write, tmp_path, small_threshold):
    path = write(_proto())
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = save_model(load_model(path), tmp_path / "a" / "out.onnx")
    second = save_model(load_model(path), tmp_path / "b" / "out.onnx")
    assert [f.read_bytes() for f in first] == [f.read_bytes() for f in second]


@pytest.mark.parametrize("threshold", [1, 1 << 30])
def test_result_needs_nothing_of_its_source(threshold, tmp_path, monkeypatch, run_raw):
    monkeypatch.setattr(save, "EXTERNAL_THRESHOLD", threshold)
    source, result = tmp_path / "source", tmp_path / "result"
    source.mkdir()
    result.mkdir()
    onnx.save(
        _proto(),
        source / "m.onnx",
        save_as_external_data=True,
        location="sub.data",
        size_threshold=0,
    )
    model = load_model(source / "m.onnx")
    save_model(model, result / "m.onnx")
    for file in source.iterdir():
        file.unlink()
    _assert_runs_the_same(result / "m.onnx", run_raw)


def test_a_model_that_refers_to_files_is_saved_with_their_content(tmp_path, run_raw):
    onnx.save(_proto(), tmp_path / "m.onnx", save_as_external_data=True, location="d")
    model = ir.load(tmp_path / "m.onnx")  # onnx-ir's own lazy tensors
    target = tmp_path / "out" / "m.onnx"
    target.parent.mkdir()
    save_model(model, target)
    _assert_runs_the_same(target, run_raw)


def test_overwriting_the_source_of_a_mapped_model(tmp_path, run_raw):
    onnx.save(_proto(), tmp_path / "m.onnx", save_as_external_data=True, location="m.onnx.data")
    model = load_model(tmp_path / "m.onnx")
    staged = tmp_path / "staged"
    staged.mkdir()
    for file in save_model(model, staged / "m.onnx"):
        file.replace(tmp_path / file.name)
    _assert_runs_the_same(tmp_path / "m.onnx", run_raw)


def test_too_large_for_one_message(write, monkeypatch):
    model = load_model(write(_proto()))
    monkeypatch.setattr(save, "PROTOBUF_LIMIT", 4096)
    with pytest.raises(UnsupportedModelError, match="2 GiB"):
        model_to_bytes(model)


def test_graph_too_large_for_one_message(write, monkeypatch):
    model = load_model(write(_proto()))
    monkeypatch.setattr(_protobuf, "PROTOBUF_LIMIT", 100)
    with pytest.raises(UnsupportedModelError, match="2 GiB"):
        model_to_bytes(model)


def test_weight_bytes(write):
    assert weight_bytes(load_model(write(_proto()))) == 2 * 40 * 40 * 4


def test_structure_has_no_weights(write):
    proto = structure(load_model(write(_proto())))
    assert proto.ByteSize() < 2000
    assert [tuple(tensor.dims) for tensor in proto.graph.initializer] == [(40, 40)]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.float8_e4m3fn])
def test_types_that_numpy_does_not_know_go_to_the_data_file(dtype, write, tmp_path, monkeypatch):
    monkeypatch.setattr(save, "EXTERNAL_THRESHOLD", 0)
    model = load_model(write(_proto()))
    array = (np.arange(3001) % 7).astype(dtype)
    add_initializer(model.graph, "extra", array)
    save_model(model, tmp_path / "out.onnx")
    tensors = {tensor.name: tensor for tensor in onnx.load(tmp_path / "out.onnx").graph.initializer}
    np.testing.assert_array_equal(numpy_helper.to_array(tensors["extra"]), array)


def _set(proto: onnx.ModelProto, change: str) -> None:
    graph = proto.graph
    match change:
        case "weight":
            array = numpy_helper.to_array(graph.initializer[0]).copy()
            array[0, 0] += 1
            graph.initializer[0].CopyFrom(numpy_helper.from_array(array, "W"))
        case "inner weight":
            tensor = graph.node[2].attribute[0].g.initializer[0]
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 2, "V"))
        case "operator":
            graph.node[2].attribute[1].g.node[0].op_type = "Abs"
        case "operator set":
            proto.opset_import[0].version = 14
        case "attribute":
            graph.node[2].attribute[1].g.node[0].attribute.append(
                helper.make_attribute("alpha", 0.1)
            )
        case "wiring":
            graph.node[1].input[0] = "x"
        case "input shape":
            graph.input[0].type.tensor_type.shape.dim[0].dim_value = 7
        case "order of outputs":
            graph.output.insert(0, helper.make_tensor_value_info("h", TensorProto.FLOAT, None))


CHANGES = (
    *("weight", "inner weight", "operator", "operator set", "attribute", "wiring"),
    *("input shape", "order of outputs"),
)


@pytest.mark.parametrize("change", CHANGES)
def test_hash_sees(change, write):
    changed = _proto()
    _set(changed, change)
    before, after = load_model(write(_proto())), load_model(write(changed, "other.onnx"))
    assert content_hash(before) != content_hash(after)


def test_hash_does_not_see_documentation(write, tmp_path):
    plain = content_hash(load_model(write(_proto())))
    proto = _proto()
    proto.producer_name, proto.doc_string, proto.graph.doc_string = "a", "b", "c"
    proto.graph.node[0].doc_string = "d"
    proto.graph.node[0].metadata_props.add(key="k", value="v")
    helper.set_model_props(proto, {"k": "v"})
    proto.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, [None, 40]))
    assert content_hash(load_model(write(proto, "other.onnx"))) == plain
    onnx.save(proto, tmp_path / "ext.onnx", save_as_external_data=True, location="ext.data")
    assert content_hash(load_model(tmp_path / "ext.onnx")) == plain


def test_hash_keeps_neighbors_apart(write):
    """Two weights of one byte stream, cut at another place."""

    def with_cut(cut: int) -> ir.Model:
        model = load_model(write(_proto()))
        bytes_ = np.arange(10, dtype=np.int8)
        add_initializer(model.graph, "p", bytes_[:cut])
        add_initializer(model.graph, "q", bytes_[cut:])
        return model

    assert content_hash(with_cut(4)) != content_hash(with_cut(5))
