"""Step sizes that are learned (LSQ): gradients are scaled, and what integers ask for is kept.

A scale s is learned as t with s = exp(t). Esser et al., "Learned step size quantization", ICLR
2020, section 2.2, multiply the gradient by s with g = 1 / sqrt(N Q_P), so that a scale changes, for
its size, about as fast as the weights. A step of plain gradient descent on t moves s by s dt;
multiplying the gradient by t, s dL/ds, with g / s² makes that the paper's step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slimctl.training.module import TrainableGraph
from slimctl.training.tensors import to_numpy

_FARTHEST = math.log(10.0)
"""How far a scale may go from where it began: what calibration found is not off by an order."""


@dataclass(frozen=True)
class Step:
    """A scale that is learned.

    Attributes:
        name: Of the logarithm.
        elements: N of the paper.
        highest: Q_P of the paper.
    """

    name: str
    elements: int
    highest: int


@dataclass(frozen=True)
class Bound:
    """An int32 bias: the scale of its layer's weight must not become too small for it.

    Attributes:
        bias: Name of the bias as floats.
        weight: Name of the logarithm of the weight's scale.
        data: Name of the logarithm of the input's scale, or that scale where it is not learned.
    """

    bias: str
    weight: str
    data: str | float


class Scales:
    """Scales of a module that learns.

    Args:
        module: Has their logarithms among its weights.
        steps: They.
        bounds: What they must keep to.
        largest: Largest magnitude of an int32 bias.
    """

    def __init__(
        self, module: TrainableGraph, steps: Sequence[Step], bounds: Sequence[Bound], largest: int
    ) -> None:
        self._parameters = dict(zip(module.learned, module.weights, strict=True))
        self._names = [step.name for step in steps]
        self._bounds, self._largest = bounds, largest
        self._start = {name: self._parameters[name].detach().clone() for name in self._names}
        self._module = module
        for step in steps:
            factor = 1.0 / math.sqrt(max(step.elements, 1) * step.highest)
            parameter = self._parameters[step.name]
            parameter.register_hook(_Scaled(parameter, factor))

    @torch.no_grad()
    def keep(self) -> None:
        """Moves scales back to where they may be; called after each step."""
        for name, start in self._start.items():
            parameter = self._parameters[name]
            middle = start.to(parameter.device)
            parameter.clamp_(middle - _FARTHEST, middle + _FARTHEST)
        for bound in self._bounds:
            self._keep_bound(bound)

    def _keep_bound(self, bound: Bound) -> None:
        weight = self._parameters[bound.weight]
        if isinstance(bound.data, str):
            data = self._parameters[bound.data].reshape(()).exp()
        else:
            data = torch.tensor(bound.data, device=weight.device)
        bias = self._module.values()[bound.bias] if bound.bias in self._parameters else None
        if bias is None:
            return
        needed = bias.abs() / (data * self._largest)
        # one scale for all, or for the channels of every group of a ConvTranspose
        needed = needed.reshape(-1, weight.numel()).amax(0).reshape(weight.shape)
        weight.copy_(torch.maximum(weight, needed.clamp_min(1e-37).log()))

    def values(self) -> dict[str, NDArray[np.float32]]:
        """The scales by the names of their logarithms, as the module computes them."""
        with torch.no_grad():
            return {name: to_numpy(self._parameters[name].exp().cpu()) for name in self._names}


class _Scaled:
    """A hook: the gradient by a scale as the paper has it."""

    def __init__(self, parameter: Tensor, factor: float) -> None:
        self._parameter, self._factor = parameter, factor

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient * self._factor * torch.exp(-2.0 * self._parameter.detach())


def learned_arrays(values: Mapping[str, Tensor]) -> dict[str, NDArray[np.generic]]:
    """What a module learned and measured, as arrays."""
    return {name: to_numpy(tensor.detach().cpu()) for name, tensor in values.items()}
