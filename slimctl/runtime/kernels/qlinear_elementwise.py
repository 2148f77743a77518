"""Quantized tensors element by element."""

from __future__ import annotations

from typing import Any

import numpy as np

from slimctl.numerics.affine import dequantize
from slimctl.runtime.engine import Engine
from slimctl.runtime.kernels.quantize import quantize_linear
from slimctl.runtime.registry import MICROSOFT, Array, operator
from slimctl.runtime.sums import Target, summed_at_once


def _zero(codes: Array, zero_point: Array | None) -> Array:
    return np.zeros((), codes.dtype) if zero_point is None else zero_point.reshape(())


def _steps(codes: Array, zero_point: Array | None, scale: Array, output: Array) -> Array:
    """A tensor in steps of the output, in float64: the rounding that follows is the only one."""
    factor = np.float64(scale.reshape(())) / np.float64(output.reshape(()))
    shift = float(_zero(codes, zero_point))
    steps = np.asarray(codes.astype(np.float64))
    if shift:
        steps -= shift
    steps *= factor
    return steps


@operator("QLinearAdd", since=1, domain=MICROSOFT)
def qlinear_add(
    a: Array,
    a_scale: Array,
    a_zero_point: Array | None,
    b: Array,
    b_scale: Array,
    b_zero_point: Array | None,
    c_scale: Array,
    c_zero_point: Array | None = None,
    *,
    engine: Engine,
) -> Array:
    """``a + b``, each in steps of the output, rounded once."""
    first = _steps(a, a_zero_point, a_scale, c_scale)
    second = _steps(b, b_zero_point, b_scale, c_scale)
    total = np.add(first, second, out=first if first.shape == second.shape else None)
    return engine.requantized(total, _zero(a, c_zero_point), 1)


@operator("QLinearMul", since=1, domain=MICROSOFT)
def qlinear_mul(
    a: Array,
    a_scale: Array,
    a_zero_point: Array | None,
    b: Array,
    b_scale: Array,
    b_zero_point: Array | None,
    c_scale: Array,
    c_zero_point: Array | None = None,
    *,
    engine: Engine,
) -> Array:
    """``a b``: products of centered codes, requantized."""
    left = a.astype(np.float32) - np.float32(_zero(a, a_zero_point))
    right = b.astype(np.float32) - np.float32(_zero(b, b_zero_point))
    product = left * right  # at most 255 x 255: exact
    scale = (a_scale.reshape(()) * b_scale.reshape(())) / c_scale.reshape(())
    target = Target(np.asarray(scale, np.float32), _zero(a, c_zero_point), channel_axis=1)
    return engine.codes(summed_at_once(product, 255.0 * 255.0), None, target)


def requantized_codes(
    codes: Array, zero_point: Array | None, scale: Array, y_scale: Array, y_zero_point: Array
) -> Array:
    """Codes of one scale as codes of another, through a table of what each code becomes."""
    limits = np.iinfo(codes.dtype)
    every = np.arange(limits.min, limits.max + 1).astype(codes.dtype)
    real = dequantize(every, scale.reshape(()), _zero(codes, zero_point))
    return look_up(codes, quantize_linear(real, y_scale.reshape(()), y_zero_point.reshape(())))


def look_up(codes: Array, table: Array) -> Array:
    """``table[code - least code]``"""
    if codes.dtype.kind == "i":  # the table begins with the least code
        index = codes.view(np.uint8) ^ np.uint8(128)
        return np.asarray(table[index])
    return np.asarray(table[codes])


@operator("QLinearConcat", since=1, domain=MICROSOFT)
def qlinear_concat(
    y_scale: Array, y_zero_point: Array, *inputs: Array, axis: int, engine: Engine
) -> Array:
    """Tensors with their scales and zero points, three by three, joined under one scale."""
    triples = zip(inputs[0::3], inputs[1::3], inputs[2::3], strict=True)
    parts = [requantized_codes(x, zero, s, y_scale, y_zero_point) for x, s, zero in triples]
    return engine.counted(np.concatenate(parts, axis=axis), 1)


@operator("QLinearWhere", since=1, domain=MICROSOFT)
def qlinear_where(
    condition: Array,
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    y: Array,
    y_scale: Array,
    y_zero_point: Array,
    z_scale: Array,
    z_zero_point: Array,
    *,
    engine: Engine,
) -> Array:
    """One of two tensors at each place, under one scale."""
    first = requantized_codes(x, x_zero_point, x_scale, z_scale, z_zero_point)
    second = requantized_codes(y, y_zero_point, y_scale, z_scale, z_zero_point)
    return engine.counted(np.where(condition, first, second), 1)


@operator("QLinearSigmoid", since=1, domain=MICROSOFT)
def qlinear_sigmoid(
    x: Array,
    x_scale: Array,
    x_zero_point: Array | None,
    y_scale: Array,
    y_zero_point: Array | None = None,
    *,
    engine: Engine,
) -> Array:
    """``1 / (1 + exp(-x))`` of each code."""
    return _by_table(
        lambda v: 1 / (1 + np.exp(-v)), x, x_scale, x_zero_point, y_scale, y_zero_point, engine
    )


@operator("QLinearLeakyRelu", since=1, domain=MICROSOFT)
def qlinear_leaky_relu(
    x: Array,
    x_scale: Array,
    x_zero_point: Array | None,
    y_scale: Array,
    y_zero_point: Array | None = None,
    *,
    alpha: float = 0.01,
    engine: Engine,
) -> Array:
    """The code of x where it is positive, of alpha x elsewhere."""
    slope = np.float32(alpha)
    return _by_table(
        lambda v: np.where(v < 0, v * slope, v),
        x,
        x_scale,
        x_zero_point,
        y_scale,
        y_zero_point,
        engine,
    )


def _by_table(
    function: Any,
    x: Array,
    x_scale: Array,
    x_zero_point: Array | None,
    y_scale: Array,
    y_zero_point: Array | None,
    engine: Engine,
) -> Array:
    """A function of one value, computed once for each of the 256 codes."""
    zero = _zero(x, y_zero_point)

    def make() -> Array:
        limits = np.iinfo(x.dtype)
        every = np.arange(limits.min, limits.max + 1).astype(x.dtype)
        real = dequantize(every, x_scale.reshape(()), _zero(x, x_zero_point))
        return np.asarray(quantize_linear(function(real), y_scale.reshape(()), zero))

    sources = (x_scale, x_zero_point, y_scale, y_zero_point)
    return engine.counted(look_up(x, engine.prepared("table", sources, make)), 1)
