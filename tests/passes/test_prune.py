"""Pruning: what goes, what stays, what is refitted, and what the user is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper
from pydantic import ValidationError

from slimctl.core.contract import Feeds, PassReport
from slimctl.core.errors import OptionError, PassFailedError, SlimctlError, UnsupportedModelError
from slimctl.graph.channels import analyze, group_units, silence_channels
from slimctl.graph.edit import clone_model, const_array, interface
from slimctl.graph.shapes import infer_shapes
from slimctl.passes.prune import Prune
from slimctl.passes.quantize_static import QuantizeStatic

CHAIN = """
<ir_version: 8, opset_import: ["": 17]>
chain (float[N,3,12,12] x) => (float[N,10] y) {
    a = Conv<pads=[1,1,1,1]>(x, w1, b1)
    b = Relu(a)
    c = Conv<pads=[1,1,1,1]>(b, w2, b2)
    d = Relu(c)
    e = Conv<pads=[1,1,1,1]>(d, w3, b3)
    f = Add(e, b)
    g = Relu(f)
    h = GlobalAveragePool(g)
    i = Flatten(h)
    y = Gemm<transB=1>(i, w4, b4)
}
"""
CHAIN_SHAPES = {
    "w1": (32, 3, 3, 3),
    "b1": (32,),
    "w2": (48, 32, 3, 3),
    "b2": (48,),
    "w3": (32, 48, 3, 3),
    "b3": (32,),
    "w4": (10, 32),
    "b4": (10,),
}


def _model(text: str, shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> ir.Model:
    rng = np.random.default_rng(seed)
    model = onnx.parser.parse_model(text)
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    for name, shape in shapes.items():
        scale = 1.0 / np.sqrt(max(np.prod(shape[1:]), 1))
        array = rng.normal(0, scale, shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return ir.from_proto(model)


@pytest.fixture
def chain() -> ir.Model:
    return _model(CHAIN, CHAIN_SHAPES)


def _feeds(count: int = 6, seed: int = 1) -> list[Feeds]:
    rng = np.random.default_rng(seed)
    # A few directions carry most of the energy, so that channels are redundant as in real networks.
    mix = rng.normal(0, 1, (3, 3))
    return [
        {"x": np.einsum("cd,ndhw->nchw", mix, rng.normal(0, 1, (2, 3, 12, 12))).astype(np.float32)}
        for _ in range(count)
    ]


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test looks at how long anything takes."""
    monkeypatch.setattr("slimctl.passes._prune_goal._LATENCY_SECONDS", 0.05)


@pytest.fixture
def prune(plain_context: Callable[..., Any]) -> Callable[..., tuple[ir.Model, PassReport]]:
    """Prunes a clone; without data unless feeds are given."""

    def run(
        model: ir.Model, feeds: list[Feeds] | None = None, **options: Any
    ) -> tuple[ir.Model, PassReport]:
        clone = clone_model(model)
        context = plain_context(feeds or [], clone_model(model), has_data=bool(feeds))
        step = Prune(**options)
        step.requires(clone)
        return clone, step.apply(clone, context)

    return run


def _shape(model: ir.Model, op_type: str, place: int) -> tuple[int, ...]:
    nodes = [node for node in model.graph if node.op_type == op_type]
    array = const_array(nodes[place].inputs[1])
    assert array is not None
    return array.shape


def _error(expected: list[np.ndarray], found: list[np.ndarray]) -> float:
    return float(np.sum((expected[0] - found[0]) ** 2) / np.sum(expected[0] ** 2))


# exactness and interface


