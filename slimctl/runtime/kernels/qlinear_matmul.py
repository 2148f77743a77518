"""Products of quantized matrices."""

from __future__ import annotations

import numpy as np

from slimctl.runtime.engine import Engine
from slimctl.runtime.integer_matmul import multiply
from slimctl.runtime.kernels.quantize import dynamic_quantize_linear
from slimctl.runtime.registry import MICROSOFT, Array, operator
from slimctl.runtime.sums import Target


def _rows(values: Array, a: Array) -> Array:
    """One value in all, or one per row of ``a``: [m] is read as [m, 1]."""
    if values.size == 1:
        return values.reshape(())
    return values[..., None] if values.ndim == 1 and a.ndim > 1 else values


def _columns(values: Array) -> Array:
    """One value in all, or one per column, which broadcasts by itself."""
    return values.reshape(()) if values.size == 1 else values


def _row_zeros(values: Array | None, a: Array) -> Array | None:
    return None if values is None else _rows(values, a)


def _column_zeros(values: Array | None) -> Array | None:
    return None if values is None else _columns(values)


@operator("QLinearMatMul", since=10)
def qlinear_matmul(
    a: Array,
    a_scale: Array,
    a_zero_point: Array | None,
    b: Array,
    b_scale: Array,
    b_zero_point: Array | None,
    y_scale: Array,
    y_zero_point: Array,
    *,
    engine: Engine,
) -> Array:
    """Codes of the product of two quantized matrices (stacks of them broadcast)."""
    rows, columns = _rows(a_scale, a), _columns(b_scale)
    zeros = _row_zeros(a_zero_point, a), _column_zeros(b_zero_point)
    summed = multiply(a, zeros[0], b, zeros[1], engine)
    multiplier = (rows.astype(np.float32) * columns.astype(np.float32)) / y_scale.reshape(())
    target = Target(multiplier.astype(np.float32), y_zero_point)
    return engine.codes(summed, None, target)


@operator("MatMulInteger", since=10)
def matmul_integer(
    a: Array,
    b: Array,
    a_zero_point: Array | None = None,
    b_zero_point: Array | None = None,
    *,
    engine: Engine,
) -> Array:
    """int32 sums of products of codes without their zero points."""
    rows, columns = _row_zeros(a_zero_point, a), _column_zeros(b_zero_point)
    return engine.sums(multiply(a, rows, b, columns, engine))


@operator("MatMulIntegerToFloat", since=1, domain=MICROSOFT)
def matmul_integer_to_float(
    a: Array,
    b: Array,
    a_scale: Array,
    b_scale: Array,
    a_zero_point: Array | None = None,
    b_zero_point: Array | None = None,
    bias: Array | None = None,
    *,
    engine: Engine,
) -> Array:
    """Real numbers from sums of products of codes; the bias is real, too."""
    rows, columns = _row_zeros(a_zero_point, a), _column_zeros(b_zero_point)
    summed = multiply(a, rows, b, columns, engine)
    values = engine.values(summed, None, _rows(a_scale, a) * _columns(b_scale))
    return values if bias is None else values + bias


@operator("DynamicQuantizeMatMul", since=1, domain=MICROSOFT)
def dynamic_quantize_matmul(
    a: Array,
    b: Array,
    b_scale: Array,
    b_zero_point: Array | None = None,
    bias: Array | None = None,
    *,
    engine: Engine,
) -> Array:
    """Quantizes ``a`` by its own range and multiplies."""
    codes, scale, zero_point = dynamic_quantize_linear(a)
    return matmul_integer_to_float(
        codes, b, scale, b_scale, zero_point, b_zero_point, bias, engine=engine
    )


@operator("QGemm", since=1, domain=MICROSOFT)
def qgemm(
    a: Array,
    a_scale: Array,
    a_zero_point: Array | None,
    b: Array,
    b_scale: Array,
    b_zero_point: Array | None,
    c: Array | None = None,
    y_scale: Array | None = None,
    y_zero_point: Array | None = None,
    *,
    alpha: float = 1.0,
    transa: int = 0,
    transb: int = 0,
    engine: Engine,
) -> Array:
    """``alpha a b + c`` of codes; real numbers where there is no scale for the output.

    Args:
        a: Codes [m, k], or [k, m] with transA.
        a_scale: A scalar.
        a_zero_point: A scalar.
        b: Codes [k, n], or [n, k] with transB.
        b_scale: A scalar, or [n].
        b_zero_point: As its scale.
        c: int32 in steps of ``alpha a_scale b_scale``; broadcasts to [m, n].
        y_scale: A scalar.
        y_zero_point: A scalar.
        alpha: Factor of the product.
        transa: Whether ``a`` comes transposed.
        transb: Whether ``b`` comes transposed.
        engine: Integer arithmetic.
    """
    left = a.T if transa else a
    right = engine.prepared("transposed", (b,), lambda: _transposed(b) if transb else b)
    zeros = _row_zeros(a_zero_point, left), _column_zeros(b_zero_point)
    summed = multiply(left, zeros[0], right, zeros[1], engine)
    scale = (np.float32(alpha) * a_scale.reshape(())) * _columns(b_scale)
    if y_scale is None or y_zero_point is None:
        return engine.values(summed, c, scale)
    multiplier = np.asarray(scale / y_scale.reshape(()), np.float32)
    return engine.codes(summed, c, Target(multiplier, y_zero_point, channel_axis=1))


def _transposed(matrix: Array) -> Array:
    """A constant stays one: what is prepared from it is kept."""
    result = np.ascontiguousarray(matrix.T)
    result.flags.writeable = matrix.flags.writeable
    return result
