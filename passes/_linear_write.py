"""Gives linear layers new weights and biases, wherever they keep them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.edit import NameScope, add_initializer, const_array
from slimctl.passes._linear_samples import LinearLayer


class Solution(NamedTuple):
    """What a layer is to compute.

    Attributes:
        matrix: [groups, outputs, inputs], with Gemm's ``alpha`` multiplied in.
        bias: [groups, outputs], with ``beta`` multiplied in.
    """

    matrix: NDArray[np.float64]
    bias: NDArray[np.float64]


class Bias:
    """Where a layer keeps its bias: an input, or the constant that is added behind a MatMul.

    Attributes:
        free: Whether there is a place for one.
        output: What is computed once it is added.
    """

    def __init__(self, layer: LinearLayer) -> None:
        self.node = layer.layer.node
        self.add: ir.Node | None = None
        self.place = 2
        if self.node.op_type == "MatMul":
            self._find_add()
        self.free = self.node.op_type != "MatMul" or self.add is not None
        self.layer = layer
        self.output = (self.add or self.node).outputs[0]

    def _find_add(self) -> None:
        uses = list(self.node.outputs[0].uses())
        if len(uses) != 1 or uses[0].node.op_type != "Add":
            return
        place = 1 - uses[0].idx
        constant = const_array(uses[0].node.inputs[place])
        weight = const_array(self.node.inputs[1])
        if constant is not None and weight is not None and constant.shape == weight.shape[-1:]:
            self.add, self.place = uses[0].node, place

    def current(self, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """The bias now, [groups, outputs]."""
        if self.add is not None:
            bias = const_array(self.add.inputs[self.place])
        else:
            bias = None if self.node.op_type == "MatMul" else self.layer.layer.bias()
        return np.zeros(shape) if bias is None else bias.astype(np.float64).reshape(shape)


class Writer:
    """Stores solutions under new names."""

    def __init__(self, names: NameScope) -> None:
        self._names = names

    def write(self, layer: LinearLayer, fit: Solution, bias: Bias) -> None:
        """Gives a layer new weights, and a new bias where it has one."""
        node = layer.layer.node
        weight = layer.weight_of(fit.matrix / _factor(node, "alpha"))
        self.replace(node, 1, weight, f"{layer.name}_refitted")
        if not bias.free:
            return
        stored = (fit.bias.reshape(-1) / _factor(node, "beta")).astype(weight.dtype)
        self.replace(bias.add or node, bias.place, stored, f"{layer.name}_refitted_bias")

    def replace(self, node: ir.Node, place: int, array: NDArray[Any], label: str) -> None:
        """Gives a node a constant of its own."""
        assert isinstance(node.graph, ir.Graph), "a node of a model"
        if len(node.inputs) <= place:
            node.resize_inputs(place + 1)
        value = add_initializer(node.graph, self._names.fresh(label), array)
        node.replace_input_with(place, value)


def _factor(node: ir.Node, name: str) -> float:
    attribute = node.attributes.get(name)
    return 1.0 if attribute is None else attribute.as_float()
