"""Constants, names, interface, dead code."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from slimctl.graph.edit import (
    PROVENANCE_KEY,
    Interface,
    NameScope,
    Port,
    add_initializer,
    all_graphs,
    attribute_graphs,
    clone_model,
    const_array,
    interface,
    remove_dead,
    replace_constant,
    set_provenance,
)
from slimctl.graph.load import load_model
from slimctl.graph.save import model_to_bytes

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N,2] x, bool c) => (float[N,2] y) <float[2,2] W = {1,2,3,4}, float[2] unused = {1,2}>
{
  h = MatMul(x, W)
  dead = Relu(h)
  deader = Neg(dead)
  y = If (c) <
    then_branch = t () => (float[N,2] a) <float[2] k = {1,2}, float[2] lost = {1,2}>
      { inner_dead = Neg(h) m = MatMul(h, W) a = Add(m, k) },
    else_branch = e () => (float[N,2] b) { b = Relu(h) }
  >
}"""


@pytest.fixture
def model(write) -> ir.Model:
    return load_model(write(TEXT))


def _value(model: ir.Model, name: str) -> ir.Value:
    return ir.convenience.create_value_mapping(model.graph)[name]


def test_all_graphs(model):
    assert [graph.name for graph in all_graphs(model)] == ["g", "t", "e"]
    assert [graph.name for graph in attribute_graphs(model.graph[-1])] == ["t", "e"]


def test_constants_resolve_from_inside_a_branch(model):
    branch = next(attribute_graphs(model.graph[-1]))
    product, total = branch[1], branch[2]
    np.testing.assert_array_equal(const_array(product.inputs[1]), [[1, 2], [3, 4]])
    np.testing.assert_array_equal(const_array(total.inputs[1]), [1, 2])


def test_what_is_not_constant(model):
    assert const_array(None) is None
    assert const_array(_value(model, "x")) is None
    assert const_array(_value(model, "h")) is None


def test_an_input_with_a_default_is_not_constant():
    model = ir.serde.from_onnx_text("""<ir_version: 8, opset_import: ["" : 17]>
    g (float[2] x, float[2] w = {1,2}) => (float[2] y) { y = Add(x, w) }""")
    value = model.graph.inputs[1]
    model.graph.initializers.setdefault("w", value)
    assert const_array(value) is None


def test_constant_nodes_are_constants():
    model = ir.serde.from_onnx_text("""<ir_version: 8, opset_import: ["" : 17]>
    g () => (float[2] y, float z, int64[2] i, string s) { y = Constant<value = float[2] {1,2}>()
      z = Constant<value_float = 0.5>() i = Constant<value_ints = [3,4]>()
      s = Constant<value_string = "t">() }""")
    y, z, i, s = model.graph.outputs
    np.testing.assert_array_equal(const_array(y), np.array([1, 2], np.float32), strict=True)
    np.testing.assert_array_equal(const_array(z), np.array(0.5, np.float32), strict=True)
    np.testing.assert_array_equal(const_array(i), np.array([3, 4]), strict=True)
    assert const_array(s) is None


def test_constants_cannot_be_changed_in_place(model):
    array = const_array(_value(model, "W"))
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 9


def test_added_arrays_are_not_copied_and_protected(model):
    array = np.arange(4.0, dtype=np.float32)
    value = add_initializer(model.graph, "new", array)
    assert np.shares_memory(const_array(value), array)
    assert (value.dtype, value.shape) == (ir.DataType.FLOAT, [4])
    with pytest.raises(ValueError, match="read-only"):
        const_array(value)[0] = 1


@pytest.mark.parametrize("dtype", [np.int8, np.float16, ml_dtypes.bfloat16, np.int32, np.bool_])
def test_added_constants_are_saved(dtype, model):
    array = np.array([[1, 0], [0, 1]], dtype)
    add_initializer(model.graph, "new", array)
    saved = onnx.load_from_string(model_to_bytes(model)).graph.initializer
    tensor = next(tensor for tensor in saved if tensor.name == "new")
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), array)


def test_scalars_stay_scalars(model):
    assert add_initializer(model.graph, "new", np.float32(3)).shape == []


def test_fresh_names_avoid_every_graph(model):
    scope = NameScope(model)
    assert scope.fresh("new") == "new"
    assert scope.fresh("new") == "new_1"
    assert scope.fresh("k") == "k_1"  # of a branch
    assert scope.fresh("x") == "x_1"
    assert scope.fresh("W") == "W_1"
    assert scope.fresh("") not in ("", "_")


