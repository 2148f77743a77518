"""Quantization in blocks: neighboring weights of one output share a scale and a zero point.

Everywhere here codes are unsigned, ``0 .. 2^bits - 1``, and ``w = (code - zero_point) * scale``.
A signed type stores ``code - 2^(bits-1)``; symmetric means that the zero point is ``2^(bits-1)``.
Rounding is that of :mod:`slimctl.numerics.affine`: ``rint(w / scale) + zero_point``, saturated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from slimctl.numerics.affine import SMALLEST_SCALE

Matrix = NDArray[np.float32]
Codes = NDArray[np.uint8]

_FACTORS: Final = {
    2: np.linspace(0.4, 1.05, 14, dtype=np.float32),
    4: np.linspace(0.65, 1.1, 10, dtype=np.float32),
    8: np.linspace(1.0, 1.08, 5, dtype=np.float32),
}
"""Tried scales, relative to the one that clips nothing. On normal and Laplace weights in blocks of
16 to 512, a grid eight times as fine gains below 0.1 dB at 2 and 4 bits, 1 dB at 8 bits."""

_AT_ONCE: Final = 1 << 17
"""Weights that are searched together: their temporaries stay in the cache of the processor."""

_BYTE: Final = 8
_TINY: Final = np.float32(1e-30)


class Grid(NamedTuple):
    """Which numbers blocks can hold.

    Attributes:
        bits: 2, 4 or 8.
        symmetric: The zero point is the middle.
        dtype: In which scales are stored, float32 or float16.
    """

    bits: int
    symmetric: bool
    dtype: np.dtype[Any] = np.dtype(np.float32)

    @property
    def highest(self) -> int:
        """The largest code."""
        return int(2**self.bits - 1)

    @property
    def middle(self) -> int:
        """The zero point of symmetric blocks."""
        return int(2 ** (self.bits - 1))


class Parameters(NamedTuple):
    """Scales and zero points of blocks; of one shape.

    Attributes:
        scale: Positive, exact in the type in which it is stored.
        zero_point: Within the codes; whole numbers, but for those of half-quadratic quantization.
    """

    scale: Matrix
    zero_point: Matrix


@dataclass(frozen=True)
class Blocks:
    """A quantized matrix.

    Attributes:
        codes: [outputs, inputs]
        parameters: Each [outputs, blocks]; the last block of an output may be shorter.
        block: Inputs per block.
        grid: What the codes mean.
    """

    codes: Codes
    parameters: Parameters
    block: int
    grid: Grid

    def restored(self, part: slice = slice(None)) -> Matrix:
        """The matrix that is computed with, or some outputs of it, float32 [outputs, inputs]."""
        found = self.codes[part].astype(np.float32)
        found -= per_input(self.parameters.zero_point[part], self.block, found.shape[1])
        found *= per_input(self.parameters.scale[part], self.block, found.shape[1])
        return found

    def squared_error(self, matrix: Matrix) -> float:
        """``||W - W'||^2``."""
        parts = row_slices(matrix.shape)
        errors = (np.sum((self.restored(part) - matrix[part]) ** 2, dtype=float) for part in parts)
        return float(sum(errors))


def per_input(values: NDArray[Any], block: int, inputs: int) -> NDArray[Any]:
    """[outputs, blocks] -> [outputs, inputs], every value as often as its block has inputs."""
    return np.repeat(values, block, axis=1)[:, :inputs]


def in_blocks(matrix: NDArray[Any], block: int) -> NDArray[Any]:
    """[outputs, inputs] -> [outputs, blocks, block]; what the last block lacks is zero."""
    missing = -matrix.shape[1] % block
    padded = np.pad(matrix, ((0, 0), (0, missing))) if missing else matrix
    return padded.reshape(len(matrix), -1, block)


def extreme_parameters(blocks: Matrix, grid: Grid) -> Parameters:
    """Parameters that clip nothing: each range is widened to hold zero.

    An all-zero block gets scale 1: any positive scale represents it exactly.

    Args:
        blocks: [..., block], finite.
        grid: What they can hold.
    """
    low, high, scale = _extremes(blocks, grid)
    return _parameters(scale, _centered(low, high, scale, grid), grid)


