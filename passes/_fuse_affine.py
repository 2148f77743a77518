"""Folds what scales and shifts channels into the layer before it.

A layer with constant weights computes ``z[c] = W[c] · x + b[c]`` for each output channel c. Batch
normalization at inference (Ioffe and Szegedy 2015) and arithmetic with per-channel constants
compute ``y[c] = s[c] z[c] + t[c]``. Together they are one layer with ``W'[c] = s[c] W[c]`` and
``b'[c] = s[c] b[c] + t[c]``. A chain of such nodes is folded at once, in double precision, so that
weights are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.edit import add_initializer, const_array, const_tensor
from slimctl.passes._fuse_graph import (
    FLOATS,
    Array,
    Workbench,
    absorb,
    as_float64,
    input_of,
    is_op,
    mark,
    only_reader,
    remove,
    used_outputs,
)

Channels: TypeAlias = NDArray[np.float64]
"""One number per output channel."""

_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


class Affine(NamedTuple):
    """``y = scale * z + shift``, each [channels]."""

    scale: Channels
    shift: Channels

    def then(self, later: Affine) -> Affine:
        """Both, one after the other."""
        return Affine(self.scale * later.scale, self.shift * later.scale + later.shift)


_ARITHMETIC: dict[tuple[str, bool], Callable[[Channels], Affine]] = {
    ("Mul", True): lambda k: Affine(k, np.zeros_like(k)),
    ("Mul", False): lambda k: Affine(k, np.zeros_like(k)),
    ("Div", True): lambda k: Affine(1.0 / k, np.zeros_like(k)),
    ("Add", True): lambda k: Affine(np.ones_like(k), k),
    ("Add", False): lambda k: Affine(np.ones_like(k), k),
    ("Sub", True): lambda k: Affine(np.ones_like(k), -k),
    ("Sub", False): lambda k: Affine(-np.ones_like(k), k),
}
"""Arithmetic with constants k, by operator and whether the variable is its first input."""


@dataclass(frozen=True)
class Layer:
    """A linear layer with constant weights.

    Attributes:
        node: Conv, ConvTranspose, Gemm or MatMul.
        weight: As stored.
        bias: What the layer adds, float64 [channels]; None if it adds nothing.
        view: Shape [groups, inputs, outputs, positions] under which the weights' channels are
            groups x outputs, in this order.
        rank: Of the output; None if unknown.
        channel_axis: Axis of the output that the channels lie on, counted from the front for
            convolutions, from the back for products of matrices.
    """

    node: ir.Node
    weight: Array
    bias: Channels | None
    view: tuple[int, int, int, int]
    rank: int | None
    channel_axis: int

    @property
    def channels(self) -> int:
        """Number of output channels."""
        return self.view[0] * self.view[2]


class Step(NamedTuple):
    """One node of a chain after a layer, and what it computes."""

    node: ir.Node
    affine: Affine


def fold_affine(bench: Workbench) -> None:
    """Folds normalizations and per-channel arithmetic into the layers before them."""
    for node in bench.nodes():
        if is_op(node, *_LAYERS):
            _fold_after(bench, node)
    explained = {entry.node for entry in bench.skipped}
    for node in bench.nodes():
        if is_op(node, "BatchNormalization") and node.name not in explained:
            bench.skip(node, _obstacle(bench, node) or "no layer with weights comes right before")


def _fold_after(bench: Workbench, node: ir.Node) -> None:
    layer = _layer(bench, node)
    if isinstance(layer, str):
        _explain(bench, node.outputs[0], None, layer)
        return
    steps = _chain(bench, layer)
    if steps and not _is_bias_only(layer, steps):
        reason = _fold(bench, layer, steps)
        if reason is not None:
            for step in steps:
                bench.skip(step.node, reason)


def _is_bias_only(layer: Layer, steps: list[Step]) -> bool:
    """MatMul has no bias: one Add after it is the form that a chain is folded to."""
    return (
        layer.node.op_type == "MatMul"
        and len(steps) == 1
        and steps[0].node.op_type in {"Add", "Sub"}
        and bool((steps[0].affine.scale == 1.0).all())
    )


# Reading layers


def _layer(bench: Workbench, node: ir.Node) -> Layer | str:
    """What there is to know about a layer, or why nothing can be folded into it."""
    about = "the layer before it "
    tensor = const_tensor(input_of(node, 1))
    if tensor is None:
        return about + "has no constant float weights"
    if tensor.dtype not in FLOATS:
        return about + f"has weights of type {tensor.dtype.name}"
    weight = const_array(input_of(node, 1))
    assert weight is not None, "it has a tensor that is no string"
    view = _view(node, weight.shape)
    if view is None:
        return about + "has weights of an unknown form"
    bias = _bias(node, view[0] * view[2])
    if isinstance(bias, str):
        return about + bias
    matrix = node.op_type == "MatMul"
    rank = bench.rank(node.outputs[0]) if matrix else weight.ndim
    return Layer(node, weight, bias, view, rank, -1 if matrix else 1)


def _view(node: ir.Node, shape: tuple[int, ...]) -> tuple[int, int, int, int] | None:
    """The shape [groups, inputs, outputs, positions]; see :class:`Layer`."""
    if len(shape) < 2:
        return None
    rest = int(np.prod(shape[2:]))
    match node.op_type:
        case "Conv":
            return (1, 1, shape[0], shape[1] * rest)
        case "ConvTranspose":
            groups = node.attributes.get_int("group", 1)
            whole = groups > 0 and shape[0] % groups == 0
            return (groups, shape[0] // groups, shape[1], rest) if whole else None
        case "Gemm" if node.attributes.get_int("transB", 0):
            return (1, 1, shape[0], shape[1])
    return (1, int(np.prod(shape[:-1])), shape[-1], 1)


def _bias(node: ir.Node, channels: int) -> Channels | str | None:
    """What a layer adds, float64 [channels], or why that is not known per channel."""
    value = input_of(node, 2)
    if value is None:
        return None
    array = const_array(value)
    if array is None:
        return "has a bias that is not constant"
    if array.size not in {1, channels} or (array.size > 1 and array.shape[-1] != channels):
        return "has a bias that is not one number per channel"
    beta = node.attributes.get_float("beta", 1.0) if node.op_type == "Gemm" else 1.0
    return np.broadcast_to(as_float64(array).reshape(-1) * beta, (channels,))


# Reading what follows


def _chain(bench: Workbench, layer: Layer) -> list[Step]:
    """The nodes after a layer that can be folded into it together."""
    steps: list[Step] = []
    value = layer.node.outputs[0]
    while True:
        reader = only_reader(value)
        if reader is None:
            _explain(bench, value, layer, "its input is also read elsewhere")
            return steps
        affine = _affine(bench, reader, value, layer)
        if isinstance(affine, str):
            bench.skip(reader, affine)
        if not isinstance(affine, Affine) or not bench.may_touch(reader, layer.node):
            return steps
        steps.append(Step(reader, affine))
        value = reader.outputs[0]


def _explain(bench: Workbench, value: ir.Value, layer: Layer | None, reason: str) -> None:
    """Notes every node that would have been folded, had there not been this reason."""
    for use in value.uses():
        if is_op(use.node, "BatchNormalization"):
            bench.skip(use.node, _obstacle(bench, use.node) or reason)
        elif layer is not None and isinstance(_affine(bench, use.node, value, layer), Affine):
            bench.skip(use.node, reason)


def _affine(bench: Workbench, node: ir.Node, value: ir.Value, layer: Layer) -> Affine | str | None:
    """What a node computes from a layer's output; a text if it is out of reach, None if other."""
    if is_op(node, "BatchNormalization") and node.inputs[0] is value:
        return _obstacle(bench, node) or _normalization(node, layer)
    if is_op(node, "Mul", "Div", "Add", "Sub") and bench.opset >= 7:
        # Before opset 7, how to broadcast was an attribute.
        return _arithmetic(node, value, layer)
    return None


