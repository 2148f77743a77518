"""The error function, Gelu, Swish, and what onnxruntime fuses of them."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from slimctl.core.errors import ModelExecutionError
from slimctl.runtime.erf import erf
from slimctl.runtime.registry import MICROSOFT
from tests.runtime.kernels.one_node import Array, ours
from tests.runtime.kernels.special_values import SHAPES, assert_same, special, values

ADDS_ONE = 3e-7
"""1 + erf(x) and 1 + tanh(x) of float32 lose that much where they are near 0."""

LOGISTIC = 5e-7
"""onnxruntime's logistic function is a quotient of polynomials with an error of about 1e-7."""


def _exact_erf(x: Array) -> Array:
    return np.array([math.erf(value) for value in x.astype(np.float64)])


def _points(limit: float) -> Array:
    near = np.geomspace(1e-30, limit, 20_000)
    return np.concatenate([np.linspace(-limit, limit, 40_001), near, -near])


def test_erf_of_float32_is_within_one_unit_in_the_last_place() -> None:
    x = _points(6).astype(np.float32)
    found, expected = erf(x), _exact_erf(x)
    assert found.dtype == np.float32
    unit = np.spacing(np.abs(expected).astype(np.float32))
    assert np.max(np.abs(found - expected) / unit) < 0.6


def test_erf_of_float64_is_within_a_few_units_in_the_last_place() -> None:
    x = _points(8)
    np.testing.assert_allclose(erf(x), _exact_erf(x), rtol=1e-15)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_erf_of_special_values(kind: type) -> None:
    x = np.array([np.nan, np.inf, -np.inf, 100, -100, 0.0], kind)
    np.testing.assert_array_equal(erf(x), np.array([np.nan, 1, -1, 1, -1, 0], kind), strict=True)
    assert np.signbit(erf(np.array([-0.0], kind)))


def test_erf_of_more_than_one_block_and_of_a_view() -> None:
    x = values("float32", (300, 200))
    np.testing.assert_array_equal(erf(x.T), erf(x.reshape(-1)).reshape(x.shape).T)
    np.testing.assert_allclose(erf(x).reshape(-1), _exact_erf(x.reshape(-1)), rtol=1e-7)


@pytest.mark.parametrize("kind", ["float16", "float32"])
@pytest.mark.parametrize("opset", [9, 13])
def test_erf_agrees_with_onnxruntime(kind: str, opset: int) -> None:
    for x in (special(kind), *(values(kind, shape) for shape in SHAPES.values())):
        assert_same("Erf", [x], opset=opset)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_agrees_with_onnxruntime(approximate: str) -> None:
    for x in (special("float32"), *(values("float32", shape) for shape in SHAPES.values())):
        assert_same("Gelu", [x], opset=20, approximate=approximate, rtol=1e-6, atol=ADDS_ONE)


@pytest.mark.parametrize("kind", ["float64", "float16", "bfloat16"])
def test_gelu_is_its_formula(kind: str) -> None:
    x = values("float64", (200,)).astype(getattr(ml_dtypes, kind, kind))
    wide = x.astype(np.float64)
    (found,) = ours("Gelu", [x], opset=20)
    expected = wide / 2 * (1 + _exact_erf(wide / math.sqrt(2)))
    assert found.dtype == x.dtype
    # half a unit in the last place, and what 1 + erf(x) loses in the type of the computation
    rtol, atol = {
        "float64": (0, 1e-15),
        "float16": (2**-11, ADDS_ONE),
        "bfloat16": (2**-8, ADDS_ONE),
    }[kind]
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=rtol, atol=atol)


def test_gelu_knows_its_approximations() -> None:
    with pytest.raises(ModelExecutionError, match="no approximation 'sigmoid'"):
        ours("Gelu", [np.ones(2, np.float32)], opset=20, approximate="sigmoid")


@pytest.mark.parametrize("op_type", ["Gelu", "FastGelu", "QuickGelu"])
def test_microsoft_operators_of_one_input(op_type: str) -> None:
    # onnxruntime refuses 0-d inputs of some of them
    shapes = [shape for shape in SHAPES.values() if shape]
    for x in (special("float32"), *(values("float32", shape) for shape in shapes)):
        assert_same(op_type, [x], opset=17, domain=MICROSOFT, rtol=1e-5, atol=ADDS_ONE)


@pytest.mark.parametrize("op_type", ["BiasGelu", "FastGelu"])
def test_microsoft_operators_with_a_bias(op_type: str) -> None:
    inputs = [values("float32", (2, 3, 4)), values("float32", (4,), seed=1)]
    assert_same(op_type, inputs, opset=17, domain=MICROSOFT, rtol=1e-5, atol=ADDS_ONE)


@pytest.mark.parametrize("alpha", [1.0, 1.702, -0.5])
def test_quick_gelu_of_any_alpha(alpha: float) -> None:
    x = values("float32", (100,))
    assert_same("QuickGelu", [x], opset=17, domain=MICROSOFT, rtol=1e-5, atol=LOGISTIC, alpha=alpha)


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_swish_agrees_with_onnxruntime(alpha: float) -> None:
    x = np.concatenate([special("float32"), values("float32", (50,))])
    assert_same("Swish", [x], opset=24, rtol=1e-5, atol=LOGISTIC, alpha=alpha)


@pytest.mark.parametrize(("kind", "rtol"), [("float32", 2e-6), ("float64", 1e-14)])
def test_swish_is_its_formula(kind: str, rtol: float) -> None:
    x = np.linspace(-20, 20, 1001).astype(kind)
    (found,) = ours("Swish", [x], opset=24, alpha=0.5)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(found, wide / (1 + np.exp(-wide / 2)), rtol=rtol)


def test_swiglu_gates_without_broadcasting() -> None:
    a, b = values("float64", (3, 4)), values("float64", (3, 4), seed=1)
    (found,) = ours("SwiGLU", [a, b], opset=28, alpha=2.0)
    np.testing.assert_allclose(found, a / (1 + np.exp(-2 * a)) * b, rtol=1e-14)
    with pytest.raises(ModelExecutionError, match="one shape"):
        ours("SwiGLU", [a, b[:1]], opset=28)
