"""A graph as a torch module: what is learned, what is measured, and how it comes back."""

# ruff: noqa: E402 # the check for torch comes before what needs it
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

torch = pytest.importorskip("torch", reason="torch is an extra")
from torch.nn import functional

from slimctl.core.errors import ModelExecutionError, UnsupportedModelError
from slimctl.graph.edit import clone_model, const_tensor, interface
from slimctl.graph.save import content_hash
from slimctl.graph.select import Selection
from slimctl.graph.session import Level, open_session, run
from slimctl.training.learnable import constants, separate_statistics
from slimctl.training.module import TrainableGraph

RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> NDArray[np.float32]:
    return RANDOM.standard_normal(shape).astype(np.float32)


def parsed(text: str, opset: int = 17, **weights: NDArray[Any]) -> ir.Model:
    header = f'<ir_version: 8, opset_import: ["": {opset}]> g '
    model = onnx.parser.parse_model(header + text)
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    model.graph.initializer.extend(numpy_helper.from_array(a, k) for k, a in weights.items())
    return ir.from_proto(model)


def stored(model: ir.Model) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of every constant."""
    found = {}
    for value in constants(model.graph):
        tensor = const_tensor(value)
        assert tensor is not None
        found[value.name or ""] = (tensor.dtype.name, tensor.shape.numpy(), tensor.tobytes())
    return found


def outputs(model: ir.Model, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return run(open_session(model, level=Level.DISABLED, threads=1), dict(feeds))


def shifted(module: TrainableGraph, by: float = 0.5) -> None:
    """A step, in short."""
    with torch.no_grad():
        for weight in module.weights:
            weight.add_(by)


_LINEAR = "(float[N,3] x) => (float[N,4] y) { a = MatMul(x, w)  y = Add(a, b) }"
_KINDS = {"FLOAT": np.float32, "FLOAT16": np.float16, "DOUBLE": np.float64}


# there and back without a step


@pytest.mark.parametrize("kind", _KINDS)
def test_bytes_stay_where_nothing_was_learned(kind: str) -> None:
    """Subnormal numbers, infinity, a negative zero and a NaN with a payload among them."""
    dtype = np.dtype(_KINDS[kind])
    w = normal(3, 4).astype(dtype)
    w[0] = [np.finfo(dtype).smallest_subnormal, np.inf, -0.0, np.finfo(dtype).max]
    w[1, 0] = np.nan
    text = _LINEAR.replace("float[", {"FLOAT": "float["}.get(kind, f"{kind.lower()}["))
    model = parsed(text, w=w, b=normal(4).astype(dtype))
    before, hashed = stored(model), content_hash(model)
    assert TrainableGraph(model).write_back(model) == []
    assert stored(model) == before
    assert content_hash(model) == hashed


def test_so_do_those_of_bfloat16() -> None:
    """All 65536 of them."""
    w = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(1, -1)
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "node")
    ports = [
        helper.make_tensor_value_info(name, TensorProto.BFLOAT16, ["N", size])
        for name, size in (("x", 1), ("y", w.size))
    ]
    raw = helper.make_tensor("w", TensorProto.BFLOAT16, w.shape, w.tobytes(), raw=True)
    graph = helper.make_graph([node], "g", ports[:1], ports[1:], [raw])
    opsets = [helper.make_opsetid("", 17)]
    model = ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=8))
    before = stored(model)
    assert TrainableGraph(model).write_back(model) == []
    assert stored(model) == before


_BOXED = """(float[N,3] x) => (float[N,3] y, float[3,3] z) {
    k = Constant <value = float[3,3] {1,2,3, 4,5,6, 7,8,9}> ()
    t = Transpose (k)
    i = Identity (t)
    a = MatMul (x, i)
    s = Constant <value_floats = [0.5, 1.5, 2.5]> ()
    c = Mul (a, s)
    d = MatMul (c, w)
    v = Reshape (w, shape)
    e = MatMul (d, v)
    y = Add (e, b)
    z = Identity (w)
}"""


def boxed() -> ir.Model:
    """Constant nodes, a weight behind Transpose and Identity, one that is read three times."""
    return parsed(_BOXED, w=normal(3, 3), b=normal(3), shape=np.array([3, 3]))


def test_constants_of_every_kind_are_learned_once() -> None:
    model = boxed()
    before, ports, proto = stored(model), interface(model), ir.to_proto(model).SerializeToString()
    module = TrainableGraph(model)
    assert sorted(module.learned) == ["b", "k", "s", "w"]
    assert module.write_back(model) == []
    assert ir.to_proto(model).SerializeToString() == proto
    shifted(module)
    assert sorted(module.write_back(model)) == ["b", "k", "s", "w"]
    after = stored(model)
    assert interface(model) == ports
    assert {n: v[:2] for n, v in after.items()} == {n: v[:2] for n, v in before.items()}
    assert [node.op_type for node in model.graph] == [node.op_type for node in boxed().graph]
    x = normal(2, 3)
    found = module({"x": torch.from_numpy(x)}, ["y", "z"])
    for name, array in outputs(model, {"x": x}).items():
        np.testing.assert_allclose(found[name].detach(), array, rtol=1e-5, atol=1e-4)


def test_the_model_that_it_is_made_from_does_not_change() -> None:
    model = boxed()
    hashed = content_hash(model)
    module = TrainableGraph(model)
    shifted(module)
    module.write_back(clone_model(model))
    assert content_hash(model) == hashed


def test_only_what_is_other_than_before_is_written() -> None:
    model = boxed()
    module = TrainableGraph(model)
    with torch.no_grad():
        module.weights[module.learned.index("b")][1] += 1.0
    assert module.write_back(model) == ["b"]


def test_half_precision_is_learned_in_single_and_rounded_once() -> None:
    """Steps that are too small for float16 add up."""
    w = np.ones((3, 4), np.float16)
    model = parsed(_LINEAR.replace("float[", "float16["), w=w, b=np.zeros(4, np.float16))
    module = TrainableGraph(model)
    for _ in range(10):
        shifted(module, 1e-4)
    assert sorted(module.write_back(model)) == ["b", "w"]
    tensor = model.graph.initializers["w"].const_value
    assert tensor is not None
    np.testing.assert_array_equal(tensor.numpy(), np.float16(1.001))


def test_older_operator_sets_are_trained_as_they_are() -> None:
    model = parsed(_LINEAR, opset=9, w=normal(3, 4), b=normal(4))
    module = TrainableGraph(model)
    shifted(module)
    assert sorted(module.write_back(model)) == ["b", "w"]
    assert model.opset_imports[""] == 9


# what is learned


_PROGRAM = """(float[N,2,4,4] x) => (float[N,2,M,K] y) {
    a = Conv <pads = [1,1,1,1]> (x, w)
    low = Constant <value_float = -0.5> ()
    c = Clip (a, low, high)
    r = Resize <mode = "linear"> (c, , scales)
    g = Mul (r, grid)
    h = Div (g, sigma)
    p = Pad (h, pads, high)
    y = Add (p, one)
}"""


def program() -> ir.Model:
    return parsed(
        _PROGRAM,
        w=normal(2, 2, 3, 3),
        high=np.array(0.5, np.float32),
        scales=np.array([1, 1, 2, 2], np.float32),
        grid=normal(1, 1, 8, 8),
        sigma=np.array([2.0], np.float32),
        pads=np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        one=np.ones(1, np.float32),
    )


def test_bounds_scales_and_grids_are_part_of_the_program() -> None:
    assert TrainableGraph(program()).learned == ("w",)


def test_tables_of_places_are_learned_and_grids_are_not() -> None:
    """A mask has two numbers, a grid one for each row and one for each column."""
    text = """(float[N,6,8] x) => (float[N,6,8] y) {
        a = Add(x, table)  b = Add(a, mask)  y = Add(b, grid)
    }"""
    mask = np.triu(np.full((6, 8), -1e9, np.float32))
    grid = np.stack(np.meshgrid(np.arange(2), np.arange(12) * 0.5), -1).astype(np.float32)
    model = parsed(text, table=normal(1, 6, 8), mask=mask, grid=grid.reshape(1, 6, 8))
    assert TrainableGraph(model).learned == ("table",)


def test_further_constants_are_learned_when_they_are_named() -> None:
    module = TrainableGraph(program(), also=["sigma", "high"])
    assert module.learned == ("w", "sigma", "high")
    module({"x": torch.from_numpy(normal(1, 2, 4, 4))}, ["y"])["y"].square().sum().backward()
    assert all(bool(weight.grad.abs().sum() > 0) for weight in module.weights)


def test_weights_that_an_exporter_cut_up_are_learned_as_one() -> None:
    """Gates of recurrent layers are put in another order by Slice and Concat."""
    text = """(float[N,2] x) => (float[N,4] y) {
        a = Slice (w, zero, two)
        b = Slice (w, two, four)
        c = Concat <axis = 0> (b, a)
        t = Transpose (c)
        y = MatMul (x, t)
    }"""
    ends = {name: np.array([n]) for name, n in (("zero", 0), ("two", 2), ("four", 4))}
    model = parsed(text, w=normal(4, 2), **ends)
    module = TrainableGraph(model)
    assert module.learned == ("w",)
    module({"x": torch.ones(1, 2)}, ["y"])["y"].sum().backward()
    np.testing.assert_array_equal(module.weights[0].grad, np.ones((4, 2)))


def test_constants_beside_data_are_not_mistaken_for_weights() -> None:
    text = """(float[N,2] x) => (float[M,4] y) { c = Concat <axis = 0> (x, zeros)
                                                 y = MatMul (c, w) }"""
    model = parsed(text, zeros=np.zeros((1, 2), np.float32), w=normal(2, 4))
    assert TrainableGraph(model).learned == ("w",)


def test_a_graph_without_weights_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no weights to learn"):
        TrainableGraph(parsed("(float[N,3] x) => (float[N,3] y) { y = Relu(x) }"))


def test_an_operator_that_is_missing_says_so_at_once() -> None:
    text = "(float[N,3] x) => (float[N,4] y) { a = MatMul(x, w)  y = Hardmax(a) }"
    with pytest.raises(UnsupportedModelError, match="Hardmax of operator set 17") as caught:
        TrainableGraph(parsed(text, w=normal(3, 4)))
    assert caught.value.where == "node 'Hardmax_1'"
    assert "--importance" not in caught.value.fix


@pytest.mark.parametrize(
    ("selection", "learned", "skipped"),
    [
        (Selection(include=("MatMul_0",)), {"u"}, {"MatMul_1", "MatMul_2"}),
        (Selection(exclude=("MatMul_0",)), {"v", "w"}, {"MatMul_0"}),
        (Selection(include=("op:MatMul",), exclude=("b",)), {"u", "v"}, {"MatMul_1"}),
    ],
)
def test_selections_choose_the_nodes_that_learn(
    selection: Selection, learned: set[str], skipped: set[str]
) -> None:
    text = """(float[N,3] x) => (float[N,3] y) {
        a = MatMul(x, u)  b = MatMul(a, w)  y = MatMul(b, v)
    }"""
    model = parsed(text, u=normal(3, 3), w=normal(3, 3), v=normal(3, 3))
    module = TrainableGraph(model, selection)
    assert set(module.learned) == learned
    assert {skip.node for skip in module.skipped} == skipped
    with pytest.raises(UnsupportedModelError, match="no weights"):
        TrainableGraph(model, Selection(exclude=("op:MatMul",)))


def test_a_shared_weight_is_learned_if_one_reader_may() -> None:
    text = "(float[N,3] x) => (float[N,3] y) { a = MatMul(x, w)  y = MatMul(a, w) }"
    module = TrainableGraph(parsed(text, w=normal(3, 3)), Selection(exclude=("MatMul_0",)))
    assert module.learned == ("w",)
    assert not module.skipped


# shapes


@pytest.mark.parametrize("rows", [1, 5])
def test_batches_may_have_any_size(rows: int) -> None:
    model = parsed(_LINEAR, w=normal(3, 4), b=normal(4))
    x = normal(rows, 3)
    found = TrainableGraph(model)({"x": torch.from_numpy(x)}, ["y"])["y"]
    np.testing.assert_allclose(found.detach(), outputs(model, {"x": x})["y"], rtol=1e-5, atol=1e-6)


def test_inputs_that_do_not_fit_name_the_node() -> None:
    module = TrainableGraph(parsed(_LINEAR, w=normal(3, 4), b=normal(4)))
    with pytest.raises(ModelExecutionError, match="torch cannot run MatMul") as caught:
        module({"x": torch.ones(2, 5)}, ["y"])
    assert caught.value.where == "node 'MatMul_0'"


def test_images_of_one_channel_are_computed_channels_last() -> None:
    """Depthwise convolutions take three times as long channels first."""
    model = parsed(
        "(float[N,1,6,6] x) => (float[N,4,6,6] y) "
        "{ a = Conv(x, w) y = Conv<group=4, pads=[1,1,1,1]>(a, d) }",
        w=normal(4, 1, 1, 1),
        d=normal(4, 1, 3, 3),
    )
    x = torch.from_numpy(normal(2, 1, 6, 6))
    found = TrainableGraph(model)({"x": x}, ["a", "y"])
    for name in ("a", "y"):
        assert found[name].is_contiguous(memory_format=torch.channels_last)


def test_sizes_stay_off_the_device_and_tables_on_it() -> None:
    """On the meta device nothing can be read back, as a check that nothing is."""
    text = """(int64[N,2] i, float[N,4] x) => (float[M,4] y) {
        e = Gather (table, i)
        s = Shape (x)
        n = Gather (s, zero)
        p = Concat <axis = 0> (n, two, four)
        f = Reshape (e, p)
        m = ReduceMean <keepdims = 0, axes = [1]> (f)
        g = MatMul (m, w)
        c = Clip (g, low, high)
        pool = Unsqueeze (c, ones)
        a = AveragePool <kernel_shape = [3], pads = [1, 1]> (pool)
        z = Resize <mode = "linear"> (a, , scales)
        q = Squeeze (z, ones)
        k = Slice (q, zero, four, ones)
        o = Add (k, x)
        y = Gather (o, picked)
    }"""
    model = parsed(
        text,
        table=normal(9, 4),
        w=normal(4, 4),
        low=np.array(-1, np.float32),
        high=np.array(1, np.float32),
        scales=np.array([1, 1, 2], np.float32),
        picked=np.array([0, 1]),
        **{n: np.array([i]) for n, i in (("zero", 0), ("ones", 1), ("two", 2), ("four", 4))},
    )
    feeds = {"i": np.array([[1, 2], [8, 0]]), "x": normal(2, 4)}
    here = TrainableGraph(model)
    found = here({name: torch.from_numpy(array) for name, array in feeds.items()}, ["y"])["y"]
    np.testing.assert_allclose(found.detach(), outputs(model, feeds)["y"], rtol=1e-5, atol=1e-5)
    assert not any(buffer.dtype == torch.int64 for buffer in here.buffers())

    there = TrainableGraph(model).to("meta")
    elsewhere = {name: torch.from_numpy(array).to("meta") for name, array in feeds.items()}
    result = there(elsewhere, ["y"])["y"]
    assert (result.device.type, result.shape) == ("meta", found.shape)
    result.sum().backward()
    assert all(weight.grad is not None for weight in there.weights)


# masks


def test_pruned_connections_stay_pruned() -> None:
    w, b = normal(3, 4), np.zeros(4, np.float32)
    w[1] = 0.0
    b[0] = 1.0
    model = parsed(_LINEAR, w=w, b=b)
    module = TrainableGraph(model)
    optimizer = torch.optim.AdamW(module.parameters(), 0.1, weight_decay=0.1)
    x = torch.from_numpy(normal(5, 3))
    for _ in range(3):
        optimizer.zero_grad()
        module({"x": x}, ["y"])["y"].square().sum().backward()
        optimizer.step()
        module.apply_masks()
    module.write_back(model)
    after = {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}
    assert not after["w"][1].any()
    assert np.all(after["w"][[0, 2]] != w[[0, 2]])
    assert np.all(after["b"] != b)  # zeros of a bias were not pruned


def test_momentum_of_the_time_before_does_not_bring_them_back() -> None:
    w = normal(3, 4)
    w[0, 0] = 0.0
    module = TrainableGraph(parsed(_LINEAR, w=w, b=normal(4)))
    weight = module.weights[module.learned.index("w")]
    with torch.no_grad():
        weight[0, 0] = 7.0
    module.apply_masks()
    assert weight[0, 0] == 0.0


def test_a_matrix_of_zeros_was_not_pruned() -> None:
    """It was made so: the last layer of a residual branch, say."""
    module = TrainableGraph(parsed(_LINEAR, w=np.zeros((3, 4), np.float32), b=normal(4)))
    assert module.mask(module.learned.index("w")) is None


def test_masks_can_be_left_out() -> None:
    w = normal(3, 4)
    w[0, 0] = 0.0
    module = TrainableGraph(parsed(_LINEAR, w=w, b=normal(4)), masked=False)
    module({"x": torch.ones(1, 3)}, ["y"])["y"].sum().backward()
    assert module.weights[module.learned.index("w")].grad[0, 0] == 1.0


# statistics of batches

_NORMALIZED = """(float[N,2,3,3] x) => (float[N,2,3,3] y) {
    a = BatchNormalization <momentum = 0.8> (x, s, b, m, v)
    y = BatchNormalization <epsilon = 0.001> (a, s, c, n, u)
}"""


def normalized() -> ir.Model:
    arrays = {name: normal(2) for name in "sbcmn"}
    return parsed(_NORMALIZED, v=np.abs(normal(2)) + 0.5, u=np.abs(normal(2)) + 0.5, **arrays)


def array_of(model: ir.Model, name: str) -> torch.Tensor:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return torch.from_numpy(np.array(tensor.numpy()))


def test_statistics_are_measured_as_torch_does() -> None:
    model, x = normalized(), torch.from_numpy(normal(8, 2, 3, 3))
    held = {name: array_of(model, name) for name in "sbcmnuv"}
    module = TrainableGraph(model)
    assert set(module.learned) == {"s", "b", "c"}
    module.train()
    found = module({"x": x}, ["y"])["y"]
    one = functional.batch_norm(
        x, held["m"], held["v"], held["s"], held["b"], training=True, momentum=0.2
    )
    two = functional.batch_norm(
        one, held["n"], held["u"], held["s"], held["c"], training=True, momentum=0.1, eps=1e-3
    )
    torch.testing.assert_close(found, two)
    assert sorted(module.write_back(model)) == ["m", "n", "u", "v"]
    for name in "mnuv":
        torch.testing.assert_close(array_of(model, name), held[name])
    module.eval()
    (after,) = outputs(model, {"x": x.numpy()}).values()
    torch.testing.assert_close(
        module({"x": x}, ["y"])["y"].detach(), torch.from_numpy(after), rtol=1e-4, atol=1e-5
    )


def test_nothing_is_measured_outside_of_training() -> None:
    model = normalized()
    module = TrainableGraph(model).eval()
    module({"x": torch.from_numpy(normal(4, 2, 3, 3))}, ["y"])
    assert module.write_back(model) == []


def test_statistics_are_part_of_the_state() -> None:
    """Best weights and checkpoints are states: without them they would not fit together."""
    model, x = normalized(), torch.from_numpy(normal(4, 2, 3, 3))
    module = TrainableGraph(model)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.train()({"x": x}, ["y"])
    assert module.write_back(clone_model(model))
    module.load_state_dict(state)
    assert module.write_back(model) == []


def test_layers_that_are_left_alone_keep_their_statistics() -> None:
    model, x = normalized(), torch.from_numpy(normal(8, 2, 3, 3))
    module = TrainableGraph(model, Selection(exclude=("BatchNormalization_0",)))
    module.train()
    found = module({"x": x}, ["a"])["a"]
    (scale, bias, mean, variance) = (array_of(model, name)[:, None, None] for name in "sbmv")
    expected = (x - mean) / torch.sqrt(variance + 1e-5) * scale + bias
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert sorted(module.write_back(model)) == ["n", "u"]


def test_shared_statistics_are_separated() -> None:
    """As in a network that was never trained: zeros and ones, stored once, one by Identity."""
    text = """(float[N,2] x) => (float[N,2] y) {
        a = BatchNormalization (x, one, zero, zero, one)
        z = Identity (zero)
        y = BatchNormalization (a, one, zero, z, one)
    }"""
    ones, zeros = np.ones(2, np.float32), np.zeros(2, np.float32)
    model = parsed(text, one=ones, zero=zeros)
    x = normal(4, 2)
    (before,) = outputs(model, {"x": x}).values()
    assert separate_statistics(model) == 4
    assert separate_statistics(model) == 0
    np.testing.assert_array_equal(outputs(model, {"x": x})["y"], before)
    module = TrainableGraph(model)
    assert set(module.learned) == {"one", "zero"}
    module.train()({"x": torch.from_numpy(x)}, ["y"])
    changed = module.write_back(model)
    assert len(changed) == 4
    assert not set(changed) & {"one", "zero"}


def test_statistics_that_are_computed_are_not_measured() -> None:
    """Nobody would write them back: such a layer stays as it is at inference."""
    text = """(float[N,2] x) => (float[N,2] y) {
        m = Neg (n)
        y = BatchNormalization (x, s, b, m, v)
    }"""
    model = parsed(text, n=normal(2), s=normal(2), b=normal(2), v=np.ones(2, np.float32))
    module = TrainableGraph(model).train()
    x = normal(4, 2)
    found = module({"x": torch.from_numpy(x)}, ["y"])["y"]
    np.testing.assert_allclose(found.detach(), outputs(model, {"x": x})["y"], rtol=1e-4, atol=1e-5)
    assert module.write_back(model) == []
