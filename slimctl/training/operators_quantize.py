"""Quantization that can be differentiated: codes are floats, and rounding passes gradients on.

``QuantizeLinear`` computes what :mod:`slimctl.numerics.affine` computes, ``saturate(rint(x / s) +
z)``. With ``rint`` taken for the identity where it is differentiated, and what saturates for a
constant, DequantizeLinear behind it has the gradients of LSQ (Esser et al., "Learned step size
quantization", ICLR 2020, equations 3 and 5): by x, 1 inside of the range and 0 outside of it; by
the scale, ``rint(v) - v`` inside, with ``v = x / s``, and the code at which x saturates outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from slimctl.training.code_ranges import CODES, RANGE, RESTORED
from slimctl.training.operator import Call, Operator


class _Codes(torch.autograd.Function):
    """``saturate(rint(x / s) + z)``; a function of its own, since whole tensors pass through it.

    Each operation of autograd reads and writes activations once more, which is what training under
    quantization takes its time for, and a choice by a mask takes as long as seven others.
    """

    @staticmethod
    def forward(  # type: ignore[override]  # torch leaves the arguments open
        ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, limits: tuple[float, float]
    ) -> Tensor:
        """Codes as floats; scale and zero point broadcast to ``x``."""
        steps = x / scale
        ctx.save_for_backward(steps, scale, shift)
        ctx.limits = limits
        return torch.round(steps).add_(shift).clamp_(*limits)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        """By ``x`` and the scale; 0 where it saturates, at the borders, too."""
        steps, scale, shift = ctx.saved_tensors
        inside = torch.ops.aten.hardtanh_backward(gradient, steps + shift, *ctx.limits)
        by_x = inside / scale
        return by_x, -(by_x * steps).sum_to_size(scale.shape), None, None


class _Restored(torch.autograd.Function):
    """``saturate(rint(x / s)) s``: both nodes at once, with the gradients that they have apart."""

    @staticmethod
    def forward(  # type: ignore[override]  # torch leaves the arguments open
        ctx: Any, x: Tensor, scale: Tensor, limits: tuple[int, int]
    ) -> Tensor:
        """Floats; one scale for all, limits without the zero point."""
        steps = x / scale
        restored = torch.round(steps).clamp_(*limits).mul_(scale)
        ctx.save_for_backward(steps, restored, scale)
        ctx.limits = limits
        return restored

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor | None, None]:
        """By ``x``, 0 where it saturates, at the borders, too, and by the scale."""
        steps, restored, scale = ctx.saved_tensors
        by_x = torch.ops.aten.hardtanh_backward(gradient, steps, *ctx.limits)
        if not ctx.needs_input_grad[1]:
            return by_x, None, None
        # Inside, codes and steps all but cancel out: better before they are added up.
        by_scale = (gradient * restored).div_(scale).addcmul_(by_x, steps, value=-1.0)
        return by_x, by_scale.sum().reshape(scale.shape), None


def _quantize(call: Call, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    if (limits := call.attribute(RESTORED)) is not None:
        restored: Tensor = _Restored.apply(x, _along(call, scale, x), tuple(limits))
        return restored
    zero = torch.zeros((), dtype=x.dtype, device=x.device) if zero_point is None else zero_point
    codes: Tensor = _Codes.apply(
        x, _along(call, scale, x), _along(call, zero.to(x), x), _range(call)
    )
    return codes


def _dequantize(call: Call, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    codes = x.to(scale.dtype)
    if zero_point is not None:
        codes = codes - _along(call, zero_point.to(codes), x)
    return codes * _along(call, scale, x)


def _along(call: Call, values: Tensor, x: Tensor) -> Tensor:
    """One value per channel such that it broadcasts."""
    if values.numel() == 1:
        return values.reshape(())
    shape = [1] * x.ndim
    shape[call.attribute("axis", 1)] = values.numel()
    return values.reshape(shape)  # [c] -> [1, c, 1, 1]


def _kind(call: Call) -> ir.DataType | None:
    """Type of the codes."""
    if call.has_input(2):
        value = call.node.inputs[2]
        return None if value is None else value.dtype
    return ir.DataType(call.attribute("output_dtype", 0) or ir.DataType.UINT8)


def _range(call: Call) -> tuple[float, float]:
    kind = _kind(call)
    assert kind in CODES, "it was looked at"
    given: Sequence[Any] = call.attribute(RANGE, CODES[kind])
    return float(given[0]), float(given[1])


def _refuses_to_quantize(call: Call) -> str:
    if call.attribute("block_size", 0):
        return "it has one scale per block"
    if _kind(call) not in CODES:
        return f"it makes codes of {_kind(call)}"
    codes = call.node.outputs[0]
    if call.attribute(RESTORED) is not None:
        return ""  # it gives no codes
    if codes.is_graph_output():
        return "its codes are an output of the graph"
    others = [use.node for use in codes.uses() if use.node.op_type != "DequantizeLinear"]
    return f"{others[0].op_type} '{others[0].name}' reads its codes" if others else ""


def _refuses_to_dequantize(call: Call) -> str:
    return "it has one scale per block" if call.attribute("block_size", 0) else ""


OPERATORS = {
    "DequantizeLinear": Operator(_dequantize, _refuses_to_dequantize),
    "QuantizeLinear": Operator(_quantize, _refuses_to_quantize),
}
