"""What changed between operator sets, as edits of single nodes.

Each function turns a node of the older operator set, in place, into one that computes the same
under the newer: its own version and no other. Changes that need no edit (new types, new optional
inputs, new attributes with a neutral default) are not listed here; :mod:`slimctl.graph.opset` finds
out by comparing the schemas.

Why not ``onnx.version_converter``: in onnx 1.23 it turns Clip of a float16 model into one that
onnxruntime refuses, it moves the sampling points of Resize-10 and Upsample (an error of half a
pixel), and it rebuilds the whole model, weights included.
Source of every rule: the operator changelog, https://onnx.ai/onnx/operators/.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.errors import UnsupportedModelError
from slimctl.graph.edit import NameScope, const_array

MakeConstant = Callable[[ir.Graph, str, NDArray[Any]], ir.Value]


def add_constant_node(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    """Puts a Constant node first in a graph."""
    node = ir.node("Constant", [], {"value": ir.Tensor(array, name=name)}, name=name)
    node.outputs[0].name = name
    graph.insert_before(graph[0], node)
    return node.outputs[0]


class Constants:
    """New constants of one graph, each stored once, where every subgraph sees them.

    Args:
        graph: A main graph or the body of a function.
        names: Names in use.
        make: How a constant is put into the graph; functions cannot have initializers.
    """

    def __init__(self, graph: ir.Graph, names: NameScope, make: MakeConstant) -> None:
        self._graph = graph
        self._make = make
        self._made: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self.names = names

    def value(self, base: str, array: NDArray[Any]) -> ir.Value:
        """The constant with these contents, made if there is none."""
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._made:
            self._made[key] = self._make(self._graph, self.names.fresh(base), array)
        return self._made[key]

    def integers(self, base: str, numbers: Any) -> ir.Value:
        """A constant of type int64 and rank one."""
        return self.value(base, np.asarray(numbers, np.int64).reshape(-1))


Change = Callable[[ir.Node, Constants], None]


def _unsupported(node: ir.Node, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{node.op_type} {what} cannot be raised to a newer operator set",
        where=f"node '{node.name}'",
        fix="export the model with operator set 13 or newer",
    )


def _set_inputs(node: ir.Node, inputs: list[ir.Value | None]) -> None:
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)


def _attribute_to_input(attribute: str, index: int) -> Change:
    """Integers that moved from an attribute to an optional input."""

    def change(node: ir.Node, constants: Constants) -> None:
        numbers = node.attributes.pop(attribute, None)
        if numbers is not None:
            moved = constants.integers(f"{node.name}_{attribute}", numbers.value)
            _set_inputs(node, [*node.inputs[:index], moved])

    return change


def _upsample_9(node: ir.Node, constants: Constants) -> None:
    scales = np.asarray(node.attributes.pop("scales").as_floats(), np.float32)  # [rank]
    _set_inputs(node, [node.inputs[0], constants.value(f"{node.name}_scales", scales)])


def _upsample_10(node: ir.Node, constants: Constants) -> None:
    del constants
    node.op_type = "Resize"


def _resize_11(node: ir.Node, constants: Constants) -> None:
    """Before, a pixel's position was its index; now its center, unless one says otherwise."""
    data, scales = node.inputs
    roi = constants.value(f"{node.name}_roi", np.empty(0, np.float32))
    _set_inputs(node, [data, roi, scales])
    node.attributes["coordinate_transformation_mode"] = ir.AttrString(
        "coordinate_transformation_mode", "asymmetric"
    )
    mode = node.attributes.get("mode")
    if mode is None or mode.as_string() == "nearest":
        node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", _nearest_10(node, scales))


def _nearest_10(node: ir.Node, scales: ir.Value | None) -> str:
    """How onnxruntime rounds in Resize-10, where the standard does not say."""
    factors = const_array(scales)
    if factors is None:
        raise _unsupported(node, "of version 10 (nearest) with scales that are computed")
    if np.all(factors >= 1):
        return "floor"
    if np.all(factors <= 1):
        return "ceil"
    raise _unsupported(node, "of version 10 (nearest) that enlarges and shrinks at once")


