"""Dynamic quantization against the same sums in numpy, and against the float model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from slimctl.core.contract import Feeds, PassReport
from slimctl.core.errors import UnsupportedModelError
from slimctl.evaluate.metrics import sqnr_db
from slimctl.graph.edit import all_nodes, interface
from slimctl.graph.session import Level, open_session, optimized, run
from slimctl.passes._dynamic_gates import gated_layers
from slimctl.passes._layers import QUANTIZERS
from slimctl.passes.quantize_dynamic import QuantizeDynamic
from slimctl.targets import load_target
from tests.passes.test_convert_float import build, normal


class Quantized(NamedTuple):
    """A result and what the tests ask of it."""

    before: ir.Model
    model: ir.Model
    report: PassReport

    def operators(self) -> Counter[str]:
        return Counter(node.op_type for node in all_nodes(self.model))

    def stored(self, name: str) -> np.ndarray:
        value = self.model.graph.initializers[name].const_value
        assert value is not None
        return value.numpy()

    def sqnr(self, *samples: Feeds) -> float:
        """Of the worst output at the worst optimization level."""
        reference, found = open_session(self.before, threads=1), []
        for level in (Level.DISABLED, Level.ALL):
            session = open_session(self.model, level=level, threads=1)
            for feeds in samples:
                ours, theirs = run(reference, feeds), run(session, feeds)
                found += [sqnr_db(ours[name], theirs[name]) for name in ours]
        return min(found)


@pytest.fixture
def quantize(plain_context: Callable[..., Any]) -> Callable[..., Quantized]:
    def apply(
        model: ir.Model, data: Sequence[Feeds] = (), target: str = "cpu", **options: Any
    ) -> Quantized:
        context = plain_context(list(data), model, target=load_target(target))
        context.has_data = bool(data)
        result = model.clone()
        step = QuantizeDynamic(**options)
        step.requires(result)
        report = step.apply(result, context)
        assert interface(result) == interface(model)
        onnx.checker.check_model(ir.to_proto(result))
        return Quantized(model, result, report)

    return apply


def rounded(x: np.ndarray) -> np.ndarray:
    """DynamicQuantizeLinear and back, after its definition."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = np.float32((high - low) / 255)
    zero = np.clip(np.rint(-low / scale), 0, 255)
    return (np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale


def columns(w: np.ndarray, steps: int = 127) -> np.ndarray:
    scale = np.abs(w).max(axis=0) / steps
    return np.rint(w / scale) * scale


MATMUL = "g (float[N,64] x) => (float[N,32] y) { y = MatMul(x, w) }"


def test_matmul_is_what_the_formula_says(quantize: Callable[..., Quantized]) -> None:
    w, x = normal(64, 32), normal(5, 64, seed=1)
    result = quantize(build(MATMUL, w=w))
    found = run(open_session(result.model, level=Level.DISABLED, threads=1), {"x": x})["y"]
    np.testing.assert_allclose(found, rounded(x) @ columns(w), rtol=1e-4, atol=1e-4)
    assert result.report.changed == {"MatMul": 1}
    assert result.sqnr({"x": x}) > 30.0


def test_what_it_becomes_in_onnxruntime(quantize: Callable[..., Quantized]) -> None:
    """One fused operator, not five."""
    alone = optimized(quantize(build(MATMUL, w=normal(64, 32))).model)
    assert [node.op_type for node in alone.graph] == ["DynamicQuantizeMatMul"]
    text = """g (float[N,64] x) => (float[N,32] y) {
        a = MatMul(x, w) b = MatMul(x, v) y = Add(a, b)
    }"""
    shared = quantize(build(text, w=normal(64, 32), v=normal(64, 32, seed=2)))
    assert shared.operators()["DynamicQuantizeLinear"] == 1
    fused = Counter(node.op_type for node in optimized(shared.model).graph)
    assert fused == {"DynamicQuantizeLinear": 1, "MatMulIntegerToFloat": 2, "Add": 1}


def test_one_scale_per_column_or_one_for_all(quantize: Callable[..., Quantized]) -> None:
    w = normal(64, 32) * np.logspace(-3, 0, 32)
    each, one = (quantize(build(MATMUL, w=w), per_channel=flag) for flag in (True, False))
    assert each.stored("w_scale").shape == (32,)
    assert one.stored("w_scale").shape == ()
    np.testing.assert_allclose(each.stored("w_scale"), np.abs(w).max(axis=0) / 127, rtol=1e-6)
    x = {"x": normal(5, 64, seed=1)}
    assert each.sqnr(x) > one.sqnr(x)


@pytest.mark.parametrize(
    ("options", "target", "wanted"),
    [
        ({}, "cpu", (np.int8, 127, 0)),
        ({}, "cpu-avx2", (np.int8, 64, 0)),
        ({"reduce_range": "none"}, "cpu-avx2", (np.int8, 127, 0)),
        ({"weight_type": "uint8"}, "cpu-avx2", (np.uint8, 127, 128)),
    ],
)
def test_types_of_weights(
    quantize: Callable[..., Quantized],
    options: dict[str, Any],
    target: str,
    wanted: tuple[Any, int, int],
) -> None:
    dtype, largest, zero = wanted
    result = quantize(build(MATMUL, w=normal(64, 32)), target=target, **options)
    values = result.stored("w_quantized")
    assert values.dtype == dtype
    assert np.abs(values.astype(int) - zero).max() in (largest, largest - 1)
    assert (result.stored("w_zero_point") == zero).all()
    assert result.sqnr({"x": normal(5, 64, seed=1)}) > 28.0


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("across", [0, 1])
@pytest.mark.parametrize("bias", ["", ", c", ", d"])
def test_gemm(quantize: Callable[..., Quantized], transposed: int, across: int, bias: str) -> None:
    """alpha, beta, both transpositions; no bias, a constant one, one computed at run time."""
    shape = "[64,5]" if across else "[5,64]"
    text = f"""g (float{shape} x, float[5,32] e) => (float[5,32] y) {{
        d = Relu(e)
        y = Gemm<alpha=-0.5, beta=2.0, transA={across}, transB={transposed}>(x, w{bias})
    }}"""
    w = normal(64, 32)
    arrays = {"w": w.T if transposed else w} | ({"c": normal(32)} if "c" in bias else {})
    result = quantize(build(text, **arrays))
    x = normal(5, 64, seed=1)
    feeds = {"x": x.T if across else x, "e": normal(5, 32, seed=2)}
    feeds = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
    assert result.report.changed == {"Gemm": 1}
    assert result.stored("w_quantized").shape == (64, 32)
    assert result.sqnr(feeds) > 30.0


def test_scales_stay_positive(quantize: Callable[..., Quantized]) -> None:
    """The sign of alpha is that of the integers; a weight read both ways is stored both ways."""
    text = """g (float[5,64] x) => (float[5,32] y) {
        a = Gemm<alpha=-0.5>(x, w) b = Gemm<alpha=-2.0>(x, w) c = MatMul(x, w) y = Sum(a, b, c)
    }"""
    result = quantize(build(text, w=normal(64, 32)))
    np.testing.assert_array_equal(result.stored("w_quantized_1"), -result.stored("w_quantized"))
    names = [name for name in result.model.graph.initializers if "_scale" in name]
    assert len(names) == 3  # one for each size of alpha
    assert all((result.stored(name) > 0).all() for name in names)
    assert result.sqnr({"x": normal(5, 64, seed=1)}) > 30.0


def test_a_product_that_does_not_count_is_left_alone(quantize: Callable[..., Quantized]) -> None:
    text = "g (float[5,64] x) => (float[5,32] y) { y = Gemm<alpha=0.0>(x, w, c) }"
    result = quantize(build(text, w=normal(64, 32), c=normal(32)))
    assert dict(result.report.skipped) == {"Gemm_y": "its alpha is 0: it multiplies nothing"}


@pytest.mark.parametrize("shape", [(3, 64), (2, 3, 64), (2, 2, 3, 64), (64,)])
def test_ranks(quantize: Callable[..., Quantized], shape: tuple[int, ...]) -> None:
    text = f"g (float{list(shape)} x) => (float{[*shape[:-1], 32]} y) {{ y = MatMul(x, w) }}"
    assert quantize(build(text, w=normal(64, 32))).sqnr({"x": normal(*shape, seed=1)}) > 28.0


def test_stacks_of_matrices(quantize: Callable[..., Quantized]) -> None:
    text = "g (float[3,5,64] x) => (float[3,5,32] y) { y = MatMul(x, w) }"
    result = quantize(build(text, w=normal(3, 64, 32)))
    assert result.sqnr({"x": normal(3, 5, 64, seed=1)}) > 30.0


def test_columns_of_zeros(quantize: Callable[..., Quantized]) -> None:
    w = normal(64, 32)
    w[:, ::2] = 0.0
    result = quantize(build(MATMUL, w=w))
    found = run(open_session(result.model), {"x": normal(5, 64, seed=1)})["y"]
    assert not found[:, ::2].any()
    assert (result.stored("w_scale") > 0).all()


def test_shared_weights_are_stored_once(quantize: Callable[..., Quantized]) -> None:
    text = """g (float[5,32] x) => (float[5,32] y) {
        a = MatMul(x, w) b = Relu(a) c = Gemm(b, w) y = Gemm<alpha=2.0>(c, w)
    }"""
    result = quantize(build(text, w=normal(32, 32)))
    stored = [v.name for v in result.model.graph.initializers.values()]
    assert sum("quantized" in (name or "") for name in stored) == 1
    assert "w" not in stored
    assert result.sqnr({"x": normal(5, 32, seed=1)}) > 25.0


def test_branches_and_loops(quantize: Callable[..., Quantized]) -> None:
    text = """g (float[5,32] x, bool c, int64 n) => (float[5,32] y) {
        z = If(c) <
            then_branch = t () => (float[5,32] p) { p = MatMul(x, w) },
            else_branch = e () => (float[5,32] q) { a = Relu(x) q = MatMul(a, w) }>
        y = Loop(n, , z) <
            body = b (int64 i, bool go, float[5,32] s) => (bool on, float[5,32] u) {
                on = Identity(go) m = MatMul(s, v) u = Tanh(m)
            }>
    }"""
    result = quantize(build(text, w=normal(32, 32), v=normal(32, 32, scale=0.2)))
    assert result.report.changed == {"MatMul": 3}
    feeds = {"x": normal(5, 32, seed=1), "n": np.array(2)}
    assert result.sqnr(*({**feeds, "c": np.array(flag)} for flag in (True, False))) > 25.0


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("per_channel", [True, False])
def test_lstm(quantize: Callable[..., Quantized], direction: str, per_channel: bool) -> None:
    count = 2 if direction == "bidirectional" else 1
    text = f"""g (float[T,1,16] x) => (float[T,{count},1,24] y, float[{count},1,24] h) {{
        y, h, c = LSTM<hidden_size=24, direction="{direction}">(x, w, r, b)
    }}"""
    arrays = {
        "w": normal(count, 96, 16, scale=0.3),
        "r": normal(count, 96, 24, scale=0.3),
        "b": normal(count, 192),
    }
    result = quantize(build(text, **arrays), per_channel=per_channel)
    assert result.report.changed == {"LSTM": 1}
    assert result.operators() == {"DynamicQuantizeLSTM": 1}
    assert result.sqnr({"x": normal(7, 1, 16, seed=1)}) > 25.0


def test_lstm_with_state_and_another_layout(quantize: Callable[..., Quantized]) -> None:
    text = """g (float[T,1,16] x, float[1,1,24] s, float[1,1,24] t) => (float[1,1,24] h) {
        y, h = LSTM<hidden_size=24>(x, w, r, , , s, t)
    }"""
    arrays = {"w": normal(1, 96, 16, scale=0.3), "r": normal(1, 96, 24, scale=0.3)}
    feeds = {"x": normal(7, 1, 16), "s": normal(1, 1, 24, seed=1), "t": normal(1, 1, 24, seed=2)}
    assert quantize(build(text, **arrays)).sqnr(feeds) > 25.0
    turned = text.replace("hidden_size=24", "hidden_size=24, layout=1")
    turned = turned.replace("float[T,1,16] x", "float[1,T,16] x")
    ((node, reason),) = quantize(build(turned, **arrays)).report.skipped
    assert (node, "layout" in reason) == ("LSTM_y", True)


def test_attention_of_onnxruntime(quantize: Callable[..., Quantized]) -> None:
    text = """g (float[1,6,32] x) => (float[1,6,32] y) {
        y = com.microsoft.Attention<num_heads=4>(x, w, b)
    }"""
    model = _attention(text)
    result = quantize(model)
    assert result.operators() == {"DynamicQuantizeLinear": 1, "QAttention": 1}
    assert result.sqnr({"x": normal(1, 6, 32, seed=1)}) > 25.0


def _attention(text: str) -> ir.Model:
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> {text}'
    )
    for name, array in (("w", normal(32, 96, scale=0.3)), ("b", normal(96))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return ir.from_proto(proto)


def test_conv_on_demand(quantize: Callable[..., Quantized]) -> None:
    text = """g (float[1,4,9,9] x) => (float[1,6,5,5] y) {
        y = Conv<pads=[1,1,1,1], strides=[2,2], group=2>(x, w, b)
    }"""
    model = build(text, w=normal(6, 2, 3, 3), b=normal(6))
    left = quantize(model)
    assert not left.report.changed
    assert "slower" in left.report.skipped[0].reason
    assert left.report.warnings
    for kind in ("int8", "uint8"):
        result = quantize(model, conv=True, weight_type=kind)
        assert result.report.changed == {"Conv": 1}
        assert result.sqnr({"x": normal(1, 4, 9, 9, seed=1)}) > 30.0


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = MatMul(x, x)", "computed at run time"),
        ("t = MatMul(w, x) y = Relu(t)", "its input is constant"),
        ("y = MatMul(x, v)", "1 dimension"),
    ],
)
def test_what_is_left_has_a_reason(
    quantize: Callable[..., Quantized], body: str, reason: str
) -> None:
    shape = "[8]" if "v" in body else "[8,8]"
    text = f"g (float[8,8] x) => (float{shape} y) {{ {body} }}"
    arrays = {
        n: normal(*s) for n, s in (("w", (8, 8)), ("v", (8,))) if f"{n}" in body.split("(")[1]
    }
    report = quantize(build(text, **arrays)).report
    assert not report.changed
    assert reason in report.skipped[0].reason


