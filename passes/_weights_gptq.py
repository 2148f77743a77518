"""Rounds weights one input at a time and lets those that are still open make good for the error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
ICLR 2023, algorithm 1: with ``H`` the second moments of the inputs and ``H^-1 = U^T U``, ``U``
upper, rounding input ``j`` leaves ``e = (w_j - q_j) / U_jj``, and what follows in ``j``'s row of
``U`` says how the weights behind it make good for it. Scales and zero points of blocks are those
with the least error in which an input counts as much as it is strong. All outputs at once.
"""

from __future__ import annotations

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
"""Inputs whose updates are gathered before the inputs behind them see them (section 3.3)."""

_OUTPUTS: Final = 4096
"""Outputs that are worked on together; bounds the memory."""


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
    spread = moments.astype(np.float64)
    strength = np.diagonal(spread)
    order = np.argsort(-strength, kind="stable") if how.act_order else np.arange(len(strength))
    ordered = ridged(spread, how.damping)[np.ix_(order, order)]
    factor = inverse_factor(ordered)
    return Plan(order, factor.astype(np.float32), strength.astype(np.float32))


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
    """Weights [inputs, outputs] in the order of the plan, and the parameters of their blocks."""

    def __init__(self, matrix: Matrix, plan: Plan, block: int, grid: Grid) -> None:
        self.plan, self.block, self.grid = plan, block, grid
        self.open = np.ascontiguousarray(matrix.T[plan.order])
        weights = in_blocks(plan.importance[None], block)
        found = searched_parameters(in_blocks(matrix, block), grid, weights)
        self.scale = np.ascontiguousarray(found.scale.T)  # [blocks, outputs]
        self.zero_point = np.ascontiguousarray(found.zero_point.T)
        self.codes: Codes = np.empty(matrix.shape[::-1], np.uint8)

    def search_again(self, column: int) -> None:
        """Parameters of the block that begins here, from its weights as they are by now."""
        these = slice(column, column + self.block)
        weights = in_blocks(self.plan.importance[None, these], self.block)
        now = in_blocks(np.ascontiguousarray(self.open[these].T), self.block)
        found = searched_parameters(now, self.grid, weights)
        self.scale[column // self.block] = found.scale[:, 0]
        self.zero_point[column // self.block] = found.zero_point[:, 0]

    def settle(self, place: int) -> Matrix:
        """Rounds one input of all outputs; what it leaves."""
        column = int(self.plan.order[place])
        scale = self.scale[column // self.block]
        zero_point = self.zero_point[column // self.block]
        code = np.rint(self.open[place] / scale) + zero_point
        np.clip(code, 0, self.grid.highest, out=code)
        self.codes[column] = code
        left: Matrix = self.open[place] - (code - zero_point) * scale
        return left


def _round(matrix: Matrix, plan: Plan, block: int, grid: Grid, how: Correction) -> Blocks:
    columns = _Columns(matrix, plan, block, grid)
    inputs = len(plan.order)
    for start in range(0, inputs, _STEP):
        stop = min(start + _STEP, inputs)
        errors = np.empty((stop - start, len(matrix)), np.float32)
        for place in range(start, stop):
            if not how.act_order and place % block == 0:
                columns.search_again(place)
            error = columns.settle(place) / plan.factor[place, place]
            columns.open[place + 1 : stop] -= plan.factor[place, place + 1 : stop, None] * error
            errors[place - start] = error
        columns.open[stop:] -= plan.factor[start:stop, stop:].T @ errors
    parameters = Parameters(columns.scale.T, columns.zero_point.T)
    return Blocks(np.ascontiguousarray(columns.codes.T), parameters, block, grid)
