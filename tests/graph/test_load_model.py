"""A loaded model computes what its file computes, and has the one form that passes work on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from slimctl.core.errors import ModelLoadError, UnsupportedModelError
from slimctl.graph.edit import all_graphs, all_nodes, const_array, interface
from slimctl.graph.load import load_model
from slimctl.graph.save import content_hash, model_to_bytes

W = "float[4,4] W = {1,-2,3,-4,5,6,-7,8,9,-10,11,12,-13,14,15,-16}"

PLAIN = f"""<ir_version: 8, opset_import: ["" : 13]>
g (float[N,4] x) => (float[N,4] y) <{W}> {{ [mm] h = MatMul(x, W) [act] y = Relu(h) }}"""

OLD_INPUTS = f"""<ir_version: 3, opset_import: ["" : 8]>
g (float[N,4] x, {W}) => (float[N,4] y) {{ y = MatMul(x, W) }}"""

CONSTANTS = """<ir_version: 8, opset_import: ["" : 13]>
g (float[2,4] x) => (float[2,4] y, int64[2] shape)
{
  a = Constant<value = float[4] {1, 2, 3, 4}>()
  b = Constant<value_float = 0.5>()
  c = Constant<value_floats = [1.0, -1.0, 2.0, 0.5]>()
  axes = Constant<value_ints = [0]>()
  k = Constant<value_int = 1>()
  s = Add(x, a)
  t = Mul(s, b)
  u = Unsqueeze(c, axes)
  kf = Cast<to = 1>(k)
  v = Mul(t, u)
  y = Add(v, kf)
  shape = Constant<value = int64[2] {2, 4}>()
}"""

SPARSE = """<ir_version: 8, opset_import: ["" : 13]>
g (float[2,4] x) => (float[2,4] y) { c = Constant<value = float[1] {0}>() y = Add(x, c) }"""

BRANCHES = f"""<ir_version: 8, opset_import: ["" : 13]>
g (float[N,4] x, bool c) => (float[N,4] y) <{W}>
{{
  y = If (c) <
    then_branch = t () => (float[N,4] a) {{ k = Constant<value = float[4] {{1,2,3,4}}>()
       m = MatMul(x, W) a = Mul(m, k) }},
    else_branch = e () => (float[N,4] b) <float[4] k2 = {{5,6,7,8}}> {{ m = MatMul(x, W)
       b = Add(m, k2) }}
  >
}}"""

LOOP = """<ir_version: 8, opset_import: ["" : 13]>
g (float[4] x, int64 n) => (float[4] y)
{
  go = Constant<value = bool {1}>()
  y = Loop (n, go, x) <
    body = b (int64 i, bool ci, float[4] v) => (bool co, float[4] vo)
      { co = Identity(ci) s = Constant<value = float[1] {0.5}>() vo = Mul(v, s) }
  >
}"""

FUNCTIONS = """<ir_version: 8, opset_import: ["" : 13, "my.dom" : 1]>
g (float[N,4] x, bool c) => (float[N,4] y, float[N,4] z)
{
  h = my.dom.Scaled<alpha = 1.5>(x)
  z = my.dom.Outer(h)
  y = If (c) <
    then_branch = t () => (float[N,4] a) { a = my.dom.Scaled(h) },
    else_branch = e () => (float[N,4] b) { b = my.dom.Outer(h) }
  >
}
<domain: "my.dom", opset_import: ["" : 13]>
Scaled <alpha: float = 2.0> (v) => (w) { s = Constant<value_float: float = @alpha>() w = Mul(v, s) }
<domain: "my.dom", opset_import: ["" : 13, "my.dom" : 1]>
Outer (v) => (w) { a = my.dom.Scaled<alpha = 3.0>(v) b = Relu(a) w = Add(b, v) }
<domain: "my.dom", opset_import: ["" : 13]>
Unused (v) => (w) { w = Neg(v) }"""

CUSTOM = """<ir_version: 8, opset_import: ["" : 13, "com.microsoft" : 1]>
g (float[N,4] x) => (float[N,4] y) { h = com.microsoft.Gelu(x) y = Relu(h) }"""

OMITTED = """<ir_version: 8, opset_import: ["" : 14]>
g (float[3,1,2] x) => (float[1,1,4] y)
<float[1,16,2] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7},
 float[1,16,4] r = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,
   1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}>
{ , y = LSTM<hidden_size = 4>(x, w, r) }"""

NAMES = f"""<ir_version: 8, opset_import: ["" : 13]>
g (float[N,4] x) => (float[N,4] y) <{W}>
{{
  [post_quant_conv__Conv] x_quantized = MatMul(x, W)
  W_scale = Relu(x_quantized)
  h_DequantizeLinear = Neg(W_scale)
  y = Neg(h_DequantizeLinear)
}}"""

SAME = {
    "plain": PLAIN,
    "weights also inputs": OLD_INPUTS,
    "constants": CONSTANTS,
    "branches": BRANCHES,
    "loop": LOOP,
    "functions": FUNCTIONS,
    "custom operator": CUSTOM,
    "omitted inputs and outputs": OMITTED,
    "odd names": NAMES,
}


def _feeds(path: Path, rng: np.random.Generator) -> dict[str, np.ndarray]:
    feeds = {}
    graph = onnx.load(path).graph
    constants = {tensor.name for tensor in graph.initializer}
    for value in graph.input:
        if value.name in constants:
            continue
        dims = [dim.dim_value or 2 for dim in value.type.tensor_type.shape.dim]
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        feeds[value.name] = np.asarray(rng.normal(size=dims) * 3).astype(kind)
    return feeds


def _assert_same(path, run_raw, rng, runs: int = 1):
    loaded = onnx.load_from_string(model_to_bytes(load_model(path)))
    onnx.checker.check_model(loaded)
    for _ in range(runs):
        feeds = _feeds(path, rng)
        before, after = run_raw(path, feeds), run_raw(loaded, feeds)
        assert list(before) == list(after)
        for name in before:
            np.testing.assert_array_equal(before[name], after[name])


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_computes_the_same(text, write, run_raw, rng):
    _assert_same(write(text), run_raw, rng, runs=4)


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_form(text, write):
    path = write(text)
    model = load_model(path)
    names = [node.name for node in all_nodes(model)]
    assert all(names)
    assert len(set(names)) == len(names)
    assert not model.functions
    assert not any(node.domain == "my.dom" for node in all_nodes(model))
    for graph in all_graphs(model):
        assert not any(value.is_initializer() for value in graph.inputs)
        outputs = {value.name for value in graph.outputs}
        constants = [node for node in graph if node.op_type == "Constant"]
        assert all(node.outputs[0].name in outputs for node in constants)


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_interface_is_that_of_the_file(text, write):
    path = write(text)
    proto = onnx.load(path)
    constants = {tensor.name for tensor in proto.graph.initializer}
    ports = interface(load_model(path))
    assert [p.name for p in ports.inputs] == [
        v.name for v in proto.graph.input if v.name not in constants
    ]
    assert [p.name for p in ports.outputs] == [v.name for v in proto.graph.output]
    for port, value in zip(ports.outputs, proto.graph.output, strict=True):
        dims = value.type.tensor_type.shape.dim
        assert port.dtype == value.type.tensor_type.elem_type
        assert port.shape == tuple(dim.dim_param or dim.dim_value for dim in dims)


def test_first_bearer_of_a_name_keeps_it(write):
    proto = onnx.parser.parse_model(NAMES)
    for node in proto.graph.node[2:]:
        node.name = "twin"  # onnxruntime refuses the file as it is
    model = load_model(write(proto))
    assert [node.name for node in model.graph] == [
        "post_quant_conv__Conv",
        "Relu",
        "twin",
        "twin_1",
    ]


def test_initializers_of_old_models_are_not_inputs(write):
    model = load_model(write(OLD_INPUTS))
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert model.ir_version >= 4  # from here on initializers need not be inputs


def test_loading_is_reproducible(write):
    path = write(FUNCTIONS)
    assert content_hash(load_model(path)) == content_hash(load_model(path))
    assert model_to_bytes(load_model(path)) == model_to_bytes(load_model(path))


def test_string_constants_stay_nodes(write):
    model = load_model(
        write("""<ir_version: 8, opset_import: ["" : 13, "com.microsoft" : 1]>
        g (float[N,4] x) => (float[N,4] y, string s) { y = Relu(x)
           t = Constant<value_string = "ünïcode">() s = Identity(t) }""")
    )
    assert [node.op_type for node in model.graph] == ["Relu", "Constant", "Identity"]


def test_sparse_constant_becomes_dense(write, run_raw, rng):
    proto = onnx.parser.parse_model(SPARSE)
    values = helper.make_tensor("c_values", TensorProto.FLOAT, [2], [3.0, -1.0])
    indices = helper.make_tensor("c_indices", TensorProto.INT64, [2], [1, 6])
    sparse = helper.make_sparse_tensor(values, indices, [2, 4])
    node = proto.graph.node[0]
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("sparse_value", sparse))
    path = write(proto)
    _assert_same(path, run_raw, rng)
    (constant,) = load_model(path).graph.initializers.values()
    np.testing.assert_array_equal(const_array(constant), [[0, 3, 0, 0], [0, 0, -1, 0]])


def test_sparse_initializer_becomes_dense(write, run_raw, rng):
    proto = onnx.parser.parse_model(PLAIN)
    values = helper.make_tensor("W", TensorProto.FLOAT, [2], [3.0, -1.0])
    indices = helper.make_tensor("W_i", TensorProto.INT64, [2, 2], [0, 1, 3, 3])
    proto.graph.ClearField("initializer")
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4, 4]))
    path = write(proto)
    _assert_same(path, run_raw, rng)


def test_functions_with_an_older_operator_set(write, run_raw, rng):
    text = """<ir_version: 8, opset_import: ["" : 13, "my.dom" : 1]>
    g (float[2,3,4] x) => (float[2,3,4] y) { h = my.dom.Old(x) y = Softmax(h) }
    <domain: "my.dom", opset_import: ["" : 11]>
    Old (v) => (w) { a = Softmax(v) b = Unsqueeze<axes = [0]>(a) w = Squeeze<axes = [0]>(b) }"""
    model = load_model(write(text))
    ours = onnx.load_from_string(model_to_bytes(model))
    x = rng.normal(size=(2, 3, 4)).astype(np.float32)
    flat = np.exp(x.reshape(2, 12))  # Softmax-11 flattens from axis 1 on
    inner = (flat / flat.sum(1, keepdims=True)).reshape(x.shape)
    outer = np.exp(inner) / np.exp(inner).sum(-1, keepdims=True)
    np.testing.assert_allclose(run_raw(ours, {"x": x})["y"], outer, rtol=1e-5)


def test_functions_with_a_newer_operator_set(write, run_raw, rng):
    text = """<ir_version: 8, opset_import: ["" : 11, "my.dom" : 1]>
    g (float[2,3,4] x) => (float[2,3,4] y) { h = my.dom.New(x) y = Softmax<axis = 1>(h) }
    <domain: "my.dom", opset_import: ["" : 13]>
    New (v) => (w) { w = Softmax(v) }"""
    model = load_model(write(text))
    assert model.opset_imports[""] == 13
    ours = onnx.load_from_string(model_to_bytes(model))
    x = rng.normal(size=(2, 3, 4)).astype(np.float32)
    inner = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    flat = np.exp(inner.reshape(2, 12))
    outer = (flat / flat.sum(1, keepdims=True)).reshape(x.shape)
    np.testing.assert_allclose(run_raw(ours, {"x": x})["y"], outer, rtol=1e-5)


def test_unsorted_nodes_are_sorted(write, run_raw, rng):
    proto = onnx.parser.parse_model(PLAIN)
    nodes = list(reversed(proto.graph.node))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    model = load_model(write(proto))
    assert [node.name for node in model.graph] == ["mm", "act"]
    _assert_same_as(model, onnx.parser.parse_model(PLAIN), run_raw, rng)


def _assert_same_as(model, proto, run_raw, rng):
    feeds = {"x": rng.normal(size=(2, 4)).astype(np.float32)}
    ours = run_raw(onnx.load_from_string(model_to_bytes(model)), feeds)
    for name, array in run_raw(proto, feeds).items():
        np.testing.assert_array_equal(ours[name], array)


def test_names_that_hide_outer_ones_are_changed_inside(write):
    proto = onnx.parser.parse_model(BRANCHES)
    then = proto.graph.node[0].attribute[0].g
    then.node[0].output[0] = "x"  # hides the model's input in this branch alone
    then.node[2].input[1] = "x"
    model = load_model(write(proto))
    names = [v.name for g in all_graphs(model) for v in (*g.inputs, *g.initializers.values())]
    assert names.count("x") == 1
    assert [value.name for value in model.graph.inputs] == ["x", "c"]


def test_default_domain_spelled_out(write, run_raw, rng):
    proto = onnx.parser.parse_model(PLAIN)
    proto.opset_import[0].domain = "ai.onnx"
    for node in proto.graph.node:
        node.domain = "ai.onnx"
    model = load_model(write(proto))
    assert model.opset_imports == {"": 13}
    _assert_same_as(model, onnx.parser.parse_model(PLAIN), run_raw, rng)


def test_metadata_survives(write):
    proto = onnx.parser.parse_model(PLAIN)
    helper.set_model_props(proto, {"character": "a\nb\nü"})
    assert load_model(write(proto)).metadata_props == {"character": "a\nb\nü"}


TYPES = [
    (np.float16, TensorProto.FLOAT16),
    (ml_dtypes.bfloat16, TensorProto.BFLOAT16),
    (ml_dtypes.float8_e4m3fn, TensorProto.FLOAT8E4M3FN),
    (ml_dtypes.float8_e5m2, TensorProto.FLOAT8E5M2),
    (ml_dtypes.int4, TensorProto.INT4),
    (ml_dtypes.uint4, TensorProto.UINT4),
    (np.float64, TensorProto.DOUBLE),
    (np.complex64, TensorProto.COMPLEX64),
    (np.int8, TensorProto.INT8),
    (np.uint16, TensorProto.UINT16),
    (np.uint32, TensorProto.UINT32),
    (np.uint64, TensorProto.UINT64),
    (np.bool_, TensorProto.BOOL),
]


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "typed fields"])
@pytest.mark.parametrize(("dtype", "code"), TYPES, ids=lambda v: getattr(v, "__name__", ""))
def test_every_element_type_survives(dtype, code, raw, write):
    array = np.arange(15).reshape(3, 5).astype(dtype)  # odd, so that packed types end in half
    proto = onnx.parser.parse_model(PLAIN)
    proto.graph.initializer.append(
        numpy_helper.from_array(array, "c")
        if raw
        else helper.make_tensor("c", code, [3, 5], array.ravel().tolist())
    )
    model = load_model(write(proto))
    np.testing.assert_array_equal(const_array(model.graph.initializers["c"]), array)
    saved = onnx.load_from_string(model_to_bytes(model)).graph.initializer
    again = next(tensor for tensor in saved if tensor.name == "c")
    assert again.data_type == code
    np.testing.assert_array_equal(numpy_helper.to_array(again), array)


def _raw(proto: onnx.ModelProto) -> onnx.ModelProto:
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    return proto


def _with_external_data(folder: Path) -> Path:
    proto = _raw(onnx.parser.parse_model(PLAIN))
    path = folder / "model.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="model.data", size_threshold=0)
    return path


def test_external_data_is_mapped_and_not_read(tmp_path, run_raw, rng):
    path = _with_external_data(tmp_path)
    model = load_model(path)
    weight = model.graph.initializers["W"].const_value.numpy()
    assert not weight.flags.owndata
    assert not weight.flags.writeable
    _assert_same_as(model, onnx.parser.parse_model(PLAIN), run_raw, rng)


def test_model_outlives_its_data_file(tmp_path, run_raw, rng):
    path = _with_external_data(tmp_path)
    model = load_model(path)
    (tmp_path / "model.data").unlink()
    _assert_same_as(model, onnx.parser.parse_model(PLAIN), run_raw, rng)


def test_external_data_of_packed_types(tmp_path):
    array = np.arange(-7, 8).reshape(3, 5).astype(ml_dtypes.int4)
    proto = onnx.parser.parse_model(PLAIN)
    proto.graph.initializer.append(numpy_helper.from_array(array, "c"))
    path = tmp_path / "model.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="data", size_threshold=0)
    np.testing.assert_array_equal(const_array(load_model(path).graph.initializers["c"]), array)


def test_download_cache_of_links(tmp_path, run_raw, rng):
    """As in hub caches: both files are links into a folder of blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    path = _with_external_data(tmp_path)
    os.rename(path, blobs / "0123")
    os.rename(tmp_path / "model.data", blobs / "4567")
    (snapshot / "model.onnx").symlink_to("../blobs/0123")
    (snapshot / "model.data").symlink_to("../blobs/4567")
    model = load_model(snapshot / "model.onnx")
    _assert_same_as(model, onnx.parser.parse_model(PLAIN), run_raw, rng)


