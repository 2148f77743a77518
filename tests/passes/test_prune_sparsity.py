"""Zeros among the weights: where they are, how many, and what the others make of it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.core.contract import Feeds, PassReport
from slimctl.core.errors import OptionError, PassFailedError
from slimctl.graph.edit import clone_model, const_array, interface
from slimctl.graph.save import initializer_values
from slimctl.graph.select import Selection
from slimctl.graph.session import open_session, run
from slimctl.numerics.second_order import inverse_factor
from slimctl.passes import _obs
from slimctl.passes._obs import (
    Count,
    Given,
    Moments,
    TwoOfFour,
    lowest,
    lowest_by_row,
    prune_columns,
    prune_matrix,
    refit,
)
from slimctl.passes._sparse_layers import find_layers, stages
from slimctl.passes._sparsity import global_counts
from slimctl.passes.prune import Prune

HEADER = '<ir_version: 8, opset_import: ["": 17]>'

# Name: (ONNX text, shape of x, shapes of the constants). The first layer is the one looked at.
LAYERS: dict[str, tuple[str, tuple[int, ...], dict[str, tuple[int, ...]]]] = {
    "conv": (
        "y = Conv<pads=[1,1,1,1]>(x, w, b)",
        (4, 16, 9, 9),
        {"w": (12, 16, 3, 3), "b": (12,)},
    ),
    "strided conv without a bias": (
        "y = Conv<strides=[2,2],pads=[0,1,2,1]>(x, w)",
        (4, 16, 9, 9),
        {"w": (12, 16, 3, 3)},
    ),
    "conv in one dimension": (
        "y = Conv<dilations=[2]>(x, w, b)",
        (4, 16, 30),
        {"w": (12, 16, 3), "b": (12,)},
    ),
    "gemm": ("y = Gemm<alpha=0.5,beta=2.0>(x, w, b)", (40, 32), {"w": (32, 12), "b": (12,)}),
    "transposed gemm": ("y = Gemm<transB=1>(x, w, b)", (40, 32), {"w": (12, 32), "b": (12,)}),
    "matmul": ("y = MatMul(x, w)", (4, 10, 32), {"w": (32, 12)}),
    "matmul with a bias": (
        "z = MatMul(x, w)\n y = Add(z, b)",
        (4, 10, 32),
        {"w": (32, 12), "b": (12,)},
    ),
}


def _model(
    body: str, x: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]], seed: int = 0
) -> ir.Model:
    rng = np.random.default_rng(seed)
    dims = ",".join(map(str, ("N", *x[1:])))
    model = onnx.parser.parse_model(
        f"{HEADER} g (float[{dims}] x) => (float[N,...] y) {{ {body} }}".replace("[N,...]", "")
    )
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    for name, shape in shapes.items():
        array = rng.normal(0, 0.3, shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return ir.from_proto(model)


def _feeds(shape: tuple[int, ...], count: int = 12, seed: int = 1) -> list[Feeds]:
    """Inputs of which a few directions carry most of the energy, some channels more than others."""
    mixing = np.random.default_rng(99)
    axis = len(shape) - 1 if len(shape) < 4 and shape[1] in (10, 32) else 1
    size = shape[axis]
    mix = mixing.normal(0, 1, (size // 4, size)) * np.exp(mixing.normal(0, 0.8, size))
    rng = np.random.default_rng(seed)
    feeds = []
    for _ in range(count):
        hidden = list(shape)
        hidden[axis] = size // 4
        x = np.moveaxis(rng.normal(0, 1, hidden), axis, -1) @ mix
        x = np.maximum(x + 0.3 * rng.normal(0, 1, x.shape), 0)  # means far from zero
        feeds.append({"x": np.moveaxis(x, -1, axis).astype(np.float32)})
    return feeds


def _layer(model: ir.Model) -> ir.Node:
    return next(n for n in model.graph if n.op_type in ("Conv", "Gemm", "MatMul"))


def _weight(model: ir.Model, node: ir.Node | None = None) -> np.ndarray:
    array = const_array((node or _layer(model)).inputs[1])
    assert array is not None
    return array


def _rows(model: ir.Model) -> np.ndarray:
    """The weight as [outputs, taps, inputs], from the definition of each operator."""
    node, weight = _layer(model), _weight(model)
    if node.op_type == "Conv":
        return np.moveaxis(weight.reshape(*weight.shape[:2], -1), 1, 2)
    transposed = node.op_type == "Gemm" and node.attributes.get_int("transB", 0)
    return (weight if transposed else weight.T)[:, None, :]


Applied = Callable[..., tuple[ir.Model, PassReport]]


@pytest.fixture
def applied(plain_context: Callable[..., Any]) -> Applied:
    def apply(
        model: ir.Model, feeds: list[Feeds] | None = None, seed: int = 0, **options: Any
    ) -> tuple[ir.Model, PassReport]:
        context = plain_context(feeds or [], model, has_data=feeds is not None, seed=seed)
        pruned = clone_model(model)
        report = Prune(**options).apply(pruned, context)
        assert interface(pruned) == interface(model)
        return pruned, report

    return apply


# where the zeros are


@pytest.mark.parametrize("data", [False, True], ids=["without data", "with data"])
@pytest.mark.parametrize("name", LAYERS)
def test_two_of_four_neighboring_input_channels_are_zero(
    name: str, data: bool, applied: Applied
) -> None:
    body, x, shapes = LAYERS[name]
    pruned, report = applied(_model(body, x, shapes), _feeds(x) if data else None, structure="2:4")
    rows = _rows(pruned)
    for output, tap in np.ndindex(*rows.shape[:2]):
        for start in range(0, rows.shape[2], 4):
            assert np.count_nonzero(rows[output, tap, start : start + 4]) == 2
    assert report.changed == {"weights of 1 layers": rows.size // 2}
    assert report.facts["layers"][0]["method"] == ("sparsegpt" if data else "magnitude")


def test_two_of_four_keeps_the_larger_two(applied: Applied) -> None:
    body, x, shapes = LAYERS["conv"]
    model = _model(body, x, shapes)
    before, after = _rows(model), _rows(applied(model, structure="2:4")[0])
    groups = before.reshape(*before.shape[:2], -1, 4), after.reshape(*after.shape[:2], -1, 4)
    smallest_kept = np.where(groups[1] != 0, np.abs(groups[0]), np.inf).min(axis=-1)
    largest_gone = np.where(groups[1] == 0, np.abs(groups[0]), 0).max(axis=-1)
    assert np.all(smallest_kept > largest_gone)
    assert np.array_equal(after[after != 0], before[after != 0])


SEVERAL = """
    a = Conv<pads=[1,1,1,1]>(x, w1, b1)
    b = Relu(a)
    c = Conv<pads=[1,1,1,1],group=16>(b, w2)
    d = Conv<group=2>(c, w3)
    e = Relu(d)
    p = GlobalAveragePool(e)
    f = Flatten(p)
    g = Gemm<transB=1>(f, w4, b4)
    h = MatMul(g, w5)
    i = MatMul(h, w5)
    j = MatMul(i, w6)
    y = Add(j, h)
