"""Whole residual blocks: which there are, which go, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.core.contract import Feeds, PassReport
from slimctl.core.errors import OptionError, PassFailedError
from slimctl.graph.cost import model_cost
from slimctl.graph.edit import clone_model, const_array, interface
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._residual_blocks import find_blocks, remove_blocks
from slimctl.passes.prune import Prune

HEADER = '<ir_version: 8, opset_import: ["": 17]>'

RESNET = """
resnet (float[N,3,H,W] x) => (float[N,5] y) {
    stem = Conv<pads=[1,1,1,1]>(x, w0, b0)
    s = Relu(stem)
    a1 = Conv<pads=[1,1,1,1]>(s, w1, b1)
    a2 = Relu(a1)
    a3 = Conv<pads=[1,1,1,1]>(a2, w2, b2)
    a = Add(a3, s)
    ar = Relu(a)
    c1 = Conv<pads=[1,1,1,1]>(ar, w3, b3)
    c2 = Sigmoid(c1)
    c3 = Mul(c1, c2)
    c4 = Conv(c3, w4)
    c = Add(ar, c4)
    d1 = Conv<strides=[2,2],pads=[1,1,1,1]>(c, w5, b5)
    d2 = Conv<strides=[2,2]>(c, w6, b6)
    d = Add(d1, d2)
    e1 = Conv<group=12,pads=[1,1,1,1]>(d, w7, b7)
    e2 = Conv(e1, w8, b8)
    e = Add(d, e2)
    f1 = GlobalAveragePool(e)
    f2 = Flatten(f1)
    y = Gemm<transB=1>(f2, w9, b9)
}
"""
RESNET_SHAPES: dict[str, tuple[int, ...]] = {
    **{"w0": (8, 3, 3, 3), "b0": (8,), "w1": (16, 8, 3, 3), "b1": (16,)},
    **{"w2": (8, 16, 3, 3), "b2": (8,), "w3": (24, 8, 3, 3), "b3": (24,), "w4": (8, 24, 1, 1)},
    **{"w5": (12, 8, 3, 3), "b5": (12,), "w6": (12, 8, 1, 1), "b6": (12,)},
    **{"w7": (12, 1, 3, 3), "b7": (12,), "w8": (12, 12, 1, 1), "b8": (12,)},
    **{"w9": (5, 12), "b9": (5,)},
}
RESNET_BLOCKS = {"Add_5": "Conv_4", "Add_11": "Conv_10", "Add_17": "Conv_16"}
"""Sum, and the last layer of its branch."""

# Layer normalization in parts, heads by Reshape with sizes from one Shape node for all layers.
_TRANSFORMER_LAYER = """
    {o}m = ReduceMean<axes=[-1]>({i})
    {o}d = Sub({i}, {o}m)
    {o}v = Mul({o}d, {o}d)
    {o}vm = ReduceMean<axes=[-1]>({o}v)
    {o}ve = Add({o}vm, eps)
    {o}vs = Sqrt({o}ve)
    {o}n = Div({o}d, {o}vs)
    {o}q0 = MatMul({o}n, {o}wq)
    {o}k0 = MatMul({o}n, {o}wk)
    {o}v0 = MatMul({o}n, {o}wv)
    {o}q1 = Reshape({o}q0, heads)
    {o}k1 = Reshape({o}k0, heads)
    {o}v1 = Reshape({o}v0, heads)
    {o}q = Transpose<perm=[0,2,1,3]>({o}q1)
    {o}k = Transpose<perm=[0,2,3,1]>({o}k1)
    {o}vv = Transpose<perm=[0,2,1,3]>({o}v1)
    {o}s = MatMul({o}q, {o}k)
    {o}sm = Add({o}s, mask)
    {o}p = Softmax({o}sm)
    {o}c0 = MatMul({o}p, {o}vv)
    {o}c1 = Transpose<perm=[0,2,1,3]>({o}c0)
    {o}c = Reshape({o}c1, flat)
    {o}o0 = MatMul({o}c, {o}wo)
    {o}o1 = Add({o}o0, {o}bo)
    {o}r = Add({o}o1, {i})
    {o}f0 = MatMul({o}r, {o}w1)
    {o}f1 = Add({o}f0, {o}b1)
    {o}f2 = Relu({o}f1)
    {o}f3 = MatMul({o}f2, {o}w2)
    {o}f4 = Add({o}f3, {o}b2)
    {o} = Add({o}r, {o}f4)
