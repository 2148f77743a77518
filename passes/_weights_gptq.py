"""Rounds weights one input at a time and lets those that are still open make good for the error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
ICLR 2023, algorithm 1: with ``H`` the second moments of the inputs and ``H^-1 = U^T U``, ``U``
upper, rounding input ``j`` leaves ``e = (w_j - q_j) / U_jj``, and what follows in ``j``'s row of
``U`` says how the weights behind it make good for it. Scales and zero points of blocks are those
with the least error in which an input counts as much as it is strong. All outputs at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slimctl.numerics.blocks import (
    Blocks,
    Codes,
    Grid,
    Matrix,
    Parameters,
    in_blocks,
    searched_parameters,
)
from slimctl.numerics.second_order import inverse_factor
from slimctl.passes._obs import ridged

_STEP: Final = 32
"""Inputs that see each other's errors one at a time; those of all inputs in front of them come in
one product (section 3.3). Weights are brought up to date when they are reached, and not whenever
one in front of them was rounded: so each is written once, and not once per step."""

_OUTPUTS: Final = 4096
"""Outputs that are worked on together; bounds the memory."""

_EASY: Final = 1e-2
"""Damping from which float32 does for the factor. With a share ``d`` added to its diagonal a matrix
of correlations has eigenvalues from ``d / (1 + d)`` on, far above what float32 leaves of it."""


class Correction(NamedTuple):
    """How GPTQ goes about it.

    Attributes:
        damping: Added to the diagonal of the second moments, as a share of it.
        act_order: Strong inputs first, while many weights are left that can make good for them;
            blocks then keep the parameters of the original weights.
    """

    damping: float
    act_order: bool


class Plan(NamedTuple):
    """What all matrices that multiply one tensor share.

    Attributes:
        order: Inputs in the order in which they are rounded.
        factor: ``U``, float32, in that order.
        importance: Mean square of each input, in their own order.
    """

    order: NDArray[np.int64]
    factor: Matrix
    importance: Matrix


def make_plan(moments: Matrix, how: Correction) -> Plan:
    """Order and factor of a tensor with second moments ``E[x x^T]`` [inputs, inputs]."""
    strength = np.diagonal(moments).copy()
    order = np.argsort(-strength, kind="stable") if how.act_order else np.arange(len(strength))
    spread = ridged(moments[np.ix_(order, order)].astype(np.float64), how.damping)
    factor = inverse_factor(spread.astype(np.float32) if how.damping >= _EASY else spread)
    return Plan(order, factor.astype(np.float32, copy=False), strength)


def round_corrected(matrix: Matrix, plan: Plan, block: int, grid: Grid, how: Correction) -> Blocks:
    """A quantized matrix with a small output error ``E||(W - W') x||^2``.

    Args:
        matrix: [outputs, inputs], finite.
        plan: Of the tensor that it multiplies.
        block: Inputs per block.
        grid: What the codes mean.
        how: Options.
    """
    parts = [
        _round(matrix[start : start + _OUTPUTS], plan, block, grid, how)
        for start in range(0, len(matrix), _OUTPUTS)
    ]
    scale, zero_point = (
        np.concatenate([part.parameters[place] for part in parts]) for place in (0, 1)
    )
    codes = np.concatenate([part.codes for part in parts])
    return Blocks(codes, Parameters(scale, zero_point), block, grid)


class _Columns:
    """Weights [inputs, outputs] in the order of the plan, and the parameters of their blocks.

    An input that is rounded holds its error ``e`` instead of its weights.
    """

    def __init__(self, matrix: Matrix, plan: Plan, block: int, grid: Grid) -> None:
        self.plan, self.block, self.grid = plan, block, grid
        self.rows = np.ascontiguousarray(matrix.T[plan.order])
        weights = in_blocks(plan.importance[None], block)
        found = searched_parameters(in_blocks(matrix, block), grid, weights)
        self.scale = np.ascontiguousarray(found.scale.T)  # [blocks, outputs]
        self.zero_point = np.ascontiguousarray(found.zero_point.T)
        self.codes: Codes = np.empty(matrix.shape[::-1], np.uint8)

    def search_again(self, column: int) -> None:
        """Parameters of the block that begins here, from its weights as they are by now."""
        these = slice(column, column + self.block)
        weights = in_blocks(self.plan.importance[None, these], self.block)
        now = in_blocks(np.ascontiguousarray(self.rows[these].T), self.block)
        found = searched_parameters(now, self.grid, weights)
        self.scale[column // self.block] = found.scale[:, 0]
        self.zero_point[column // self.block] = found.zero_point[:, 0]

    def catch_up(self, begin: int, start: int, stop: int) -> None:
        """Lets the inputs from ``start`` on make good for the errors of ``begin`` to ``start``."""
        self.rows[start:stop] -= (
            self.plan.factor[begin:start, start:stop].T @ self.rows[begin:start]
        )

    def settle(self, place: int) -> None:
        """Rounds one input of all outputs."""
        column = int(self.plan.order[place])
        scale = self.scale[column // self.block]
        zero_point = self.zero_point[column // self.block]
        row = self.rows[place]
        code = np.rint(row / scale)
        code += zero_point
        np.clip(code, 0, self.grid.highest, out=code)
        self.codes[column] = code
        code -= zero_point
        code *= scale
        row -= code
        row /= self.plan.factor[place, place]


def _round(matrix: Matrix, plan: Plan, block: int, grid: Grid, how: Correction) -> Blocks:
    columns = _Columns(matrix, plan, block, grid)
    inputs = len(plan.order)
    for begin, end in _spans(0, inputs, inputs if how.act_order else block):
        columns.catch_up(0, begin, end)
        if not how.act_order:
            columns.search_again(begin)
        for start, stop in _spans(begin, end, _STEP):
            columns.catch_up(begin, start, stop)
            for place in range(start, stop):
                columns.catch_up(start, place, place + 1)
                columns.settle(place)
    parameters = Parameters(columns.scale.T, columns.zero_point.T)
    return Blocks(np.ascontiguousarray(columns.codes.T), parameters, block, grid)


def _spans(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + step, stop)) for begin in range(start, stop, step))
