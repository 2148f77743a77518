"""Shapes that are computed at run time: what the graph says of them, and what a run gives."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.graph.edit import dimensions
from slimctl.graph.shapes import infer_shapes
from slimctl.graph.sizes import reshaped, shape_entries

CONSTANTS = {
    "k0": np.array([0]), "k1": np.array([1]), "k2": np.array([2]), "k9": np.array([2**62]),
    "back": np.array([-1]), "far": np.array([-(2**63)]), "zero": np.array(0), "one": np.array(1),
    "two": np.array(2), "pair": np.array([-1, 1]), "numbers": np.array([0, -1, 64]),
    "small": np.array([3, 4], np.int32), "real": np.array([2.0], np.float32),
    "table": np.array([[1, 2], [3, 4]]), "flat": np.array([-1]), "rows": np.array([-1, 2]),
    "outside": np.array([7]),
}  # fmt: skip


def _model(text: str, opset: int = 17) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]>\n'
        f"g (float[N,3,H,8] x, float[N,S] z, int64[2] free) => (int64[M] v) {{ {text} }}"
    )
    read = {name for node in proto.graph.node for name in node.input}
    for name, array in CONSTANTS.items():
        if name in read:
            proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return proto


def _entries(proto: onnx.ModelProto) -> list[int | str | None] | None:
    model = ir.from_proto(proto)
    infer_shapes(model)
    return shape_entries(model.graph.outputs[0])


SIZES = {"N": 2, "H": 5, "S": 6}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("v = Identity(numbers)", [0, -1, 64]),
        ("v = Shape(x)", ["N", 3, "H", 8]),
        ("v = Shape<start = 1>(x)", [3, "H", 8]),
        ("v = Shape<end = -1>(x)", ["N", 3, "H"]),
        ("v = Shape<start = -3, end = 100>(x)", [3, "H", 8]),
        ("v = Shape<start = 3, end = 1>(x)", []),
        ("s = Shape(x) v = Gather(s, pair)", [8, 3]),
        ("s = Shape(x) n = Gather(s, two) v = Unsqueeze(n, k0)", ["H"]),
        ("s = Shape(x) v = Slice(s, k1, k9)", [3, "H", 8]),
        ("s = Shape(x) v = Slice(s, k1, back)", [3, "H"]),
        ("s = Shape(x) v = Slice(s, k0, k9, k0, k2)", ["N", "H"]),
        ("s = Shape(x) v = Slice(s, k0, k9,, k2)", ["N", "H"]),
        ("s = Shape(x) v = Slice(s, back, far, k0, back)", [8, "H", 3, "N"]),
        ("s = Shape(x) a = Slice(s, k0, k1) v = Concat<axis = 0>(a, numbers)", ["N", 0, -1, 64]),
        ("s = Shape(x) c = Cast<to = 6>(s) v = Cast<to = 7>(c)", ["N", 3, "H", 8]),
        ("s = Shape(x) c = Cast<to = 1>(s) v = Cast<to = 7>(c)", ["N", 3, "H", 8]),
        ("s = Shape(x) c = Cast<to = 9>(s) v = Cast<to = 7>(c)", [None] * 4),
        ("s = Shape(x) a = Reshape(s, rows) v = Reshape(a, flat)", None),
        ("s = Shape(x) a = Reshape(s, rows) b = Slice(a, back, far, k0, back) "
         "v = Reshape(b, flat)", None),
        ("s = Shape(x) a = Reshape(s, flat) v = Identity(a)", ["N", 3, "H", 8]),
        ("a = Reshape(table, flat) v = Identity(a)", [None] * 4),
        ("s = Shape(z) a = Slice(s, k1, k9) b = Mul(a, k2) v = Concat<axis = 0>(b, k2)",
         [None, 2]),
        ("s = Shape(z) v = Concat<axis = 0>(s, free)", ["N", "S", None, None]),
        ("v = Identity(free)", [None, None]),
        ("c = Cast<to = 7>(small) v = Identity(c)", [3, 4]),
        ("c = Cast<to = 7>(real) v = Identity(c)", [None]),
        ("s = Shape(x) v = Slice(s, k1, free)", None),
    ],
)  # fmt: skip
def test_entries(text: str, expected: list[int | str | None] | None, run_raw) -> None:
    proto = _model(text)
    found = _entries(proto)
    if expected is None:  # not even how many there are
        assert found is None
        return
    assert found == expected
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.standard_normal((2, 3, 5, 8)).astype(np.float32),
        "z": rng.standard_normal((2, 6)).astype(np.float32),
        "free": np.array([7, 9]),
    }
    (given,) = run_raw(proto, feeds).values()
    assert len(given) == len(found)
    for entry, number in zip(found, given, strict=True):
        assert entry is None or SIZES.get(entry, entry) == number


def test_entries_of_old_slices() -> None:
    text = "s = Shape(x) v = Slice<starts = [1], ends = [3]>(s)"
    assert _entries(_model(text, opset=9)) == [3, "H"]


def test_an_index_outside_says_nothing() -> None:
    assert _entries(_model("s = Shape(x) v = Gather(s, outside)")) in (None, [None])


def test_no_value_no_entries() -> None:
    assert shape_entries(None) is None


def test_a_long_chain_ends() -> None:
    steps = " ".join(f"a{i + 1} = Identity(a{i})" for i in range(200))
    entries = _entries(_model(f"a0 = Shape(x) {steps} v = Identity(a200)"))
    assert entries == [None] * 4


@pytest.mark.parametrize(
    ("before", "inferred", "entries", "expected"),
    [
        (["N", 8, 4], None, [0, -1], ["N", None]),
        (["N", 8, 4], [None, 32], [0, -1], ["N", 32]),
        (["N", 8, 4], [None, None], ["M", 2, 16], ["M", 2, 16]),  # inference knows another rank
        (["N", 8], ["N", None], [0, 8], ["N", 8]),
        (["N", 8], [None, 8], [None, None], [None, 8]),
        (["N", 8], ["N", 8], None, ["N", 8]),
        (["N", 8], None, None, None),
        ([8], None, [0, 0], [8, 0]),  # there is no second axis
        ([8], None, [], []),
    ],
)
def test_reshaped(before, inferred, entries, expected) -> None:
    assert reshaped(before, inferred, entries) == expected


def test_a_zero_may_be_meant() -> None:
    assert reshaped(["N", 8], None, [0, 4], allow_zero=True) == [0, 4]


RESHAPES = {
    "a size of another tensor": (
        "s = Shape(x) n = Slice(s, k0, k1) t = Concat<axis = 0>(n, flat, k2) v = Reshape(x, t)",
        ("N", None, 2),
    ),
    "an unknown number among others": (
        "m = ReduceMax<keepdims = 0>(z) i = Cast<to = 7>(m) u = Unsqueeze(i, k0) "
        "c = Concat<axis = 0>(u, flat, k2) v = Reshape(x, c)",
        (None, None, 2),
    ),
}


@pytest.mark.parametrize("name", RESHAPES)
def test_reshapes_are_resolved(name: str) -> None:
    text, expected = RESHAPES[name]
    proto = _model(text)
    proto.graph.output[0].CopyFrom(
        onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    )
    proto.graph.node.append(onnx.helper.make_node("Relu", ["v"], ["y"]))
    model = ir.from_proto(proto)
    infer_shapes(model)
    (relu,) = [node for node in model.graph if node.op_type == "Relu"]
    found = dimensions(relu.inputs[0].shape)
    assert found is not None
    assert len(found) == len(expected)
    for size, wanted in zip(found, expected, strict=True):
        assert size == wanted or (wanted is None and not isinstance(size, int))


def test_what_follows_a_resolved_reshape_is_inferred() -> None:
    """The channels of a Conv behind a Reshape to a computed shape."""
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
      g (float[N,S,12] x) => (float[a,b,c,d] y) {
        s = Shape(x) n = Slice(s, k0, k1) m = ReduceMax<keepdims = 0>(x) i = Cast<to = 7>(m)
        u = Unsqueeze(i, k0) t = Concat<axis = 0>(n, four, u, three) r = Reshape(x, t)
        y = Conv(r, W) }""")
    arrays = {
        "k0": np.array([0]), "k1": np.array([1]), "four": np.array([4]), "three": np.array([3]),
        "W": np.ones((5, 4, 1, 1), np.float32),
    }  # fmt: skip
    for key, array in arrays.items():
        proto.graph.initializer.append(numpy_helper.from_array(array, key))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None))
    proto.graph.node.append(onnx.helper.make_node("Relu", ["y"], ["z"]))
    model = ir.from_proto(proto)
    infer_shapes(model)
    (conv,) = [node for node in model.graph if node.op_type == "Conv"]
    shape = dimensions(conv.inputs[0].shape)
    assert shape is not None
    assert shape[1] == 4
    assert shape[3] == 3