"""
TRANSFORMER = f"""
transformer (float[B,S,16] x, float[B,1,1,S] mask) => (float[B,S,16] y) {{
    size = Shape(x)
    ends = Slice(size, zero, two)
    heads = Concat<axis=0>(ends, four, four)
    flat = Concat<axis=0>(ends, sixteen)
    {_TRANSFORMER_LAYER.format(i="x", o="l")}
    {_TRANSFORMER_LAYER.format(i="l", o="y")}
}}
"""
TRANSFORMER_SHAPES: dict[str, tuple[int, ...]] = {
    layer + name: shape
    for layer in "ly"
    for name, shape in {
        **{"wq": (16, 16), "wk": (16, 16), "wv": (16, 16), "wo": (16, 16), "bo": (16,)},
        **{"w1": (16, 32), "b1": (32,), "w2": (32, 16), "b2": (16,)},
    }.items()
}
TRANSFORMER_CONSTANTS = {
    "eps": np.array(1e-5, np.float32),
    **{"zero": np.array([0]), "two": np.array([2])},
    **{"four": np.array([4]), "sixteen": np.array([16])},
}


def _model(
    text: str,
    shapes: Mapping[str, tuple[int, ...]],
    constants: Mapping[str, np.ndarray] | None = None,
) -> ir.Model:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(HEADER + text)
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    for name, shape in shapes.items():
        fan_in = np.prod(shape[1:]) if len(shape) == 4 else shape[0]
        array = rng.normal(0, 1 / np.sqrt(fan_in), shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    for name, array in (constants or {}).items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    found = ir.from_proto(model)
    infer_shapes(found)
    return found


@pytest.fixture
def resnet() -> ir.Model:
    return _model(RESNET, RESNET_SHAPES)


@pytest.fixture
def transformer() -> ir.Model:
    return _model(TRANSFORMER, TRANSFORMER_SHAPES, TRANSFORMER_CONSTANTS)


def _images(count: int = 6, seed: int = 1) -> list[Feeds]:
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(0, 1, (4, 3, 9, 7)).astype(np.float32)} for _ in range(count)]


def _sequences(length: int = 5, count: int = 6) -> list[Feeds]:
    rng = np.random.default_rng(1)
    found = []
    for _ in range(count):
        mask = np.where(rng.random((3, 1, 1, length)) < 0.2, -100, 0).astype(np.float32)
        found.append({"x": rng.normal(0, 1, (3, length, 16)).astype(np.float32), "mask": mask})
    return found


def _silent(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """A copy in which these layers compute zeros."""
    clone = clone_model(model)
    for node in clone.graph:
        if node.name not in names:
            continue
        for value in node.inputs[1:] if node.op_type != "Add" else node.inputs:
            array = const_array(value)
            if value is not None and array is not None:
                value.const_value = ir.Tensor(np.zeros_like(array), name=value.name)
    return clone


Applied = Callable[..., tuple[ir.Model, PassReport]]


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test looks at how long anything takes."""
    monkeypatch.setattr("slimctl.passes._prune_goal._LATENCY_SECONDS", 0.05)


@pytest.fixture
def applied(plain_context: Callable[..., Any]) -> Applied:
    def apply(
        model: ir.Model, feeds: list[Feeds] | None = None, seed: int = 0, **options: Any
    ) -> tuple[ir.Model, PassReport]:
        judge = options.pop("judge", None)
        context = plain_context(feeds or [], model, has_data=feeds is not None, seed=seed)
        context.judge = judge
        pruned = clone_model(model)
        report = Prune(structure="layer", **options).apply(pruned, context)
        assert interface(pruned) == interface(model)
        return pruned, report

    return apply


def _removed(report: PassReport) -> set[str]:
    return {line["block"] for line in report.facts["blocks"] if line["removed"]}


# which there are


def test_blocks_of_a_resnet(resnet: ir.Model) -> None:
    blocks, skipped = find_blocks(resnet)
    assert [block.name for block in blocks] == list(RESNET_BLOCKS)
    assert [[n.name for n in block.layers] for block in blocks] == [
        ["Conv_2", "Conv_4"],
        ["Conv_7", "Conv_10"],
        ["Conv_15", "Conv_16"],
    ]
    assert [(block.skip.name, block.branch.name) for block in blocks] == [
        ("s", "a3"),
        ("ar", "c4"),
        ("d", "e2"),
    ]
    assert dict(skipped) == {"Add_14": "neither operand is computed from the other"}


