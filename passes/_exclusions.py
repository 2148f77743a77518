"""Nodes that stay in float by default: where they stand, integers cost more than they save.

Each pattern was measured on small networks, 8 bits on the target ``cpu`` (SQNR of the output, with
the node in integers and without):

    residual Add of a transformer    24.9 -> 26.7 dB in 8 blocks, 19.0 -> 23.1 dB with an outlier
    factor of a normalization        32.9 -> 34.0 dB
    Softmax                          31.1 -> 31.2 dB, and float is 1.4 to 1.9 times faster

What else is said to be left alone is not quantized to begin with, since no integer kernel stands
before it or nobody behind it wants integers (the inside of LayerNorm, of a GELU by Erf or Tanh, Add
behind MatMul), or loses less than 0.1 dB (the product of a SiLU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import onnx_ir as ir

from slimctl.core.target import Target
from slimctl.graph.edit import const_array, const_tensor
from slimctl.graph.session import CPU

Rule = Callable[[ir.Node], bool]

_NORMALIZATIONS: Final = (
    "GroupNormalization",
    "InstanceNormalization",
    "LayerNormalization",
    "RMSNormalization",
    "SimplifiedLayerNormalization",
)
_MOVES: Final = ("Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_ROOTS: Final = ("Sqrt", "Pow")
_FAR: Final = 3
"""A normalization begins, and its root lies, so few nodes away."""


def computes_float(target: Target) -> bool:
    """Whether a node in float costs the provider nothing but its integer kernel.

    Others would hand it to another provider, and its neighbors with it.
    """
    return not target.asks("complete") and not any(target.demands("quantized"))


def by_pattern(graph: ir.Graph, target: Target) -> dict[ir.Node, str]:
    """Nodes that stay in float for where they stand, with the reason."""
    if not computes_float(target):
        return {}
    rules = dict(_PATTERNS)
    if target.provider == CPU:
        rules["Softmax"] = (lambda _: True, _SOFTMAX)
    found: dict[ir.Node, str] = {}
    for node in graph:
        rule = None if node.domain else rules.get(node.op_type)
        if rule is not None and rule[0](node):
            found[node] = rule[1]
    return found


_SOFTMAX: Final = "its integer kernel is slower than the float one and less exact"


def _is_residual(add: ir.Node) -> bool:
    """Whether an Add joins a branch to a stream that is normalized where it is read."""
    tensors = [*add.inputs, *add.outputs]
    if any(value is None or const_tensor(value) is not None for value in tensors):
        return False
    return any(_is_normalized(value) for value in tensors if value is not None)


def _is_normalized(value: ir.Value, far: int = _FAR) -> bool:
    """Whether a normalization reads the value, as one operator or as the parts of one."""
    return far > 0 and any(_normalizes(user, value, far) for user in value.consumers())


def _normalizes(user: ir.Node, value: ir.Value, far: int) -> bool:
    if user.op_type in _NORMALIZATIONS:
        return user.inputs[0] is value
    if user.op_type == "Sub":
        return any(_is_mean_of(other, value) for other in user.inputs)
    if user.op_type in ("Mul", "Pow"):
        return _is_square(user) and _reaches_root(user.outputs[0])
    return user.op_type in _MOVES and _is_normalized(user.outputs[0], far - 1)


def _is_mean_of(mean: ir.Value | None, value: ir.Value) -> bool:
    node = None if mean is None else mean.producer()
    return node is not None and node.op_type == "ReduceMean" and node.inputs[0] is value


def _is_square(node: ir.Node) -> bool:
    if node.op_type == "Mul":
        return node.inputs[0] is node.inputs[1]
    exponent = const_array(node.inputs[1])
    return exponent is not None and bool((exponent == 2).all())


def _reaches_root(squares: ir.Value) -> bool:
    """Whether the mean of squares is taken, and a root of it."""
    means = [user for user in squares.consumers() if user.op_type == "ReduceMean"]
    behind = (user for mean in means for user in _behind(mean.outputs[0], _FAR))
    return any(user.op_type in _ROOTS for user in behind)


def _behind(value: ir.Value, far: int) -> Iterator[ir.Node]:
    for user in value.consumers():
        yield user
        if far > 1 and len(user.outputs) == 1:
            yield from _behind(user.outputs[0], far - 1)


def _is_normalizing(mul: ir.Node) -> bool:
    """Whether one factor is the inverse root of a mean of squares."""
    return any(_is_inverse_root(value) for value in mul.inputs)


def _is_inverse_root(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    if node is None or node.op_type not in ("Reciprocal", "Div", "Pow"):
        return False
    below = node.inputs[1] if node.op_type == "Div" else node.inputs[0]
    for _ in range(_FAR):
        node = None if below is None else below.producer()
        if node is None or not node.inputs:
            return False
        if node.op_type == "ReduceMean":
            return True
        below = next((v for v in node.inputs if const_tensor(v) is None), None)
    return False


_PATTERNS: Final[dict[str, tuple[Rule, str]]] = {
    "Add": (
        _is_residual,
        "a residual Add of a transformer: what it adds up would be rounded in every block",
    ),
    "Mul": (_is_normalizing, "inside a normalization: its factor spans a wide range"),
}
"""By operator: what to look for, and why it stays in float."""
