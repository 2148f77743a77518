"""Pooling, reductions, normalizations: channels pass where they are not mixed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import onnx_ir as ir

from slimctl.graph.channels.coupling import Role
from slimctl.graph.channels.rule import Rule
from slimctl.graph.channels.site import Site, normalized
from slimctl.graph.channels.units import Ids

if TYPE_CHECKING:
    from slimctl.graph.channels.removal import Removal

_CHANNEL = 1
_FLOATS = (
    ir.DataType.BFLOAT16,
    ir.DataType.DOUBLE,
    ir.DataType.FLOAT,
    ir.DataType.FLOAT16,
)
_MIXED = "it normalizes over these channels: without some of them the others would change"

_STATISTICS = "its mean or deviation is used"


def _pool(site: Site) -> None:
    """Pooling works on each channel by itself."""
    kind = site.node.op_type
    pads = any(site.attribute("pads", ())) or site.attribute("auto_pad", "NOTSET") != "NOTSET"
    filled_up = pads or site.attribute("ceil_mode", 0)
    padded = kind == "AveragePool" and filled_up and site.attribute("count_include_pad", 0)
    constant = "Lp" not in kind and not padded
    for axis, labels in site.axes().items():
        if axis > _CHANNEL:
            site.block(labels.ids, "it is pooled over this axis")
            continue
        for output in range(len(site.node.outputs)):
            site.label(axis, labels if constant else labels.unknown(site.name), output=output)
    if site.is_read(1):
        site.block_inputs("the indices of the pooling are used")


def _reduce(site: Site) -> None:
    """A sum over channels loses nothing with channels that were zero; a mean is scaled."""
    rank = site.rank()
    given = site.constant(1) if site.has(1) else site.attribute("axes")
    if rank is None or (site.has(1) and given is None):
        site.block_inputs("what it reduces is unknown")
        return
    listed = [] if given is None else [normalized(int(axis), rank) for axis in given]
    if not listed and not site.attribute("noop_with_empty_axes", 0):
        listed = list(range(rank))
    keep = bool(site.attribute("keepdims", 1))
    constant = site.node.op_type in ("ReduceMean", "ReduceMax", "ReduceMin")
    zero = site.node.op_type != "ReduceLogSumExp"
    whole = site.node.outputs[0].dtype not in _FLOATS
    for axis, labels in site.axes().items():
        if axis not in listed:
            place = axis if keep else axis - sum(other < axis for other in listed)
            other = labels.unknown(site.name) if zero else site.alive(labels)
            if site.node.op_type == "ReduceLogSum":
                site.block(labels.ids, "the logarithm of zero is no number")
            site.label(place, labels if constant else other)
            continue
        if site.node.op_type in ("ReduceSum", "ReduceL1", "ReduceL2", "ReduceSumSquare"):
            site.consume(labels)
        elif site.node.op_type == "ReduceMean" and not whole:
            if _is_variance(site.node):  # the same as below, in the words of the network
                site.block(labels.ids[labels.rest != 0.0], _MIXED)
            ids = site.consume(labels)
            site.when_fewer(ids, partial(_scale, site, ids))
        else:
            site.block(labels.ids, f"{site.node.op_type} compares these channels")


def _is_variance(node: ir.Node) -> bool:
    """Whether it averages the squares of x - mean(x): a normalization in single operators."""
    square = _producer(node, 0, ("Mul", "Pow"))
    difference = square and _producer(square, 0, ("Sub",))
    mean = difference and _producer(difference, 1, ("ReduceMean",))
    return bool(difference and mean and mean.inputs[0] is difference.inputs[0])


def _producer(node: ir.Node, index: int, kinds: tuple[str, ...]) -> ir.Node | None:
    value = node.inputs[index]
    found = None if value is None else value.producer()
    return found if found is not None and found.op_type in kinds else None


def _scale(site: Site, ids: Ids, removal: Removal) -> None:
    removal.scale_output(site.node, removal.count(ids) / ids.size)


def _arg(site: Site) -> None:
    """ArgMax, ArgMin: the position among the channels is the result."""
    rank = site.rank()
    if rank is None:
        site.block_inputs("its rank is unknown")
        return
    reduced = normalized(int(site.attribute("axis", 0)), rank)
    keep = bool(site.attribute("keepdims", 1))
    for axis, labels in site.axes().items():
        if axis == reduced:
            site.block(labels.ids, "the position among these channels is the result")
        else:
            site.label(axis - (not keep and axis > reduced), site.alive(labels))


def _softmax(site: Site) -> None:
    rank = site.rank()
    if rank is None:
        site.block_inputs("its rank is unknown")
        return
    modern = site.opset >= 13  # before, everything from the axis on was one
    axis = normalized(int(site.attribute("axis", -1 if modern else 1)), rank)
    for place, labels in site.axes().items():
        if place == axis or (not modern and place > axis):
            site.block(labels.ids, _MIXED)
        else:
            site.label(place, site.alive(labels))


def _along(site: Site) -> None:
    """CumSum: every other axis passes."""
    rank, axis = site.rank(), site.constant(1)
    for place, labels in site.axes().items():
        if rank is None or axis is None or place == normalized(int(axis.reshape(-1)[0]), rank):
            site.block(labels.ids, "it runs along these channels")
        else:
            site.label(place, labels.unknown(site.name))


# normalizations


def _batch_norm(site: Site) -> None:
    if site.attribute("training_mode", 0) or any(
        site.constant(index) is None for index in range(1, 5)
    ):
        site.block_inputs("its statistics are computed at run time")
        return
    for axis, labels in site.axes().items():
        if axis == _CHANNEL:
            site.member(1, 0, labels.ids, Role.PRODUCE)
            site.member(2, 0, labels.ids, Role.PRODUCE)
            site.member(3, 0, labels.ids, Role.CARRY)
            site.member(4, 0, labels.ids, Role.CARRY)
            site.label(axis, site.computed(labels.ids))
        else:
            site.label(axis, site.alive(labels))


def _instance_norm(site: Site) -> None:
    if any(site.constant(index) is None for index in (1, 2)):
        site.block_inputs("its scale is computed at run time")
        return
    for axis, labels in site.axes().items():
        if axis == _CHANNEL:
            site.member(1, 0, labels.ids, Role.PRODUCE)
            site.member(2, 0, labels.ids, Role.PRODUCE)
            site.label(axis, site.computed(labels.ids))
        elif axis == 0:
            site.label(axis, site.alive(labels))
        else:
            site.block(labels.ids, _MIXED)


def _layer_norm(site: Site) -> None:
    """LayerNormalization: a mean over fewer channels is another mean."""
    rank = site.rank()
    if rank is None:
        site.block_inputs("its rank is unknown")
        return
    first = normalized(int(site.attribute("axis", -1)), rank)
    for axis, labels in site.axes().items():
        if axis >= first:
            site.block(labels.ids, _MIXED)
        elif _statistics_read(site):
            site.block(labels.ids, _STATISTICS)
        else:
            site.label(axis, site.alive(labels))


def _statistics_read(site: Site) -> bool:
    return any(site.is_read(output) for output in range(1, len(site.node.outputs)))


def _rms_norm(site: Site) -> None:
    """RMSNormalization: x / sqrt(S/N + e) * g, S the sum of squares over N channels.

    Channels that are zero leave S as it is. With N' of N left, e' = e N/N' and g' = g sqrt(N/N')
    give the same: x / sqrt(S/N' + e N/N') * g sqrt(N/N') = x / sqrt(S/N + e) * g.
    """
    rank, scale = site.rank(), site.constant(1)
    if rank is None:
        site.block_inputs("its rank is unknown")
        return
    first = normalized(int(site.attribute("axis", -1)), rank)
    for axis, labels in site.axes().items():
        if _statistics_read(site):
            site.block(labels.ids, _STATISTICS)
        elif axis < first:
            site.label(axis, labels.unknown(site.name))
        elif scale is None or first != rank - 1 or scale.shape != labels.ids.shape:
            site.block(labels.ids, _MIXED)
        else:
            ids = site.consume(labels)
            site.member(1, 0, ids, Role.CARRY)
            site.label(axis, site.computed(ids))
            site.when_fewer(ids, partial(_shrink_rms, site, ids))


def _shrink_rms(site: Site, ids: Ids, removal: Removal) -> None:
    removal.shrink_rms(site.node, removal.count(ids) / ids.size)


def _group_norm(site: Site) -> None:
    for axis, labels in site.axes().items():
        if axis == 0:
            site.label(axis, site.alive(labels))
        else:
            site.block(labels.ids, _MIXED)


def _lp_norm(site: Site) -> None:
    """LpNormalization divides by a sum of powers: what was zero does not count."""
    rank = site.rank()
    if rank is None:
        site.block_inputs("its rank is unknown")
        return
    for axis, labels in site.axes().items():
        summed = axis == normalized(int(site.attribute("axis", -1)), rank)
        if summed:
            site.consume(labels)
        site.label(axis, labels.unknown(site.name))


def _mean_variance(site: Site) -> None:
    """MeanVarianceNormalization has no epsilon: of a channel that is zero it makes NaN."""
    site.block_inputs("it divides by the deviation of a channel, which may be zero")


def _lrn(site: Site) -> None:
    for axis, labels in site.axes().items():
        if axis == _CHANNEL:
            site.block(labels.ids, "it normalizes over neighboring channels")
        else:
            site.label(axis, labels.unknown(site.name))


_REDUCTIONS = [
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
]
_POOLS = (
    "AveragePool",
    "GlobalAveragePool",
    "GlobalLpPool",
    "GlobalMaxPool",
    "LpPool",
    "MaxPool",
)

RULES = {
    **dict.fromkeys(_REDUCTIONS, Rule(_reduce)),
    **dict.fromkeys(_POOLS, Rule(_pool)),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), Rule(_softmax)),
    **dict.fromkeys(("ArgMax", "ArgMin"), Rule(_arg)),
    **dict.fromkeys(("RMSNormalization", "SimplifiedLayerNormalization"), Rule(_rms_norm)),
    "BatchNormalization": Rule(_batch_norm),
    "CumSum": Rule(_along),
    "GroupNormalization": Rule(_group_norm),
    "InstanceNormalization": Rule(_instance_norm),
    "LRN": Rule(_lrn),
    "LayerNormalization": Rule(_layer_norm),
    "LpNormalization": Rule(_lp_norm),
    "MeanVarianceNormalization": Rule(_mean_variance),
}
