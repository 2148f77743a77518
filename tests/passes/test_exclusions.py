"""What stays in float by default: that it helps, is named, and can be overridden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.core.contract import PassReport
from slimctl.evaluate.metrics import sqnr_db
from slimctl.graph.edit import clone_model
from slimctl.graph.session import open_session, run
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._exclusions import by_pattern
from slimctl.passes._exclusions_ranges import Part, kept_db
from slimctl.passes._layers import Layer, recognize
from slimctl.passes.quantize import Quantize
from slimctl.passes.quantize_static import QuantizeStatic
from slimctl.targets import load_target

CHANNELS = 16
SCALARS = {"zero": 0.0, "one": 1.0, "two": 2.0, "half": 0.5, "root": 2**0.5, "eps": 1e-5}
SCALARS |= {"cubic": 0.044715, "tanh": 0.7978845, "quick": 1.702, "pixels": 640.0}

Weights = dict[str, np.ndarray]


def _weight(*shape: int, seed: int = 0) -> np.ndarray:
    fan = np.prod(shape[1:]) if len(shape) > 2 else shape[0]
    return np.random.default_rng([seed, *shape]).normal(0, 1 / np.sqrt(fan), shape).astype("f4")


def _model(signature: str, body: str, weights: Weights) -> ir.Model:
    """Nodes carry the names of their outputs."""
    proto = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 17]> g {signature} {{ {body} }}'
    )
    arrays = {**{k: np.float32(v) for k, v in SCALARS.items()}, **weights}
    nodes = list(proto.graph.node)
    nodes += [n for o in nodes for a in o.attribute for n in a.g.node]
    used = {name for node in nodes for name in node.input}
    for node in nodes:
        node.name = node.output[0]
    for name, array in arrays.items():
        if name in used:
            proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    onnx.checker.check_model(proto, full_check=True)
    return ir.from_proto(proto)


def _feeds(model: ir.Model, seed: int = 1, count: int = 10) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        {
            v.name or "": np.array(bool(i % 3))
            if v.dtype == ir.DataType.BOOL
            else rng.normal(0, 1, [int(d) for d in v.shape or ()]).astype(np.float32)
            for v in model.graph.inputs
        }
        for i in range(count)
    ]


@pytest.fixture
def quantized(plain_context: Callable[..., Any]) -> Callable[..., tuple[ir.Model, PassReport]]:
    def apply(model: ir.Model, target: Any = None, **options: Any) -> tuple[ir.Model, PassReport]:
        result = clone_model(model)
        context = plain_context(_feeds(model), model, target or load_target("cpu"))
        return result, QuantizeStatic(min_sqnr=0, **options).apply(result, context)

    return apply


def _outputs(model: ir.Model, feeds: Any) -> dict[str, np.ndarray]:
    session = open_session(model, threads=1)
    results = [run(session, feed) for feed in feeds]
    return {name: np.concatenate([r[name] for r in results]) for name in results[0]}


def _kept(model: ir.Model, result: ir.Model, *, part: Any = slice(None), name: str = "y") -> float:
    """SQNR in dB on samples that nobody saw, of some channels of an output."""
    feeds = _feeds(model, seed=2)
    ours, theirs = (_outputs(m, feeds)[name][:, part] for m in (model, result))
    return float(sqnr_db(ours, theirs))


def _float(report: PassReport) -> dict[str, str]:
    return {item.node: item.reason for item in report.skipped}


# the residual stream of a transformer

PARTS = """
    mu{0} = ReduceMean<axes=[1]>(r{0}) d{0} = Sub(r{0}, mu{0}) q{0} = Mul(d{0}, d{0})
    va{0} = ReduceMean<axes=[1]>(q{0}) ve{0} = Add(va{0}, eps) sd{0} = Sqrt(ve{0})
    n{0} = Div(d{0}, sd{0}) g{0} = Mul(n{0}, gamma) l{0} = Add(g{0}, beta)"""
OPERATOR = """
    h{0} = Transpose<perm=[0,2,3,1]>(r{0}) n{0} = LayerNormalization(h{0}, gain)
    l{0} = Transpose<perm=[0,3,1,2]>(n{0})"""
ROOT = """
    q{0} = Pow(r{0}, two) va{0} = ReduceMean<axes=[1]>(q{0}) ve{0} = Add(va{0}, eps)
    sd{0} = Sqrt(ve{0}) n{0} = Div(r{0}, sd{0}) l{0} = Mul(n{0}, gamma)"""
NOTHING = "l{0} = Relu(r{0})"
BLOCK = """
    u{0} = Conv(l{0}, up{0}) e{0} = Div(u{0}, root) f{0} = Erf(e{0}) o{0} = Add(f{0}, one)
    k{0} = Mul(u{0}, o{0}) a{0} = Mul(k{0}, half) v{0} = Conv(a{0}, down{0})
    r{1} = Add(r{0}, v{0})"""


def _stream(normalization: str, blocks: int = 4) -> ir.Model:
    """A transformer whose layers are convolutions; one channel holds outliers, as is usual."""
    stem, head = _weight(CHANNELS, 3, 1, 1), _weight(8, CHANNELS, 1, 1)
    stem[3] *= 10
    head[:, 3] /= 10
    ones = np.ones((1, CHANNELS, 1, 1), np.float32)
    weights = {"stem": stem, "head": head, "gamma": ones, "beta": 0 * ones, "gain": ones.ravel()}
    body = "r0 = Conv(x, stem)"
    for index in range(blocks):
        body += normalization.format(index) + BLOCK.format(index, index + 1)
        weights[f"up{index}"] = _weight(32, CHANNELS, 1, 1, seed=index)
        weights[f"down{index}"] = _weight(CHANNELS, 32, 1, 1, seed=index)
    body += f" y = Conv(r{blocks}, head)"
    return _model("(float[1,3,6,6] x) => (float[1,8,6,6] y)", body, weights)


@pytest.mark.parametrize("normalization", [PARTS, OPERATOR, ROOT], ids=["parts", "one", "root"])
def test_residual_stream_of_a_transformer_stays_float(
    normalization: str, quantized: Callable[..., Any]
) -> None:
    model = _stream(normalization)
    result, report = quantized(model)
    found = _float(report)
    assert set(found) == {"r1", "r2", "r3", "r4"}
    assert all("residual Add of a transformer" in reason for reason in found.values())
    assert report.facts["fusion"]["unfused"] == []
    without, plain = quantized(model, default_exclusions=False)
    assert plain.changed["Add"] == 4
    assert plain.skipped == ()
    assert _kept(model, result) > _kept(model, without) + 1.0


def test_residual_add_of_a_convolutional_network_is_quantized(
    quantized: Callable[..., Any],
) -> None:
    _, report = quantized(_stream(NOTHING))
    assert report.changed["Add"] == 4
    assert report.skipped == ()


# the inside of operators that exporters take apart

ROWS = """
    c = Conv(x, w1) a = Transpose<perm=[0,2,3,1]>(c) q = Mul(a, a) va = ReduceMean<axes=[-1]>(q)
    ve = Add(va, eps) sd = Sqrt(ve) """


def test_factor_of_a_normalization_stays_float(quantized: Callable[..., Any]) -> None:
    body = ROWS + "inv = Reciprocal(sd) n = Mul(a, inv) g = Mul(n, gain) y = MatMul(g, w2)"
    weights = {
        "w1": _weight(CHANNELS, CHANNELS, 1, 1),
        "w2": _weight(CHANNELS, 8),
        "gain": 1 + 0.1 * _weight(CHANNELS, 1).ravel(),
    }
    model = _model("(float[2,16,6,6] x) => (float[2,6,6,8] y)", body, weights)
    result, report = quantized(model)
    assert _float(report) == {"n": "inside a normalization: its factor spans a wide range"}
    assert "Mul" not in report.changed
    without, plain = quantized(model, default_exclusions=False)
    assert plain.changed["Mul"] == 2
    assert _kept(model, result) > _kept(model, without)


INSIDE = {
    "gelu_erf": "e = Div(a, root) f = Erf(e) o = Add(f, one) k = Mul(a, o) g = Mul(k, half)",
    "gelu_tanh": "q = Mul(a, a) c3 = Mul(q, a) k = Mul(c3, cubic) s = Add(a, k) t0 = Mul(s, tanh) "
    "t = Tanh(t0) o = Add(t, one) h = Mul(a, half) g = Mul(h, o)",
    "layer_normalization": "mu = ReduceMean<axes=[1]>(a) d = Sub(a, mu) q = Pow(d, two) "
    "va = ReduceMean<axes=[1]>(q) ve = Add(va, eps) sd = Sqrt(ve) n = Div(d, sd) "
    "m = Mul(n, half) g = Add(m, one)",
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_no_integer_kernel_wants_needs_no_exclusion(
    name: str, quantized: Callable[..., Any]
) -> None:
    weights = {"w1": _weight(8, 4, 1, 1), "w2": _weight(4, 8, 1, 1)}
    body = f"a = Conv(x, w1) {INSIDE[name]} y = Conv(g, w2)"
    model = _model("(float[1,4,6,6] x) => (float[1,4,6,6] y)", body, weights)
    first, report = quantized(model)
    assert report.changed == {"Conv": 2}
    assert report.skipped == ()
    assert _kept(model, first) > 28.0


def test_product_of_a_silu_is_quantized(quantized: Callable[..., Any]) -> None:
    weights = {"w1": _weight(8, 4, 1, 1), "w2": _weight(4, 8, 1, 1)}
    body = "a = Conv(x, w1) s = Sigmoid(a) g = Mul(a, s) y = Conv(g, w2)"
    _, report = quantized(_model("(float[1,4,6,6] x) => (float[1,4,6,6] y)", body, weights))
    assert report.changed == {"Conv": 2, "Mul": 1, "Sigmoid": 1}


# Softmax

SOFTMAX = "a = Conv(x, w1) p = Softmax<axis=1>(a) y = Conv(p, w2)"


def _distribution() -> ir.Model:
    """Distances as the mean of a distribution over bins, as detectors compute them."""
    bins = np.arange(CHANNELS, dtype=np.float32).reshape(1, CHANNELS, 1, 1)
    weights = {"w1": 3 * _weight(CHANNELS, CHANNELS, 1, 1), "w2": bins}
    return _model("(float[1,16,6,6] x) => (float[1,1,6,6] y)", SOFTMAX, weights)


def test_softmax_stays_float(quantized: Callable[..., Any]) -> None:
    model = _distribution()
    result, report = quantized(model)
    assert "p" in _float(report)
    assert "QLinearSoftmax" not in report.facts["fusion"]["kernels"]
    without, plain = quantized(model, default_exclusions=False)
    assert plain.facts["fusion"]["kernels"]["QLinearSoftmax"] == 1
    assert _kept(model, result) > _kept(model, without)


@pytest.mark.parametrize(
    ("include", "integer"), [(("*", "p"), True), (("*",), False), (("*", "op:Softmax"), False)]
)
def test_a_node_that_the_user_names_is_quantized(
    include: tuple[str, ...], integer: bool, quantized: Callable[..., Any]
) -> None:
    _, report = quantized(_distribution(), include=include)
    assert ("Softmax" in report.changed) == integer
    assert ("p" in _float(report)) != integer


# Concat of ranges far apart

HEAD = """
    a = Conv(x, stem) b0 = Conv(a, boxes) b1 = Sigmoid(b0) b = Mul(b1, pixels)
    s0 = Conv(a, scores) s = Sigmoid(s0) c = Concat<axis=1>(b, s) """
HEAD_WEIGHTS = {
    "stem": _weight(CHANNELS, CHANNELS, 1, 1),
    "boxes": _weight(4, CHANNELS, 1, 1, seed=1),
    "scores": _weight(4, CHANNELS, 1, 1, seed=2),
}
SIGNATURE = "(float[1,16,6,6] x) => (float[1,8,6,6] c, float[1,4,6,6] y)"


def _reader(compensated: bool) -> np.ndarray:
    weight = _weight(4, 8, 1, 1)
    weight[:, :4] /= 640 if compensated else 1
    return weight


def test_concat_of_boxes_and_scores_stays_float(quantized: Callable[..., Any]) -> None:
    weights = {**HEAD_WEIGHTS, "reader": _reader(compensated=True)}
    model = _model(SIGNATURE, HEAD + "y = Conv(c, reader)", weights)
    result, report = quantized(model)
    found = _float(report)
    assert set(found) == {"c", "y"}
    assert all("one scale would erase the smaller" in reason for reason in found.values())
    assert 500 < float(found["c"].split("range by ")[1].split("x")[0]) < 700
    without, _ = quantized(model, default_exclusions=False)
    scores = slice(4, 8)
    assert _kept(model, without, name="c") > 40.0  # the whole hides what became of the scores
    assert _kept(model, without, name="c", part=scores) < 3.0
    assert _kept(model, result, name="c", part=scores) > 35.0
    assert _kept(model, without) < 3.0
    assert _kept(model, result) > 35.0


def test_layer_that_hardly_looks_at_the_smaller_part_is_quantized(
    quantized: Callable[..., Any],
) -> None:
    weights = {**HEAD_WEIGHTS, "reader": _reader(compensated=False)}
    signature = "(float[1,16,6,6] x) => (float[1,4,6,6] y)"
    model = _model(signature, HEAD + "y = Conv(c, reader)", weights)
    result, report = quantized(model)
    assert report.skipped == ()
    assert report.changed["Concat"] == 1
    assert _kept(model, result) > 30.0


def test_what_only_moves_the_values_stays_with_the_concat(quantized: Callable[..., Any]) -> None:
    weights = {**HEAD_WEIGHTS, "reader": _reader(compensated=False)[:, :, 0, 0].T.copy()}
    signature = "(float[1,16,6,6] x) => (float[1,6,6,8] t, float[1,6,6,4] y)"
    body = HEAD + "t = Transpose<perm=[0,2,3,1]>(c) y = MatMul(t, reader)"
    model = _model(signature, body, weights)
    result, report = quantized(model)
    assert set(_float(report)) == {"c", "t"}
    assert report.changed["MatMul"] == 1
    feeds = _feeds(model, seed=2)
    ours, theirs = (_outputs(m, feeds)["t"][..., 4:] for m in (model, result))
    assert sqnr_db(ours, theirs) > 35.0


def test_layer_that_sees_the_parts_one_by_one_stays_float(quantized: Callable[..., Any]) -> None:
    """Along another axis than that of its weights each part has outputs of its own."""
    weights = {**HEAD_WEIGHTS, "reader": _weight(4, 4, 1, 1)}
    signature = "(float[1,16,6,6] x) => (float[1,4,12,6] y)"
    body = HEAD.replace("axis=1", "axis=2") + "y = Conv(c, reader)"
    model = _model(signature, body, weights)
    result, report = quantized(model)
    assert set(_float(report)) == {"y"}
    feeds = _feeds(model, seed=2)
    ours, theirs = (_outputs(m, feeds)["y"][:, :, 6:] for m in (model, result))
    assert sqnr_db(ours, theirs) > 35.0


def test_inside_a_branch(quantized: Callable[..., Any]) -> None:
    body = f"""
        y = If(flag) <
            then_branch = t () => (float[1,8,6,6] u) {{ {HEAD} p = Conv(c, reader) u = Add(c, p) }},
            else_branch = e () => (float[1,8,6,6] v) {{ v = Conv(x, other) }}
        >"""
    reader = np.concatenate([_reader(compensated=True)] * 2)
    weights = {**HEAD_WEIGHTS, "reader": reader, "other": _weight(8, CHANNELS, 1, 1)}
    model = _model(
        "(float[1,16,6,6] x, bool flag) => (float[1,8,6,6] y)",
        body,
        weights,
    )
    _, report = quantized(model)
    assert {"c", "p"} <= set(_float(report))


def test_ranges_that_differ_little_share_a_scale(quantized: Callable[..., Any]) -> None:
    weights = {**HEAD_WEIGHTS, "reader": _reader(compensated=True), "pixels": np.float32(8)}
    model = _model(SIGNATURE, HEAD + "y = Conv(c, reader)", weights)
    _, report = quantized(model)
    assert report.skipped == ()
    assert report.changed["Concat"] == 1


def test_sixteen_bits_have_levels_for_both(quantized: Callable[..., Any]) -> None:
    weights = {**HEAD_WEIGHTS, "reader": _reader(compensated=True)}
    model = _model(SIGNATURE, HEAD + "y = Conv(c, reader)", weights)
    proto = onnx.version_converter.convert_version(ir.to_proto(model), 21)
    result, report = quantized(ir.from_proto(proto), activation_type="uint16")
    assert not any("range" in reason for reason in _float(report).values())
    assert _kept(model, result, name="c", part=slice(4, 8)) > 35.0


@pytest.mark.parametrize(("axis", "expected"), [(1, None), (2, 20 * np.log10(255 / 640))])
def test_prediction_against_simulated_rounding(axis: int, expected: float | None) -> None:
    weights = {**HEAD_WEIGHTS, "reader": _reader(compensated=True)}
    model = _model(SIGNATURE, HEAD + "y = Conv(c, reader)", weights)
    layer = next(found for n in model.graph if n.name == "y" and (found := recognize(n)))
    assert isinstance(layer, Layer)
    predicted = kept_db(layer, axis, [Part(640.0, 4), Part(1.0, 4)], 255)
    if expected is not None:
        assert predicted == pytest.approx(expected)
        return
    rng = np.random.default_rng(0)
    spans = np.repeat([640.0, 1.0], 4)
    x = rng.uniform(-0.5, 0.5, (100_000, 8)) * spans
    # Not rounded but disturbed by as much as rounding does: the smaller part has no levels left.
    noise = rng.uniform(-0.5, 0.5, x.shape) * 640 / 255
    w = weights["reader"][:, :, 0, 0].T.astype(np.float64)
    simulated = 10 * np.log10(np.var(x @ w, axis=0).sum() / np.var(noise @ w, axis=0).sum())
    assert predicted == pytest.approx(simulated, abs=0.1)


# where it does not apply, and the option


def test_providers_that_want_everything_in_integers_are_left_out() -> None:
    model = _stream(PARTS)
    infer_shapes(model)
    assert by_pattern(model.graph, load_target("cpu"))
    assert by_pattern(model.graph, load_target("qnn-htp")) == {}


def test_facade_hands_the_option_on() -> None:
    for given, expected in ((None, True), (True, True), (False, False)):
        steps = Quantize(default_exclusions=given).expand()
        (static,) = (step for step in steps if isinstance(step, QuantizeStatic))
        assert static.default_exclusions is expected
    with pytest.raises(ValueError, match="default_exclusions has no meaning for mode dynamic"):
        Quantize(mode="dynamic", default_exclusions=False)


def test_same_bytes_twice(quantized: Callable[..., Any]) -> None:
    model = _stream(PARTS, blocks=2)
    first, second = (
        ir.to_proto(quantized(model)[0]).SerializeToString(deterministic=True) for _ in range(2)
    )
    assert first == second
