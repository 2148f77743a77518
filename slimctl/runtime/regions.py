"""Q/DQ regions: an operator between DequantizeLinear and QuantizeLinear becomes integer arithmetic.

A region is one node whose data come from DequantizeLinear nodes and whose only reader is, behind
Relu or Clip nodes at most, a QuantizeLinear. It runs as the integer operator of the same name, with
the operands that the Q/DQ nodes hold, so that a region and a model in QOperator format are computed
by the same function. Which regions there are is what onnxruntime's documentation of Q/DQ says; a
region that onnxruntime does not fuse is computed as it is written there, and compared.

The tensors between the nodes of a region do not exist when it runs this way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import onnx_ir as ir

from slimctl.graph.codes import code_rank, code_type
from slimctl.runtime.registry import MICROSOFT, OWN

_BYTES = (ir.DataType.UINT8, ir.DataType.INT8)
_FOLDED = ("Relu", "Clip")
"""Between an operator and its QuantizeLinear: monotone, so that codes can be clipped instead."""


@dataclass(frozen=True)
class Region:
    """Nodes that run as one integer operator.

    Attributes:
        core: The operator's node.
        op_type: The integer operator.
        domain: Its domain.
        inputs: Its inputs.
        output: Its output: that of the QuantizeLinear, or the core's own.
        attributes: Its attributes.
        clips: Relu and Clip nodes before the QuantizeLinear, as least and largest values.
        parameters: Scale and zero point of the output.
        last: The node whose place it takes.
    """

    core: ir.Node
    op_type: str
    domain: str
    inputs: tuple[ir.Value | None, ...]
    output: ir.Value
    attributes: Mapping[str, ir.Attr]
    clips: tuple[tuple[float, float], ...]
    parameters: tuple[ir.Value | None, ...]
    last: ir.Node


@dataclass(frozen=True)
class _Operand:
    """What a DequantizeLinear holds."""

    codes: ir.Value
    scale: ir.Value
    zero_point: ir.Value | None
    axis: int = 1


_Form: TypeAlias = Callable[[ir.Node, list[_Operand], _Operand | None], "_Call | None"]


@dataclass(frozen=True)
class _Call:
    op_type: str
    domain: str
    inputs: list[ir.Value | None]
    attributes: Mapping[str, ir.Attr]


def find_region(node: ir.Node) -> Region | None:
    """The region around a node, None where there is none."""
    form = _FORMS.get(node.op_type) if node.domain == "" else None
    if form is None:
        return None
    operands = [_operand(value) for value in node.inputs if value is not None]
    if any(operand is None for operand in operands):
        return None
    known = [operand for operand in operands if operand is not None]
    quantize, clips = _quantize_behind(node)
    output = _output(quantize) if quantize is not None else None
    if output is None and quantize is not None:
        return None
    call = form(node, known, output)
    if call is None or (quantize is None and (clips or output is not None)):
        return None
    last = quantize or node
    return Region(
        node,
        call.op_type,
        call.domain,
        tuple(call.inputs),
        last.outputs[0],
        call.attributes,
        tuple(bounds for clip in clips if (bounds := clip_bounds(clip)) is not None),
        () if output is None else (output.scale, output.zero_point),
        last,
    )


def _operand(value: ir.Value) -> _Operand | None:
    """What stands behind a tensor that was restored from codes of 8 bits (a bias: of 32)."""
    node = value.producer()
    if node is None or node.op_type != "DequantizeLinear":
        return None
    codes, scale = node.inputs[0], node.inputs[1]
    assert codes is not None and scale is not None, "the checker wants them"
    blocked = node.attributes.get_int("block_size", 0)
    kinds = (*_BYTES, ir.DataType.INT32)
    if blocked or code_type(codes) not in kinds or scale.dtype not in _SINGLE:
        return None
    zero_point = node.inputs[2] if len(node.inputs) > 2 else None
    return _Operand(codes, scale, zero_point, node.attributes.get_int("axis", 1))


_SINGLE = (ir.DataType.FLOAT, None)


def _output(quantize: ir.Node) -> _Operand | None:
    """The scale and zero point of a QuantizeLinear to 8 bits per tensor."""
    codes, scale = quantize.outputs[0], quantize.inputs[1]
    zero_point = quantize.inputs[2] if len(quantize.inputs) > 2 else None
    assert scale is not None, "the checker wants it"
    if zero_point is None or code_type(codes) not in _BYTES or not _is_scalar(scale):
        return None
    return _Operand(codes, scale, zero_point)


def _is_scalar(value: ir.Value) -> bool:
    if value.const_value is not None:
        return value.const_value.size == 1
    return value.shape is not None and all(dim == 1 for dim in value.shape.dims)


def _quantize_behind(node: ir.Node) -> tuple[ir.Node | None, list[ir.Node]]:
    """The QuantizeLinear that alone reads a node's output, and what is clipped before it."""
    clips: list[ir.Node] = []
    value = node.outputs[0]
    while not value.is_graph_output() and len(value.uses()) == 1:
        use = next(iter(value.uses()))
        reader = use.node
        if reader.graph is not node.graph or use.idx != 0:
            break
        if reader.op_type == "QuantizeLinear":
            return reader, clips
        if reader.op_type not in _FOLDED or reader.domain or clip_bounds(reader) is None:
            break
        clips.append(reader)
        value = reader.outputs[0]
    return None, []  # a Relu without a QuantizeLinear behind it runs by itself


