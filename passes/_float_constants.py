"""Constants that a narrower float type cannot hold: too large, or so small that they vanish.

A constant that is too large is clamped where that changes nothing: a bound of Clip, a value that
masks what Softmax sees. Everywhere else its reader computes in float32. The reader of a constant
that vanishes does so as well, with what follows up to the division or logarithm that the constant
guards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.edit import all_graphs, const_array
from slimctl.passes._float_network import Network, Read, is_full_float
from slimctl.passes._float_rules import MOVEMENT

_MASKS: Final = 2
"""How many masks may be added (one of padding, one of causality) without reaching infinity: where
everything is masked, infinities would give NaN."""
_LOST: Final = 2.0**-9
"""Relative error of a whole constant, four times what rounding alone makes of it in float16."""

_BOUNDS: Final = frozenset(
    {"Max", "Min", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"}
)
_SATURATES: Final = frozenset(
    {"ArgMax", "ArgMin", "HardSigmoid", "LogSoftmax", "MaxPool", "Sigmoid", "Softmax", "Tanh"}
)
_PASSES_MASKS: Final = MOVEMENT | {"Add", "Cast", "Div", "Mul", "Sub", "Sum", "ReduceMax"}
_MASK_INPUTS: Final = {
    ("", "Attention"): 3,
    ("com.microsoft", "Attention"): 5,
    ("com.microsoft", "MultiHeadAttention"): 5,
}
_GUARDED: Final = frozenset({"Div", "Log", "Mul", "Pow", "Reciprocal", "Sqrt"})
_CARRIES_SMALL: Final = MOVEMENT | {"Abs", "Clip", "Max", "Neg", "Pow", "Reciprocal", "Sqrt"}


_LIMITS: Final = {
    ir.DataType.FLOAT16: (65504.0, 2.0**-14),
    ir.DataType.BFLOAT16: (2.0**128 - 2.0**120, 2.0**-126),
}


class Limits(NamedTuple):
    """What a float type holds.

    Attributes:
        largest: Largest finite value.
        tiny: Smallest normal value.
        mask: Magnitude that masks are clamped to.
    """

    largest: float
    tiny: float
    mask: float


def limits_of(narrow: ir.DataType) -> Limits:
    """Limits of FLOAT16 or BFLOAT16."""
    largest, tiny = _LIMITS[narrow]
    half = narrow == ir.DataType.FLOAT16
    return Limits(largest, tiny, largest / _MASKS if half else largest)


@dataclass
class Clamps:
    """Constants that are clamped where they are narrow.

    Attributes:
        limits: Largest magnitude by constant.
        masked: Values between a mask and what it masks; their range says nothing about overflow.
        unfit: Constants that must stay float32.
    """

    limits: dict[ir.Value, float] = field(default_factory=dict)
    masked: set[ir.Value] = field(default_factory=set)
    unfit: set[ir.Value] = field(default_factory=set)

    def add(self, value: ir.Value, limit: float) -> None:
        """A constant may be clamped to this magnitude."""
        self.limits[value] = min(limit, self.limits.get(value, limit))


def constants(model: ir.Model) -> Iterator[tuple[ir.Value, NDArray[Any]]]:
    """Float32 constants: initializers, and what Constant and ConstantOfShape nodes hold."""
    for graph in all_graphs(model):
        for value in graph.initializers.values():
            array = const_array(value)
            if array is not None and is_full_float(value):
                yield value, array
        for node in graph:
            array = generated(node)
            if array is not None:
                yield node.outputs[0], array


def generated(node: ir.Node) -> NDArray[Any] | None:
    """The float32 values that a Constant or ConstantOfShape node is made of."""
    if node.domain or not node.outputs or not is_full_float(node.outputs[0]):
        return None
    if node.op_type == "Constant":
        return const_array(node.outputs[0])
    if node.op_type != "ConstantOfShape":
        return None
    stored = node.attributes.get("value")
    return np.zeros(1, np.float32) if stored is None else stored.as_tensor().numpy()


def force_constants(network: Network, model: ir.Model) -> Clamps:
    """Float32 for readers of constants that do not fit, and which constants may be clamped."""
    judge = _Judge(network, limits_of(network.narrow))
    for value, array in constants(model):
        for read in network.reads.get(value, ()):
            if read.site is not network.always_full:
                judge.look_at(value, array, read)
    return judge.clamps


@dataclass
class _Judge:
    """Decides for one use of a constant after the other."""

    network: Network
    limits: Limits
    clamps: Clamps = field(default_factory=Clamps)

    def look_at(self, value: ir.Value, array: NDArray[Any], read: Read) -> None:
        """Clamps the constant, or forces its reader to float32, where it does not fit."""
        highest = largest_finite(array)
        if not self._may_be_clamped(value, array, read, highest):
            reason = self._reason_against(value, array, read, highest)
            if reason:
                self.clamps.unfit.add(value)
                _force(self.network, read, reason)

    def _may_be_clamped(
        self, value: ir.Value, array: NDArray[Any], read: Read, highest: float
    ) -> bool:
        if isinstance(read.user, ir.Node) and _is_bound(read.user, read.place):
            if highest > self.limits.largest:
                self.clamps.add(value, self.limits.largest)
                return True
            return False
        path = _mask_path(read, array) if highest > self.limits.mask else None
        if path is None:
            return False
        self.clamps.add(value, self.limits.mask)
        self.clamps.masked |= path
        return True

    def _reason_against(
        self, value: ir.Value, array: NDArray[Any], read: Read, highest: float
    ) -> str:
        narrow = self.network.narrow
        kind = narrow.name.lower()
        if highest > self.limits.largest:
            return f"'{value.name}' holds {highest:.3g}, {kind} ends at {self.limits.largest:.3g}"
        vanishes = _vanishes(array, highest, self.limits, narrow)
        if vanishes or _divides_by_little(array, self.limits, read):
            return f"'{value.name}' holds values too small for {kind}"
        return ""


def largest_finite(array: NDArray[Any]) -> float:
    """Largest magnitude, infinities and NaN left out."""
    if array.size == 0:
        return 0.0
    highest = float(max(array.max(), -array.min()))
    if np.isfinite(highest):
        return highest
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max(initial=0.0))


def narrowed(array: NDArray[Any], narrow: ir.DataType, limit: float | None) -> NDArray[Any]:
    """The array in the narrower type, finite values clamped to a magnitude if there is one."""
    if limit is not None and largest_finite(array) > limit:
        array = np.where(np.isfinite(array), np.clip(array, -limit, limit), array)
    with np.errstate(over="ignore"):  # infinity stays infinity; overflow was ruled out before
        return np.asarray(array.astype(narrow.numpy()))


def _vanishes(array: NDArray[Any], highest: float, limits: Limits, narrow: ir.DataType) -> bool:
    if highest == 0.0:
        return False
    if highest < limits.tiny:
        return True
    if narrow != ir.DataType.FLOAT16:
        return False  # as many exponents as float32
    finite = array if np.isfinite(array).all() else array[np.isfinite(array)]
    lost = finite - finite.astype(narrow.numpy()).astype(np.float32)
    return bool(np.linalg.norm(lost) > _LOST * np.linalg.norm(finite))


def _divides_by_little(array: NDArray[Any], limits: Limits, read: Read) -> bool:
    """A divisor that becomes 0 gives infinity; elsewhere small values among large ones may go."""
    if not isinstance(read.user, ir.Node) or (read.user.op_type, read.place) != ("Div", 1):
        return False
    return bool(((np.abs(array) < limits.tiny) & (array != 0)).any())


def _is_bound(node: ir.Node, index: int) -> bool:
    if node.domain:
        return False
    return node.op_type in _BOUNDS or (node.op_type == "Clip" and index > 0)


def _mask_path(read: Read, array: NDArray[Any]) -> set[ir.Value] | None:
    """Values from a constant to all that it masks; None if it also gets anywhere else."""
    if not isinstance(read.user, ir.Node):
        return None
    found: set[ir.Value] = set()
    pending = [(read.user, read.place)]
    while pending:
        node, index = pending.pop()
        if _ends_mask(node, index, array):
            continue
        if node.domain or node.op_type not in _PASSES_MASKS:
            return None
        for output in node.outputs:
            if output.is_graph_output():
                return None
            if output not in found:
                found.add(output)
                pending.extend((use.node, use.idx) for use in output.uses())
    return found


def _ends_mask(node: ir.Node, index: int, array: NDArray[Any]) -> bool:
    if _MASK_INPUTS.get((node.domain, node.op_type)) == index:
        return True
    if node.domain:
        return False
    if node.op_type == "Exp":
        return bool(np.max(array, initial=0.0) <= 0.0)
    return node.op_type in _SATURATES or _is_bound(node, index)


def _force(network: Network, read: Read, reason: str) -> None:
    """The reader, and what follows it up to the operator that the constant matters for."""
    read.site.force(reason)
    if not isinstance(read.user, ir.Node) or read.user.op_type not in _CARRIES_SMALL | {
        "Add",
        "Div",
        "Mul",
        "Sub",
    }:
        return
    pending, seen = [read.user], {read.user}
    while pending:
        for output in pending.pop().outputs:
            for use in output.uses():
                site = network.by_node.get(use.node)
                if (
                    site is None
                    or use.node in seen
                    or use.node.op_type not in (_GUARDED | _CARRIES_SMALL)
                ):
                    continue
                seen.add(use.node)
                site.force(reason)
                if use.node.op_type in _CARRIES_SMALL:
                    pending.append(use.node)
