"""Cross-layer equalization: channels of a tensor get the same strength, so that they share a scale.

An int8 activation has one scale for all of its channels, and its strongest channel decides it: a
channel a hundred times weaker keeps one or two of the 256 levels. A channel c can be divided by a
positive factor s_c where it is computed and multiplied by it where it is read, if everything in
between passes the factor on. Nagel et al., "Data-Free Quantization Through Weight Equalization and
Bias Correction", ICCV 2019, section 4.1, balance the ranges of weights so; as in SmoothQuant (Xiao
et al., 2023) it is the activations here, measured on data:

    s_c = max over tensors t of r_tc / max_k r_tk

r_tc is the root mean square of channel c in tensor t; the tensors are all that hold the channel,
which in a residual network are many. In each of them a channel is raised as far as that is possible
without any channel passing the strongest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Final, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Context, Effect, Outlook, Pass, PassReport, Skipped
from slimctl.core.target import Target
from slimctl.graph.channels import Group, analyze, group_units
from slimctl.graph.channels.units import FIXED, Ids
from slimctl.graph.edit import clone_model
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._layers import QUANTIZERS
from slimctl.passes._outlook import WORTH_DB, gain_note, why_not
from slimctl.passes._scaling import Scaling, find_scaling

_EQUAL: Final = 10.0 ** (-WORTH_DB / 20.0)
"""Raising channels by less than this cannot gain as much."""

_WEAKEST: Final = 2.0**-8
"""No channel is raised by more than the 256 levels of a scale: below, there is only rounding."""


class _Channels(NamedTuple):
    """An axis of a tensor that holds channels which may be scaled.

    Attributes:
        value: The tensor.
        axis: Not negative.
        units: The representative of each index, or FIXED.
    """

    value: ir.Value
    axis: int
    units: Ids

    @property
    def name(self) -> str:
        """Of the tensor."""
        return self.value.name or ""

    @property
    def is_stored(self) -> bool:
        """Whether it is quantized; what is read by Relu alone is not."""
        uses = self.value.uses()
        return not uses or any(use.node.op_type != "Relu" for use in uses)

    def in_graph(self, graph: ir.Graph) -> bool:
        """Whether it is computed in this graph, and not in a branch."""
        producer = self.value.producer()
        return producer is not None and producer.graph is graph


class Equalize(Pass):
    """Cross-layer equalization: channels that share a scale become equally strong."""

    name: ClassVar[str] = "equalize"
    summary: ClassVar[str] = "Make the channels of a tensor equally strong before quantization"
    effect: ClassVar[Effect] = Effect.EXACT
    needs_data: ClassVar[bool] = True
    not_after: ClassVar[frozenset[str]] = QUANTIZERS

    def minimum_opset(self, model: ir.Model, target: Target) -> int:
        """What quantization will ask for, so that what is measured here serves it too."""
        del model
        return target.minimum_opset

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        """Scales channels, if what comes later makes more of that."""
        infer_shapes(model)
        equal = clone_model(model)
        scaling = find_scaling(equal, analyze(equal))
        groups = group_units(scaling.channels)
        skipped = list(_skipped(groups, scaling))
        free = [group for group in groups if _free(group, scaling).size]
        if not free:
            return PassReport(skipped=tuple(skipped))
        tensors = _tensors(scaling)
        axes = {t.name: t.axis for t in tensors if t.in_graph(equal.graph) and t.is_stored}
        factors = _factors(scaling, tensors, context.channel_rms(model, axes))
        if np.all(factors >= _EQUAL):
            return PassReport(skipped=tuple(skipped), notes=("channels are equally strong",))
        nodes = scaling.divide(factors)
        outlook = context.outlook(model, equal, {tensor.name for tensor in tensors})
        reason = why_not(outlook, context.later, "equalized")
        if reason:
            skipped.extend(Skipped(_name(group), reason) for group in free)
            return PassReport(skipped=tuple(skipped), notes=(f"dropped: {reason}",))
        model.graph = equal.graph
        return PassReport(
            changed=dict(sorted(Counter(node.op_type for node in nodes).items())),
            skipped=tuple(skipped),
            notes=(_note(factors, len(free), outlook),),
            facts={"outlook_db": None if outlook is None else list(outlook)},
        )


def _free(group: Group, scaling: Scaling) -> Ids:
    return np.array([unit for unit in group.units if int(unit) not in scaling.fixed], np.int64)


def _skipped(groups: Sequence[Group], scaling: Scaling) -> Iterator[Skipped]:
    """Groups of which no channel may be scaled."""
    for group in groups:
        if not _free(group, scaling).size:
            block = scaling.fixed[int(group.units[0])]
            yield Skipped(_name(group), block.reason)


def _name(group: Group) -> str:
    return (group.layers[0].name or group.layers[0].op_type) if group.layers else ""


def _tensors(scaling: Scaling) -> list[_Channels]:
    """Tensors that hold channels which may be scaled."""
    free = np.ones(len(scaling.channels.units), bool)
    free[list(scaling.fixed)] = False
    found: list[_Channels] = []
    for value, axes in scaling.channels.tensors.items():
        for axis, labels in axes.items():
            roots = scaling.channels.units.find(labels.ids)
            if np.any(free[roots[roots != FIXED]]):
                found.append(_Channels(value, axis, roots))
    return found


def _factors(
    scaling: Scaling, tensors: Sequence[_Channels], rms: Mapping[str, NDArray[np.float64]]
) -> NDArray[np.float64]:
    """The factor that each unit is divided by: what its channels are to the strongest beside them.

    Args:
        scaling: Which may be chosen.
        tensors: Tensors that hold the channels.
        rms: Root mean squares [channels] of some of them.
    """
    strength = np.zeros(len(scaling.channels.units))
    for tensor in tensors:
        levels = rms.get(tensor.name)
        if levels is None or not np.any(levels):
            continue
        known = tensor.units != FIXED
        np.maximum.at(strength, tensor.units[known], (levels / levels.max())[known])
    # A channel that never held anything stays as it is.
    factors = np.where(strength > 0.0, np.maximum(strength, _WEAKEST), 1.0)
    factors[list(scaling.fixed)] = 1.0
    return factors


def _note(factors: NDArray[np.float64], groups: int, outlook: Outlook | None) -> str:
    scaled = factors[factors != 1.0]
    largest = 1.0 / scaled.min(initial=1.0)
    text = f"{scaled.size} channels of {groups} groups raised, by up to {largest:.0f} times"
    return gain_note(text, outlook)
