"""Rewrites of single nodes that change nothing but what an execution provider minds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.edit import (
    NameScope,
    add_initializer,
    const_array,
    dimensions,
    set_provenance,
)
from slimctl.numerics.affine import along
from slimctl.targets.units import unit_of

PASS: Final = "legalize"

Outcome = str | None
"""What kept a rewrite from being done; None when it was."""


class Rewriter:
    """Applies demands to nodes.

    Args:
        model: Types and shapes are inferred.
    """

    def __init__(self, model: ir.Model) -> None:
        self.names = NameScope(model)

    def give_own_dequantize(self, node: ir.Node) -> Outcome:
        """Copies every DQ in front of the node that serves others as well."""
        for index, value in enumerate(node.inputs):
            pair = value.producer() if value is not None else None
            if value is None or pair is None or pair.op_type != "DequantizeLinear":
                continue
            if len(value.uses()) > 1 or value.is_graph_output():
                node.replace_input_with(index, self._copy(pair).outputs[0])
        return None

    def _copy(self, pair: ir.Node) -> ir.Node:
        output = pair.outputs[0]
        copy = ir.Node(
            pair.domain,
            pair.op_type,
            pair.inputs,
            attributes=list(pair.attributes.values()),
            name=self.names.fresh_node(pair.name or pair.op_type),
        )
        copy.outputs[0].name = self.names.fresh(output.name or pair.op_type)
        copy.outputs[0].type, copy.outputs[0].shape = output.type, output.shape
        set_provenance(copy, PASS)
        graph = pair.graph
        assert graph is not None, "a node that is read stands in a graph"
        graph.insert_after(pair, copy)
        return copy

    def store_float_bias(self, node: ir.Node) -> Outcome:
        """Stores the quantized bias as what its DQ makes of it."""
        bias = unit_of(node).bias
        if bias is None:
            return "its bias is float already"
        codes = const_array(bias.pair.inputs[0])
        if codes is None or bias.scale is None or bias.zero_point is None:
            return "its bias is computed at run time"
        steps = codes.astype(np.float32) - along(bias.zero_point, 0, 1).astype(np.float32)
        array = steps * along(bias.scale, 0, 1)
        name = (bias.pair.inputs[0].name or "bias") if bias.pair.inputs[0] is not None else "bias"
        node.replace_input_with(2, self._constant(node, f"{name}_float", array))
        return None

    def count_from_front(self, node: ir.Node) -> Outcome:
        """Makes negative constant indices of a Gather positive."""
        indices = const_array(node.inputs[1]) if len(node.inputs) > 1 else None
        shape = dimensions(node.inputs[0].shape) if node.inputs[0] is not None else None
        axis = node.attributes.get_int("axis", 0)
        size = None if shape is None else shape[axis]
        if node.op_type not in ("Gather", "GatherElements") or indices is None:
            return f"{node.op_type} has no other form"
        if not isinstance(size, int):
            return f"the size of axis {axis}, from which it counts back, is not known"
        positive = np.where(indices < 0, indices + size, indices).astype(indices.dtype)
        name = f"{node.inputs[1].name}_positive" if node.inputs[1] is not None else "indices"
        node.replace_input_with(1, self._constant(node, name, positive))
        return None

    def write_attributes(self, node: ir.Node, wanted: tuple[str, ...]) -> Outcome:
        """Writes out attributes of a convolution that were left to their defaults."""
        kernel = _kernel(node)
        if node.op_type not in ("Conv", "ConvTranspose"):
            return f"the defaults of {node.op_type} are not known here"
        if kernel is None:
            return "the shape of its weight is not known"
        auto = node.attributes.get_string("auto_pad", "NOTSET")
        pads = _pads(node, kernel, auto)
        if pads is None:
            return (
                f"auto_pad {auto} needs known sizes"
                if node.op_type == "Conv"
                else (f"auto_pad {auto} of a transposed convolution is left alone")
            )
        ones = [1] * len(kernel)
        values = {"kernel_shape": kernel, "strides": ones, "dilations": ones, "pads": pads}
        for name in wanted:
            if name in node.attributes:
                continue
            if name == "group":
                node.attributes["group"] = ir.AttrInt64("group", 1)
            elif name in values:
                node.attributes[name] = ir.AttrInt64s(name, values[name])
        node.attributes.pop("auto_pad", None)
        return None

    def _constant(self, node: ir.Node, name: str, array: NDArray[Any]) -> ir.Value:
        graph = node.graph
        assert isinstance(graph, ir.Graph), "nodes of functions are not rewritten"
        return add_initializer(graph, self.names.fresh(name), array)


def _kernel(node: ir.Node) -> list[int] | None:
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    shape = None if weight is None else dimensions(weight.shape)
    sizes = [size for size in shape[2:] if isinstance(size, int)] if shape else []
    return sizes if shape is not None and len(sizes) == len(shape) - 2 else None


def _pads(node: ir.Node, kernel: list[int], auto: str) -> list[int] | None:
    """Explicit pads, begins then ends; None when they depend on what is not known."""
    if auto == "VALID":
        return [0] * (2 * len(kernel))
    if auto == "NOTSET":
        given = node.attributes.get("pads")
        return [0] * (2 * len(kernel)) if given is None else list(given.as_ints())
    shape = dimensions(node.inputs[0].shape) if node.inputs[0] is not None else None
    sizes = [size for size in shape[2:] if isinstance(size, int)] if shape else []
    if node.op_type != "Conv" or len(sizes) != len(kernel):
        return None
    strides = _ints(node, "strides", len(kernel))
    dilations = _ints(node, "dilations", len(kernel))
    totals = [
        max((-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0)
        for size, stride, width, dilation in zip(sizes, strides, kernel, dilations, strict=True)
    ]
    less, more = [total // 2 for total in totals], [-(-total // 2) for total in totals]
    return [*less, *more] if auto == "SAME_UPPER" else [*more, *less]


def _ints(node: ir.Node, name: str, count: int) -> list[int]:
    given = node.attributes.get(name)
    return [1] * count if given is None else list(given.as_ints())


REWRITES: Final[Mapping[str, Callable[[Rewriter, ir.Node, Any], Outcome]]] = {
    "own_dequantize": lambda rewriter, node, _: rewriter.give_own_dequantize(node),
    "bias": lambda rewriter, node, wanted: (
        rewriter.store_float_bias(node) if wanted == "float" else "an int32 bias would be rounded"
    ),
    "nonnegative_inputs": lambda rewriter, node, _: rewriter.count_from_front(node),
    "explicit_attributes": Rewriter.write_attributes,
}
"""What can be done about a broken demand, by its name."""
