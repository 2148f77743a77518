"""Which channels may be divided by a positive factor each, so that the model computes the same.

The factor of a channel goes into whatever computes it, and its inverse into whatever reads it. In
between stands only what passes a positive factor on: f(x / s) = f(x) / s for every channel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.channels.coupling import Axis, Block, Channels, Member, Role
from slimctl.graph.channels.site import Site
from slimctl.graph.channels.table import key
from slimctl.graph.channels.units import FIXED, Ids
from slimctl.graph.edit import const_array
from slimctl.graph.scaled import record_scaling

_CHANNEL: Final = 1
_WEIGHT: Final = 1

_Problem: TypeAlias = tuple[Ids, str]
"""Channels that a node does not let scale, and why."""


@dataclass(frozen=True)
class Slices:
    """An axis of a constant that scales along with channels.

    Attributes:
        value: The constant.
        axis: Not negative.
        ids: The unit of each index of the axis.
        power: Of the factor that multiplies the slices: -1 where they compute the channel, 1 where
            they read it.
        nodes: The nodes that read the constant.
    """

    value: ir.Value
    axis: int
    ids: Ids
    power: int
    nodes: tuple[ir.Node, ...]


@dataclass(frozen=True)
class Scaling:
    """What may be scaled.

    Attributes:
        channels: The analysis of the model.
        fixed: Units whose factor must be 1, by representative, with the reason.
        slices: Constants that hold the factors of the others.
    """

    channels: Channels
    fixed: Mapping[int, Block]
    slices: Sequence[Slices]

    def divide(self, factors: NDArray[np.float64]) -> list[ir.Node]:
        """Divides channels by their factors, in place.

        Args:
            factors: Positive, one per unit, at the place of its representative; 1 where it is
                fixed.

        Returns:
            The nodes whose constants changed.
        """
        by_value: dict[ir.Value, list[Slices]] = defaultdict(list)
        for slices in self.slices:
            by_value[slices.value].append(slices)
        changed: list[ir.Node] = []
        for value, parts in by_value.items():
            scales = [(part.axis, self._of(part.ids, factors) ** part.power) for part in parts]
            if any(np.any(scale != 1.0) for _, scale in scales):
                _multiply(value, scales)
                changed.extend(node for part in parts for node in part.nodes)
        self._record(factors)
        return list(dict.fromkeys(changed))

    def _record(self, factors: NDArray[np.float64]) -> None:
        """Notes on every tensor what its channels were divided by."""
        for value, axes in self.channels.tensors.items():
            for axis, labels in axes.items():
                scale = self._of(labels.ids, factors)
                if value.producer() is not None and np.any(scale != 1.0):
                    record_scaling(value, axis, 1.0 / scale)

    def _of(self, ids: Ids, factors: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(ids == FIXED, 1.0, factors[self.channels.units.find(ids)])


def _multiply(value: ir.Value, scales: Sequence[tuple[int, NDArray[np.float64]]]) -> None:
    """Multiplies a constant along axes; clones that share it keep the old one."""
    array = const_array(value)
    assert array is not None, "slices are of constants"
    scaled: NDArray[Any] = array
    for axis, scale in scales:
        shape = [1] * array.ndim
        shape[axis] = scale.size
        scaled = scaled * scale.reshape(shape).astype(array.dtype)
    node = value.producer()
    if node is not None:  # a Constant, perhaps with its number in another attribute
        node.attributes.clear()
        node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(scaled))
    else:
        value.const_value = ir.Tensor(scaled, name=value.name)


def find_scaling(model: ir.Model, channels: Channels) -> Scaling:
    """Finds out which channels of a model may be scaled.

    Args:
        model: The model that was analyzed.
        channels: Its analysis.
    """
    fixed = channels.blocked()

    def fix(ids: Ids, node: str, reason: str) -> None:
        for root in np.unique(channels.units.find(ids[ids != FIXED])):
            fixed.setdefault(int(root), Block(ids, node, reason))

    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1))
    for passage in channels.passages:
        site = Site(passage.node, channels, opset=opset, whole_blocks=False)
        for ids, reason in _problems(site, passage.ids):
            fix(ids, site.name, reason)
    for member in channels.members:
        for ids, reason in _unknown(member.node, (member.ids,)):
            fix(ids, member.node.name or member.node.op_type, reason)
    for value, axes in channels.tensors.items():
        for first, second in combinations(axes.values(), 2):
            both = np.intersect1d(channels.units.find(first.ids), channels.units.find(second.ids))
            fix(both, value.name or "", "two axes of this tensor hold the same channels")
    slices = _slices(channels)
    for part in slices:
        array = const_array(part.value)
        if part.power and (array is None or array.dtype not in (np.float32, np.float64)):
            fix(part.ids, part.value.name or "", "its constants are not float32")
    for part in _contradicting(slices):
        fix(part.ids, part.value.name or "", "it is read elsewhere in another way")
    return Scaling(channels, fixed, [part for part in slices if part.power])


def _problems(site: Site, labeled: Sequence[Ids]) -> Iterator[_Problem]:
    check = _CHECKS.get(key(site.node.domain, site.node.op_type))
    return _unknown(site.node, labeled) if check is None else check(site)


def _unknown(node: ir.Node, labeled: Sequence[Ids]) -> Iterator[_Problem]:
    if key(node.domain, node.op_type) not in _CHECKS:
        for ids in labeled:
            yield ids, f"{node.op_type} does not pass on a factor per channel"


def _slices(channels: Channels) -> list[Slices]:
    """Members as they scale; those of several nodes at the same place in the same way are one."""
    depthwise = _depthwise(channels)
    found: dict[tuple[ir.Value, int, int], list[Member]] = defaultdict(list)
    for member in channels.members:
        found[member.value, member.axis, _power(member, depthwise)].append(member)
    return [
        Slices(value, axis, same[0].ids, power, tuple(member.node for member in same))
        for (value, axis, power), same in found.items()
    ]


def _contradicting(slices: Sequence[Slices]) -> list[Slices]:
    powers: dict[tuple[ir.Value, int], list[Slices]] = defaultdict(list)
    for part in slices:
        powers[part.value, part.axis].append(part)
    return [part for parts in powers.values() if len(parts) > 1 for part in parts]


_NORM_POWERS: Final = (0, 0, -1, -1, 0)
"""BatchNormalization, g (x - m) / sqrt(v) + b: with x, m and b divided, all of it is."""


def _power(member: Member, depthwise: Collection[ir.Node]) -> int:
    if member.node.op_type == "BatchNormalization":
        return _NORM_POWERS[member.place]
    if member.role is Role.CARRY or (member.place == _WEIGHT and member.node in depthwise):
        return 0
    return 1 if member.role is Role.CONSUME else -1


def _depthwise(channels: Channels) -> set[ir.Node]:
    """Convolutions whose channels come in with the factor that they go out with."""
    reading = {member.node for member in channels.members if member.role is Role.CONSUME}
    return {
        member.node
        for member in channels.members
        if member.node.op_type in ("Conv", "ConvTranspose") and member.node not in reading
        if member.node.inputs[0] is not None
        if _CHANNEL in channels.tensors.get(member.node.inputs[0], {})
    }


# operators


def _anything(site: Site) -> Iterator[_Problem]:
    """It moves, selects or rectifies values."""
    del site
    return iter(())


def _all_labels(site: Site, reason: str) -> Iterator[_Problem]:
    for index in range(len(site.node.inputs)):
        for labels in site.axes(index).values():
            yield labels.ids, reason


def _outputs(site: Site) -> dict[int, Axis]:
    return site.channels.tensors.get(site.node.outputs[0], {})


def _sum(site: Site) -> Iterator[_Problem]:
    """Add, Sub, Sum, Mean: whatever is added must scale along."""
    operands = [index for index in range(len(site.node.inputs)) if site.has(index)]
    rank = max(site.rank(index) or 0 for index in operands)
    for index in operands:
        yield from _added(site, index, rank, True)


def _extreme(site: Site) -> Iterator[_Problem]:
    """Max, Min: as sums, but constants do not scale."""
    operands = [index for index in range(len(site.node.inputs)) if site.has(index)]
    rank = max(site.rank(index) or 0 for index in operands)
    for index in operands:
        yield from _added(site, index, rank, False)


def _added(site: Site, index: int, rank: int, scales: bool) -> Iterator[_Problem]:
    """Channels of the result along which an operand does not scale.

    Args:
        site: The node.
        index: The operand.
        rank: Of the result.
        scales: A constant with one slice per channel is among the slices that scale.
    """
    shape, constant = site.shape(index) or (), site.constant(index)
    for place, labels in _outputs(site).items():
        axis = place - rank + len(shape)
        per_channel = constant is not None and axis >= 0 and shape[axis] == labels.ids.size
        zero = constant is not None and not np.any(constant)
        if axis not in site.axes(index) and not (scales and per_channel) and not zero:
            yield labels.ids, "what it is combined with does not scale along"


def _product(site: Site) -> Iterator[_Problem]:
    """Mul: one operand scales, the others do not."""
    yield from _factors(site, range(len(site.node.inputs)))


def _quotient(site: Site) -> Iterator[_Problem]:
    """Div, PRelu: the first operand scales, the second does not."""
    yield from _factors(site, (0,))


def _factors(site: Site, may_scale: Sequence[int]) -> Iterator[_Problem]:
    rank = max(site.rank(index) or 0 for index in range(len(site.node.inputs)))
    seen: set[int] = set()
    for index in range(len(site.node.inputs)):
        for axis, labels in site.axes(index).items():
            place = axis + rank - (site.rank(index) or 0)
            if place in seen or index not in may_scale:
                yield labels.ids, "two factors of a product would scale"
            seen.add(place)


def _conv(site: Site) -> Iterator[_Problem]:
    for axis, labels in site.axes().items():
        if axis != _CHANNEL:
            yield labels.ids, f"{site.node.op_type} adds the same bias everywhere"


def _matrices(site: Site) -> Iterator[_Problem]:
    """MatMul, Gemm: the product of two operands that both scale would scale twice."""
    sides = [
        [site.channels.units.find(labels.ids) for labels in site.axes(index).values()]
        for index in (0, 1)
    ]
    for first in sides[0]:
        for second in sides[1]:
            yield np.intersect1d(first, second), "two factors of a product would scale"
    if site.has(2):
        yield from _added(site, 2, 2, True)


def _reduce(site: Site) -> Iterator[_Problem]:
    kept = [labels.ids for labels in _outputs(site).values()]
    for labels in site.axes().values():
        if not any(np.array_equal(labels.ids, ids) for ids in kept):
            yield labels.ids, f"{site.node.op_type} combines these channels"


def _pad(site: Site) -> Iterator[_Problem]:
    filled = site.constant(2) if site.has(2) else np.array(site.attribute("value", 0.0))
    plain = site.attribute("mode", "constant") == "constant"
    if plain and (filled is None or np.any(filled)):
        yield from _all_labels(site, "it pads with a number other than zero")


def _resize(site: Site) -> Iterator[_Problem]:
    if site.attribute("coordinate_transformation_mode") == "tf_crop_and_resize":
        yield from _all_labels(site, "it fills in a number")


def _gather(site: Site) -> Iterator[_Problem]:
    for labels in site.axes(1).values():
        yield labels.ids, "indices do not scale"


_CHECKS: dict[str, Callable[[Site], Iterator[_Problem]]] = {
    **dict.fromkeys(
        (
            "Abs",
            "AveragePool",
            "Concat",
            "DepthToSpace",
            "Dropout",
            "Expand",
            "Flatten",
            "GlobalAveragePool",
            "GlobalMaxPool",
            "Identity",
            "LeakyRelu",
            "MaxPool",
            "Neg",
            "Relu",
            "Reshape",
            "Shape",
            "Slice",
            "SpaceToDepth",
            "Split",
            "Squeeze",
            "Tile",
            "Transpose",
            "Unsqueeze",
            "Upsample",
        ),
        _anything,
    ),
    **dict.fromkeys(("Add", "Mean", "Sub", "Sum"), _sum),
    **dict.fromkeys(("Max", "Min"), _extreme),
    **dict.fromkeys(("Div", "PRelu"), _quotient),
    **dict.fromkeys(("BatchNormalization", "Conv", "ConvTranspose"), _conv),
    **dict.fromkeys(("Gemm", "MatMul"), _matrices),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"), _reduce),
    "Gather": _gather,
    "Mul": _product,
    "Pad": _pad,
    "Resize": _resize,
}
"""Operators that pass a positive factor per channel on, and where they do not."""
