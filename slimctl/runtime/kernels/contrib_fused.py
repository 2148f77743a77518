"""Products of matrices and convolutions with what onnxruntime fuses into them."""

from __future__ import annotations

import numpy as np

from slimctl.runtime.floats import in_float32
from slimctl.runtime.kernels.convolution import Numbers, conv
from slimctl.runtime.kernels.linear import gemm, scaled, stacked_product
from slimctl.runtime.named_activations import named
from slimctl.runtime.registry import MICROSOFT, Array, operator

Floats = tuple[float, ...]


@operator("FusedMatMul", since=1, domain=MICROSOFT)
@in_float32
def fused_matmul(
    a: Array,
    b: Array,
    *,
    alpha: float = 1.0,
    transa: int = 0,
    transb: int = 0,
    transbatcha: int = 0,
    transbatchb: int = 0,
) -> Array:
    """Alpha A B; each of A and B with its first axis before the last one, and transposed."""
    left = _turned(a, first_axis=bool(transbatcha), last_axes=bool(transa))
    right = _turned(b, first_axis=bool(transbatchb), last_axes=bool(transb))
    return scaled(stacked_product(left, right), alpha)


@operator("TransposeMatMul", since=1, domain=MICROSOFT)
@in_float32
def transpose_matmul(
    a: Array, b: Array, *, alpha: float = 1.0, transa: int = 0, transb: int = 0
) -> Array:
    """The older name of FusedMatMul."""
    y: Array = fused_matmul(a, b, alpha=alpha, transa=transa, transb=transb)
    return y


def _turned(x: Array, *, first_axis: bool, last_axes: bool) -> Array:
    """[d, *batch, m] -> [*batch, d, m], then with the last two axes exchanged; vectors stay."""
    if x.ndim < 2:
        return x
    if first_axis:
        x = np.moveaxis(x, 0, -2)
    return x.swapaxes(-1, -2) if last_axes else x


@operator("FusedGemm", since=1, domain=MICROSOFT)
@in_float32
def fused_gemm(
    a: Array,
    b: Array,
    c: Array | None = None,
    *,
    activation: str | None = None,
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transa: int = 0,
    transb: int = 0,
) -> Array:
    """Gemm and an activation; none of those that there are here takes a third parameter."""
    del activation_gamma
    y = gemm(a, b, c, alpha=alpha, beta=beta, transa=transa, transb=transb)
    parameters = [value for value in (activation_alpha, activation_beta) if value is not None]
    return _activated(y, activation, tuple(parameters))


@operator("FusedConv", since=1, domain=MICROSOFT)
@in_float32
def fused_conv(
    x: Array,
    w: Array,
    b: Array | None = None,
    z: Array | None = None,
    *,
    activation: str | None = None,
    activation_params: Floats | None = None,
    auto_pad: str = "NOTSET",
    dilations: Numbers | None = None,
    group: int = 1,
    kernel_shape: Numbers | None = None,
    pads: Numbers | None = None,
    strides: Numbers | None = None,
) -> Array:
    """Conv plus Z, and an activation."""
    y = conv(
        x,
        w,
        b,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    if z is not None:
        y += z
    return _activated(y, activation, activation_params or ())


def _activated(x: Array, name: str | None, parameters: Floats) -> Array:
    """An activation by name, with its parameters in their order; x itself without a name."""
    if not name:
        return x
    if name.lower() == "clip":
        low, high = parameters
        return np.clip(x, x.dtype.type(low), x.dtype.type(high))
    return named(name, iter(parameters[:1]), iter(parameters[1:]))(x)