def test_attention_and_feed_forward_are_blocks_each(transformer: ir.Model) -> None:
    blocks, skipped = find_blocks(transformer)
    assert [(block.skip.name, block.total.name) for block in blocks] == [
        ("x", "lr"),
        ("lr", "l"),
        ("l", "yr"),
        ("yr", "y"),
    ]
    assert [name for name, _ in skipped] == ["Add_21", "Add_52"]  # scores and mask


@pytest.mark.parametrize(
    ("body", "shapes", "reason"),
    [
        (
            "a = MatMul(x, w) b = Relu(a) c = MatMul(b, w) d = Add(x, c) y = Mul(d, b)",
            {"w": (4, 4)},
            {"Add_3": "'Mul_4' also reads what 'Relu_1' computes"},
        ),
        (
            "a = Sigmoid(x) y = Add(a, x)",
            {},
            {"Add_1": "no layers lie between its operands"},
        ),
        (
            "a = MatMul(x, w) b = MatMul(x, w) y = Add(a, b)",
            {"w": (4, 4)},
            {"Add_2": "neither operand is computed from the other"},
        ),
        (
            "m = ReduceMean<axes=[0]>(x) a = Expand(m, s) b = MatMul(a, w) y = Add(m, b)",
            {"w": (4, 4)},
            {"Add_3": "its shape may differ from that of the operand that would stay"},
        ),
    ],
)
def test_sums_that_are_no_blocks(
    body: str, shapes: Mapping[str, tuple[int, ...]], reason: dict[str, str]
) -> None:
    model = _model(
        f"g (float[N,4] x) => (float[M,4] y) {{ {body} }}",
        shapes,
        {"s": np.array([3, 4])} if "Expand" in body else {},
    )
    blocks, skipped = find_blocks(model)
    assert not blocks
    assert dict(skipped) == reason


def test_an_output_inside_keeps_a_block() -> None:
    model = _model(
        "g (float[N,4] x) => (float[N,4] y, float[N,4] a)"
        "{ a = MatMul(x, w) b = Relu(a) c = MatMul(b, w) y = Add(x, c) }",
        {"w": (4, 4)},
    )
    assert dict(find_blocks(model)[1]) == {"Add_3": "'a' in between is an output of the model"}


NESTED = """
nested (float[N,4] x) => (float[N,4] y) {
    a = MatMul(x, w1)
    b = Relu(a)
    c = MatMul(b, w2)
    d = Add(b, c)
    e = MatMul(d, w3)
    f = Add(x, e)
    g = MatMul(f, w4)
    y = Add(g, f)
}
"""


@pytest.fixture
def nested() -> ir.Model:
    return _model(NESTED, {f"w{index}": (4, 4) for index in range(1, 5)})


# exactness


@pytest.mark.parametrize("gone", [["Add_5"], ["Add_11"], ["Add_17"], list(RESNET_BLOCKS)])
def test_removal_is_what_a_silent_branch_computes(
    gone: list[str], resnet: ir.Model, outputs_of: Callable[..., Any]
) -> None:
    pruned = clone_model(resnet)
    remove_blocks(pruned, gone)
    feeds = _images()
    expected = outputs_of(_silent(resnet, [RESNET_BLOCKS[name] for name in gone]), feeds)
    np.testing.assert_allclose(outputs_of(pruned, feeds)[0], expected[0], rtol=1e-5, atol=1e-6)
    assert len(pruned.graph) < len(resnet.graph) - 2 * len(gone)
    onnx.checker.check_model(ir.to_proto(pruned))


@pytest.mark.parametrize("place", range(4))
def test_removal_from_a_transformer_is_exact_at_every_length(
    place: int, transformer: ir.Model, outputs_of: Callable[..., Any]
) -> None:
    block = find_blocks(transformer)[0][place]
    last = [n.name or "" for n in transformer.graph if n.outputs[0] is block.branch]
    producer = block.branch.producer()
    assert producer is not None and producer.op_type == "Add"
    last.append(producer.inputs[0].producer().name)
    pruned = clone_model(transformer)
    remove_blocks(pruned, [block.name])
    assert interface(pruned) == interface(transformer)
    for length in (1, 5, 8):
        feeds = _sequences(length, 2)
        expected = outputs_of(_silent(transformer, last), feeds)[0]
        np.testing.assert_allclose(outputs_of(pruned, feeds)[0], expected, rtol=1e-5, atol=1e-6)


