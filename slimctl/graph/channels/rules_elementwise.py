"""Operators that work on each element: their operands' channels go together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.channels.coupling import Axis, Role
from slimctl.graph.channels.fills import adapted
from slimctl.graph.channels.rule import Rule
from slimctl.graph.channels.site import Site
from slimctl.graph.channels.units import FIXED, Ids

_Values = NDArray[np.float64]

_UNDEFINED = "it is not defined where a channel is zero, or may not be"


# one operand


def _attribute(site: Site, name: str, default: float) -> float:
    return float(site.attribute(name, default))


def _sigmoid(site: Site, x: _Values) -> _Values:
    del site
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def _hard_sigmoid(site: Site, x: _Values) -> _Values:
    alpha, beta = _attribute(site, "alpha", 0.2), _attribute(site, "beta", 0.5)
    return np.clip(alpha * x + beta, 0.0, 1.0)


def _leaky(site: Site, x: _Values) -> _Values:
    return np.where(x < 0, _attribute(site, "alpha", 0.01) * x, x)


def _clip(site: Site, x: _Values) -> _Values:
    """Bounds are inputs, or attributes before opset 11; computed bounds leave nothing known."""
    bounds: list[float] = []
    for index, name, default in ((1, "min", -math.inf), (2, "max", math.inf)):
        given = site.constant(index)
        if site.has(index) and given is None:
            return np.full(x.shape, np.nan)
        bounds.append(_attribute(site, name, default) if given is None else float(given.item()))
    return np.clip(x, bounds[0], bounds[1])


def _cast(site: Site, x: _Values) -> _Values:
    """Rounds as the type that is cast to; whole numbers cut off."""
    kind = site.node.outputs[0].dtype
    rest = np.full(x.shape, np.nan)
    if kind is None or kind == ir.DataType.STRING:
        return rest
    known = ~np.isnan(x)
    rest[known] = x[known].astype(kind.numpy()).astype(np.float64)
    return rest


def _plain(function: Callable[[_Values], Any]) -> Callable[[Site, _Values], _Values]:
    return lambda site, x: np.asarray(function(x), np.float64)


_FUNCTIONS: dict[str, Callable[[Site, _Values], _Values]] = {
    "Abs": _plain(np.abs),
    "Cast": _cast,
    "Clip": _clip,
    "Cos": _plain(np.cos),
    "Cosh": _plain(np.cosh),
    "Erf": _plain(np.vectorize(math.erf)),
    "Exp": _plain(np.exp),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _plain(lambda x: x * np.clip(x / 6.0 + 0.5, 0.0, 1.0)),
    "Identity": _plain(lambda x: x),
    "LeakyRelu": _leaky,
    "Neg": _plain(np.negative),
    "Not": _plain(lambda x: 1.0 - x),
    "Relu": _plain(lambda x: np.maximum(x, 0.0)),
    "Sigmoid": _sigmoid,
    "Softplus": _plain(lambda x: np.logaddexp(0.0, x)),
    "Tanh": _plain(np.tanh),
}
"""What an operator makes of a constant. NaN stays NaN."""

_PARTIAL: dict[str, Callable[[Site, _Values], _Values]] = {
    "Acos": _plain(np.arccos),
    "Acosh": _plain(np.arccosh),
    "Asin": _plain(np.arcsin),
    "Atanh": _plain(np.arctanh),
    "Log": _plain(np.log),
    "Reciprocal": _plain(np.reciprocal),
    "Sqrt": _plain(np.sqrt),
}
"""The same for those that are not defined for every number: 0 times NaN would not be 0."""

_ZERO_AT_ZERO = [
    "Asinh",
    "Atan",
    "Ceil",
    "Celu",
    "Elu",
    "Floor",
    "Gelu",
    "Mish",
    "Round",
    "Selu",
    "Shrink",
    "Sign",
    "Sin",
    "Sinh",
    "Softsign",
    "Swish",
    "Tan",
    "ThresholdedRelu",
]
_NOT_ZERO_AT_ZERO = ["BitwiseNot", "IsInf", "IsNaN"]


def _function(site: Site) -> None:
    for axis, labels in site.axes().items():
        site.label(axis, _applied(site, labels, _FUNCTIONS))


def _partial_function(site: Site) -> None:
    for axis, labels in site.axes().items():
        result = _applied(site, labels, _PARTIAL)
        site.block(labels.ids[np.isnan(result.rest)], _UNDEFINED)
        site.label(axis, result)


def _applied(
    site: Site, labels: Axis, functions: Mapping[str, Callable[[Site, _Values], _Values]]
) -> Axis:
    """What a function makes of a constant; one that it makes no finite number of must stay."""
    before = np.asarray(labels.rest)
    with np.errstate(all="ignore"):
        rest = functions[site.node.op_type](site, before)
    site.block(labels.ids[np.isinf(rest) & np.isfinite(before)], _UNDEFINED)
    return Axis(labels.ids, rest, labels.alive or site.name)


def _zero_stays(site: Site) -> None:
    for axis, labels in site.axes().items():
        site.label(axis, labels.unknown(site.name))


def _anything(site: Site) -> None:
    for axis, labels in site.axes().items():
        site.label(axis, site.alive(labels))


def _dropout(site: Site) -> None:
    for axis, labels in site.axes().items():
        site.label(axis, labels)
    if site.is_read(1):
        site.block_inputs("the mask of the Dropout is used")


# several operands


class _Combined:
    """One axis of the result of an operator that broadcasts."""

    def __init__(self, ids: Ids, rests: list[_Values], alive: str) -> None:
        self.ids = ids
        self.rests = rests
        self.alive = alive


def _broadcast(site: Site, role: Role) -> dict[int, _Combined]:
    """Ties the axes of all operands as ONNX broadcasts them.

    Args:
        site: The node; every input is an operand.
        role: What slices of a constant operand do.

    Returns:
        For each labeled axis of the result, its labels and what each operand holds at a removed
        index; NaN where that is not one number.
    """
    operands = [index for index in range(len(site.node.inputs)) if site.has(index)]
    shapes = {index: site.shape(index) for index in operands}
    if any(shape is None for shape in shapes.values()):
        site.block_inputs("the rank of an operand is unknown")
        return {}
    rank = max(len(shape or ()) for shape in shapes.values())
    shift = {index: rank - len(shapes[index] or ()) for index in operands}
    places = sorted({axis + shift[index] for index in operands for axis in site.axes(index)})
    return {place: _combine(site, role, operands, shift, place) for place in places}


def _combine(
    site: Site, role: Role, operands: Sequence[int], shift: dict[int, int], place: int
) -> _Combined:
    labeled = {
        index: site.axes(index)[place - shift[index]]
        for index in operands
        if place - shift[index] in site.axes(index)
    }
    sides = list(labeled.values())
    ids = sides[0].ids
    for side in sides[1:]:
        ids = site.tie(ids, side.ids)
    rests: list[_Values] = []
    for index in operands:
        axis = place - shift[index]
        size = None if axis < 0 else (site.shape(index) or ())[axis]
        if index in labeled:
            rests.append(np.asarray(labeled[index].rest))
        elif axis < 0 or size == 1:
            rests.append(np.full(ids.shape, site.one_number(index)))
        elif size != ids.size:
            site.block(ids, "the size of an operand is unknown")
            rests.append(np.full(ids.shape, np.nan))
        else:
            rest = adapted(site, index, axis, ids, role)
            if rest is None:
                ids = site.tie(ids, np.full(ids.size, FIXED, np.int64))
            rests.append(np.full(ids.shape, np.nan) if rest is None else rest)
    alive = next((side.alive for side in sides if side.alive), "")
    return _Combined(ids, rests, alive or site.name)


def _sum(site: Site) -> None:
    for place, found in _broadcast(site, Role.PRODUCE).items():
        total = np.asarray(found.rests[0])
        for other in found.rests[1:]:
            total = total - other if site.node.op_type == "Sub" else total + other
        if site.node.op_type == "Mean":
            total = total / len(found.rests)
        site.label(place, Axis(found.ids, total, found.alive))


def _product(site: Site) -> None:
    for place, found in _broadcast(site, Role.CARRY).items():
        total = np.asarray(found.rests[0])
        for other in found.rests[1:]:
            zero = ((total == 0.0) & ~np.isinf(other)) | ((other == 0.0) & ~np.isinf(total))
            with np.errstate(invalid="ignore"):
                total = np.where(zero, 0.0, total * other)
        site.label(place, Axis(found.ids, total, found.alive))


def _zero_wins(site: Site) -> None:
    for place, found in _broadcast(site, Role.CARRY).items():
        zero = np.any([rest == 0.0 for rest in found.rests], axis=0)
        site.label(place, Axis(found.ids, np.where(zero, 0.0, np.nan), found.alive))


def _quotient(site: Site) -> None:
    for place, found in _broadcast(site, Role.CARRY).items():
        above, below = found.rests
        _check_divisor(site, found)
        with np.errstate(all="ignore"):
            rest = np.where(above == 0.0, 0.0, above / below)
        kind = site.node.outputs[0].dtype
        if kind is None or not kind.is_floating_point():
            rest = np.trunc(rest)
        site.label(place, Axis(found.ids, rest, found.alive))


def _modulo(site: Site) -> None:
    for place, found in _broadcast(site, Role.CARRY).items():
        _check_divisor(site, found)
        site.label(place, Axis(found.ids, np.full(found.ids.shape, np.nan), found.alive))


def _check_divisor(site: Site, found: _Combined) -> None:
    """A divisor without channels is the same with and without them; so is a constant."""
    if site.axes(1) and not site.is_constant(1):
        below = found.rests[1]
        site.block(found.ids[(below == 0.0) | ~np.isfinite(below)], _UNDEFINED)


def _power(site: Site) -> None:
    for place, found in _broadcast(site, Role.CARRY).items():
        base, exponent = found.rests
        with np.errstate(all="ignore"):
            rest = np.power(base, exponent)
            whole = (exponent >= 0.0) & (exponent == np.trunc(exponent))
        defined = np.isfinite(rest) | (np.isnan(base) & whole)
        site.block(found.ids[~defined], _UNDEFINED)
        site.label(place, Axis(found.ids, rest, found.alive))


def _extreme(site: Site) -> None:
    choose = np.maximum if site.node.op_type == "Max" else np.minimum
    for place, found in _broadcast(site, Role.CARRY).items():
        total = np.asarray(found.rests[0])
        for other in found.rests[1:]:
            total = choose(total, other)
        site.label(place, Axis(found.ids, total, found.alive))


def _prelu(site: Site) -> None:
    for place, found in _broadcast(site, Role.CARRY).items():
        data = found.rests[0]
        site.label(place, Axis(found.ids, np.where(data >= 0, data, np.nan), found.alive))


def _unknown(site: Site) -> None:
    for place, found in _broadcast(site, Role.CARRY).items():
        site.label(place, Axis(found.ids, np.full(found.ids.shape, np.nan), found.alive))


def _where(site: Site) -> None:
    for place, found in _broadcast(site, Role.CARRY).items():
        _, first, second = found.rests
        rest = np.where(first == second, first, np.nan)
        site.label(place, Axis(found.ids, rest, found.alive))


RULES = {
    **dict.fromkeys(_FUNCTIONS, Rule(_function)),
    **dict.fromkeys(_PARTIAL, Rule(_partial_function)),
    **dict.fromkeys(_ZERO_AT_ZERO, Rule(_zero_stays)),
    **dict.fromkeys(_NOT_ZERO_AT_ZERO, Rule(_anything)),
    **dict.fromkeys(("Add", "Sub", "Sum", "Mean"), Rule(_sum)),
    **dict.fromkeys(("Mul", "And"), Rule(_product)),
    **dict.fromkeys(("Max", "Min"), Rule(_extreme)),
    **dict.fromkeys(
        ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Or", "Xor"),
        Rule(_unknown),
    ),
    "BitwiseAnd": Rule(_zero_wins),
    "Div": Rule(_quotient),
    "Dropout": Rule(_dropout),
    "Mod": Rule(_modulo),
    "PRelu": Rule(_prelu),
    "Pow": Rule(_power),
    "Where": Rule(_where),
}