def _obstacle(bench: Workbench, node: ir.Node) -> str | None:
    """Why a BatchNormalization is no fixed scale and shift per channel."""
    if bench.opset >= 14:
        training = node.attributes.get_int("training_mode", 0) != 0
    elif bench.opset >= 7:
        training = len(node.outputs) > 1
    else:
        training = node.attributes.get_int("is_test", 0) == 0
    if training:
        return "it is in training mode: it normalizes by the statistics of each batch"
    if used_outputs(node) > 1:
        return "more than its first output is read"
    if node.attributes.get_int("spatial", 1) == 0:
        return "it normalizes each position by itself"
    if not all(const_tensor(parameter) is not None for parameter in node.inputs[1:5]):
        return "its parameters are not constant"
    return None


def _normalization(node: ir.Node, layer: Layer) -> Affine | str:
    """Scale and shift of ``gamma (z - mean) / sqrt(variance + epsilon) + beta``."""
    if layer.channel_axis != 1 and layer.rank != 2:
        return "the layer before it has its channels on another axis"
    arrays = [const_array(value) for value in node.inputs[1:5]]
    gamma, beta, mean, variance = (as_float64(array) for array in arrays if array is not None)
    if any(array.shape != (layer.channels,) for array in (gamma, beta, mean, variance)):
        return "its parameters do not fit the channels before it"
    epsilon = float(np.float32(node.attributes.get_float("epsilon", 1e-5)))
    spread = variance + epsilon
    if not (spread > 0).all():
        return "its variance is not positive"
    scale = gamma / np.sqrt(spread)
    return Affine(scale, beta - mean * scale)


