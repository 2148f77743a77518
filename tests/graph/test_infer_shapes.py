"""Inferred shapes are those of a run, gaps stay gaps, and nothing stale survives."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from slimctl.graph import shapes
from slimctl.graph.edit import all_graphs, all_nodes, dimensions, interface
from slimctl.graph.load import load_model
from slimctl.graph.save import content_hash, model_to_bytes
from slimctl.graph.shapes import infer_shapes, with_sizes

CONVOLUTION = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N,3,8,8] x) => (float[N,16] y) <int64[2] flat = {0, -1}>
{ h = Conv<pads = [1,1,1,1], strides = [2,2]>(x, W)  r = Relu(h)  p = GlobalAveragePool(r)
  y = Reshape(p, flat) }"""


def _convolution() -> onnx.ModelProto:
    proto = onnx.parser.parse_model(CONVOLUTION)
    weight = np.ones((16, 3, 3, 3), np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weight, "W"))
    return proto


def _shapes(model) -> dict:
    return {v.name: dimensions(v.shape) for node in all_nodes(model) for v in node.outputs}


def test_shapes_are_those_of_a_run(write, run_raw):
    model = load_model(write(_convolution()))
    infer_shapes(model)
    inferred = _shapes(model)
    proto = _convolution()
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in ("h", "r", "p"))
    found = run_raw(proto, {"x": np.zeros((5, 3, 8, 8), np.float32)})
    for name in ("h", "r", "p", "y"):
        sizes = tuple(5 if dim == "N" else dim for dim in inferred[name])
        assert sizes == found[name].shape


def test_interface_and_content_stay(write):
    model = load_model(write(_convolution()))
    before = interface(model), content_hash(model)
    infer_shapes(model)
    assert (interface(model), content_hash(model)) == before
    once = model_to_bytes(model)
    infer_shapes(model)
    assert model_to_bytes(model) == once


def test_stale_statements_are_replaced(write):
    proto = _convolution()
    proto.graph.value_info.extend(
        [
            helper.make_tensor_value_info("h", TensorProto.FLOAT, [1, 99, 4, 4]),
            helper.make_tensor_value_info("r", TensorProto.DOUBLE, [7]),
        ]
    )
    model = load_model(write(proto))
    infer_shapes(model)
    assert _shapes(model)["h"] == ("N", 16, 4, 4)
    assert _shapes(model)["r"] == ("N", 16, 4, 4)


CUSTOM = """<ir_version: 8, opset_import: ["" : 17, "strange" : 1]>
g (float[N,4] x) => (float[N,4] y) {{ h = strange.Op(x) {k} y = Neg(k) }}"""


def test_unknown_operator_leaves_a_gap(write):
    model = load_model(write(CUSTOM.format(k="k = Relu(h)")))
    infer_shapes(model)
    assert _shapes(model) == {"h": None, "k": None, "y": ("N", 4)}


def test_gap_is_filled_from_what_the_exporter_stated(write):
    proto = onnx.parser.parse_model(CUSTOM.format(k="k = Relu(h)"))
    proto.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, ["N", 4]))
    model = load_model(write(proto))
    infer_shapes(model)
    assert _shapes(model)["k"] == ("N", 4)  # and followed from there


def test_an_exporter_that_is_wrong_once_is_not_believed(write):
    proto = onnx.parser.parse_model(CUSTOM.format(k="a = Relu(x) k = Add(h, a)"))
    proto.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, ["N", 4]))
    proto.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, ["N", 5]))
    model = load_model(write(proto))
    infer_shapes(model)
    assert _shapes(model)["h"] is None


