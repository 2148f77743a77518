"""What bounds each operator, how near it comes, and what to do next.

The roofline model (Williams, Waterman, Patterson, Roofline, CACM 52, 2009): an operator takes at
least the time that its bytes need at the machine's bandwidth, and at least the time that its
multiply-accumulates need at the machine's peak. The larger of the two is its bound. A third one
stands beside them: what a call costs whatever it does.

Advice is a table of rules, the first that holds. It reads the graph that onnxruntime runs, so what
is fused already is not advised again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import onnx_ir as ir

from slimctl.evaluate.machine import Machine
from slimctl.evaluate.profile import NodeTime, Profile

HEAVY = 0.01
"""Share of the time from which a node is listed: of those below none gains anything alone."""

NEAR = 0.7
"""Attained share from which an operator is called near its bound. onnxruntime's own large products
vary by as much with the shape of their matrices."""

GAIN = 1.1
"""The integer peak must exceed the float peak by this factor for quantizing to be advised: what is
below is within the spread of measured peaks."""


SLOWEST_FLOAT = 0.3
"""Share of the float peak that a first convolution of three channels attains in float, the least of
those that are not depthwise: an integer kernel with fewer operations per second gains nothing."""


class Bound(StrEnum):
    """What an operator cannot be faster than."""

    MEMORY = "memory"
    COMPUTE = "compute"
    OVERHEAD = "overhead"
    UNKNOWN = "unknown"


_WORK = (Bound.MEMORY, Bound.COMPUTE)


class Action(StrEnum):
    """What to do next about an operator."""

    FUSE = "fuse"
    QUANTIZE = "quantize"
    PRUNE = "prune"
    LAYOUT = "change layout"
    NOTHING = "nothing"


class Advice(NamedTuple):
    """An action and the reason for it."""

    action: Action
    reason: str


@dataclass(frozen=True)
class Placed:
    """An operator under its roof.

    Attributes:
        time: What was measured.
        bound: What bounds it.
        limit: Seconds below which it cannot get on this machine; None where that is unknown.
        attained: ``limit`` as a share of the measured time. Above 1 its data were in a nearer cache
            than their size suggests.
        advice: What to do next.
    """

    time: NodeTime
    bound: Bound
    limit: float | None
    attained: float | None
    advice: Advice

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return self.time.to_dict() | {
            "bound": self.bound.value,
            "limit_seconds": self.limit,
            "attained": self.attained,
            "advice": self.advice.action.value,
            "reason": self.advice.reason,
        }


class Summary(NamedTuple):
    """One action over all heavy nodes.

    Attributes:
        action: What to do.
        share: Of the time in all kernels that its nodes take.
        nodes: Their number.
    """

    action: Action
    share: float
    nodes: int


def roofline(profile: Profile, machine: Machine) -> list[Placed]:
    """Every operator of a profile under the roof of a machine, in the order in which they run."""
    return [place(time, machine) for time in profile.nodes]


def place(time: NodeTime, machine: Machine) -> Placed:
    """One operator under the roof of a machine."""
    bound, limit = bound_of(time, machine)
    attained = limit / time.seconds if limit is not None and time.seconds > 0 else None
    return Placed(time, bound, limit, attained, advise(time, bound, attained, machine))


def bound_of(time: NodeTime, machine: Machine) -> tuple[Bound, float | None]:
    """What bounds an operator, and the seconds that this bound takes.

    ``max(bytes / bandwidth(bytes), macs / peak, call)``
    """
    cost = time.cost
    if cost.macs is None or cost.activation_bytes is None:
        return Bound.UNKNOWN, None
    touched = cost.weight_bytes + cost.activation_bytes
    peak = machine.integer_macs if is_integer(time.node) else machine.float_macs
    limits = {
        Bound.MEMORY: touched / machine.bytes_per_second(touched),
        Bound.COMPUTE: cost.macs / peak,
        Bound.OVERHEAD: machine.call,
    }
    bound = max(limits, key=lambda kind: limits[kind])
    return bound, limits[bound]


_ONE_BYTE = (ir.DataType.UINT8, ir.DataType.INT8)


def is_integer(node: ir.Node) -> bool:
    """Whether an operator multiplies 8-bit integers: its operands, or its stored weights, are."""
    return any(value is not None and value.dtype in _ONE_BYTE for value in node.inputs[:4]) and (
        node.op_type not in _UNPACKING
    )


_UNPACKING = ("DequantizeLinear", "QuantizeLinear", "MatMulNBits")
"""Operators with integers among their inputs that compute in float."""


class _Case(NamedTuple):
    """What rules look at."""

    time: NodeTime
    bound: Bound
    attained: float | None
    machine: Machine

    @property
    def node(self) -> ir.Node:
        return self.time.node

    @property
    def multiplies(self) -> bool:
        return bool(self.time.cost.macs)

    @property
    def integer(self) -> bool:
        return is_integer(self.node)


def advise(time: NodeTime, bound: Bound, attained: float | None, machine: Machine) -> Advice:
    """What to do next about one operator."""
    case = _Case(time, bound, attained, machine)
    return next(advice for rule in _RULES if (advice := rule(case)) is not None)


_LAYOUTS = ("Transpose", "ReorderInput", "ReorderOutput")


def _layout(case: _Case) -> Advice | None:
    if case.node.op_type not in _LAYOUTS:
        return None
    return Advice(
        Action.LAYOUT,
        "it only moves data into another layout: keep one layout between the operators around it",
    )


def _pair(case: _Case) -> Advice | None:
    kind = case.node.op_type
    if kind not in ("QuantizeLinear", "DequantizeLinear"):
        return None
    others = _before(case.node) if kind == "QuantizeLinear" else _after(case.node)
    if not others:
        return Advice(Action.NOTHING, "it stands where the model begins or ends in float")
    names = ", ".join(dict.fromkeys(node.op_type for node in others))
    side = "before" if kind == "QuantizeLinear" else "behind"
    return Advice(
        Action.FUSE,
        f"it did not fuse with what stands {side} it ({names}): quantize that too, or move the "
        "border to where fewer values cross it",
    )


def _before(node: ir.Node) -> list[ir.Node]:
    makers = [value.producer() for value in node.inputs if value is not None]
    return [maker for maker in makers if maker is not None]


def _after(node: ir.Node) -> list[ir.Node]:
    return [use.node for value in node.outputs for use in value.uses()]


_POINTWISE = frozenset(
    (
        *("Abs", "Add", "BatchNormalization", "BiasGelu", "Cast", "Ceil", "Clip", "Div"),
        *("Elu", "Erf", "Exp", "FastGelu", "Floor", "Gelu", "HardSigmoid", "HardSwish"),
        *("LeakyRelu", "Log", "Max", "Min", "Mish", "Mul", "Neg", "Not", "PRelu", "Pow"),
        *("QLinearAdd", "QLinearMul", "QLinearLeakyRelu", "QLinearSigmoid", "QuickGelu"),
        *("Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Softplus"),
        *("Softsign", "Sqrt", "Sub", "Tanh", "ThresholdedRelu", "Where"),
    )
)
"""Operators that compute each value from those at the same place."""


def _float_between_pairs(case: _Case) -> Advice | None:
    kinds = {node.op_type for node in (*_before(case.node), *_after(case.node))}
    touches = kinds & {"QuantizeLinear", "DequantizeLinear"}
    if case.node.op_type not in _POINTWISE or case.integer or not touches:
        return None
    return Advice(
        Action.QUANTIZE,
        "it computes in float between quantized operators, which is why Q/DQ nodes stand around it",
    )


def _pointwise(case: _Case) -> Advice | None:
    if case.node.op_type not in _POINTWISE:
        return None
    heavy = [node.op_type for node in _before(case.node) if node.op_type in _LINEAR]
    if heavy:
        return Advice(
            Action.FUSE,
            f"it reads back what {heavy[0]} has just written: computed there, its bytes would not "
            "move at all",
        )
    return None


_LINEAR = frozenset(
    (
        *("Conv", "ConvTranspose", "FusedConv", "FusedGemm", "FusedMatMul", "Gemm"),
        *("MatMul", "MatMulNBits", "QGemm", "QLinearConv", "QLinearMatMul"),
        *("MatMulInteger", "ConvInteger", "MatMulIntegerToFloat"),
        *("DynamicQuantizeMatMul",),
    )
)


def _integers_pay(case: _Case) -> bool:
    return case.machine.integer_macs >= GAIN * case.machine.float_macs


def _weights(case: _Case) -> Advice | None:
    """Bytes of weights are most of what it waits for: one sample, large matrices."""
    cost = case.time.cost
    if not case.multiplies or case.bound is not Bound.MEMORY:
        return None
    if cost.weight_bytes <= (cost.activation_bytes or 0):
        return None
    if case.integer or case.node.op_type == "MatMulNBits":
        return Advice(Action.PRUNE, "it waits for its weights, which are small integers already")
    return Advice(
        Action.QUANTIZE,
        "it waits for its weights: stored in 8 or 4 bits (--mode weight-only or dynamic) they are "
        "a quarter or less",
    )


def _depthwise(case: _Case) -> Advice | None:
    """Convolutions of one channel each, by what their own kernels were measured to do."""
    if not _is_depthwise(case.node) or case.bound not in _WORK:
        return None
    machine = case.machine
    pays = machine.integer_depthwise >= GAIN * machine.float_depthwise
    if case.integer:
        why = "it computes in integers already" if pays else _NO_DEPTHWISE
        return Advice(Action.NOTHING, why)
    if pays:
        times = machine.integer_depthwise / machine.float_depthwise
        return Advice(
            Action.QUANTIZE,
            f"it is depthwise, and in integers {times:.1f}x as fast on this machine",
        )
    return Advice(Action.NOTHING, _NO_DEPTHWISE)


_NO_DEPTHWISE = (
    "it is depthwise, and integer kernels are no faster there on this machine: quantize it only so "
    "that no Q/DQ nodes stand around it"
)


def _is_depthwise(node: ir.Node) -> bool:
    place = 3 if node.op_type == "QLinearConv" else 1
    if node.op_type not in ("Conv", "QLinearConv", "FusedConv") or len(node.inputs) <= place:
        return False
    weight = node.inputs[place]
    tensor = weight.const_value if weight is not None else None
    # [out, in / group, *kernel]
    return tensor is not None and len(tensor.shape) > 2 and tensor.shape[1] == 1


def _float_product_rule(case: _Case) -> Advice | None:
    if not case.multiplies or case.integer or case.bound not in _WORK:
        return None
    if case.bound is Bound.MEMORY:
        return Advice(Action.QUANTIZE, "it waits for its activations: in 8 bits they are a quarter")
    if _integers_pay(case):
        times = case.machine.integer_macs / case.machine.float_macs
        return Advice(
            Action.QUANTIZE,
            f"it computes in float, and this machine's integers are {times:.1f}x as fast",
        )
    return Advice(
        Action.PRUNE,
        "this machine's integers are no faster than its floats: only fewer operations help",
    )


def _integer_product_rule(case: _Case) -> Advice | None:
    if not case.multiplies or not case.integer or case.bound is not Bound.COMPUTE:
        return None
    attained = case.attained or 0.0
    if attained * case.machine.integer_macs < SLOWEST_FLOAT * case.machine.float_macs:
        return Advice(
            Action.NOTHING,
            "its integer kernel does fewer operations per second than a float kernel would: "
            "compare with this node left in float (--exclude)",
        )
    return Advice(Action.PRUNE, "it computes in integers already: only fewer operations help")


def _rest(case: _Case) -> Advice:
    if case.bound is Bound.UNKNOWN:
        return Advice(Action.NOTHING, "there is no formula for its operations")
    if case.bound is Bound.OVERHEAD:
        return Advice(Action.NOTHING, "a call costs more than its work")
    if case.attained is not None and case.attained >= NEAR:
        return Advice(Action.NOTHING, "it is near its bound")
    return Advice(Action.NOTHING, "its kernel stays below the machine's peak; no rule knows better")


_RULES: tuple[Callable[[_Case], Advice | None], ...] = (
    _layout,
    _pair,
    _float_between_pairs,
    _pointwise,
    _depthwise,
    _weights,
    _float_product_rule,
    _integer_product_rule,
    _rest,
)


def heavy(placed: Sequence[Placed]) -> list[Placed]:
    """Nodes that take at least :data:`HEAVY` of the time, longest first."""
    found = [node for node in placed if node.time.share >= HEAVY]
    return sorted(found, key=lambda node: -node.time.seconds)


def summarize(placed: Sequence[Placed]) -> list[Summary]:
    """Actions by the share of the time that their nodes take, largest first.

    All nodes count: a hundred light ones of a kind can weigh more than a heavy one.
    """
    return sorted(_sums(placed), key=lambda item: -item.share)


def _sums(placed: Sequence[Placed]) -> Iterator[Summary]:
    for action in Action:
        nodes = [node for node in placed if node.advice.action is action]
        if nodes:
            yield Summary(action, sum(node.time.share for node in nodes), len(nodes))
