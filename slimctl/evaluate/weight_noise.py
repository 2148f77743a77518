"""How far rounded weights must be expected to move a layer's output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimctl.runtime.plan import Step
from slimctl.runtime.registry import Value

_OUTPUT_SCALE = {"QLinearConv": 6, "QLinearMatMul": 6, "QGemm": 7}
"""Place of the output's scale among the inputs of operators with weights."""


def weight_noise(
    step: Step, values: NDArray[Any], constants: Mapping[str, Value]
) -> NDArray[np.float64] | None:
    """Variance of the output that rounding the weights to nearest causes, in steps of the output.

    A weight's error is uniform within half a step to both sides, its variance a twelfth of the
    squared step (Widrow and Kollar, Quantization Noise, 2008, section 4), and errors of different
    weights are independent: ``sum(x^2) s_w^2 / 12`` for the sum of products, where ``sum(x^2)`` is
    taken as the number of weights times the mean of ``x^2``.

    Args:
        step: A convolution or matrix product of codes.
        values: Its left input, real values.
        constants: Of the graph.

    Returns:
        One number per output channel, or one in all; None for other operators, and for weights that
        are computed.
    """
    place = _OUTPUT_SCALE.get(step.op_type)
    if place is None or len(step.inputs) <= place:
        return None
    weights, scale, output = (constants.get(step.inputs[i]) for i in (3, 4, place))
    if weights is None or scale is None or output is None:
        return None
    terms = _terms(step, weights)
    power = terms * float(np.mean(np.square(values, dtype=np.float64)))
    step_sizes = scale.astype(np.float64).reshape(-1) / float(output.reshape(()))
    return np.asarray(power * np.square(step_sizes) / 12)


def _terms(step: Step, weights: NDArray[Any]) -> int:
    """Products in one sum."""
    if step.op_type == "QLinearConv":
        return math.prod(weights.shape[1:])
    if step.op_type == "QGemm":
        return int(weights.shape[1] if step.attributes.get("transb") else weights.shape[0])
    return int(weights.shape[-2]) if weights.ndim > 1 else 1
