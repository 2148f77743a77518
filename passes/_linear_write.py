"""Gives linear layers new weights and biases, wherever they keep them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.edit import NameScope, const_array, replace_constant
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
        self.layer = layer
        self.node = layer.layer.node
        self.place = 2
        self.add = _addition(self.node) if self.node.op_type == "MatMul" else None
        if self.add is not None:
            self.place = 1 - next(iter(self.node.outputs[0].uses())).idx
        self.free = self.node.op_type != "MatMul" or self.add is not None
        self.output = (self.node if self.add is None else self.add).outputs[0]

    def current(self, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """The bias now, [groups, outputs]."""
        if self.add is not None:
            bias = const_array(self.add.inputs[self.place])
        else:
            bias = None if self.node.op_type == "MatMul" else self.layer.layer.bias()
        return np.zeros(shape) if bias is None else bias.astype(np.float64).reshape(shape)


def _addition(node: ir.Node) -> ir.Node | None:
    """The Add of one constant per output behind a MatMul."""
    uses = list(node.outputs[0].uses())
    if len(uses) != 1 or uses[0].node.op_type != "Add" or node.outputs[0].is_graph_output():
        return None
    constant = const_array(uses[0].node.inputs[1 - uses[0].idx])
    weight = const_array(node.inputs[1])
    if constant is None or weight is None or constant.shape != weight.shape[-1:]:
        return None
    return uses[0].node


class Writer:
    """Stores solutions under the names of what they replace, where nobody else reads that."""

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
        """:func:`slimctl.graph.edit.replace_constant` with the names of the model."""
        replace_constant(node, place, array, self._names, label)


def _factor(node: ir.Node, name: str) -> float:
    attribute = node.attributes.get(name)
    return 1.0 if attribute is None else attribute.as_float()
