"""How much each group of coupled channels matters.

A unit stands for slices of several weights. What is measured for each slice is added up over the
unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Context
from slimctl.graph.channels import Channels, Group, Member, Role
from slimctl.graph.edit import const_array
from slimctl.passes._first_order import unit_effects
from slimctl.passes._linear_samples import LinearLayer, linear_layer
from slimctl.passes._scores import Scores, add_to_units

Importance = Literal["activation", "l1", "l2", "random", "taylor"]

_POSITIONS = 256
"""Positions per batch at which energies are measured."""


def importance(
    kind: Importance,
    model: ir.Model,
    channels: Channels,
    groups: Sequence[Group],
    context: Context,
) -> Scores:
    """What removing each unit would cost, comparable over the whole model; [units].

    Args:
        kind: ``l1`` and ``l2``: norm of the weights that compute the channels (Li et al., "Pruning
            Filters for Efficient ConvNets", ICLR 2017), relative to the mean of the group.
            ``activation``: the energy that the channels contribute to what the layers that read
            them compute, ``sum |w|^2 Var[x]`` on data, relative to the energy of those outputs.
            The last channels of a group cost more than the first: what counts is the logarithm of
            the energy that is left. ``taylor``: the squared relative change of the outputs, to
            first order (:mod:`slimctl.passes._first_order`). ``random``: a seeded draw.
        model: What was analyzed.
        channels: The analysis.
        groups: Its groups.
        context: Gives data and the seed.
    """
    if kind == "random":
        return np.random.default_rng(context.seed).random(len(channels.units))
    if kind == "activation":
        total = _contributions(model, channels, context)
        for group in groups:
            total[group.units] = _logarithmic(total[group.units])
        return total
    if kind == "taylor":
        return unit_effects(model, channels, context)
    total = np.zeros(len(channels.units))
    for member in channels.members:
        if member.role is Role.PRODUCE:
            power = np.abs(_slices(member)) if kind == "l1" else _slices(member) ** 2
            add_to_units(total, channels, member.ids, power.sum(axis=1))
    if kind == "l2":
        total = np.sqrt(total)
    for group in groups:
        mean = total[group.units].mean()
        if mean > 0:
            total[group.units] /= mean
    return total


def _logarithmic(shares: Scores) -> Scores:
    """What each unit of a group costs if they go in order, the least important first.

    Removing units that hold the part ``s`` of the group's energy costs ``-log(1 - s)``: nothing
    for none, and without bound for all, whatever the number of units.
    """
    order = np.argsort(shares, kind="stable")
    total = float(shares.sum())
    if total <= 0.0:
        return shares
    left = np.clip(1.0 - np.cumsum(shares[order]) / total, 1e-9, 1.0)
    cost = -np.log(left)
    steps = np.diff(cost, prepend=0.0) * total
    result = np.empty_like(shares)
    # Rounding must not turn the order around.
    result[order] = np.maximum.accumulate(steps)
    return result


def _slices(member: Member) -> NDArray[np.float64]:
    """The slices of a constant that belong to its units, as rows."""
    array = const_array(member.value)
    assert array is not None, "members are constants"
    moved = np.moveaxis(array, member.axis, 0)
    return moved.reshape(moved.shape[0], -1).astype(np.float64)


@dataclass
class _Moments:
    """Sums over the positions that were looked at."""

    layer: LinearLayer
    member: Member
    count: int = 0
    x: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    xx: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    y: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    yy: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def add(self, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        """Rows as :class:`LinearLayer` gives them."""
        x, y = x.astype(np.float64), y.astype(np.float64)
        if not self.count:
            self.x, self.xx = np.zeros(x.shape[1:]), np.zeros(x.shape[1:])
            self.y, self.yy = np.zeros(y.shape[1:]), np.zeros(y.shape[1:])
        self.count += len(x)
        self.x += x.sum(axis=0)
        self.xx += (x**2).sum(axis=0)
        self.y += y.sum(axis=0)
        self.yy += (y**2).sum(axis=0)

    def shares(self) -> NDArray[np.float64]:
        """What each index of the weight's input axis contributes to the energy of the outputs."""
        inputs = self.xx / self.count - (self.x / self.count) ** 2  # [groups, inputs * taps]
        outputs = self.yy / self.count - (self.y / self.count) ** 2
        weights = (self.layer.matrix() ** 2).sum(axis=1)  # [groups, inputs * taps]
        by_input = (weights * inputs).sum(axis=0).reshape(self.member.ids.size, -1).sum(axis=1)
        return np.asarray(by_input / max(float(outputs.sum()), 1e-30))


def _contributions(model: ir.Model, channels: Channels, context: Context) -> Scores:
    moments: list[_Moments] = []
    for member in channels.members:
        layer = linear_layer(member.node) if member.role is Role.CONSUME else ""
        if isinstance(layer, LinearLayer) and member.place == 1:
            moments.append(_Moments(layer, member))
    tensors = list(dict.fromkeys(n for m in moments for n in (m.layer.data, m.layer.output)))
    batches = context.activations(model, tensors)
    for index, found in enumerate(batches):
        for entry in moments:
            y = found[entry.layer.output]
            places = entry.layer.positions(y.shape, _POSITIONS, (context.seed, index))
            entry.add(
                entry.layer.read(found[entry.layer.data], places), entry.layer.written(y, places)
            )
    total = np.zeros(len(channels.units))
    for entry in moments:
        if entry.count:
            add_to_units(total, channels, entry.member.ids, entry.shares())
    return total
