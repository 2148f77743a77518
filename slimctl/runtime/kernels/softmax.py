"""Softmax and its relatives: along one axis, before operator set 13 along all axes from one on."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TypeAlias

import numpy as np

from slimctl.runtime.floats import in_float32
from slimctl.runtime.registry import Array, operator

_AlongAxis: TypeAlias = Callable[[Array, int], Array]


@operator("Softmax", since=1)
@in_float32
def softmax_of_rows(input: Array, *, axis: int = 1) -> Array:
    """exp(x) / sum(exp(x)) over all axes from ``axis`` on"""
    return _over_rows(_softmax, input, axis)


@operator("Softmax", since=13)
@in_float32
def softmax(input: Array, *, axis: int = -1) -> Array:
    """exp(x) / sum(exp(x)) along an axis"""
    return _softmax(input, axis)


@operator("LogSoftmax", since=1)
@in_float32
def log_softmax_of_rows(input: Array, *, axis: int = 1) -> Array:
    """Log of the softmax, x - log(sum(exp(x))), over all axes from ``axis`` on"""
    return _over_rows(_log_softmax, input, axis)


@operator("LogSoftmax", since=13)
@in_float32
def log_softmax(input: Array, *, axis: int = -1) -> Array:
    """Log of the softmax, x - log(sum(exp(x))), along an axis"""
    return _log_softmax(input, axis)


@operator("Hardmax", since=1)
@in_float32
def hardmax_of_rows(input: Array, *, axis: int = 1) -> Array:
    """1 at the first maximum over all axes from ``axis`` on, 0 elsewhere"""
    return _over_rows(_hardmax, input, axis)


@operator("Hardmax", since=13)
@in_float32
def hardmax(input: Array, *, axis: int = -1) -> Array:
    """1 at the first maximum along an axis, 0 elsewhere"""
    return _hardmax(input, axis)


def _over_rows(function: _AlongAxis, x: Array, axis: int) -> Array:
    if not -x.ndim <= axis <= x.ndim:
        raise ValueError(f"axis {axis} is out of bounds for rank {x.ndim}")
    # [a0, .., ak-1, ak, .., an] -> [a0 * .. * ak-1, ak * .. * an]
    rows = x.reshape(prod(x.shape[:axis]), prod(x.shape[axis:]))
    return function(rows, -1).reshape(x.shape)


def _softmax(x: Array, axis: int) -> Array:
    result = _shifted(x, axis)
    np.exp(result, out=result)
    result /= result.sum(axis=axis, keepdims=True)
    return result


def _log_softmax(x: Array, axis: int) -> Array:
    result = _shifted(x, axis)
    result -= np.log(np.exp(result).sum(axis=axis, keepdims=True))
    return result


def _shifted(x: Array, axis: int) -> Array:
    """Values less their maximum, so that no exponential overflows; the quotient stays the same."""
    # the initial value serves axes without elements
    return np.asarray(x - x.max(axis=axis, keepdims=True, initial=-np.inf))


def _hardmax(x: Array, axis: int) -> Array:
    """NaN counts as the maximum; in onnxruntime an axis that begins with NaN has none."""
    result = np.zeros_like(x)
    if x.size:
        np.put_along_axis(result, x.argmax(axis=axis, keepdims=True), 1, axis)
    return result
