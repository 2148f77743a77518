"""A raised model computes the same: every operator that changed, against onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from slimctl.core.errors import UnsupportedModelError
from slimctl.graph._opset_changes import CHANGES
from slimctl.graph.edit import interface
from slimctl.graph.load import load_model
from slimctl.graph.opset import default_opset, raise_opset
from slimctl.graph.save import model_to_bytes

X = "float[2,3,4] x"
IMAGE = "float[1,2,6,6] x"


def _text(opset: int, inputs: str, body: str, outputs: str = "y", kind: str = "float") -> str:
    listed = ", ".join(f"{kind}[] {name}" for name in outputs.split(","))
    ir_version = 3 if opset < 9 else 7
    return (
        f'<ir_version: {ir_version}, opset_import: ["" : {opset}]>\n'
        f"g ({inputs}) => ({listed}) {{ {body} }}"
    )


def _constant(name: str, values: str, kind: str = "float") -> str:
    count = values.count(",") + 1
    return f"{name} = Constant<value = {kind}[{count}] {{{values}}}>() "


BATCH_NORMALIZATION = (
    _constant("s", "1.5,2,3") + _constant("b", "1,2,3") + _constant("m", "1,2,3")
) + _constant("v", "4,5,6")

CASES = {
    # operator and its version in the model: the model
    "Clip 6": _text(7, X, "y = Clip<min = -0.5, max = 0.7>(x)"),
    "Clip 6, no bounds": _text(9, X, "y = Clip(x)"),
    "Clip 6, only max": _text(10, X, "y = Clip<max = 0.7>(x)"),
    "Clip 6, only min": _text(10, X, "y = Clip<min = 0.1>(x)"),
    "Clip 6, float16": _text(
        10, "float16[2,3] x", "y = Clip<min = -0.5, max = 70000.0>(x)", kind="float16"
    ),
    "Dropout 7": _text(7, X, "y = Dropout<ratio = 0.3>(x)"),
    "Dropout 10": _text(11, X, "y = Dropout<ratio = 0.3>(x)"),
    "Slice 1": _text(9, X, "y = Slice<starts = [1, -3], ends = [3, 100], axes = [1, 2]>(x)"),
    "Slice 1, no axes": _text(9, X, "y = Slice<starts = [0, 1], ends = [1, 3]>(x)"),
    "TopK 1": _text(9, X, "y, i = TopK<k = 2, axis = 1>(x)"),
    "TopK 10": _text(10, X, _constant("k", "2", "int64") + "y, i = TopK<axis = 1>(x, k)"),
    "Pad 2": _text(7, X, "y = Pad<pads = [0,1,2,0,0,1], value = 1.5>(x)"),
    "Pad 2, reflect": _text(10, X, 'y = Pad<pads = [0,1,2,0,0,1], mode = "reflect">(x)'),
    "Pad 2, negative": _text(10, X, "y = Pad<pads = [0,-1,0,0,0,1]>(x)"),
    "Upsample 7": _text(7, IMAGE, "y = Upsample<scales = [1.0, 1.0, 2.0, 3.0]>(x)"),
    "Upsample 7, linear": _text(
        8, IMAGE, 'y = Upsample<scales = [1.0, 1.0, 2.0, 1.5], mode = "linear">(x)'
    ),
    "Upsample 9": _text(
        9, IMAGE, _constant("s", "1,1,2,2") + 'y = Upsample<mode = "linear">(x, s)'
    ),
    "Upsample 9, nearest": _text(9, IMAGE, _constant("s", "1,1,1.5,2") + "y = Upsample(x, s)"),
    "Resize 10": _text(10, IMAGE, _constant("s", "1,1,2,3") + "y = Resize(x, s)"),
    "Resize 10, linear": _text(
        10, IMAGE, _constant("s", "1,1,2.5,0.6") + 'y = Resize<mode = "linear">(x, s)'
    ),
    "Resize 10, shrinking": _text(10, IMAGE, _constant("s", "1,1,0.4,0.7") + "y = Resize(x, s)"),
    "Resize 10, computed scales": _text(
        10,
        IMAGE,
        _constant("s", "1,1,2,2") + 't = Neg(s) u = Neg(t) y = Resize<mode="linear">(x, u)',
    ),
    "Softmax 1": _text(7, X, "y = Softmax(x)"),
    "Softmax 1, first axis": _text(10, X, "y = Softmax<axis = 0>(x)"),
    "Softmax 11, last axis": _text(12, X, "y = Softmax<axis = 2>(x)"),
    "Softmax 11, negative axis": _text(11, X, "y = Softmax<axis = -2>(x)"),
    "Softmax 11, last": _text(11, X, "y = Softmax<axis = -1>(x)"),
    "Softmax 11, one wide axis": _text(12, "float[2,5,1,1] x", "y = Softmax(x)"),
    "Softmax 11, all narrow": _text(12, "float[2,1,1] x", "y = Softmax(x)"),
    "Softmax 11, dynamic": _text(12, "float[N,C,L] x", "y = Softmax(x)"),
    "Softmax 11, twice": _text(12, X, "h = Softmax(x) k = Softmax(h) y = Add(h, k)"),
    "LogSoftmax 11": _text(12, X, "y = LogSoftmax(x)"),
    "Hardmax 11": _text(12, X, "y = Hardmax(x)"),
    "Squeeze 1": _text(7, "float[1,3,1] x", "y = Squeeze<axes = [0]>(x)"),
    "Squeeze 11": _text(12, "float[1,3,1] x", "y = Squeeze<axes = [-1, 0]>(x)"),
    "Squeeze 11, all": _text(12, "float[1,3,1] x", "y = Squeeze(x)"),
    "Unsqueeze 11": _text(12, X, "y = Unsqueeze<axes = [0, 2]>(x)"),
    "ReduceSum 1": _text(7, X, "y = ReduceSum<axes = [1], keepdims = 0>(x)"),
    "ReduceSum 11, all": _text(12, X, "y = ReduceSum(x)"),
    "ReduceMean 11": _text(12, X, "y = ReduceMean<axes = [0, -1]>(x)"),
    "ReduceMax 13": _text(13, X, "y = ReduceMax<axes = [1], keepdims = 0>(x)"),
    "ReduceL2 13, all": _text(13, X, "y = ReduceL2(x)"),
    "Split 2": _text(12, X, "y, z = Split<axis = 2, split = [1, 3]>(x)", outputs="y,z"),
    "Split 2, even": _text(11, X, "y, z = Split<axis = 2>(x)", outputs="y,z"),
    "Split 13, even": _text(13, X, "y, z = Split<axis = 2>(x)", outputs="y,z"),
    "BatchNormalization 7": _text(
        7, X, BATCH_NORMALIZATION + "y = BatchNormalization<spatial = 1>(x, s, b, m, v)"
    ),
    "BatchNormalization 9": _text(
        9, X, BATCH_NORMALIZATION + "y = BatchNormalization(x, s, b, m, v)"
    ),
    "Scatter 9": _text(
        10,
        "float[3,2] x",
        "i = Constant<value = int64[1,2] {2, 0}>() u = Constant<value = float[1,2] {5, 6}>()"
        " y = Scatter(x, i, u)",
    ),
    "RoiAlign 10": _text(
        12,
        IMAGE,
        "r = Constant<value = float[1,4] {0.5, 1, 4, 5}>() i = Constant<value = int64[1] {0}>()"
        " y = RoiAlign<output_height = 2, output_width = 3>(x, r, i)",
    ),
    "GridSample 16": _text(
        16,
        IMAGE,
        "g = Constant<value = float[1,2,2,2] {-0.5, 0.1, 0.3, 0.2, -0.7, 0.9, 0.4, -0.4}>()"
        ' y = GridSample<mode = "bicubic">(x, g)',
    ),
    "GridSample 16, default": _text(
        16,
        IMAGE,
        "g = Constant<value = float[1,2,2,2] {-0.5, 0.1, 0.3, 0.2, -0.7, 0.9, 0.4, -0.4}>()"
        " y = GridSample(x, g)",
    ),
    "AveragePool 7": _text(7, IMAGE, "y = AveragePool<kernel_shape = [3, 3], pads = [1,1,1,1]>(x)"),
    "MaxPool 8": _text(8, IMAGE, "y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x)"),
    "Gemm 7": _text(
        7, "float[2,3] x", "w = Constant<value = float[3,2] {1,2,3,4,5,6}>()"
        + _constant("c", "1,2") + "y = Gemm<alpha = 0.5, beta = 2.0>(x, w, c)"
    ),
    "Flatten 1": _text(7, X, "y = Flatten(x)"),
    "Reshape 5": _text(12, X, _constant("s", "0,-1", "int64") + "y = Reshape(x, s)"),
    "ArgMax 1": _text(10, X, "i = ArgMax<axis = 1>(x) y = Cast<to = 1>(i)"),
    "Where, Equal, Pow": _text(
        11, X, _constant("p", "2") + "q = Pow(x, p) e = Less(x, q) y = Where(e, x, q)"
    ),
    "branches": _text(
        10, f"{X}, bool c",
        "y = If (c) < then_branch = t () => (float[] a) { h = Clip<max = 0.2>(x) a = Softmax(h) },"
        " else_branch = e () => (float[] b) { s = ReduceSum<axes = [1]>(x) d = Add(x, s)"
        " b = Clip<max = 0.2>(d) } >",
    ),
    "loop": _text(
        11, f"{X}, int64 n",
        "go = Constant<value = bool {1}>() y = Loop (n, go, x) < body = l (int64 i, bool k,"
        " float[] v) => (bool ko, float[] w) { ko = Identity(k) w = Softmax(v) } >",
    ),
}  # fmt: skip


def _feeds(proto: onnx.ModelProto, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    feeds: dict[str, np.ndarray] = {}
    for value in proto.graph.input:
        dims = [dim.dim_value or 3 for dim in value.type.tensor_type.shape.dim]
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        data = rng.integers(0, 3, dims) if kind == np.int64 else rng.normal(size=dims)
        feeds[value.name] = np.asarray(data > 0 if kind == np.bool_ else data).astype(kind)
    return feeds


@pytest.mark.parametrize("target", [13, 15, 18, 21, 23])
@pytest.mark.parametrize("text", CASES.values(), ids=CASES)
def test_computes_the_same(text, target, write, run_raw):
    if "RoiAlign" in text and target > 21:
        pytest.skip("onnxruntime 1.32 has no kernel for RoiAlign of operator set 22")
    path = write(text)
    model = load_model(path)
    before = model_to_bytes(model)
    raised = raise_opset(model, target)
    assert default_opset(raised) == max(target, default_opset(model))
    assert interface(raised) == interface(model)
    assert model_to_bytes(model) == before  # the original is left alone
    proto = onnx.load_from_string(model_to_bytes(raised))
    inferred = onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
    if all(value.type.tensor_type.HasField("shape") for value in inferred.graph.output):
        onnx.checker.check_model(inferred)
    for seed in range(3):
        feeds = _feeds(onnx.load(path), seed)
        wanted, got = run_raw(path, feeds), run_raw(proto, feeds)
        assert list(wanted) == list(got)
        for name in wanted:
            np.testing.assert_allclose(got[name], wanted[name], rtol=1e-6, atol=1e-6)


def test_every_change_is_tested():
    tested = " ".join(CASES.values())
    assert not {operator for operator, _ in CHANGES if f"{operator}(" not in tested and
                f"{operator}<" not in tested} - {
        *("ReduceL1", "ReduceLogSum", "ReduceLogSumExp", "ReduceMin", "ReduceProd"),
        "ReduceSumSquare",  # one function edits them all
    }  # fmt: skip


def test_high_enough_is_left_alone(write):
    model = load_model(write(CASES["Clip 6"]))
    assert raise_opset(model, 7) is model
    assert raise_opset(model, 5) is model


def test_equal_bounds_are_stored_once(write):
    body = " ".join(
        f"h{i} = Clip<min=0.0, max=6.0>({'x' if i == 0 else f'h{i - 1}'})" for i in range(9)
    )
    raised = raise_opset(load_model(write(_text(10, X, body + " y = Neg(h8)"))), 13)
    assert len(raised.graph.initializers) == 2


def test_new_names_do_not_collide(write, run_raw):
    body = (
        "Softmax = Relu(x) [s] h = Softmax(Softmax) s_Flatten_output = Neg(h)"
        " y = Neg(s_Flatten_output)"
    )
    path = write(_text(11, X, body))
    proto = onnx.load_from_string(model_to_bytes(raise_opset(load_model(path), 13)))
    feeds = _feeds(onnx.load(path), 0)
    np.testing.assert_allclose(run_raw(proto, feeds)["y"], run_raw(path, feeds)["y"], rtol=1e-6)


def test_what_has_nothing_to_change_keeps_everything(write):
    text = _text(11, "float[2,3] x, float[3,3] w", "[a] h = MatMul(x, w) [b] y = Relu(h)")
    model = load_model(write(text))
    model.metadata_props["k"] = "v"
    next(iter(model.graph)).metadata_props["n"] = "m"
    raised = raise_opset(model, 13)
    assert [node.name for node in raised.graph] == ["a", "b"]
    assert raised.metadata_props == {"k": "v"}
    assert next(iter(raised.graph)).metadata_props == {"n": "m"}
    assert raised.ir_version == 7


def test_weights_are_shared_with_the_original(write):
    proto = onnx.parser.parse_model(_text(11, "float[2,3] x", "y = MatMul(x, W)"))
    proto.graph.initializer.append(numpy_helper.from_array(np.eye(3, dtype=np.float32), "W"))
    model = load_model(write(proto))
    raised = raise_opset(model, 13)
    shared = model.graph.initializers["W"].const_value
    assert raised.graph.initializers["W"].const_value is shared


def test_other_domains_stay(write, run_raw):
    text = """<ir_version: 6, opset_import: ["" : 11, "com.microsoft" : 1, "strange" : 3]>
    g (float[2,3] x) => (float[2,3] y) { h = com.microsoft.Gelu(x) k = Softmax<axis = 0>(h)
       y = Neg(k) }"""
    path = write(text)
    raised = raise_opset(load_model(path), 13)
    assert raised.opset_imports["com.microsoft"] == 1
    proto = onnx.load_from_string(model_to_bytes(raised))
    feeds = _feeds(onnx.load(path), 0)
    np.testing.assert_allclose(run_raw(proto, feeds)["y"], run_raw(path, feeds)["y"], rtol=1e-6)


def test_a_model_of_custom_operators_alone_gets_a_default_operator_set(write):
    text = """<ir_version: 6, opset_import: ["com.microsoft" : 1]>
    g (float[2,3] x) => (float[2,3] y) { y = com.microsoft.Gelu(x) }"""
    raised = raise_opset(load_model(write(text)), 13)
    assert raised.opset_imports == {"": 13, "com.microsoft": 1}


REFUSED = {
    "mask of Dropout": (
        _text(7, X, "h, m = Dropout(x) y = Add(h, m)"),
        "Dropout whose mask is used",
    ),
    "BatchNormalization over positions": (
        _text(7, X, BATCH_NORMALIZATION + "y = BatchNormalization<spatial = 0>(x, s, b, m, v)"),
        "BatchNormalization with spatial=0",
    ),
    "nearest with computed scales": (
        _text(10, IMAGE, _constant("s", "1,1,2,2") + "t = Neg(s) u = Neg(t) y = Resize(x, u)"),
        "scales that are computed",
    ),
    "nearest both ways": (
        _text(10, IMAGE, _constant("s", "1,1,2,0.5") + "y = Resize(x, s)"),
        "enlarges and shrinks",
    ),
    "operator set too old": (_text(5, X, "y = Relu(x)"), "the oldest that can be raised is 7"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(text, message, write):
    model = load_model(write(text))
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        raise_opset(model, 13)
    assert caught.value.fix
    assert caught.value.where


def test_training_outputs_of_batch_normalization(write):
    body = BATCH_NORMALIZATION + "h, p, q, r, t = BatchNormalization(x, s, b, m, v) y = Neg(h)"
    unused = _text(9, X, body)
    assert len(raise_opset(load_model(write(unused)), 15).graph[0].outputs) == 1
    used = _text(9, X, body + " z = Neg(p)", outputs="y,z")
    with pytest.raises(UnsupportedModelError, match="training mode"):
        raise_opset(load_model(write(used)), 15)


def test_change_of_meaning_without_an_edit(write):
    text = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[1,4,2,2] x, float[2] s) => (float[1,4,2,2] y)
    { [norm] y = GroupNormalization<num_groups = 2>(x, s, s) }"""
    with pytest.raises(UnsupportedModelError, match=r"GroupNormalization .* set 21") as e:
        raise_opset(load_model(write(text)), 21)
    assert "norm" in e.value.where


def test_unknown_target(write):
    with pytest.raises(UnsupportedModelError, match="Operator set 999 is not known"):
        raise_opset(load_model(write(CASES["Clip 6"])), 999)
