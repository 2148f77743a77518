"""Operators that compute each element from the elements at its place."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional

from slimctl.training.operator import Call, Operator, only, plain


def _div(call: Call, x: Tensor, y: Tensor) -> Tensor:
    """Integers are divided toward zero."""
    del call
    return torch.div(x, y, rounding_mode=None if x.is_floating_point() else "trunc")


def _mod(call: Call, x: Tensor, y: Tensor) -> Tensor:
    """With the sign of the divisor, or of the dividend as in C."""
    return torch.fmod(x, y) if call.attribute("fmod", 0) else torch.remainder(x, y)


def _pow(call: Call, x: Tensor, exponent: Tensor) -> Tensor:
    del call
    return torch.pow(x, exponent).to(x.dtype)


def _clip(call: Call, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    """Between two numbers in one go, as ReLU6; at the bounds the gradient is that of Relu: zero."""
    first, last = call.number(1), call.number(2)
    if first is not None and last is not None and first < last and not _learned(low, high):
        return functional.hardtanh(x, first, last)
    return x if low is None and high is None else torch.clamp(x, low, high)


def _learned(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _max(call: Call, *operands: Tensor) -> Tensor:
    del call
    return reduce(torch.maximum, operands)


def _min(call: Call, *operands: Tensor) -> Tensor:
    del call
    return reduce(torch.minimum, operands)


def _sum(call: Call, *operands: Tensor) -> Tensor:
    del call
    return reduce(torch.add, operands)


def _mean(call: Call, *operands: Tensor) -> Tensor:
    return _sum(call, *operands) / len(operands)


# activations


def _leaky_relu(call: Call, x: Tensor) -> Tensor:
    return functional.leaky_relu(x, call.attribute("alpha", 0.01))


def _p_relu(call: Call, x: Tensor, slope: Tensor) -> Tensor:
    del call
    return torch.where(x < 0, x * slope, x)


def _elu(call: Call, x: Tensor) -> Tensor:
    return functional.elu(x, call.attribute("alpha", 1.0))


def _celu(call: Call, x: Tensor) -> Tensor:
    return functional.celu(x, call.attribute("alpha", 1.0))


def _selu(call: Call, x: Tensor) -> Tensor:
    alpha = call.attribute("alpha", 1.67326319217681884765625)
    gamma: float = call.attribute("gamma", 1.05070102214813232421875)
    return gamma * functional.elu(x, alpha)


def _gelu(call: Call, x: Tensor) -> Tensor:
    return functional.gelu(x, approximate=call.attribute("approximate", "none"))


def _hard_sigmoid(call: Call, x: Tensor) -> Tensor:
    scaled = call.attribute("alpha", 0.2) * x + call.attribute("beta", 0.5)
    return torch.clamp(scaled, 0.0, 1.0)


def _thresholded_relu(call: Call, x: Tensor) -> Tensor:
    return torch.where(x > call.attribute("alpha", 1.0), x, torch.zeros_like(x))


OPERATORS = {
    "Abs": plain(torch.abs),
    "Add": plain(torch.add),
    "And": plain(torch.logical_and),
    "Ceil": plain(torch.ceil),
    "Celu": Operator(_celu),
    "Clip": Operator(_clip),
    "Cos": plain(torch.cos),
    "Div": Operator(_div),
    "Elu": Operator(_elu),
    "Equal": plain(torch.eq),
    "Erf": plain(torch.erf),
    "Exp": plain(torch.exp),
    "Floor": plain(torch.floor),
    "Gelu": Operator(_gelu, only(approximate=("none", "tanh"))),
    "Greater": plain(torch.gt),
    "GreaterOrEqual": plain(torch.ge),
    "HardSigmoid": Operator(_hard_sigmoid),
    "HardSwish": plain(functional.hardswish),
    "IsNaN": plain(torch.isnan),
    "LeakyRelu": Operator(_leaky_relu),
    "Less": plain(torch.lt),
    "LessOrEqual": plain(torch.le),
    "Log": plain(torch.log),
    "Max": Operator(_max),
    "Mean": Operator(_mean),
    "Min": Operator(_min),
    "Mish": plain(functional.mish),
    "Mod": Operator(_mod),
    "Mul": plain(torch.mul),
    "Neg": plain(torch.neg),
    "Not": plain(torch.logical_not),
    "Or": plain(torch.logical_or),
    "PRelu": Operator(_p_relu),
    "Pow": Operator(_pow),
    "Reciprocal": plain(torch.reciprocal),
    "Relu": plain(torch.relu),
    "Round": plain(torch.round),
    "Selu": Operator(_selu),
    "Sigmoid": plain(torch.sigmoid),
    "Sign": plain(torch.sign),
    "Sin": plain(torch.sin),
    "Softplus": plain(functional.softplus),
    "Softsign": plain(functional.softsign),
    "Sqrt": plain(torch.sqrt),
    "Sub": plain(torch.sub),
    "Sum": Operator(_sum),
    "Tanh": plain(torch.tanh),
    "ThresholdedRelu": Operator(_thresholded_relu),
    "Where": plain(torch.where),
    "Xor": plain(torch.logical_xor),
}
