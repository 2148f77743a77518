"""Integer weights for layers whose activations are quantized at run time.

Unlike in Q/DQ graphs nothing about the bias matters here: it is added in float. Any constant
float32 matrix, or stack of matrices, on the right will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.target import WeightType
from slimctl.graph.edit import const_array
from slimctl.numerics.affine import (
    INT8_NARROW,
    INT8_REDUCED,
    SMALLEST_SCALE,
    quantize,
    symmetric_scales,
)

_MIDDLE: Final = 128  # zero point of uint8 weights


@dataclass(frozen=True)
class IntegerWeight:
    """A weight as integers.

    Attributes:
        values: int8 or uint8, [..., K, N].
        scale: float32, [N] or [].
        zero_point: Of the type of the values, [N] or [].
    """

    values: NDArray[np.integer[Any]]
    scale: NDArray[np.float32]
    zero_point: NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Rounding:
    """How weights become integers.

    Attributes:
        per_channel: One scale for each output channel.
        reduce_range: 7 bits: kernels without VNNI add pairs of products in 16 bits.
        kind: int8, or uint8 around 128.
    """

    per_channel: bool
    reduce_range: bool
    kind: WeightType

    def round(self, weight: NDArray[np.float32]) -> IntegerWeight:
        """Symmetric integers, ``q = rint(w / s)`` with ``s = max |w| / 127``.

        Args:
            weight: [..., K, N]; the maximum runs over K for each column of a matrix, or over all.
        """
        # uint8 x uint8 products do not saturate: nothing is to be reduced there.
        kind = INT8_REDUCED if self.reduce_range and self.kind == "int8" else INT8_NARROW
        # onnxruntime's kernels take one scale per column of a matrix, and not of a stack of them.
        axis = 1 if self.per_channel and weight.ndim == 2 else None
        scale = symmetric_scales(weight, axis, kind)
        values = quantize(weight, scale, np.zeros(scale.shape, np.int8), kind, axis)
        if self.kind == "int8":
            return IntegerWeight(values, scale, np.zeros(scale.shape, np.int8))
        shifted = (values.astype(np.int16) + _MIDDLE).astype(np.uint8)
        return IntegerWeight(shifted, scale, np.full(scale.shape, _MIDDLE, np.uint8))


def weight_array(value: ir.Value | None, ndim: int | None = None) -> NDArray[np.float32] | str:
    """The constant weight behind an input, or the reason why it cannot become integers.

    Args:
        value: An input of a node.
        ndim: How many dimensions it must have; any above one if not given.
    """
    array = const_array(value)
    if array is None:
        return "the weight is computed at run time"
    if array.dtype != np.float32 or array.size == 0:
        return f"the weight is {array.dtype} {list(array.shape)}: there is nothing to round"
    if array.ndim < 2 or (ndim is not None and array.ndim != ndim):
        return f"the weight has {array.ndim} dimension(s)"
    if not np.isfinite(array).all():
        return "the weight holds NaN or infinite values"
    if 0 < np.abs(array).max() <= INT8_NARROW.high * SMALLEST_SCALE:
        return "the weights are too small: their scale would not be a normal float32"
    return array
