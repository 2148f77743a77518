"""Equalization: what it scales, that it helps a badly scaled network, and that it never hurts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.core.contract import Feeds, Outlook, PassReport, Skipped
from slimctl.core.errors import ConfigError, SourceError
from slimctl.evaluate.metrics import sqnr_db
from slimctl.graph.channels import analyze
from slimctl.graph.load import load_model
from slimctl.graph.session import Level, open_session, run, tapped
from slimctl.passes._scaling import find_scaling
from slimctl.passes.equalize import Equalize
from slimctl.passes.quantize import Quantize
from slimctl.pipeline.run import StepRecord
from slimctl.recipe.run import run_passes
from slimctl.recipe.schema import DataSpec
from slimctl.targets import load_target

CHANNELS = 16
TEXT = """
    c = Conv<pads=[1,1,1,1]>(x, stem, stem_bias)
    r = Relu(c)
    a = Conv(r, enter, enter_bias)
    h1 = Conv<pads=[1,1,1,1]>(a, up1)
    l1 = Clip(h1, zero, six)
    d1 = Conv(l1, down1)
    s1 = Add(a, d1)
    h2 = Conv<pads=[1,1,1,1]>(s1, up2)
    l2 = Clip(h2, zero, six)
    d2 = Conv(l2, down2)
    s2 = Add(s1, d2)
    g = GlobalAveragePool(s2)
    f = Flatten(g)
    y = Gemm(f, head, head_bias)
"""
STREAM = ("a", "d1", "s1", "d2", "s2", "g", "f")


def _network(spread: float) -> ir.Model:
    """A residual network; channels of its stream differ by up to so many powers of ten."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N,3,16,16] x) => (float[N,10] y) '
        f"{{ {TEXT} }}"
    )
    levels = (10.0 ** -rng.permutation(np.linspace(0, spread, CHANNELS))).astype(np.float32)

    def weight(*shape: int) -> np.ndarray:
        return rng.normal(0, 1 / np.sqrt(np.prod(shape[1:])), shape).astype(np.float32)

    rows, columns = levels[:, None, None, None], levels[None, :, None, None]
    arrays = {
        "stem": weight(8, 3, 3, 3),
        "stem_bias": weight(8, 1)[:, 0],
        "enter": weight(CHANNELS, 8, 1, 1) * rows,
        "enter_bias": weight(CHANNELS, 1)[:, 0] * levels,
        "up1": weight(8, CHANNELS, 3, 3) / columns,
        "down1": weight(CHANNELS, 8, 1, 1) * rows,
        "up2": weight(8, CHANNELS, 3, 3) / columns,
        "down2": weight(CHANNELS, 8, 1, 1) * rows,
        "head": weight(10, CHANNELS).T / levels[:, None],
        "head_bias": weight(10, 1)[:, 0],
        "zero": np.float32(0),
        "six": np.float32(6),
    }
    for name, array in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    for node in model.graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
    return ir.from_proto(model)


def _samples(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, (count, 3, 16, 16)).astype(np.float32)


@pytest.fixture
def feeds() -> list[Feeds]:
    return [{"x": _samples(1, seed)} for seed in range(8)]