def test_gru_is_left(quantize: Callable[..., Quantized]) -> None:
    text = """g (float[T,1,16] x) => (float[1,1,8] h) { y, h = GRU<hidden_size=8>(x, w, r) }"""
    report = quantize(build(text, w=normal(1, 24, 16), r=normal(1, 24, 8))).report
    assert report.skipped == (("GRU_y", "onnxruntime has no integer GRU"),)


def test_choice_of_layers(quantize: Callable[..., Quantized]) -> None:
    text = "g (float[5,32] x) => (float[5,32] y) { a = MatMul(x, w) y = MatMul(a, v) }"
    model = build(text, w=normal(32, 32), v=normal(32, 32, seed=1))
    result = quantize(model, exclude=("MatMul_y", "nix"))
    assert result.report.changed == {"MatMul": 1}
    assert result.report.skipped == (("MatMul_y", "excluded by 'MatMul_y'"),)
    assert "the pattern 'nix' matched nothing" in result.report.notes
    assert quantize(model, include=("MatMul_y",)).report.skipped[0].node == "MatMul_a"


def test_layers_that_hurt_stay_in_float(quantize: Callable[..., Quantized]) -> None:
    """One input has an outlier a thousand times as large as the rest."""
    text = """g (float[5,32] x) => (float[5,32] y) {
        a = MatMul(x, w) b = Mul(a, s) y = MatMul(b, v)
    }"""
    s, v = np.ones(32), normal(32, 32, seed=1)
    s[3] = 1000.0
    v[3] = 0.001 * v[3]
    model = build(text, w=normal(32, 32), v=v, s=s)
    data = [{"x": normal(5, 32, seed=seed)} for seed in range(2, 5)]
    plain, careful = quantize(model, data, min_sqnr=0), quantize(model, data, min_sqnr=25)
    assert plain.report.changed == {"MatMul": 2}
    assert careful.report.changed == {"MatMul": 1}
    ((node, reason),) = careful.report.skipped
    assert (node, "for accuracy" in reason) == ("MatMul_y", True)
    assert careful.sqnr(*data) > 25.0 > plain.sqnr(*data)
    assert quantize(model, min_sqnr=25).report.changed == {"MatMul": 2}  # nobody can tell


