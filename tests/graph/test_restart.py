from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from slimctl.core.contract import Feeds
from slimctl.core.errors import UnsupportedModelError
from slimctl.graph.load import load_model
from slimctl.graph.restart import Restarted, restarted
from slimctl.graph.session import Level, open_session, run

X = np.array([[-2.0, 1.0, 3.0]], np.float32)


@pytest.fixture
def model(tmp_path) -> ir.Model:
    """``a = -x``, which two nodes and an If's branch read and which is an output; ``y`` of all."""
    branch = helper.make_graph(
        [helper.make_node("Abs", ["a"], ["b"], "abs")],
        "then",
        [],
        [helper.make_tensor_value_info("b", TensorProto.FLOAT, None)],
    )
    graph = helper.make_graph(
        [
            helper.make_node("Neg", ["x"], ["a"], "neg"),
            helper.make_node("Relu", ["a"], ["r"], "relu"),
            helper.make_node("If", ["flag"], ["i"], "if", then_branch=branch, else_branch=branch),
            helper.make_node("Sum", ["r", "i", "x"], ["y"], "sum"),
        ],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3]),
            helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 3]) for name in ("y", "a")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return load_model(path)


def outputs(begun: Restarted, given: Feeds) -> Feeds:
    """Of a run in which each given array goes to what stands for its name."""
    feeds = {begun.inputs.get(name, name): array for name, array in given.items()}
    asked = {value.name for value in begun.model.graph.inputs}
    assert asked == set(feeds)
    return run(open_session(begun.model, level=Level.DISABLED, threads=1), feeds)


def test_every_reader_gets_what_is_given(model: ir.Model) -> None:
    begun = restarted(model, {"a": ir.DataType.FLOAT})
    a = np.array([[5.0, -7.0, 0.5]], np.float32)
    found = outputs(begun, {"a": a, "x": X, "flag": np.array(True)})
    np.testing.assert_array_equal(found["y"], np.maximum(a, 0) + np.abs(a) + X)
    np.testing.assert_array_equal(found["a"], -X)


def test_what_is_computed_may_be_given_to_others(model: ir.Model) -> None:
    begun = restarted(model, {"a": ir.DataType.FLOAT, "r": ir.DataType.FLOAT}, ["r"])
    np.testing.assert_array_equal(outputs(begun, {"a": X})["r"], np.maximum(X, 0))
    assert dict(begun.inputs).keys() == {"a"}
    assert [node.op_type for node in begun.model.graph] == ["Relu"]


def test_inputs_can_be_given(model: ir.Model) -> None:
    begun = restarted(model, {"x": ir.DataType.FLOAT}, ["y"])
    found = outputs(begun, {"x": X, "flag": np.array(False)})
    np.testing.assert_array_equal(found["y"], np.maximum(-X, 0) + np.abs(X) + X)


def test_the_model_stays_as_it_is(model: ir.Model) -> None:
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    restarted(model, {"a": ir.DataType.FLOAT}, ["y"])
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("names", [({"b": ir.DataType.FLOAT}, ["y"]), ({}, ["nothing"])])
def test_names_that_are_no_tensors(names: tuple, model: ir.Model) -> None:
    with pytest.raises(UnsupportedModelError, match=r"No tensor '(b|nothing)' outside bodies"):
        restarted(model, *names)