def clip_bounds(node: ir.Node) -> tuple[float, float] | None:
    """Between what values a Relu or Clip leaves a tensor; None if that is computed."""
    if node.op_type == "Relu":
        return 0.0, math.inf
    low, high = (node.attributes.get_float(name, None) for name in ("min", "max"))
    bounds = [-math.inf if low is None else low, math.inf if high is None else high]
    for index, value in enumerate(node.inputs[1:]):
        if value is not None:
            if value.const_value is None or value.is_graph_input():
                return None
            bounds[index] = float(value.const_value.numpy().reshape(()))
    return bounds[0], bounds[1]


# how the operands are arranged, operator by operator


def _of(operand: _Operand) -> list[ir.Value | None]:
    return [operand.codes, operand.scale, operand.zero_point]


def _are_bytes(operands: list[_Operand]) -> bool:
    return all(code_type(operand.codes) in _BYTES for operand in operands)


def _convolution(node: ir.Node, operands: list[_Operand], output: _Operand | None) -> _Call | None:
    if output is None or not _are_bytes(operands[:2]):
        return None
    if not _is_scalar(operands[0].scale) or not _is_bias(operands[2:]):
        return None
    if not _along(operands[1], 0 if node.op_type == "Conv" else 1):
        return None
    bias = [operand.codes for operand in operands[2:]]
    inputs = [*_of(operands[0]), *_of(operands[1]), output.scale, output.zero_point, *bias]
    names = {"Conv": ("QLinearConv", ""), "ConvTranspose": ("QLinearConvTranspose", OWN)}
    return _Call(*names[node.op_type], inputs, node.attributes)


def _along(weights: _Operand, axis: int) -> bool:
    """Whether the weights have one scale, or one for each channel of the outputs."""
    if _is_scalar(weights.scale):
        return True
    rank = code_rank(weights.codes)
    return rank is not None and weights.axis % rank == axis % rank


def _is_bias(operands: list[_Operand]) -> bool:
    return all(code_type(operand.codes) == ir.DataType.INT32 for operand in operands)


def _matmul(node: ir.Node, operands: list[_Operand], output: _Operand | None) -> _Call | None:
    if not _are_bytes(operands):
        return None
    a, b = operands
    if not _is_scalar(a.scale) or not _along(b, -1):
        return None
    if output is not None:
        inputs = [*_of(a), *_of(b), output.scale, output.zero_point]
        return _Call("QLinearMatMul", "", inputs, {})
    inputs = [a.codes, b.codes, a.scale, b.scale, a.zero_point, b.zero_point]
    return _Call("MatMulIntegerToFloat", MICROSOFT, inputs, {})


def _gemm(node: ir.Node, operands: list[_Operand], output: _Operand | None) -> _Call | None:
    if not _are_bytes(operands[:2]):
        return None
    if not _is_bias(operands[2:]) or not _is_scalar(operands[0].scale):
        return None
    if operands[2:] and node.attributes.get_float("beta", 1.0) != 1.0:
        return None
    if not _along(operands[1], 0 if node.attributes.get_int("transB", 0) else 1):
        return None
    kept = {n: a for n, a in node.attributes.items() if n in ("alpha", "transA", "transB")}
    bias: ir.Value | None = operands[2].codes if operands[2:] else None
    inputs = [*_of(operands[0]), *_of(operands[1]), bias]
    if output is not None:
        inputs += [output.scale, output.zero_point]
    return _Call("QGemm", MICROSOFT, inputs, kept)


def _pairwise(op_type: str) -> _Form:
    def form(node: ir.Node, operands: list[_Operand], output: _Operand | None) -> _Call | None:
        del node
        if output is None or not _per_tensor(operands):
            return None
        inputs = [*_of(operands[0]), *_of(operands[1]), output.scale, output.zero_point]
        return _Call(op_type, MICROSOFT, inputs, {})

    return form


def _per_tensor(operands: list[_Operand]) -> bool:
    return _are_bytes(operands) and all(_is_scalar(operand.scale) for operand in operands)


def _concat(node: ir.Node, operands: list[_Operand], output: _Operand | None) -> _Call | None:
    if output is None or not _per_tensor(operands):
        return None
    triples = [value for operand in operands for value in _of(operand)]
    inputs = [output.scale, output.zero_point, *triples]
    return _Call("QLinearConcat", MICROSOFT, inputs, node.attributes)


def _unary(op_type: str, domain: str = MICROSOFT) -> _Form:
    def form(node: ir.Node, operands: list[_Operand], output: _Operand | None) -> _Call | None:
        if output is None or not _per_tensor(operands):
            return None
        inputs = [*_of(operands[0]), output.scale, output.zero_point]
        return _Call(op_type, domain, inputs, node.attributes)

    return form


def _max_pool(node: ir.Node, operands: list[_Operand], output: _Operand | None) -> _Call | None:
    if len(node.outputs) > 1:
        return None  # somebody wants to know where the largest values are
    return _unary("QLinearMaxPool", OWN)(node, operands, output)


def _average_pool(node: ir.Node, operands: list[_Operand], output: _Operand | None) -> _Call | None:
    if any(step != 1 for step in node.attributes.get_ints("dilations", ())):
        return None
    return _unary("QLinearAveragePool")(node, operands, output)


_FORMS: dict[str, _Form] = {
    "Conv": _convolution,
    "ConvTranspose": _convolution,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Add": _pairwise("QLinearAdd"),
    "Mul": _pairwise("QLinearMul"),
    "Concat": _concat,
    "AveragePool": _average_pool,
    "MaxPool": _max_pool,
    "GlobalAveragePool": _unary("QLinearGlobalAveragePool"),
    "Sigmoid": _unary("QLinearSigmoid"),
    "LeakyRelu": _unary("QLinearLeakyRelu"),
}
