"""Sessions: the same results as a plain session, our errors, taps."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.core.errors import ModelExecutionError, UnsupportedModelError
from slimctl.graph import session as session_module
from slimctl.graph.edit import add_initializer, interface
from slimctl.graph.load import load_model
from slimctl.graph.save import model_to_bytes
from slimctl.graph.session import (
    Level,
    installed_providers,
    open_session,
    optimized,
    run,
    tapped,
)


def _proto() -> onnx.ModelProto:
    """Weights everywhere: shared, in a branch, used in a branch alone, by dead nodes, by nobody."""
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    g (float[N,40] x, bool c) => (float[N,40] y) {
      [first] h = MatMul(x, W)
      [second] k = MatMul(h, W)
      dead = MatMul(x, D)
      [branch] y = If (c) < then_branch = t () => (float[N,40] a) { a = MatMul(k, V) },
                            else_branch = e () => (float[N,40] b) { b = MatMul(k, B) } > }""")

    def weight(name: str) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.normal(size=(40, 40)).astype(np.float32) / 6, name)

    proto.graph.initializer.extend(map(weight, "WDBU"))
    proto.graph.node[3].attribute[0].g.initializer.append(weight("V"))
    return proto


FEEDS = [
    {"x": np.random.default_rng(1).normal(size=(3, 40)).astype(np.float32), "c": np.array(c)}
    for c in (True, False)
]


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("feeds", FEEDS, ids=["then", "else"])
def test_results_are_those_of_a_plain_session(level, feeds, write, run_raw):
    path = write(_proto())
    plain = run_raw(path, feeds, optimize=level is Level.ALL)
    for source in (load_model(path), path):
        ours = run(open_session(source, level=level, threads=1), feeds)
        assert list(ours) == ["y"]
        np.testing.assert_allclose(ours["y"], plain["y"], rtol=1e-5)


def test_a_session_outlives_its_model(write, run_raw):
    """onnxruntime is lent the weights only while it opens."""
    path = write(_proto())
    session = open_session(load_model(path), threads=1)
    gc.collect()
    garbage = [np.full((40, 40), np.nan, np.float32) for _ in range(50)]
    np.testing.assert_array_equal(
        run(session, FEEDS[0])["y"], run_raw(path, FEEDS[0], optimize=True)["y"]
    )
    del garbage


def test_equal_names_in_a_branch():
    """Models that were not loaded by us may hide names."""
    proto = _proto()
    proto.graph.node[3].attribute[0].g.initializer[0].name = "W"
    proto.graph.node[3].attribute[0].g.node[0].input[1] = "W"
    model = ir.from_proto(proto)
    plain = run(open_session(ir.from_proto(_proto())), FEEDS[0])["y"]
    np.testing.assert_array_equal(run(open_session(model), FEEDS[0])["y"], plain)


def test_opening_leaves_the_model_as_it_was(write):
    model = load_model(write(_proto()))
    before = model_to_bytes(model)
    open_session(model)
    assert model_to_bytes(model) == before


@pytest.mark.parametrize("dtype", [np.float16, np.int8, ml_dtypes.float8_e4m3fn, np.bool_])
def test_weights_of_any_type(dtype, write):
    model = load_model(write("""<ir_version: 10, opset_import: ["" : 21]>
    g () => (float[2000] y) { y = Cast<to = 1>(w) }""".replace("(w)", "(v)").replace(
        "g ()", "g (float[2000] v)")))  # fmt: skip
    array = (np.arange(2000) % 2).astype(dtype)
    node = model.graph[0]
    node.replace_input_with(0, add_initializer(model.graph, "w", array))
    got = run(open_session(model), {"v": np.zeros(2000, np.float32)})["y"]
    np.testing.assert_array_equal(got, array.astype(np.float32))


def test_packed_weights_beyond_the_threshold_go_through_a_file(write, monkeypatch, tmp_path):
    model = load_model(write("""<ir_version: 10, opset_import: ["" : 21]>
    g (float[1] x) => (float[3001] y) <float s = {0.5}>
    { d = DequantizeLinear(s, s) y = Mul(x, d) }"""))  # fmt: skip
    array = (np.arange(3001) % 7).astype(ml_dtypes.int4)
    weight = add_initializer(model.graph, "w", array)
    model.graph[0].replace_input_with(0, weight)
    model.graph[0].resize_inputs(2)
    monkeypatch.setattr(session_module, "EXTERNAL_THRESHOLD", 100)
    monkeypatch.setattr("slimctl.graph.save.EXTERNAL_THRESHOLD", 100)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    got = run(open_session(model), {"x": np.ones(1, np.float32)})["y"]
    np.testing.assert_array_equal(got, array.astype(np.float32) * 0.5)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]  # only what the test wrote


def test_providers():
    assert "CPUExecutionProvider" in installed_providers()


def test_unknown_provider(write):
    with pytest.raises(ModelExecutionError, match="has no NpuExecutionProvider") as caught:
        open_session(load_model(write(_proto())), provider="NpuExecutionProvider")
    assert "CPUExecutionProvider" in caught.value.fix


BAD_FEEDS = {
    "nothing": ({}, "missing"),
    "other name": ({"z": FEEDS[0]["x"]}, "missing"),
    "one too many": ({**FEEDS[0], "z": np.zeros(1)}, "Invalid input name: z"),
    "shape": ({**FEEDS[0], "x": np.zeros((3, 41), np.float32)}, "Got: 41 Expected: 40"),
    "rank": ({**FEEDS[0], "x": np.zeros(40, np.float32)}, "Got: 1 Expected: 2"),
    "type": ({**FEEDS[0], "x": np.zeros((3, 40))}, r"tensor\(double\)"),
    "no array": ({**FEEDS[0], "x": "text"}, "'x'"),
}


