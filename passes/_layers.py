"""Linear layers as the quantizer sees them: where the weight is, which axis holds the channels.

One place for the axis rules of each operator. Everything here reads the graph and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import LinearInput
from slimctl.core.errors import UnsupportedModelError
from slimctl.graph.edit import all_nodes, const_array
from slimctl.numerics.affine import SMALLEST_SCALE

LINEAR_OPERATORS: Final = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_QUANTIZED: Final = ("QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul")
QUANTIZERS: Final = frozenset({"quantize-static", "quantize-dynamic", "quantize-weights"})
"""Passes that quantize; a model goes through one of them once."""

_DATA, _WEIGHT, _BIAS = 0, 1, 2
_SMALLEST_WEIGHT: Final = 127 * SMALLEST_SCALE


@dataclass(frozen=True)
class Layer:
    """A node with constant float weights.

    Attributes:
        node: The Conv, ConvTranspose, Gemm or MatMul.
        channel_axis: Axis of the weight that holds the output channels; None when the operator
            has no integer kernel with one scale per channel for this weight.
        groups: Convolution groups, 1 elsewhere.
    """

    node: ir.Node
    channel_axis: int | None
    groups: int = 1

    @property
    def data(self) -> ir.Value:
        """The activation that the layer reads."""
        return _present(self.node.inputs[_DATA])

    @property
    def weight_value(self) -> ir.Value:
        """The initializer of the weight."""
        return _present(self.node.inputs[_WEIGHT])

    @property
    def bias_value(self) -> ir.Value | None:
        """The initializer of the bias, if the layer has one."""
        return self.node.inputs[_BIAS] if len(self.node.inputs) > _BIAS else None

    @property
    def output(self) -> ir.Value:
        """What the layer writes."""
        return self.node.outputs[0]

    def weight(self) -> NDArray[Any]:
        """The weight with Gemm's ``alpha`` multiplied in, so that the layer is plainly linear."""
        array = _constant(self.weight_value)
        alpha = _float_attribute(self.node, "alpha")
        return array if alpha == 1.0 else (array * array.dtype.type(alpha))

    def channels(self) -> int:
        """Number of output channels."""
        shape = _constant(self.weight_value).shape
        if self.node.op_type == "ConvTranspose":
            return int(shape[1]) * self.groups
        return int(shape[output_axis(self.node, len(shape))])

    def bias(self) -> NDArray[Any] | None:
        """The bias [channels] with Gemm's ``beta`` multiplied in, or None."""
        if self.bias_value is None:
            return None
        array = _constant(self.bias_value)
        beta = _float_attribute(self.node, "beta")
        flat = np.broadcast_to(array.reshape(-1), (self.channels(),))
        return flat if beta == 1.0 else (flat * flat.dtype.type(beta))


def _present(value: ir.Value | None) -> ir.Value:
    assert value is not None, "checked when the layer was recognized"
    return value


def _constant(value: ir.Value) -> NDArray[Any]:
    array = const_array(value)
    assert array is not None, "checked when the layer was recognized"
    return array


def _float_attribute(node: ir.Node, name: str) -> float:
    attribute = node.attributes.get(name)
    return 1.0 if attribute is None else attribute.as_float()


