"""Reductions along axes: an attribute first, an input from operator set 13 or 18 on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np

from slimctl.runtime.floats import in_float32
from slimctl.runtime.registry import Array, operator

_Axes: TypeAlias = tuple[int, ...]
_Reduction: TypeAlias = Callable[[Array, _Axes], Any]
"""Reduces axes, which are not empty, to length 1, in a type of its choice."""


def _sum(data: Array, axes: _Axes) -> Any:
    """The sum; floats are added in float64, so that no order of adding is worse than another."""
    return data.sum(axis=axes, keepdims=True, dtype=_accumulator(data))


def _mean(data: Array, axes: _Axes) -> Any:
    """Sum / count; of nothing NaN, which ONNX leaves open and where onnxruntime says 0."""
    count = prod(data.shape[axis] for axis in axes)
    if data.dtype.kind == "f":
        return _sum(data, axes) / np.float64(count)
    widest = np.uint64 if data.dtype.kind == "u" else np.int64
    total = data.sum(axis=axes, keepdims=True, dtype=widest)
    # a mean of integers is truncated, as in onnxruntime
    return (total - np.fmod(total, max(count, 1))) // max(count, 1)


def _prod(data: Array, axes: _Axes) -> Any:
    """The product"""
    return data.prod(axis=axes, keepdims=True, dtype=_accumulator(data))


def _max(data: Array, axes: _Axes) -> Any:
    """The maximum; NaN wins, which in onnxruntime depends on where it stands."""
    return data.max(axis=axes, keepdims=True, initial=_limits(data.dtype)[0])


def _min(data: Array, axes: _Axes) -> Any:
    """The minimum; NaN wins, which in onnxruntime depends on where it stands."""
    return data.min(axis=axes, keepdims=True, initial=_limits(data.dtype)[1])


def _l1(data: Array, axes: _Axes) -> Any:
    """Sum of |x|"""
    return _sum(np.abs(data), axes)


def _sum_square(data: Array, axes: _Axes) -> Any:
    """Sum of x²"""
    return np.square(data, dtype=_accumulator(data)).sum(axis=axes, keepdims=True)


def _l2(data: Array, axes: _Axes) -> Any:
    """Root of the sum of x²"""
    return np.sqrt(_sum_square(data, axes))


def _log_sum(data: Array, axes: _Axes) -> Any:
    """Logarithm of the sum"""
    return np.log(_sum(data, axes))


def _log_sum_exp(data: Array, axes: _Axes) -> Any:
    """Maximum m + log(sum(exp(x - m))): no exponential overflows."""
    data = data if data.dtype.kind == "f" else data.astype(np.float64)
    top = _max(data, axes)
    top = np.where(np.isfinite(top), top, data.dtype.type(0))  # inf - inf would be NaN
    return np.log(_sum(np.exp(data - top), axes)) + top


def _accumulator(data: Array) -> np.dtype[Any]:
    return np.dtype(np.float64) if data.dtype.kind == "f" else data.dtype


def _limits(kind: np.dtype[Any]) -> tuple[Any, Any]:
    """The smallest and the largest value of a type: maximum and minimum of nothing."""
    if kind.kind == "b":
        return False, True
    if kind.kind == "f":
        return -np.inf, np.inf
    return np.iinfo(kind).min, np.iinfo(kind).max


_REDUCTIONS: dict[tuple[str, int], _Reduction] = {
    ("ReduceSum", 13): _sum,
    ("ReduceMean", 18): _mean,
    ("ReduceProd", 18): _prod,
    ("ReduceMax", 18): _max,
    ("ReduceMin", 18): _min,
    ("ReduceL1", 18): _l1,
    ("ReduceL2", 18): _l2,
    ("ReduceSumSquare", 18): _sum_square,
    ("ReduceLogSum", 18): _log_sum,
    ("ReduceLogSumExp", 18): _log_sum_exp,
}
"""By operator and the first version whose axes are an input."""


def _register(op_type: str, since: int, reduction: _Reduction) -> None:
    @operator(op_type, since=1)
    @in_float32
    def by_attribute(
        data: Array, *, axes: tuple[int, ...] | None = None, keepdims: int = 1
    ) -> Array:
        return _reduced(reduction, data, axes or range(data.ndim), keepdims)

    @operator(op_type, since=since)
    @in_float32
    def by_input(
        data: Array,
        axes: Array | None = None,
        *,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Array:
        chosen = [] if axes is None else axes.tolist()
        if not chosen and not noop_with_empty_axes:
            chosen = range(data.ndim)
        return _reduced(reduction, data, chosen, keepdims)


def _reduced(reduction: _Reduction, data: Array, axes: Sequence[int], keepdims: int) -> Array:
    reduced = np.asarray(reduction(data, tuple(axes))).astype(data.dtype, copy=False)
    return reduced if keepdims else reduced.squeeze(tuple(axes))


for (_op_type, _since), _reduction in _REDUCTIONS.items():
    _register(_op_type, _since, _reduction)