GATES = {
    "silu": "s = Sigmoid(g) i = Mul(g, s) h = Mul(i, u)",
    "the other way round": "s = Sigmoid(g) i = Mul(s, u) h = Mul(g, i)",
    "halves of one layer": "a, b = Split<axis=-1>(w2) s = Tanh(a) h = Mul(s, b)",
}
NO_GATES = {
    "one layer": "s = Sigmoid(g) h = Mul(g, s)",
    "a constant": "h = Mul(g, c)",
    "a sum": "h = Add(g, u)",
    "an input": "h = Mul(g, x)",
    "a norm": "q = Mul(g, g) m = ReduceMean(q) r = Sqrt(m) o = Div(g, r) h = Identity(o)",
    "a norm that multiplies": "q = Mul(g, g) m = ReduceMean(q) r = Reciprocal(m) h = Mul(g, r)",
}


def gated(body: str, wide: int = 32) -> ir.Model:
    text = f"""g (float[N,32] x) => (float[N,32] y) {{
        g = MatMul(x, wg) u = MatMul(x, wu) w2 = MatMul(x, ww) {body} y = MatMul(h, wd) }}"""
    arrays = {f"w{n}": normal(32, wide, seed=i) / 6 for i, n in enumerate("gu")}
    arrays |= {"ww": normal(32, 2 * wide, seed=3), "wd": normal(wide, 32, seed=4) / 6}
    return build(text, c=normal(32), **arrays)


