"""Float16: where it goes, where float32 stays, where the Casts are; judged by running both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.core.contract import Feeds, PassReport
from slimctl.core.errors import OptionError, UnsupportedModelError
from slimctl.evaluate.metrics import sqnr_db
from slimctl.graph.edit import all_nodes, interface
from slimctl.graph.session import Level, open_session, run
from slimctl.passes._layers import QUANTIZERS
from slimctl.passes.convert_float import ConvertFloat
from slimctl.recipe.run import run_passes
from slimctl.recipe.schema import DataSpec
from slimctl.targets import load_target

HALF, FULL = ir.DataType.FLOAT16, ir.DataType.FLOAT


def build(text: str, opset: int = 17, **arrays: Any) -> ir.Model:
    """A model from text; arrays become float32 or int64 initializers."""
    ir_version = 8 if opset < 20 else 10 if opset < 23 else 13
    model = onnx.parser.parse_model(
        f'<ir_version: {ir_version}, opset_import: ["": {opset}, "com.microsoft": 1]> {text}'
    )
    for name, values in arrays.items():
        array = np.asarray(values)
        kind = (
            np.int64
            if array.dtype.kind == "i"
            else array.dtype
            if array.dtype.kind == "b"
            else np.float32
        )
        model.graph.initializer.append(numpy_helper.from_array(array.astype(kind), name))
    onnx.checker.check_model(model, full_check=True)
    result = ir.from_proto(model)
    for node in all_nodes(result):
        node.name = f"{node.op_type}_{node.outputs[0].name}"
    return result


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(0, scale, shape)).astype(np.float32)


class Converted(NamedTuple):
    """A result and what the tests ask of it."""

    before: ir.Model
    model: ir.Model
    report: PassReport

    def node(self, name: str) -> ir.Node:
        (node,) = [node for node in all_nodes(self.model) if node.name == name]
        return node

    def full(self) -> set[str]:
        """Names of the nodes of the original that compute in float32."""
        names = {node.name for node in all_nodes(self.before) if node.op_type != "Constant"}
        return {
            node.name or ""
            for node in all_nodes(self.model)
            if node.name in names and any(value.dtype == FULL for value in node.outputs)
        }

    def casts(self) -> Counter[ir.DataType]:
        """Casts by what they cast to."""
        nodes = [node for node in all_nodes(self.model) if node.op_type == "Cast"]
        return Counter(ir.DataType(node.attributes["to"].as_int()) for node in nodes)

    def reasons(self) -> dict[str, str]:
        return dict(self.report.skipped)

    def sqnr(self, *samples: Feeds) -> float:
        """Of the worst output at the worst optimization level."""
        reference = open_session(self.before, threads=1)
        found = []
        for level in (Level.DISABLED, Level.ALL):
            session = open_session(self.model, level=level, threads=1)
            for feeds in samples:
                ours, theirs = run(reference, feeds), run(session, feeds)
                assert all(np.isfinite(a).all() for a in theirs.values())
                found += [
                    sqnr_db(ours[name], theirs[name].astype(np.float32))
                    for name in ours
                    if ours[name].dtype.kind == "f"
                ]
                assert all(
                    np.array_equal(ours[name], theirs[name]) or ours[name].dtype.kind == "f"
                    for name in ours
                )
        return min(found)


@pytest.fixture
def convert(plain_context: Callable[..., Any]) -> Callable[..., Converted]:
    def apply(
        model: ir.Model,
        data: Sequence[Feeds] = (),
        target: Any = None,
        **options: Any,
    ) -> Converted:
        context = plain_context(list(data), model)
        context.has_data = bool(data)
        context.target = target or context.target
        result = model.clone()
        step = ConvertFloat(**options)
        step.requires(result)
        report = step.apply(result, context)
        onnx.checker.check_model(ir.to_proto(result), full_check=True)
        if options.get("keep_io", True):
            assert interface(result) == interface(model)
        return Converted(model, result, report)

    return apply


CONV = """g (float[N,3,8,8] x) => (float[N,4] y) {
    c = Conv(x, w, b)
    r = Relu(c)
    f = Flatten(r)
    y = Gemm(f, v)
}"""


def conv_model(text: str = CONV, **changes: Any) -> ir.Model:
    weights = {"w": normal(5, 3, 3, 3), "b": normal(5), "v": normal(180, 4)}
    return build(text, **weights | changes)


def test_a_plain_network_becomes_half_with_two_casts(convert: Callable[..., Converted]) -> None:
    result = convert(conv_model())
    assert result.report.changed == {"Conv": 1, "Flatten": 1, "Gemm": 1, "Relu": 1}
    assert result.casts() == {HALF: 1, FULL: 1}
    assert not result.report.skipped
    assert all(v.dtype == HALF for v in result.model.graph.initializers.values())
    assert result.sqnr({"x": normal(2, 3, 8, 8, seed=1)}) > 55.0
    before, after = (len(ir.to_proto(m).SerializeToString()) for m in (result.before, result.model))
    assert after < 0.65 * before


def test_weights_round_as_numpy_rounds(convert: Callable[..., Converted]) -> None:
    result = convert(conv_model())
    stored = result.model.graph.initializers["w"].const_value
    np.testing.assert_array_equal(stored.numpy(), normal(5, 3, 3, 3).astype(np.float16))


def test_the_original_keeps_its_types_and_weights(convert: Callable[..., Converted]) -> None:
    model = conv_model()
    before = ir.to_proto(model).SerializeToString()
    convert(model)
    assert ir.to_proto(model).SerializeToString() == before


def test_same_bytes_every_time(convert: Callable[..., Converted]) -> None:
    one, two = (ir.to_proto(convert(conv_model()).model).SerializeToString() for _ in range(2))
    assert one == two


@pytest.mark.parametrize(
    "options", [{"exclude": ("Relu_r",)}, {"block_list": ("Relu",)}, {"exclude": ("op:Relu",)}]
)
def test_what_is_named_stays_float32(
    convert: Callable[..., Converted], options: dict[str, Any]
) -> None:
    result = convert(conv_model(), **options)
    assert result.full() >= {"Relu_r"}
    assert "Relu_r" in result.reasons()
    assert "Conv_c" not in result.full()


def test_only_what_is_included_changes(convert: Callable[..., Converted]) -> None:
    result = convert(conv_model(), include=("op:Gemm",))
    assert result.full() == {"Conv_c", "Relu_r", "Flatten_f"}
    assert result.model.graph.initializers["w"].dtype == FULL
    assert result.model.graph.initializers["v"].dtype == HALF
    assert result.reasons()["Conv_c"] == "not among the included nodes"


def test_patterns_that_match_nothing_are_said(convert: Callable[..., Converted]) -> None:
    assert (
        "the pattern 'nix' matched nothing" in convert(conv_model(), exclude=("nix",)).report.notes
    )
    with pytest.raises(OptionError, match="regular expression"):
        ConvertFloat(exclude=("re:(",))


ISLAND = """g (float[2,16] x) => (float[2,16] y) {
    h = MatMul(x, w)
    m = ReduceMean<axes=[-1]>(h)
    d = Sub(h, m)
    p = Mul(d, d)
    q = ReduceMean<axes=[-1]>(p)
    e = Add(q, eps)
    s = Sqrt(e)
    n = Div(d, s)
    y = MatMul(n, w)
}"""


def island() -> ir.Model:
    return build(ISLAND, w=normal(16, 16), eps=1e-12)


def test_float32_nodes_that_are_close_become_one_island(convert: Callable[..., Converted]) -> None:
    """By hand: Casts at both ends of the model and at both ends of the normalization."""
    result = convert(island())
    assert result.full() == {
        *("ReduceMean_m", "Sub_d", "Mul_p", "ReduceMean_q", "Add_e", "Sqrt_s", "Div_n"),
    }
    assert result.casts() == {HALF: 2, FULL: 2}
    assert "fewer Casts" in result.reasons()["Sub_d"]
    assert "no data" in result.reasons()["ReduceMean_m"]
    assert result.sqnr({"x": normal(2, 16, seed=1)}) > 50.0


def test_one_cast_serves_all_readers(convert: Callable[..., Converted]) -> None:
    text = """g (float[2,16] x) => (float[2,16] y) {
        a = MatMul(x, w) b = MatMul(x, w) c = MatMul(x, w) s = Add(a, b) y = Add(s, c)
    }"""
    assert convert(build(text, w=normal(16, 16))).casts() == {HALF: 1, FULL: 1}


def test_no_pair_of_casts_follows_one_another(convert: Callable[..., Converted]) -> None:
    for model in (island(), conv_model()):
        for node in all_nodes(convert(model).model):
            source = node.inputs[0] if node.op_type == "Cast" else None
            producer = source.producer() if source is not None else None
            assert producer is None or producer.op_type != "Cast"


def test_epsilon_that_vanishes_keeps_its_division(convert: Callable[..., Converted]) -> None:
    text = "g (float[2,8] x) => (float[2,8] y) { e = Add(x, eps) s = Sqrt(e) y = Div(x, s) }"
    zeros = {"x": np.zeros((2, 8), np.float32)}
    result = convert(build(text, eps=1e-12), [{"x": np.abs(normal(2, 8))}])
    assert result.full() >= {"Add_e", "Sqrt_s"}
    assert "too small" in result.reasons()["Add_e"]
    session = open_session(result.model, threads=1)
    np.testing.assert_array_equal(run(session, zeros)["y"], 0.0)


def test_a_divisor_that_would_become_zero_is_kept(convert: Callable[..., Converted]) -> None:
    text = "g (float[2,2] x) => (float[2,2] y) { y = Div(x, d) }"
    result = convert(build(text, d=[1.0, 1e-8]))
    assert result.full() == {"Div_y"}


def test_a_weight_that_overflows_keeps_its_layer(convert: Callable[..., Converted]) -> None:
    result = convert(conv_model(b=[1.0, 2e5, 0, 0, 0]))
    assert "Conv_c" in result.full()
    assert "2e+05" in result.reasons()["Conv_c"]
    assert result.sqnr({"x": normal(2, 3, 8, 8, seed=1)}) > 60.0


@pytest.mark.parametrize(
    ("body", "clamped"),
    [
        ("y = Clip(x, low, high)", ["high", "low"]),
        ("a = Max(x, low) y = Min(a, high)", ["high", "low"]),
        ("a = Clip(x, low) y = Relu(a)", ["low"]),
    ],
)
def test_bounds_are_clamped(
    convert: Callable[..., Converted], body: str, clamped: list[str]
) -> None:
    arrays = {name: value for name, value in (("low", -3e38), ("high", 1e6)) if name in body}
    text = f"""g (float[2,8] h) => (float[2,8] z) {{
        x = MatMul(h, w) {body} z = MatMul(y, w)
    }}"""
    result = convert(build(text, w=normal(8, 8), **arrays))
    assert not result.full()
    assert result.report.facts["clamped"] == clamped
    assert result.sqnr({"h": normal(2, 8)}) > 55.0


def test_reductions_go_by_what_the_data_hold(convert: Callable[..., Converted]) -> None:
    text = "g (float[2,64] x) => (float[2,1] y) { h = MatMul(x, w) y = ReduceSum(h, a) }"
    model = build(text, w=np.eye(64), a=[1])
    small = [{"x": normal(2, 64)}]
    large = [{"x": 300.0 * normal(2, 64)}]
    assert not convert(model, small).full()
    assert convert(model).full() == {"ReduceSum_y"}
    found = convert(model, large)
    assert found.full() == {"ReduceSum_y"}  # 64 terms of up to 900
    assert "adds up" in found.reasons()["ReduceSum_y"]


def test_values_near_the_end_of_the_range_stay(convert: Callable[..., Converted]) -> None:
    text = """g (float[2,8] x) => (float[2,8] y) {
        h = MatMul(x, w) p = Mul(h, h) q = Mul(p, t) y = MatMul(q, w)
    }"""
    model = build(text, w=normal(8, 8), t=1e-3)
    data = [{"x": 100.0 * normal(2, 8, seed=3)}]
    result = convert(model, data)
    assert result.full() == {"Mul_p", "Mul_q"}
    assert "reaches" in result.reasons()["Mul_p"]
    assert result.sqnr(*data) > 50.0
    assert not convert(model, [{"x": normal(2, 8, seed=3)}]).full()


def test_values_that_would_vanish_stay(convert: Callable[..., Converted]) -> None:
    text = """g (float[2,8] x) => (float[2,8] y) {
        a = Mul(x, t) b = Tanh(a) c = Mul(b, u) y = MatMul(c, w)
    }"""
    model = build(text, w=normal(8, 8), t=2e-4, u=5e3)
    data = [{"x": 1e-3 * normal(2, 8)}]
    assert convert(model, data).full() >= {"Mul_a", "Tanh_b", "Mul_c"}
    assert convert(model, data).sqnr(*data) > 50.0


def test_angles_and_what_makes_them_stay(convert: Callable[..., Converted]) -> None:
    """Rotary positions: 4000 times a frequency has no place in eleven bits."""
    text = """g (int64[1,6] p, float[1,6,8] x) => (float[1,6,8] y) {
        f = Cast<to=1>(p)
        u = Unsqueeze(f, axis)
        a = MatMul(u, freq)
        s = Sin(a)
        c = Cos(a)
        m = Mul(x, c)
        n = Mul(x, s)
        z = Add(m, n)
        y = MatMul(z, w)
    }"""
    model = build(text, axis=[2], freq=normal(1, 8), w=normal(8, 8))
    feeds = {"p": np.arange(4000, 4006)[np.newaxis], "x": normal(1, 6, 8, seed=2)}
    result = convert(model)
    assert {"Cast_f", "MatMul_a", "Sin_s", "Cos_c"} <= result.full()
    assert "MatMul_y" not in result.full()
    assert result.sqnr(feeds) > 55.0


def test_sizes_computed_in_float_stay_exact(convert: Callable[..., Converted]) -> None:
    text = """g (float[N,M] x) => (float[A] y, int64[1] n) {
        s = Shape<start=1>(x)
        f = Cast<to=1>(s)
        h = Mul(f, t)
        r = Floor(h)
        n = Cast<to=7>(r)
        y = ConstantOfShape<value = float[1] {1.5}>(n)
    }"""
    result = convert(build(text, t=1.001))
    assert {"Cast_f", "Mul_h", "Floor_r"} <= result.full()
    assert result.sqnr({"x": normal(1, 4001)}) > 100.0


def test_logarithm_sees_what_float16_would_lose(convert: Callable[..., Converted]) -> None:
    text = """g (float[1,8] x) => (float[1,8] y) {
        r = Relu(x) h = MatMul(r, w) s = Softmax(h) y = Log(s)
    }"""
    model = build(text, w=np.eye(8))
    feeds = {"x": np.array([[30.0, 0, 1, 2, 3, 4, 5, -10]], np.float32)}
    result = convert(model, [feeds])
    assert result.full() == {"Softmax_s", "Log_y"}
    assert result.sqnr(feeds) > 55.0


def test_spectra_stay_up_to_the_input(convert: Callable[..., Converted]) -> None:
    text = """g (float[1,1,64] x) => (float[1,4,57] y) {
        c = Conv(x, w) q = Mul(c, c) l = Log(q) y = Conv(l, v)
    }"""
    model = build(text, w=normal(4, 1, 8), v=normal(4, 4, 1))
    result = convert(model)
    assert result.full() == {"Conv_c", "Mul_q", "Log_l"}
    assert result.model.graph.initializers["w"].dtype == FULL
    assert result.model.graph.initializers["v"].dtype == HALF


def test_a_float_cast_follows_its_reader(convert: Callable[..., Converted]) -> None:
    """Cast(to=float32) meant 'as float': it casts to float16 now, and is not cast again."""
    text = """g (int64[2,8] i, float[2,8] x) => (float[2,8] y) {
        h = MatMul(x, w) f = Cast<to=1>(i) m = Mul(f, h) y = MatMul(m, w)
    }"""
    result = convert(build(text, w=normal(8, 8)))
    assert result.node("Cast_f").attributes["to"].as_int() == HALF
    assert result.casts() == {HALF: 2, FULL: 1}


def test_casts_of_a_half_converted_model_go(convert: Callable[..., Converted]) -> None:
    text = """g (float[2,8] x) => (float[2,8] y) {
        a = Relu(x) b = Cast<to=10>(a) c = Neg(b) d = Cast<to=1>(c) y = MatMul(d, w)
    }"""
    result = convert(build(text, w=normal(8, 8)))
    assert result.casts() == {HALF: 1, FULL: 1}
    assert result.sqnr({"x": normal(2, 8)}) > 55.0


@pytest.mark.parametrize(
    ("node", "opset"),
    [
        ("y = ConstantOfShape<value = float[1] {2.5}>(s)", 17),
        ("y = ConstantOfShape(s)", 17),
        ("y = Constant<value = float[2,2] {1.0, 2.0, 3.0, 4.0}>()", 17),
        ("y = Constant<value_floats = [1.0, 2.0]>()", 17),
        ("y = Constant<value_float = 0.5>()", 17),
    ],
)
def test_made_constants_change_their_type(
    convert: Callable[..., Converted], node: str, opset: int
) -> None:
    text = f"g (float[2,2] x) => (float[2,2] z) {{ {node} m = Mul(x, y) z = MatMul(m, w) }}"
    arrays = {"s": [2, 2]} if "(s)" in node else {}
    result = convert(build(text, opset, w=normal(2, 2), **arrays))
    (value,) = [v for n in result.model.graph for v in n.outputs if v.name == "y"]
    assert value.dtype == HALF
    assert result.sqnr({"x": normal(2, 2)}) > 55.0


@pytest.mark.parametrize(
    "call",
    ["RandomNormal<shape=[2,2]>()", "RandomUniform<shape=[2,2]>()", "EyeLike<dtype=1>(i)"],
)
def test_generators_follow_the_target(
    convert: Callable[..., Converted], call: str, plain_context: Callable[..., Any]
) -> None:
    op_type = call.partition("<")[0]
    text = f"""g (float[2,2] x, int64[2,2] i) => (float[2,2] z) {{
        y = {call} m = Mul(x, y) z = MatMul(m, w)
    }}"""
    model = build(text, w=normal(2, 2))
    on_cpu = convert(model)
    assert f"{op_type}_y" in on_cpu.full()
    assert "cpu" in on_cpu.reasons()[f"{op_type}_y"]
    open_session(on_cpu.model)
    cpu = plain_context([], model).target
    gpu = convert(model, target=cpu.model_copy(update={"provider": "CUDAExecutionProvider"}))
    assert gpu.node(f"{op_type}_y").attributes["dtype"].as_int() == HALF


def test_like_generators_keep_to_their_own_type(convert: Callable[..., Converted]) -> None:
    text = """g (float[2,2] x) => (float[2,2] z) {
        h = MatMul(x, w) r = RandomNormalLike(h) z = MatMul(r, w)
    }"""
    result = convert(build(text, w=normal(2, 2)), exclude=("op:RandomNormalLike",))
    assert result.full() == {"RandomNormalLike_r"}
    open_session(result.model)


def test_a_target_may_block_operators(
    convert: Callable[..., Converted], plain_context: Callable[..., Any]
) -> None:
    model = conv_model()
    target = plain_context([], model).target.model_copy(update={"float32_only": ("Conv",)})
    assert convert(model, target=target).full() == {"Conv_c"}


@pytest.mark.parametrize(("kind", "full"), [("fp16", set()), ("bf16", {"MaxPool_p"})])
def test_a_rule_about_types_blocks_operators(
    convert: Callable[..., Converted], kind: str, full: set[str]
) -> None:
    """CUDA has no MaxPool for bfloat16, and neither has the CPU: the model would not load."""
    text = """g (float[1,4,8,8] x) => (float[1,4,3,3] z) {
        c = Conv(x, w)
        p = MaxPool<kernel_shape=[2,2]>(c)
        z = Conv(p, w)
    }"""
    opset = 22 if kind == "bf16" else 17
    model = build(text, opset, w=normal(4, 4, 3, 3))
    result = convert(model, target=load_target("cuda"), kind=kind)
    assert result.full() == full
    if full:
        assert result.reasons()["MaxPool_p"] == "MaxPool has no kernel for bfloat16 on cuda"


def test_operators_without_a_half_form_stay(convert: Callable[..., Converted]) -> None:
    text = """g (float[8] x) => (float[8] y) {
        a = Mul(x, x)
        s = ReduceMax<keepdims=0>(a)
        r = Range(zero, s, one)
        m = ReduceMax<keepdims=1>(r)
        y = Mul(a, m)
    }"""
    result = convert(build(text, zero=0.0, one=1.0))
    assert result.full() >= {"Range_r"}
    assert result.sqnr({"x": 1 + np.abs(normal(8))}) > 50.0


def test_custom_operators_stay(convert: Callable[..., Converted]) -> None:
    model = conv_model()
    for node in model.graph:
        if node.op_type == "Relu":
            node.domain, node.op_type = "my.own", "Magic"
    model.opset_imports["my.own"] = 1
    result = convert(model)
    assert "Magic has no float16 form" in result.reasons().values()


def test_sequences_stay(convert: Callable[..., Converted]) -> None:
    text = """g (float[4,8] x) => (float[4,8] y) {
        h = MatMul(x, w) s = SplitToSequence<axis=0>(h, two) c = ConcatFromSequence<axis=0>(s)
        y = MatMul(c, w)
    }"""
    result = convert(build(text, w=normal(8, 8), two=2))
    assert result.full() == {"SplitToSequence_s", "ConcatFromSequence_c"}
    assert {"SplitToSequence_s", "ConcatFromSequence_c"} <= result.reasons().keys()
    assert result.sqnr({"x": normal(4, 8)}) > 50.0


def test_shared_weights_are_stored_once_where_they_are_large(
    convert: Callable[..., Converted],
) -> None:
    text = "g (float[2,64] x) => (float[2,64] y) { a = MatMul(x, w) b = Relu(a) y = MatMul(b, w) }"
    large = convert(build(text, w=normal(64, 64)), exclude=("MatMul_y",))
    assert large.sqnr({"x": normal(2, 64)}) > 50.0
    names = [v.name for v in large.model.graph.initializers.values()]
    assert names == ["w", "w_float16"]  # the user wants MatMul_y as it was
    exact = build(text, w=normal(64, 64).astype(np.float16).astype(np.float32))
    once = convert(exact, exclude=("MatMul_y",))
    assert [v.dtype for v in once.model.graph.initializers.values()] == [HALF]
    forced = convert(build(text, w=normal(64, 64)), [{"x": 1e4 * normal(2, 64)}])
    assert [v.dtype for v in forced.model.graph.initializers.values()] == [HALF]
    assert forced.full() == {"MatMul_a", "Relu_b", "MatMul_y"}


def test_small_shared_constants_are_stored_twice(convert: Callable[..., Converted]) -> None:
    text = "g (float[2,4] x) => (float[2,4] y) { a = Mul(x, t) b = MatMul(a, w) y = Mul(b, t) }"
    result = convert(build(text, t=normal(4), w=normal(4, 4)), exclude=("Mul_y",))
    stored = {name: v.dtype for name, v in result.model.graph.initializers.items()}
    assert stored == {"t": FULL, "w": HALF, "t_float16": HALF}


def test_the_interface_may_change_on_demand(convert: Callable[..., Converted]) -> None:
    result = convert(conv_model(), keep_io=False)
    assert [v.dtype for v in (*result.model.graph.inputs, *result.model.graph.outputs)] == [
        HALF
    ] * 2
    assert not result.casts()
    feeds = {"x": normal(2, 3, 8, 8, seed=1)}
    expected = run(open_session(result.before), feeds)["y"]
    found = run(open_session(result.model), {"x": feeds["x"].astype(np.float16)})["y"]
    assert sqnr_db(expected, found.astype(np.float32)) > 50.0


def test_an_input_that_does_not_fit_keeps_its_type(convert: Callable[..., Converted]) -> None:
    text = "g (float[2,8] x) => (float[2,8] y) { a = Mul(x, t) y = MatMul(a, w) }"
    model = build(text, w=normal(8, 8), t=1e-3)
    result = convert(model, [{"x": 1e5 * normal(2, 8)}], keep_io=False)
    assert result.model.graph.inputs[0].dtype == FULL
    assert result.model.graph.outputs[0].dtype == HALF
    assert "reaches" in result.reasons()["x"]


@pytest.mark.parametrize("keep_io", [True, False])
def test_through_the_pipeline(keep_io: bool, tmp_path: Path) -> None:
    source, output = tmp_path / "model.onnx", tmp_path / "out.onnx"
    ir.save(conv_model(), source)
    np.savez(tmp_path / "calib.npz", x=normal(8, 3, 8, 8))
    data = DataSpec(source=str(tmp_path / "calib.npz"))
    result = run_passes(
        source, [ConvertFloat(keep_io=keep_io)], output=output, calibration=data, use_cache=False
    )
    (record,) = result.records
    assert record.report.changed["Conv"] == 1
    kind = onnx.load(output).graph.input[0].type.tensor_type.elem_type
    assert kind == (onnx.TensorProto.FLOAT if keep_io else onnx.TensorProto.FLOAT16)
    assert (record.sqnr_db is not None) == keep_io


def test_quantized_models_are_refused(tmp_path: Path, convert: Callable[..., Converted]) -> None:
    text = """g (float[2,8] x) => (float[2,8] y) {
        q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z)
    }"""
    with pytest.raises(UnsupportedModelError, match="quantized already"):
        convert(build(text))
    text = """g (float[2,8] x) => (uint8[2,8] q, float s, uint8 z) {
        q, s, z = DynamicQuantizeLinear(x)
    }"""
    with pytest.raises(UnsupportedModelError, match="DynamicQuantizeLinear"):
        convert(build(text))
    assert ConvertFloat.not_after == QUANTIZERS


def test_twice_changes_nothing_more(convert: Callable[..., Converted]) -> None:
    once = convert(island())
    again = convert(once.model)
    assert sum(again.casts().values()) == sum(once.casts().values())


def test_scatter_that_adds_up_stays(convert: Callable[..., Converted]) -> None:
    text = """g (float[2,8] x, float[2,8] u) => (float[2,8] y) {
        h = MatMul(x, w)
        k = MatMul(u, w)
        s = ScatterElements<axis=0, reduction="REDUCTION">(h, i, k)
        y = MatMul(s, w)
    }"""
    feeds = {"x": normal(2, 8), "u": normal(2, 8, seed=1)}
    for reduction, full in (("add", {"ScatterElements_s"}), ("none", set())):
        model = build(
            text.replace("REDUCTION", reduction), 18, w=normal(8, 8), i=[[1] * 8, [0] * 8]
        )
        result = convert(model)
        assert result.full() == full
        assert result.sqnr(feeds) > 50.0


def test_statistics_of_the_batch_stay(convert: Callable[..., Converted]) -> None:
    text = """g (float[4,8] x) => (float[4,8] y, float[8] n, float[8] o) {
        h = MatMul(x, w)
        b, n, o = BatchNormalization<training_mode=1>(h, s, s, s, s)
        y = MatMul(b, w)
    }"""
    result = convert(build(text, w=normal(8, 8), s=np.ones(8)))
    assert result.full() == {"BatchNormalization_b"}


def test_bits_are_no_numbers(convert: Callable[..., Converted]) -> None:
    text = """g (float[2,8] x) => (int32[2,8] y) { h = MatMul(x, w) y = BitCast<to=6>(h) }"""
    if not onnx.defs.has("BitCast"):
        pytest.skip("this onnx does not know BitCast yet")
    opset = onnx.defs.get_schema("BitCast").since_version
    result = convert(build(text, opset, w=normal(8, 8)))
    assert result.node("BitCast_y").inputs[0].dtype == FULL


def test_a_transpose_that_crashes_onnxruntime_stays(convert: Callable[..., Converted]) -> None:
    """In one process: before, loading the result killed it."""
    text = (
        "g (float[3,5,8] x) => (float[5,3,8] y) { t = Transpose<perm=[1,0,2]>(x) y = MatMul(t, w) }"
    )
    result = convert(build(text, w=normal(8, 8)))
    assert result.full() == {"Transpose_t"}
    assert result.sqnr({"x": normal(3, 5, 8)}) > 50.0