def test_fresh_names_that_look_like_ours(model):
    model.graph[0].outputs[0].name = "new_1"
    scope = NameScope(model)
    assert [scope.fresh("new") for _ in range(3)] == ["new", "new_2", "new_3"]


def test_fresh_node_names(model):
    scope = NameScope(model)
    taken = {node.name for node in model.graph.all_nodes()}
    made = [scope.fresh_node("Relu") for _ in range(3)]
    assert len(taken | set(made)) == len(taken) + 3


def test_replaced_constant_keeps_its_name_unless_others_read_it(model):
    names, outer = NameScope(model), model.graph[0]
    product, total = (next(attribute_graphs(model.graph[-1]))[place] for place in (1, 2))
    replace_constant(total, 1, np.float32([5, 6]), names, "new")
    replace_constant(product, 1, np.ones((2, 3), np.float32), names, "new")
    assert (total.inputs[1].name, product.inputs[1].name) == ("k", "new")
    np.testing.assert_array_equal(const_array(total.inputs[1]), [5, 6])
    assert const_array(product.inputs[1]).shape == tuple(product.inputs[1].shape) == (2, 3)
    np.testing.assert_array_equal(const_array(outer.inputs[1]), [[1, 2], [3, 4]])


def test_replaced_constant_past_the_last_input_is_added(model):
    node = model.graph[0]
    replace_constant(node, 2, np.float32(1), NameScope(model), "bias")
    assert [value.name for value in node.inputs] == ["x", "W", "bias"]


def test_provenance(model):
    set_provenance(model.graph[0], "fuse")
    saved = onnx.load_from_string(model_to_bytes(model)).graph.node[0].metadata_props
    assert [(entry.key, entry.value) for entry in saved] == [(PROVENANCE_KEY, "fuse")]


def test_interface(model):
    assert interface(model) == Interface(
        inputs=(Port("x", ir.DataType.FLOAT, ("N", 2)), Port("c", ir.DataType.BOOL, ())),
        outputs=(Port("y", ir.DataType.FLOAT, ("N", 2)),),
    )
    assert interface(model.clone()) == interface(model)


def test_clones_share_weights_and_nothing_else(model):
    clone = clone_model(model)
    assert clone.graph.initializers["W"].const_value is model.graph.initializers["W"].const_value
    before = model_to_bytes(model)
    for graph in all_graphs(clone):
        for node in graph:
            node.attributes["extra"] = ir.AttrInt64("extra", 1)
            node.metadata_props["extra"] = "1"
            for value in node.outputs:
                value.dtype, value.shape, value.name = ir.DataType.INT8, ir.Shape([9]), "other"
    assert model_to_bytes(model) == before


def test_interface_sees_order_and_type(model):
    changed = clone_model(model)
    inputs = list(changed.graph.inputs)
    changed.graph.inputs[:] = inputs[::-1]
    assert interface(changed) != interface(model)
    changed = clone_model(model)
    changed.graph.outputs[0].dtype = ir.DataType.FLOAT16
    assert interface(changed) != interface(model)


def test_interface_of_sequences():
    model = ir.serde.from_onnx_text("""<ir_version: 8, opset_import: ["" : 17]>
    g (seq(float[N]) x) => (int64 y) { y = SequenceLength(x) }""")
    assert interface(model).inputs == (Port("x", None, ("N",)),)


def test_uses_inside_a_removed_branch_end(model):
    model.graph.outputs[:] = [_value(model, "x")]
    kept = _value(model, "h")
    remove_dead(model)
    assert not kept.uses()
    assert not model.graph.initializers


def test_remove_dead(model, run_raw):
    before = interface(model)
    assert remove_dead(model) == 5  # dead, deader, inner_dead, unused, lost
    assert [node.op_type for node in model.graph.all_nodes()] == [
        *("MatMul", "If", "MatMul", "Add", "Relu")
    ]
    assert interface(model) == before
    assert remove_dead(model) == 0
    proto = onnx.load_from_string(model_to_bytes(model))
    feeds = {"x": np.ones((1, 2), np.float32), "c": np.array(True)}
    np.testing.assert_array_equal(run_raw(proto, feeds)["y"], [[23, 34]])  # ([4, 6] @ W) + k
