"""Tensors inside branches of If can be observed."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from slimctl.core.errors import UnsupportedModelError
from slimctl.graph.bodies import observable_graphs
from slimctl.graph.edit import interface
from slimctl.graph.session import open_session, run, tapped

NESTED = """<ir_version: 8, opset_import: ["": 17]>
g (float[2] x, bool outer, bool inner) => (float[2] y)
{
    y = If(outer) <
        then_branch = then1 () => (float[2] t)
        {
            a = Neg(x)
            t = If(inner) <
                then_branch = then2 () => (float[2] u) { b = Exp(a) u = Identity(b) },
                else_branch = else2 () => (float[2] v) { c = Abs(a) v = Sqrt(c) }
            >
        },
        else_branch = else1 () => (float[2] e) { d = Tanh(x) e = Neg(d) }
    >
}"""


@pytest.fixture
def nested() -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(NESTED))


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_values_of_taken_branches(nested: ir.Model, outer: bool, inner: bool) -> None:
    x = np.float32([0.3, -0.7])
    observed = tapped(nested, ["a", "b", "c", "d"])
    found = run(
        open_session(observed), {"x": x, "outer": np.array(outer), "inner": np.array(inner)}
    )
    nothing = np.zeros(0, np.float32)
    expected = {
        "a": -x if outer else nothing,
        "b": np.exp(-x) if outer and inner else nothing,
        "c": np.abs(x) if outer and not inner else nothing,
        "d": nothing if outer else np.tanh(x),
    }
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6)
    plain = run(open_session(nested), {"x": x, "outer": np.array(outer), "inner": np.array(inner)})
    np.testing.assert_array_equal(found["y"], plain["y"])


@pytest.mark.parametrize("taken", [True, False])
def test_branches_of_old_models(taken: bool) -> None:
    """Their Ifs want the same shape of both branches, which an empty tensor has not."""
    text = """<ir_version: 5, opset_import: ["": 10]>
    g (float[2,3] x, bool c) => (float[2,3] y)
    {
        y = If(c) <
            then_branch = t () => (float[2,3] p) { a = Clip<max = 0.5>(x) p = Neg(a) },
            else_branch = e () => (float[2,3] q) { b = Exp(x) q = Neg(b) }
        >
    }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    x = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    found = run(open_session(tapped(model, ["a", "b"])), {"x": x, "c": np.array(taken)})
    np.testing.assert_allclose(found["a"], np.minimum(x, 0.5) if taken else np.zeros(0))
    np.testing.assert_allclose(found["b"], np.zeros(0) if taken else np.exp(x), rtol=1e-6)
    assert model.opset_imports[""] == 10


def test_the_model_itself_is_not_changed(nested: ir.Model) -> None:
    before = interface(nested), [place.graph.name for place in observable_graphs(nested)]
    tapped(nested, ["b"])
    assert before == (interface(nested), ["g", "then1", "else1", "then2", "else2"])


def test_body_of_a_loop_cannot_be_observed() -> None:
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[2] x, int64 n, bool go) => (float[2] y)
    {
        y = Loop(n, go, x) <body = body (int64 i, bool more, float[2] s)
            => (bool again, float[2] t) { again = Identity(more) t = Neg(s) }>
    }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    assert [place.graph.name for place in observable_graphs(model)] == ["g"]
    with pytest.raises(UnsupportedModelError, match="loops"):
        tapped(model, ["t"])
