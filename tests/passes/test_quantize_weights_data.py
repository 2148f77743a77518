"""GPTQ and AWQ: against the paper's algorithm done the slow way, and by what they gain."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.core.contract import Feeds, PassReport
from slimctl.core.errors import SourceError
from slimctl.evaluate.metrics import sqnr_db
from slimctl.graph.edit import NameScope, all_nodes
from slimctl.graph.select import Selection
from slimctl.graph.session import Level, open_session, run
from slimctl.numerics.blocks import (
    Blocks,
    Grid,
    in_blocks,
    round_blocks,
    searched_parameters,
)
from slimctl.passes import _weights_moments, _weights_walk
from slimctl.passes._weights_awq import best_factors, round_important
from slimctl.passes._weights_fold import apply_edits, plan_division
from slimctl.passes._weights_gptq import Correction, make_plan, round_corrected
from slimctl.passes._weights_layers import Wanted, find
from slimctl.passes.quantize_weights import QuantizeWeights
from slimctl.recipe.run import run_passes
from slimctl.recipe.schema import DataSpec

GRID = Grid(4, False)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def model_of(graph: str, arrays: dict[str, np.ndarray], opset: int = 17) -> ir.Model:
    text = f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]> g {graph}'
    proto = onnx.parser.parse_model(text)
    for name, array in arrays.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    for node in proto.graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def outputs(model: ir.Model, feeds: Feeds, level: Level = Level.ALL) -> np.ndarray:
    found = run(open_session(model, level=level, threads=1), feeds)
    return np.concatenate([array.ravel() for array in found.values()])


@pytest.fixture
def quantized(plain_context: Callable[..., Any]) -> Callable[..., tuple[ir.Model, PassReport]]:
    def apply(model: ir.Model, feeds: list[Feeds], **options: Any) -> tuple[ir.Model, PassReport]:
        result = model.clone()
        report = QuantizeWeights(**options).apply(result, plain_context(feeds, model))
        return result, report

    return apply


def correlated(seed: int, rows: int, inputs: int) -> np.ndarray:
    """Rows whose entries depend on one another, some much stronger than others."""
    mixing = normal(seed, inputs, inputs) / np.sqrt(inputs) + 2 * np.eye(inputs)
    strengths = np.exp(normal(seed + 1, inputs))
    return (normal(seed + 2, rows, inputs // 4) @ mixing[: inputs // 4] * strengths).astype(
        np.float32
    ) + 0.1 * normal(seed + 3, rows, inputs)


def moments_of(x: np.ndarray) -> np.ndarray:
    return (x.T.astype(np.float64) @ x / len(x)).astype(np.float32)


def output_error(matrix: np.ndarray, found: Blocks, x: np.ndarray) -> float:
    return float(np.sum(((found.restored() - matrix) @ x.T) ** 2, dtype=np.float64))


# GPTQ


def slow_gptq(
    matrix: np.ndarray, moments: np.ndarray, block: int, how: Correction, grid: Grid
) -> np.ndarray:
    """Frantar et al. 2022: one weight of one output at a time, the inverse kept up to date by
    elimination (equations 2 and 3), no factorization, no lazy updates."""
    strength = np.diagonal(moments).astype(np.float64)
    order = list(np.argsort(-strength, kind="stable") if how.act_order else range(len(strength)))
    spread = moments.astype(np.float64) + np.diag(how.damping * strength)
    start = searched_parameters(
        in_blocks(matrix, block), grid, in_blocks(strength[None].astype(np.float32), block)
    )
    codes = np.zeros(matrix.shape, np.uint8)
    for row, original in enumerate(matrix.astype(np.float64)):
        w, inverse = original.copy(), np.linalg.inv(spread)
        scale, zero = start.scale[row].copy(), start.zero_point[row].copy()
        for place, column in enumerate(order):
            group = column // block
            if not how.act_order and column % block == 0:
                these = slice(column, column + block)
                again = searched_parameters(
                    in_blocks(w[None, these].astype(np.float32), block),
                    grid,
                    in_blocks(strength[None, these].astype(np.float32), block),
                )
                scale[group], zero[group] = again.scale[0, 0], again.zero_point[0, 0]
            code = np.clip(np.rint(w[column] / scale[group]) + zero[group], 0, grid.highest)
            codes[row, column] = code
            error = w[column] - (code - zero[group]) * scale[group]
            rest = order[place + 1 :]
            w[rest] -= error / inverse[column, column] * inverse[column, rest]
            pivot = inverse[column, column]
            inverse -= np.outer(inverse[:, column], inverse[column]) / pivot
    return codes


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize(("block", "inputs"), [(16, 48), (64, 100), (128, 40)])
@pytest.mark.parametrize("bits", [2, 4])
def test_gptq_is_the_algorithm_of_the_paper(
    bits: int, block: int, inputs: int, act_order: bool
) -> None:
    x, matrix = correlated(0, 400, inputs), normal(9, 6, inputs)
    how, grid = Correction(0.05, act_order), Grid(bits, False)
    moments = moments_of(x)
    found = round_corrected(matrix, make_plan(moments, how), block, grid, how)
    wanted = slow_gptq(matrix, moments, block, how, grid)
    # float32 against float64: a tie may fall to the other side, and moves what follows.
    assert np.mean(found.codes != wanted) < 0.02


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_lowers_the_output_error_on_unseen_rows(act_order: bool, symmetric: bool) -> None:
    x = correlated(0, 6000, 128)
    seen, unseen = x[:4000], x[4000:]
    matrix, grid = normal(9, 64, 128), Grid(4, symmetric)
    how = Correction(0.05, act_order)
    found = round_corrected(matrix, make_plan(moments_of(seen), how), 32, grid, how)
    nearest = round_important(matrix, np.diagonal(moments_of(seen)), 32, grid)
    assert output_error(matrix, found, unseen) < 0.5 * output_error(matrix, nearest, unseen)


@pytest.mark.parametrize("damping", [1e-4, 1e-2])
def test_factors_are_those_of_double_precision(damping: float) -> None:
    moments = moments_of(correlated(0, 400, 200))
    plan = make_plan(moments, Correction(damping, True))
    ordered = moments[np.ix_(plan.order, plan.order)].astype(np.float64)
    ordered[np.diag_indices(200)] *= 1 + damping
    product = plan.factor.astype(np.float64).T @ plan.factor @ ordered
    np.testing.assert_allclose(product, np.eye(200), atol=2e-2)
    assert np.all(np.diff(np.diagonal(ordered)) <= 0)


def test_inputs_that_never_hold_anything_do_no_harm() -> None:
    x = correlated(0, 500, 64)
    x[:, [3, 40]] = 0
    matrix, how = normal(9, 8, 64), Correction(0.01, True)
    found = round_corrected(matrix, make_plan(moments_of(x), how), 32, GRID, how)
    assert np.isfinite(found.restored()).all()
    nothing = np.zeros((64, 64), np.float32)
    found = round_corrected(matrix, make_plan(nothing, how), 32, GRID, how)
    assert sqnr_db(matrix, found.restored()) > 15  # nearest, where nothing is known


STACK = """(float[N,64] x) => (float[N,64] y) {
    a = MatMul(x, w1) b = Relu(a) c = MatMul(b, w2) d = Relu(c) y = MatMul(d, w3) }"""


def stack() -> ir.Model:
    return model_of(STACK, {f"w{i}": normal(i, 64, 64) / 5 for i in (1, 2, 3)})


def batches(count: int = 8) -> list[Feeds]:
    return [{"x": correlated(0, 64 * count, 64)[i::count]} for i in range(count)]


def test_a_stack_of_layers_gains(quantized: Any) -> None:
    model, feeds = stack(), batches()
    errors = []
    for algorithm in ("rtn", "gptq"):
        result, report = quantized(model, feeds[:6], algorithm=algorithm, block_size=64)
        assert report.changed == {"MatMul": 3}
        found = [outputs(m, {"x": feeds[7]["x"]}) for m in (model, result)]
        errors.append(sqnr_db(*found))
    assert errors[1] > errors[0] + 2


def test_later_layers_see_what_earlier_ones_compute(
    quantized: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, feeds = stack(), batches()

    def stored(name: str) -> np.ndarray:
        result, _ = quantized(model, feeds, algorithm="gptq", weight_type="uint2")
        return result.graph.initializers[f"{name}_2bit"].const_value.numpy()

    first, last = stored("w1"), stored("w3")
    monkeypatch.setattr(_weights_walk, "_MOST_KEPT", 0)  # from the start every time: in portions
    np.testing.assert_array_equal(stored("w1"), first)
    assert not np.array_equal(stored("w3"), last)
    monkeypatch.setattr(_weights_moments, "_BUDGET", 1)  # portions of one
    np.testing.assert_array_equal(stored("w3"), last)


def test_moments_are_those_of_all_rows(plain_context: Any) -> None:
    text = "(float[A,B,8] x, float[8,M] z) => (float[A,B,4] y, float[M,4] v) "
    text += "{ y = MatMul(x, w) v = Gemm<transA=1>(z, w) }"
    model = model_of(text, {"w": normal(0, 8, 4)})
    feeds = [{"x": normal(i, 2, 3 + i, 8), "z": normal(9 + i, 8, 5)} for i in range(3)]
    feeds[1]["x"][0, 1, 2] = np.nan  # that row is left out
    (first,), _ = find(model, Wanted(16, 2, True, False), Selection())
    observe = partial(plain_context(feeds, model).activations, model)
    (found,) = _weights_moments.collect([first], observe)
    rows = np.concatenate([*(f["x"].reshape(-1, 8) for f in feeds), *(f["z"].T for f in feeds)])
    rows = rows[np.isfinite(rows).all(axis=1)].astype(np.float64)
    np.testing.assert_allclose(found, rows.T @ rows / len(rows), rtol=1e-5, atol=1e-6)


def test_layers_in_branches_are_corrected_and_those_in_loops_named(quantized: Any) -> None:
    text = """(float[4,32] x, bool flag, int64 count) => (float[4,32] y) {
        z = If(flag) <
            then_branch = t () => (float[4,32] p) { h = Exp(x) p = MatMul(h, w) },
            else_branch = e () => (float[4,32] q) { u = Neg(x) q = MatMul(u, v) }>
        y = Loop(count, flag, z) <body = b (int64 i, bool go, float[4,32] s)
            => (bool on, float[4,32] r) { on = Identity(go) m = MatMul(s, o) r = Tanh(m) }>
        }"""
    arrays = {"w": normal(0, 32, 32) / 6, "v": normal(1, 32, 32), "o": normal(3, 32, 32)}
    model = model_of(text, arrays)
    for node in all_nodes(model):
        node.name = f"{node.op_type}_{node.outputs[0].name}"
    feeds = [
        {"x": normal(i, 4, 32), "flag": np.array(i < 3), "count": np.array(2)} for i in range(3)
    ]
    result, report = quantized(model, feeds, algorithm="gptq")
    assert report.changed == {"MatMul": 3}
    assert report.facts["plain"] == {
        "MatMul_q": "its input never held a finite value",
        "MatMul_m": "it stands in a loop: its input cannot be observed",
    }
    assert len(report.notes) == 3
    assert np.isfinite(outputs(result, feeds[0])).all()


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
def test_without_data_there_is_an_error(algorithm: str, tmp_path: Path) -> None:
    ir.save(stack(), tmp_path / "model.onnx")
    with pytest.raises(SourceError, match="needs calibration data"):
        run_passes(
            tmp_path / "model.onnx",
            [QuantizeWeights(algorithm=algorithm)],  # type: ignore[arg-type]
            output=tmp_path / "out.onnx",
        )


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
def test_results_are_the_same_bytes(algorithm: Any, tmp_path: Path) -> None:
    ir.save(stack(), tmp_path / "model.onnx")
    np.savez(tmp_path / "calib.npz", x=correlated(0, 200, 64))
    results = []
    for name in ("one.onnx", "two.onnx"):
        run_passes(
            tmp_path / "model.onnx",
            [QuantizeWeights(algorithm=algorithm)],
            output=tmp_path / name,
            calibration=DataSpec(source=str(tmp_path / "calib.npz")),
            use_cache=False,
        )
        results.append((tmp_path / name).read_bytes())
    assert results[0] == results[1]


# AWQ

BLOCK = """(float[B,S,64] x) => (float[B,S,64] y) {
    n = LayerNormalization<axis=-1>(x, g, s)
    q = MatMul(n, wq) k = MatMul(n, wk) v0 = MatMul(n, wv) v = Add(v0, bv)
    q4 = Reshape(q, heads) k4 = Reshape(k, heads) v4 = Reshape(v, heads)
    qt = Transpose<perm=[0,2,1,3]>(q4) kt = Transpose<perm=[0,2,3,1]>(k4)
    vt = Transpose<perm=[0,2,1,3]>(v4)
    p = MatMul(qt, kt) a = Softmax<axis=-1>(p) m = MatMul(a, vt)
    mt = Transpose<perm=[0,2,1,3]>(m) j = Reshape(mt, joined) o = MatMul(j, wo) r = Add(x, o)
    n2 = SimplifiedLayerNormalization<axis=-1>(r, g2)
    up = MatMul(n2, wu) ga = MatMul(n2, wg) sg = Sigmoid(ga) si = Mul(ga, sg) h = Mul(si, up)
    d = MatMul(h, wd) y = Add(r, d) }"""


def decoder_block(outliers: bool = True) -> ir.Model:
    """Attention with four heads and a gated feed-forward part; a few strong channels."""
    strong = np.ones(64, np.float32)
    if outliers:
        strong[[5, 23, 41]] = 25
    arrays = {f"w{key}": normal(i, 64, 64) / 8 for i, key in enumerate("qkvougd")}
    arrays["wq"], arrays["wk"] = arrays["wq"] / 16, arrays["wk"] / 16  # softmax stays gentle
    arrays["wu"], arrays["wg"] = normal(20, 64, 96) / 8, normal(21, 64, 96) / 8
    arrays["wd"] = normal(22, 96, 64) / 10
    arrays |= {"g": strong, "s": normal(30, 64), "g2": strong[::-1].copy(), "bv": normal(31, 64)}
    arrays["heads"] = np.array([0, 0, 4, 16])
    arrays["joined"] = np.array([0, 0, 64])
    return model_of(BLOCK, arrays)


def tokens(count: int) -> list[Feeds]:
    return [{"x": normal(100 + i, 2, 16, 64)} for i in range(count)]


@pytest.mark.parametrize(
    ("tensor", "size", "weights"),
    [
        ("n", 64, {"g", "s"}),
        ("j", 64, {"wv", "bv"}),
        ("n2", 64, {"g2"}),
        ("h", 96, {"wu"}),
    ],
)
def test_a_tensor_is_divided_by_what_computes_it(
    tensor: str, size: int, weights: set[str], plain_context: Any
) -> None:
    model = decoder_block()
    changed = model.clone()
    value = next(v for n in all_nodes(changed) for v in n.outputs if v.name == tensor)
    factors = np.exp(normal(0, size).astype(np.float64))
    plan = plan_division(value, factors)
    assert not isinstance(plan, str)
    assert {edit.node.inputs[edit.place].name for edit in plan} == weights
    apply_edits(plan, NameScope(changed))
    feeds = tokens(1)
    before, after = (
        plain_context(feeds, m).observe(m, [tensor])[tensor][0] for m in (model, changed)
    )
    np.testing.assert_allclose(after * factors, before, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("h = Softmax(x)", "Softmax does not take factors in"),
        ("h = Add(x, x)", "it is a sum of two tensors"),
        ("e = Exp(x) h = Mul(e, half)", "Exp does not take factors in"),
        ("e = MatMul(x, w) f = Relu(e) g = Neg(e) h = Relu(f)", "other nodes read"),
        ("h = LayerNormalization<axis=-2>(x, w)", "it is normalized over several axes"),
        ("e = MatMul(x, w) h = Reshape(e, shape)", "it is reshaped"),
        ("e = MatMul(x, w) i = MatMul(x, w) h = Relu(e)", "the weight that computes it is shared"),
        ("h = Mul(x, zero)", ""),
    ],
)
def test_what_cannot_be_divided(text: str, reason: str) -> None:
    arrays = {
        "w": normal(0, 64, 64),
        "half": np.float32(0.5),
        "shape": np.array([8, -1]),
        "zero": np.zeros(64, np.float32),
    }
    model = model_of(f"(float[64,64] x) => (float[8,64] y) {{ {text} y = Neg(h) }}", arrays)
    value = next(v for n in all_nodes(model) for v in n.outputs if v.name == "h")
    plan = plan_division(value, np.linspace(1, 2, 64))
    assert isinstance(plan, str) == bool(reason)
    assert reason in str(plan)


def test_awq_helps_where_a_few_channels_are_strong(quantized: Any) -> None:
    model, feeds = decoder_block(), tokens(6)
    found = {}
    for algorithm in ("rtn", "awq"):
        result, report = quantized(model, feeds[:5], algorithm=algorithm, weight_type="int4")
        assert report.changed == {"MatMul": 7}
        both = [outputs(m, feeds[5]) for m in (model, result)]
        found[algorithm] = sqnr_db(*both)
    assert found["awq"] > found["rtn"] + 3
    better = "not scaled: rounding is no better with scales"
    assert set(report.facts["plain"].values()) <= {better}


def test_awq_names_what_it_could_not_scale(quantized: Any) -> None:
    text = """(float[N,64] x) => (float[N,64] y) {
        a = MatMul(x, w1) n = LayerNormalization<axis=-1>(a, g) b = MatMul(n, w2) y = Add(n, b) }"""
    model = model_of(text, {"w1": normal(1, 64, 64), "w2": normal(2, 64, 64), "g": normal(3, 64)})
    _, report = quantized(model, [{"x": normal(0, 50, 64)}], algorithm="awq")
    assert report.facts["plain"] == {
        "MatMul_a": "not scaled: it is an input of the model",
        "MatMul_b": "not scaled: Add 'Add_y' reads its input, too",
    }
    assert report.changed == {"MatMul": 2}


def test_the_scales_are_the_best_of_the_grid() -> None:
    x = normal(0, 3000, 64)
    x[:, [3, 9]] *= 40
    matrix, moments = normal(5, 100, 64), moments_of(x)
    factors = best_factors([matrix], moments, [32], [GRID])
    assert factors is not None

    def error(scales: np.ndarray) -> float:
        scaled = (matrix * scales).astype(np.float32)
        found = round_important(scaled, np.diagonal(moments) / scales**2, 32, GRID)
        return float(np.sum((((found.restored() / scales) - matrix) @ x.T) ** 2))

    strength = np.sqrt(np.diagonal(moments).astype(np.float64))
    tried = [error(strength**alpha) for alpha in (0, 0.2, 0.5, 0.8, 1.0)]
    assert error(factors) <= min(tried) * 1.01
    assert error(factors) < 0.7 * tried[0]


def test_scaled_weights_are_those_that_are_stored(quantized: Any) -> None:
    model, feeds = decoder_block(), tokens(3)
    eight, _ = quantized(model, feeds, algorithm="awq", weight_type="int8")
    # With 8 bits little is lost, so all of what scaling changed must cancel out.
    for level in (Level.DISABLED, Level.ALL):
        assert sqnr_db(outputs(model, feeds[0]), outputs(eight, feeds[0], level)) > 35


def test_nearest_is_what_it_says() -> None:
    matrix = normal(0, 10, 64)
    found = round_important(matrix, np.ones(64), 32, GRID)
    parameters = searched_parameters(in_blocks(matrix, 32), GRID)
    np.testing.assert_array_equal(found.codes, round_blocks(matrix, parameters, 32, GRID).codes)
