"""Weights of 2, 4 or 8 bits in blocks: products with them, and rows of tables."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from slimctl.numerics.blocks import row_slices, unpack
from slimctl.runtime.floats import in_float32
from slimctl.runtime.registry import MICROSOFT, Array, operator


@operator("MatMulNBits", since=1, domain=MICROSOFT)
@in_float32
def matmul_n_bits(
    a: Array,
    b: Array,
    scales: Array,
    zero_points: Array | None = None,
    g_idx: Array | None = None,
    bias: Array | None = None,
    *,
    k: int,
    n: int,
    accuracy_level: int = 0,
    bits: int = 4,
    block_size: int,
    weight_prepacked: int = 0,
) -> Array:
    """A times the transpose of (codes - zero point) scale, plus the bias.

    The weights become float32, some rows at a time, whatever accuracy_level says: with 4
    onnxruntime may quantize A too, which is not done here.

    Args:
        a: [..., k].
        b: Codes [n, k blocks, block_size * bits / 8], the first code in the lowest bits.
        scales: [n, k blocks] or flat.
        zero_points: Codes [n, bytes] of the blocks, packed as b; or floats [n, k blocks]; or flat.
            The middle of the codes where they are None.
        g_idx: Not supported: onnxruntime has deprecated it.
        bias: [n].
        k: Terms of the sums.
        n: Outputs.
        accuracy_level: Changes nothing.
        bits: Of a code.
        block_size: Codes with the same scale.
        weight_prepacked: Layouts for GPUs are not supported.
    """
    del accuracy_level
    if g_idx is not None or weight_prepacked:
        raise ValueError("weights in another order (g_idx, weight_prepacked) are not supported")
    y = np.zeros((*a.shape[:-1], n), a.dtype)
    if b.size:  # an empty matrix stands for a product that was left out
        blocks = -(-k // block_size)
        shape = (n, blocks, 1)
        zeros = _block_zeros(zero_points, n, blocks, bits)
        scales = scales.reshape(shape)
        for rows in row_slices((n, k)):
            codes = unpack(b[rows], bits, block_size).astype(a.dtype)  # [rows, blocks, block size]
            weights = ((codes - zeros[rows]) * scales[rows]).reshape(len(codes), -1)[:, :k]
            y[..., rows] = a @ weights.T
    if bias is not None:
        y += bias
    return y


def _block_zeros(zero_points: Array | None, n: int, blocks: int, bits: int) -> Array:
    """The zero points of all blocks as float32, [n, blocks, 1]."""
    if zero_points is None:
        return np.full((n, blocks, 1), 2 ** (bits - 1), np.float32)
    if zero_points.dtype == np.uint8:
        zero_points = unpack(zero_points.reshape(n, -1), bits, blocks)
    return zero_points.reshape(n, blocks, 1).astype(np.float32)


@operator("GatherBlockQuantized", since=1, domain=MICROSOFT)
@in_float32
def gather_block_quantized(
    data: Array,
    indices: Array,
    scales: Array,
    zero_points: Array | None = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> Array:
    """Gather of (data - zero point) scale, where blocks along quantize_axis share both.

    Bytes hold codes of so many bits along the last axis, the first in the lowest bits. An index
    outside the axis gives zeros.
    """
    along, across = gather_axis % data.ndim, quantize_axis % data.ndim
    packed = data.dtype == np.uint8
    if packed and along in (across, data.ndim - 1):
        raise ValueError("bytes cannot be gathered along the axis of their blocks or of their bits")
    size, flat = data.shape[along], indices.reshape(-1)
    inside = (flat >= -size) & (flat < size)
    flat = np.where(inside, flat % size, 0)
    codes = data.take(flat, axis=along)
    if packed:
        codes = unpack(codes, bits, codes.shape[-1] * 8 // bits)
    values = codes.astype(scales.dtype)
    chosen = _Blocks(along, across, flat, codes.shape[across], block_size)
    if packed:
        middle = np.full(scales.shape, 2 ** (bits - 1), np.uint8)
        zero_points = middle if zero_points is None else unpack(zero_points, bits, scales.shape[-1])
    if zero_points is not None:
        values -= chosen.of(zero_points).astype(scales.dtype)
    values *= chosen.of(scales)
    values[(*(slice(None),) * along, ~inside)] = 0
    return values.reshape(*values.shape[:along], *indices.shape, *values.shape[along + 1 :])


class _Blocks(NamedTuple):
    """Parameters of blocks for the elements that were gathered.

    Attributes:
        along: Axis that was gathered.
        across: Axis of the blocks.
        flat: Indices, not negative.
        length: Elements along the axis of the blocks.
        block_size: Of its blocks; 0 is one block for the whole axis.
    """

    along: int
    across: int
    flat: Array
    length: int
    block_size: int

    def of(self, parameters: Array) -> Array:
        """One parameter for each element, or one that broadcasts."""
        size = self.block_size or self.length
        if self.along == self.across:
            return parameters.take(self.flat // size, axis=self.along)
        if parameters.shape[self.along] > 1:
            parameters = parameters.take(self.flat, axis=self.along)
        blocks = np.arange(self.length) // size
        return parameters.take(blocks, axis=self.across)
