"""Faults to plant into a quantized model, each at one node, as quantizers and exporters make them.

A fault is a function of the model and the name of a convolution; it edits the model in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Fault = Callable[[ir.Model, str], None]


def _node(model: ir.Model, name: str) -> ir.Node:
    return next(node for node in model.graph if node.name == name)


def _restorer(node: ir.Node, index: int) -> ir.Node:
    value = node.inputs[index]
    assert value is not None
    found = value.producer()
    assert found is not None and found.op_type == "DequantizeLinear"
    return found


def _quantizer(node: ir.Node) -> ir.Node:
    """The QuantizeLinear behind a node, past a Relu or Clip."""
    reader = next(iter(node.outputs[0].uses())).node
    return reader if reader.op_type == "QuantizeLinear" else _quantizer(reader)


def _readers(quantizer: ir.Node) -> list[ir.Node]:
    return [use.node for use in quantizer.outputs[0].uses()]


def _array(node: ir.Node, index: int) -> NDArray[Any]:
    value = node.inputs[index]
    assert value is not None and value.const_value is not None
    return np.asarray(value.const_value.numpy())


_COUNT = [0]


def _replace(node: ir.Node, index: int, array: NDArray[Any]) -> None:
    """Gives one node another constant; other readers keep theirs."""
    old = node.inputs[index]
    assert old is not None and node.graph is not None
    _COUNT[0] += 1
    tensor = ir.Tensor(np.ascontiguousarray(array), name=f"{old.name}_planted_{_COUNT[0]}")
    value = ir.Value(
        name=tensor.name,
        type=ir.TensorType(tensor.dtype),
        shape=tensor.shape,
        const_value=tensor,
    )
    node.graph.register_initializer(value)
    node.replace_input_with(index, value)


def _weights(index: int, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Fault:
    """Changes the codes (0), scales (1) or zero points (2) of a convolution's weights."""

    def plant(model: ir.Model, name: str) -> None:
        restorer = _restorer(_node(model, name), 1)
        _replace(restorer, index, change(_array(restorer, index).copy()))

    return plant


def _bias(index: int, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Fault:
    def plant(model: ir.Model, name: str) -> None:
        restorer = _restorer(_node(model, name), 2)
        _replace(restorer, index, change(_array(restorer, index).copy()))

    return plant


def _output(
    index: int, change: Callable[[NDArray[Any]], NDArray[Any]], *, made: bool, read: bool
) -> Fault:
    """Changes the scale (1) or zero point (2) with which the output is made, read, or both."""

    def plant(model: ir.Model, name: str) -> None:
        quantizer = _quantizer(_node(model, name))
        for node in ([quantizer] if made else []) + (_readers(quantizer) if read else []):
            _replace(node, index, change(_array(node, index).copy()))

    return plant


def _scaled(factor: float) -> Callable[[NDArray[Any]], NDArray[Any]]:
    return lambda array: (array * np.float32(factor)).astype(array.dtype)


def _shifted(array: NDArray[Any]) -> NDArray[Any]:
    """One more, or one less at the end of the type."""
    step = np.where(array == np.iinfo(array.dtype).max, -1, 1)
    return (array.astype(np.int64) + step).astype(array.dtype)


def _one_channel(array: NDArray[Any]) -> NDArray[Any]:
    array.reshape(-1)[array.size // 2] *= 4
    return array


def _first_two(axis: int) -> Callable[[NDArray[Any]], NDArray[Any]]:
    def swap(array: NDArray[Any]) -> NDArray[Any]:
        order = np.arange(array.shape[axis])
        half = order.size // 2
        order[:half], order[half : 2 * half] = order[half : 2 * half].copy(), order[:half].copy()
        return np.asarray(np.take(array, order, axis=axis))

    return swap


def _truncated(array: NDArray[Any]) -> NDArray[Any]:
    """Rounded toward zero instead of to nearest: half a step is lost on average."""
    return np.asarray((array - np.sign(array)).astype(array.dtype))


def _coarse(array: NDArray[Any]) -> NDArray[Any]:
    return (np.clip(np.rint(array / 16), -8, 7) * 16).astype(array.dtype)


def _wrong_axis(model: ir.Model, name: str) -> None:
    """Scales along the input channels of a convolution with as many inputs as outputs."""
    restorer = _restorer(_node(model, name), 1)
    restorer.attributes["axis"] = ir.AttrInt64("axis", 1)


def _lost(array: NDArray[Any]) -> NDArray[Any]:
    array[array.shape[0] // 2] = 0
    return array


def _undone(array: NDArray[Any]) -> NDArray[Any]:
    return np.zeros_like(array)


def _rolled(array: NDArray[Any]) -> NDArray[Any]:
    return np.roll(array, 1, axis=0)


FAULTS: dict[str, Fault] = {
    "weight scales doubled": _weights(1, _scaled(2.0)),
    "weight scale of one channel times four": _weights(1, _one_channel),
    "weight scales shifted by one channel": _weights(1, _rolled),
    "weight scales along the wrong axis": _wrong_axis,
    "weight zero points off by one": _weights(2, _shifted),
    "weights of output channels swapped": _weights(0, _first_two(0)),
    "weights of input channels swapped": _weights(0, _first_two(1)),
    "kernels transposed": _weights(0, lambda array: array.swapaxes(-1, -2)),
    "weights negated": _weights(0, lambda array: (-np.maximum(array, -127)).astype(array.dtype)),
    "weights rounded toward zero": _weights(0, _truncated),
    "weights with four bits left": _weights(0, _coarse),
    "weights of one output channel lost": _weights(0, _lost),
    "bias dropped": _bias(0, _undone),
    "biases shifted by one channel": _bias(0, _rolled),
    "bias scale doubled": _bias(1, _scaled(2.0)),
    "output made with another scale than read": _output(1, _scaled(1.25), made=True, read=False),
    "output read with another scale than made": _output(1, _scaled(1.25), made=False, read=True),
    "output zero point off by one where made": _output(2, _shifted, made=True, read=False),
    "output zero point off by one where read": _output(2, _shifted, made=False, read=True),
    "output range truncated to a quarter": _output(1, _scaled(0.25), made=True, read=True),
    "output range eight times too large": _output(1, _scaled(8.0), made=True, read=True),
    "output zero point at the wrong end": _output(
        2, lambda array: np.full_like(array, np.iinfo(array.dtype).max), made=True, read=True
    ),
}  # fmt: skip
"""By name; each at one convolution."""

SQUARE = ("weight scales along the wrong axis",)
"""Faults that need as many input channels as output channels."""

SPATIAL = ("kernels transposed",)
"""Faults that need a kernel with several taps."""


SEVERAL = ("weights of input channels swapped",)
"""Faults that need several input channels in each group."""


def names_of(model: ir.Model, name: str) -> set[str]:
    """Names that point at a convolution: its own and those of the Q/DQ nodes around it."""
    node = _node(model, name)
    quantizer = _quantizer(node)
    around = [node, quantizer, *_readers(quantizer), *(_restorer(node, i) for i in (1, 2))]
    return {one.name or "" for one in around}
