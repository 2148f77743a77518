"""Makes the weights of strong inputs large before they are rounded, and the inputs weak in turn.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", MLSys
2024, section 3.2: with ``s_x`` how strong each input is, weights are multiplied by
``s = s_x^alpha`` and inputs divided by it; ``alpha`` is the one of a grid with the least output
error. The division goes into whatever computes the inputs. The authors measure ``s_x`` as the mean
magnitude and the error on samples; here both are read off the second moments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.edit import NameScope
from slimctl.numerics.blocks import (
    Blocks,
    Grid,
    Matrix,
    in_blocks,
    round_blocks,
    searched_parameters,
)
from slimctl.passes._weights_fold import Factors, apply_edits, assign, plan_division
from slimctl.passes._weights_layers import Shared

_ALPHAS: Final = np.linspace(0.0, 1.0, 11)
_SMALLEST_STRENGTH: Final = 1e-4
"""Of the strongest input: what never holds anything is not raised without bounds."""

_TRIED_OUTPUTS: Final = 256
"""Outputs on which exponents are tried."""


class Group(NamedTuple):
    """Matrices that multiply one tensor.

    Attributes:
        tensor: The tensor.
        places: Which matrices, among all.
    """

    tensor: ir.Value
    places: tuple[int, ...]


def groups_of(matrices: Sequence[Shared]) -> list[Group]:
    """Matrices by the tensor that they read; those of several readers go by the first."""
    found: dict[ir.Value, list[int]] = defaultdict(list)
    for place, shared in enumerate(matrices):
        found[shared.products[0].data].append(place)
    return [Group(tensor, tuple(places)) for tensor, places in found.items()]


def scale_group(
    tensor: ir.Value,
    members: Sequence[Shared],
    moments: Matrix,
    grids: Sequence[Grid],
    names: NameScope,
) -> Factors | str:
    """Scales a group's weights and what computes their input.

    Returns:
        The factors [inputs], or the reason why there are none.
    """
    reason = _reason_against(tensor, members)
    if reason:
        return reason
    plan = plan_division(tensor, np.full(len(moments), 2.0))
    if isinstance(plan, str):
        return plan
    factors = best_factors(
        [shared.storage.matrix() for shared in members],
        moments,
        [shared.block for shared in members],
        grids,
    )
    if factors is None:
        return "rounding is no better with scales"
    plan = plan_division(tensor, factors)
    if isinstance(plan, str):
        return plan
    raised = [_raised(shared, factors) for shared in members]
    if not all(np.isfinite(array).all() for array in raised):
        return "the scaled weights would overflow"
    apply_edits(plan, names)
    for shared, array in zip(members, raised, strict=True):
        assign(shared.storage.value, array)
    return factors


def _reason_against(tensor: ir.Value, members: Sequence[Shared]) -> str | None:
    ours = {layer.node for shared in members for layer in shared.layers}
    if {use.node for use in tensor.uses()} != ours:
        others = [use.node for use in tensor.uses() if use.node not in ours]
        if others:
            return f"{others[0].op_type} '{others[0].name}' reads its input, too"
        return "its weight multiplies several tensors"
    for shared in members:
        users = {use.node for use in shared.storage.value.uses()}
        if len(shared.layers) > 1 or len(users) > 1 or shared.has_table:
            return "its weight is used elsewhere, too"
        transposed = shared.layers[0].node.attributes.get("transA")
        if transposed is not None and transposed.as_int():
            return "it reads its input transposed"
    return None


def _raised(shared: Shared, factors: Factors) -> NDArray[np.floating]:
    """The constant as it is stored, multiplied by the factors of its inputs."""
    stored = shared.storage
    plain = stored._replace(factor=1.0).matrix()  # [outputs, inputs]
    with np.errstate(over="ignore"):
        scaled = (plain * factors).astype(stored.dtype)
    return np.ascontiguousarray(scaled if stored.transposed else scaled.T)


def best_factors(
    matrices: Sequence[Matrix], moments: Matrix, blocks: Sequence[int], grids: Sequence[Grid]
) -> Factors | None:
    """Factors with the least output error of all matrices together; None if ones are best.

    Args:
        matrices: [outputs, inputs] each.
        moments: ``E[x x^T]`` of the inputs that they share.
        blocks: Inputs per block.
        grids: What the codes mean.
    """
    strength = np.sqrt(np.diagonal(moments).astype(np.float64))
    if not strength.max() > 0:
        return None
    strength = np.maximum(strength, _SMALLEST_STRENGTH * strength.max())
    some = [_some(matrix) for matrix in matrices]
    best, least = None, np.inf
    for alpha in _ALPHAS:
        factors = strength**alpha
        factors /= np.sqrt(factors.max() * factors.min())
        error = sum(
            _error(matrix, factors, moments, block, grid)
            for matrix, block, grid in zip(some, blocks, grids, strict=True)
        )
        if error < least:
            best, least = (factors if alpha else None), error
    return best


def _some(matrix: Matrix) -> Matrix:
    rows = np.linspace(0, len(matrix) - 1, _TRIED_OUTPUTS).astype(np.int64)
    return matrix[np.unique(rows)]


def _error(matrix: Matrix, factors: Factors, moments: Matrix, block: int, grid: Grid) -> float:
    """``E||(W - W') x||^2``."""
    scaled = (matrix * factors).astype(np.float32)
    importance = np.diagonal(moments) / factors**2
    rounded = round_important(scaled, importance, block, grid).restored()
    error = (rounded / factors - matrix).astype(np.float32)
    return float(np.sum((error @ moments) * error, dtype=np.float64))


def round_important(
    matrix: Matrix, importance: NDArray[np.floating], block: int, grid: Grid
) -> Blocks:
    """Rounds to nearest; parameters are those with the least error in what the inputs make of it.

    Args:
        matrix: [outputs, inputs]
        importance: Mean square of each input.
        block: Inputs per block.
        grid: What the codes mean.
    """
    weights = in_blocks(importance.astype(np.float32)[None], block)
    parameters = searched_parameters(in_blocks(matrix, block), grid, weights)
    return round_blocks(matrix, parameters, block, grid)
