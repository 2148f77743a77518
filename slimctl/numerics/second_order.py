"""Rounds weights so that what a layer computes changes least, and not each weight.

Rounding input ``j`` of a matrix leaves an error that the inputs behind it can make good for, as far
as they go together with it. With the second moments ``H = E[x x^T]`` and ``H^-1 = U^T U``, ``U``
upper, the best they can do is to take ``(w_j - q_j) / U_jj`` times the rest of row ``j`` of ``U``
off (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", ICLR 2023, section 3). Strong inputs come first: most is left to make good for them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_BLOCK: Final = 64
"""Inputs whose updates are gathered before the inputs behind them see them."""

_LEAST: Final = 1e-6
"""Added to the diagonal, relative to its mean: an input that is always the same gets a pivot."""

_SMALL: Final = 64

_LIBRARY: Final = 128
"""Size up to which the library's Cholesky factorization is taken. Single-threaded OpenBLAS 0.3 does
a sixth of the operations per second there that it does in a product of large matrices."""


def round_second_order(
    matrix: Array, scale: Array, moments: Array, *, low: int, high: int, ridge: float
) -> NDArray[np.int64]:
    """Codes with a small ``E||(W - s Q) x||^2``.

    Args:
        matrix: Weights ``W`` [groups, outputs, inputs].
        scale: Step ``s`` of each output [groups, outputs], positive.
        moments: ``E[x x^T]`` [groups, inputs, inputs], of the mean-free inputs where a bias takes
            up mean errors.
        low: Smallest code.
        high: Largest code.
        ridge: Added to the diagonal of the moments, as a share of it. Correlations of few samples
            are partly chance.

    Returns:
        [groups, outputs, inputs]
    """
    strength = np.diagonal(moments, axis1=1, axis2=2)  # [groups, inputs]
    order = np.argsort(-strength, axis=1, kind="stable")
    columns = order[:, None, :]
    ordered = np.take_along_axis(np.take_along_axis(moments, order[:, :, None], 1), columns, 2)
    factor = inverse_factor(_ridged(ordered, ridge))
    found = _round(np.take_along_axis(matrix, columns, 2), scale, factor, low, high)
    codes = np.empty_like(found)
    np.put_along_axis(codes, np.broadcast_to(columns, found.shape), found, 2)
    return codes


def rounding_error(difference: Array, moments: Array) -> float:
    """``E||D x||^2`` summed over groups and outputs, for ``D`` [groups, outputs, inputs]."""
    return max(float(np.sum((difference @ moments) * difference)), 0.0)


def _round(matrix: Array, scale: Array, factor: Array, low: int, high: int) -> NDArray[np.int64]:
    left = matrix.copy()
    codes = np.empty(matrix.shape, np.int64)
    inputs = matrix.shape[2]
    for start in range(0, inputs, _BLOCK):
        stop = min(start + _BLOCK, inputs)
        errors = np.empty((*matrix.shape[:2], stop - start))
        for place in range(start, stop):
            code = np.clip(np.rint(left[:, :, place] / scale), low, high)
            codes[:, :, place] = code
            row = factor[:, None, place, place:stop]  # [groups, 1, inputs from here]
            error = (left[:, :, place] - code * scale) / row[:, :, 0]
            left[:, :, place:stop] -= error[:, :, None] * row
            errors[:, :, place - start] = error
        left[:, :, stop:] -= errors @ factor[:, start:stop, stop:]
    return codes


def _ridged(moments: Array, ridge: float) -> Array:
    found = moments.copy()
    diagonal = np.diagonal(moments, axis1=1, axis2=2)
    least = _LEAST * diagonal.mean(axis=1, keepdims=True) + 1e-30
    index = np.arange(moments.shape[1])
    found[:, index, index] = diagonal * (1.0 + ridge) + least
    return found


def inverse_factor(moments: NDArray[Any]) -> NDArray[Any]:
    """The upper ``U`` with ``moments^-1 = U^T U``, of matrices [..., n, n], in their type.

    Factored from the last row on: ``moments = R R^T`` with ``R`` upper, and ``U = R^-1``. Of halves
    ``[[A, B], [B^T, C]] = [[R1, S], [0, R2]] [[R1, S], [0, R2]]^T``, so that ``C = R2 R2^T``,
    ``S = B R2^-T`` and ``R1 R1^T = A - S S^T``; the inverse of the whole is
    ``[[R1^-1, -R1^-1 S R2^-1], [0, R2^-1]]``. Nearly all of that are products.
    """
    size = moments.shape[-1]
    if size <= _LIBRARY:
        backwards = np.linalg.cholesky(moments[..., ::-1, ::-1])[..., ::-1, ::-1]
        return upper_inverse(np.ascontiguousarray(backwards))
    half = size // 2
    behind = inverse_factor(moments[..., half:, half:])
    across = moments[..., :half, half:] @ behind.swapaxes(-1, -2)
    front = inverse_factor(moments[..., :half, :half] - across @ across.swapaxes(-1, -2))
    found = np.zeros_like(moments)
    found[..., :half, :half] = front
    found[..., half:, half:] = behind
    found[..., :half, half:] = -(front @ across) @ behind
    return found


def upper_inverse(matrix: NDArray[Any]) -> NDArray[Any]:
    """Inverse of upper triangular matrices [..., n, n], by halves: an eighth of the usual work."""
    size = matrix.shape[-1]
    if size <= _SMALL:
        return np.triu(np.linalg.inv(matrix))
    half = size // 2
    found = np.zeros_like(matrix)
    found[..., :half, :half] = upper_inverse(matrix[..., :half, :half])
    found[..., half:, half:] = upper_inverse(matrix[..., half:, half:])
    found[..., :half, half:] = -found[..., :half, :half] @ (
        matrix[..., :half, half:] @ found[..., half:, half:]
    )
    return found