def test_the_result_is_the_original_without_its_least_important_channels(
    chain: ir.Model, prune: Callable[..., Any], outputs_of: Callable[..., list[np.ndarray]]
) -> None:
    pruned, report = prune(chain, sparsity=0.5, importance="l1", scope="local", round_to=1)
    silenced = clone_model(chain)
    infer_shapes(silenced)
    channels = analyze(silenced)
    (first, second) = [g for g in group_units(channels) if g.free.size]
    arrays = {n: const_array(chain.graph.initializers[n]) for n in CHAIN_SHAPES}

    def norms(*names: str) -> np.ndarray:
        return sum(np.abs(arrays[n]).reshape(arrays[n].shape[0], -1).sum(axis=1) for n in names)

    gone = [
        group.units[np.argsort(score)[: len(score) // 2]]
        for group, score in ((first, norms("w1", "b1", "w3", "b3")), (second, norms("w2", "b2")))
    ]
    silence_channels(channels, np.concatenate(gone))
    np.testing.assert_allclose(
        outputs_of(pruned, _feeds())[0], outputs_of(silenced, _feeds())[0], rtol=1e-4, atol=1e-5
    )
    assert report.changed == {"channels of 3 layers": 40}
    assert _shape(pruned, "Conv", 1) == (24, 16, 3, 3)
    assert interface(pruned) == interface(chain)


def test_tied_layers_stand_in_one_group(chain: ir.Model, prune: Callable[..., Any]) -> None:
    _, report = prune(chain, sparsity=0.25)
    tied = {tuple(group["layers"]) for group in report.facts["groups"]}
    assert tied == {("Conv_0", "Conv_4"), ("Conv_2",)}
    assert ("Gemm_9", "at 'y': it is an output of the model") in [tuple(s) for s in report.skipped]
    assert report.facts["considered"] == 1.0


# how much


@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.5, 0.75])
def test_the_share_asked_for_goes(
    chain: ir.Model, prune: Callable[..., Any], scope: str, sparsity: float
) -> None:
    _, report = prune(chain, sparsity=sparsity, scope=scope, round_to=1, min_channels=1)
    kept = sum(group["kept"] for group in report.facts["groups"])
    assert kept == round(80 * (1 - sparsity))


def test_what_stays_is_a_multiple(chain: ir.Model, prune: Callable[..., Any]) -> None:
    pruned, _ = prune(chain, sparsity=0.4)
    assert all(size % 8 == 0 for place in range(3) for size in _shape(pruned, "Conv", place)[:1])
    unrounded, _ = prune(chain, sparsity=0.4, round_to=1, scope="local")
    assert _shape(unrounded, "Conv", 1)[0] == 48 - round(0.4 * 48)


def test_some_channels_always_stay(chain: ir.Model, prune: Callable[..., Any]) -> None:
    pruned, report = prune(chain, sparsity=0.99, scope="local")
    assert _shape(pruned, "Conv", 0)[0] == _shape(pruned, "Conv", 1)[0] == 16
    assert {group["why"] for group in report.facts["groups"]} == {"as few as allowed"}
    pruned, _ = prune(chain, sparsity=0.99, scope="local", round_to=1, min_channels=3)
    assert _shape(pruned, "Conv", 1)[:2] == (3, 3)


def test_a_ratio_overrides_the_share(chain: ir.Model, prune: Callable[..., Any]) -> None:
    pruned, report = prune(chain, sparsity=0.25, ratio=("Conv_2=0.75",), scope="local", round_to=1)
    assert _shape(pruned, "Conv", 1)[:2] == (12, 24)
    assert [group["why"] for group in report.facts["groups"]] == ["importance", "--ratio"]


@pytest.mark.parametrize("goal", ["macs", "size"])
@pytest.mark.parametrize("wanted", [0.7, 0.4])
def test_a_target_is_reached_with_as_little_as_possible(
    chain: ir.Model, prune: Callable[..., Any], goal: str, wanted: float
) -> None:
    option = {f"target_{goal}": wanted}
    _, report = prune(chain, round_to=1, min_channels=1, **option)
    key = "macs" if goal == "macs" else "parameters"
    before, after = report.facts[key]
    # One more channel of the widest layer is worth less than 4 %.
    assert wanted - 0.04 < after / before <= wanted


def test_macs_are_counted_as_the_shapes_say(chain: ir.Model, prune: Callable[..., Any]) -> None:
    _, report = prune(chain, sparsity=0.5, scope="local", round_to=8)
    a, b = 32, 48
    full = 144 * 9 * (3 * a + a * b + b * a) + 10 * a
    half = 144 * 9 * (3 * 16 + 16 * 24 + 24 * 16) + 10 * 16
    assert report.facts["macs"] == [full, half]


def test_steps_arrive_where_one_step_does(chain: ir.Model, prune: Callable[..., Any]) -> None:
    _, at_once = prune(chain, sparsity=0.5, scope="local", round_to=1)
    _, gradual = prune(chain, sparsity=0.5, scope="local", round_to=1, steps=4)
    kept = [[g["kept"] for g in report.facts["groups"]] for report in (at_once, gradual)]
    assert kept[0] == kept[1]