def _slice_10(node: ir.Node, constants: Constants) -> None:
    inputs = [node.inputs[0]]
    for name in ("starts", "ends", "axes"):
        numbers = node.attributes.pop(name, None)
        if numbers is not None:
            inputs.append(constants.integers(f"{node.name}_{name}", numbers.as_ints()))
    _set_inputs(node, inputs)


def _top_k_10(node: ir.Node, constants: Constants) -> None:
    k = node.attributes.pop("k").as_int()
    _set_inputs(node, [node.inputs[0], constants.integers(f"{node.name}_k", k)])


def _like(node: ir.Node, number: float) -> NDArray[Any]:
    """A scalar of the type of the node's data."""
    data = node.inputs[0]
    # Not inferred only behind custom operators. A wrong guess cannot pass unseen: onnxruntime
    # refuses a node whose inputs have different types.
    kind = (data.dtype if data is not None else None) or ir.DataType.FLOAT
    if kind.is_floating_point():
        limits = np.finfo(kind.numpy())  # Clip and Pad took attributes before bfloat16 existed
        number = min(max(number, float(limits.min)), float(limits.max))
    return np.asarray(number, kind.numpy())


def _clip_11(node: ir.Node, constants: Constants) -> None:
    inputs = [node.inputs[0]]
    for name in ("min", "max"):
        bound = node.attributes.pop(name, None)
        value = None
        if bound is not None:
            value = constants.value(f"{node.name}_{name}", _like(node, bound.as_float()))
        inputs.append(value)
    _set_inputs(node, inputs)


def _pad_11(node: ir.Node, constants: Constants) -> None:
    pads = node.attributes.pop("pads").as_ints()
    inputs = [node.inputs[0], constants.integers(f"{node.name}_pads", pads)]
    value = node.attributes.pop("value", None)
    if value is not None:
        inputs.append(constants.value(f"{node.name}_value", _like(node, value.as_float())))
    _set_inputs(node, inputs)


def _scatter_11(node: ir.Node, constants: Constants) -> None:
    del constants
    node.op_type = "ScatterElements"


def _dropout_12(node: ir.Node, constants: Constants) -> None:
    ratio = node.attributes.pop("ratio", None)
    if ratio is not None:
        scalar = np.asarray(ratio.as_float(), np.float32)
        _set_inputs(node, [node.inputs[0], constants.value(f"{node.name}_ratio", scalar)])


def _dropout_10(node: ir.Node, constants: Constants) -> None:
    del constants
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        raise _unsupported(node, "whose mask is used")  # the mask's type became bool


def _batch_normalization_9(node: ir.Node, constants: Constants) -> None:
    del constants
    spatial = node.attributes.pop("spatial", None)
    if spatial is not None and spatial.as_int() == 0:
        raise _unsupported(node, "with spatial=0")


def _batch_normalization_14(node: ir.Node, constants: Constants) -> None:
    """More than one output used to mean training mode; onnxruntime never trained."""
    del constants
    extra = node.outputs[1:]
    if any(value.uses() or value.is_graph_output() for value in extra):
        raise _unsupported(node, "in training mode")
    node.resize_outputs(1)


def _softmax_13(node: ir.Node, constants: Constants) -> None:
    """Before 13 the axes from ``axis`` on were one axis: ``[a, b, c]`` became ``[a, b*c]``."""
    stated = node.attributes.get("axis")
    axis = 1 if stated is None else stated.as_int()
    single = _single_axis(node.inputs[0], axis)
    if single is None:
        _flatten_around(node, axis, constants)
        single = -1
    node.attributes["axis"] = ir.AttrInt64("axis", single)


