"""Quantized weights of a layer as floats that quantize to them: where training begins."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.edit import const_array
from slimctl.numerics.affine import QuantizedType, along, dequantize, quantize
from slimctl.passes._quantized_layers import code_holder

_LIMITS: Final = {4: 7, 8: 127}
"""Largest magnitude of a weight's code by its bits."""

_PAIRED: Final = 64
"""The same where two products must fit 16 bits; 255 * (64 + 64) <= 32767."""

_TINY: Final = 1e-3
"""Steps by which a weight of code 0 is off zero: what is exactly zero was pruned, and stays so."""


class Codes(NamedTuple):
    """A stored weight.

    Attributes:
        holder: The node whose first input is the codes.
        values: The codes.
        scale: [channels] or [].
        zero_point: As the scale, of the type that kernels read.
        axis: Of the channels, None for one scale.
    """

    holder: ir.Node
    values: NDArray[Any]
    scale: NDArray[Any]
    zero_point: NDArray[Any]
    axis: int | None

    @property
    def middle(self) -> int:
        """The code of zero."""
        return int(self.zero_point.reshape(-1)[0])

    def restored(self) -> NDArray[np.float32]:
        """What kernels compute with."""
        return dequantize(self.values, self.scale, self.zero_point, self.axis)


def read_codes(restorer: ir.Node) -> Codes | None:
    """What a DQ of a weight holds; None where scales are computed or of blocks."""
    holder = code_holder(restorer)
    arrays = [const_array(value) for value in restorer.inputs[1:]]
    values = None if holder is None else const_array(holder.inputs[0])
    if holder is None or values is None or arrays[0] is None or "block_size" in restorer.attributes:
        return None
    scale = arrays[0]
    zero = arrays[1] if len(arrays) > 1 else None
    if zero is None:
        wide = values.dtype if values.dtype.kind in "iu" else np.dtype(np.int8)
        zero = np.zeros(scale.shape, wide)
    axis = restorer.attributes.get_int("axis", 1) if scale.size > 1 else None
    return Codes(holder, values, scale, zero, axis)


def used_codes(codes: Codes, *, paired: bool) -> QuantizedType:
    """The codes that the weight may have.

    Args:
        codes: It.
        paired: Two products must fit 16 bits.
    """
    bits = ir.DataType.from_numpy(codes.values.dtype).bitwidth
    limit = min(_LIMITS[bits], _PAIRED if paired else _LIMITS[8])
    return QuantizedType(codes.zero_point.dtype, codes.middle - limit, codes.middle + limit)


def widened_scale(codes: Codes, kind: QuantizedType) -> NDArray[np.float32]:
    """Scales such that the codes of a type suffice: those that are stored where they do."""
    shifted = along(codes.zero_point, codes.axis, codes.values.ndim).astype(np.int32)
    sizes = np.abs(codes.values.astype(np.int32) - shifted)
    others = tuple(i for i in range(sizes.ndim) if codes.axis is None or i != codes.axis)
    excess = sizes.max(axis=others).reshape(codes.scale.shape) / (kind.high - codes.middle)
    return np.asarray(codes.scale * np.maximum(excess, 1.0), np.float32)


def latent_floats(
    codes: Codes, scale: NDArray[np.float32], kind: QuantizedType, original: NDArray[Any] | None
) -> tuple[NDArray[np.float32], bool]:
    """Floats that quantize to the codes, or to their neighbors.

    Args:
        codes: The stored weight.
        scale: Of the floats.
        kind: Codes that are used.
        original: The weight before it was quantized, if it is known.

    Returns:
        The original, if its codes are the stored ones to within one, which rounding by other rules
        than to the nearest gives; else the restored weight, off zero where the original is. And
        whether it is the original.
    """
    restored = codes.restored()
    if original is None or original.shape != restored.shape:
        signs = np.ones_like(restored)
    else:
        floats = original.astype(np.float32)
        tried, stored = (
            quantize(each, scale, codes.zero_point, kind, codes.axis).astype(np.int32)
            for each in (floats, restored)
        )
        if np.abs(tried - stored).max(initial=0) <= 1:
            return floats, True
        signs = np.sign(floats)
    tiny = _TINY * signs * along(scale, codes.axis, restored.ndim)
    return np.where(restored == 0, tiny, restored).astype(np.float32), False