"""
SEVERAL_SHAPES = {
    "w1": (16, 3, 3, 3),
    "b1": (16,),
    "w2": (16, 1, 3, 3),
    "w3": (24, 8, 1, 1),
    "w4": (32, 24),
    "b4": (32,),
    "w5": (32, 32),
    "w6": (32, 32),
}


@pytest.fixture
def several() -> ir.Model:
    return _model(SEVERAL, (2, 3, 8, 8), SEVERAL_SHAPES)


def test_layers_left_alone_have_a_reason(several: ir.Model, applied: Applied) -> None:
    _, report = applied(several, structure="2:4", exclude=("MatMul_10",))
    assert dict(report.skipped) == {
        "Conv_0": "3 input channels are no multiple of 4",
        "Conv_2": "depthwise: few weights, all of which matter",
        "Conv_3": "no sparse kernel exists for grouped convolutions",
        "MatMul_8": "its weight is used in 2 places",
        "MatMul_9": "its weight is used in 2 places",
        "MatMul_10": "excluded by 'MatMul_10'",
    }
    assert [line["layer"] for line in report.facts["layers"]] == ["Gemm_7"]


def test_nothing_to_do_is_an_error_with_the_reason(several: ir.Model, applied: Applied) -> None:
    with pytest.raises(PassFailedError, match="3 input channels are no multiple of 4"):
        applied(several, structure="2:4", include=("Conv_0",))
    with pytest.raises(PassFailedError, match="'Convv' matches no layer"):
        applied(several, structure="2:4", include=("Convv",))


# how many


@pytest.mark.parametrize("data", [False, True], ids=["without data", "with data"])
@pytest.mark.parametrize("scope", ["global", "local"])
@pytest.mark.parametrize("share", [0.0, 0.37, 0.9])
def test_the_share_is_reached_exactly(
    share: float, scope: str, data: bool, several: ir.Model, applied: Applied
) -> None:
    feeds = _feeds((2, 3, 8, 8)) if data else None
    pruned, report = applied(several, feeds, structure="unstructured", sparsity=share, scope=scope)
    lines = report.facts["layers"]
    assert [line["layer"] for line in lines] == ["Conv_0", "Conv_3", "Gemm_7", "MatMul_10"]
    total = sum(line["weights"] for line in lines)
    zeros = sum(
        int(np.count_nonzero(_weight(pruned, node) == 0))
        for node in pruned.graph
        if node.name in {line["layer"] for line in lines}
    )
    assert zeros == sum(line["zeros"] for line in lines) == round(share * total)
    if scope == "local":
        assert all(abs(line["zeros"] - share * line["weights"]) <= 1 for line in lines)


@pytest.mark.parametrize(
    "options", [{"importance": "l1"}, {"importance": "l2"}, {"importance": "random"}]
)
def test_every_importance_reaches_the_share(
    options: dict[str, Any], several: ir.Model, applied: Applied
) -> None:
    for feeds in (None, _feeds((2, 3, 8, 8))):
        _, report = applied(several, feeds, structure="unstructured", sparsity=0.6, **options)
        lines = report.facts["layers"]
        total = sum(line["weights"] for line in lines)
        assert sum(line["zeros"] for line in lines) == round(0.6 * total)


def test_a_share_for_one_layer_alone(several: ir.Model, applied: Applied) -> None:
    _, report = applied(
        several, structure="unstructured", sparsity=0.5, ratio=("Gemm*=0.25", "Conv_0=0")
    )
    lines = {line["layer"]: line for line in report.facts["layers"]}
    assert lines["Gemm_7"]["zeros"] == 0.25 * 32 * 24
    assert lines["Conv_0"]["zeros"] == 0
    rest = [lines["Conv_3"], lines["MatMul_10"]]
    assert sum(line["zeros"] for line in rest) == 0.5 * (24 * 8 + 32 * 32)


def test_steps_end_where_one_step_ends(applied: Applied) -> None:
    body, x, shapes = LAYERS["matmul with a bias"]
    model, feeds = _model(body, x, shapes), _feeds(x)
    options = {"structure": "unstructured", "sparsity": 0.6}
    pruned, _ = applied(model, feeds, steps=3, **options)
    assert np.count_nonzero(_weight(pruned) == 0) == round(0.6 * 32 * 12)
    held_out = _feeds(x, 4, seed=5)
    once = _error(model, applied(model, feeds, **options)[0], held_out)
    assert _error(model, pruned, held_out) < 1.5 * once


# which


def test_local_magnitude_takes_the_smallest(applied: Applied) -> None:
    body, x, shapes = LAYERS["conv"]
    model = _model(body, x, shapes)
    pruned, _ = applied(model, structure="unstructured", sparsity=0.7, scope="local")
    before, after = _weight(model), _weight(pruned)
    gone = np.sort(np.abs(before), axis=None)[: round(0.7 * before.size)]
    assert np.array_equal(np.sort(np.abs(before[after == 0])), gone)
    assert np.array_equal(after[after != 0], before[after != 0])


def test_wanda_weighs_with_the_norm_of_the_inputs(applied: Applied) -> None:
    body, x, shapes = LAYERS["matmul"]
    model, feeds = _model(body, x, shapes), _feeds(x)
    pruned, report = applied(
        model,
        feeds,
        structure="unstructured",
        sparsity=0.5,
        scope="local",
        reconstruct=False,
    )
    norms = np.sqrt(np.sum([np.square(f["x"]).sum(axis=(0, 1)) for f in feeds], axis=0))
    scores = np.abs(_weight(model).T) * norms  # [outputs, inputs]
    expected = np.argsort(scores, axis=1)[:, :16]
    found = _weight(pruned).T == 0
    assert np.array_equal(np.sort(expected, axis=1), np.nonzero(found)[1].reshape(12, 16))
    assert report.facts["layers"][0]["method"] == "wanda"
    assert any("Wanda" in note for note in report.notes)


def test_one_threshold_for_all_layers() -> None:
    # Relative to what is not smaller: 1/6, 2/5, 3/3 and 1/13, 4/12, 8/8.
    scores = [np.array([3.0, 1.0, 2.0], np.float32), np.array([[4.0, 8.0], [1.0, 0.0]], np.float32)]
    assert global_counts(scores, 2 / 7) == [0, 2]
    assert global_counts(scores, 3 / 7) == [1, 2]
    assert global_counts(scores, 4 / 7) == [1, 3]
    assert global_counts(scores, 5 / 7) == [2, 3]
    assert global_counts([], 0.5) == []


def test_equal_scores_do_not_make_more_zeros() -> None:
    assert lowest(np.zeros((3, 4)), 5).sum() == 5
    assert lowest(np.arange(4.0), 0).sum() == 0
    assert lowest(np.arange(4.0), 4).all()
    assert lowest_by_row(np.zeros((4, 5)), 10).sum(axis=1).tolist() == [2, 3, 2, 3]


# updates


def test_the_other_weight_makes_good_for_the_first() -> None:
    # H = [[a, b], [b, c]], w_1 goes: what is left of ||(w - w') x||^2 is least at
    # w'_2 = w_2 + w_1 b / c, by the derivative with respect to w'_2.
    a, b, c = 2.0, 0.6, 0.5
    moments = np.array([[a, b], [b, c]])
    weight, gone = np.array([[1.5, -0.7]]), np.array([[True, False]])
    found = prune_columns(weight, inverse_factor(moments), Given(gone), gone)
    np.testing.assert_allclose(found, [[0.0, -0.7 + 1.5 * b / c]], atol=1e-12)


def test_the_weight_that_costs_less_goes() -> None:
    # With both open, w_1 costs w_1^2 / [H^-1]_11 = 1 * (a - b^2 / c) = 0.19 and w_2 costs
    # 0.25 * (c - b^2 / a) = 0.0475: decided at once, the second goes. Column by column the first
    # is settled before the second is looked at and cannot make good for it, which then costs
    # 0.25 * c = 0.25: the first goes, and the second becomes 0.5 + 1 * b / c.
    moments = np.array([[1.0, 0.9], [0.9, 1.0]])
    factor = inverse_factor(moments)
    np.testing.assert_allclose(factor.T @ factor, np.linalg.inv(moments), atol=1e-12)
    weight = np.array([[1.0, 0.5]])
    costs = weight**2 / np.sum(factor**2, axis=0)
    np.testing.assert_allclose(costs, [[0.19, 0.0475]], atol=1e-12)
    planned = Count(1).plan(costs)
    assert planned.tolist() == [[False, True]]
    np.testing.assert_allclose(prune_columns(weight, factor, Count(1), planned), [[0.0, 1.4]])
    np.testing.assert_allclose(prune_columns(weight, factor, Given(planned), planned), [[1.0, 0.0]])


def test_blocks_of_columns_give_what_single_columns_give(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 40)) @ rng.normal(size=(40, 40))
    weight, gone = rng.normal(size=(6, 40)), rng.random((6, 40)) < 0.5
    factor = inverse_factor(x.T @ x / 300)
    whole = prune_columns(weight, factor, Given(gone, 128), gone)
    monkeypatch.setattr(_obs, "_BLOCK", 8)
    np.testing.assert_allclose(prune_columns(weight, factor, Given(gone, 8), gone), whole)
    # The textbook's way: one weight after the other, with the inverse of what is left.
    expected = weight.copy()
    inverse = np.linalg.inv(x.T @ x / 300)
    for column in range(40):
        scaled = inverse[column] / inverse[column, column]
        expected -= np.where(gone[:, column], expected[:, column], 0.0)[:, None] * scaled
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    np.testing.assert_allclose(whole, expected * ~gone, atol=1e-9)


def test_refitting_ends_at_the_least_squares_solution() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 12)) @ rng.normal(size=(12, 12)) + rng.normal(size=(200, 12))
    weight, stays = rng.normal(size=(5, 12)), rng.random((5, 12)) < 0.5
    found = refit(weight, weight * stays, x.T @ x / 200)
    for row in range(5):
        chosen = stays[row]
        best = np.linalg.lstsq(x[:, chosen], x @ weight[row], rcond=None)[0]
        np.testing.assert_allclose(found[row, chosen], best, atol=1e-4)
        assert not found[row, ~chosen].any()


def test_moments_do_not_depend_on_how_rows_arrive() -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(3, 1, (60, 2, 5)) * np.arange(1, 6)).astype(np.float32)
    y = rng.normal(1, 1, (60, 2, 3)).astype(np.float32)
    half = np.arange(60) % 3 == 0
    moments = Moments(2, 3, 5)
    for start in range(0, 60, 7):
        moments.add(*(a[start : start + 7] for a in (x, y, half)))
    for chosen, which in ((half, 1), (~half, 0), (np.ones(60, bool), None)):
        xs, ys = x[chosen].astype(np.float64), y[chosen].astype(np.float64)
        np.testing.assert_allclose(moments.means(which)[0], xs.mean(axis=0), rtol=1e-6)
        point = rng.normal(size=(2, 5)), rng.normal(size=(2, 3))
        found = moments.about(*point, which)
        dx, dy = xs - point[0], ys - point[1]
        rtol = {"rtol": 1e-5, "atol": 1e-5}
        np.testing.assert_allclose(found.xx, np.einsum("ngi,ngj->gij", dx, dx) / len(dx), **rtol)
        np.testing.assert_allclose(found.yx, np.einsum("ngo,ngi->goi", dy, dx) / len(dx), **rtol)
        np.testing.assert_allclose(found.yy, np.square(dy).mean(axis=0), **rtol)


@pytest.mark.parametrize("pattern", [TwoOfFour(), Count(96)])
def test_with_few_rows_chance_is_not_taken_for_correlation(pattern: Any) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(40, 1, 32)).astype(np.float32)  # independent inputs
    weight = rng.normal(size=(1, 6, 32))
    moments = Moments(1, 6, 32)
    moments.add(x, np.einsum("goi,ngi->ngo", weight, x).astype(np.float32), np.arange(40) % 2 == 1)
    found = prune_matrix(weight, moments, pattern, bias_is_free=False).matrix
    by_size = np.where(pattern.plan(weight[0] ** 2)[None], 0, weight)

    def error(matrix: np.ndarray) -> float:
        return float(np.square(weight - matrix).sum())  # of inputs with covariance 1

    assert error(found) < 1.25 * error(by_size)


def _error(model: ir.Model, other: ir.Model, feeds: list[Feeds]) -> float:
    ours, theirs = (open_session(m, threads=1) for m in (model, other))
    pairs = [(run(ours, f)["y"], run(theirs, f)["y"]) for f in feeds]
    spread = np.concatenate([a.ravel() for a, _ in pairs]).var()
    return float(np.mean([np.square(a - b).mean() for a, b in pairs]) / spread)


@pytest.mark.parametrize(
    "options", [{"structure": "2:4"}, {"structure": "unstructured", "sparsity": 0.6}]
)
@pytest.mark.parametrize("name", LAYERS)
def test_data_help_and_updates_help_more(
    name: str, options: dict[str, Any], applied: Applied
) -> None:
    body, x, shapes = LAYERS[name]
    model, feeds, held_out = _model(body, x, shapes), _feeds(x), _feeds(x, 6, seed=7)
    by_size = _error(model, applied(model, **options)[0], held_out)
    wanda = _error(model, applied(model, feeds, reconstruct=False, **options)[0], held_out)
    pruned, report = applied(model, feeds, **options)
    updated = _error(model, pruned, held_out)
    assert updated < 0.7 * wanda < 0.7 * by_size
    # What the report says of samples that it had not seen is true of others.
    assert report.facts["layers"][0]["error"] == pytest.approx(updated, rel=0.6)


def test_a_layer_makes_good_for_the_layers_before_it(applied: Applied) -> None:
    chain = _model(
        """
        a = Conv<pads=[1,1,1,1]>(x, w1, b1)
        b = Relu(a)
        y = Conv(b, w2, b2)
        """,
        (4, 16, 8, 8),
        {"w1": (24, 16, 3, 3), "b1": (24,), "w2": (8, 24, 1, 1), "b2": (8,)},
    )
    feeds, held_out = _feeds((4, 16, 8, 8), 24), _feeds((4, 16, 8, 8), 6, seed=7)
    options = {"structure": "unstructured", "ratio": ("Conv_0=0.8", "Conv_2=0.1")}
    pruned, report = applied(chain, feeds, **options)
    # The same layers, each alone in an otherwise dense model, put together.
    apart = clone_model(chain)
    for name in ("Conv_0", "Conv_2"):
        alone, _ = applied(chain, feeds, include=(name,), **options)
        node, twin = (next(n for n in m.graph if n.name == name) for m in (apart, alone))
        for place in (1, 2):
            node.inputs[place].const_value = twin.inputs[place].const_value
    errors = _error(chain, pruned, held_out), _error(chain, apart, held_out)
    assert errors[0] < 0.95 * errors[1]
    assert any("in 2 passes over the data" in note for note in report.notes)


def test_importance_decides_what_goes_and_updates_what_stays(applied: Applied) -> None:
    body, x, shapes = LAYERS["transposed gemm"]
    model, feeds = _model(body, x, shapes), _feeds(x)
    options = {"structure": "unstructured", "sparsity": 0.5, "importance": "l1"}
    mask = _weight(applied(model, **options)[0]) == 0
    updated, _ = applied(model, feeds, **options)
    assert np.array_equal(_weight(updated) == 0, mask)
    assert not np.array_equal(_weight(updated)[~mask], _weight(model)[~mask])


def test_the_mean_of_the_outputs_stays(applied: Applied, outputs_of: Callable[..., Any]) -> None:
    body, x, shapes = LAYERS["matmul with a bias"]
    model, feeds = _model(body, x, shapes), _feeds(x)
    pruned, _ = applied(model, feeds, structure="2:4")
    before, after = (outputs_of(m, feeds)[0].reshape(-1, 12) for m in (model, pruned))
    np.testing.assert_allclose(after.mean(axis=0), before.mean(axis=0), atol=1e-4)


# order and robustness


def test_layers_that_read_the_same_are_treated_together() -> None:
    model = _model(
        """
        q = MatMul(x, w1)
        k = MatMul(x, w2)
        t = Transpose<perm=[0,2,1]>(k)
        s = MatMul(q, t)
        p = Softmax(s)
        v = MatMul(x, w3)
        o = MatMul(p, v)
        y = MatMul(o, w4)
        """,
        (2, 6, 16),
        {f"w{index}": (16, 16) for index in range(1, 5)},
    )
    layers, skipped = find_layers(model, "2:4", Selection(), lambda node: None)
    found = [[entry.layer.data for entry in stage] for stage in stages(model, layers)]
    assert found == [["x", "x", "x"], ["o"]]
    assert [entry.node for entry in skipped] == ["MatMul_3", "MatMul_6"]


def test_long_chains_take_a_bounded_number_of_passes() -> None:
    body = " ".join(f"a{index + 1} = MatMul(a{index}, w{index})" for index in range(59))
    shapes = {f"w{index}": (4, 4) for index in range(60)}
    model = _model(f"a0 = Relu(x) {body} y = MatMul(a59, w59)", (2, 4), shapes)
    layers, _ = find_layers(model, "2:4", Selection(), lambda node: None)
    found = stages(model, layers)
    assert [entry.name for stage in found for entry in stage] == [e.name for e in layers]
    assert len(found) == 24 and {len(stage) for stage in found} == {2, 3}
    assert stages(model, []) == []


def test_two_runs_give_the_same_bits(several: ir.Model, applied: Applied) -> None:
    feeds = _feeds((2, 3, 8, 8))
    options = {"structure": "unstructured", "sparsity": 0.5}
    runs = [applied(several, feeds, **options)[0] for _ in range(2)]
    for left, right in zip(*(m.graph for m in runs), strict=True):
        if left.op_type in ("Conv", "Gemm", "MatMul"):
            assert np.array_equal(_weight(runs[0], left), _weight(runs[1], right))
    draws = [
        _weight(applied(several, seed=seed, importance="random", **options)[0]) == 0
        for seed in (0, 0, 1)
    ]
    assert np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])


def test_inputs_without_finite_values_leave_magnitude(applied: Applied) -> None:
    body, x, shapes = LAYERS["gemm"]
    model, feeds = _model(body, x, shapes), _feeds(x, 2)
    for feed in feeds:
        feed["x"][:, 3] = np.nan
    pruned, report = applied(model, feeds, structure="2:4")
    by_size, _ = applied(model, structure="2:4")
    assert np.array_equal(_weight(pruned), _weight(by_size))
    assert any("ranked by size alone: its inputs held no finite" in note for note in report.notes)


def test_padding_left_to_the_shape_leaves_magnitude(applied: Applied) -> None:
    shapes = {"w": (8, 16, 3, 3), "b": (8,)}
    model = _model('y = Conv<auto_pad="SAME_UPPER">(x, w, b)', (2, 16, 6, 6), shapes)
    pruned, report = applied(model, _feeds((2, 16, 6, 6)), structure="2:4")
    assert np.count_nonzero(_weight(pruned)) == 8 * 16 * 9 // 2
    assert report.facts["layers"][0]["method"] == "magnitude"
    assert any("auto_pad" in note for note in report.notes)


def test_half_precision_stays_half_precision(applied: Applied) -> None:
    body, x, shapes = LAYERS["conv"]
    model = _model(body, x, shapes)
    for value in model.graph.initializers.values():
        value.const_value = ir.Tensor(const_array(value).astype(np.float16), name=value.name)
        value.type = ir.TensorType(ir.DataType.FLOAT16)
    pruned, _ = applied(model, structure="2:4")
    assert _weight(pruned).dtype == np.float16
    assert np.count_nonzero(_weight(pruned)) == 12 * 16 * 9 // 2


# what is said


def test_the_summary_does_not_promise_speed(several: ir.Model, applied: Applied) -> None:
    pruned, report = applied(several, structure="unstructured", sparsity=0.8)
    text = "\n".join(report.notes)
    assert "onnxruntime on CPU computes zeros like any other number: this does not run f" in text
    plain, packed = re.search(r"take up (\S+) MB, compressed with zlib (\S+) MB", text).groups()
    arrays = [value.const_value.tobytes() for value in initializer_values(pruned)]
    assert float(plain) == pytest.approx(sum(map(len, arrays)) / 1e6, abs=0.005)
    sizes = sum(len(zlib.compress(array, 1)) for array in arrays)
    assert float(packed) == pytest.approx(sizes / 1e6, abs=0.005)
    assert re.search(r"80\.0% of the weights of 4 layers are zero; they hold 6\d% of all", text)


def test_the_summary_of_two_of_four_names_who_gains(several: ir.Model, applied: Applied) -> None:
    _, report = applied(several, structure="2:4")
    text = "\n".join(report.notes)
    assert (
        "TensorrtExecutionProvider" in text and "Ampere" in text and "trt_sparsity_enable" in text
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structure": "2:4", "sparsity": 0.6}, "the share is 0.5, not 0.6"),
        ({"structure": "2:4", "ratio": ("a=0.5",)}, "every layer has the same share"),
        ({"structure": "2:4", "steps": 2}, "no steps in between"),
        ({"structure": "2:4", "target_macs": 0.5}, "zeros among the weights leave the graph"),
        ({"structure": "unstructured", "target_size": 0.5}, "leave the graph as it is"),
        ({"structure": "unstructured", "max_metric_drop": 0.5}, "leave the graph as it is"),
    ],
)
def test_options_that_mean_nothing_here(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        Prune(**options)


def test_two_of_four_needs_no_share() -> None:
    assert Prune(structure="2:4").sparsity is None
    assert Prune(structure="2:4", sparsity=0.5).sparsity == 0.5


def test_updates_need_data(several: ir.Model, applied: Applied) -> None:
    with pytest.raises(OptionError, match="needs calibration data"):
        applied(several, structure="2:4", reconstruct=True)