def test_an_outer_block_takes_the_inner_one_along(
    nested: ir.Model, applied: Applied, outputs_of: Callable[..., Any]
) -> None:
    weak = _scaled(nested, {"w3": 0.01})
    _, report = applied(weak, sparsity=0.7, importance="l1", exclude=("MatMul_6",))
    assert _removed(report) == {"Add_3"}  # the outer one would take more than 70 % along
    pruned, report = applied(nested, sparsity=0.99, exclude=("MatMul_6",))
    assert _removed(report) == {"Add_3", "Add_5"}
    why = {line["block"]: line["why"] for line in report.facts["blocks"]}
    assert why == {"Add_3": "it lies in 'Add_5'", "Add_5": "importance"}
    assert [node.op_type for node in pruned.graph] == ["MatMul", "Add"]
    feeds = [{"x": np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)}]
    expected = outputs_of(_silent(nested, ["MatMul_4"]), feeds)[0]
    np.testing.assert_allclose(outputs_of(pruned, feeds)[0], expected, rtol=1e-6)


def test_a_sum_that_is_an_output_keeps_its_name(
    nested: ir.Model, applied: Applied, outputs_of: Callable[..., Any]
) -> None:
    pruned, _ = applied(nested, sparsity=0.99, include=("MatMul_6",))
    assert pruned.graph.outputs[0].name == "y"
    assert pruned.graph.outputs[0].producer().metadata_props["slimctl.pass"] == "prune"
    feeds = [{"x": np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)}]
    expected = outputs_of(_silent(nested, ["MatMul_6"]), feeds)[0]
    np.testing.assert_allclose(outputs_of(pruned, feeds)[0], expected, rtol=1e-6)


# which go


def _scaled(model: ir.Model, factors: Mapping[str, float]) -> ir.Model:
    clone = clone_model(model)
    for name, factor in factors.items():
        value = clone.graph.initializers[name]
        array = const_array(value)
        assert array is not None
        value.const_value = ir.Tensor(array * np.float32(factor), name=name)
    return clone


@pytest.mark.parametrize("kind", ["l1", "l2", "activation"])
def test_the_weakest_branch_goes_first(kind: str, resnet: ir.Model, applied: Applied) -> None:
    model = _scaled(resnet, {"w4": 0.01})
    _, report = applied(model, _images(), sparsity=0.34, importance=kind)
    assert _removed(report) == {"Add_11"}


def test_activation_measures_the_share_of_the_energy(
    resnet: ir.Model, applied: Applied, plain_context: Callable[..., Any]
) -> None:
    feeds = _images()
    _, report = applied(resnet, feeds, sparsity=0.34, reconstruct=False)
    observed = plain_context(feeds, resnet).observe(resnet, ["a3", "a", "c4", "c", "e2", "e"])
    energy = {name: np.square(np.stack(values)).sum() for name, values in observed.items()}
    expected = [energy["a3"] / energy["a"], energy["c4"] / energy["c"], energy["e2"] / energy["e"]]
    found = [line["importance"] for line in report.facts["blocks"]]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_chance_depends_on_the_seed_only(transformer: ir.Model, applied: Applied) -> None:
    picks = [
        _removed(applied(transformer, seed=s, sparsity=0.5, importance="random")[1])
        for s in (0, 0, 1, 2, 3)
    ]
    assert picks[0] == picks[1]
    assert len({frozenset(pick) for pick in picks}) > 1


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.25, 1), (0.5, 2), (0.9, 4)])
def test_the_share_counts_blocks(
    share: float, count: int, transformer: ir.Model, applied: Applied
) -> None:
    _, report = applied(transformer, sparsity=share)
    assert report.changed == {"residual blocks": count}
    assert f"{count} of 4 residual blocks removed" in report.notes


def test_patterns_choose_layers(resnet: ir.Model, applied: Applied) -> None:
    _, report = applied(resnet, sparsity=0.9, exclude=("Conv_4",))
    assert _removed(report) == {"Add_11", "Add_17"}
    assert ("Add_5", "'Conv_4': excluded by 'Conv_4'") in report.skipped
    _, report = applied(resnet, sparsity=0.9, include=("Conv_2", "Conv_4"))
    assert _removed(report) == {"Add_5"}
    _, report = applied(resnet, ratio=("Conv_15=0.9",))
    assert _removed(report) == {"Add_17"}


def test_steps_rank_again_and_end_at_the_share(transformer: ir.Model, applied: Applied) -> None:
    _, report = applied(transformer, _sequences(), sparsity=0.75, steps=3)
    assert len(_removed(report)) == 3


