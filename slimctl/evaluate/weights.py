"""Quantized weights against the reference's: errors that are small, and all to one side.

Weights that are rounded to nearest, or by a method that lowers the layer's error, are off by less
than a step, to both sides alike. A zero point that is off by one, or weights that were cut off
instead of rounded, move all of them the same way. A layer's output shows that only where many
activations have the same sign, so the weights are looked at themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.evaluate.parameters import Finding
from slimctl.graph.edit import const_array
from slimctl.graph.scaled import recorded_scaling
from slimctl.runtime.kernels.quantize import dequantize_linear

_LAYERS = {"Conv": 0, "ConvTranspose": 1, "Gemm": 1, "MatMul": -1}
"""Axis of the output channels in the weights."""

_SAME_STEPS = 1.5
"""Root mean square difference up to which two tensors are taken for the same weights. Beyond it
they were pruned, or equalized by another tool, or are wrong in a way that the layer's output shows.
"""

_NEAR_ONE = 0.05
"""Folded normalizations scale channels by other factors than this; rounding does not reach it."""

_SHIFT = 0.1
"""Steps by which weights may be off on average. Rounding to nearest gives 0, with a deviation of
0.29 / sqrt(n) for n weights; six deviations are allowed where that is more."""


def check_weights(model: ir.Model, reference: ir.Model) -> list[Finding]:
    """Looks at every layer that both models have under one name."""
    originals = {node.name: node for node in reference.graph if node.op_type in _LAYERS}
    found: list[Finding] = []
    for node in model.graph:
        original = originals.get(node.name)
        if original is not None and original.op_type == node.op_type and not node.domain:
            found.extend(_check(node, original))
    return found


def _check(node: ir.Node, original: ir.Node) -> Iterator[Finding]:
    restorer = None if node.inputs[1] is None else node.inputs[1].producer()
    wanted = const_array(original.inputs[1])
    if restorer is None or restorer.op_type != "DequantizeLinear" or wanted is None:
        return
    arrays = [const_array(value) for value in restorer.inputs]
    if any(a is None for a in arrays[:2]) or "block_size" in restorer.attributes:
        return
    codes, scale = arrays[0], arrays[1]
    assert codes is not None and scale is not None, "it was asked"
    if codes.shape != wanted.shape or not codes.size:
        return
    rank = codes.ndim
    axis = restorer.attributes.get_int("axis", 1) % rank
    if scale.size > 1 and scale.size != codes.shape[axis]:
        return
    zero_point = arrays[2] if len(arrays) > 2 else None
    real = dequantize_linear(codes, scale, zero_point, axis=axis).astype(np.float64)
    meant = wanted.astype(np.float64) / _input_factors(node, wanted.shape)
    steps = _steps(real, meant, scale, axis, _channel_axis(node, rank))
    reason = _shift(steps, wanted)
    if reason:
        value = restorer.inputs[0]
        yield Finding(node.name or "", "" if value is None else value.name or "", reason)


def _input_factors(node: ir.Node, shape: tuple[int, ...]) -> NDArray[Any]:
    """What the channels that a layer reads were multiplied with; broadcasts to its weights."""
    value = _before_codes(node.inputs[0])
    rank = 0 if value is None or value.shape is None else value.shape.rank()
    factors = None if value is None or not rank else recorded_scaling(value, rank)
    channels = 1 if node.op_type != "MatMul" else rank - 1
    if factors is None or factors.size != factors.shape[channels]:
        return np.ones(())
    flat = factors.reshape(-1)
    if node.op_type == "Conv":
        group = node.attributes.get_int("group", 1)
        rows = np.repeat(flat.reshape(group, -1), shape[0] // group, axis=0)  # [o, i / group]
        return rows.reshape(*rows.shape, *(1,) * (len(shape) - 2))
    across = node.op_type == "Gemm" and node.attributes.get_int("transB", 0) != 0
    place = {"ConvTranspose": 0, "MatMul": len(shape) - 2}.get(node.op_type, int(across))
    return flat.reshape([-1 if i == place else 1 for i in range(len(shape))])


def _before_codes(value: ir.Value | None) -> ir.Value | None:
    """The real tensor in front of a Q/DQ pair, or the tensor itself."""
    for maker in ("DequantizeLinear", "QuantizeLinear"):
        node = None if value is None else value.producer()
        if node is not None and node.op_type == maker:
            value = node.inputs[0]
    return value


def _channel_axis(node: ir.Node, rank: int) -> int:
    if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) != 0:
        return 0
    return _LAYERS[node.op_type] % rank


def _steps(
    real: NDArray[Any], wanted: NDArray[Any], scale: NDArray[Any], axis: int, channels: int
) -> NDArray[Any]:
    """Differences in steps, from the reference's weights with the folded factors of channels."""
    others = tuple(i for i in range(real.ndim) if i != channels)
    power = np.sum(wanted * wanted, axis=others, keepdims=True)
    factors = np.sum(real * wanted, axis=others, keepdims=True) / np.where(power > 0, power, 1.0)
    if np.all(np.abs(factors - 1.0) < _NEAR_ONE):
        factors = np.ones_like(factors)
    shape = [1] * real.ndim
    if scale.size > 1:
        shape[axis] = scale.size
    return np.asarray((real - factors * wanted) / scale.astype(np.float64).reshape(shape))


def _shift(steps: NDArray[Any], wanted: NDArray[Any]) -> str:
    """What is wrong with the differences; empty if nothing is."""
    if math.sqrt(float(np.mean(steps * steps))) > _SAME_STEPS:
        return ""
    allowed = max(_SHIFT, 6 * 0.29 / math.sqrt(steps.size))
    mean, inward = float(steps.mean()), float(np.mean(steps * np.sign(wanted)))
    if abs(mean) > allowed:
        return (
            f"its weights are {mean:+.2f} steps off on average: a zero point, or rounding one way"
        )
    if inward < -allowed:
        return f"its weights are {-inward:.2f} steps too small on average: cut off, not rounded"
    return ""