@pytest.mark.parametrize("body", [*GATES.values(), *NO_GATES.values()], ids=[*GATES, *NO_GATES])
def test_which_layers_stand_behind_gates(body: str) -> None:
    found = [node.name for node in gated_layers(gated(body))]
    assert found == (["MatMul_y"] if body in GATES.values() else [])


def massive() -> tuple[ir.Model, list[Feeds]]:
    """A gate that opens for the first token alone, to a channel that hardly counts."""
    model = gated(GATES["silu"])
    arrays = {k: v.const_value.numpy().copy() for k, v in model.graph.initializers.items()}
    arrays["wg"][0, 5] = arrays["wu"][0, 5] = 30.0
    arrays["wd"][5] *= 1e-3
    for name, array in arrays.items():
        model.graph.initializers[name].const_value = ir.tensor(array)
    data = [{"x": normal(24, 32, seed=seed)} for seed in (11, 12, 13)]
    for feeds in data:
        feeds["x"][:, 0] = 0
        feeds["x"][0, 0] = 6
    return model, data


def test_without_data_layers_behind_gates_stay_in_float(quantize: Callable[..., Quantized]) -> None:
    model, data = massive()
    everything, careful = quantize(model, min_sqnr=0), quantize(model)
    ((node, reason),) = careful.report.skipped
    assert node == "MatMul_y"
    assert "a product of two layers" in reason
    assert any("--calib" in note for note in careful.report.notes)
    assert not everything.report.skipped
    assert careful.sqnr(*data) > everything.sqnr(*data) + 10
    assert not quantize(model, include=("MatMul_y", "op:MatMul")).report.skipped  # by its name


