"""Importance by gradients: what the outputs lose, to first order.

Molchanov et al., "Importance Estimation for Neural Network Pruning", CVPR 2019, equation 8: the
squared sum of activation times gradient over all positions, in the mean over samples. The context
decides what is differentiated (:meth:`slimctl.core.contract.Context.taylor_terms`): without labels,
the outputs themselves. Its terms add up before they are squared: whatever goes together is one
effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Context, Feeds
from slimctl.graph.channels import Channels, Role
from slimctl.graph.channels.units import FIXED, Ids
from slimctl.passes._scores import Scores, add_to_units

_PASSING = ("Gather", "Shape", "Size", "Slice", "Split")
"""Operators that select units or look at sizes: what they leave out goes elsewhere."""


class _Gate(NamedTuple):
    """An axis of a tensor whose slices stand for what units contribute.

    Attributes:
        tensor: Name.
        axis: Not negative.
        ids: The unit of each index, or FIXED.
    """

    tensor: str
    axis: int
    ids: Ids


def unit_effects(model: ir.Model, channels: Channels, context: Context) -> Scores:
    """Squared relative change of the outputs without each unit; [units].

    Without a unit, the slices of weights that read it might as well be zero. In a linear layer, the
    sum of ``w dL/dw`` over such a slice is the sum of ``a dL/da`` over the channel that it reads.
    Units that no weights read (queries and keys, which are multiplied with each other) are judged
    by the tensors in which they end. What ends nowhere has no bound: it stays.
    """
    gates = _reading(channels)
    gates += _ending(model, channels, _touched(channels, gates))
    names = list(dict.fromkeys(gate.tensor for gate in gates))
    effects = (_sums(channels, gates, terms) for terms in context.taylor_terms(model, names))
    found = _mean_square(effects, (len(channels.units),))
    return np.where(_touched(channels, gates), found, np.inf)


def tensor_effects(model: ir.Model, tensors: Sequence[str], context: Context) -> Scores:
    """Squared relative change of the outputs when each tensor becomes zero; [tensors]."""
    names = list(dict.fromkeys(tensors))
    effects = (
        np.array([terms[name].sum(dtype=np.float64) for name in tensors])
        for terms in context.taylor_terms(model, names)
    )
    return _mean_square(effects, (len(tensors),))


def element_effects(
    model: ir.Model, tensors: Sequence[str], context: Context
) -> dict[str, NDArray[np.float64]]:
    """Squared relative change of the outputs when each element becomes zero, by tensor."""
    names = list(dict.fromkeys(tensors))
    squares: dict[str, NDArray[np.float64]] = {}
    for terms in context.taylor_terms(model, names):
        for name in names:
            square = np.square(np.nan_to_num(terms[name].astype(np.float64)))
            squares[name] = squares[name] + square if name in squares else square
    return squares


def _mean_square(effects: Iterable[Scores], shape: tuple[int, ...]) -> Scores:
    """Over the batches in which an effect is finite; what never is counts as unbounded."""
    total, count = np.zeros(shape), np.zeros(shape)
    for effect in effects:
        finite = np.isfinite(effect)
        total += np.square(np.where(finite, effect, 0.0))
        count += finite
    return np.where(count > 0, total / np.maximum(count, 1), np.inf)


def _reading(channels: Channels) -> list[_Gate]:
    """Weights that read units; once each, however many nodes share them."""
    found = {(m.value, m.axis): m for m in channels.members if m.role is Role.CONSUME}
    return [_Gate(value.name or "", axis, m.ids) for (value, axis), m in found.items()]


def _ending(model: ir.Model, channels: Channels, is_read: NDArray[np.bool_]) -> list[_Gate]:
    """Tensors with units that no weights read, where a node makes something else of them."""
    found: dict[tuple[ir.Value, int], _Gate] = {}
    for node in model.graph:
        if node.op_type in _PASSING:
            continue
        behind = {int(root) for _, _, roots in _labels(channels, node.outputs) for root in roots}
        for value, axis, roots in _labels(channels, node.inputs):
            ends = np.array([root not in behind and not is_read[root] for root in roots])
            ends &= roots != FIXED
            if np.any(ends):
                found[value, axis] = _Gate(value.name or "", axis, np.where(ends, roots, FIXED))
                behind.update(roots[ends].tolist())  # one side of a product stands for both
    return list(found.values())


def _labels(
    channels: Channels, values: Iterable[ir.Value | None]
) -> Iterator[tuple[ir.Value, int, Ids]]:
    """Every axis with labels, and its units."""
    for value in values:
        if value is not None:
            for axis, labels in channels.tensors.get(value, {}).items():
                yield value, axis, channels.units.find(labels.ids)


def _touched(channels: Channels, gates: Sequence[_Gate]) -> NDArray[np.bool_]:
    """Which units have slices; [units]."""
    found = np.zeros(len(channels.units), bool)
    for gate in gates:
        roots = channels.units.find(gate.ids)
        found[roots[roots != FIXED]] = True
    return found


def _sums(channels: Channels, gates: Sequence[_Gate], terms: Feeds) -> Scores:
    """Terms by unit."""
    total = np.zeros(len(channels.units))
    for gate in gates:
        array = np.moveaxis(terms[gate.tensor], gate.axis, 0)
        rows = array.reshape(len(array), -1)
        add_to_units(total, channels, gate.ids, rows.sum(axis=1, dtype=np.float64))
    return total
