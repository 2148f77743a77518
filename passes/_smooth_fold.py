"""Divides the channels of a tensor, where its readers are linear layers, and nothing else changes.

The division goes into the constants that make the tensor if only these layers read it; else into
one multiplication in front of them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.edit import NameScope, add_initializer, const_array, set_provenance
from slimctl.passes._linear_samples import LinearLayer
from slimctl.passes._smooth_inputs import SharedInput

_NORMALIZATIONS: Final = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")


class Divider:
    """Divides tensors of one model.

    Attributes:
        changed: Names of tensors that hold other values afterwards.
        added: Multiplications that had to be added.
    """

    def __init__(self, model: ir.Model, provenance: str) -> None:
        self._names = NameScope(model)
        self._provenance = provenance
        self.changed: set[str] = set()
        self.added = 0

    def divide(self, shared: SharedInput, factors: NDArray[np.float64]) -> None:
        """Divides the tensor by factors per channel and multiplies them into the weights."""
        for layer in shared.layers:
            self._strengthen(layer, factors)
        if self._only_read_by(shared) and self._fold(shared.value, 1.0 / factors):
            self.changed.add(shared.name)
            return
        self._insert(shared, factors)

    def _strengthen(self, layer: LinearLayer, factors: NDArray[np.float64]) -> None:
        node = layer.layer.node
        alpha = node.attributes.get("alpha")
        divisor = 1.0 if alpha is None else alpha.as_float()
        matrix = layer.matrix() * factors[None, None, :] / divisor
        self._replace(node, 1, layer.weight_of(matrix), "weight")

    def _only_read_by(self, shared: SharedInput) -> bool:
        readers = {layer.layer.node for layer in shared.layers}
        value = shared.value
        return not value.is_graph_output() and all(use.node in readers for use in value.uses())

    def _fold(self, value: ir.Value, scale: NDArray[np.float64]) -> bool:
        """Multiplies what makes a value by one number per channel, if it is made by constants."""
        node = value.producer()
        if node is None or node.graph is None:
            return False
        if node.op_type in _NORMALIZATIONS:
            return self._fold_normalization(node, scale)
        if node.op_type == "Mul" and not node.domain:
            return self._multiply_operand(node, scale)
        if node.op_type == "Add" and not node.domain:
            return self._fold_sum(node, scale)
        return False

    def _fold_normalization(self, node: ir.Node, scale: NDArray[np.float64]) -> bool:
        places = [place for place in (1, 2) if len(node.inputs) > place and node.inputs[place]]
        arrays = [const_array(node.inputs[place]) for place in places]
        if any(array is None or array.shape != scale.shape for array in arrays):
            return False
        for place in places:
            self._multiply(node, place, scale)
        return True

    def _fold_sum(self, node: ir.Node, scale: NDArray[np.float64]) -> bool:
        """Scale and shift: the shift here, the scale in the multiplication before."""
        place = _constant_place(node, scale.size)
        if place is None:
            return False
        other = node.inputs[1 - place]
        sole = other is not None and len(other.uses()) == 1 and not other.is_graph_output()
        if not sole or other is None or not self._fold(other, scale):
            return False
        self._multiply(node, place, scale)
        return True

    def _multiply_operand(self, node: ir.Node, scale: NDArray[np.float64]) -> bool:
        place = _constant_place(node, scale.size)
        if place is None:
            return False
        self._multiply(node, place, scale)
        return True

    def _multiply(self, node: ir.Node, place: int, scale: NDArray[np.float64]) -> None:
        array = const_array(node.inputs[place])
        assert array is not None, "checked before"
        product = array.astype(np.float64) * scale
        self._replace(node, place, product.astype(array.dtype), "scaled")

    def _insert(self, shared: SharedInput, factors: NDArray[np.float64]) -> None:
        graph = shared.layers[0].layer.node.graph
        assert isinstance(graph, ir.Graph), "layers of the main graph"
        label = f"{shared.name}_smoothed"
        scale = add_initializer(
            graph, self._names.fresh(f"{label}_scale"), (1.0 / factors).astype(np.float32)
        )
        node = ir.Node("", "Mul", [shared.value, scale], name=self._names.fresh_node(label))
        node.outputs[0].name = self._names.fresh(label)
        node.outputs[0].type, node.outputs[0].shape = shared.value.type, shared.value.shape
        set_provenance(node, self._provenance)
        graph.insert_before(shared.layers[0].layer.node, node)
        for layer in shared.layers:
            layer.layer.node.replace_input_with(0, node.outputs[0])
        self.changed.add(node.outputs[0].name)
        self.added += 1

    def _replace(self, node: ir.Node, place: int, array: NDArray[np.generic], label: str) -> None:
        """Gives a node a constant of its own: others may read the old one."""
        assert isinstance(node.graph, ir.Graph), "a node of a model"
        name = self._names.fresh(f"{node.name}_{label}")
        node.replace_input_with(place, add_initializer(node.graph, name, array))


def _constant_place(node: ir.Node, channels: int) -> int | None:
    """The input that holds one number, or one per channel along the last axis."""
    for place in (0, 1):
        array = const_array(node.inputs[place])
        if array is not None and (array.size == 1 or array.shape == (channels,)):
            return place
    return None
