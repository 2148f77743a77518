"""A model as the conversion of float types sees it: who writes and who reads each float32 value.

A *site* computes in one type: a node, or what holds a tensor at the border of a body (the carried
state of a Loop is one tensor inside and outside, so both change type together).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, NamedTuple

import onnx_ir as ir

from slimctl.graph.edit import all_graphs, attribute_graphs, const_tensor
from slimctl.graph.opset import default_opset
from slimctl.passes._float_cut import Traffic, full_sites
from slimctl.passes._float_rules import CHEAP, REDUCTIONS
from slimctl.passes._float_slots import NO_SLOTS, Slot, Slots, holds_graphs, slots_of

_FREE, _LIGHT, _MODERATE, _HEAVY = 0, 1, 3, 1 << 20
_SMALL: Final = 4096  # elements of a constant that costs nothing to keep in float32


@dataclass(eq=False)
class Site:
    """What computes in one type.

    Attributes:
        name: For reports.
        op_type: For reports.
        cost: What float32 costs here, see :mod:`slimctl.passes._float_cut`.
        node: None at the border of a body or of the model.
        slots: Of the node.
        reason: Why it must compute in float32; empty where it need not.
        full: Whether it does, once that is decided.
    """

    name: str
    op_type: str
    cost: int
    node: ir.Node | None = None
    slots: Slots = NO_SLOTS
    reason: str = ""
    full: bool = False

    def force(self, reason: str) -> None:
        """Float32, for this reason unless there is one already."""
        self.reason = self.reason or reason


class Read(NamedTuple):
    """One use of a value.

    Attributes:
        user: The node that reads it, or the graph whose output it is.
        place: Place among the inputs of the node or the outputs of the graph.
        site: Whose type it is read in.
    """

    user: ir.Node | ir.Graph
    place: int
    site: Site


@dataclass
class Network:
    """Sites, and the float32 values between them.

    Attributes:
        narrow: The type to convert to.
        sites: All sites; the first is float32 by definition.
        producers: Who writes a value; constants have no entry.
        reads: Who reads a value; reads that take any type are left out.
        by_node: The sites that are nodes.
    """

    narrow: ir.DataType
    sites: list[Site] = field(default_factory=lambda: [Site("", "", _FREE, reason="float32")])
    producers: dict[ir.Value, Site] = field(default_factory=dict)
    reads: dict[ir.Value, list[Read]] = field(default_factory=dict)
    by_node: dict[ir.Node, Site] = field(default_factory=dict)

    @property
    def always_full(self) -> Site:
        """The site of whatever is float32 by definition."""
        return self.sites[0]

    def node_sites(self) -> Iterator[tuple[Site, ir.Node]]:
        """Sites that are nodes."""
        return ((site, site.node) for site in self.sites if site.node is not None)

    def decide(self) -> None:
        """Says of each site whether it computes in float32, with as few Casts as possible."""
        numbers = {site: number for number, site in enumerate(self.sites)}
        traffic = [
            Traffic(numbers[site], [numbers[read.site] for read in self.reads.get(value, ())])
            for value, site in self.producers.items()
        ]
        full = full_sites(
            [bool(site.reason) for site in self.sites], [site.cost for site in self.sites], traffic
        )
        for site, is_full in zip(self.sites, full, strict=True):
            site.full = is_full

    def add(self, site: Site) -> Site:
        """Registers a site."""
        self.sites.append(site)
        if site.node is not None:
            self.by_node[site.node] = site
        return site

    def write(self, value: ir.Value, site: Site) -> None:
        """Registers who writes a value, if it is float32."""
        if is_full_float(value):
            self.producers[value] = site

    def read(self, value: ir.Value | None, read: Read) -> None:
        """Registers who reads a value, if it is float32."""
        if value is not None and is_full_float(value):
            self.reads.setdefault(value, []).append(read)


def is_full_float(value: ir.Value) -> bool:
    """Whether it is a float32 tensor."""
    return isinstance(value.type, ir.TensorType) and value.type.dtype == ir.DataType.FLOAT


def _is_other_float(value: ir.Value) -> bool:
    """A sequence or an optional of float32 tensors."""
    kind = value.type
    return (
        kind is not None
        and not isinstance(kind, ir.TensorType)
        and value.dtype == (ir.DataType.FLOAT)
    )


def read_network(model: ir.Model, narrow: ir.DataType, *, keep_io: bool) -> Network:
    """The network of a model whose types are inferred.

    Args:
        model: Not changed.
        narrow: FLOAT16 or BFLOAT16.
        keep_io: Inputs and outputs of the model stay float32.
    """
    network = Network(narrow)
    opset = default_opset(model)
    _border(network, model.graph, keep_io=keep_io)
    for graph in all_graphs(model):
        for node in graph:
            if holds_graphs(node):
                _read_bodies(network, node, opset)
            else:
                _read_node(network, node, opset)
    return network


def _border(network: Network, graph: ir.Graph, *, keep_io: bool) -> None:
    for kind, values in (("input", graph.inputs), ("output", graph.outputs)):
        for index, value in enumerate(values):
            site = network.always_full
            if not keep_io and is_full_float(value) and not value.is_initializer():
                site = network.add(Site(value.name or "", f"{kind} of the model", _HEAVY))
            if kind == "input":
                network.write(value, site)
            else:
                network.read(value, Read(graph, index, site))


def _read_node(network: Network, node: ir.Node, opset: int) -> None:
    present = [value for value in (*node.inputs, *node.outputs) if value is not None]
    if not any(map(is_full_float, present)):
        return
    slots = slots_of(node, network.narrow, opset)
    site = network.add(Site(node.name or "", node.op_type, _cost(node), node, slots))
    if not slots.narrows():
        site.force(f"{node.op_type} has no {network.narrow.name.lower()} form")
    _check_types(site, present)
    sites = {Slot.FOLLOW: site, Slot.FULL: network.always_full}
    for index, (value, slot) in enumerate(zip(node.inputs, slots.inputs, strict=True)):
        if slot is not Slot.ANY:
            network.read(value, Read(node, index, sites[slot]))
    for value, slot in zip(node.outputs, slots.outputs, strict=True):
        network.write(value, sites[slot])


def _check_types(site: Site, values: Sequence[ir.Value]) -> None:
    for value in values:
        if value.type is None and value.name:
            site.force(f"the type of '{value.name}' is not known")
        elif _is_other_float(value):
            site.force(f"'{value.name}' is a sequence or an optional")


def _cost(node: ir.Node) -> int:
    if node.op_type in ("Cast", "CastLike", "Constant") and not node.domain:
        return _FREE
    if any(tensor.size > _SMALL for tensor in map(const_tensor, node.inputs) if tensor is not None):
        return _HEAVY
    if node.op_type in CHEAP:
        return _LIGHT
    return _MODERATE if node.op_type in REDUCTIONS else _HEAVY


class _Border(NamedTuple):
    """A tensor at the border of a body: values that are written there, and places of reads."""

    written: list[ir.Value]
    read: list[tuple[ir.Node | ir.Graph, int]]


def _read_bodies(network: Network, node: ir.Node, opset: int) -> None:
    borders = _BORDERS.get(node.op_type) if not node.domain else None
    if borders is None or opset < _FIRST_PLAIN_SCAN:
        _read_unknown_bodies(network, node)
        return
    for border in borders(node):
        read = [(user, index, _place(user, index)) for user, index in border.read]
        places = [value for _, _, value in read if value is not None]
        values = [*border.written, *places]
        if not any(map(is_full_float, values)):
            continue
        site = network.add(Site(node.name or "", node.op_type, _FREE))
        _check_types(site, values)
        for written in border.written:
            network.write(written, site)
        for user, index, value in read:
            network.read(value, Read(user, index, site))


_FIRST_PLAIN_SCAN: Final = 9  # before, Scan had a batch axis and an input of lengths


def _place(user: ir.Node | ir.Graph, index: int) -> ir.Value | None:
    return user.inputs[index] if isinstance(user, ir.Node) else user.outputs[index]


def _read_unknown_bodies(network: Network, node: ir.Node) -> None:
    """Everything at the border of bodies of which nothing is known stays as it is."""
    bodies = list(attribute_graphs(node))
    for index, value in enumerate(node.inputs):
        network.read(value, Read(node, index, network.always_full))
    for written in chain(node.outputs, *(body.inputs for body in bodies)):
        network.write(written, network.always_full)
    for body in bodies:
        for index, value in enumerate(body.outputs):
            network.read(value, Read(body, index, network.always_full))


def _if_borders(node: ir.Node) -> Iterator[_Border]:
    bodies = list(attribute_graphs(node))
    for index, output in enumerate(node.outputs):
        yield _Border([output], [(body, index) for body in bodies])


def _loop_borders(node: ir.Node) -> Iterator[_Border]:
    """Inputs: count, condition, states; of the body: number, condition, states."""
    body = node.attributes["body"].as_graph()
    states = len(body.inputs) - 2
    for index in range(states):
        yield _Border(
            [body.inputs[2 + index], node.outputs[index]], [(node, 2 + index), (body, 1 + index)]
        )
    for index in range(states, len(node.outputs)):
        yield _Border([node.outputs[index]], [(body, 1 + index)])


def _scan_borders(node: ir.Node) -> Iterator[_Border]:
    """Inputs: states, then what is scanned; outputs likewise."""
    body = node.attributes["body"].as_graph()
    states = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    for index in range(len(node.inputs)):
        if index < states:
            yield _Border([body.inputs[index], node.outputs[index]], [(node, index), (body, index)])
        else:
            yield _Border([body.inputs[index]], [(node, index)])
    for index in range(states, len(node.outputs)):
        yield _Border([node.outputs[index]], [(body, index)])


_BORDERS: Final = {"If": _if_borders, "Loop": _loop_borders, "Scan": _scan_borders}