def _int_attribute(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def _ints_attribute(node: ir.Node, name: str) -> tuple[int, ...]:
    attribute = node.attributes.get(name)
    return () if attribute is None else tuple(attribute.as_ints())


def output_axis(node: ir.Node, ndim: int) -> int:
    """Axis of the weight along which output channels lie.

    Conv [O, I/g, ...]: 0. ConvTranspose [I, O/g, ...]: 1. Gemm [K, N]: 1, or 0 with transB.
    MatMul [..., K, N]: the last.
    """
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 1
    if node.op_type == "Gemm":
        return 0 if _int_attribute(node, "transB", 0) else 1
    return ndim - 1


def refuse_quantized(model: ir.Model, fix: str) -> None:
    """Lets only float models pass.

    Raises:
        UnsupportedModelError: Names the first quantized node.
    """
    for node in all_nodes(model):
        if node.op_type in _QUANTIZED:
            raise UnsupportedModelError(
                f"The model is quantized already: it holds {node.op_type}",
                where=f"node '{node.name}'",
                fix=fix,
            )


def is_linear(node: ir.Node) -> bool:
    """Whether the node is of an operator that may carry weights."""
    return node.domain in ("", "ai.onnx") and node.op_type in LINEAR_OPERATORS


def recognize(node: ir.Node) -> Layer | str:
    """The layer, or the reason why the node is none that can get integer weights."""
    if len(node.inputs) <= _WEIGHT or node.inputs[_DATA] is None or node.inputs[_WEIGHT] is None:
        return "an input is missing"
    weight = const_array(node.inputs[_WEIGHT])
    if weight is None:
        left = const_array(node.inputs[_DATA]) is not None
        return (
            "the constant is the left factor: integer kernels want it on the right"
            if left
            else "the weight is computed at run time"
        )
    reason = _reason_against_weight(weight) or _reason_against_bias(node, weight)
    if reason:
        return reason
    # onnxruntime's QLinearMatMul takes one scale per column only for a matrix.
    single = node.op_type == "MatMul" and weight.ndim > 2
    axis = None if single else output_axis(node, weight.ndim)
    return Layer(node, axis, _int_attribute(node, "group", 1))


def _reason_against_weight(weight: NDArray[Any]) -> str | None:
    # float16: the reference of a model that was widened later.
    if weight.dtype not in (np.float32, np.float16):
        return f"the weight is {weight.dtype}, not float32 or float16"
    if weight.size == 0:
        return "the weight is empty"
    if not np.isfinite(weight).all():
        return "the weight holds NaN or infinite values"
    if 0 < np.abs(weight).max() <= _SMALLEST_WEIGHT:
        return "the weights are too small: their scale would not be a normal float32"
    if weight.ndim < 2:
        return f"the weight has {weight.ndim} dimension: there is no channel axis"
    return None


def _reason_against_bias(node: ir.Node, weight: NDArray[Any]) -> str | None:
    if len(node.inputs) <= _BIAS or node.inputs[_BIAS] is None:
        return None
    bias = const_array(node.inputs[_BIAS])
    if bias is None:
        return "the bias is computed at run time"
    if not np.isfinite(bias).all():
        return "the bias holds NaN or infinite values"
    channels = weight.shape[output_axis(node, weight.ndim)]
    # Gemm broadcasts C; only a vector over the output channels can become an int32 bias.
    if node.op_type == "Gemm" and not (
        bias.size == 1 or bias.shape[-1:] == (bias.size,) == (channels,)
    ):
        return f"the bias of shape {list(bias.shape)} is not one value per output channel"
    return None


def linear_input(layer: Layer) -> LinearInput:
    """How the layer reads its input, for collecting the mean of what each weight sees."""
    node, weight = layer.node, _constant(layer.weight_value)
    name = node.name or ""
    if node.op_type == "Gemm":
        axis = 0 if _int_attribute(node, "transA", 0) else 1
        return LinearInput(name, layer.data.name or "", channel_axis=axis)
    if node.op_type == "MatMul":
        return LinearInput(name, layer.data.name or "", channel_axis=-1)
    kernel = tuple(int(size) for size in weight.shape[2:])
    ones = (1,) * len(kernel)
    attribute = node.attributes.get("auto_pad")
    return LinearInput(
        name,
        layer.data.name or "",
        kernel=kernel,
        strides=_ints_attribute(node, "strides") or ones,
        dilations=_ints_attribute(node, "dilations") or ones,
        pads=_ints_attribute(node, "pads") or (0,) * (2 * len(kernel)),
        auto_pad="NOTSET" if attribute is None else attribute.as_string(),
        transposed=node.op_type == "ConvTranspose",
        output_padding=_ints_attribute(node, "output_padding") or (0,) * len(kernel),
    )


def expected_output(
    layer: Layer, weight: NDArray[Any], mean: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Mean output of a linear layer from the mean of what its weights see, by linearity.

    Args:
        layer: The layer.
        weight: Any array of the weight's shape, for example the rounding error of the weight.
        mean: [input channels, *kernel], or [K] for Gemm and MatMul.

    Returns:
        [output channels]
    """
    w = weight.astype(np.float64)
    kind = layer.node.op_type
    if kind in ("Conv", "ConvTranspose"):
        by_group = w.reshape(layer.groups, w.shape[0] // layer.groups, w.shape[1], -1)
        seen = mean.reshape(layer.groups, mean.shape[0] // layer.groups, -1)  # [g, I/g, k]
        # Conv [g, O/g, I/g, k], ConvTranspose [g, I/g, O/g, k] -> [g, O/g]
        subscripts = "goik,gik->go" if kind == "Conv" else "giok,gik->go"
        return np.asarray(np.einsum(subscripts, by_group, seen, optimize=True)).reshape(-1)
    if output_axis(layer.node, w.ndim) == 0:
        return np.asarray(w @ mean)  # [N, K] @ [K] -> [N]
    return np.asarray(mean @ w)  # [K] @ [K, N] -> [N]