def spanning_parameters(blocks: Matrix, grid: Grid) -> Parameters:
    """Parameters with the smallest weight at code 0 and the largest at the highest code.

    ``scale = (max - min) / highest``, ``zero_point = -min / scale``: a fraction, and outside the
    codes where zero lies outside the block. Weights that were restored from a scale and a smallest
    value (Q4_1 of llama.cpp) lie on this grid, and are stored without loss. Equal weights get
    scale 1 and code 0.

    Args:
        blocks: [..., block], finite.
        grid: Not symmetric.
    """
    low, high = blocks.min(axis=-1), blocks.max(axis=-1)
    bound = high / grid.highest - low / grid.highest
    # Guard before anything divides: equal or subnormal weights have no meaningful scale.
    scale = np.where(bound > SMALLEST_SCALE, bound, np.float32(1)).astype(np.float32)
    stored, _ = _parameters(scale, low, grid)
    return Parameters(stored, storable(-low / stored, grid))


def storable(zero_point: Matrix, grid: Grid) -> Matrix:
    """Fractional zero points as the type of the scales holds them."""
    limit = np.finfo(grid.dtype).max
    return np.clip(zero_point, -limit, limit).astype(grid.dtype).astype(np.float32)


def searched_parameters(
    blocks: Matrix, grid: Grid, importance: NDArray[np.float32] | None = None
) -> Parameters:
    """Parameters with a small squared error ``sum(importance * (w - restored)^2)``.

    For each of a few scales the codes are fixed, and the best scale for these codes is that of
    least squares, ``<w, c> / <c, c>`` with ``c = code - zero_point``; its error is known without
    rounding again.

    Args:
        blocks: [..., block], finite.
        grid: What they can hold.
        importance: Weight of each squared error, not negative, broadcast to the blocks.
    """
    rows = blocks.reshape(-1, blocks.shape[-1])
    scale = np.empty((len(rows), 1), np.float32)
    zero_point = np.empty((len(rows), 1), np.float32)
    if importance is not None:
        importance = np.broadcast_to(importance, blocks.shape)
        importance = importance.reshape(rows.shape)
    for part in row_slices(rows.shape):
        weights = None if importance is None else importance[part]
        scale[part], zero_point[part] = _search(rows[part], grid, weights)
    shape = blocks.shape[:-1]
    return Parameters(scale.reshape(shape), zero_point.reshape(shape))


def _search(rows: Matrix, grid: Grid, importance: NDArray[np.float32] | None) -> Parameters:
    """One part, [rows, block] -> [rows, 1] each."""
    low, high, base = _extremes(rows, grid, keepdims=True)
    # In units of the base scale nothing overflows or vanishes.
    units, low, high = rows / base, low / base, high / base
    best = np.zeros(base.shape, np.float32)
    scale, zero_point = np.ones_like(base), _centered(low, high, np.float32(1), grid)
    weighted = units if importance is None else units * importance
    for factor in _FACTORS[grid.bits]:
        tried = _centered(low, high, factor, grid)
        steps = np.rint(units / factor)
        # np.clip takes four times as long where its bounds are arrays.
        np.maximum(steps, -tried, out=steps)
        np.minimum(steps, grid.highest - tried, out=steps)
        products = _dot(weighted, steps)
        squares = _dot(steps if importance is None else steps * importance, steps)
        fitted = products / np.maximum(squares, _TINY)
        gain = np.where(fitted > 0, fitted * products, 0)
        better = gain > best
        best = np.where(better, gain, best)
        scale = np.where(better, fitted, scale)
        zero_point = np.where(better, tried, zero_point)
    return _parameters(scale * base, zero_point, grid)


def _dot(left: Matrix, right: Matrix) -> Matrix:
    found: Matrix = np.einsum("rb,rb->r", left, right)[:, None]
    return found


