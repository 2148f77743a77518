"""Writes layers with integer weights and activations that are quantized at run time.

    x -> DynamicQuantizeLinear -> MatMulInteger(., W) -> Cast -> Mul(x_scale * W_scale) [-> Add]

is standard ONNX, and what onnxruntime fuses into MatMulIntegerToFloat or DynamicQuantizeMatMul. An
activation is quantized once for all layers that read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.edit import NameScope, add_initializer, set_provenance
from slimctl.passes._dynamic_weights import IntegerWeight, Rounding

CONTRIB: Final = "com.microsoft"
_CONTRIB_OPERATORS: Final = ("DynamicQuantizeLSTM", "QAttention")
_FLOAT: Final = ir.DataType.FLOAT


class Activation(NamedTuple):
    """An activation as uint8, with its scale and zero point, both []."""

    values: ir.Value
    scale: ir.Value
    zero_point: ir.Value


class Stored(NamedTuple):
    """An integer weight in the graph."""

    values: ir.Value
    scale: ir.Value
    zero_point: ir.Value


class Writer:
    """Replaces nodes of one model in place."""

    def __init__(self, model: ir.Model, rounding: Rounding, pass_name: str) -> None:
        self.model = model
        self.rounding = rounding
        self.pass_name = pass_name
        self.names = NameScope(model)
        self._activations: dict[ir.Value, Activation] = {}
        self._weights: dict[tuple[ir.Value, object], Stored] = {}

    def node(
        self,
        before: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[ir.DataType],
        attributes: Sequence[ir.Attr] = (),
    ) -> ir.Node:
        """A node in front of another one; its outputs get types and names."""
        domain = CONTRIB if op_type in _CONTRIB_OPERATORS else ""
        node = ir.Node(
            domain,
            op_type,
            inputs,
            attributes,
            num_outputs=len(outputs),
            name=self.names.fresh_node(f"{before.name}_{op_type}"),
        )
        for output, kind in zip(node.outputs, outputs, strict=True):
            output.name = self.names.fresh(f"{before.name}_{op_type}_output")
            output.type = ir.TensorType(kind)
        set_provenance(node, self.pass_name)
        graph_of(before).insert_before(before, node)
        if domain:
            self.model.opset_imports.setdefault(domain, 1)
        return node

    def activation(self, node: ir.Node, value: ir.Value) -> Activation:
        """The value as uint8, quantized where it is made, so that all its readers share it."""
        if value not in self._activations:
            self._activations[value] = self._quantized(node, value)
        return self._activations[value]

    def _quantized(self, node: ir.Node, value: ir.Value) -> Activation:
        quantizer = ir.Node(
            "",
            "DynamicQuantizeLinear",
            [value],
            num_outputs=3,
            name=self.names.fresh_node(f"{value.name}_DynamicQuantizeLinear"),
        )
        suffixes = ("quantized", "scale", "zero_point")
        kinds = (ir.DataType.UINT8, _FLOAT, ir.DataType.UINT8)
        for output, suffix, kind in zip(quantizer.outputs, suffixes, kinds, strict=True):
            output.name = self.names.fresh(f"{value.name}_{suffix}")
            output.type = ir.TensorType(kind)
        set_provenance(quantizer, self.pass_name)
        producer, home = value.producer(), value.graph
        if producer is not None:
            graph_of(producer).insert_after(producer, quantizer)
        elif isinstance(home, ir.Graph) and len(home):
            home.insert_before(home[0], quantizer)
        else:
            graph_of(node).insert_before(node, quantizer)
        return Activation(*quantizer.outputs)

    def weight(
        self,
        value: ir.Value,
        key: object,
        make: Callable[[], IntegerWeight],
    ) -> Stored:
        """Stores an integer weight once for all nodes that want it in the same form.

        Args:
            value: The float weight; the integers live beside it.
            key: The form.
            make: Computes it.
        """
        if (value, key) not in self._weights:
            found = make()
            home = value.graph if isinstance(value.graph, ir.Graph) else self.model.graph
            self._weights[value, key] = Stored(
                self.constant(home, f"{value.name}_quantized", found.values),
                self.constant(home, f"{value.name}_scale", found.scale),
                self.constant(home, f"{value.name}_zero_point", found.zero_point),
            )
        return self._weights[value, key]

    def constant(self, graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
        """A new initializer."""
        return add_initializer(graph, self.names.fresh(name), array)

    def replace(self, node: ir.Node, by: ir.Node) -> None:
        """Lets another node give what this one gave, names included; it is removed."""
        for old, new in zip(node.outputs, by.outputs, strict=False):
            name, new.type, new.shape = old.name, old.type, old.shape
            old.name = self.names.fresh(f"{name}_replaced")
            new.name = name
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        graph_of(node).remove(node, safe=True)


def graph_of(node: ir.Node) -> ir.Graph:
    assert isinstance(node.graph, ir.Graph), "a node of a model"
    return node.graph
