"""Layers left in float so that outputs keep an SQNR."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.passes._attempt import Rule
from slimctl.passes._fallback import choose_float_layers, float_prices, noise_of
from slimctl.passes.quantize_static import QuantizeStatic

ALIKE = dict.fromkeys("abcdefghij", 1.0)
"""Prices."""


def test_noise_is_the_power_behind_the_decibels() -> None:
    assert noise_of({"y": 20.0, "z": 0.0}) == pytest.approx({"y": 0.01, "z": 1.0})


def test_the_noisiest_layers_go_first_until_the_rest_is_quiet() -> None:
    alone = {"a": {"y": 0.001}, "b": {"y": 0.1}, "c": {"y": 0.02}, "d": {"y": 0.002}}

    def measure(chosen: tuple[str, ...]) -> float:
        return float(-10 * np.log10(sum(n["y"] for k, n in alone.items() if k not in chosen)))

    # 0.001 + 0.002 is below 0.01, with 0.02 it is not.
    choice = choose_float_layers({"y": 0.123}, alone, ALIKE, 20.0, measure)
    assert choice is not None
    assert choice.layers == ("b", "c")
    assert choice.sqnr_db == pytest.approx(-10 * np.log10(0.003))


def test_of_equal_noise_the_cheaper_layer_goes() -> None:
    alone = {"large": {"y": 0.02}, "small": {"y": 0.02}, "quiet": {"y": 0.001}}
    prices = {"large": 3000.0, "small": 1000.0, "quiet": 1000.0}
    choice = choose_float_layers({"y": 0.041}, alone, prices, 16.0, lambda _: 16.5)
    assert choice is not None and choice.layers == ("small",)


def test_a_layer_costs_its_weights_and_the_typical_weights() -> None:
    model, _ = _spectrum()
    prices = float_prices(model, ["Conv_s", "Conv_h", "Conv_y", "elsewhere"])
    # 8, 144 and 12 floats; of the one in a branch nothing is known; the median is 40 bytes.
    assert prices == {"Conv_s": 72.0, "Conv_h": 616.0, "Conv_y": 88.0, "elsewhere": 80.0}


def test_no_more_layers_go_than_needed() -> None:
    """Estimates go from too few layers to more than enough: what lies between is tried, too."""
    alone = {name: {"y": 0.002} for name in "abcdefghij"}
    counts: list[int] = []

    def measure(chosen: tuple[str, ...]) -> float:
        counts.append(len(chosen))
        return 12.0 + len(chosen)

    choice = choose_float_layers({"y": 0.02}, alone, ALIKE, 18.0, measure)
    assert choice is not None and choice.layers == tuple("abcdef")
    assert counts == [3, 5, 7, 6]


def test_every_output_must_hold() -> None:
    alone = {"a": {"y": 0.1, "z": 1e-6}, "b": {"y": 1e-6, "z": 0.1}, "c": {"y": 1e-6, "z": 1e-6}}
    choice = choose_float_layers({"y": 0.1, "z": 0.1}, alone, ALIKE, 20.0, lambda _: 30.0)
    assert choice is not None and sorted(choice.layers) == ["a", "b"]


def test_more_layers_go_when_the_estimate_was_too_good() -> None:
    alone = {name: {"y": 0.01 / 2**index} for index, name in enumerate("abcdefghij")}
    seen: list[tuple[str, ...]] = []

    def measure(chosen: tuple[str, ...]) -> float:
        seen.append(chosen)
        return 20.0 if len(seen) == 3 else 10.0

    choice = choose_float_layers({"y": 0.02}, alone, ALIKE, 18.0, measure)
    assert choice is not None and choice.layers == seen[2]
    assert len(seen[0]) < len(seen[1]) < len(seen[2])


def test_the_best_is_taken_when_nothing_reaches_the_aim() -> None:
    alone = {name: {"y": 0.01 / 2**index} for index, name in enumerate("abcdefghij")}
    values = iter([5.0, 9.0, 7.0, 6.0, 4.0])
    choice = choose_float_layers({"y": 0.02}, alone, ALIKE, 18.0, lambda _: next(values))
    assert choice is not None and choice.sqnr_db == 9.0


def test_the_quietest_layer_stays_quantized() -> None:
    alone = {"a": {"y": 0.1}, "b": {"y": 0.2}}
    choice = choose_float_layers({"y": 0.3}, alone, ALIKE, 30.0, lambda _: 12.0)
    assert choice is not None and choice.layers == ("b",)


def test_a_single_layer_leaves_no_choice() -> None:
    assert choose_float_layers({"y": 0.2}, {"a": {"y": 0.2}}, ALIKE, 30.0, lambda _: 99.0) is None


# A spectrum: the logarithm makes errors of small values as visible as those of large ones.
LOGARITHM = """<ir_version: 8, opset_import: ["": 17]>
g (float[1,2,8,8] x) => (float[1,3,8,8] y)
{
    s = Conv(x, filters)
    p = Mul(s, s)
    e = Add(p, tiny)
    l = Log(e)
    h = Conv<pads=[1,1,1,1]>(l, w1)
    r = Relu(h)
    y = Conv(r, w2)
}"""


def _spectrum() -> tuple[ir.Model, list[dict[str, np.ndarray]]]:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(LOGARITHM)
    for node in model.graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
    arrays = {
        "filters": rng.normal(0, 1, (4, 2, 1, 1)) * 10.0 ** np.arange(4).reshape(4, 1, 1, 1),
        "tiny": np.array(1e-6),
        "w1": rng.normal(0, 0.3, (4, 4, 3, 3)),
        "w2": rng.normal(0, 0.5, (3, 4, 1, 1)),
    }
    for key, array in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), key))
    x = [rng.normal(0, 1, (1, 2, 8, 8)) * 10 ** rng.uniform(-3, 0) for _ in range(8)]
    return ir.from_proto(model), [{"x": array.astype(np.float32)} for array in x]


def test_layer_before_a_logarithm_is_found(plain_context: Callable[..., Any]) -> None:
    model, feeds = _spectrum()
    context = plain_context(feeds, model)
    everything = model.clone()
    QuantizeStatic(min_sqnr=0).apply(everything, context)
    assert context.fidelity(everything)["y"] < 15

    result = model.clone()
    report = QuantizeStatic(min_sqnr=20).apply(result, context)
    assert context.fidelity(result)["y"] >= 20
    assert [item.node for item in report.skipped] == ["Conv_s"]
    assert "left in float for accuracy" in report.skipped[0].reason
    assert any("1 of 3 layers" in note for note in report.notes)
    assert report.changed["Conv"] == 2


def test_floor_that_cannot_be_kept_is_said(plain_context: Callable[..., Any]) -> None:
    model, feeds = _spectrum()
    result = model.clone()
    report = QuantizeStatic(min_sqnr=150).apply(result, plain_context(feeds, model))
    assert any("does not reach it" in warning for warning in report.warnings)


class _Watched:
    """Progress that remembers what was tracked."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def track(self, items: Any, *, total: int | None, label: str) -> Any:
        self.labels.append(label)
        return items


