"""Normalizations, as they are at inference."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from slimctl.training.operator import Call, Operator, only


def _batch_normalization(call: Call, x: Tensor, *of_channels: Tensor) -> Tensor:
    """X [N, C, ...]; scale, bias, mean and variance [C].

    In training, the statistics are those of the batch, and ``mean`` and ``variance`` follow them.
    """
    epsilon = call.attribute("epsilon", 1e-5)
    if call.training:
        scale, bias, mean, variance = of_channels
        kept = call.attribute("momentum", 0.9)  # in torch, what is new counts
        return functional.batch_norm(
            x, mean, variance, scale, bias, training=True, momentum=1.0 - kept, eps=epsilon
        )
    shape = (-1, *(1,) * (x.ndim - 2))
    scale, bias, mean, variance = (parameter.reshape(shape) for parameter in of_channels)
    factor = scale * torch.rsqrt(variance + epsilon)
    return x * factor + (bias - mean * factor)


def _instance_normalization(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """X [N, C, ...], scale and bias [C]"""
    epsilon = call.attribute("epsilon", 1e-5)
    if x.shape[2:].numel() > 1:  # torch refuses what has no variance
        return functional.instance_norm(x, weight=scale, bias=bias, eps=epsilon)
    shape = (-1, *(1,) * (x.ndim - 2))
    y = _standardized(x, tuple(range(2, x.ndim)), epsilon)
    return y * scale.reshape(shape) + bias.reshape(shape)


def _layer_normalization(
    call: Call, x: Tensor, scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Over the axes from ``axis`` on; scale and bias are broadcast to them."""
    axes, epsilon = _axes_from(call, x), call.attribute("epsilon", 1e-5)
    sizes = x.shape[axes[0] :]
    if scale.shape == sizes and (bias is None or bias.shape == sizes):
        return functional.layer_norm(x, sizes, scale, bias, epsilon)
    y = _standardized(x, axes, epsilon) * scale
    return y if bias is None else y + bias


def _standardized(x: Tensor, axes: tuple[int, ...], epsilon: float) -> Tensor:
    """With a mean of 0 and a variance of 1 over these axes."""
    centered = x - x.mean(axes, keepdim=True)
    variance = centered.square().mean(axes, keepdim=True)
    return centered * torch.rsqrt(variance + epsilon)


def _rms_normalization(call: Call, x: Tensor, scale: Tensor) -> Tensor:
    """As layer normalization, without a mean."""
    square = x.square().mean(_axes_from(call, x), keepdim=True)
    return x * torch.rsqrt(square + call.attribute("epsilon", 1e-5)) * scale


def _axes_from(call: Call, x: Tensor) -> tuple[int, ...]:
    return tuple(range(call.attribute("axis", -1) % x.ndim, x.ndim))


def _lp_normalization(call: Call, x: Tensor) -> Tensor:
    axis = call.attribute("axis", -1)
    norm = torch.linalg.vector_norm(x, call.attribute("p", 2), axis, keepdim=True)
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)


def _softmax(call: Call, x: Tensor) -> Tensor:
    return torch.softmax(x, call.attribute("axis", -1))


def _log_softmax(call: Call, x: Tensor) -> Tensor:
    return torch.log_softmax(x, call.attribute("axis", -1))


OPERATORS = {
    "BatchNormalization": Operator(_batch_normalization, only(training_mode=(0,))),
    "InstanceNormalization": Operator(_instance_normalization),
    "LayerNormalization": Operator(_layer_normalization),
    "LogSoftmax": Operator(_log_softmax),
    "LpNormalization": Operator(_lp_normalization, only(p=(2, 1))),
    "RMSNormalization": Operator(_rms_normalization),
    "Softmax": Operator(_softmax),
}
