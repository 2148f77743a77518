"""What the analysis knows: labels of tensors, slices of weights, and what must not be removed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.channels.units import FIXED, Ids, Units

if TYPE_CHECKING:
    from slimctl.graph.channels.removal import Removal


_SAME = "what it is combined with does not change"


class Axis(NamedTuple):
    """The labels of one axis of a tensor.

    Attributes:
        ids: The unit of each index.
        rest: What the tensor holds at an index once everything that computes it is zero: a number,
            or NaN where it is not the same at all positions and in all runs. Mostly zero; not
            behind a Sigmoid or the addition of a constant.
        alive: The node behind which it is something else than zero.
    """

    ids: Ids
    rest: NDArray[np.float64]
    alive: str = ""

    @property
    def silent(self) -> bool:
        """Whether an index holds nothing but zero once what computes it is zero."""
        return not np.any(self.rest)

    def map(self, move: Callable[[NDArray[Any]], NDArray[Any]]) -> Axis:
        """The labels after their indices were moved, selected or repeated."""
        return Axis(move(self.ids), move(self.rest), self.alive)

    def unknown(self, node: str) -> Axis:
        """The same labels where nothing is known of what the tensor holds, unless it is zero."""
        if self.silent:
            return self
        return Axis(self.ids, np.where(self.rest == 0.0, 0.0, np.nan), self.alive or node)


class Role(StrEnum):
    """What slices of a constant do for the channels that they belong to."""

    PRODUCE = "produce"  # computes the channel: zero it, and the channel is zero
    CONSUME = "consume"  # reads the channel
    CARRY = "carry"  # rides along: a factor, a running variance, a scale


class Member(NamedTuple):
    """An axis of a constant that shrinks together with channels.

    Attributes:
        value: The constant.
        axis: Not negative.
        ids: The unit of each index of the axis.
        role: What the slices do.
        node: The node that reads the constant.
        place: At which input.
    """

    value: ir.Value
    axis: int
    ids: Ids
    role: Role
    node: ir.Node
    place: int


class Family(NamedTuple):
    """Units that belong together by position.

    Attributes:
        node: The layer that computes them, or the operator that selects them.
        ids: The units.
        computed: The node computes the channels; otherwise it only passes them on.
    """

    node: ir.Node
    ids: Ids
    computed: bool


class Block(NamedTuple):
    """Units that must stay, and why."""

    ids: Ids
    node: str
    reason: str


class Passage(NamedTuple):
    """A node through which labeled channels go."""

    node: ir.Node
    ids: tuple[Ids, ...]


@dataclass
class Channels:
    """Everything that the analysis found out about a model.

    Attributes:
        units: The units and their ties.
        tensors: Labels by tensor and axis; an axis without an entry never changes.
        members: Axes of constants that shrink along.
        families: Where units come from, and where a part of them is selected.
        blocks: Units that must stay.
        passages: Every node that labeled channels go into or come out of, in order.
        folding: Layers into whose bias goes what constant channels contributed.
        preparations: Called before constants shrink.
        adjustments: Called when they have; they rewrite constants and attributes that depend on
            counts.
    """

    units: Units = field(default_factory=Units)
    tensors: dict[ir.Value, dict[int, Axis]] = field(default_factory=dict)
    members: list[Member] = field(default_factory=list)
    families: list[Family] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)
    folding: set[ir.Node] = field(default_factory=set)
    preparations: list[Callable[[Removal], None]] = field(default_factory=list)
    adjustments: list[Callable[[Removal], None]] = field(default_factory=list)

    def tie(self, first: Ids, second: Ids, node: str) -> Ids:
        """Ties two axes index by index and returns the labels of the result.

        Where one side can never change, the other cannot either.
        """
        self.block(first[second == FIXED], node, _SAME)
        self.block(second[first == FIXED], node, _SAME)
        both = (first != FIXED) & (second != FIXED)
        self.units.tie(first[both], second[both])
        return np.where(both, first, FIXED)

    def block(self, ids: Ids, node: str, reason: str) -> None:
        """These units must stay."""
        free = ids[ids != FIXED]
        if free.size:
            self.blocks.append(Block(free.reshape(-1), node, reason))

    def passed(self, node: ir.Node) -> None:
        """Notes the labeled channels that go into a node or come out of it."""
        values = [value for value in (*node.inputs, *node.outputs) if value is not None]
        ids = tuple(axis.ids for v in values for axis in self.tensors.get(v, {}).values())
        if ids:
            self.passages.append(Passage(node, ids))

    def blocked(self) -> dict[int, Block]:
        """The first reason by representative unit."""
        found: dict[int, Block] = {}
        for block in self.blocks:
            for root in np.unique(self.units.find(block.ids)):
                found.setdefault(int(root), block)
        found.pop(FIXED, None)
        return found