def test_a_ratio_is_reached_once_however_many_steps(
    chain: ir.Model, prune: Callable[..., Any]
) -> None:
    options = {"sparsity": 0.25, "ratio": ("Conv_2=0.5",), "scope": "local", "round_to": 1}
    pruned, _ = prune(chain, steps=4, **options)
    assert _shape(pruned, "Conv", 1)[:2] == (24, 24)


def test_excluded_layers_stay_with_all_that_is_tied_to_them(
    chain: ir.Model, prune: Callable[..., Any]
) -> None:
    pruned, report = prune(chain, sparsity=0.5, exclude=("Conv_4",))
    assert _shape(pruned, "Conv", 0) == (32, 3, 3, 3)
    reasons = dict(tuple(item) for item in report.skipped)
    assert reasons["Conv_0"] == reasons["Conv_4"] == "'Conv_4' is excluded"
    only, _ = prune(chain, sparsity=0.5, include=("Conv_2",))
    assert _shape(only, "Conv", 1)[1] == 32 > _shape(only, "Conv", 1)[0]


def test_the_metric_says_how_much_may_go(
    chain: ir.Model, plain_context: Callable[..., Any], outputs_of: Callable[..., list[np.ndarray]]
) -> None:
    """The metric here is the number of weights, so that the answer can be counted."""

    def weights(model: ir.Model) -> float:
        arrays = [const_array(value) for value in model.graph.initializers.values()]
        return float(sum(array.size for array in arrays if array is not None))

    model = clone_model(chain)
    context = plain_context([], clone_model(chain), has_data=False, judge=weights)
    allowed = 0.4 * weights(chain)
    Prune(max_metric_drop=allowed, round_to=1, min_channels=1).apply(model, context)
    lost = weights(chain) - weights(model)
    assert 0.9 * allowed < lost <= allowed


def test_latency_is_measured_and_kept(chain: ir.Model, prune: Callable[..., Any]) -> None:
    pruned, report = prune(chain, _feeds(1), target_latency=0.8, reconstruct=False)
    assert _shape(pruned, "Conv", 1)[0] < 48
    assert [line for line in report.timings if line.startswith("P50")]


# importance


def test_energy_on_data_decides(chain: ir.Model, prune: Callable[..., Any]) -> None:
    """Channels that the next layer hardly reads go first, whatever their own weights are."""
    weights = const_array(chain.graph.initializers["w3"])
    assert weights is not None
    faint = np.arange(0, 48, 2)
    changed = weights.copy()
    changed[:, faint] *= 1e-3
    chain.graph.initializers["w3"].const_value = ir.Tensor(changed, name="w3")
    pruned, _ = prune(
        chain, _feeds(), sparsity=0.5, scope="local", importance="activation", reconstruct=False
    )
    kept = const_array(next(n for n in pruned.graph if n.name == "Conv_2").inputs[1])
    original = const_array(chain.graph.initializers["w2"])
    assert kept is not None and original is not None
    full = np.isin(original[:, 0, 0, 0], kept[:, 0, 0, 0])
    assert not full[faint].any()


@pytest.mark.parametrize("kind", ["l1", "l2", "random", "activation"])
def test_every_importance_is_deterministic(
    chain: ir.Model, prune: Callable[..., Any], kind: str
) -> None:
    feeds = _feeds(2)
    models = [
        prune(chain, feeds, sparsity=0.5, importance=kind, reconstruct=False)[0] for _ in range(2)
    ]
    arrays = [const_array(next(iter(m.graph)).inputs[1]) for m in models]
    np.testing.assert_array_equal(arrays[0], arrays[1])


def test_kinds_of_importance_differ(chain: ir.Model, prune: Callable[..., Any]) -> None:
    kept = {}
    for kind in ("l1", "random", "activation"):
        model, _ = prune(chain, _feeds(2), sparsity=0.5, importance=kind, reconstruct=False)
        array = const_array(next(n for n in model.graph if n.name == "Conv_2").inputs[2])
        assert array is not None
        kept[kind] = array.tobytes()
    assert len(set(kept.values())) == 3


# refitting


def test_refitting_recovers_most_of_the_error(
    chain: ir.Model, prune: Callable[..., Any], outputs_of: Callable[..., list[np.ndarray]]
) -> None:
    options = {"sparsity": 0.4, "scope": "local"}
    plain, _ = prune(chain, _feeds(), **options, reconstruct=False)
    refitted, report = prune(chain, _feeds(), **options)
    unseen = _feeds(4, seed=99)
    original = outputs_of(chain, unseen)
    before, after = (_error(original, outputs_of(m, unseen)) for m in (plain, refitted))
    assert after < before / 4
    assert set(report.facts["explained"]) == {"Conv_2", "Conv_4", "Gemm_9"}


