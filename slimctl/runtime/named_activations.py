"""Activations that other operators take by name, with their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Activation: TypeAlias = Callable[[Array], Array]


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x), without overflow."""
    small = np.exp(-np.abs(x))  # at most 1
    result: Array = np.where(x < 0, small, x.dtype.type(1)) / (1 + small)
    return result


def softplus(x: Array) -> Array:
    """log(1 + e^x), without overflow."""
    result: Array = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    return result


_PLAIN: dict[str, Activation] = {
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "softsign": lambda x: x / (1 + np.abs(x)),
    "softplus": softplus,
}

_WITH_ALPHA: dict[str, tuple[Callable[[Array, Any], Array], float]] = {
    "leakyrelu": (lambda x, a: np.where(x < 0, a * x, x), 0.01),
    "thresholdedrelu": (lambda x, a: np.where(x > a, x, 0), 1.0),
    "elu": (lambda x, a: np.where(x < 0, a * np.expm1(np.minimum(x, 0)), x), 1.0),
}

_WITH_BOTH: dict[str, tuple[Callable[[Array, Any, Any], Array], float, float]] = {
    "affine": (lambda x, a, b: a * x + b, 1.0, 0.0),
    "scaledtanh": (lambda x, a, b: a * np.tanh(b * x), 1.0, 1.0),
    "hardsigmoid": (lambda x, a, b: np.clip(a * x + b, 0, 1), 0.2, 0.5),
}
"""Functions and the defaults of their parameters: those of ONNX's operators of the same names."""


def named(name: str, alphas: Iterator[float], betas: Iterator[float]) -> Activation:
    """An activation that takes the next of the parameters, if it has any.

    Args:
        name: Upper and lower case are the same.
        alphas: What it takes its first parameter from; the default after their end.
        betas: What it takes its second parameter from.

    Raises:
        ValueError: There is no such activation.
    """
    key = name.lower()
    if key in _PLAIN:
        return _PLAIN[key]
    if key in _WITH_ALPHA:
        one, alpha = _WITH_ALPHA[key]
        first = next(alphas, alpha)
        return lambda x: one(x, x.dtype.type(first))
    if key in _WITH_BOTH:
        two, alpha, beta = _WITH_BOTH[key]
        first, second = next(alphas, alpha), next(betas, beta)
        return lambda x: two(x, x.dtype.type(first), x.dtype.type(second))
    raise ValueError(f"there is no activation '{name}'")


def named_in_turn(
    names: Sequence[str], alphas: Sequence[float] | None, betas: Sequence[float] | None
) -> list[Activation]:
    """Activations that take their parameters from the same lists, one after the other."""
    alphas_left, betas_left = iter(alphas or ()), iter(betas or ())
    return [named(name, alphas_left, betas_left) for name in names]