@pytest.mark.parametrize(("floor", "scans"), [(0.1, []), (20, ["finding sensitive layers"])])
def test_only_a_model_below_the_floor_is_scanned(
    floor: float, scans: list[str], plain_context: Callable[..., Any]
) -> None:
    model, feeds = _spectrum()
    context = plain_context(feeds, model)
    context.progress = _Watched()
    QuantizeStatic(min_sqnr=floor).apply(model.clone(), context)
    assert context.progress.labels == scans


@pytest.mark.parametrize(
    ("scores", "taken"),
    [
        ([20.0, 24.0, 22.0, 23.0, 23.0], "error^1.5"),
        ([20.0, 20.2, 20.0, 20.1, 19.8], "error^4"),  # as good, and clips less
        ([25.0, 20.2, 20.0, 20.1, 19.8], "kl"),
        ([20.0, 20.2, 20.0, 20.1, 20.3], "nothing clipped"),
    ],
)
def test_auto_takes_the_rule_that_serves_the_outputs_best(
    scores: list[float], taken: str, plain_context: Callable[..., Any]
) -> None:
    rules = [("kl", 2.0), ("auto", 1.5), ("auto", 2.0), ("auto", 4.0), ("auto", np.inf)]
    by_rule = dict(zip(rules, scores, strict=True))
    model, feeds = _spectrum()
    context = plain_context(feeds, model)

    def last() -> tuple[str, float]:
        return context.requests[-1].method, context.requests[-1].exponent

    context.fidelity = lambda *_: {"y": by_rule[last()]}
    report = QuantizeStatic(min_sqnr=0).apply(model.clone(), context)
    tried = [(request.method, request.exponent) for request in context.requests]
    assert tried[:-1] == rules
    assert str(Rule(*tried[-1])) == taken
    assert any(f"auto: {taken} serves" in note for note in report.notes)


def test_other_methods_are_not_tried_out(plain_context: Callable[..., Any]) -> None:
    model, feeds = _spectrum()
    context = plain_context(feeds, model)
    QuantizeStatic(calibration="kl", min_sqnr=0).apply(model.clone(), context)
    assert len(context.requests) == 1