def test_refitted_weights_keep_their_names(chain: ir.Model, prune: Callable[..., Any]) -> None:
    refitted, report = prune(chain, _feeds(), sparsity=0.4, scope="local")
    assert report.facts["explained"]
    assert set(refitted.graph.initializers) <= set(chain.graph.initializers)


def test_redundant_channels_cost_nothing_after_refitting(
    prune: Callable[..., Any], outputs_of: Callable[..., list[np.ndarray]]
) -> None:
    """Half of the hidden units are sums of the other half: least squares finds that out."""
    text = """
    <ir_version: 8, opset_import: ["": 17]>
    twins (float[N,8] x) => (float[N,5] y) {
        h = Gemm<transB=1>(x, w1, b1)
        y = Gemm<transB=1>(h, w2, b2)
    }
    """
    model = _model(text, {"w1": (16, 8), "b1": (16,), "w2": (5, 16), "b2": (5,)})
    feeds = [
        {"x": np.random.default_rng(i).normal(size=(64, 8)).astype(np.float32)} for i in (0, 1)
    ]
    pruned, _ = prune(model, feeds, sparsity=0.5, importance="random")
    unseen = [{"x": np.random.default_rng(7).normal(size=(50, 8)).astype(np.float32)}]
    # The hidden layer is linear in 8 numbers: any 8 of its 16 units say everything.
    assert _error(outputs_of(model, unseen), outputs_of(pruned, unseen)) < 1e-4


def test_one_layer_is_solved_as_numpy_solves_it(prune: Callable[..., Any]) -> None:
    text = """
    <ir_version: 8, opset_import: ["": 17]>
    net (float[N,12] x) => (float[N,3] y) {
        h = MatMul(x, w1)
        r = Relu(h)
        y = Gemm(r, w2, b2)
    }
    """
    model = _model(text, {"w1": (12, 16), "w2": (16, 3), "b2": (3,)})
    x = np.random.default_rng(0).normal(size=(4000, 12)).astype(np.float32)
    pruned, _ = prune(model, [{"x": x}], sparsity=0.5, importance="l1", round_to=8)
    arrays = {n: const_array(model.graph.initializers[n]) for n in ("w1", "w2", "b2")}
    y = np.maximum(x @ arrays["w1"], 0) @ arrays["w2"] + arrays["b2"]
    left = const_array(pruned.graph.node(0).inputs[1])
    assert left is not None
    hidden = np.maximum(x @ left, 0)
    design = np.hstack([hidden, np.ones((len(x), 1))])
    expected, *_ = np.linalg.lstsq(design.astype(np.float64), y.astype(np.float64), rcond=None)
    gemm = pruned.graph.node(2)
    weight, bias = const_array(gemm.inputs[1]), const_array(gemm.inputs[2])
    assert weight is not None
    assert bias is not None
    best, ours = (
        float(np.sum((design @ np.vstack([w, c]) - y) ** 2))
        for w, c in ((expected[:-1], expected[-1:]), (weight, bias[None]))
    )
    assert best <= ours * (1 + 1e-6) <= best * 1.01  # the ridge costs a little on these rows


def test_without_data_nothing_is_refitted(chain: ir.Model, prune: Callable[..., Any]) -> None:
    _, report = prune(chain, sparsity=0.5)
    assert report.facts["explained"] == {}


# heads

ATTENTION = """
<ir_version: 8, opset_import: ["": 17]>
attention (float[B,S,32] x) => (float[B,S,32] y) {
    shape = Constant<value_ints=[0, 0, 4, 8]>()
    back = Constant<value_ints=[0, 0, 32]>()
    scale = Constant<value_float=0.35355338>()
    q0 = MatMul(x, wq)
    k0 = MatMul(x, wk)
    v0 = MatMul(x, wv)
    q1 = Reshape(q0, shape)
    k1 = Reshape(k0, shape)
    v1 = Reshape(v0, shape)
    q = Transpose<perm=[0,2,1,3]>(q1)
    k = Transpose<perm=[0,2,3,1]>(k1)
    v = Transpose<perm=[0,2,1,3]>(v1)
    s0 = MatMul(q, k)
    s1 = Mul(s0, scale)
    s = Softmax<axis=-1>(s1)
    o0 = MatMul(s, v)
    o1 = Transpose<perm=[0,2,1,3]>(o0)
    o = Reshape(o1, back)
    y = MatMul(o, wo)
}
"""


