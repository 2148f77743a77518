"""Cuts of a graph, and the part in which two graphs differ."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from slimctl.graph.cuts import Cut, Differ, Part, choose_cuts, find_cuts
from slimctl.graph.edit import add_initializer, clone_model

_RESIDUAL = """
<ir_version: 9, opset_import: ["" : 17]>
g (float[2,4] x) => (float[2,4] y, float[2,4] early) {
    a = Relu(x)
    early = Neg(a)
    k = Constant<value_float=2.0>()
    b = Mul(a, k)
    c = Add(b, a)
    d = Exp(c)
    y = Mul(d, x)
}
"""
_BRANCHES = """
<ir_version: 9, opset_import: ["" : 17]>
g (float[2] x, bool[1] flag) => (float[2] y) {
    a = Relu(x)
    b = Neg(x)
    c = If(flag) <
        then_branch = t () => (float[2] t_out) { t_out = Exp(a) },
        else_branch = e () => (float[2] e_out) { e_out = Abs(a) }
    >
    y = Add(c, b)
}
"""


def _model(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(text))


def test_cuts_hold_what_is_read_behind_them() -> None:
    cuts = find_cuts(_model(_RESIDUAL))
    # Constants are no part of them, inputs of the model neither, and outputs made in front are.
    assert cuts == [
        Cut(1, ("a",)),
        Cut(2, ("a", "early")),
        Cut(3, ("a", "early")),
        Cut(4, ("a", "early", "b")),
        Cut(5, ("early", "c")),
        Cut(6, ("early", "d")),
    ]


def test_bodies_read_what_is_around_them() -> None:
    assert find_cuts(_model(_BRANCHES))[1] == Cut(2, ("a", "b"))


def test_narrow_cuts_near_even_shares_of_the_work_are_chosen() -> None:
    cuts = [Cut(p, tuple("abc"[: 1 + (p % 2)])) for p in range(1, 8)]  # even positions are narrow
    chosen = choose_cuts(cuts, [1.0] * 8, 3)
    assert [cut.position for cut in chosen] == [2, 4, 6]
    # Nearly all the work in one node: no place divides it, and the ones beside it are taken.
    assert choose_cuts(cuts, [0, 0, 0, 0, 0, 8.0, 1, 1], 1)[0].position == 6


def _set(name: str) -> Callable[[ir.Model], None]:
    def change(model: ir.Model) -> None:
        node = next(node for node in model.graph if node.outputs[0].name == name)
        node.attributes["change"] = ir.AttrInt64("change", 1)

    return change


@pytest.mark.parametrize(
    ("changed", "part"),
    [("a", Part(None, 0)), ("b", Part(0, 1)), ("d", Part(1, 2)), ("y", Part(2, None))],
)
def test_a_change_lies_between_the_cuts_around_it(changed: str, part: Part) -> None:
    model = _model(_RESIDUAL)
    cuts = [cut for cut in find_cuts(model) if cut.position in (2, 5, 6)]
    variant = clone_model(model)
    _set(changed)(variant)
    assert Differ(model, cuts).part(variant) == part


def test_a_change_that_is_read_far_behind_is_followed_to_its_last_reader() -> None:
    model = _model(_RESIDUAL)
    cuts = [cut for cut in find_cuts(model) if cut.position in (1, 4, 5)]
    variant = clone_model(model)
    # Only Add reads another tensor in place of a.
    values = ir.convenience.create_value_mapping(variant.graph)
    node = ir.Node("", "Abs", [values["x"]], name="new")
    node.outputs[0].name = "other"
    add = values["c"].producer()
    assert add is not None
    variant.graph.insert_before(add, node)
    add.replace_input_with(1, node.outputs[0])
    assert Differ(model, cuts).part(variant) == Part(1, 2)


def test_constants_are_compared_by_what_they_hold() -> None:
    model = _model(_RESIDUAL)
    weight = add_initializer(model.graph, "w", np.ones(4, np.float32))
    mul = next(node for node in model.graph if node.outputs[0].name == "y")
    mul.replace_input_with(1, weight)
    cuts = find_cuts(model)
    same, other = clone_model(model), clone_model(model)
    for variant, value in ((same, 1.0), (other, 3.0)):
        variant.graph.initializers["w"].const_value = ir.tensor(np.full(4, value, np.float32))
    differ = Differ(model, cuts)
    assert differ.part(same).start == len(cuts) - 1
    assert differ.part(same).stop is None  # nothing is left behind the last cut to be found alike
    assert differ.part(other) == Part(len(cuts) - 1, None)


def test_a_change_inside_a_branch_is_seen() -> None:
    model = _model(_BRANCHES)
    cuts = find_cuts(model)
    variant = clone_model(model)
    owner = next(node for node in variant.graph if node.op_type == "If")
    inner = next(iter(owner.attributes["then_branch"].as_graph()))
    inner.attributes["change"] = ir.AttrInt64("change", 1)
    assert Differ(model, cuts).part(variant) == Part(1, 2)
