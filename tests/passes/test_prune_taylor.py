"""Pruning by gradients: what the scores say, and what goes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.core.contract import Feeds
from slimctl.core.errors import MissingExtraError, OptionError
from slimctl.graph.channels import Channels, analyze, group_units, silence_channels
from slimctl.graph.edit import clone_model, const_array
from slimctl.graph.shapes import infer_shapes
from slimctl.passes.prune import Prune
from slimctl.recipe.run import run_passes
from slimctl.recipe.schema import DataSpec

BRANCHES = """
<ir_version: 8, opset_import: ["": 17]>
branches (float[N,3,6,6] x) => (float[N,1] y) {
    a = Conv<pads=[1,1,1,1]>(x, w1, b1)
    b = Conv(a, w2, b2)
    c = Conv<strides=[2,2]>(a, w3)
    d = GlobalAveragePool(b)
    e = GlobalAveragePool(c)
    f = Concat<axis=1>(d, e)
    g = Flatten(f)
    y = Gemm(g, w4, b4)
}
"""
BRANCH_SHAPES = {
    "w1": (8, 3, 3, 3), "b1": (8,), "w2": (6, 8, 1, 1), "b2": (6,), "w3": (4, 8, 3, 3),
    "w4": (10, 1), "b4": (1,),
}  # fmt: skip

ATTENTION = """
<ir_version: 8, opset_import: ["": 17]>
attention (float[N,5,4] x) => (float[N] y) {
    q = MatMul(x, wq)
    qb = Add(q, bq)
    k = MatMul(x, wk)
    kt = Transpose<perm=[0,2,1]>(k)
    scores = MatMul(qb, kt)
    v = MatMul(x, wv)
    mixed = MatMul(scores, v)
    out = MatMul(mixed, wo)
    y = ReduceMean<axes=[1,2],keepdims=0>(out)
}
"""
ATTENTION_SHAPES = {"wq": (4, 6), "bq": (6,), "wk": (4, 6), "wv": (4, 7), "wo": (7, 3)}

CHAIN = """
<ir_version: 8, opset_import: ["": 17]>
chain (float[N,3,8,8] x) => (float[N,5] y) {
    a = Conv<pads=[1,1,1,1]>(x, w1, b1)
    b = Relu(a)
    c = Conv<pads=[1,1,1,1]>(b, w2, b2)
    d = Relu(c)
    e = GlobalAveragePool(d)
    f = Flatten(e)
    y = Gemm(f, w3, b3)
}
"""
CHAIN_SHAPES = {
    "w1": (16, 3, 3, 3), "b1": (16,), "w2": (24, 16, 3, 3), "b2": (24,), "w3": (24, 5), "b3": (5,)
}  # fmt: skip

Shapes = Mapping[str, tuple[int, ...]]


def _model(text: str, shapes: Shapes, seed: int = 0) -> ir.Model:
    rng = np.random.default_rng(seed)
    model = onnx.parser.parse_model(text)
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    for name, shape in shapes.items():
        array = rng.normal(0, 1 / np.sqrt(max(np.prod(shape[1:]), 1)), shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    found = ir.from_proto(model)
    infer_shapes(found)
    return found


def _feeds(shape: tuple[int, ...], count: int) -> list[Feeds]:
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(0.5, 1, (1, *shape)).astype(np.float32)} for _ in range(count)]


# scores


def _brute_force(
    model: ir.Model, feeds: Sequence[Feeds], unit: int, outputs_of: Callable[..., Any]
) -> float:
    """Mean squared relative change of the only output without a unit, by onnxruntime."""
    silenced = clone_model(model)
    silence_channels(analyze(silenced), np.array([unit]))
    (before,), (after,) = outputs_of(model, feeds), outputs_of(silenced, feeds)
    return float(np.mean(((before - after) / before) ** 2))


def _free_units(channels: Channels) -> list[int]:
    return [int(unit) for group in group_units(channels) if group.layers for unit in group.free]


class Network(NamedTuple):
    """One that is linear in each of its units, with one output per sample."""

    text: str
    shapes: Shapes
    sample: tuple[int, ...]
    units: int


NETWORKS = {
    "branches": Network(BRANCHES, BRANCH_SHAPES, (3, 6, 6), 8 + 6 + 4),
    "attention without softmax": Network(ATTENTION, ATTENTION_SHAPES, (5, 4), 6 + 7 + 3),
}


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_scores_are_exact_where_first_order_is(
    network: Network, plain_context: Callable[..., Any], outputs_of: Callable[..., Any]
) -> None:
    unit_effects = _torch_or_skip()
    model, feeds = _model(network.text, network.shapes), _feeds(network.sample, 4)
    channels = analyze(model)
    scores = unit_effects(model, channels, plain_context(feeds, model))
    units = _free_units(channels)
    assert len(units) == network.units
    expected = [_brute_force(model, feeds, unit, outputs_of) for unit in units]
    np.testing.assert_allclose(scores[units], expected, rtol=2e-3)


def test_random_signs_estimate_the_change_of_many_outputs(
    plain_context: Callable[..., Any], outputs_of: Callable[..., Any]
) -> None:
    unit_effects = _torch_or_skip()
    text = BRANCHES.replace("float[N,1] y", "float[N,5] y")
    model = _model(text, {**BRANCH_SHAPES, "w4": (10, 5), "b4": (5,)})
    feeds = _feeds((3, 6, 6), 3)
    channels = analyze(model)
    # The samples again and again, each time with other signs: sqrt(2 / 120) is 13 % of error.
    scores = unit_effects(model, channels, plain_context(feeds * 40, model))
    for unit in _free_units(channels)[::5]:
        silenced = clone_model(model)
        silence_channels(analyze(silenced), np.array([unit]))
        changes = []
        for feed in feeds:
            (before,), (after,) = outputs_of(model, [feed]), outputs_of(silenced, [feed])
            changes.append(np.sum((before - after) ** 2) / np.sum(before**2))
        assert scores[unit] == pytest.approx(np.mean(changes), rel=0.4)


def _torch_or_skip() -> Callable[..., Any]:
    pytest.importorskip("torch", reason="torch is an extra")
    from slimctl.passes._first_order import unit_effects

    return unit_effects


# what goes


@pytest.fixture
def chain() -> ir.Model:
    """A chain of which channels 3 and 7 of the second layer do nothing for the outputs."""
    model = _model(CHAIN, CHAIN_SHAPES)
    weights = const_array(model.graph.initializers["w3"])
    assert weights is not None
    changed = weights.copy()
    changed[[3, 7]] = 0.0
    model.graph.initializers["w3"].const_value = ir.Tensor(changed, name="w3")
    return model


def _files(folder: Path, model: ir.Model) -> tuple[Path, DataSpec]:
    ir.save(model, folder / "model.onnx")
    x = np.concatenate([feed["x"] for feed in _feeds((3, 8, 8), 12)])
    np.savez(folder / "calib.npz", x=x)
    return folder / "model.onnx", DataSpec(source=str(folder / "calib.npz"))


@pytest.mark.parametrize("scope", ["local", "global"])
def test_useless_channels_go_first(scope: Any, chain: ir.Model, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is an extra")
    path, data = _files(tmp_path, chain)
    step = Prune(
        sparsity=2 / 24, importance="taylor", scope=scope, round_to=1, reconstruct=False,
        include=("Conv_2",),
    )  # fmt: skip
    result = run_passes(path, [step], output=tmp_path / "out.onnx", calibration=data)
    assert result.records[0].report.facts["groups"][0]["kept"] == 22
    pruned = ir.load(tmp_path / "out.onnx")
    before = const_array(chain.graph.initializers["b2"])
    after = const_array(pruned.graph.initializers["b2"])
    assert before is not None and after is not None
    np.testing.assert_array_equal(after, np.delete(before, [3, 7]))


def test_the_same_data_give_the_same_bytes(chain: ir.Model, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is an extra")
    path, data = _files(tmp_path, chain)
    step = Prune(sparsity=0.5, importance="taylor", round_to=1)
    for name in ("one.onnx", "two.onnx"):
        run_passes(path, [step], output=tmp_path / name, calibration=data)
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()


# what is asked for


def test_without_torch_one_line_says_what_to_install(
    chain: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    path, data = _files(tmp_path, chain)
    step = Prune(sparsity=0.5, importance="taylor")
    with pytest.raises(MissingExtraError) as caught:
        run_passes(path, [step], output=tmp_path / "out.onnx", calibration=data)
    assert caught.value.what == "--importance taylor needs an extra"
    assert caught.value.fix == 'pip install "slimctl[torch]"'
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("structure", ["channel", "layer", "unstructured"])
def test_data_are_asked_for(
    structure: Any, chain: ir.Model, plain_context: Callable[..., Any]
) -> None:
    context = plain_context([], chain, has_data=False)
    step = Prune(structure=structure, sparsity=0.5, importance="taylor")
    with pytest.raises(OptionError, match="calibration data") as caught:
        step.apply(chain, context)
    assert caught.value.option == "--importance taylor"


# blocks and single weights

RESIDUAL = """
<ir_version: 8, opset_import: ["": 17]>
residual (float[N,6] x) => (float[N,1] y) {
    a = MatMul(x, w0)
    b = MatMul(a, w1)
    c = Add(a, b)
    d = MatMul(c, w2)
    e = Add(c, d)
    y = MatMul(e, w3)
}
"""
RESIDUAL_SHAPES = {"w0": (6, 8), "w1": (8, 8), "w2": (8, 8), "w3": (8, 1)}


def _without(model: ir.Model, name: str, place: Any = ...) -> ir.Model:
    """A clone with zeros in a weight."""
    clone = clone_model(model)
    array = const_array(clone.graph.initializers[name])
    assert array is not None
    changed = array.copy()
    changed[place] = 0.0
    clone.graph.initializers[name].const_value = ir.Tensor(changed, name=name)
    return clone


def test_blocks_are_judged_by_what_the_outputs_lose(
    plain_context: Callable[..., Any], outputs_of: Callable[..., Any]
) -> None:
    pytest.importorskip("torch", reason="torch is an extra")
    model, feeds = _model(RESIDUAL, RESIDUAL_SHAPES), _feeds((6,), 4)
    (before,) = outputs_of(model, feeds)
    expected = []
    for name in ("w1", "w2"):
        (after,) = outputs_of(_without(model, name), feeds)
        expected.append(np.mean(((before - after) / before) ** 2))
    step = Prune(structure="layer", sparsity=0.5, importance="taylor", reconstruct=False)
    report = step.apply(clone_model(model), plain_context(feeds, model))
    found = [line["importance"] for line in report.facts["blocks"]]
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    removed = [line["removed"] for line in report.facts["blocks"]]
    assert removed == [value == min(expected) for value in expected]


def test_weights_are_judged_by_what_the_outputs_lose(
    plain_context: Callable[..., Any], outputs_of: Callable[..., Any]
) -> None:
    pytest.importorskip("torch", reason="torch is an extra")
    model, feeds = _model(RESIDUAL, RESIDUAL_SHAPES), _feeds((6,), 4)
    step = Prune(
        structure="unstructured", sparsity=0.25, importance="taylor", reconstruct=False,
        include=("MatMul_0",), scope="global",
    )  # fmt: skip
    pruned = clone_model(model)
    report = step.apply(pruned, plain_context(feeds, model))
    assert [line["method"] for line in report.facts["layers"]] == ["taylor"]
    (before,) = outputs_of(model, feeds)
    losses = np.zeros(RESIDUAL_SHAPES["w0"])
    for place in np.ndindex(losses.shape):
        (after,) = outputs_of(_without(model, "w0", place), feeds)
        losses[place] = np.mean(((before - after) / before) ** 2)
    weight = const_array(next(iter(pruned.graph)).inputs[1])
    assert weight is not None
    assert np.array_equal(weight == 0, losses <= np.sort(losses, axis=None)[11])
