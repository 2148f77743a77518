"""Writes what was decided into the graph: types, constants, attributes, Casts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.edit import (
    NameScope,
    add_initializer,
    all_graphs,
    const_array,
    set_provenance,
)
from slimctl.passes._float_constants import Clamps, generated, largest_finite, limits_of, narrowed
from slimctl.passes._float_network import Network, Read, Site, is_full_float

_FULL: Final = ir.DataType.FLOAT
_WORTH_A_CAST: Final = 1024
"""Elements from which a constant that is read in both types is stored once, with a Cast."""
_DTYPE_OPERATORS: Final = frozenset(
    {
        "Bernoulli",
        "EyeLike",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    }
)


@dataclass
class Writer:
    """Changes a model to what its network says.

    Attributes:
        model: Changed in place.
        network: With every site decided.
        clamps: Constants that may be clamped.
        pass_name: Who is named as the maker of the Casts.
        casts: How many Casts were added.
        stored: How many constants became narrow.
        clamped: Names of those that were clamped.
    """

    model: ir.Model
    network: Network
    clamps: Clamps
    pass_name: str
    casts: int = 0
    stored: int = 0
    clamped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = NameScope(self.model)

    @property
    def narrow(self) -> ir.DataType:
        """The type that is written."""
        return self.network.narrow

    def write(self, keep: Collection[ir.Value]) -> None:
        """Everything.

        Large constants that only float32 nodes read are stored narrow as well, each with a Cast.

        Args:
            keep: Constants that stay float32 where they are read as such.
        """
        originals = [node for _, node in self.network.node_sites()]
        for site, node in self.network.node_sites():
            self._write_attributes(site, node)
        for graph in all_graphs(self.model):
            for value in list(graph.initializers.values()):
                self._write_constant(graph, value, keep)
        for value, site in self.network.producers.items():
            if not site.full:
                value.type = ir.TensorType(self.narrow)
        for value, site in self.network.producers.items():
            self._cast_reads(value, site)
        for node in originals:
            _remove_if_idle(node)

    # attributes

    def _write_attributes(self, site: Site, node: ir.Node) -> None:
        output = node.outputs[0] if node.outputs else None
        if node.domain or output is None or not is_full_float(output):
            return
        wanted = _FULL if self.network.producers[output].full else self.narrow
        if node.op_type in _DTYPE_OPERATORS:
            node.attributes["dtype"] = ir.AttrInt64("dtype", int(wanted))
        elif site.full:
            return
        elif node.op_type == "Cast":
            node.attributes["to"] = ir.AttrInt64("to", int(self.narrow))
        else:
            self._write_generated(node)

    def _write_generated(self, node: ir.Node) -> None:
        array = generated(node)
        if array is None:
            return
        tensor = ir.Tensor(self._narrowed(node.outputs[0], array))
        for name in [name for name in node.attributes if name.startswith("value")]:
            del node.attributes[name]
        node.attributes["value"] = ir.AttrTensor("value", tensor)

    # constants

    def _narrowed(self, value: ir.Value, array: NDArray[Any]) -> NDArray[Any]:
        limit = self.clamps.limits.get(value)
        if limit is not None and largest_finite(array) > limit:
            self.clamped.append(value.name or "")
        self.stored += 1
        return narrowed(array, self.narrow, limit)

    def _write_constant(self, graph: ir.Graph, value: ir.Value, keep: Collection[ir.Value]) -> None:
        array, reads = const_array(value), self.network.reads.get(value, [])
        if array is None or not reads or not is_full_float(value):
            return
        full = [read for read in reads if read.site.full]
        if not full:
            self._replace(value, self._narrowed(value, array))
        elif len(full) < len(reads):
            self._split(graph, value, array, reads, once=value not in keep)
        elif value not in keep and self._may_be_stored(value, array):
            self._store(graph, value, self._narrowed(value, array), full)

    def _replace(self, value: ir.Value, array: NDArray[Any]) -> None:
        value.const_value = ir.Tensor(array, name=value.name)
        value.type = ir.TensorType(self.narrow)

    def _may_be_stored(self, value: ir.Value, array: NDArray[Any]) -> bool:
        """Once, with a Cast: large enough, and not what the reader is float32 for."""
        return (
            array.size >= _WORTH_A_CAST
            and not value.is_graph_output()
            and largest_finite(array) <= limits_of(self.narrow).largest
        )

    def _split(
        self,
        graph: ir.Graph,
        value: ir.Value,
        array: NDArray[Any],
        reads: Sequence[Read],
        *,
        once: bool,
    ) -> None:
        """A constant that is read in both types.

        It is stored once with a Cast, or twice where it is small or float32 readers need it as it
        was.
        """
        full = [read for read in reads if read.site.full]
        stored = self._narrowed(value, array)
        exact = bool(np.array_equal(stored.astype(np.float32), array))
        if self._may_be_stored(value, array) and (exact or once):
            self._store(graph, value, stored, full)
            return
        name = self.names.fresh(f"{value.name}_{_suffix(self.narrow)}")
        copy = add_initializer(graph, name, stored)
        for read in reads:
            if not read.site.full:
                _redirect(read, copy)

    def _store(
        self, graph: ir.Graph, value: ir.Value, stored: NDArray[Any], full: Sequence[Read]
    ) -> None:
        self._replace(value, stored)
        cast = self._cast(value, _FULL, f"{value.name}_float32")
        _insert_first(graph, cast)
        for read in full:
            _redirect(read, cast.outputs[0])

    # casts

    def _cast_reads(self, value: ir.Value, site: Site) -> None:
        others = [read for read in self.network.reads.get(value, ()) if read.site.full != site.full]
        home = value.graph
        if not others or not isinstance(home, ir.Graph):
            return
        wanted = self.narrow if site.full else _FULL
        # A body gives what it computes itself: another graph's Cast is out of reach there.
        away = [r for r in others if isinstance(r.user, ir.Graph) and r.user is not home]
        near = [read for read in others if read not in away]
        if near:
            cast = self._shared_cast(home, value, wanted, near)
            for read in near:
                _redirect(read, cast.outputs[0])
        for read in away:
            assert isinstance(read.user, ir.Graph)
            cast = self._cast(value, wanted, f"{value.name}_{_suffix(wanted)}")
            read.user.append(cast)
            _redirect(read, cast.outputs[0])

    def _shared_cast(
        self, home: ir.Graph, value: ir.Value, wanted: ir.DataType, reads: Sequence[Read]
    ) -> ir.Node:
        name = f"{value.name}_{_suffix(wanted)}"
        gives = any(read.user is self.model.graph for read in reads)
        if gives:  # the Cast takes over the name by which users know the output
            name = value.name or ""
            own = _FULL if wanted == self.narrow else self.narrow
            value.name = self.names.fresh(f"{name}_{_suffix(own)}")
        cast = self._cast(value, wanted, name, fresh=not gives)
        producer = value.producer()
        if producer is None:
            _insert_first(home, cast)
        else:
            home.insert_after(producer, cast)
        return cast

    def _cast(self, value: ir.Value, to: ir.DataType, name: str, *, fresh: bool = True) -> ir.Node:
        node = ir.Node(
            "",
            "Cast",
            [value],
            [ir.AttrInt64("to", int(to))],
            name=self.names.fresh_node(f"{name}_Cast"),
        )
        output = node.outputs[0]
        output.name = self.names.fresh(name) if fresh else name
        output.type, output.shape = ir.TensorType(to), value.shape
        set_provenance(node, self.pass_name)
        self.casts += 1
        return node


def _suffix(kind: ir.DataType) -> str:
    return "float32" if kind == _FULL else kind.name.lower()


def _insert_first(graph: ir.Graph, node: ir.Node) -> None:
    first = next(iter(graph), None)
    if first is None:
        graph.append(node)
    else:
        graph.insert_before(first, node)


def _redirect(read: Read, value: ir.Value) -> None:
    if isinstance(read.user, ir.Node):
        read.user.replace_input_with(read.place, value)
    else:
        read.user.outputs[read.place] = value


def _remove_if_idle(node: ir.Node) -> None:
    """A Cast between two tensors that have the same type by now."""
    if node.op_type != "Cast" or node.domain or node.inputs[0] is None:
        return
    source, output = node.inputs[0], node.outputs[0]
    if source.dtype != output.dtype or output.is_graph_output() or node.graph is None:
        return
    output.replace_all_uses_with(source)
    node.graph.remove(node, safe=True)
