"""If nodes: the branch that is always taken is run, trained and written back."""

# ruff: noqa: E402 # the check for torch comes before what needs it
from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch", reason="torch is an extra")

from slimctl.core.errors import UnsupportedModelError
from slimctl.graph.edit import all_graphs, clone_model, interface
from slimctl.graph.save import content_hash
from slimctl.graph.session import Level, open_session, run
from slimctl.training.branches import distinct_names, flat_graph
from slimctl.training.graph import TorchGraph
from slimctl.training.module import TrainableGraph
from slimctl.training.table import OPSET

X = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((3, 3)).astype(np.float32)


def parsed(text: str, **constants: np.ndarray) -> ir.Model:
    model = onnx.parser.parse_model(text)
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    model.graph.initializer.extend(numpy_helper.from_array(a, k) for k, a in constants.items())
    return ir.from_proto(model)


def branching(condition: str, before: str = "", shape: str = "2,3") -> str:
    """Then ``x w`` and its negative, else only ``x v``; both branches call their tensors alike."""
    return f"""
    <ir_version: 8, opset_import: ["": 17]>
    g (float[{shape}] x) => (float[{shape}] y) {{
        {before}
        y = If ({condition}) <
            then_branch = one () => (float[{shape}] b) {{ a = MatMul(x, w)  b = Neg(a) }},
            else_branch = two () => (float[{shape}] b) {{
                v = Constant <value = float[3,3] {{1,2,3, 4,5,6, 7,8,9}}> ()
                b = MatMul(x, v)
            }}
        >
    }}
    """


V = np.arange(1, 10, dtype=np.float32).reshape(3, 3)
_RANK = "s = Shape(x)  r = Size(s)  two = Constant <value = int64 {2}> ()  c = Equal(r, two)"
_ROWS = """
    s = Shape(x)  zero = Constant <value = int64[1] {0}> ()  n = Gather(s, zero)
    three = Constant <value = int64[1] {3}> ()  e = Equal(n, three)  q = Squeeze(e)  c = Not(q)
"""


def check(model: ir.Model, wanted: np.ndarray | None = None) -> TorchGraph:
    before = content_hash(model)
    graph = TorchGraph(model)
    assert content_hash(model) == before
    found = graph.run({"x": X}, ["y"])["y"].detach().numpy()
    theirs = run(open_session(model, level=Level.DISABLED, threads=1), {"x": X})["y"]
    np.testing.assert_allclose(found, theirs, rtol=1e-5, atol=1e-6)
    if wanted is not None:
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    return graph


@pytest.mark.parametrize(("condition", "wanted"), [(True, -(X @ W)), (False, X @ V)])
def test_a_constant_condition_takes_its_branch(condition: bool, wanted: np.ndarray) -> None:
    check(parsed(branching("c"), c=np.array(condition), w=W), wanted)


@pytest.mark.parametrize("before", [_RANK, _ROWS], ids=["rank", "rows"])
def test_so_does_one_that_is_computed_from_shapes(before: str) -> None:
    check(parsed(branching("c", before), w=W), -(X @ W))


def test_the_rank_is_known_where_sizes_are_not() -> None:
    check(parsed(branching("c", _RANK, shape="N,3"), w=W), -(X @ W))


def test_sizes_that_are_open_decide_nothing() -> None:
    with pytest.raises(UnsupportedModelError, match="If of operator set 17 cannot run") as caught:
        TorchGraph(parsed(branching("c", _ROWS, shape="N,3"), w=W))
    assert caught.value.where == "node 'If_7'"
    assert "one of its branches" in caught.value.fix


def test_inputs_that_decide_are_refused() -> None:
    text = branching("c").replace("x) =>", "x, bool c) =>")
    with pytest.raises(UnsupportedModelError, match="depends on the inputs of the model"):
        TorchGraph(parsed(text, w=W))