@pytest.mark.parametrize("filler", [-1, "?"])
def test_fillers_are_no_sizes(filler, write):
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    g (float[A,3,B,4] x) => (float[] y)
    { y = Relu(x) k = Relu(x) c = Concat<axis = 0>(x, x) }""")
    for axis in (0, 2):
        dim = proto.graph.input[0].type.tensor_type.shape.dim[axis]
        dim.Clear()
        if filler == -1:
            dim.dim_value = -1
        else:
            dim.dim_param = filler
    model = load_model(write(proto))
    assert interface(model).inputs[0].shape == (None, 3, None, 4)
    infer_shapes(model)
    for name in ("k", "c"):
        shape = _shapes(model)[name]
        assert (shape[1], shape[3]) == (3, 4)
        assert not any(isinstance(dim, int) for dim in (shape[0], shape[2]))


def test_bodies_are_inferred(write):
    model = load_model(
        write("""<ir_version: 8, opset_import: ["" : 17]>
    g (float[N,4] x, bool c) => (float[N,4] y) {
      y = If (c) < then_branch = t () => (float[N,4] a) { h = Relu(x) a = Neg(h) },
                   else_branch = e () => (float[N,4] b) { k = Abs(x) b = Neg(k) } > }""")
    )
    infer_shapes(model)
    assert _shapes(model)["h"] == _shapes(model)["k"] == ("N", 4)


def test_contradictory_graph_is_no_error(write):
    model = load_model(
        write("""<ir_version: 8, opset_import: ["" : 17]>
    g (float[2,3] x, float[4,5] w) => (float[2,5] y) { h = MatMul(x, w) y = Relu(h) }""")
    )
    infer_shapes(model)
    assert _shapes(model)["h"] is None


def test_weights_stay_where_they_are(write):
    model = load_model(write(_convolution()))
    before = [v.const_value for g in all_graphs(model) for v in g.initializers.values()]
    infer_shapes(model)
    after = [v.const_value for g in all_graphs(model) for v in g.initializers.values()]
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_with_sizes(write):
    model = load_model(write(_convolution()))
    sized = with_sizes(model, {"N": 6})
    assert _shapes(sized) == {
        "h": (6, 16, 4, 4),
        "r": (6, 16, 4, 4),
        "p": (6, 16, 1, 1),
        "y": (6, 16),
    }
    assert interface(model).inputs[0].shape == ("N", 3, 8, 8)


def test_with_sizes_of_nameless_dimensions(write):
    proto = _convolution()
    proto.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    sized = with_sizes(load_model(write(proto)), {"x[0]": 2})
    assert _shapes(sized)["y"] == (2, 16)


def test_a_cut_that_is_computed_from_sizes(write, run_raw):
    """As exporters cut a table of positions to the length of the input, and turn it around."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (int64[N,S] x) => (float[a,b] y, float[c,d] z)
    <int64[1] first = {0}, int64[1] last = {-1}, int64[1] far = {-1000}, int64 one = {1}>
    { s = Shape(x) l = Gather(s, one) e = Unsqueeze(l, first)
      y = Slice(W, first, e, last) z = Slice(W, e, far, last, last) }"""
    proto = onnx.parser.parse_model(text)
    table = np.arange(24, dtype=np.float32).reshape(3, 8)
    proto.graph.initializer.append(numpy_helper.from_array(table, "W"))
    model = load_model(write(proto))
    inferred = _shapes(with_sizes(model, {"N": 1, "S": 5}))
    found = run_raw(proto, {"x": np.zeros((1, 5), np.int64)})
    assert inferred["y"] == found["y"].shape == (3, 5)
    assert inferred["z"] == found["z"].shape == (3, 6)
    assert _shapes(with_sizes(model, {"N": 1}))["y"][0] == 3


def _known(model) -> dict:
    return {v.name: (v.type, dimensions(v.shape)) for n in all_nodes(model) for v in n.outputs}


def _relu(model) -> ir.Value:
    return next(n for n in model.graph if n.op_type == "Relu").outputs[0]


def test_what_was_inferred_before_is_inferred_again(write, monkeypatch):
    """A graph is remembered: by what decides over its shapes, and its types stay its own."""
    first, second = (load_model(write(_convolution())) for _ in range(2))
    infer_shapes(first)
    expected = deepcopy(_known(first))
    assert expected["y"][1] == ("N", 16)
    _relu(first).dtype = ir.DataType.DOUBLE
    _relu(first).shape = None
    with monkeypatch.context() as patched:
        patched.setattr(shapes, "_infer_once", None)  # it is not run
        infer_shapes(second)
    assert _relu(second).dtype == ir.DataType.FLOAT
    assert _known(second) == expected


RESHAPED = """<ir_version: 8, opset_import: ["" : 17, "custom" : 1]>
g (float[N,4,6] x) => (float[a,b] y) <int64[2] flat = {0, -1}>
{ r = Reshape(x, flat)  s = Softmax<axis = 1>(r)  y = Relu(s) }"""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("{0, -1}", "{-1, 8}"), (None, 8)),
        (("float[N,4,6]", "float[5,4,6]"), (5, 24)),
        (("Softmax<axis = 1>(r)", "Flatten<axis = 0>(r)"), (1, None)),
        (("Softmax", "custom.Softmax"), None),
    ],
    ids=["constant", "input", "operator", "domain"],
)
def test_another_graph_is_not_taken_for_it(write, change, expected):
    known = load_model(write(onnx.parser.parse_model(RESHAPED)))
    infer_shapes(known)
    assert _shapes(known)["s"] == ("N", 24)
    model = load_model(write(onnx.parser.parse_model(RESHAPED.replace(*change))))
    infer_shapes(model)
    found = _shapes(model)["s"]
    assert (found and tuple(d if isinstance(d, int) else None for d in found)) == expected


def test_statements_that_fill_gaps_are_not_mixed_up(write):
    text = RESHAPED.replace("Softmax", "custom.Softmax")
    for size in (24, 7):
        proto = onnx.parser.parse_model(text)
        proto.graph.value_info.append(
            helper.make_tensor_value_info("s", TensorProto.FLOAT, ["N", size])
        )
        model = load_model(write(proto))
        infer_shapes(model)
        assert _shapes(model)["s"] == ("N", size)
