"""Comparisons, logic and the choice by a condition, with numpy's broadcasting."""

from __future__ import annotations

from typing import Any

import numpy as np

from slimctl.runtime.casting import as_text, is_text
from slimctl.runtime.pointwise import pointwise
from slimctl.runtime.registry import Array, operator


@operator("Equal", since=7)
@pointwise
def equal(a: Array, b: Array) -> Any:
    """Whether a is b, for strings too"""
    return np.equal(*_comparable(a, b))


@operator("Greater", since=7)
@pointwise
def greater(a: Array, b: Array) -> Any:
    """Whether a is above b"""
    return np.greater(a, b)


@operator("GreaterOrEqual", since=12)
@pointwise
def greater_or_equal(a: Array, b: Array) -> Any:
    """Whether a is b or above"""
    return np.greater_equal(a, b)


@operator("Less", since=7)
@pointwise
def less(a: Array, b: Array) -> Any:
    """Whether a is below b"""
    return np.less(a, b)


@operator("LessOrEqual", since=12)
@pointwise
def less_or_equal(a: Array, b: Array) -> Any:
    """Whether a is b or below"""
    return np.less_equal(a, b)


@operator("And", since=7)
@pointwise
def and_(a: Array, b: Array) -> Any:
    """Whether both are true"""
    return np.logical_and(a, b)


@operator("Or", since=7)
@pointwise
def or_(a: Array, b: Array) -> Any:
    """Whether one or both are true"""
    return np.logical_or(a, b)


@operator("Xor", since=7)
@pointwise
def xor(a: Array, b: Array) -> Any:
    """Whether exactly one is true"""
    return np.logical_xor(a, b)


@operator("Not", since=1)
@pointwise
def not_(x: Array) -> Any:
    """Whether it is false"""
    return np.logical_not(x)


@operator("IsNaN", since=9)
@pointwise
def is_nan(x: Array) -> Any:
    """Whether it is NaN"""
    return np.isnan(x)


@operator("IsInf", since=10)
@pointwise
def is_inf(x: Array, *, detect_negative: int = 1, detect_positive: int = 1) -> Any:
    """Whether it is infinite, of the signs that are asked for"""
    infinite = np.isinf(x)
    if not detect_negative:
        infinite &= x > 0
    if not detect_positive:
        infinite &= x < 0
    return infinite


@operator("Where", since=9)
def where(condition: Array, x: Array, y: Array) -> Array:
    """X where the condition holds, y elsewhere"""
    return np.where(condition, *_comparable(x, y))


def _comparable(a: Array, b: Array) -> tuple[Array, Array]:
    """Strings of one kind: those of initializers are bytes."""
    return (as_text(a), as_text(b)) if is_text(a) else (a, b)
