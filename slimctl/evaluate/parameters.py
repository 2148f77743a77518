"""Quantization parameters that contradict each other or the float reference: nothing runs.

Whether a model's scales, zero points and biases belong together can be read off the graph. What is
found here is a defect of the file, whatever a runtime makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from slimctl.graph.edit import all_nodes, const_array

_BIAS_TOLERANCE = 1e-3
"""Relative. The product of two float32 scales is exact to 1e-7; some quantizers round it through
float16."""

_PAIRED = ("Conv", "ConvTranspose", "Gemm")
"""Operators with a bias, whose scale must be the product of the other two."""


class Finding(NamedTuple):
    """Something about one node that cannot be right.

    Attributes:
        node: Its name.
        tensor: Name of the tensor that it is about.
        reason: What is wrong, with the numbers.
    """

    node: str
    tensor: str
    reason: str


def check_parameters(model: ir.Model) -> list[Finding]:
    """Looks at every Q/DQ node and every operator between them."""
    found: list[Finding] = []
    for node in all_nodes(model):
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            found.extend(_scale(node))
        if node.op_type == "QuantizeLinear":
            found.extend(_pair(node))
        if node.op_type in _PAIRED and not node.domain:
            found.extend(_bias(node))
        found.extend(_axis(node))
    return found


def _scale(node: ir.Node) -> Iterator[Finding]:
    scale = const_array(node.inputs[1])
    if scale is None:
        return
    values = scale.astype(np.float64)
    if not np.all(np.isfinite(values)) or np.any(values <= 0):
        bad = values[~(np.isfinite(values) & (values > 0))].reshape(-1)[0]
        yield Finding(_name(node), _tensor(node), f"a scale is {bad:g}: scales must be positive")


def _pair(quantize: ir.Node) -> Iterator[Finding]:
    """Codes must be read with the scale and zero point that they were made with."""
    for use in quantize.outputs[0].uses():
        restore = use.node
        if restore.op_type != "DequantizeLinear" or use.idx != 0:
            continue
        for index, what in ((1, "scale"), (2, "zero point")):
            made, read = _constant(quantize, index), _constant(restore, index)
            if made is None or read is None or np.array_equal(made, read):
                continue
            yield Finding(
                _name(restore),
                _tensor(quantize),
                f"codes are made with the {what} {_text(made)} and read with {_text(read)}",
            )


def _constant(node: ir.Node, index: int) -> np.ndarray | None:
    return const_array(node.inputs[index]) if len(node.inputs) > index else None


def _bias(node: ir.Node) -> Iterator[Finding]:
    """An int32 bias is added to products of codes: its scale is the product of their scales."""
    if len(node.inputs) < 3 or node.attributes.get_float("alpha", 1.0) != 1.0:
        return
    makers = [None if value is None else value.producer() for value in node.inputs[:3]]
    if any(maker is None or maker.op_type != "DequantizeLinear" for maker in makers):
        return
    scales = [const_array(maker.inputs[1]) for maker in makers if maker is not None]
    if any(scale is None for scale in scales):
        return
    x, w, b = (scale.astype(np.float64).reshape(-1) for scale in scales if scale is not None)
    if x.size != 1 or (w.size not in (1, b.size) and b.size != 1):
        return
    wanted = np.broadcast_to(x * w, np.broadcast_shapes(w.shape, b.shape))
    wrong = np.abs(b / wanted - 1.0) > _BIAS_TOLERANCE
    if np.any(wrong):
        place = int(np.argmax(wrong))
        given = np.broadcast_to(b, wanted.shape)[place]
        yield Finding(
            _name(node),
            node.inputs[2].name or "" if node.inputs[2] is not None else "",
            f"the bias has the scale {given:g} in channel {place}, input times weight give"
            f" {wanted[place]:g}: integer kernels read it as the latter",
        )


_WEIGHT_AXES = {"Conv": 0, "ConvTranspose": 1, "MatMul": -1}


def _axis(node: ir.Node) -> Iterator[Finding]:
    """Weights with scales along another axis than the outputs': integer kernels ignore the axis."""
    wanted = _WEIGHT_AXES.get(node.op_type)
    if node.op_type == "Gemm":
        wanted = 0 if node.attributes.get_int("transB", 0) else 1
    if wanted is None or node.domain or len(node.inputs) < 2 or node.inputs[1] is None:
        return
    restore = node.inputs[1].producer()
    if restore is None or restore.op_type != "DequantizeLinear":
        return
    codes, scale = restore.inputs[0], const_array(restore.inputs[1])
    if codes is None or codes.shape is None or scale is None or scale.size == 1:
        return
    if restore.attributes.get_int("block_size", 0):
        return
    rank = len(codes.shape)
    axis = restore.attributes.get_int("axis", 1) % rank
    if axis != wanted % rank:
        yield Finding(
            _name(node),
            codes.name or "",
            f"the weights' scales lie along axis {axis}, the outputs along {wanted % rank}",
        )


def _name(node: ir.Node) -> str:
    return node.name or ""


def _tensor(node: ir.Node) -> str:
    value = node.inputs[0]
    return "" if value is None else value.name or ""


def _text(values: np.ndarray) -> str:
    flat = values.reshape(-1)
    return f"{flat[0]:g}" if flat.size == 1 else f"{flat[0]:g} ... ({flat.size} channels)"
