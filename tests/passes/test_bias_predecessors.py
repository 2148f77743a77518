"""Bias correction that looks at what stands in front of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper
from pydantic import ValidationError

from slimctl.core.contract import PassReport
from slimctl.graph.edit import add_initializer, const_array
from slimctl.passes import _bias_predecessors, bias_correction
from slimctl.passes._bias_predecessors import Bounds, Predecessors, Rows, Shift, closest_shift
from slimctl.passes._quantized_layers import quantized_layers
from slimctl.passes._weights_walk import frontier
from slimctl.passes.bias_correction import BiasCorrection
from slimctl.passes.quantize import Quantize
from slimctl.passes.quantize_static import QuantizeStatic

OPEN = Bounds(-np.inf, np.inf)
OWN = np.array([0.1])


def rows(values: np.ndarray) -> Rows:
    values = np.asarray(values, np.float32).reshape(-1, 1)
    return Rows(values, np.arange(len(values)) % 2 == 1)


def normal(count: int = 400) -> np.ndarray:
    # Each value twice: both halves of the samples hold the same.
    return np.repeat(np.random.default_rng(0).normal(0, 1, count // 2), 2)


def test_a_shift_from_in_front_is_taken_back_whole() -> None:
    wanted = normal()
    found = closest_shift(rows(wanted), rows(wanted + 0.5), OWN, OPEN, OPEN)
    np.testing.assert_allclose(found.amount, [0.5], rtol=1e-5)
    assert found.gain == pytest.approx(1.0)


def test_only_so_much_that_values_behind_the_activation_are_closest() -> None:
    # Rare large values that a threshold cuts off: the mean falls by 2, all others are right.
    wanted = np.where(np.arange(400) % 20 < 2, 22.0, normal())
    cut = np.minimum(wanted, 2.0)
    codes = Bounds(-2.0, 2.0)
    assert (cut - wanted).mean() < -1.9
    found = closest_shift(rows(wanted), rows(cut), np.array([0.0]), OPEN, codes)
    assert found.amount == [0.0]
    # With codes that could hold them, the whole is closest.
    free = closest_shift(rows(wanted), rows(cut), np.array([0.0]), OPEN, OPEN)
    np.testing.assert_allclose(free.amount, [(cut - wanted).mean()], rtol=1e-5)


def test_what_a_relu_takes_away_counts_for_nothing() -> None:
    wanted = np.concatenate([normal() + 4.0, normal() - 40.0])
    found = np.where(wanted < -20, wanted - 10.0, wanted)  # wrong where nothing comes through
    relu = Bounds(0.0, np.inf)
    assert closest_shift(rows(wanted), rows(found), OWN, relu, OPEN).amount == [0.0]
    # Without the Relu nine tenths of a mean error of five are worth having.
    assert closest_shift(rows(wanted), rows(found), OWN, OPEN, OPEN).amount < -4.0


def test_halves_that_disagree_get_the_smaller_shift() -> None:
    wanted = normal()
    apart = wanted + np.where(np.arange(400) % 2 == 1, 0.1, 1.1)  # odd rows: own error alone
    found = closest_shift(rows(wanted), rows(apart), OWN, OPEN, OPEN)
    np.testing.assert_allclose(found.amount, OWN)


def test_rows_that_are_not_finite_say_nothing() -> None:
    wanted = normal()
    broken = wanted + 0.5
    broken[10:20] = np.inf
    found = closest_shift(rows(wanted), rows(broken), OWN, OPEN, OPEN)
    np.testing.assert_allclose(found.amount, [0.5], rtol=1e-5)
    assert np.array_equal(
        closest_shift(rows(wanted), rows(wanted * np.nan), OWN, OPEN, OPEN).amount, OWN
    )


TEXT = """<ir_version: 8, opset_import: ["": 17]> g (float[1,4,9,9] x) => (float[1,4,9,9] y)
<float[4,4,3,3] w0, float[4] b0, float[4,4,3,3] w1, float[4] b1> {
    c = Conv<pads=[1,1,1,1]>(x, w0, b0) r = Relu(c) y = Conv<pads=[1,1,1,1]>(r, w1, b1)
}"""


@pytest.fixture
def model() -> ir.Model:
    proto = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(2)
    for node, name in zip(proto.graph.node, ("first", "relu", "second"), strict=True):
        node.name = name
    shapes = {"w0": (4, 4, 3, 3), "b0": (4,), "w1": (4, 4, 3, 3), "b1": (4,)}
    for name, shape in shapes.items():
        array = rng.normal(0.1, 0.5, shape).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return ir.from_proto(proto)


@pytest.fixture
def feeds() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [{"x": rng.normal(0.5, 1, (1, 4, 9, 9)).astype(np.float32)} for _ in range(12)]


def corrected(model: ir.Model, context: Any, inputs: str) -> tuple[ir.Model, PassReport]:
    """Quantized, with values between the layers that come out three steps too low."""
    result = model.clone()
    QuantizeStatic(per_channel=False).apply(result, context)
    second = next(node for node in result.graph if node.name == "second")
    restored = second.inputs[0].producer()
    lower = const_array(restored.inputs[2]) + np.uint8(3)
    restored.replace_input_with(2, add_initializer(result.graph, "lower", lower))
    return result, BiasCorrection.model_validate({"inputs": inputs}).apply(result, context)


def test_the_error_of_what_stands_in_front_goes_too(
    model: ir.Model, feeds: Any, plain_context: Callable[..., Any]
) -> None:
    def error(inputs: str) -> float:
        context = plain_context(feeds, model)
        result, report = corrected(model, context, inputs)
        assert inputs == "float" or report.changed == {"bias": 2}
        ours, theirs = (np.stack(context.observe(m, ["y"])["y"]) for m in (model, result))
        return float(np.abs((theirs - ours).mean(axis=(0, 1, 3, 4))).mean())

    assert error("quantized") < 0.1 * error("float")


def test_it_is_dropped_and_named_where_the_outputs_gain_nothing(
    model: ir.Model, feeds: Any, plain_context: Callable[..., Any], monkeypatch: Any
) -> None:
    context = plain_context(feeds, model)
    plain, _ = corrected(model, context, "float")
    too_much = Shift(np.full(4, 100.0), 1.0)
    monkeypatch.setattr(bias_correction.Predecessors, "shift", lambda *_: too_much)
    result, report = corrected(model, context, "quantized")
    assert any(note.startswith("dropped: one layer after another") for note in report.notes)
    ours, theirs = (context.observe(m, ["y"])["y"] for m in (plain, result))
    np.testing.assert_array_equal(ours, theirs)


def test_a_layer_that_is_not_asked_for_does_not_move_the_others(
    model: ir.Model, feeds: Any, plain_context: Callable[..., Any], monkeypatch: Any
) -> None:
    context = plain_context(feeds, model)
    quantized = model.clone()
    QuantizeStatic(per_channel=False).apply(quantized, context)
    layers, _ = quantized_layers(quantized, model)
    own = np.zeros(4)
    # One layer of the float model is looked at in each run of the data.
    monkeypatch.setattr(_bias_predecessors, "_BUDGET_BYTES", 1)
    both = Predecessors(quantized, model, layers, context)
    both.shift(layers[0], own)
    alone = Predecessors(quantized, model, layers, context)
    expected = both.shift(layers[1], own)
    found = alone.shift(layers[1], own)
    assert expected is not None and found is not None
    np.testing.assert_array_equal(found.amount, expected.amount)
    assert found.gain == expected.gain


def test_restored_weights_are_not_carried_from_layer_to_layer(
    model: ir.Model, feeds: Any, plain_context: Callable[..., Any]
) -> None:
    quantized = model.clone()
    QuantizeStatic().apply(quantized, plain_context(feeds, model))
    second = next(node for node in quantized.graph if node.name == "second")
    (name,) = frontier(quantized, [second])
    assert name == second.inputs[0].name


def test_inputs_for_a_correction_that_is_turned_off_are_refused() -> None:
    with pytest.raises(ValidationError, match="turned off"):
        Quantize.model_validate({"bias_correction": False, "bias_inputs": "quantized"})