def test_many_resolved_reshapes_behind_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each needs what was inferred behind the one before it.

    On graphs where onnx fails when it is to propagate the values of shapes, as for some exporters'.
    """
    infer = onnx.shape_inference.infer_shapes

    def infer_without_values(proto: onnx.ModelProto, *, data_prop: bool) -> onnx.ModelProto:
        if data_prop:
            raise onnx.shape_inference.InferenceError("as on some graphs")
        return infer(proto)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", infer_without_values)
    blocks = 12
    nodes = ["v0 = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x)"]
    for i in range(blocks):
        nodes.append(
            f"s{i} = Shape(v{i}) n{i} = Slice(s{i}, k0, k2, k0) "
            f"t{i} = Concat<axis = 0>(n{i}, open) r{i} = Reshape(v{i}, t{i}) "
            f"q{i} = Unsqueeze(r{i}, k2) v{i + 1} = MaxPool<kernel_shape = [1, 2]>(q{i})"
        )
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
      g (float[N,12,H,W] x) => (float[a,b,c,d] y) {{ {" ".join(nodes)} y = Relu(v{blocks}) }}""")
    for key, numbers in {"k0": [0], "k2": [2], "open": [-1]}.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.array(numbers), key))
    model = ir.from_proto(proto)
    infer_shapes(model)
    shape = dimensions(list(model.graph)[-1].inputs[0].shape)
    assert shape is not None
    assert shape[1:3] == (12, 1)


def test_a_contradiction_is_no_statement() -> None:
    """What a shape says of an axis does not overrule what inference is sure of."""
    assert reshaped([2, 8], [4, 4], [5, -1]) == [4, 4]
