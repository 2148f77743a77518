"""Narrow floats: computed in float32 and rounded once, as onnxruntime does it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import ml_dtypes
import numpy as np

NARROW = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
"""Types that onnxruntime's CPU kernels, and numpy's, do not compute in."""


def is_narrow(value: Any) -> bool:
    """Whether a value is an array of float16 or bfloat16."""
    return isinstance(value, np.ndarray) and value.dtype in NARROW


def in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that sees narrow floats as float32; its float32 results become narrow again."""

    @wraps(function)
    def widened(*inputs: Any, **attributes: Any) -> Any:
        kind = next((value.dtype for value in inputs if is_narrow(value)), None)
        if kind is None:
            return function(*inputs, **attributes)
        wide = [value.astype(np.float32) if is_narrow(value) else value for value in inputs]
        results = function(*wide, **attributes)
        if isinstance(results, tuple):
            return tuple(_narrowed(result, kind) for result in results)
        return _narrowed(results, kind)

    return widened


def _narrowed(result: Any, kind: np.dtype[Any]) -> Any:
    floats = isinstance(result, np.ndarray | np.generic) and result.dtype == np.float32
    return np.asarray(result).astype(kind) if floats else result
