"""Divides the channels of a tensor by factors, in the constants of whatever computes it.

Nothing is changed until all of it is known to work. Factors are positive and broadcast to the
tensor from the right; a step back through the graph turns them as the tensor is turned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.edit import NameScope, add_initializer, const_array
from slimctl.passes._weights_write import graph_of

Factors: TypeAlias = NDArray[np.float64]


class Edit(NamedTuple):
    """A constant that changes for one of its readers.

    Attributes:
        node: The reader.
        place: Which input.
        array: What it becomes.
    """

    node: ir.Node
    place: int
    array: NDArray[Any]


Plan: TypeAlias = list[Edit] | str
"""What must change, or why it cannot."""


def plan_division(value: ir.Value, factors: Factors) -> Plan:
    """How a tensor comes to be divided by factors; its readers are the caller's affair."""
    node = value.producer()
    if node is None:
        return "it is an input of the model"
    if value.is_graph_output():
        return "it is an output"
    rule = _RULES.get((node.domain, node.op_type))
    if rule is None or node.outputs[0] is not value:
        return f"{node.op_type} does not take factors in"
    return rule(node, _trimmed(factors))


def _behind(value: ir.Value | None, factors: Factors) -> Plan:
    """One step back: the tensor must have no other reader."""
    if value is None or const_array(value) is not None:
        return "it is a constant"
    if len(value.uses()) != 1:
        return "other nodes read what it is computed from, too"
    return plan_division(value, factors)


def _trimmed(factors: Factors) -> Factors:
    """Without leading axes of size 1."""
    first = next((axis for axis, size in enumerate(factors.shape) if size > 1), factors.ndim - 1)
    return factors.reshape(factors.shape[first:])


def _divided(node: ir.Node, place: int, factors: Factors) -> Plan:
    """A constant input over the factors."""
    value = node.inputs[place] if len(node.inputs) > place else None
    if value is None:
        return []
    array = const_array(value)
    if array is None:
        return f"{node.op_type} has no constant that could take the factors in"
    if array.ndim > 1 and len(value.uses()) > 1:
        return "the weight that computes it is shared"
    with np.errstate(over="ignore"):
        divided = (array / factors).astype(array.dtype)
    if not np.isfinite(divided).all() or np.any((divided == 0) & (array != 0)):
        return "the constants that compute it would leave their type"
    return [Edit(node, place, divided)]


def _all(*plans: Plan) -> Plan:
    edits: list[Edit] = []
    for plan in plans:
        if isinstance(plan, str):
            return plan
        edits += plan
    return edits


# operators


def _norm(first: int) -> Callable[[ir.Node, Factors], Plan]:
    """Normalizations over the last axis; scale and bias begin at an input."""

    def plan(node: ir.Node, factors: Factors) -> Plan:
        axis = node.attributes.get("axis")
        rank = node.outputs[0].shape.rank() if node.outputs[0].shape is not None else None
        last = (-1,) if rank is None else (-1, rank - 1)
        if (axis is not None and axis.as_int() not in last) or factors.ndim > 1:
            return "it is normalized over several axes"
        both = [_divided(node, place, factors) for place in (first, first + 1)]
        return _all(*both) or "the norm has no scale"

    return plan


def _product(node: ir.Node, factors: Factors) -> Plan:
    """Mul: a constant, or else one of the operands."""
    arrays = [const_array(value) for value in node.inputs]
    for place, array in enumerate(arrays):
        # A single number stays: it may be part of an activation that runtimes recognize.
        if array is not None and array.size > 1:
            return _divided(node, place, factors)
    plan: Plan = "it is a constant"
    for value, array in zip(node.inputs, arrays, strict=True):
        if array is None:
            plan = _behind(value, factors)
            if not isinstance(plan, str):
                break
    return plan