def _extremes(blocks: Matrix, grid: Grid, keepdims: bool = False) -> tuple[Matrix, Matrix, Matrix]:
    """Ends of the ranges, and the scale at which they are just representable."""
    low = np.minimum(blocks.min(axis=-1, keepdims=keepdims), 0)
    high = np.maximum(blocks.max(axis=-1, keepdims=keepdims), 0)
    if grid.symmetric:
        bound = np.maximum(high / (grid.highest - grid.middle), -low / grid.middle)
    else:  # divided first: the difference of two float32 extremes overflows
        bound = high / grid.highest - low / grid.highest
    # Guard before anything divides: an all-zero or subnormal range has no meaningful scale.
    return low, high, np.where(bound > SMALLEST_SCALE, bound, np.float32(1)).astype(np.float32)


def _centered(low: Matrix, high: Matrix, scale: Matrix | np.float32, grid: Grid) -> Matrix:
    """Zero points at which what lies outside the codes is the same on both sides."""
    if grid.symmetric:
        return np.full(low.shape, grid.middle, np.float32)
    middle = grid.highest / 2 - (low / scale + high / scale) / 2
    return np.clip(np.rint(middle), 0, grid.highest).astype(np.float32)


def _parameters(scale: Matrix, zero_point: Matrix, grid: Grid) -> Parameters:
    limits = np.finfo(grid.dtype)
    smallest = SMALLEST_SCALE if grid.dtype == np.float32 else float(limits.smallest_subnormal)
    stored = np.clip(scale, smallest, float(limits.max)).astype(grid.dtype)
    return Parameters(stored.astype(np.float32), zero_point)


def round_blocks(matrix: Matrix, parameters: Parameters, block: int, grid: Grid) -> Blocks:
    """Rounds every weight to the nearest code.

    Args:
        matrix: [outputs, inputs], finite.
        parameters: Each [outputs, blocks].
        block: Inputs per block.
        grid: What the codes mean.
    """
    codes = np.empty(matrix.shape, np.uint8)
    whole = np.array_equal(np.rint(parameters.zero_point), parameters.zero_point)
    for part in row_slices(matrix.shape):
        steps = matrix[part] / per_input(parameters.scale[part], block, matrix.shape[1])
        if whole:
            np.rint(steps, out=steps)
        steps += per_input(parameters.zero_point[part], block, matrix.shape[1])
        np.rint(steps, out=steps)  # rounds once, whether the zero point is whole or not
        codes[part] = np.clip(steps, 0, grid.highest, out=steps)
    return Blocks(codes, parameters, block, grid)


def row_slices(shape: tuple[int, ...]) -> Iterator[slice]:
    """Parts of a matrix whose temporaries are small."""
    step = max(_AT_ONCE // max(shape[1], 1), 1)
    return (slice(start, start + step) for start in range(0, shape[0], step))


# storage


def pack(codes: Codes, bits: int) -> Codes:
    """Codes as bytes along the last axis, the first code in the lowest bits.

    The layout of com.microsoft MatMulNBits and GatherBlockQuantized. What the last byte lacks is 0.
    """
    each = _BYTE // bits
    missing = -codes.shape[-1] % each
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    parts = padded.reshape(*codes.shape[:-1], -1, each)
    packed = np.zeros(parts.shape[:-1], np.uint8)
    for place in range(each):
        packed |= parts[..., place] << np.uint8(bits * place)
    return packed


def unpack(packed: Codes, bits: int, count: int) -> Codes:
    """The inverse of :func:`pack` for so many codes."""
    each = _BYTE // bits
    shifts = np.arange(each, dtype=np.uint8) * np.uint8(bits)
    codes = (packed[..., None] >> shifts) & np.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-1], -1)[..., :count]


def signed(codes: Codes, grid: Grid, dtype: DTypeLike) -> NDArray[Any]:
    """Codes of a signed type: the middle of the unsigned ones is zero."""
    return (codes.astype(np.int16) - grid.middle).astype(np.int8).astype(dtype)
