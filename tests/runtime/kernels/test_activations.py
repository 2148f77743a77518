"""Activations: against their formulas in float64, and against onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from slimctl.core.errors import ModelExecutionError
from tests.runtime.kernels.one_node import Array, ours
from tests.runtime.kernels.special_values import FLOATS, SHAPES, assert_same, special, values

OPSET = 22
CANCELS = 3e-7
"""onnxruntime subtracts 1 from exponentials and adds 1 to others: float32 loses that much of 1."""


def _where(condition: Any, x: Any, y: Any) -> Any:
    return np.where(condition, x, y)


FORMULAS: dict[str, tuple[dict[str, float], Callable[[Array], Array]]] = {
    "Relu": ({}, lambda x: np.maximum(x, 0)),
    "LeakyRelu": ({"alpha": 0.25}, lambda x: _where(x < 0, 0.25 * x, x)),
    "Elu": ({"alpha": 1.5}, lambda x: _where(x < 0, 1.5 * (np.exp(x) - 1), x)),
    "Selu": (
        {"alpha": 1.5, "gamma": 2.0},
        lambda x: 2 * _where(x < 0, 1.5 * (np.exp(x) - 1), x),
    ),
    "Celu": (
        {"alpha": 2.0},
        lambda x: np.maximum(x, 0) + np.minimum(0, 2 * (np.exp(x / 2) - 1)),
    ),
    "ThresholdedRelu": ({"alpha": 0.5}, lambda x: _where(x > 0.5, x, 0)),
    "Shrink": (
        {"bias": 0.25, "lambd": 1.5},
        lambda x: _where(x < -1.5, x + 0.25, _where(x > 1.5, x - 0.25, 0)),
    ),
    "Sigmoid": ({}, lambda x: 1 / (1 + np.exp(-x))),
    "HardSigmoid": ({"alpha": 0.25, "beta": 0.5}, lambda x: np.clip(x / 4 + 0.5, 0, 1)),
    "HardSwish": ({}, lambda x: x * np.clip(x / 6 + 0.5, 0, 1)),
    "Mish": ({}, lambda x: x * np.tanh(np.log1p(np.exp(x)))),
    "Softplus": ({}, lambda x: np.log1p(np.exp(x))),
    "Softsign": ({}, lambda x: x / (1 + np.abs(x))),
}
"""Attributes that float32 holds exactly, and what is computed with them."""


@pytest.mark.parametrize("op_type", FORMULAS)
@pytest.mark.parametrize(("kind", "rtol"), [("float32", 1e-6), ("float64", 1e-13)])
def test_is_its_formula(op_type: str, kind: str, rtol: float) -> None:
    attributes, formula = FORMULAS[op_type]
    x = np.linspace(-12, 12, 1001).astype(kind)
    (found,) = ours(op_type, [x], opset=OPSET, **attributes)
    assert found.dtype == x.dtype
    # some are 0 inside the range, next to which a unit in the last place of 1 is much
    atol = 4 * float(np.finfo(kind).eps)
    np.testing.assert_allclose(found, formula(x.astype(np.float64)), rtol=rtol, atol=atol)


@pytest.mark.parametrize("op_type", FORMULAS)
@pytest.mark.parametrize("kind", ["float16", "float32"])
def test_agrees_with_onnxruntime(op_type: str, kind: str) -> None:
    opset = 28 if op_type == "Celu" else OPSET  # before, Celu was float32
    for attributes in ({}, FORMULAS[op_type][0]):
        node = {"opset": opset, "atol": CANCELS, "rtol": 1e-5 if kind == "float32" else 1e-3}
        for shape in SHAPES.values():
            assert_same(op_type, [values(kind, shape)], **node, **attributes)
        assert_same(op_type, [special(kind)], **node, **attributes)


@pytest.mark.parametrize("op_type", FORMULAS)
@pytest.mark.parametrize("shape", [(50,), ()])
def test_bfloat16_is_rounded_once(op_type: str, shape: tuple[int, ...]) -> None:
    attributes, formula = FORMULAS[op_type]
    x = values("float64", shape).astype(ml_dtypes.bfloat16)
    (found,) = ours(op_type, [x], opset=OPSET, **attributes)
    assert type(found) is np.ndarray
    assert found.dtype == x.dtype
    expected = np.asarray(formula(x.astype(np.float64))).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("op_type", ["Elu", "Selu", "Celu"])
def test_keeps_its_digits_near_zero(op_type: str) -> None:
    x = -np.geomspace(1e-12, 1e-3, 50).astype(np.float32)
    (found,) = ours(op_type, [x], opset=OPSET)
    factor = 1.0507010221481323 * 1.6732631921768188 if op_type == "Selu" else 1
    np.testing.assert_allclose(found, factor * np.expm1(x.astype(np.float64)), rtol=5e-7)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0, -0.5])
def test_leaky_relu_of_any_slope(alpha: float) -> None:
    assert_same("LeakyRelu", [special("float32")], opset=16, alpha=alpha)


@pytest.mark.parametrize("alpha", [0.5, -0.5, -2.0])
def test_celu_of_any_alpha(alpha: float) -> None:
    x = np.array([-80, -2, -0.5, 0, 0.5, 2, 200], np.float32)
    assert_same("Celu", [x], opset=12, alpha=alpha, rtol=1e-5, atol=CANCELS)


@pytest.mark.parametrize("kind", ["int8", "int32"])
def test_relu_of_integers(kind: str) -> None:
    assert_same("Relu", [special(kind)], opset=14)


@pytest.mark.parametrize("kind", ["int8", "int16", "int32", "int64", "uint8", "uint32"])
def test_shrink_of_integers(kind: str) -> None:
    assert_same("Shrink", [values(kind, (30,))], opset=9, lambd=1.5, bias=0.75)


@pytest.mark.parametrize("slope", [(), (1,), (3, 1), (2, 3, 4)])
def test_prelu_broadcasts_its_slope(slope: tuple[int, ...]) -> None:
    inputs = [values("float32", (2, 3, 4)), values("float32", slope, seed=1)]
    assert_same("PRelu", inputs, opset=9)
    assert_same("PRelu", inputs, opset=16)


def test_prelu_of_special_values() -> None:
    assert_same("PRelu", [special("float32"), special("float32")[::-1].copy()], opset=16)


def test_prelu_of_integers() -> None:
    (found,) = ours("PRelu", [np.array([-3, 0, 3]), np.array([2])], opset=16)
    np.testing.assert_array_equal(found, np.array([-6, 0, 3]), strict=True)


def test_prelu_does_not_broadcast_the_data() -> None:
    with pytest.raises(ModelExecutionError, match="slope of the shape"):
        ours("PRelu", [np.ones((1, 3), np.float32), np.ones((2, 3), np.float32)], opset=16)


@pytest.mark.parametrize("kind", ["float16", *FLOATS, "int8", "uint8", "int32", "int64", "uint64"])
@pytest.mark.parametrize("bounds", [(None, None), (1, None), (None, 2), (1, 2), (2, 1)])
def test_clip_with_bounds_that_are_inputs(kind: str, bounds: tuple[int | None, ...]) -> None:
    inputs = [None if bound is None else np.array(bound, kind) for bound in bounds]
    for x in (special(kind), values(kind, ()), values(kind, (0,))):
        assert_same("Clip", [x, *inputs], opset=13)


@pytest.mark.parametrize("attributes", [{}, {"min": -0.5}, {"max": 0.5}, {"min": -1.0, "max": 2.0}])
def test_clip_with_bounds_that_are_attributes(attributes: dict[str, float]) -> None:
    x = special("float32")
    x = x[np.isfinite(x)]
    assert_same("Clip", [x], opset=6, **attributes)
    assert_same("Clip", [x], opset=10, **attributes)


def test_clip_of_bfloat16() -> None:
    x = special("float32")[1:].astype(ml_dtypes.bfloat16)  # without NaN
    (found,) = ours("Clip", [x, np.array(-1, x.dtype)], opset=13)
    largest = float(ml_dtypes.finfo(x.dtype).max)
    expected = np.clip(x.astype(np.float64), -1, largest).astype(x.dtype)
    np.testing.assert_array_equal(found, expected, strict=True)


def test_clip_takes_one_bound() -> None:
    with pytest.raises(ModelExecutionError, match="one number"):
        ours("Clip", [np.ones(2, np.float32), np.zeros(2, np.float32)], opset=13)


@pytest.mark.parametrize("op_type", ["Relu", "Elu", "LeakyRelu", "Sigmoid", "Selu", "HardSigmoid"])
def test_in_operator_set_7(op_type: str) -> None:
    assert_same(op_type, [values("float32", (20,))], opset=7, rtol=1e-5, atol=CANCELS)
