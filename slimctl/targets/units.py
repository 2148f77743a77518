"""A node together with the Q/DQ pairs around it: what a provider sees as one integer operator."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.target import ABSORBED
from slimctl.graph.edit import const_array, const_tensor

QUANTIZE: Final = "QuantizeLinear"
DEQUANTIZE: Final = "DequantizeLinear"
PAIR: Final = (QUANTIZE, DEQUANTIZE)

_BIASED: Final = ("Conv", "ConvTranspose", "Gemm")
_BIAS: Final = 2
_DEFAULT_AXIS: Final = 1


def operator_of(node: ir.Node) -> str:
    """An operator as profiles write it: ``Conv``, ``com.microsoft:MatMulNBits``."""
    own = node.domain in ("", "ai.onnx")
    return node.op_type if own else f"{node.domain}:{node.op_type}"


def is_pair(node: ir.Node | None) -> bool:
    """Whether the node is a Q or a DQ."""
    return node is not None and node.op_type in PAIR


@dataclass(frozen=True)
class Quantized:
    """A tensor behind a DQ, or in front of a Q.

    Attributes:
        pair: The Q or DQ node.
        stored: The constant that a DQ reads, None for activations.
    """

    pair: ir.Node
    stored: ir.Value | None = None

    @property
    def type(self) -> str:
        """Of the integers, as profiles write it; empty when unknown."""
        code = self.pair.inputs[0] if self.pair.op_type == DEQUANTIZE else self.pair.outputs[0]
        zero = self.pair.inputs[2] if len(self.pair.inputs) > 2 else None
        for value in (code, zero):
            if value is not None and value.dtype is not None:
                return value.dtype.name.lower()
        return ""

    @cached_property
    def scale(self) -> NDArray[Any] | None:
        """None when it is computed at run time."""
        return const_array(self.pair.inputs[1])

    @cached_property
    def zero_point(self) -> NDArray[Any] | None:
        """0 where there is none, None when it is computed at run time."""
        zero = self.pair.inputs[2] if len(self.pair.inputs) > 2 else None
        return np.zeros((), np.int64) if zero is None else const_array(zero)

    @property
    def axis(self) -> int | None:
        """The channel axis, not negative if the rank is known; None with one scale."""
        value = self.pair.inputs[1]
        rank = None if value is None or value.shape is None else len(value.shape)
        if rank == 0 or (self.scale is not None and self.scale.size == 1):
            return None
        axis = self.pair.attributes.get_int("axis", _DEFAULT_AXIS)
        shape = self.pair.inputs[0].shape if self.pair.inputs[0] is not None else None
        return axis + len(shape) if axis < 0 and shape is not None else axis

    @property
    def middle(self) -> int:
        """The zero point of symmetric quantization."""
        bits = int(self.type.removeprefix("u").removeprefix("int") or 8)
        return 2 ** (bits - 1) if self.type.startswith("u") else 0


@dataclass
class Unit:
    """A node and how each of its tensors is quantized, None where it is not.

    Attributes:
        node: Neither a Q nor a DQ.
        inputs: As the node's inputs.
        outputs: As the node's outputs, seen through a Relu or Clip that is computed along.
    """

    node: ir.Node
    inputs: tuple[Quantized | None, ...] = ()
    outputs: tuple[Quantized | None, ...] = ()
    leader: ir.Node | None = field(default=None)

    @property
    def operator(self) -> str:
        """As profiles write it."""
        return operator_of(self.node)

    @property
    def activations(self) -> list[Quantized]:
        """Quantized inputs that are computed, or fed."""
        return [item for item in self.inputs if item is not None and item.stored is None]

    @property
    def weights(self) -> list[Quantized]:
        """Quantized constants, the bias apart."""
        bias = self.bias
        return [q for q in self.inputs if q is not None and q.stored is not None and q is not bias]

    @property
    def bias(self) -> Quantized | None:
        """The quantized bias of a Conv, ConvTranspose or Gemm."""
        there = self.node.op_type in _BIASED and len(self.inputs) > _BIAS
        return self.inputs[_BIAS] if there else None

    @property
    def is_quantized(self) -> bool:
        """Whether activations are; weights alone may be stored as integers for a float kernel."""
        return bool(self.activations)


def unit_of(node: ir.Node, absorbing: Collection[str] = ()) -> Unit:
    """How a node is quantized.

    Args:
        node: Neither a Q nor a DQ.
        absorbing: Operators whose kernel computes a Relu or Clip behind it along.
    """
    outputs = tuple(_in_front_of_quantize(value, node, absorbing) for value in node.outputs)
    leader = _leader(node, absorbing)
    if leader is not None:
        return Unit(node, unit_of(leader).inputs, outputs, leader)
    return Unit(node, tuple(map(_behind_dequantize, node.inputs)), outputs)


def unit_of_pair(pair: ir.Node) -> Unit:
    """A Q or DQ by itself."""
    if pair.op_type == QUANTIZE:
        return Unit(pair, outputs=(Quantized(pair),))
    return Unit(pair, inputs=(_behind_dequantize(pair.outputs[0]),))


def _leader(node: ir.Node, absorbing: Collection[str]) -> ir.Node | None:
    """The node whose kernel computes this Relu or Clip along: between it and its DQ nodes."""
    source = node.inputs[0] if node.inputs else None
    producer = source.producer() if source is not None else None
    if node.op_type not in ABSORBED or node.domain or source is None or producer is None:
        return None
    sole = len(source.uses()) == 1 and not source.is_graph_output()
    if not sole or operator_of(producer) not in absorbing:
        return None
    quantized = any(_behind_dequantize(value) is not None for value in producer.inputs)
    return producer if quantized else None


def _behind_dequantize(value: ir.Value | None) -> Quantized | None:
    node = value.producer() if value is not None else None
    if node is None or node.op_type != DEQUANTIZE:
        return None
    source = node.inputs[0]
    maker = source.producer() if source is not None else None
    # A constant may be stored as float, or in fewer bits than kernels read.
    if maker is not None and maker.op_type in (QUANTIZE, "Cast"):
        source = maker.inputs[0]
    return Quantized(node, source if const_tensor(source) is not None else None)


def _in_front_of_quantize(
    value: ir.Value, node: ir.Node, absorbing: Collection[str]
) -> Quantized | None:
    users = value.consumers()
    if len(users) == 1 and _leader(users[0], absorbing) is node:
        return _in_front_of_quantize(users[0].outputs[0], users[0], ())
    if value.is_graph_output() or not users or any(user.op_type != QUANTIZE for user in users):
        return None
    return Quantized(users[0])
