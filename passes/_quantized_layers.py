"""Layers of a quantized model beside their float originals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Skipped
from slimctl.graph.bodies import observable_graphs
from slimctl.graph.edit import PROVENANCE_KEY, const_array
from slimctl.numerics.affine import dequantize
from slimctl.passes._layers import Layer, is_linear, recognize


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer with a stored integer weight.

    Attributes:
        node: In the quantized model.
        original: In the float model.
        dequantizer: The DequantizeLinear of the weight.
    """

    node: ir.Node
    original: Layer
    dequantizer: ir.Node

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.node.name or ""

    @property
    def holder(self) -> ir.Node:
        """The node whose first input is the stored codes."""
        holder = code_holder(self.dequantizer)
        assert holder is not None, "a DQ of constants"
        return holder

    def restored(self) -> NDArray[np.float32]:
        """The weight as the quantized model computes with it."""
        codes, scale, zero_point = self.parameters()
        attribute = self.dequantizer.attributes.get("axis")
        axis = 1 if attribute is None else attribute.as_int()
        return dequantize(codes, scale, zero_point, axis if scale.size > 1 else None)

    def parameters(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Codes as they are stored, scale and zero point."""
        arrays = [const_array(value) for value in self.dequantizer.inputs]
        codes, scale = const_array(self.holder.inputs[0]), arrays[1]
        assert codes is not None and scale is not None, "a DQ of constants"
        zero_point = np.zeros(scale.shape, codes.dtype) if len(arrays) < 3 else arrays[2]
        assert zero_point is not None, "a DQ of constants"
        return codes, scale, zero_point


def observable_nodes(model: ir.Model) -> list[ir.Node]:
    """Nodes whose inputs can be observed: outside loops."""
    return [node for place in observable_graphs(model) for node in place.graph]


def quantized_layers(
    model: ir.Model, reference: ir.Model
) -> tuple[list[QuantizedLayer], list[Skipped]]:
    """Layers in graph order, and those that have no usable original, with the reason."""
    originals = {node.name: node for node in observable_nodes(reference)}
    found: list[QuantizedLayer] = []
    skipped: list[Skipped] = []
    for node in observable_nodes(model):
        dequantizer = weight_dequantizer(node)
        if dequantizer is None:
            continue
        layer = _original(originals.get(node.name))
        if isinstance(layer, str):
            skipped.append(Skipped(node.name or "", layer))
        else:
            found.append(QuantizedLayer(node, layer, dequantizer))
    return found, skipped


def _original(node: ir.Node | None) -> Layer | str:
    if node is None:
        return "the float model has no layer of this name"
    layer = recognize(node)
    if isinstance(layer, Layer) and layer.weight().ndim > 2 and node.op_type == "MatMul":
        return "its weight is a stack of matrices: no single mean describes its input"
    return layer


def was_quantized(model: ir.Model) -> bool:
    """Whether static quantization has made some of a model, be it nothing with integer weights."""
    makers = (node.metadata_props.get(PROVENANCE_KEY) for node in observable_nodes(model))
    return "quantize-static" in makers


def weight_dequantizer(node: ir.Node) -> ir.Node | None:
    """The DQ that feeds the weight of a linear layer from a stored integer, if there is one."""
    if not is_linear(node) or len(node.inputs) < 2 or node.inputs[1] is None:
        return None
    producer = node.inputs[1].producer()
    if producer is None or producer.op_type != "DequantizeLinear":
        return None
    return producer if code_holder(producer) is not None else None


def code_holder(dequantizer: ir.Node) -> ir.Node | None:
    """The node that reads the constant codes of a DQ: itself, or a Cast that widens 4 bits."""
    codes = dequantizer.inputs[0]
    if const_array(codes) is not None:
        return dequantizer
    cast = None if codes is None else codes.producer()
    if cast is None or cast.op_type != "Cast" or cast.domain:
        return None
    return cast if const_array(cast.inputs[0]) is not None else None
