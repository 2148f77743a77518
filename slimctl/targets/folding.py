"""Which nodes are gone once onnxruntime has computed what is constant."""

from __future__ import annotations

import onnx_ir as ir

from slimctl.graph.edit import all_nodes, attribute_graphs, const_tensor, dimensions
from slimctl.targets.units import is_pair

_ASK_SHAPES = ("Shape", "Size")
_RANDOM = ("Multinomial", "Bernoulli", "Dropout")


def folded_nodes(model: ir.Model) -> set[ir.Node]:
    """Nodes whose results do not depend on the inputs of the model, Q and DQ nodes apart.

    Shapes count as constants where they are known. A node with bodies, or one that draws random
    numbers, is none.
    """
    folded: set[ir.Node] = set()
    for node in all_nodes(model):
        if _is_constant(node, folded):
            folded.add(node)
    return folded


def _is_constant(node: ir.Node, folded: set[ir.Node]) -> bool:
    if is_pair(node) or any(attribute_graphs(node)):
        return False
    if node.op_type in _ASK_SHAPES and not node.domain:
        return _has_known_shape(node.inputs[0]) or _all_known(node, folded)
    if node.op_type.startswith("Random") or node.op_type in _RANDOM:
        return False
    return _all_known(node, folded) and (bool(node.inputs) or node.op_type == "Constant")


def _all_known(node: ir.Node, folded: set[ir.Node]) -> bool:
    return all(
        value is None or const_tensor(value) is not None or value.producer() in folded
        for value in node.inputs
    )


def _has_known_shape(value: ir.Value | None) -> bool:
    shape = None if value is None else dimensions(value.shape)
    return shape is not None and all(isinstance(size, int) for size in shape)
