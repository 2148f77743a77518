"""Arithmetic element by element, with numpy's broadcasting."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from slimctl.runtime.floats import is_narrow
from slimctl.runtime.pointwise import pointwise
from slimctl.runtime.registry import Array, Value, operator


@operator("Add", since=7)
@pointwise
def add(a: Array, b: Array) -> Any:
    """A + b"""
    return np.add(a, b)


@operator("Sub", since=7)
@pointwise
def sub(a: Array, b: Array) -> Any:
    """A - b"""
    return np.subtract(a, b)


@operator("Mul", since=7)
@pointwise
def mul(a: Array, b: Array) -> Any:
    """A * b"""
    return np.multiply(a, b)


@operator("Div", since=7)
@pointwise
def div(a: Array, b: Array) -> Any:
    """A / b; integers are truncated toward zero"""
    if a.dtype.kind == "f":
        return np.divide(a, b)
    _check_divisor(b)
    # numpy's integer division rounds down, which is the same where nothing remains
    return np.floor_divide(a if a.dtype.kind == "u" else a - np.fmod(a, b), b)


@operator("Mod", since=10)
@pointwise
def mod(a: Array, b: Array, *, fmod: int = 0) -> Any:
    """Remainder with the sign of b, or with the sign of a if ``fmod`` is set

    Older operator sets, and onnxruntime, want ``fmod`` for floats; here both are computed.
    """
    if a.dtype.kind != "f":
        _check_divisor(b)
    return np.fmod(a, b) if fmod else np.remainder(a, b)


@operator("Pow", since=7)
def power(x: Array, y: Array) -> Array:
    """X to the power of y, in the type of x"""
    base = x.astype(np.float32) if is_narrow(x) else x
    exponent = y.astype(np.float32) if is_narrow(y) else y
    return np.asarray(_power(base, exponent)).astype(x.dtype, copy=False)


@operator("Neg", since=6)
@pointwise
def neg(x: Array) -> Any:
    """-x"""
    return np.negative(x)


@operator("Abs", since=6)
@pointwise
def absolute(x: Array) -> Any:
    """|x|"""
    return np.abs(x)


@operator("Sign", since=9)
@pointwise
def sign(input: Array) -> Any:
    """-1, 0 or 1; NaN stays NaN"""
    return np.sign(input)


@operator("Sqrt", since=6)
@pointwise
def sqrt(x: Array) -> Any:
    """Square root; NaN where x is negative"""
    return np.sqrt(x)


@operator("Reciprocal", since=6)
@pointwise
def reciprocal(x: Array) -> Any:
    """1 / x"""
    return np.reciprocal(x)


@operator("Exp", since=6)
@pointwise
def exp(input: Array) -> Any:
    """The exponential function"""
    return np.exp(input)


@operator("Log", since=6)
@pointwise
def log(input: Array) -> Any:
    """Natural logarithm; NaN where x is negative"""
    return np.log(input)


@operator("Ceil", since=6)
@pointwise
def ceil(x: Array) -> Any:
    """The next integer above"""
    return np.ceil(x)


@operator("Floor", since=6)
@pointwise
def floor(x: Array) -> Any:
    """The next integer below"""
    return np.floor(x)


@operator("Round", since=11)
@pointwise
def round_(x: Array) -> Any:
    """The nearest integer, halves to the even one"""
    return np.rint(x)


@operator("Max", since=6)
@pointwise
def maximum(*data_0: Array) -> Any:
    """The largest of several tensors, or NaN"""
    return reduce(np.maximum, data_0)


@operator("Min", since=6)
@pointwise
def minimum(*data_0: Array) -> Any:
    """The smallest of several tensors, or NaN"""
    return reduce(np.minimum, data_0)


@operator("Sum", since=6)
@pointwise
def sum_(*data_0: Array) -> Any:
    """The sum of several tensors"""
    return reduce(np.add, data_0)


@operator("Mean", since=6)
@pointwise
def mean(*data_0: Array) -> Any:
    """The mean of several tensors"""
    total = reduce(np.add, data_0)
    return total / total.dtype.type(len(data_0))


@operator("Identity", since=1)
def identity(input: Value) -> Value:
    """The same tensor, sequence or optional"""
    return input


def _check_divisor(b: Array) -> None:
    if not b.all():
        raise ValueError("an integer cannot be divided by 0")


def _power(x: Array, y: Array) -> Any:
    """X to the power of y, in a type that holds both."""
    if x.dtype.kind != "f" and y.dtype.kind != "f" and np.all(y >= 0):
        # exact modulo 2**bits; onnxruntime's way through float64 loses the low bits of int64
        return np.power(x, y.astype(x.dtype))
    held = y.astype(x.dtype)
    if x.dtype.kind == "f" and np.array_equal(held, y, equal_nan=y.dtype.kind == "f"):
        return np.power(x, held)
    return np.power(x.astype(np.float64), y.astype(np.float64))