_NESTED = """
<ir_version: 8, opset_import: ["": 17]>
g (float[2,3] x) => (float[2,3] y, float[2,3] z) {
    a = If (yes) <
        then_branch = one () => (float[2,3] o) {
            s = Shape(p)
            r = Size(s)
            d = Equal(r, two)
            o = If (d) <
                then_branch = three () => (float[2,3] i) { i = MatMul(p, w) },
                else_branch = four () => (float[2,3] i) { i = Neg(p) }
            >
        },
        else_branch = five () => (float[2,3] o) { o = Sigmoid(x) }
    >
    y = If (no) <
        then_branch = six () => (float[2,3] o) { o = Exp(a) },
        else_branch = seven () => (float[2,3] o) { i = Relu(a)  o = Add(i, i) }
    >
    z = Identity(a)
}
"""


def test_branches_in_branches() -> None:
    """What decides inside is only known once the outer branch was taken; names repeat."""
    text = _NESTED.replace("a = If (yes)", "p = Abs(x)\n a = If (yes)")
    constants = {"yes": np.array(True), "no": np.array(False), "two": np.array(2), "w": W}
    graph = check(parsed(text, **constants), 2 * np.maximum(np.abs(X) @ W, 0))
    assert not any(node.op_type in ("If", "Sigmoid", "Neg") for node in graph.model.graph)
    # Names of results stay: a loss or a probe may ask for them.
    found = graph.run({"x": X}, ["a", "z"])
    np.testing.assert_array_equal(found["a"].detach(), found["z"].detach())


def test_an_output_that_a_branch_hands_on() -> None:
    text = """
    <ir_version: 8, opset_import: ["": 17]>
    g (float[2,3] x) => (float[2,3] y) {
        y = If (c) <
            then_branch = one () => (float[2,3] b) { b = Identity(x) },
            else_branch = two () => (float[2,3] d) { d = Neg(x) }
        >
    }
    """
    model = parsed(text, c=np.array([True]))
    graph = check(model, X)
    assert interface(graph.model) == interface(model)


def test_weights_of_a_branch_are_written_back_into_it() -> None:
    model = parsed(branching("c"), c=np.array(False), w=W)
    module = TrainableGraph(model)
    (name,) = module.learned
    before = content_hash(model)
    assert module.write_back(model) == []
    assert content_hash(model) == before
    with torch.no_grad():
        module.weights[0].add_(1.0)
    trained = clone_model(model)
    assert module.write_back(trained) == [name]
    (after,) = run(open_session(trained, level=Level.DISABLED, threads=1), {"x": X}).values()
    np.testing.assert_allclose(after, X @ (V + 1), rtol=1e-5)
    stored = {value.name: value.const_value for value in trained.graph.initializers.values()}
    np.testing.assert_array_equal(stored["w"].numpy(), W)


_ALIKE = """
<ir_version: 8, opset_import: ["": 17]>
g (float[2,3] x) => (float[2,3] y) {
    p = If (yes) <
        then_branch = one () => (float[2,3] a) {
            k = Constant <value = float[3] {1,2,3}> ()
            a = Mul(x, k)
        },
        else_branch = two () => (float[2,3] a) { a = Neg(x) }
    >
    q = If (yes) <
        then_branch = three () => (float[2,3] a) {
            k = Constant <value = float[3] {4,5,6}> ()
            a = Mul(x, k)
        },
        else_branch = four () => (float[2,3] a) { a = Neg(x) }
    >
    y = Sub(p, q)
}
"""


def test_weights_of_one_name_stay_two() -> None:
    model = parsed(_ALIKE, yes=np.array(True))
    check(model, X * -3)
    module = TrainableGraph(model)
    first, _ = module.learned
    with torch.no_grad():
        module.weights[0].add_(10.0)
    assert module.write_back(model) == [first]
    check(model, X * 7)


def test_names_that_repeat_are_told_apart_alike_in_clones() -> None:
    model = parsed(branching("c"), c=np.array(True), w=W)
    names = list(distinct_names(model))
    assert len(set(names)) == len(names)
    assert list(distinct_names(clone_model(model))) == names
    count = sum(len(list(g)) + len(g.inputs) + len(g.initializers) for g in all_graphs(model))
    assert len(names) == count  # every node here has one output


def test_a_graph_without_branches_is_not_copied() -> None:
    text = (
        '<ir_version: 8, opset_import: ["": 20]> g (float[2,3] x) => (float[2,3] y) { y = Neg(x) }'
    )
    model = parsed(text)
    assert flat_graph(model, OPSET) is model