# as far as a target asks


@pytest.mark.parametrize("goal", ["macs", "size"])
def test_a_target_is_reached_with_few_blocks(goal: str, resnet: ir.Model, applied: Applied) -> None:
    def cost(model: ir.Model) -> float:
        found = model_cost(model, {"N": 1, "H": 64, "W": 64})
        return float(found.macs if goal == "macs" else found.weight_bytes)

    alone = {}
    for name in RESNET_BLOCKS:
        clone = clone_model(resnet)
        remove_blocks(clone, [name])
        alone[name] = cost(clone) / cost(resnet)
    pruned, report = applied(resnet, **{f"target_{goal}": 0.75})
    assert cost(pruned) <= 0.75 * cost(resnet)
    assert len(_removed(report)) == 1  # the dear ones are the first two
    assert alone[next(iter(_removed(report)))] <= 0.75 < alone["Add_17"]


def test_a_target_out_of_reach_says_what_is_left(resnet: ir.Model, applied: Applied) -> None:
    with pytest.raises(OptionError, match=r"without all blocks that can go, \d+% is left"):
        applied(resnet, target_macs=0.01)


def test_as_many_go_as_the_metric_allows(
    resnet: ir.Model, applied: Applied, outputs_of: Callable[..., Any]
) -> None:
    feeds = _images()
    reference = outputs_of(resnet, feeds)[0]

    def judge(model: ir.Model) -> float:
        return -float(np.square(outputs_of(model, feeds)[0] - reference).mean())

    options = {"judge": judge, "reconstruct": False}
    removed = []
    for allowed in (0.0, 0.01, 100.0):
        pruned, report = applied(resnet, feeds, max_metric_drop=allowed, **options)
        assert -judge(pruned) <= allowed
        removed.append(len(_removed(report)))
    assert removed[0] == 0 and removed[2] == 3


def test_latency_as_a_target(
    resnet: ir.Model, applied: Applied, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nodes(self: Any, model: ir.Model) -> float:
        return len(model.graph) / 22

    monkeypatch.setattr("slimctl.passes._prune_goal.Latency.__call__", nodes)
    pruned, _ = applied(resnet, _images(), target_latency=0.8)
    assert len(pruned.graph) <= 0.8 * 22


# refitting


@pytest.mark.parametrize("name", ["resnet", "transformer"])
def test_the_layers_behind_make_good_for_it(
    name: str, request: pytest.FixtureRequest, applied: Applied, outputs_of: Callable[..., Any]
) -> None:
    model = request.getfixturevalue(name)
    feeds = _images(30) if name == "resnet" else _sequences(count=30)
    held_out = _images(6, seed=9) if name == "resnet" else _sequences(7, 6)
    options = {"sparsity": 0.34 if name == "resnet" else 0.25}
    errors = []
    for reconstruct in (False, True):
        pruned, report = applied(model, feeds, reconstruct=reconstruct, **options)
        difference = outputs_of(pruned, held_out)[0] - outputs_of(model, held_out)[0]
        errors.append(float(np.square(difference).mean()))
    assert errors[1] < 0.9 * errors[0]
    assert report.facts["explained"]


# what is said


def test_nothing_to_remove_is_an_error_with_the_reason(applied: Applied) -> None:
    plain = _model("g (float[N,4] x) => (float[N,4] y) { y = MatMul(x, w) }", {"w": (4, 4)})
    with pytest.raises(PassFailedError, match="the model adds nothing up"):
        applied(plain, sparsity=0.5)
    gated = _model("g (float[N,4] x) => (float[N,4] y) { a = Exp(x) y = Add(x, a) }", {})
    with pytest.raises(PassFailedError, match="no layers lie between its operands"):
        applied(gated, sparsity=0.5)


def test_a_misspelled_pattern_is_named(resnet: ir.Model, applied: Applied) -> None:
    with pytest.raises(PassFailedError, match="'Konv_4' matches no layer"):
        applied(resnet, sparsity=0.5, include=("Konv_4",))


def test_the_table_lists_every_block(resnet: ir.Model, applied: Applied) -> None:
    _, report = applied(resnet, sparsity=0.34)
    (table,) = report.tables
    assert [row[0] for row in table.rows] == list(RESNET_BLOCKS)
    fates = [row[-1] for row in table.rows]
    assert sorted(fates) == [
        "kept: more important than others",
        "kept: more important than others",
        "removed: importance",
    ]
