"""Products of matrices."""

from __future__ import annotations

import numpy as np

from slimctl.runtime.floats import in_float32
from slimctl.runtime.registry import Array, operator


@operator("MatMul", since=1)
@in_float32
def matmul(a: Array, b: Array) -> Array:
    """The product of the last two axes, as numpy.matmul has it."""
    return stacked_product(a, b)


def stacked_product(a: Array, b: Array) -> Array:
    """numpy.matmul; a stack that meets one matrix is one tall matrix."""
    if a.ndim > 2 and b.ndim == 2:
        flat: Array = a.reshape(-1, a.shape[-1]) @ b
        return flat.reshape(*a.shape[:-1], b.shape[1])
    product: Array = np.asarray(np.matmul(a, b))
    return product


@operator("Gemm", since=7)
@in_float32
def gemm(
    a: Array,
    b: Array,
    c: Array | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transa: int = 0,
    transb: int = 0,
) -> Array:
    """The sum alpha A B + beta C, each of A and B transposed first if asked for."""
    product = scaled((a.T if transa else a) @ (b.T if transb else b), alpha)  # [M, N], a new array
    if c is not None and beta != 0:  # with 0, NaN in C does not count: BLAS
        product += scaled(c, beta)
    return product


@operator("Einsum", since=12)
@in_float32
def einsum(*inputs: Array, equation: str) -> Array:
    """Einstein's sum, with numpy's notation."""
    # numpy 2.4 and later compute the optimized form with matrix products
    result: Array = np.asarray(np.einsum(equation, *inputs, optimize=True))
    return result.astype(inputs[0].dtype, copy=False)


def scaled(x: Array, factor: float) -> Array:
    """An array times a number, in the array's type; the array itself for 1."""
    if factor == 1:
        return x
    if x.dtype.kind in "iu" and not float(factor).is_integer():
        raise ValueError(f"the factor {factor} is not an integer, the matrices are")
    product: Array = x * x.dtype.type(factor)
    return product
