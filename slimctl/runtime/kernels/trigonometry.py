"""Trigonometric and hyperbolic functions, each one function of numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from slimctl.runtime.pointwise import pointwise
from slimctl.runtime.registry import Array, operator

_FUNCTIONS = {
    ("Sin", 7): np.sin,
    ("Cos", 7): np.cos,
    ("Tan", 7): np.tan,
    ("Asin", 7): np.arcsin,
    ("Acos", 7): np.arccos,
    ("Atan", 7): np.arctan,
    ("Sinh", 9): np.sinh,
    ("Cosh", 9): np.cosh,
    ("Tanh", 6): np.tanh,
    ("Asinh", 9): np.arcsinh,
    ("Acosh", 9): np.arccosh,
    ("Atanh", 9): np.arctanh,
}
"""By operator and first version."""


def _register(op_type: str, since: int, function: np.ufunc) -> None:
    @operator(op_type, since=since)
    @pointwise
    def kernel(input: Array) -> Any:
        return function(input)


for (_op_type, _since), _function in _FUNCTIONS.items():
    _register(_op_type, _since, _function)
