"""A node of a Q/DQ graph as its integer operator would see it: codes in, codes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.edit import const_array

QUANTIZE: Final = "QuantizeLinear"
DEQUANTIZE: Final = "DequantizeLinear"
_BYTES: Final = (np.uint8, np.int8)
_BIAS_TOLERANCE: Final = 1e-6
"""Relative; float32 products of two scales differ by one rounding, 6e-8."""

ZeroMaker = Callable[[ir.Value, Any], ir.Value]
"""Gives a zero point of zero beside a scale, in a numpy type."""


class Unfit(Exception):  # noqa: N818  # no error: caught where the node is looked at, and reported
    """Why a node has no integer operator."""


class Codes(NamedTuple):
    """A tensor as integers.

    Attributes:
        values: The integers.
        scale: Constant, one element, or one per channel of a weight.
        zero_point: Constant, as the scale.
    """

    values: ir.Value
    scale: ir.Value
    zero_point: ir.Value

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the integers."""
        return _array(self.zero_point).dtype

    @property
    def triple(self) -> list[ir.Value | None]:
        """In the order in which most operators read them."""
        return [self.values, self.scale, self.zero_point]

    @property
    def parameters(self) -> list[ir.Value | None]:
        """How most operators are told what to write."""
        return [self.scale, self.zero_point]

    def same_grid(self, other: Codes) -> bool:
        """Whether equal codes stand for equal numbers."""
        pairs = ((self.scale, other.scale), (self.zero_point, other.zero_point))
        return self.dtype == other.dtype and all(
            np.array_equal(_array(a).reshape(-1), _array(b).reshape(-1)) for a, b in pairs
        )


def _array(value: ir.Value) -> NDArray[Any]:
    array = const_array(value)
    assert array is not None, "checked when the codes were found"
    return array


def _made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type and not node.domain else None


def dequantizer(value: ir.Value | None) -> ir.Node | None:
    """The DQ that a value comes from, if there is one."""
    return _made_by(value, DEQUANTIZE)


def quantizers(value: ir.Value) -> list[ir.Node]:
    """The Q nodes that read a value."""
    return [n for n in value.consumers() if n.op_type == QUANTIZE and not n.domain]


class Site:
    """One node, looked at through the DQ nodes before it and the Q nodes behind it."""

    def __init__(self, node: ir.Node, zero: ZeroMaker) -> None:
        self.node = node
        self._zero = zero

    # what it reads

    def input(self, index: int) -> Codes:
        """An activation, or a constant with one scale.

        Raises:
            Unfit: It is none.
        """
        found = self._dequantized(index, "input")
        if _array(found.scale).size != 1:
            raise Unfit("an input has more than one scale")
        return found

    def inputs(self) -> Iterator[Codes]:
        """All inputs, each as :meth:`input`."""
        return (self.input(index) for index in range(len(self.node.inputs)))

    def weight(self, index: int, axis: int | None) -> Codes:
        """A constant with one scale, or with one per channel.

        Args:
            index: Of the input.
            axis: The only one along which there may be a scale per channel; None for no axis.

        Raises:
            Unfit: It is none, or kernels do not take it.
        """
        found = self._dequantized(index, "weight")
        codes, node = const_array(found.values), dequantizer(self.node.inputs[index])
        assert node is not None, "it was looked at"
        if codes is None:
            raise Unfit("its weight is computed at run time")
        if _array(found.scale).size > 1 and (axis is None or _axis(node) % codes.ndim != axis):
            raise Unfit("its weight has scales along an axis that integer kernels do not take")
        zeros = _array(found.zero_point)
        if np.any(zeros != zeros.reshape(-1)[0]):
            raise Unfit("the zero points of its weight differ between channels")
        return found

    def _dequantized(self, index: int, what: str) -> Codes:
        node = dequantizer(self.node.inputs[index])
        if node is None:
            raise Unfit(f"its {what} is not quantized")
        return self._codes(node, node.inputs[0], what)

    def _codes(self, node: ir.Node, values: ir.Value | None, what: str) -> Codes:
        scale, array = node.inputs[1], const_array(node.inputs[1])
        if values is None or scale is None or array is None or array.ndim > 1:
            raise Unfit(f"the scales of its {what} are no constants that integer kernels take")
        if array.dtype != np.float32:
            raise Unfit(f"the scales of its {what} are {array.dtype}, not float32")
        zero = node.inputs[2] if len(node.inputs) > 2 else None
        if zero is None:
            zero = self._zero(scale, _dtype(values))
        elif const_array(zero) is None:
            raise Unfit(f"the zero point of its {what} is computed at run time")
        found = Codes(values, scale, zero)
        if found.dtype not in _BYTES:
            raise Unfit(f"its {what} is {found.dtype}: integer kernels take 8 bits")
        return found

    def bias(self, data: Codes, weight: Codes, index: int = 2) -> ir.Value | None:
        """The int32 bias in steps of the input's scale times the weight's, None without one.

        Raises:
            Unfit: It is none of this kind.
        """
        value = self.node.inputs[index] if len(self.node.inputs) > index else None
        if value is None:
            return None
        node = dequantizer(value)
        codes = None if node is None else const_array(node.inputs[0])
        scale = None if node is None else const_array(node.inputs[1])
        if node is None or codes is None or codes.dtype != np.int32 or scale is None:
            raise Unfit("its bias is not int32")
        expected = _array(data.scale).reshape(-1) * _array(weight.scale).reshape(-1)
        zero = const_array(node.inputs[2]) if len(node.inputs) > 2 else None
        if not np.allclose(scale.reshape(-1), expected, rtol=_BIAS_TOLERANCE, atol=0.0):
            raise Unfit("the scale of its bias is not that of its input times that of its weight")
        if zero is not None and np.any(zero):
            raise Unfit("its bias has a zero point")
        return node.inputs[0]

    # what it writes

    def output(self, index: int = 0) -> Codes:
        """What it writes as integers.

        Raises:
            Unfit: It goes somewhere as float.
        """
        value = self.node.outputs[index]
        found = quantizers(value)
        others = [u.op_type for u in value.consumers() if u not in found]
        if value.is_graph_output():
            raise Unfit("its output is an output of the graph")
        if others:
            raise Unfit(f"its output goes to {', '.join(sorted(set(others)))} without a Q")
        if len(found) != 1 or found[0].graph is not self.node.graph:
            raise Unfit("its output is not quantized, or in more than one way")
        codes = self._codes(found[0], found[0].outputs[0], "output")
        if _array(codes.scale).size != 1:
            raise Unfit("its output has more than one scale")
        return codes

    def float_output(self) -> bool:
        """Whether nothing behind it wants integers."""
        return not quantizers(self.node.outputs[0])

    def same_type(self, *tensors: Codes) -> None:
        """Checks that all have one type.

        Raises:
            Unfit: They have not.
        """
        kinds = sorted({str(codes.dtype) for codes in tensors})
        if len(kinds) > 1:
            raise Unfit(f"integer kernels take one type, here are {' and '.join(kinds)}")


def _axis(node: ir.Node) -> int:
    attribute = node.attributes.get("axis")
    return 1 if attribute is None else attribute.as_int()


def _dtype(values: ir.Value) -> Any:
    return (values.dtype or ir.DataType.UINT8).numpy()
