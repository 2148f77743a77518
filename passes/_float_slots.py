"""Which inputs and outputs of an operator may change from float32 to a narrower float type.

The ONNX schemas say which types an operator takes. What they allow and should not be narrowed all
the same stands here in tables: coordinates, sampling scales, arguments of periodic functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import cache
from typing import Final, NamedTuple

import onnx
import onnx_ir as ir

from slimctl.graph.edit import attribute_graphs

CONTRIB: Final = "com.microsoft"


class Slot(Enum):
    """What an input or output of a node asks for."""

    FOLLOW = "follow"  # the type that its node computes in
    FULL = "full"  # float32 always
    ANY = "any"  # takes every type


class Slots(NamedTuple):
    """Slots of one node, in order."""

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    def narrows(self) -> bool:
        """Whether the node has a form that computes in the narrower type."""
        return Slot.FOLLOW in self.inputs or Slot.FOLLOW in self.outputs


NO_SLOTS: Final = Slots((), ())
"""Of what is no node."""

_TAKES_ANY: Final = {
    ("", "Cast"): {0},
    ("", "CastLike"): {0},
    ("", "EyeLike"): {0},
    ("", "IsNaN"): {0},
    ("", "RandomNormalLike"): {0},
    ("", "RandomUniformLike"): {0},
    ("", "Shape"): {0},
    ("", "Size"): {0},
}
_STAYS_FULL: Final = {
    # Coordinates and scales: half a pixel of 1024 is the last bit of float16.
    ("", "Resize"): {1, 2},
    ("", "Upsample"): {1},
    ("", "GridSample"): {1},
}
_BITS: Final = frozenset({"BitCast"})
"""Operators to which a value is a number of bits."""
# Operators of onnxruntime's own whose inputs and outputs of float type share one type, float16
# among others (docs/ContribOperators.md), but for the outputs named here.
_CONTRIB_OUTPUTS: Final = {
    "BiasGelu": (),
    "FastGelu": (),
    "FusedMatMul": (),
    "Gelu": (),
    "GroupQueryAttention": (),
    "MatMulNBits": (),
    "MultiHeadAttention": (),
    "Attention": (),
    "QuickGelu": (),
    "RotaryEmbedding": (),
    "SkipLayerNormalization": (1, 2),
    "SkipSimplifiedLayerNormalization": (1, 2),
}


def slots_of(node: ir.Node, narrow: ir.DataType, opset: int) -> Slots:
    """What each input and output of a node asks for.

    Args:
        node: Any node but If, Loop and Scan, whose types are those of their bodies.
        narrow: FLOAT16 or BFLOAT16.
        opset: Version of the default operator set.
    """
    if node.domain == CONTRIB:
        return _contrib_slots(node, narrow)
    key = (node.domain, node.op_type)
    found = _schema_slots(node, narrow, opset)
    return Slots(
        _replaced(
            _replaced(found.inputs, _TAKES_ANY.get(key, set()), Slot.ANY),
            _STAYS_FULL.get(key, set()),
            Slot.FULL,
        ),
        found.outputs,
    )


def holds_graphs(node: ir.Node) -> bool:
    """Whether a node holds bodies."""
    return next(attribute_graphs(node), None) is not None


def _replaced(slots: Sequence[Slot], indices: set[int], slot: Slot) -> tuple[Slot, ...]:
    return tuple(slot if index in indices else old for index, old in enumerate(slots))


def _contrib_slots(node: ir.Node, narrow: ir.DataType) -> Slots:
    known = narrow == ir.DataType.FLOAT16 and node.op_type in _CONTRIB_OUTPUTS
    slot = Slot.FOLLOW if known else Slot.FULL
    outputs = (slot,) * len(node.outputs)
    kept = set(_CONTRIB_OUTPUTS.get(node.op_type, ()))
    return Slots((slot,) * len(node.inputs), _replaced(outputs, kept, Slot.FULL))


def _schema_slots(node: ir.Node, narrow: ir.DataType, opset: int) -> Slots:
    allowed = _allowed(node.domain, node.op_type, narrow, opset)
    return Slots(
        _by_parameter(len(node.inputs), allowed[0]), _by_parameter(len(node.outputs), allowed[1])
    )


def _by_parameter(count: int, allowed: Sequence[bool]) -> tuple[Slot, ...]:
    """The last formal parameter stands for all that follow: only that one can be variadic."""
    return tuple(
        Slot.FOLLOW if allowed and allowed[min(index, len(allowed) - 1)] else Slot.FULL
        for index in range(count)
    )


@cache
def _allowed(
    domain: str, op_type: str, narrow: ir.DataType, opset: int
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """For each formal input and output, whether its type may be the narrower one."""
    if domain or op_type in _BITS or not onnx.defs.has(op_type, opset, domain):
        return (), ()
    schema = onnx.defs.get_schema(op_type, opset, domain)
    wanted = f"tensor({narrow.name.lower()})"
    types = {item.type_param_str: item.allowed_type_strs for item in schema.type_constraints}
    inputs, outputs = (
        tuple(wanted in types.get(formal.type_str, [formal.type_str]) for formal in formals)
        for formals in (schema.inputs, schema.outputs)
    )
    return inputs, outputs
