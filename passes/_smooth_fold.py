"""Divides the channels of a tensor, where its readers are linear layers, and nothing else changes.

The division goes into the constants that make the tensor if only these layers read it; else into
one multiplication in front of them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.edit import NameScope, add_initializer, const_array, set_provenance
from slimctl.graph.scaled import record_scaling
from slimctl.passes._linear_samples import LinearLayer
from slimctl.passes._smooth_inputs import SharedInput, by_weight

_NORMALIZATIONS: Final = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")


class _Shape(NamedTuple):
    """Of a tensor whose channels are divided.

    Attributes:
        channels: Number of them.
        spatial: Axes behind the channels.
    """

    channels: int
    spatial: int

    @property
    def per_channel(self) -> tuple[int, ...]:
        """Of a constant with one number per channel."""
        return (self.channels, *(1,) * self.spatial)

    def constant_place(self, node: ir.Node, only: int | None) -> int | None:
        """The input that holds one number, or one per channel."""
        for place in (0, 1) if only is None else (only,):
            array = const_array(node.inputs[place])
            if array is None:
                continue
            one = array.size == 1 and array.ndim <= len(self.per_channel)
            if one or array.shape in (self.per_channel, (1, *self.per_channel)):
                return place
        return None


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

    def can_divide(self, shared: SharedInput) -> bool:
        """Whether it costs little: in front of convolutions nothing is added.

        Their inputs are large, and most networks have no need.
        """
        return shared.axis == -1 or self._folds(shared, None)

    def divide(self, shared: SharedInput, factors: NDArray[np.float64]) -> None:
        """Divides the tensor by factors per channel and multiplies them into the weights."""
        for layer in shared.layers:
            self._strengthen(layer, factors)
        if self._folds(shared, 1.0 / factors):
            self.changed.add(shared.name)
        else:
            self._insert(shared, factors)

    def _strengthen(self, layer: LinearLayer, factors: NDArray[np.float64]) -> None:
        node = layer.layer.node
        alpha = node.attributes.get("alpha")
        divisor = 1.0 if alpha is None else alpha.as_float()
        matrix = layer.matrix() * by_weight(layer, factors) / divisor
        self._replace(node, 1, layer.weight_of(matrix), "weight")

    def _folds(self, shared: SharedInput, scale: NDArray[np.float64] | None) -> bool:
        """Folds a scale into what makes the tensor; without one it only says whether it could."""
        readers = {layer.layer.node for layer in shared.layers}
        value = shared.value
        if value.is_graph_output() or any(use.node not in readers for use in value.uses()):
            return False
        spatial = len(shared.layers[0].kernel) if shared.axis == 1 else 0
        return self._fold(value, _Shape(shared.channels, spatial), scale)

    def _fold(self, value: ir.Value, shape: _Shape, scale: NDArray[np.float64] | None) -> bool:
        """Multiplies a value by one number per channel, if it is made by constants."""
        node = value.producer()
        folds = node is not None and node.graph is not None and self._fold_node(node, shape, scale)
        if folds and scale is not None:
            record_scaling(value, 1 if shape.spatial else -1, scale)
        return folds

    def _fold_node(self, node: ir.Node, shape: _Shape, scale: NDArray[np.float64] | None) -> bool:
        """The same for the node that makes it."""
        if node.op_type in _NORMALIZATIONS and not shape.spatial:
            return self._fold_normalization(node, shape, scale)
        if node.domain or node.op_type not in ("Add", "Div", "Mul"):
            return False
        place = 1 if node.op_type == "Div" else None
        place = shape.constant_place(node, place)
        if place is None:
            return False
        if node.op_type == "Add":
            other = node.inputs[1 - place]
            sole = other is not None and len(other.uses()) == 1 and not other.is_graph_output()
            if not sole or other is None or not self._fold(other, shape, scale):
                return False
        if scale is not None:
            self._multiply(node, place, shape, 1.0 / scale if node.op_type == "Div" else scale)
        return True

    def _fold_normalization(
        self, node: ir.Node, shape: _Shape, scale: NDArray[np.float64] | None
    ) -> bool:
        places = [place for place in (1, 2) if len(node.inputs) > place and node.inputs[place]]
        arrays = [const_array(node.inputs[place]) for place in places]
        if any(array is None or array.shape != (shape.channels,) for array in arrays):
            return False
        for place in places if scale is not None else ():
            assert scale is not None
            self._multiply(node, place, shape, scale)
        return True

    def _multiply(
        self, node: ir.Node, place: int, shape: _Shape, scale: NDArray[np.float64]
    ) -> None:
        array = const_array(node.inputs[place])
        assert array is not None, "checked before"
        product = array.astype(np.float64).reshape(-1) * scale
        self._replace(node, place, product.reshape(shape.per_channel).astype(array.dtype), "scaled")

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
        node.outputs[0].metadata_props.update(shared.value.metadata_props)
        record_scaling(node.outputs[0], -1, 1.0 / factors)
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
