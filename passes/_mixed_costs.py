"""What layers cost in each precision: time in onnxruntime, bytes, or bit operations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

import onnx_ir as ir

from slimctl.core.contract import ReportTable
from slimctl.evaluate.profile import NodeTime, Profile
from slimctl.graph.cost import node_costs
from slimctl.graph.edit import const_array
from slimctl.graph.save import weight_bytes
from slimctl.passes._mixed_candidates import Candidates
from slimctl.passes._mixed_choice import Boundary
from slimctl.passes._mixed_words import Choice, Precision
from slimctl.passes._precision import FLOAT, Carrier
from slimctl.passes._precisions import PRECISIONS

Prices = Mapping[tuple[Precision, Precision], float]


@dataclass(frozen=True)
class Costs:
    """What layers cost, more than as the options would quantize them.

    Attributes:
        unit: ``s``, ``B`` or ``bit operations``.
        cost: By layer and precision.
        boundaries: Where conversions may be.
        prices: Of a conversion, per element.
        float_total: Of the float model.
        usual_total: With everything quantized as the options say.
    """

    unit: str
    cost: Mapping[str, Mapping[Precision, float]]
    boundaries: tuple[Boundary, ...]
    prices: Prices
    float_total: float
    usual_total: float

    def estimated(self, choice: Choice) -> float:
        """What a model costs by its layers, conversions left out."""
        saved = sum(self.cost[name][FLOAT] - self.cost[name][kind] for name, kind in choice.items())
        return self.float_total - saved

    def tables(self, choice: Choice, start: Choice) -> list[ReportTable]:
        """The layers that are not what they would be by the options alone; none without any."""
        scale, unit = {"s": (1e3, "ms"), "B": (1e-3, "kB")}.get(
            self.unit, (1e-9, "Gbit operations")
        )
        rows = [
            (name, kind, f"{self.cost[name][kind] * scale:+.3f}")
            for name, kind in choice.items()
            if kind != start[name]
        ]
        columns = ("layer", "is", f">costs {unit}")
        return [ReportTable("Layers of other precision", columns, rows)] if rows else []

    def cheapest_first(self, kinds: Sequence[Precision], layer: str) -> list[Precision]:
        """The precisions of a layer by what they cost; among equals as they were."""
        return sorted(kinds, key=lambda kind: self.cost[layer][kind])


def _more_than_made(
    found: Candidates, total: Callable[[str, Precision], float]
) -> dict[str, dict[Precision, float]]:
    """What each precision costs more than the first one, which the options make of a layer."""
    return {
        layer: {kind: total(layer, kind) - total(layer, kinds[0]) for kind in kinds}
        for layer, kinds in found.kinds.items()
    }


def sizes(model: ir.Model, found: Candidates, start: ir.Model) -> Costs:
    """Bytes of weights: those of a layer shrink from its float type to the bits that are stored.

    Args:
        model: The float model.
        found: Precisions to choose from.
        start: As the options alone would quantize it.
    """
    bytes_of = {cost.name: cost.weight_bytes for cost in node_costs(model)}

    def stored(layer: str, kind: Precision) -> float:
        return bytes_of.get(layer, 0) * PRECISIONS[kind].stored_bits / PRECISIONS[FLOAT].stored_bits

    cost = _more_than_made(found, stored)
    return Costs("B", cost, (), {}, weight_bytes(model), weight_bytes(start))


def bit_operations(model: ir.Model, found: Candidates) -> Costs:
    """Products times bits of both factors, for providers whose time cannot be measured here."""
    products = {cost.name: float(cost.macs or cost.parameters or 1) for cost in node_costs(model)}

    def multiplied(layer: str, kind: Precision) -> float:
        return products.get(layer, 1.0) * PRECISIONS[kind].multiplied_bits

    whole = sum(multiplied(layer, FLOAT) for layer in found.kinds)
    made = sum(multiplied(layer, kinds[0]) for layer, kinds in found.kinds.items())
    cost = _more_than_made(found, multiplied)
    return Costs("bit operations", cost, (), {}, whole, made)


def times(
    model: ir.Model,
    found: Candidates,
    start: Profile,
    profiles: Mapping[Precision, Profile],
    alternating: Profile,
) -> Costs:
    """Seconds in onnxruntime on one thread.

    Args:
        model: The float model.
        found: Precisions to choose from.
        start: As the options alone would quantize it.
        profiles: With all layers in one precision.
        alternating: Of a model in which every second layer is in float.
    """
    layers = list(found.kinds)
    seconds = {kind: seconds_by_layer(profile, layers) for kind, profile in profiles.items()}
    slow = seconds[FLOAT]
    typical = sum(slow.values()) / max(len(slow), 1)
    ratios = {kind: _ratio(each, slow) for kind, each in seconds.items()}

    def spent(layer: str, kind: Precision) -> float:
        return seconds[kind].get(layer, slow.get(layer, typical) * ratios[kind])

    wide = profiles.get("int16")
    prices = _prices(_conversion(alternating), 0.0 if wide is None else _conversion(wide))
    near = tuple(boundaries(model, layers))
    cost = _more_than_made(found, spent)
    return Costs("s", cost, near, prices, profiles[FLOAT].kernels, start.kernels)


def _ratio(seconds: Mapping[str, float], slow: Mapping[str, float]) -> float:
    """How the time of layers compares with float, over those that are known."""
    known = seconds.keys() & slow.keys()
    before = sum(slow[layer] for layer in known)
    return sum(seconds[layer] for layer in known) / before if before else 1.0


def seconds_by_layer(found: Profile, layers: Collection[str]) -> dict[str, float]:
    """Time of the kernel that computes each layer, and of what restores its weights.

    Kernels that layers share are shared.
    """
    seconds: dict[str, float] = {}
    for node in found.nodes:
        served = _served(node) if _is_restoring(node) else [node.name, *node.covers]
        own = [name for name in dict.fromkeys(served) if name in layers]
        for name in own:
            seconds[name] = seconds.get(name, 0.0) + node.seconds / len(own)
    return seconds


def _is_restoring(node: NodeTime) -> bool:
    """Whether it is the DQ of a constant."""
    return node.op_type == "DequantizeLinear" and const_array(node.node.inputs[0]) is not None


def _served(node: NodeTime) -> list[str]:
    return [user.name or "" for value in node.node.outputs for user in value.consumers()]


_CONVERSIONS: Final = ("QuantizeLinear", "DequantizeLinear")


def _conversion(found: Profile) -> float:
    """Seconds per element that a Q or DQ of activations takes."""
    nodes = [n for n in found.nodes if n.op_type in _CONVERSIONS and not _is_restoring(n)]
    elements = sum(_elements(node.node.outputs[0]) for node in nodes)
    return sum(node.seconds for node in nodes) / elements if elements else 0.0


def _prices(narrow: float, wide: float) -> Prices:
    """Per element, by the precisions of who makes a tensor and who reads it.

    Integer kernels of 8 bits read and write codes; what is of 16 bits is rounded where it stands,
    a Q and a DQ, since onnxruntime has no kernels for it.

    Args:
        narrow: A Q or DQ of 8 bits.
        wide: A Q or DQ of 16 bits.
    """
    by_carrier: dict[tuple[Carrier, Carrier], float] = {
        ("wide", "wide"): 2 * wide,
        ("codes", "wide"): narrow + 2 * wide,
        ("codes", "real"): narrow,
        ("wide", "real"): 2 * wide,
    }
    by_carrier |= {(second, first): price for (first, second), price in by_carrier.items()}
    return {
        (one.name, other.name): by_carrier.get((one.carrier, other.carrier), 0.0)
        for one, other in product(PRECISIONS.values(), repeat=2)
    }


def boundaries(model: ir.Model, layers: Collection[str]) -> Iterator[Boundary]:
    """Pairs of layers of which one reads what the other makes, other operators between them."""
    for node in model.graph:
        if node.name not in layers or node.inputs[0] is None:
            continue
        elements = _elements(node.inputs[0])
        for source in _sources(node.inputs[0], layers):
            yield Boundary(source, node.name or "", elements)


def _elements(value: ir.Value) -> int:
    """Elements of one sample; open dimensions count once."""
    if value.shape is None:
        return 0
    count = 1
    for size in value.shape:
        count *= size if isinstance(size, int) else 1
    return count


def _sources(value: ir.Value, layers: Collection[str]) -> list[str]:
    """The layers that a tensor is made of without another layer between."""
    found: set[str] = set()
    seen: set[ir.Value] = set()
    pending = [value]
    while pending:
        current = pending.pop()
        node = current.producer()
        if current in seen or node is None:
            continue
        seen.add(current)
        if node.name in layers:
            found.add(node.name or "")
        else:
            pending += [read for read in node.inputs if read is not None]
    return sorted(found)