def test_with_data_gates_are_blamed_first(quantize: Callable[..., Quantized]) -> None:
    model, data = massive()
    result = quantize(model, data)
    ((node, reason),) = result.report.skipped
    assert (node, "quantized alone" in reason) == ("MatMul_y", True)
    assert result.sqnr(*data) > 20
    tame = gated(GATES["silu"])
    assert not quantize(tame, data).report.skipped  # nothing is wrong: measured, not assumed


def test_outlook_is_what_the_outputs_keep(
    quantize: Callable[..., Quantized], plain_context: Callable[..., Any]
) -> None:
    model = build(MATMUL, w=normal(64, 32))
    context = plain_context([{"x": normal(5, 64, seed=1)}], model)
    found = QuantizeDynamic().outlook(model, model, context)
    assert found is not None
    kept = quantize(model, context.feeds).sqnr(*context.feeds)
    assert found.model_db == found.other_db == pytest.approx(kept, abs=0.1)


def test_same_bytes_and_an_untouched_original(quantize: Callable[..., Quantized]) -> None:
    model = build(MATMUL, w=normal(64, 32))
    before = ir.to_proto(model).SerializeToString()
    one, two = (ir.to_proto(quantize(model).model).SerializeToString() for _ in range(2))
    assert one == two
    assert ir.to_proto(model).SerializeToString() == before
    assert len(one) < 0.45 * len(before)


def test_what_it_refuses(quantize: Callable[..., Quantized]) -> None:
    text = """g (float[2,8] x) => (float[2,8] y) {
        q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z)
    }"""
    with pytest.raises(UnsupportedModelError, match="quantized already"):
        quantize(build(text))
    assert QuantizeDynamic.name in QUANTIZERS
    assert QuantizeDynamic.not_after == QUANTIZERS
