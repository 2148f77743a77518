"""Finds layers behind a gate: what they read is the product of what two layers compute.

In language models with gated feed-forward layers, ``W (silu(G x) * (U x))`` (Shazeer, "GLU Variants
Improve Transformer", 2020), the product is where massive activations are made: a few values of the
first token are thousands of times as large as all others (Sun et al., "Massive Activations in Large
Language Models", COLM 2024). One scale for the whole tensor then rounds all other tokens to zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import onnx_ir as ir

from slimctl.graph.edit import all_nodes, const_tensor

_PRODUCTS: Final = ("MatMul", "Gemm")
_PARTS: Final = ("Split", "Slice")
_ELEMENTWISE: Final = (
    "Add", "BiasGelu", "Cast", "Clip", "Div", "Elu", "Erf", "FastGelu", "Gelu", "HardSigmoid",
    "HardSwish", "Identity", "LeakyRelu", "Mish", "Mul", "Neg", "Pow", "QuickGelu", "Relu",
    "Sigmoid", "Softplus", "Sub", "Swish", "Tanh",
)  # fmt: skip


def gated_layers(model: ir.Model) -> Iterator[ir.Node]:
    """Products with a constant matrix whose data are a product of two different computations."""
    for node in all_nodes(model):
        if _is_layer(node) and _is_gated(node.inputs[0]):
            yield node


def _is_layer(node: ir.Node) -> bool:
    return node.op_type in _PRODUCTS and const_tensor(node.inputs[1]) is not None


def _is_gated(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Mul":
        return False
    one, other = (_layers_of(factor) for factor in node.inputs)
    return bool(one and other) and one != other


def _layers_of(value: ir.Value | None) -> frozenset[ir.Value]:
    """Outputs of layers, or parts of them, from which a value is computed element by element.

    Empty where something else goes in: ``x * sigmoid(x)`` comes from one layer, a norm, in which a
    mean goes in, from none.
    """
    node = None if value is None else value.producer()
    if value is None or node is None:
        return frozenset()
    if _is_layer(node) or (node.op_type in _PARTS and _layers_of(node.inputs[0])):
        return frozenset({value})
    if node.op_type not in _ELEMENTWISE:
        return frozenset()
    computed = [x for x in node.inputs if x is not None and const_tensor(x) is None]
    sources = [_layers_of(each) for each in computed]
    return frozenset().union(*sources) if all(sources) else frozenset()
