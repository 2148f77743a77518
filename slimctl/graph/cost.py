"""What a model costs: multiply-accumulates, parameters, bytes. Nothing unknown is guessed.

Formulas (as in the literature, one multiply-accumulate per weight and position):
Conv ``outputs * in_channels / group * kernel``; ConvTranspose ``inputs * out_channels / group *
kernel``; Gemm and MatMul ``outputs * K``; LSTM, GRU, RNN ``steps * batch * (|W| + |R|)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import onnx_ir as ir

from slimctl.core.errors import UnsupportedModelError
from slimctl.graph.edit import Dimension, attribute_graphs, dimensions
from slimctl.graph.opset import default_opset, raise_opset
from slimctl.graph.save import initializer_values
from slimctl.graph.shapes import with_sizes

Shape = tuple[Dimension, ...] | None

_CALCULATES_SHAPES = 15
"""From this operator set on onnx follows shapes that the model calculates itself."""


class NodeCost(NamedTuple):
    """What one node of the main graph costs in one run. None stands for unknown.

    Attributes:
        name: Name of the node.
        op_type: Operator.
        macs: Multiply-accumulates of linear operators; 0 for all others.
        parameters: Elements of the weights that the node reads, also through DequantizeLinear.
        weight_bytes: Their bytes as they are stored.
        activation_bytes: Bytes of all other inputs and of the outputs.
        output_shapes: One per output.
    """

    name: str
    op_type: str
    macs: int | None
    parameters: int
    weight_bytes: int
    activation_bytes: int | None
    output_shapes: tuple[Shape, ...]


@dataclass
class OperatorCost:
    """Sums over the nodes of one operator; what is unknown is left out and counted."""

    count: int = 0
    macs: int = 0
    activation_bytes: int = 0
    unknown: int = 0


@dataclass(frozen=True)
class ModelCost:
    """Sums over a model.

    Attributes:
        parameters: Elements of all weights; shared ones count once.
        weight_bytes: Their bytes as they are stored, together with all other constants.
        macs: Multiply-accumulates of the nodes whose shapes are known.
        activation_bytes: Bytes read and written besides weights, of the nodes that are known.
        unknown: Nodes of which something is unknown.
        operators: The same by operator, most multiply-accumulates first.
    """

    parameters: int
    weight_bytes: int
    macs: int
    activation_bytes: int
    unknown: int
    operators: Mapping[str, OperatorCost] = field(default_factory=dict)


def node_costs(model: ir.Model, default_dims: Mapping[str, int] | None = None) -> list[NodeCost]:
    """Cost of every node of the main graph. The bodies of an If count as the dearest of them.

    Args:
        model: Not changed.
        default_dims: Sizes of symbolic dimensions by name, and of nameless ones by place, as in
            ``{"batch": 1, "input[2]": 224}``.
    """
    costs = _costs(with_sizes(model, default_dims or {}))
    if any(map(_is_unknown, costs)) and default_opset(model) < _CALCULATES_SHAPES:
        with suppress(UnsupportedModelError):
            newer = raise_opset(model, _CALCULATES_SHAPES)
            costs = _costs(with_sizes(newer, default_dims or {}))
    return costs


def stated_costs(model: ir.Model) -> list[NodeCost]:
    """Cost of every node of the main graph by the shapes that the model states, none inferred.

    For graphs with operators that only a runtime knows.
    """
    return _costs(model)


def _costs(model: ir.Model) -> list[NodeCost]:
    return [_node_cost(node) for node in model.graph]


def model_cost(model: ir.Model, default_dims: Mapping[str, int] | None = None) -> ModelCost:
    """Sums of :func:`node_costs`, and what the model stores."""
    operators: dict[str, OperatorCost] = {}
    costs = node_costs(model, default_dims)
    for cost in costs:
        total = operators.setdefault(cost.op_type, OperatorCost())
        total.count += 1
        total.macs += cost.macs or 0
        total.activation_bytes += cost.activation_bytes or 0
        total.unknown += _is_unknown(cost)
    tensors = [value.const_value for value in initializer_values(model)]
    return ModelCost(
        parameters=sum(tensor.size for tensor in tensors if tensor and _is_parameter(tensor)),
        weight_bytes=sum(tensor.nbytes for tensor in tensors if tensor),
        macs=sum(total.macs for total in operators.values()),
        activation_bytes=sum(total.activation_bytes for total in operators.values()),
        unknown=sum(map(_is_unknown, costs)),
        operators=dict(sorted(operators.items(), key=lambda item: -item[1].macs)),
    )


def _is_unknown(cost: NodeCost) -> bool:
    return cost.macs is None or cost.activation_bytes is None


def _node_cost(node: ir.Node) -> NodeCost:
    weights = list(_weights(node))
    return NodeCost(
        name=node.name or "",
        op_type=node.op_type,
        macs=_macs(node),
        parameters=sum(tensor.size for tensor in weights if _is_parameter(tensor)),
        weight_bytes=sum(tensor.nbytes for tensor in weights),
        activation_bytes=_activation_bytes(node),
        output_shapes=tuple(dimensions(value.shape) for value in node.outputs),
    )


_NO_PARAMETERS = (ir.DataType.INT64, ir.DataType.BOOL, ir.DataType.STRING)


def _is_parameter(tensor: ir.TensorProtocol) -> bool:
    """Integers of 64 bits are shapes and indices, never weights."""
    return tensor.dtype not in _NO_PARAMETERS


def _weights(node: ir.Node) -> Iterator[ir.TensorProtocol]:
    if _unpacks_constant(node):
        return  # counted where the weight is used
    for value in node.inputs:
        source = _behind_dequantize(value)
        if source is not None and source.is_initializer() and source.const_value is not None:
            yield source.const_value


def _behind_dequantize(value: ir.Value | None) -> ir.Value | None:
    maker = value.producer() if value is not None else None
    if maker is None or not _unpacks_constant(maker):
        return value
    return _widened(maker.inputs[0])


def _unpacks_constant(node: ir.Node) -> bool:
    data = _widened(node.inputs[0]) if node.inputs else None
    return node.op_type == "DequantizeLinear" and data is not None and data.is_initializer()


def _widened(value: ir.Value | None) -> ir.Value | None:
    """The constant of few bits behind a Cast, or the value itself."""
    maker = value.producer() if value is not None else None
    stored = maker.inputs[0] if maker is not None and maker.op_type == "Cast" else None
    return stored if stored is not None and stored.is_initializer() else value


_VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout")


def _activation_bytes(node: ir.Node) -> int | None:
    """Views of the same memory move nothing, and neither do weights that are unpacked."""
    if node.op_type in _VIEWS or _unpacks_constant(node):
        return 0
    values = {value for value in node.inputs if value is not None and not _is_constant(value)}
    values |= {value for value in node.outputs if value.name}
    return _sum(map(_bytes, values))


def _is_constant(value: ir.Value) -> bool:
    source = _behind_dequantize(value)
    return source is not None and source.is_initializer()


def _bytes(value: ir.Value) -> int | None:
    count = _elements(dimensions(value.shape))
    if count is None or value.dtype is None:
        return None
    return -(-count * value.dtype.bitwidth // 8) if value.dtype != ir.DataType.STRING else 0


def _sum(numbers: Iterable[int | None]) -> int | None:
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


def _elements(shape: Shape) -> int | None:
    if shape is None:
        return None
    sizes = [dim for dim in shape if isinstance(dim, int)]
    return prod(sizes) if len(sizes) == len(shape) else None


def _shape(node: ir.Node, index: int) -> Shape:
    value = node.inputs[index] if index < len(node.inputs) else None
    return dimensions(value.shape) if value is not None else None


def _product(*factors: int | None) -> int | None:
    known = [factor for factor in factors if factor is not None]
    return prod(known) if len(known) == len(factors) else None


def _output_elements(node: ir.Node) -> int | None:
    return _elements(dimensions(node.outputs[0].shape))


def _convolution(node: ir.Node, weight: int) -> int | None:
    kernel = _shape(node, weight)  # [out, in / group, *kernel]
    return _product(_output_elements(node), _elements(kernel[1:] if kernel else None))


def _transposed_convolution(node: ir.Node, weight: int) -> int | None:
    kernel = _shape(node, weight)  # [in, out / group, *kernel]
    return _product(_elements(_shape(node, 0)), _elements(kernel[1:] if kernel else None))


def _matrix_product(node: ir.Node, weight: int) -> int | None:
    del weight
    left = _shape(node, 0)
    flag = node.attributes.get("transA")
    transposed = flag is not None and flag.as_int() != 0
    inner = left[-2 if transposed else -1 :][:1] if left else None
    return _product(_output_elements(node), _elements(inner))


def _recurrent(node: ir.Node, weight: int) -> int | None:
    sequence = _shape(node, 0)  # [steps, batch, input] or [batch, steps, input]
    positions = _elements(sequence[:2] if sequence else None)
    per_step = _sum((_elements(_shape(node, weight)), _elements(_shape(node, weight + 1))))
    return _product(positions, per_step)


def _block_quantized(node: ir.Node, weight: int) -> int | None:
    del weight
    return _product(_output_elements(node), node.attributes["K"].as_int())


class _Rule(NamedTuple):
    macs: Callable[[ir.Node, int], int | None]
    weight: int = 1  # input index of the weight


_RULES = {
    **{name: _Rule(_convolution) for name in ("Conv", "ConvInteger", "FusedConv")},
    "QLinearConv": _Rule(_convolution, weight=3),
    "ConvTranspose": _Rule(_transposed_convolution),
    **{
        name: _Rule(_matrix_product)
        for name in (
            *("Gemm", "FusedGemm", "QGemm", "MatMul", "FusedMatMul", "MatMulInteger"),
            *("QLinearMatMul", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"),
        )
    },
    "MatMulNBits": _Rule(_block_quantized),
    **{name: _Rule(_recurrent) for name in ("LSTM", "GRU", "RNN")},
}
_UNCOUNTED = (
    *("Einsum", "Attention", "MultiHeadAttention", "GroupQueryAttention"),
    *("DeformConv", "Loop", "Scan"),
)
"""Operators that multiply, and for which there is no formula here."""


def _macs(node: ir.Node) -> int | None:
    bodies = [_sum(_macs(inner) for inner in body) for body in attribute_graphs(node)]
    if node.op_type == "If" and None not in bodies:
        return max(number for number in bodies if number is not None)
    if node.op_type in _UNCOUNTED or bodies:
        return None
    rule = _RULES.get(node.op_type)
    return rule.macs(node, rule.weight) if rule else 0