def test_hard_links_load(tmp_path):
    """Package managers install by hard links."""
    path = _with_external_data(tmp_path)
    os.link(tmp_path / "model.data", tmp_path / "other name")
    assert const_array(load_model(path).graph.initializers["W"]).shape == (4, 4)


def test_stale_declaration_of_a_weight_is_corrected(write):
    proto = onnx.parser.parse_model(PLAIN)
    stale = helper.make_tensor_value_info("W", TensorProto.DOUBLE, [7, 2])
    proto.graph.value_info.append(stale)
    weight = load_model(write(proto)).graph.initializers["W"]
    assert weight.dtype == ir.DataType.FLOAT
    assert weight.shape == (4, 4)


def test_unknown_element_type(write):
    proto = onnx.parser.parse_model(PLAIN)
    proto.graph.initializer.add(name="strange", data_type=77, dims=[1], raw_data=b"x")
    with pytest.raises(UnsupportedModelError, match="'strange' has the unknown data type 77"):
        load_model(write(proto))


def test_functions_that_call_each_other_in_a_circle(write):
    text = """<ir_version: 8, opset_import: ["" : 13, "my.dom" : 1]>
    g (float[N,4] x) => (float[N,4] y) { y = my.dom.A(x) }
    <domain: "my.dom", opset_import: ["my.dom" : 1]> A (v) => (w) { w = my.dom.B(v) }
    <domain: "my.dom", opset_import: ["my.dom" : 1]> B (v) => (w) { w = my.dom.A(v) }"""
    with pytest.raises(ModelLoadError, match="cannot be inlined"):
        load_model(write(text))


def test_loading_does_not_import_onnxruntime():
    code = (
        "import sys, slimctl.graph.load, slimctl.graph.session; print('onnxruntime' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