@pytest.mark.parametrize(("feeds", "message"), BAD_FEEDS.values(), ids=BAD_FEEDS)
def test_bad_feeds(feeds, message, write, capfd):
    session = open_session(load_model(write(_proto())))
    with pytest.raises(ModelExecutionError, match=message) as caught:
        run(session, feeds)
    assert "slimctl inspect" in caught.value.fix
    assert capfd.readouterr() == ("", "")


def _text(body: str, imports: str = "") -> str:
    return f"""<ir_version: 8, opset_import: ["" : 17{imports}]>
    g (float[N,4] x) => (float[N,M] y) <int64[2] s = {{-1, 2}}> {{ {body} }}"""


UNLOADABLE = {
    "unknown operator": (_text("[odd] y = Nope(x)"), "No Op registered for Nope"),
    "unknown domain": (_text("[odd] y = strange.Op(x)", ', "strange" : 1'), "strange:Op"),
    "unknown attribute": (_text("[odd] y = Relu<foo = 1>(x)"), "foo"),
    "wrong shapes": (_text("h = Reshape(s, s) [odd] y = MatMul(x, h)"), "Type"),
}


@pytest.mark.parametrize(("text", "message"), UNLOADABLE.values(), ids=UNLOADABLE)
def test_unloadable_model_names_the_node(text, message, write, capfd):
    with pytest.raises(ModelExecutionError, match=message) as caught:
        open_session(load_model(write(text)))
    assert caught.value.where == "node 'odd'"
    assert caught.value.fix
    assert capfd.readouterr() == ("", "")


def test_unloadable_file_is_named(tmp_path):
    path = tmp_path / "no model.onnx"
    path.write_bytes(b"text")
    with pytest.raises(ModelExecutionError) as caught:
        open_session(path)
    assert caught.value.where == str(path)


def test_failure_in_a_run_names_the_node(write, capfd):
    session = open_session(load_model(write(_text("h = Reshape(x, s) [odd] y = MatMul(h, h)"))))
    with pytest.raises(ModelExecutionError, match="dimension mismatch") as caught:
        run(session, {"x": np.zeros((3, 4), np.float32)})
    assert caught.value.where == "node 'odd'"
    assert capfd.readouterr() == ("", "")


def test_taps(write, run_raw):
    model = load_model(write(_proto()))
    before = interface(model), model_to_bytes(model)
    more = tapped(model, ["k", "h"])
    assert [value.name for value in more.graph.outputs] == ["y", "k", "h"]
    got = run(open_session(more, level=Level.DISABLED, threads=1), FEEDS[0])
    proto = _proto()
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in ("k", "h"))
    wanted = run_raw(proto, FEEDS[0])
    for name in ("y", "k", "h"):
        np.testing.assert_array_equal(got[name], wanted[name])
    assert (interface(model), model_to_bytes(model)) == before


def test_taps_only(write):
    model = load_model(write(_proto()))
    only = tapped(model, ["h"], only=True)
    assert [node.name for node in only.graph] == ["first"]
    assert list(only.graph.initializers) == ["W"]
    assert interface(only).inputs == interface(model).inputs
    got = run(open_session(only), FEEDS[0])
    np.testing.assert_allclose(got["h"], FEEDS[0]["x"] @ _weight(model), rtol=1e-4, atol=1e-5)


def _weight(model: ir.Model) -> np.ndarray:
    return model.graph.initializers["W"].const_value.numpy()


def test_taps_of_what_is_an_output_already(write):
    model = tapped(load_model(write(_proto())), ["y", "h", "h", "y"])
    assert [value.name for value in model.graph.outputs] == ["y", "h"]


def test_taps_of_inputs_and_weights(write):
    model = tapped(load_model(write(_proto())), ["x", "W"], only=True)
    got = run(open_session(model), FEEDS[0])
    np.testing.assert_array_equal(got["x"], FEEDS[0]["x"])
    np.testing.assert_array_equal(got["W"], _weight(load_model(write(_proto()))))


def test_taps_of_nothing_that_exists(write):
    with pytest.raises(UnsupportedModelError, match="'nowhere'"):
        tapped(load_model(write(_proto())), ["nowhere"])


def test_optimized_is_what_onnxruntime_makes_of_it(write):
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[1,2,4,4] x) => (float[1,3,2,2] y) { h = Conv(x, W) y = Relu(h) }"""
    proto = onnx.parser.parse_model(text)
    weight = np.ones((3, 2, 3, 3), np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weight, "W"))
    model = load_model(write(proto))
    assert [node.op_type for node in optimized(model, Level.EXTENDED).graph] == ["FusedConv"]
    assert [node.op_type for node in optimized(model, Level.DISABLED).graph] == ["Conv", "Relu"]
    assert [node.op_type for node in model.graph] == ["Conv", "Relu"]


def test_optimized_keeps_the_weights(write):
    model = load_model(write(_proto()))
    result = optimized(model, Level.DISABLED)
    np.testing.assert_array_equal(
        result.graph.initializers["W"].const_value.numpy(), _weight(model)
    )
    np.testing.assert_allclose(
        run(open_session(result), FEEDS[0])["y"], run(open_session(model), FEEDS[0])["y"], rtol=1e-5
    )


def test_optimized_of_a_file(write):
    kinds = sorted(node.op_type for node in optimized(write(_proto()), Level.BASIC).graph)
    assert kinds == ["If", "MatMul", "MatMul", "MatMul"]


def test_threads(write):
    assert open_session(Path(write(_proto())), threads=1).get_session_options(
    ).intra_op_num_threads == 1  # fmt: skip
