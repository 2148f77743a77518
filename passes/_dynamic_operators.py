"""Operators with weights in the form that quantizes activations at run time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.edit import const_array
from slimctl.passes._dynamic_weights import IntegerWeight, Rounding, weight_array
from slimctl.passes._dynamic_write import CONTRIB, Activation, Stored, Writer, graph_of

_FLOAT: Final = ir.DataType.FLOAT
_LSTM_ATTRIBUTES: Final = (
    "activation_alpha",
    "activation_beta",
    "activations",
    "clip",
    "direction",
    "hidden_size",
    "input_forget",
)
_CONV_ATTRIBUTES: Final = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
_ATTENTION_ATTRIBUTES: Final = ("num_heads", "unidirectional", "mask_filter_value", "scale")


def _int(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def _float(node: ir.Node, name: str) -> float:
    attribute = node.attributes.get(name)
    return 1.0 if attribute is None else attribute.as_float()


def _kept(node: ir.Node, names: Sequence[str]) -> list[ir.Attr]:
    return [node.attributes[name] for name in names if name in node.attributes]


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _data(node: ir.Node) -> ir.Value | str:
    """What the layer reads, or why that cannot be quantized."""
    value = _input(node, 0)
    if value is None:
        return "its input is missing"
    if const_array(value) is not None:
        return "its input is constant"
    if value.dtype != _FLOAT:
        return "its input is not float32"
    return value


def _write_matmul(writer: Writer, node: ir.Node) -> str:
    data, weight = _data(node), weight_array(_input(node, 1))
    if isinstance(data, str):
        return data
    if isinstance(weight, str):
        return weight
    value = _input(node, 1)
    assert value is not None
    stored = writer.weight(value, ("matmul", False), lambda: writer.rounding.round(weight))
    writer.replace(node, _product(writer, node, writer.activation(node, data), stored))
    return ""


def _product(
    writer: Writer, node: ir.Node, data: Activation, weight: Stored, factor: float = 1.0
) -> ir.Node:
    """``factor * x @ W`` in float32 from integers."""
    zero_points = [data.zero_point, weight.zero_point]
    integer = writer.node(
        node, "MatMulInteger", [data.values, weight.values, *zero_points], [ir.DataType.INT32]
    )
    to = ir.AttrInt64("to", int(_FLOAT))
    cast = writer.node(node, "Cast", integer.outputs, [_FLOAT], [to])
    scale = weight.scale
    if factor != 1.0:
        array = const_array(scale)
        assert array is not None
        scaled = (array * np.float32(factor)).astype(np.float32)
        scale = writer.constant(graph_of(node), f"{scale.name}_alpha", scaled)
    scales = writer.node(node, "Mul", [data.scale, scale], [_FLOAT])
    return writer.node(node, "Mul", [*cast.outputs, *scales.outputs], [_FLOAT])


def _write_gemm(writer: Writer, node: ir.Node) -> str:
    """``alpha * A' @ B' + beta * C``; B is stored as it is read.

    The size of alpha goes into the scale, its sign into the integers: scales stay positive.
    """
    data, weight = _data(node), weight_array(_input(node, 1), 2)
    if isinstance(data, str):
        return data
    if isinstance(weight, str):
        return weight
    value, alpha = _input(node, 1), _float(node, "alpha")
    assert value is not None
    if alpha == 0.0:
        return "its alpha is 0: it multiplies nothing"
    turned, negative = bool(_int(node, "transB", 0)), alpha < 0.0
    matrix = np.ascontiguousarray(weight.T) if turned else weight
    stored = writer.weight(
        value,
        ("turned" if turned else "matmul", negative),
        lambda: writer.rounding.round(-matrix if negative else matrix),
    )
    activation = writer.activation(node, data)
    if _int(node, "transA", 0):
        perm = ir.AttrInt64s("perm", [1, 0])
        across = writer.node(node, "Transpose", [activation.values], [ir.DataType.UINT8], [perm])
        activation = activation._replace(values=across.outputs[0])
    result = _product(writer, node, activation, stored, abs(alpha))
    bias = _bias(writer, node)
    if bias is not None:
        result = writer.node(node, "Add", [result.outputs[0], bias], [_FLOAT])
    writer.replace(node, result)
    return ""


def _bias(writer: Writer, node: ir.Node) -> ir.Value | None:
    bias, beta = _input(node, 2), _float(node, "beta")
    if bias is None or beta == 1.0:
        return bias
    array = const_array(bias)
    if array is not None:
        scaled = (array * np.float32(beta)).astype(np.float32)
        return writer.constant(graph_of(node), f"{bias.name}_beta", scaled)
    factor = writer.constant(graph_of(node), f"{node.name}_beta", np.array(beta, np.float32))
    return writer.node(node, "Mul", [bias, factor], [_FLOAT]).outputs[0]


def _write_conv(writer: Writer, node: ir.Node) -> str:
    """ConvInteger; its output channels lie on axis 1, so scale and bias become [O, 1, ...]."""
    data, weight, bias = _data(node), weight_array(_input(node, 1)), _input(node, 2)
    if isinstance(data, str):
        return data
    if isinstance(weight, str):
        return weight
    value = _input(node, 1)
    assert value is not None
    stored = writer.weight(value, "conv", lambda: _by_filter(writer.rounding, weight))
    activation = writer.activation(node, data)
    inputs = [activation.values, stored.values, activation.zero_point, stored.zero_point]
    kept = _kept(node, _CONV_ATTRIBUTES)
    integer = writer.node(node, "ConvInteger", inputs, [ir.DataType.INT32], kept)
    to = ir.AttrInt64("to", int(_FLOAT))
    cast = writer.node(node, "Cast", integer.outputs, [_FLOAT], [to])
    scales = writer.node(node, "Mul", [activation.scale, stored.scale], [_FLOAT])
    result = writer.node(node, "Mul", [*cast.outputs, *scales.outputs], [_FLOAT])
    if bias is not None:
        axes = np.array([-1, *([1] * (weight.ndim - 2))], np.int64)  # [O] -> [O, 1, ...]
        shape = writer.constant(graph_of(node), f"{node.name}_bias_shape", axes)
        across = writer.node(node, "Reshape", [bias, shape], [_FLOAT])
        result = writer.node(node, "Add", [*result.outputs, *across.outputs], [_FLOAT])
    writer.replace(node, result)
    return ""


def _by_filter(rounding: Rounding, weight: NDArray[np.float32]) -> IntegerWeight:
    """[O, I/g, ...] with a scale [O, 1, ...]; ConvInteger takes one zero point for all."""
    columns = np.ascontiguousarray(weight.reshape(weight.shape[0], -1).T)  # [I/g * k, O]
    found = rounding.round(columns)
    values = np.ascontiguousarray(found.values.T).reshape(weight.shape)
    scale = found.scale.reshape(-1, *([1] * (weight.ndim - 2)))
    return IntegerWeight(values, scale, found.zero_point.reshape(-1)[:1].reshape(()))


def _write_lstm(writer: Writer, node: ir.Node) -> str:
    """DynamicQuantizeLSTM; W and R [D, 4H, K] are stored as [D, K, 4H], one scale per 4H."""
    if _int(node, "layout", 0):
        return "onnxruntime's integer LSTM knows only the layout with time first"
    data, values = _data(node), (_input(node, 1), _input(node, 2))
    if isinstance(data, str):
        return data
    stored = []
    for value in values:
        array = weight_array(value, 3)
        if isinstance(array, str):
            return array
        assert value is not None
        stored.append(writer.weight(value, "lstm", _by_direction(writer.rounding, array)))
    integers = [part for item in stored for part in (item.scale, item.zero_point)]
    others = [_input(node, index) for index in range(3, 8)]
    inputs = [data, *(item.values for item in stored), *others, *integers]
    kinds = [value.dtype or _FLOAT for value in node.outputs]
    attributes = _kept(node, _LSTM_ATTRIBUTES)
    new = writer.node(node, "DynamicQuantizeLSTM", inputs, kinds, attributes)
    writer.replace(node, new)
    return ""


def _by_direction(rounding: Rounding, weight: NDArray[np.float32]) -> Callable[[], IntegerWeight]:
    def make() -> IntegerWeight:
        parts = [rounding.round(np.ascontiguousarray(part.T)) for part in weight]  # [K, 4H]
        return IntegerWeight(
            np.stack([part.values for part in parts]),
            np.stack([part.scale for part in parts]),  # [D, 4H] or [D]
            np.stack([part.zero_point for part in parts]),
        )

    return make


def _write_attention(writer: Writer, node: ir.Node) -> str:
    """QAttention, which has no more inputs than weights, bias, mask and past."""
    extra = [name for name in node.attributes if name not in _ATTENTION_ATTRIBUTES]
    if extra:
        return f"onnxruntime's QAttention has no attribute '{extra[0]}'"
    if any(_input(node, index) is not None for index in (5, 6)):
        return "onnxruntime's QAttention takes no attention bias"
    data, weight, bias = _data(node), weight_array(_input(node, 1), 2), _input(node, 2)
    if isinstance(data, str):
        return data
    if isinstance(weight, str):
        return weight
    value = _input(node, 1)
    assert value is not None
    stored = writer.weight(value, ("matmul", False), lambda: writer.rounding.round(weight))
    if bias is None:
        zeros = np.zeros(weight.shape[1], np.float32)
        bias = writer.constant(graph_of(node), f"{node.name}_bias", zeros)
    activation = writer.activation(node, data)
    new = writer.node(
        node,
        "QAttention",
        [
            activation.values,
            stored.values,
            bias,
            activation.scale,
            stored.scale,
            _input(node, 3),
            activation.zero_point,
            stored.zero_point,
            _input(node, 4),
        ],
        [_FLOAT] * len(node.outputs),
        _kept(node, _ATTENTION_ATTRIBUTES),
    )
    writer.replace(node, new)
    return ""


WRITERS: Final[dict[tuple[str, str], Callable[[Writer, ir.Node], str]]] = {
    ("", "Conv"): _write_conv,
    ("", "Gemm"): _write_gemm,
    ("", "LSTM"): _write_lstm,
    ("", "MatMul"): _write_matmul,
    (CONTRIB, "Attention"): _write_attention,
}
"""How each operator is written; every one gives the reason why a node stays, or nothing."""


def write(writer: Writer, node: ir.Node) -> str:
    """Replaces a node by its integer form.

    Returns:
        Why it stays as it is; empty when it was replaced.
    """
    return WRITERS[node.domain, node.op_type](writer, node)