def _arithmetic(node: ir.Node, value: ir.Value, layer: Layer) -> Affine | str | None:
    """Scale and shift of arithmetic with one constant per channel."""
    first = node.inputs[0] is value
    constant = const_array(node.inputs[1] if first else node.inputs[0])
    if constant is None:
        return None
    numbers = _per_channel(constant, layer)
    if numbers is None:
        return None
    if node.op_type == "Div" and first and not numbers.all():
        return "it divides by zero"
    build = _ARITHMETIC.get((node.op_type, first))
    return None if build is None else build(numbers)


def _per_channel(constant: Array, layer: Layer) -> Channels | None:
    """A constant as one number per channel, if it broadcasts to the layer's output as such."""
    if constant.ndim > (1 if layer.rank is None else layer.rank):
        return None
    if constant.size == 1:
        return np.full(layer.channels, float(constant.reshape(-1)[0]))
    # The channel axis counted from the back, since broadcasting aligns the last axes.
    axis = -1 if layer.rank is None or layer.channel_axis < 0 else layer.channel_axis - layer.rank
    lies_on_axis = -axis <= constant.ndim and constant.shape[axis] == constant.size
    if not lies_on_axis or constant.size != layer.channels:
        return None
    return as_float64(constant).reshape(-1)


# Writing


def _fold(bench: Workbench, layer: Layer, steps: list[Step]) -> str | None:
    """Rewrites the layer and removes the chain, or says why not."""
    total = steps[0].affine
    for step in steps[1:]:
        total = total.then(step.affine)
    weight = _scaled_weight(bench, layer, total.scale)
    if isinstance(weight, str):
        return weight
    bias = total.shift if layer.bias is None else layer.bias * total.scale + total.shift
    stored = _store(bias, layer.weight.dtype)
    if not _all_finite(stored):
        return f"the bias would not be finite in {layer.weight.dtype}"
    if weight is not None:
        bench.replace_constant(layer.node, 1, weight, f"{_weight_name(layer)}_folded")
    _write_bias(bench, layer, steps, stored, rescaled=weight is not None)
    mark(layer.node)
    _count(bench, layer, steps)
    return None


