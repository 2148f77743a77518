"""The family of Gelu and Swish, which weigh a value with a function of itself."""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

import numpy as np

from slimctl.runtime.erf import erf as error_function
from slimctl.runtime.pointwise import logistic, pointwise
from slimctl.runtime.registry import MICROSOFT, Array, operator


@operator("Erf", since=9)
@pointwise
def erf(input: Array) -> Any:
    """2/√π ∫₀ˣ exp(-t²) dt"""
    return error_function(input)


@operator("Gelu", since=20)
@pointwise
def gelu(x: Array, *, approximate: str = "none") -> Any:
    """x/2 (1 + erf(x/√2)), or its approximation by tanh"""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"there is no approximation '{approximate}'")
    return _gelu(x) if approximate == "none" else _tanh_gelu(x)


@operator("Gelu", since=1, domain=MICROSOFT)
@pointwise
def microsoft_gelu(x: Array) -> Any:
    """x/2 (1 + erf(x/√2))"""
    return _gelu(x)


@operator("BiasGelu", since=1, domain=MICROSOFT)
@pointwise
def bias_gelu(a: Array, b: Array) -> Any:
    """Gelu of a + b, b along the last axis"""
    return _gelu(a + b)


@operator("FastGelu", since=1, domain=MICROSOFT)
@pointwise
def fast_gelu(x: Array, bias: Array | None = None) -> Any:
    """Gelu of x + bias, approximated by tanh, bias along the last axis"""
    return _tanh_gelu(x if bias is None else x + bias)


@operator("QuickGelu", since=1, domain=MICROSOFT)
@pointwise
def quick_gelu(x: Array, *, alpha: float = 1.702) -> Any:
    """Product of x and the logistic function of alpha x"""
    return _swish(x, alpha)


@operator("Swish", since=24)
@pointwise
def swish(x: Array, *, alpha: float = 1.0) -> Any:
    """Product of x and the logistic function of alpha x"""
    return _swish(x, alpha)


@operator("SwiGLU", since=28)
@pointwise
def swiglu(a: Array, b: Array, *, alpha: float = 1.0) -> Any:
    """Swish of a times b, without broadcasting"""
    if a.shape != b.shape:
        raise ValueError("the gate and the linear input must have one shape")
    return _swish(a, alpha) * b


def _swish(x: Array, alpha: float) -> Array:
    return x * logistic(x * x.dtype.type(alpha))


def _gelu(x: Array) -> Array:
    """x/2 (1 + erf(x/√2)) (Hendrycks and Gimpel, arXiv:1606.08415)"""
    result = error_function(x * x.dtype.type(sqrt(0.5)))
    result += x.dtype.type(1)
    result *= x
    result *= x.dtype.type(0.5)
    return result


def _tanh_gelu(x: Array) -> Array:
    """x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))) (the same paper)"""
    inner = np.square(x)
    inner *= x.dtype.type(0.044715)
    inner += x.dtype.type(1)
    inner *= x
    inner *= x.dtype.type(sqrt(2 / pi))
    result = np.tanh(inner)
    result += x.dtype.type(1)
    result *= x
    result *= x.dtype.type(0.5)
    return result