def _single_axis(data: ir.Value | None, axis: int) -> int | None:
    """The one axis that the flattened axes amount to, since all others have size one."""
    if axis == -1:
        return -1
    shape = data.shape if data is not None else None
    if shape is None:
        return None
    first = axis % len(shape) if len(shape) else 0
    if first == len(shape) - 1:
        return -1
    wide = [i for i in range(first, len(shape)) if shape[i] != 1]
    if len(wide) > 1:
        return None
    return wide[0] if wide else -1


def _flatten_around(node: ir.Node, axis: int, constants: Constants) -> None:
    """Flatten to two axes before the node, and back to the input's shape behind it."""
    data, result = node.inputs[0], node.outputs[0]
    names = constants.names

    def made(kind: str, inputs: list[ir.Value | None], **attributes: int) -> ir.Node:
        name = names.fresh_node(f"{node.name}_{kind}")
        listed = [ir.AttrInt64(key, number) for key, number in attributes.items()]
        new = ir.Node("", kind, inputs, listed, name=name)
        new.outputs[0].name = names.fresh(f"{name}_output")
        new.outputs[0].type = result.type
        return new

    shape = made("Shape", [data])
    shape.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    flat = made("Flatten", [data], axis=axis)
    back = made("Reshape", [result, shape.outputs[0]])
    node.replace_input_with(0, flat.outputs[0])
    node.prepend([shape, flat])
    _take_over(result, back)
    node.append(back)


def _take_over(value: ir.Value, by: ir.Node) -> None:
    """Everybody who read ``value`` reads the output of ``by``, under the same name."""
    new = by.outputs[0]
    new.shape = value.shape
    value.replace_all_uses_with(new, replace_graph_outputs=True)
    by.replace_input_with(0, value)
    value.name, new.name = new.name, value.name
    value.shape = None


def _roi_align_16(node: ir.Node, constants: Constants) -> None:
    del constants
    name = "coordinate_transformation_mode"
    if name not in node.attributes:
        node.attributes[name] = ir.AttrString(name, "output_half_pixel")


def _split_18(node: ir.Node, constants: Constants) -> None:
    del constants
    if len(node.inputs) < 2 or node.inputs[1] is None:
        node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))


def _grid_sample_20(node: ir.Node, constants: Constants) -> None:
    del constants
    mode = node.attributes.get("mode")
    renamed = {"bilinear": "linear", "bicubic": "cubic"}
    if mode is not None:
        now = renamed.get(mode.as_string(), mode.as_string())
        node.attributes["mode"] = ir.AttrString("mode", now)


_axes_to_input = _attribute_to_input("axes", 1)

CHANGES: dict[tuple[str, int], Change] = {
    ("Upsample", 9): _upsample_9,
    ("BatchNormalization", 9): _batch_normalization_9,
    ("Upsample", 10): _upsample_10,
    ("Slice", 10): _slice_10,
    ("TopK", 10): _top_k_10,
    ("Dropout", 10): _dropout_10,
    ("Resize", 11): _resize_11,
    ("Clip", 11): _clip_11,
    ("Pad", 11): _pad_11,
    ("Scatter", 11): _scatter_11,
    ("Dropout", 12): _dropout_12,
    **{(name, 13): _softmax_13 for name in ("Softmax", "LogSoftmax", "Hardmax")},
    **{(name, 13): _axes_to_input for name in ("Squeeze", "Unsqueeze", "ReduceSum")},
    ("Split", 13): _attribute_to_input("split", 1),
    ("BatchNormalization", 14): _batch_normalization_14,
    ("RoiAlign", 16): _roi_align_16,
    **{
        (f"Reduce{kind}", 18): _axes_to_input
        for kind in (
            *("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare"),
        )
    },
    ("Split", 18): _split_18,
    ("GridSample", 20): _grid_sample_20,
}
"""By operator and the version it changed in."""

UNSUPPORTED: frozenset[tuple[str, int]] = frozenset({("GroupNormalization", 21)})
"""Changes of meaning that the schemas do not show, and for which there is no edit."""
