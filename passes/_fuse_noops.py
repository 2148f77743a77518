"""Removes nodes that give back one of their inputs unchanged.

Each rule looks at one operator and answers with the input that the node's first output equals, a
text when a candidate must stay, or None when the node does something.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from slimctl.graph.edit import const_array
from slimctl.passes._fuse_graph import (
    Array,
    Workbench,
    bypass,
    input_of,
    integers,
    is_op,
    used_outputs,
)

Answer: TypeAlias = ir.Value | str | None
Rule: TypeAlias = Callable[[Workbench, ir.Node], Answer]

_TO_THE_END = 2**31 - 1
"""Exporters write the largest integer of 32 or 64 bits for "to the end"; no axis is that long."""


def remove_noops(bench: Workbench) -> None:
    """Removes nodes that change nothing."""
    for node in bench.nodes():
        rule = None if node.domain else _RULES.get(node.op_type)
        answer = rule(bench, node) if rule is not None else None
        if isinstance(answer, ir.Value):
            _remove(bench, node, answer)
        elif answer is not None:
            bench.skip(node, answer)


def _remove(bench: Workbench, node: ir.Node, source: ir.Value) -> None:
    if used_outputs(node) > 1:
        bench.skip(node, "more than its first output is read")
    elif not bench.may_touch(node):
        return
    elif bypass(node, source):
        bench.count(f"{node.op_type} removed")
    else:
        bench.skip(node, "a graph output has its name from this node")


# Operators that are the identity in some cases


def _identity(bench: Workbench, node: ir.Node) -> Answer:
    del bench
    return node.inputs[0]


def _only_input(bench: Workbench, node: ir.Node) -> Answer:
    del bench
    return node.inputs[0] if len(node.inputs) == 1 else None


def _dropout(bench: Workbench, node: ir.Node) -> Answer:
    if bench.opset < 7:
        return node.inputs[0] if node.attributes.get_int("is_test", 0) else "it is in training mode"
    if bench.opset < 12 or input_of(node, 2) is None:
        return node.inputs[0]
    training = const_array(node.inputs[2])
    if training is None:
        return "whether it is in training mode is decided at run time"
    return "it is in training mode" if training.any() else node.inputs[0]


def _cast(bench: Workbench, node: ir.Node) -> Answer:
    del bench
    value = node.inputs[0]
    same = value is not None and value.dtype == node.attributes.get_int("to", 0)
    return value if same else None


def _cast_like(bench: Workbench, node: ir.Node) -> Answer:
    del bench
    value, like = node.inputs
    if value is None or like is None or value.dtype is None:
        return None
    return value if value.dtype == like.dtype else None


def _concat(bench: Workbench, node: ir.Node) -> Answer:
    axis = node.attributes.get_int("axis", 0)
    full = [value for value in node.inputs if not _is_empty(bench, value, axis)]
    return full[0] if len(full) == 1 else None


def _is_empty(bench: Workbench, value: ir.Value | None, axis: int) -> bool:
    dims = bench.shape(value)
    return dims is not None and -len(dims) <= axis < len(dims) and dims[axis] == 0


def _split(bench: Workbench, node: ir.Node) -> Answer:
    del bench
    return node.inputs[0] if len(node.outputs) == 1 else None


def _transpose(bench: Workbench, node: ir.Node) -> Answer:
    order = node.attributes.get_ints("perm", None)
    if order is None:
        rank = bench.rank(node.inputs[0])
        return node.inputs[0] if rank is not None and rank < 2 else None
    return node.inputs[0] if list(order) == sorted(order) else None


def _reshape(bench: Workbench, node: ir.Node) -> Answer:
    """To the shape that the tensor has: each entry is 0 (keep), the size, or one -1 (the rest)."""
    dims = bench.shape(node.inputs[0])
    target = integers(node, 1, "shape")
    if dims is None or target is None or len(dims) != len(target):
        return None
    if 0 in dims or (0 in target and node.attributes.get_int("allowzero", 0) == 1):
        return None
    free = [want for want, dim in zip(target, dims, strict=True) if want not in (0, dim)]
    return node.inputs[0] if free in ([], [-1]) else None


def _flatten(bench: Workbench, node: ir.Node) -> Answer:
    two = bench.rank(node.inputs[0]) == 2
    return node.inputs[0] if two and node.attributes.get_int("axis", 1) in {1, -1} else None


def _expand(bench: Workbench, node: ir.Node) -> Answer:
    target = integers(node, 1, "shape")
    dims = bench.shape(node.inputs[0])
    if target is None or dims is None or len(target) > len(dims):
        return None
    last = dims[len(dims) - len(target) :]
    fits = all(want in (1, dim) for want, dim in zip(target, last, strict=True))
    return node.inputs[0] if fits else None


def _tile(bench: Workbench, node: ir.Node) -> Answer:
    repeats = integers(node, 1, "repeats") if bench.opset >= 6 else None
    return node.inputs[0] if repeats is not None and set(repeats) <= {1} else None


def _pad(bench: Workbench, node: ir.Node) -> Answer:
    del bench
    amounts = integers(node, 1, "pads")
    return node.inputs[0] if amounts is not None and not any(amounts) else None


def _slice(bench: Workbench, node: ir.Node) -> Answer:
    starts, ends = integers(node, 1, "starts"), integers(node, 2, "ends")
    if starts is None or ends is None:
        return None
    axes = integers(node, 3, "axes", tuple(range(len(starts))))
    steps = integers(node, 4, "steps", (1,) * len(starts))
    if axes is None or steps is None or set(steps) - {1}:
        return None
    dims = bench.shape(node.inputs[0])
    whole = all(map(_takes_all, starts, ends, (_size(dims, axis) for axis in axes)))
    return node.inputs[0] if whole else None


def _size(dims: tuple[int | str | None, ...] | None, axis: int) -> int | None:
    size = dims[axis] if dims is not None and -len(dims) <= axis < len(dims) else None
    return size if isinstance(size, int) else None


def _takes_all(start: int, end: int, size: int | None) -> bool:
    from_first = start == 0 or (size is not None and start <= -size)
    return from_first and (end >= _TO_THE_END or (size is not None and end >= size))


def _clip(bench: Workbench, node: ir.Node) -> Answer:
    if bench.opset < 11:  # the default bounds of these opsets turn infinity into a number
        low, high = node.attributes.get_float("min", 0.0), node.attributes.get_float("max", 0.0)
        return node.inputs[0] if low == -np.inf and high == np.inf else None
    low_free = _is_beyond(input_of(node, 1), low=True)
    return node.inputs[0] if low_free and _is_beyond(input_of(node, 2), low=False) else None


def _is_beyond(bound: ir.Value | None, *, low: bool) -> bool:
    """Whether a bound of Clip is no bound: left out, infinite, or the last integer of its type."""
    if bound is None:
        return True
    array = const_array(bound)
    if array is None or array.size != 1:
        return False
    if array.dtype.kind in "iu":
        limits = np.iinfo(array.dtype)
        return int(array.reshape(-1)[0]) == (limits.min if low else limits.max)
    return float(array.reshape(-1)[0]) == (-np.inf if low else np.inf)


_NOT_NEGATIVE = ("Relu", "Sigmoid", "HardSigmoid", "Softmax", "Exp", "Sqrt", "Softplus")


def _relu(bench: Workbench, node: ir.Node) -> Answer:
    value = node.inputs[0]
    before = value.producer() if value is not None else None
    if before is not None and bench.opset >= 11 and is_op(before, "Clip"):
        low = const_array(input_of(before, 1))
        return value if low is not None and low.size == 1 and bool((low >= 0).all()) else None
    return value if is_op(before, *_NOT_NEGATIVE) else None


_PLAIN_COORDINATES = frozenset(
    {"half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"}
)
"""Coordinate modes of Resize in which every point keeps its place when the size does."""


def _resize(bench: Workbench, node: ir.Node) -> Answer:
    mode = node.attributes.get_string("coordinate_transformation_mode", "half_pixel")
    if mode not in _PLAIN_COORDINATES:
        return None
    old = is_op(node, "Upsample") or bench.opset == 10
    scales = _scales(node, 1 if old else 2)
    if scales is not None and scales.size:
        return node.inputs[0] if (scales == 1).all() else None
    sizes = None if old else integers(node, 3, "sizes")
    same = sizes is not None and sizes == bench.static_shape(node.inputs[0])
    return node.inputs[0] if same and "axes" not in node.attributes else None


def _scales(node: ir.Node, index: int) -> Array | None:
    value = input_of(node, index)
    if value is not None:
        return const_array(value)
    given = node.attributes.get_floats("scales", None)
    return None if given is None else np.asarray(given)


# Arithmetic with the neutral element


def _neutral(number: float, *, either_side: bool) -> Rule:
    """The rule for ``x + 0``, ``x * 1`` and their like."""

    def rule(bench: Workbench, node: ir.Node) -> Answer:
        left, right = node.inputs
        if bench.opset < 7:  # broadcasting was an attribute
            return None
        if _is_neutral(bench, left, right, number):
            return left
        return right if either_side and _is_neutral(bench, right, left, number) else None

    return rule


def _is_neutral(
    bench: Workbench, value: ir.Value | None, other: ir.Value | None, number: float
) -> bool:
    """Whether a constant is one number everywhere and leaves the other's shape as it is."""
    array = const_array(other)
    if array is None or not array.size or array.reshape(-1)[0] != number:
        return False
    return bool((array == number).all()) and _keeps_shape(bench, value, array.shape)


def _keeps_shape(bench: Workbench, value: ir.Value | None, shape: tuple[int, ...]) -> bool:
    if not shape:
        return True
    dims = bench.shape(value)
    if dims is None or len(shape) > len(dims):
        return False
    last = dims[len(dims) - len(shape) :]
    return all(size in (1, dim) for size, dim in zip(shape, last, strict=True))


_RULES: dict[str, Rule] = {
    "Add": _neutral(0, either_side=True),
    "Cast": _cast,
    "CastLike": _cast_like,
    "Clip": _clip,
    "Concat": _concat,
    "Div": _neutral(1, either_side=False),
    "Dropout": _dropout,
    "Expand": _expand,
    "Flatten": _flatten,
    "Identity": _identity,
    "Max": _only_input,
    "Mean": _only_input,
    "Min": _only_input,
    "Mul": _neutral(1, either_side=True),
    "Pad": _pad,
    "Pow": _neutral(1, either_side=False),
    "Relu": _relu,
    "Reshape": _reshape,
    "Resize": _resize,
    "Slice": _slice,
    "Split": _split,
    "Sub": _neutral(0, either_side=False),
    "Sum": _only_input,
    "Tile": _tile,
    "Transpose": _transpose,
    "Upsample": _resize,
}
