"""Looks at the graph as onnxruntime optimizes it: which Q/DQ pairs became integer kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import onnx_ir as ir

from slimctl.core.contract import Skipped
from slimctl.core.target import Target
from slimctl.graph.edit import all_nodes
from slimctl.graph.session import Level, optimized

_QUANTIZE: Final = "QuantizeLinear"
_DEQUANTIZE: Final = "DequantizeLinear"
_FLOAT_FORMS: Final = {
    "Conv": ("Conv", "FusedConv"),
    "Gemm": ("Gemm", "FusedGemm"),
    "MatMul": ("MatMul", "FusedMatMul"),
}
_INTEGER_KERNELS: Final = (
    "QLinear",
    "QGemm",
    "MatMulInteger",
    "MatMulNBits",
    "ConvInteger",
    "DynamicQuantize",
)


@dataclass(frozen=True)
class FusionReport:
    """What onnxruntime made of the Q/DQ pairs.

    Attributes:
        kernels: Integer kernels by operator, as onnxruntime names them.
        fused: Q and DQ nodes that disappeared into kernels.
        left: Q and DQ nodes that remain, at borders to float operators.
        unfused: Conv, Gemm and MatMul that read a DQ and still compute in float.
        borders: Remaining Q and DQ nodes by the float operator beside them.
    """

    kernels: dict[str, int]
    fused: int
    left: int
    unfused: tuple[Skipped, ...]
    borders: dict[str, int]


def inspect_fusion(model: ir.Model, target: Target) -> FusionReport:
    """Lets onnxruntime optimize the model for the target and counts.

    Raises:
        ModelExecutionError: onnxruntime does not load the model.
    """
    result = optimized(model, Level.EXTENDED, settings=target.session_settings)
    kernels: dict[str, int] = {}
    borders: dict[str, int] = {}
    unfused: list[Skipped] = []
    stored = {node.name for node in all_nodes(model) if node.op_type == "MatMulNBits"}
    for node in all_nodes(result):
        if node.op_type == "MatMulNBits" and node.name in stored:
            continue  # no pair has become it
        if node.op_type.startswith(_INTEGER_KERNELS):
            kernels[node.op_type] = kernels.get(node.op_type, 0) + 1
        elif node.op_type in (_QUANTIZE, _DEQUANTIZE):
            neighbor = _neighbor(node)
            borders[neighbor] = borders.get(neighbor, 0) + 1
        elif _computes_dequantized_weights(node, target):
            unfused.append(Skipped(node.name or "", _reason(node)))
    left = _count_pairs(result)
    return FusionReport(
        dict(sorted(kernels.items())),
        _count_pairs(model) - left,
        left,
        tuple(unfused),
        dict(sorted(borders.items())),
    )


def _count_pairs(model: ir.Model) -> int:
    return sum(node.op_type in (_QUANTIZE, _DEQUANTIZE) for node in all_nodes(model))


def _computes_dequantized_weights(node: ir.Node, target: Target) -> bool:
    forms = [form for operator in target.weighted for form in _FLOAT_FORMS.get(operator, ())]
    data, weight = node.inputs[:2] if len(node.inputs) > 1 else (None, None)
    if node.op_type not in forms or data is None or weight is None:
        return False
    # A layer left in float on purpose reads a DQ too, but not for its weight; one whose weights
    # are only stored as integers reads its data from float.
    return _made_by(weight, _DEQUANTIZE) and _made_by(data, _DEQUANTIZE)


def _made_by(value: ir.Value, op_type: str) -> bool:
    producer = value.producer()
    return producer is not None and producer.op_type == op_type


def _reason(node: ir.Node) -> str:
    users = sorted({user.op_type for user in node.outputs[0].consumers()})
    if node.op_type == "FusedConv":
        return "its activation is not made redundant by the quantization behind it"
    if users and _QUANTIZE not in users:
        return f"its output goes to {', '.join(users)} without a Q"
    return "onnxruntime has no integer kernel for this form"


def _neighbor(node: ir.Node) -> str:
    """The float operator that a remaining Q or DQ serves."""
    if node.op_type == _QUANTIZE:
        producer = node.inputs[0].producer() if node.inputs[0] is not None else None
        return "model input" if producer is None else producer.op_type
    users = sorted({user.op_type for user in node.outputs[0].consumers()})
    return ", ".join(users) if users else "model output"