def test_whole_heads_go(
    prune: Callable[..., Any], outputs_of: Callable[..., list[np.ndarray]]
) -> None:
    model = _model(ATTENTION, dict.fromkeys(("wq", "wk", "wv", "wo"), (32, 32)))
    pruned, report = prune(model, structure="head", sparsity=0.5)
    assert [(g["kept"], g["total"]) for g in report.facts["groups"]] == [(2, 4)]
    weights = [const_array(n.inputs[1]) for n in pruned.graph if n.op_type == "MatMul"]
    assert [w.shape for w in weights if w is not None] == [(32, 16)] * 3 + [(16, 32)]
    kept = np.isin(const_array(model.graph.initializers["wq"])[0], weights[0][0])
    assert np.array_equal(kept.reshape(4, 8).all(axis=1), kept.reshape(4, 8).any(axis=1))
    x = {"x": np.random.default_rng(0).normal(size=(2, 5, 32)).astype(np.float32)}
    assert outputs_of(pruned, [x])[0].shape == (2 * 5 * 32,)


def test_a_model_without_heads_says_so(chain: ir.Model, prune: Callable[..., Any]) -> None:
    with pytest.raises(PassFailedError, match="no attention"):
        prune(chain, structure="head", sparsity=0.5)


# what is refused


def test_a_quantized_model_is_refused(
    chain: ir.Model, prune: Callable[..., Any], plain_context: Callable[..., Any]
) -> None:
    quantized = clone_model(chain)
    QuantizeStatic(calibration="minmax", min_sqnr=0).resolve(plain_context([], chain).target).apply(
        quantized, plain_context(_feeds(1), chain)
    )
    with pytest.raises(
        UnsupportedModelError, match="prune the float model and quantize the result"
    ):
        prune(quantized, sparsity=0.5)


def test_nothing_to_prune_names_the_first_reason(prune: Callable[..., Any]) -> None:
    text = """
    <ir_version: 8, opset_import: ["": 17]>
    one (float[N,8] x) => (float[N,5] y) { y = Gemm<transB=1>(x, w, b) }
    """
    with pytest.raises(PassFailedError, match="'Gemm_0': at 'y': it is an output of the model"):
        prune(_model(text, {"w": (5, 8), "b": (5,)}), sparsity=0.5)


def test_a_pattern_that_matches_nothing_is_named(
    chain: ir.Model, prune: Callable[..., Any]
) -> None:
    with pytest.raises(PassFailedError, match="'layer9' matches no layer"):
        prune(chain, sparsity=0.5, include=("layer9",))


def test_a_target_out_of_reach_says_what_can_be_reached(
    chain: ir.Model, prune: Callable[..., Any]
) -> None:
    with pytest.raises(OptionError, match=r"Out of reach.*\d+% is left"):
        prune(chain, target_macs=0.01)


@pytest.mark.parametrize("options", [{"importance": "activation"}, {"reconstruct": True}])
def test_data_are_asked_for_where_needed(
    chain: ir.Model, prune: Callable[..., Any], options: dict[str, Any]
) -> None:
    with pytest.raises(OptionError, match="calibration data"):
        prune(chain, sparsity=0.5, **options)


def test_a_metric_is_asked_for(chain: ir.Model, prune: Callable[..., Any]) -> None:
    with pytest.raises(OptionError, match="no metric to keep"):
        prune(chain, max_metric_drop=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "say how much"),
        ({"sparsity": 0.5, "target_macs": 0.5}, "both say how much"),
        ({"sparsity": 1.0}, "less than 1"),
        ({"target_macs": 0.0}, "greater than 0"),
        ({"sparsity": 0.5, "round_to": 0}, "greater than or equal to 1"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Prune(**options)


@pytest.mark.parametrize("entry", ["Conv_2", "=0.5", "Conv_2=much", "Conv_2=1.5"])
def test_a_malformed_ratio_is_named(entry: str) -> None:
    with pytest.raises((SlimctlError, ValidationError), match="PATTERN=SHARE"):
        Prune(ratio=(entry,))