def _weight_name(layer: Layer) -> str:
    value = layer.node.inputs[1]
    return (value.name if value is not None else None) or "weight"


def _scaled_weight(bench: Workbench, layer: Layer, scale: Channels) -> Array | str | None:
    """The weights times the scale; None if they stay the same; a text if that cannot be stored."""
    if (scale == 1.0).all():
        return None
    value = layer.node.inputs[1]
    assert value is not None, "a layer has weights"
    shared = len(value.uses()) > 1 or value.is_graph_output()
    if shared and layer.weight.nbytes > bench.fold_limit_bytes:
        return (
            "the layer before it shares its weights with other nodes, and a copy of them exceeds "
            "fold_limit_bytes"
        )
    groups, _, outputs, _ = layer.view
    source = layer.weight.reshape(layer.view)
    factors = scale.reshape(groups, 1, outputs, 1)
    result = np.empty(layer.view, layer.weight.dtype)
    for group in range(groups):  # one at a time: the product in double precision is large
        result[group] = _store(source[group].astype(np.float64) * factors[group], result.dtype)
    loss = _loss(source, result, factors)
    return loss if loss is not None else result.reshape(layer.weight.shape)


def _store(exact: NDArray[np.float64], dtype: np.dtype[np.generic]) -> Array:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return exact.astype(dtype)


def _all_finite(array: Array) -> bool:
    return bool(np.isfinite(array.astype(np.float64)).all())


def _loss(source: Array, result: Array, factors: NDArray[np.float64]) -> str | None:
    """What rounding to the stored type would destroy: views [groups, inputs, outputs, positions].

    Above the largest number of the type there is infinity. Below its smallest normal number
    precision fades out; real weights get there in float16 only.
    """
    high = result.max(axis=(1, 3), keepdims=True).astype(np.float64)
    low = result.min(axis=(1, 3), keepdims=True).astype(np.float64)
    if not (np.isfinite(high).all() and np.isfinite(low).all()):
        return f"the weights would not be finite in {result.dtype}"
    if result.dtype != np.float16:
        return None
    faint = np.maximum(high, -low) < np.finfo(np.float16).smallest_normal
    if faint.any() and ((source != 0) & faint & (factors != 0)).any():
        return f"the weights would be too small for {result.dtype}"
    return None


def _write_bias(
    bench: Workbench, layer: Layer, steps: list[Step], bias: Array, *, rescaled: bool
) -> None:
    """Stores the bias where the operator keeps it, and takes the chain out of the graph."""
    node = layer.node
    output = node.outputs[0]
    if node.op_type == "MatMul":
        if bias.any():
            output = _insert_add(bench, layer, steps, bias)
            if rescaled:  # the old name stood for other values
                node.outputs[0].name = bench.names.fresh(f"{node.name}_product")
    elif layer.bias is not None or bias.any():
        bench.replace_constant(node, 2, bias, f"{node.name}_bias")
        if node.op_type == "Gemm":
            node.attributes.pop("beta", None)  # the default is 1
    absorb(output, steps[-1].node)
    for step in reversed(steps[:-1]):
        remove(step.node)


def _insert_add(bench: Workbench, layer: Layer, steps: list[Step], bias: Array) -> ir.Value:
    """An Add behind MatMul. It takes the name of the first Add of the chain, if there is one."""
    node = layer.node
    graph = node.graph
    assert graph is not None, "only nodes of a graph are rewritten"
    value = add_initializer(graph, bench.names.fresh(f"{node.name}_bias"), bias)
    named = (step.node.name for step in steps if step.node.op_type == "Add")
    name = next(named, None) or bench.names.fresh_node(f"{node.name}_bias")
    add = ir.Node("", "Add", [node.outputs[0], value], name=name)
    mark(add)
    graph.insert_before(steps[-1].node, add)
    return add.outputs[0]


def _count(bench: Workbench, layer: Layer, steps: list[Step]) -> None:
    for step in steps:
        bench.count(f"{step.node.op_type} folded into {layer.node.op_type}")
