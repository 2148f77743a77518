from __future__ import annotations

import numpy as np
import pytest

from slimctl.runtime.named_activations import named, named_in_turn, sigmoid, softplus

_X = np.array([-1e5, -90.0, -2.5, -0.5, 0.0, 0.5, 2.5, 90.0, 1e5], np.float32)


def test_extreme_values_neither_overflow_nor_lose_digits() -> None:
    wide = _X.astype(np.float64)
    with np.errstate(over="raise", invalid="raise", under="ignore"):
        found, also = sigmoid(_X), softplus(_X)
    expected = np.exp(np.minimum(wide, 0)) / (1 + np.exp(-np.abs(wide)))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-38)
    np.testing.assert_allclose(also, np.logaddexp(0, wide), rtol=1e-6, atol=1e-38)
    assert found.dtype == also.dtype == np.float32


@pytest.mark.parametrize(
    ("name", "alphas", "betas", "expected"),
    [
        ("Relu", [], [], np.maximum(_X, 0)),
        ("relu", [9.0], [9.0], np.maximum(_X, 0)),
        ("Softsign", [], [], _X / (1 + np.abs(_X))),
        ("LeakyRelu", [], [], np.where(_X < 0, 0.01 * _X, _X)),
        ("LeakyRelu", [0.5], [], np.where(_X < 0, 0.5 * _X, _X)),
        ("ThresholdedRelu", [], [], np.where(_X > 1, _X, 0)),
        ("Elu", [2.0], [], np.where(_X < 0, 2 * np.expm1(np.minimum(_X, 0)), _X)),
        ("Affine", [2.0], [3.0], 2 * _X + 3),
        ("Affine", [2.0], [], 2 * _X),
        ("ScaledTanh", [2.0], [0.5], 2 * np.tanh(_X / 2)),
        ("HardSigmoid", [], [], np.clip(0.2 * _X + 0.5, 0, 1)),
    ],
)
def test_formulas_and_defaults(
    name: str, alphas: list[float], betas: list[float], expected: np.ndarray
) -> None:
    found = named(name, iter(alphas), iter(betas))(_X)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.dtype == np.float32


def test_parameters_are_taken_in_turn() -> None:
    tanh, leaky, hard, leaky_again = named_in_turn(
        ["Tanh", "LeakyRelu", "HardSigmoid", "LeakyRelu"], [0.5, 0.25], [0.125]
    )
    x = np.array([-1.0], np.float32)
    found = [float(f(x)[0]) for f in (tanh, leaky, hard, leaky_again)]
    np.testing.assert_allclose(found, [np.tanh(-1), -0.5, 0, -0.01], rtol=1e-6)
    np.testing.assert_allclose(hard(-x), [0.375], rtol=1e-6)
