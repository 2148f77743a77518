"""One node as its rule sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.channels.coupling import Axis, Channels, Family, Member, Role
from slimctl.graph.channels.units import FIXED, Ids
from slimctl.graph.edit import Dimension, const_array, const_tensor, dimensions

_NOT_SILENT = "behind '{}' a channel is not zero when its layer computes zero"

if TYPE_CHECKING:
    from slimctl.graph.channels.removal import Removal


class Site:
    """A node, the labels of its inputs, and ways to say what follows for its outputs.

    Rules read labels with :meth:`axes`, write them with :meth:`label`, and report slices of
    constants with :meth:`member`. What must not be removed is given to :meth:`block`.
    """

    def __init__(
        self, node: ir.Node, channels: Channels, *, opset: int, whole_blocks: bool
    ) -> None:
        self.node = node
        self.channels = channels
        self.opset = opset
        self.whole_blocks = whole_blocks
        self._looked_at: set[int] = set()

    # what is there

    @property
    def name(self) -> str:
        """The node in words."""
        return self.node.name or self.node.op_type

    def has(self, index: int) -> bool:
        """Whether there is such an input."""
        return index < len(self.node.inputs) and self.node.inputs[index] is not None

    def axes(self, index: int = 0) -> dict[int, Axis]:
        """Labels of an input by axis; empty where nothing can be removed from it."""
        self._looked_at.add(index)
        value = self.node.inputs[index] if self.has(index) else None
        return {} if value is None else self.channels.tensors.get(value, {})

    def is_read(self, output: int) -> bool:
        """Whether there is such an output and anything depends on it."""
        if output >= len(self.node.outputs):
            return False
        value = self.node.outputs[output]
        return bool(value.uses()) or value.is_graph_output()

    def constant(self, index: int) -> NDArray[Any] | None:
        """The array behind an input that is the same in every run."""
        return const_array(self.node.inputs[index]) if self.has(index) else None

    def is_constant(self, index: int) -> bool:
        """Whether an input is the same in every run."""
        return self.has(index) and const_tensor(self.node.inputs[index]) is not None

    def one_number(self, index: int) -> float:
        """The value of a constant that holds one number only, however often; else NaN."""
        constant = self.constant(index)
        if constant is None or constant.size == 0:
            return math.nan
        first = constant.reshape(-1)[0]
        return float(first) if np.all(constant == first) else math.nan

    def shape(self, index: int = 0) -> tuple[Dimension, ...] | None:
        """Shape of an input as far as it is known."""
        value = self.node.inputs[index] if self.has(index) else None
        if value is None:
            return None
        tensor = const_tensor(value)
        return tuple(tensor.shape.numpy()) if tensor is not None else dimensions(value.shape)

    def out_shape(self, index: int = 0) -> tuple[Dimension, ...] | None:
        """Shape of an output as far as it is known."""
        return dimensions(self.node.outputs[index].shape)

    def rank(self, index: int = 0) -> int | None:
        """Number of axes of an input, if known."""
        shape = self.shape(index)
        return None if shape is None else len(shape)

    def out_rank(self, index: int = 0) -> int | None:
        """Number of axes of an output, if known."""
        shape = self.out_shape(index)
        return None if shape is None else len(shape)

    def attribute(self, name: str, default: Any = None) -> Any:
        """The plain value of an attribute."""
        found = self.node.attributes.get(name)
        return default if found is None else found.value

    # what follows

    def label(self, axis: int, labels: Axis, *, output: int = 0) -> None:
        """Labels an axis of an output; an axis of size 1 has nothing to remove."""
        if labels.ids.size > 1 and np.any(labels.ids != FIXED):
            if labels.silent:
                labels = labels._replace(alive="")
            self.channels.tensors.setdefault(self.node.outputs[output], {})[axis] = labels
        else:
            self.channels.tensors.get(self.node.outputs[output], {}).pop(axis, None)
            self.block(labels.ids, "it is the only channel")

    def computed(self, ids: Ids) -> Axis:
        """Labels of channels that are zero when the constants of this node are."""
        return Axis(ids, np.broadcast_to(0.0, ids.shape))

    def alive(self, labels: Axis) -> Axis:
        """The same labels where a tensor may hold anything."""
        return Axis(labels.ids, np.full(labels.ids.shape, np.nan), labels.alive or self.name)

    def fresh(self, count: int) -> Ids:
        """Units for channels that this node computes."""
        ids = self.channels.units.fresh(count)
        self.channels.families.append(Family(self.node, ids, True))
        return ids

    def select(self, ids: Ids) -> Ids:
        """Marks channels that are passed on as a part; each part keeps some of its own."""
        self.channels.families.append(Family(self.node, ids[ids != FIXED], False))
        return ids

    def member(self, index: int, axis: int, ids: Ids, role: Role) -> None:
        """Slices of the constant at an input belong to these units."""
        value = self.node.inputs[index]
        assert value is not None, "a member is a constant that is there"
        self.channels.members.append(Member(value, axis, ids, role, self.node, index))

    def tie(self, first: Ids, second: Ids) -> Ids:
        """Ties two axes index by index; see :meth:`Channels.tie`."""
        return self.channels.tie(first, second, self.name)

    def tie_rows(self, rows: Ids) -> Ids:
        """Ties all rows of a table with one another, index by index; [rows, n] -> [n]."""
        first = np.broadcast_to(rows[0], rows[1:].shape)
        tied = self.tie(first.reshape(-1), rows[1:].reshape(-1)).reshape(rows[1:].shape)
        # What is fixed in one row is fixed in all, and tie() has blocked the others.
        return np.where(np.all(tied != FIXED, axis=0), rows[0], FIXED)

    def block(self, ids: Ids, reason: str) -> None:
        """These units must stay."""
        self.channels.block(ids, self.name, reason)

    def block_inputs(self, reason: str, indices: Sequence[int] | None = None) -> None:
        """Nothing may be removed from these inputs, by default from any."""
        for index in range(len(self.node.inputs)) if indices is None else indices:
            for axis in self.axes(index).values():
                self.block(axis.ids, reason)

    def block_rest(self) -> None:
        """Nothing may be removed from inputs whose labels the rule did not look at."""
        others = [i for i in range(len(self.node.inputs)) if i not in self._looked_at]
        self.block_inputs("the operator needs all of this input", others)

    def consume(self, labels: Axis) -> Ids:
        """What is summed over: a removed channel must have contributed nothing to the sum."""
        if not labels.silent:
            self.block(labels.ids[labels.rest != 0.0], _NOT_SILENT.format(labels.alive))
        return labels.ids

    def consume_constant(self, labels: Axis, share: Callable[[NDArray[Any]], NDArray[Any]]) -> Ids:
        """As :meth:`consume`, where a constant contribution can be moved into the bias.

        Args:
            labels: Of the axis that is summed over.
            share: From what each index of the axis holds, [inputs], to what that adds to each
                output channel, [outputs], computed with the weights before they shrink.
        """
        if labels.silent:
            return labels.ids
        known = np.isfinite(labels.rest)
        self.block(labels.ids[~known], _NOT_SILENT.format(labels.alive))
        found: list[NDArray[Any]] = []

        def prepare(removal: Removal) -> None:
            gone = ~removal.kept(labels.ids) & known
            found.append(share(np.where(gone, labels.rest, 0.0)))

        def adjust(removal: Removal) -> None:
            if np.any(found[0]):
                removal.add_bias(self.node, found[0][removal.kept(self._outputs(found[0].size))])

        self.channels.folding.add(self.node)
        self.channels.preparations.append(prepare)
        self.later(adjust)
        return labels.ids

    def _outputs(self, count: int) -> Ids:
        """Labels of the output channels of a layer."""
        rank = self.out_rank()
        last = self.node.op_type in ("FusedMatMul", "Gemm", "MatMul")
        place = (rank or 0) - 1 if last else 1
        labels = self.channels.tensors.get(self.node.outputs[0], {}).get(place)
        return np.full(count, FIXED, np.int64) if labels is None else labels.ids

    def later(self, adjust: Callable[[Removal], None]) -> None:
        """Called once channels have been removed, to rewrite what depends on their number."""
        self.channels.adjustments.append(adjust)

    def when_fewer(self, ids: Ids, adjust: Callable[[Removal], None]) -> None:
        """As :meth:`later`, if any of these were removed."""

        def adjust_if(removal: Removal) -> None:
            if removal.loses(ids):
                adjust(removal)

        self.later(adjust_if)


def normalized(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    return axis + rank if axis < 0 else axis