class Run:
    """Models on disk, and what ``slimctl`` makes of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        np.savez(folder / "calib.npz", x=_samples(24, 1))
        self.held_out = _samples(32, 2)

    def __call__(self, model: ir.Model, *steps: Any) -> tuple[Path, tuple[StepRecord, ...]]:
        source, output = self.folder / "model.onnx", self.folder / "out.onnx"
        ir.save(model, source)
        data = DataSpec(source=str(self.folder / "calib.npz"))
        result = run_passes(
            source, steps, output=output, calibration=data, use_cache=False, force=True
        )
        return output, result.records

    def sqnr(self, model: ir.Model, result: Path) -> float:
        """SQNR in dB on data that nobody saw."""
        expected, found = (
            run(open_session(m, threads=1), {"x": self.held_out})["y"] for m in (model, result)
        )
        return sqnr_db(expected, found)


@pytest.fixture
def slim(tmp_path: Path) -> Run:
    return Run(tmp_path)


def _observed(model: ir.Model, names: tuple[str, ...], feeds: list[Feeds]) -> dict[str, np.ndarray]:
    session = open_session(tapped(model, names), level=Level.DISABLED, threads=1)
    results = [run(session, feed) for feed in feeds]
    return {name: np.concatenate([result[name] for result in results]) for name in (*names, "y")}


@pytest.fixture
def equalized(plain_context: Callable[..., Any], feeds: list[Feeds]) -> Callable[..., Any]:
    def apply(model: ir.Model, **changes: Any) -> tuple[ir.Model, PassReport]:
        context = plain_context(feeds, model)
        for name, value in changes.items():
            setattr(context, name, value)
        result = model.clone()
        return result, Equalize().apply(result, context)

    return apply


def test_channels_get_as_strong_as_possible(equalized: Callable[..., Any], feeds: Any) -> None:
    model = _network(2.0)
    result, report = equalized(model)
    before, after = (_observed(m, STREAM, feeds) for m in (model, result))
    np.testing.assert_allclose(after["y"], before["y"], rtol=1e-4, atol=1e-4)

    def rms(array: np.ndarray) -> np.ndarray:
        axes = tuple(axis for axis in range(array.ndim) if axis != 1)
        return np.sqrt((array.astype(np.float64) ** 2).mean(axis=axes))

    # By hand: in some tensor each channel is as strong as the strongest was, in none stronger.
    shares = np.stack([rms(before[name]) / rms(before[name]).max() for name in STREAM])
    found = np.stack([rms(after[name]) / rms(before[name]).max() for name in STREAM])
    np.testing.assert_allclose(found, shares / shares.max(axis=0), rtol=1e-4)
    assert report.changed == {"Conv": 6, "Gemm": 1}
    (note,) = report.notes
    assert re.match(r"\d+ channels of 2 groups raised, by up to \d+ times$", note)


def test_every_group_left_alone_has_a_reason(equalized: Callable[..., Any]) -> None:
    _, report = equalized(_network(2.0))
    reason = "Clip does not pass on a factor per channel"
    assert report.skipped == (
        Skipped("Conv_h1", reason),
        Skipped("Conv_h2", reason),
        Skipped("Gemm_y", "it is an output of the model"),
    )


@pytest.mark.parametrize(
    ("outlook", "changed"),
    [
        (Outlook(20.0, 20.5), True),
        (Outlook(20.0, 20.2), False),
        (Outlook(20.0, 15.0), False),
        (Outlook(31.0, None), False),
    ],
)
def test_what_does_not_help_is_dropped(
    outlook: Outlook, changed: bool, equalized: Callable[..., Any]
) -> None:
    model = _network(2.0)
    asked: list[set[str]] = []

    def judge(model: ir.Model, other: ir.Model, names: Any) -> Outlook:
        asked.append(set(names))
        return outlook

    result, report = equalized(model, outlook=judge, later=("quantize",))
    assert bool(report.changed) == changed
    same = np.array_equal(
        result.graph.initializers["head"].const_value.numpy(),
        model.graph.initializers["head"].const_value.numpy(),
    )
    assert same != changed
    assert asked == [{"c", "r", *STREAM}]
    if not changed:
        other = "keeps 31.0 dB" if outlook.other_db is None else f"keep {outlook.other_db:.1f} dB"
        assert other in report.notes[0]
        assert {item.node for item in report.skipped} > {"Conv_c", "Conv_a"}


def test_where_nobody_can_tell_nothing_is_changed(equalized: Callable[..., Any]) -> None:
    _, report = equalized(_network(2.0), later=("quantize",))
    assert not report.changed
    assert "no later step can tell" in report.notes[0]


def test_channels_that_never_held_anything_stay(equalized: Callable[..., Any], feeds: Any) -> None:
    model = _network(1.0)
    for name in ("enter", "enter_bias", "down1", "down2"):
        value = model.graph.initializers[name]
        array = value.const_value.numpy().copy()
        array[3] = 0.0
        value.const_value = ir.Tensor(array, name=name)
    result, _ = equalized(model)
    for name in ("up1", "up2"):
        before, after = (m.graph.initializers[name].const_value.numpy() for m in (model, result))
        np.testing.assert_array_equal(after[:, 3], before[:, 3])
    np.testing.assert_allclose(
        _observed(result, (), feeds)["y"], _observed(model, (), feeds)["y"], rtol=1e-4, atol=1e-4
    )


def test_a_badly_scaled_network_keeps_far_more(slim: Run) -> None:
    model = _network(2.5)
    settings = {"min_sqnr": 0.0, "fuse": False, "smooth": 0.0}
    output, records = slim(model, Quantize(**settings))
    assert [record.step.name for record in records] == [
        "equalize",
        "quantize-static",
        "bias-correction",
        "quantize-embeddings",
    ]
    assert records[0].exact_error is not None
    with_it = slim.sqnr(model, output)
    output, _ = slim(model, Quantize(**settings, equalize=False))
    assert with_it > slim.sqnr(model, output) + 6.0


@pytest.mark.parametrize("calibration", ["auto", "minmax"])
def test_where_it_does_not_help_the_result_is_the_same_without(
    slim: Run, calibration: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slimctl.passes.quantize_static._GOOD_DB", np.inf)  # else it is not tried
    model = _nearly_even(slim)
    results = []
    for wanted in (True, False):
        quantize = Quantize(calibration=calibration, min_sqnr=0, equalize=wanted)
        output, records = slim(model, quantize)
        results.append(output.read_bytes())
        if wanted:
            assert "a gain of 0.3 dB is asked for" in records[1].report.notes[0]
            assert not records[1].report.changed
    assert results[0] == results[1]


def _nearly_even(slim: Run) -> ir.Model:
    """A network whose channels differ in strength by a few percent."""
    even, _ = slim(_network(1.0), Equalize())
    model = load_model(even)
    scaling = find_scaling(model, analyze(model))
    factors = np.random.default_rng(3).uniform(0.9, 1.0, len(scaling.channels.units))
    factors[list(scaling.fixed)] = 1.0
    scaling.divide(factors)
    return model


def test_what_is_good_already_is_not_tried(slim: Run) -> None:
    _, records = slim(_network(0.5), Quantize(min_sqnr=0, fuse=False))
    (note,) = records[0].report.notes
    assert re.match(r"dropped: the worst output keeps \d+\.\d dB as it is$", note)


@pytest.mark.parametrize(
    ("calibration", "wanted", "expected"),
    [("auto", None, True), ("kl", None, False), ("kl", True, True), ("auto", False, False)],
)
def test_other_methods_of_calibration_take_it_on_demand(
    calibration: Any, wanted: bool | None, expected: bool
) -> None:
    quantize = Quantize(calibration=calibration, equalize=wanted).resolve(load_target("cpu"))
    assert any(isinstance(step, Equalize) for step in quantize.expand()) == expected


def test_channels_that_are_equally_strong_are_not_tried(slim: Run) -> None:
    even, _ = slim(_network(1.0), Equalize())
    _, records = slim(load_model(even), Quantize(min_sqnr=0))
    assert records[1].report.notes == ("channels are equally strong",)
    assert not records[1].report.changed


def test_alone_it_is_exact(slim: Run) -> None:
    model = _network(2.5)
    output, (record,) = slim(model, Equalize())
    assert record.report.changed
    assert slim.sqnr(model, output) > 90.0


def test_it_wants_data_and_a_float_model(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    ir.save(_network(1.0), source)
    with pytest.raises(SourceError, match="equalize"):
        run_passes(source, [Equalize()], output=tmp_path / "out.onnx")
    with pytest.raises(ConfigError, match="cannot run after 'quantize-static'"):
        run_passes(source, [Quantize(), Equalize()], output=tmp_path / "out.onnx")


def test_what_branches_hold_counts_as_changed(equalized: Callable[..., Any]) -> None:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[1,3,16,16] x) => (float[1,2,16,16] y) '
        """{ a = Conv(x, w)
             s = ReduceSum<keepdims=0>(x)
             flag = Greater(s, zero)
             y = If(flag) <
               then_branch = t () => (float[1,2,16,16] p) { r = Relu(a) p = Conv(r, v) },
               else_branch = e () => (float[1,2,16,16] q) { n = Neg(a) q = Conv(n, v) }>
           }"""
    )
    strengths = np.array([1.0, 0.1, 0.01, 1.0])[:, None, None, None]
    weights = {"w": rng.normal(0, 1, (4, 3, 1, 1)) * strengths, "v": rng.normal(0, 1, (2, 4, 1, 1))}
    for name, array in {**weights, "zero": np.array(0.0)}.items():
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    asked: list[set[str]] = []

    def judge(model: ir.Model, other: ir.Model, names: Any) -> Outlook:
        asked.append(set(names))
        return Outlook(20.0, 30.0)

    _, report = equalized(ir.from_proto(model), outlook=judge)
    assert report.changed == {"Conv": 3}
    assert asked == [{"a", "r", "n"}]
