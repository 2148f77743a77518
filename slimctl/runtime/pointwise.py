"""What kernels that work element by element have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from slimctl.runtime.floats import in_float32
from slimctl.runtime.registry import Array


def pointwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel with one array as its result: narrow floats in float32, 0-d inputs give an array.

    numpy's functions make a scalar of a 0-d array, which has no buffer to write into and which
    ``in_float32`` would not narrow again.
    """

    @in_float32
    @wraps(function)
    def with_array(*inputs: Any, **attributes: Any) -> Any:
        return np.asarray(function(*inputs, **attributes))

    return with_array


def logistic(x: Array) -> Array:
    """1 / (1 + exp(-x)); where the exponential overflows, the quotient is 0, as it should be."""
    result = np.exp(-x)
    result += x.dtype.type(1)
    return np.asarray(np.reciprocal(result))
