"""Sums of products: convolutions and matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from slimctl.training.operator import Call, Operator, plain
from slimctl.training.windows import halves, padded, window_of

_CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_TRANSPOSED = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}


def _axes_of_weight(call: Call) -> str:
    weight = call.node.inputs[1]
    shape = weight.shape if weight is not None else None
    known = shape is None or len(shape) - 2 in _CONVOLUTIONS
    return "" if known else f"it has {len(shape or ()) - 2} spatial axes"


def _conv(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X [N, I, ...], weight [O, I/g, ...], bias [O]"""
    window = window_of(call, weight.shape[2:], x.shape[2:])
    if window.padding is None:
        x = padded(x, window.begins, window.ends)
    return _CONVOLUTIONS[weight.ndim - 2](
        x,
        weight,
        bias,
        window.strides,
        window.padding or 0,
        window.dilations,
        call.attribute("group", 1),
    )


def _conv_transpose(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X [N, I, ...], weight [I, O/g, ...], bias [O]

    Everything that the kernels write is computed, and pads are cut off: torch knows only pads that
    are alike on both sides.
    """
    rank = weight.ndim - 2
    strides = tuple(call.attribute("strides", (1,) * rank))
    dilations = tuple(call.attribute("dilations", (1,) * rank))
    full: Tensor = _TRANSPOSED[rank](
        x, weight, None, strides, 0, 0, call.attribute("group", 1), dilations
    )
    extra = tuple(call.attribute("output_padding", (0,) * rank))
    written = [size + more for size, more in zip(full.shape[2:], extra, strict=True)]
    begins, ends = _cut_off(call, x.shape[2:], written, strides)
    behind = [more - end for more, end in zip(extra, ends, strict=True)]
    y = padded(full, [-begin for begin in begins], behind)
    return y if bias is None else y + bias.reshape(-1, *(1,) * rank)


def _cut_off(
    call: Call, sizes: Sequence[int], written: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Pads of a transposed convolution, given, or such that the output has a given size."""
    rank = len(sizes)
    auto_pad = call.attribute("auto_pad", "NOTSET")
    wanted = call.attribute("output_shape")
    if wanted is None and auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [size * stride for size, stride in zip(sizes, strides, strict=True)]
    if wanted is None:
        pads = tuple(call.attribute("pads", (0,) * 2 * rank))
        return pads[:rank], pads[rank:]
    totals = [max(w - size, 0) for w, size in zip(written, wanted[-rank:], strict=True)]
    return halves(totals, more_behind=auto_pad == "SAME_UPPER")


def _gemm(call: Call, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """A [M, K], b [K, N], c broadcast to [M, N]"""
    first = a.T if call.attribute("transA", 0) else a
    second = b.T if call.attribute("transB", 0) else b
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    if c is not None and c.is_floating_point():
        return torch.addmm(c, first, second, beta=beta, alpha=alpha)
    product: Tensor = first @ second
    product = product if alpha == 1.0 else alpha * product
    return product if c is None else product + beta * c


def _einsum(call: Call, *operands: Tensor) -> Tensor:
    return torch.einsum(call.attribute("equation"), *operands)


OPERATORS = {
    "Conv": Operator(_conv, _axes_of_weight),
    "ConvTranspose": Operator(_conv_transpose, _axes_of_weight),
    "Einsum": Operator(_einsum),
    "Gemm": Operator(_gemm),
    "MatMul": plain(torch.matmul),
}
