"""Expands operators that a provider does not know into some that it knows.

    HardSigmoid(x) = Clip(alpha * x + beta, 0, 1)
    HardSwish(x)   = x * Clip(x / 6 + 1 / 2, 0, 1)

(ONNX's own definitions.) In integers every part is a kernel of its own, which still beats leaving
the accelerator twice for each activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.target import Target
from slimctl.graph.edit import NameScope, add_initializer, set_provenance

PASS: Final = "legalize"

_EXPANDED: Final = ("HardSigmoid", "HardSwish")
_PARTS: Final = ("Add", "Clip", "Mul")

OPSET: Final = 11
"""From here on Clip takes its bounds as inputs."""


def is_missing(node: ir.Node, target: Target) -> bool:
    """Whether the provider lacks an operator that can be expanded, and has all of its parts."""
    names = target.operators.names
    known = node.op_type in _EXPANDED and not node.domain
    missing = node.op_type not in names and node.op_type not in target.integer_operators
    runs = {*names, *target.integer_operators}
    return bool(names) and known and missing and all(part in runs for part in _PARTS)


def is_expandable(node: ir.Node, target: Target) -> bool:
    """Whether it is missing, and its type is known."""
    value = node.inputs[0] if node.inputs else None
    typed = value is not None and value.dtype is not None and value.dtype.is_floating_point()
    return typed and is_missing(node, target)


class Expander:
    """Replaces nodes by their parts.

    Args:
        names: Scope of the model.
    """

    def __init__(self, names: NameScope) -> None:
        self.names = names

    def expand(self, node: ir.Node) -> None:
        """Puts the parts in place of a node for which :func:`is_expandable` holds."""
        x, output = node.inputs[0], node.outputs[0]
        assert x is not None, "an expandable node has an input"
        if node.op_type == "HardSwish":
            alpha, beta = 1.0 / 6.0, 0.5
        else:
            alpha = node.attributes.get_float("alpha", 0.2)
            beta = node.attributes.get_float("beta", 0.5)
        scaled = self._part(node, "Mul", [x, self._constant(node, "alpha", alpha)])
        moved = self._part(node, "Add", [scaled, self._constant(node, "beta", beta)])
        bounds = [self._constant(node, name, value) for name, value in (("zero", 0), ("one", 1))]
        gate = self._part(node, "Clip", [moved, *bounds])
        result = gate if node.op_type == "HardSigmoid" else self._part(node, "Mul", [x, gate])
        self._replace(node, output, result)

    def _replace(self, node: ir.Node, output: ir.Value, result: ir.Value) -> None:
        graph = _graph(node)
        name = output.name
        output.replace_all_uses_with(result, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        result.name = name

    def _part(self, node: ir.Node, op_type: str, inputs: Sequence[ir.Value]) -> ir.Value:
        name = self.names.fresh_node(f"{node.name}_{op_type}")
        part = ir.Node("", op_type, inputs, name=name)
        value = part.outputs[0]
        value.name = self.names.fresh(name)
        value.type, value.shape = node.outputs[0].type, node.outputs[0].shape
        set_provenance(part, PASS)
        _graph(node).insert_before(node, part)
        return value

    def _constant(self, node: ir.Node, name: str, number: float) -> ir.Value:
        x = node.inputs[0]
        kind = ir.DataType.FLOAT if x is None or x.dtype is None else x.dtype
        array: NDArray[Any] = np.asarray(number, kind.numpy())
        return add_initializer(_graph(node), self.names.fresh(f"{node.name}_{name}"), array)


def _graph(node: ir.Node) -> ir.Graph:
    graph = node.graph
    assert isinstance(graph, ir.Graph), "nodes of functions are not rewritten"
    return graph