def _sum(node: ir.Node, factors: Factors) -> Plan:
    """Add: a constant, and what it is added to."""
    for place, value in enumerate(node.inputs):
        if const_array(value) is not None:
            return _all(_divided(node, place, factors), _behind(node.inputs[1 - place], factors))
    return "it is a sum of two tensors"


def _through(node: ir.Node, factors: Factors) -> Plan:
    return _behind(node.inputs[0], factors)


def _transpose(node: ir.Node, factors: Factors) -> Plan:
    order = node.attributes.get("perm")
    if order is None:
        return "it is transposed in an unknown order"
    axes = list(order.as_ints())
    full = factors.reshape((1,) * (len(axes) - factors.ndim) + factors.shape)
    return _behind(node.inputs[0], np.transpose(full, np.argsort(axes)))


def _reshape(node: ir.Node, factors: Factors) -> Plan:
    """The last axis falls into known ones, or known ones become the last axis."""
    source = node.inputs[0]
    before = None if source is None else source.shape
    after = node.outputs[0].shape
    if before is None or after is None:
        return "it is reshaped from or to a shape that is not known"
    sizes = _trailing(before, math.prod(factors.shape))
    if sizes is None or _trailing(after, math.prod(factors.shape)) is None:
        return "it is reshaped across channels"
    return _behind(source, factors.reshape(sizes))


def _trailing(shape: ir.Shape, count: int) -> tuple[int, ...] | None:
    """The last axes that hold so many values together."""
    sizes: list[int] = []
    for size in reversed(shape.dims):
        if math.prod(sizes) == count:
            break
        if not isinstance(size, int):
            return None
        sizes.insert(0, size)
    return tuple(sizes) if math.prod(sizes) == count else None


def _matmul(node: ir.Node, factors: Factors) -> Plan:
    """The factors of columns, and those of a batch, go into the right operand."""
    if factors.ndim > 1 and factors.shape[-2] > 1:
        return "the factors are those of rows"
    weight = node.inputs[1]
    if const_array(weight) is None:
        return _behind(weight, factors)
    return _divided(node, 1, factors) if factors.ndim == 1 else "the weight is shared by heads"


def _gemm(node: ir.Node, factors: Factors) -> Plan:
    turned = node.attributes.get("transB")
    if factors.ndim > 1 or const_array(node.inputs[1]) is None:
        return "its weight is computed at run time"
    rows = factors[:, None] if turned is not None and turned.as_int() else factors
    return _all(_divided(node, 1, rows), _divided(node, 2, factors))


_RULES: Final[dict[tuple[str, str], Callable[[ir.Node, Factors], Plan]]] = {
    ("", "LayerNormalization"): _norm(1),
    ("", "RMSNormalization"): _norm(1),
    ("", "SimplifiedLayerNormalization"): _norm(1),
    ("com.microsoft", "SkipLayerNormalization"): _norm(2),
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): _norm(2),
    ("", "Mul"): _product,
    ("", "Add"): _sum,
    ("", "Relu"): _through,
    ("", "Identity"): _through,
    ("", "Transpose"): _transpose,
    ("", "Reshape"): _reshape,
    ("", "MatMul"): _matmul,
    ("", "Gemm"): _gemm,
}


def apply_edits(edits: list[Edit], names: NameScope) -> None:
    """Stores changed constants; a weight keeps its value, so that layers are still known by it."""
    for node, place, array in edits:
        value = node.inputs[place]
        assert value is not None, "an input that was read"
        if len(value.uses()) == 1:
            assign(value, array)
        else:
            name = names.fresh(f"{value.name}_of_{node.name}")
            node.replace_input_with(place, add_initializer(graph_of(node), name, array))


def assign(value: ir.Value, array: NDArray[Any]) -> None:
    """Gives a constant new values; clones of the model keep the old ones."""
    node = value.producer()
    if node is None:
        value.const_value = ir.Tensor(array, name=value.name)
        value.shape = ir.Shape(array.shape)
        return
    node.attributes.clear()
    node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(array))
