"""Layers whose weights can become sparse, and in which order they are treated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Skipped
from slimctl.graph.edit import all_nodes, const_array
from slimctl.graph.select import Selection
from slimctl.passes._input_moments import Reader
from slimctl.passes._layers import Layer, is_linear, output_axis, recognize
from slimctl.passes._linear_samples import LinearLayer, linear_layer
from slimctl.passes._obs import Matrix

Sparse = Literal["2:4", "unstructured"]

_PASSES = 24
"""Passes over the data at most. Where more layers than this lie one behind the other, some
neighbors are treated together."""

_STAGE_BYTES = 512 * 2**20
"""Second moments that are collected at a time."""


@dataclass
class SparseLayer:
    """A layer whose weights become sparse.

    Attributes:
        layer: The layer; without a geometry where its inputs cannot be observed.
        order: Columns of its matrix so that those of one group of four are neighbors.
        ratio: A share of its own.
        unread: Why its inputs cannot be observed.
        method: How it was done.
        error: Share of the energy of its outputs that is wrong, on samples it had not seen.
    """

    layer: LinearLayer
    order: NDArray[np.int64]
    ratio: float | None
    unread: str
    method: Literal["sparsegpt", "wanda", "magnitude", "random", "taylor", ""] = ""
    error: float | None = field(default=None)

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.layer.name

    @property
    def reader(self) -> Reader:
        """For looking at its inputs."""
        return Reader(self.layer, self.order)

    def stored(self) -> NDArray[Any]:
        """The weight as it is stored."""
        array = const_array(self.layer.layer.weight_value)
        assert array is not None, "the weight of a layer is constant"
        return array

    def matrix(self) -> Matrix:
        """Weights in the order of the pattern, [groups, outputs, inputs]."""
        return self.layer.matrix()[:, :, self.order]

    def ordered(self, array: NDArray[Any]) -> Matrix:
        """Something of the shape of the stored weight, in the order of the pattern."""
        return self.layer.matrix(array)[:, :, self.order]

    def unordered(self, matrix: Matrix) -> Matrix:
        """Back in the order of the layer."""
        found = np.empty_like(matrix)
        found[:, :, self.order] = matrix
        return found


def find_layers(
    model: ir.Model,
    pattern: Sparse,
    selection: Selection,
    ratio_of: Callable[[ir.Node], float | None],
) -> tuple[list[SparseLayer], list[Skipped]]:
    """Layers to make sparse, and those that stay with the reason."""
    layers: list[SparseLayer] = []
    skipped: list[Skipped] = []
    for node in filter(is_linear, all_nodes(model)):
        found = selection.reason_against(node) or recognize(node)
        if isinstance(found, Layer):
            found = _reason_against(found, pattern) or found
        if isinstance(found, Layer):
            seen, unread = _seen(found, model)
            order = _by_fours(found) if pattern == "2:4" else _columns(seen)
            layers.append(SparseLayer(seen, order, ratio_of(node), unread))
        else:
            skipped.append(Skipped(node.name or "", found))
    return layers, skipped


def _seen(layer: Layer, model: ir.Model) -> tuple[LinearLayer, str]:
    """The layer as a matrix, and why its inputs cannot be observed."""
    found = linear_layer(layer.node)
    if isinstance(found, str):
        return LinearLayer(layer, layer.groups, (), (), (), ()), found
    outside = layer.node.graph is not model.graph
    return found, "it is inside a branch or a loop" if outside else ""


def _reason_against(layer: Layer, pattern: Sparse) -> str:
    node, weight, shape = layer.node, layer.weight_value, layer.weight().shape
    uses = len(list(weight.uses())) + weight.is_graph_output()
    if uses > 1:
        return f"its weight is used in {uses} places"
    if node.op_type == "ConvTranspose":
        return "no sparse kernel exists for transposed convolutions"
    if node.op_type == "MatMul" and len(shape) > 2:
        return "its weight is a stack of matrices"
    if node.op_type == "Conv" and layer.groups > 1 and shape[1] == 1:
        return "depthwise: few weights, all of which matter"
    if not layer.weight().any():
        return "all its weights are zero"
    return _reason_against_fours(layer) if pattern == "2:4" else ""


def _reason_against_fours(layer: Layer) -> str:
    if layer.groups > 1:
        # https://github.com/NVIDIA/TensorRT/issues/4054
        return "no sparse kernel exists for grouped convolutions"
    channels = layer.weight().shape[1 - output_axis(layer.node, 2)]
    return f"{channels} input channels are no multiple of 4" if channels % 4 else ""


def _columns(layer: LinearLayer) -> NDArray[np.int64]:
    return np.arange(layer.matrix().shape[2])


def _by_fours(layer: Layer) -> NDArray[np.int64]:
    """Columns so that four input channels at one place of the kernel are neighbors.

    Sparse tensor cores multiply along the input channels: for each output channel and each place in
    the kernel, two of four neighboring channels are zero (TensorRT documentation, "Structured
    Sparsity").
    """
    shape = layer.weight().shape
    if layer.node.op_type != "Conv":
        return np.arange(shape[1 - output_axis(layer.node, 2)])
    # [channels * taps] -> [channels / 4, 4, taps] -> [channels / 4, taps, 4]
    columns = np.arange(np.prod(shape[1:], dtype=np.int64))
    return columns.reshape(shape[1] // 4, 4, -1).swapaxes(1, 2).reshape(-1)


# in which order


def stages(model: ir.Model, layers: Sequence[SparseLayer]) -> list[list[SparseLayer]]:
    """Layers in the order of the graph; those of one stage do not read what others of it write.

    Unless there are more than :data:`_PASSES` one behind the other: neighbors share a stage then.
    """
    by_node = {entry.layer.layer.node: entry for entry in layers}
    depth: dict[ir.Value, int] = {}
    levels: dict[int, list[SparseLayer]] = {}
    for node in model.graph:
        own = max((depth.get(value, 0) for value in _read(node)), default=0)
        if node in by_node:
            levels.setdefault(own, []).append(by_node[node])
        depth.update(dict.fromkeys(node.outputs, own + (node in by_node)))
    ordered = [levels[level] for level in sorted(levels)]
    ends = np.linspace(0, len(ordered), min(len(ordered), _PASSES) + 1).astype(int).tolist()
    merged = [
        [entry for level in ordered[start:end] for entry in level] for start, end in pairwise(ends)
    ]
    return [part for stage in merged for part in _affordable(stage)]


def _read(node: ir.Node) -> Iterator[ir.Value]:
    """Everything a node depends on, in its bodies too."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            for inner in attribute.as_graph().all_nodes():
                yield from (value for value in inner.inputs if value is not None)


def _affordable(stage: Sequence[SparseLayer]) -> list[list[SparseLayer]]:
    """Parts of a stage whose second moments fit in memory together."""
    parts: list[list[SparseLayer]] = [[]]
    held = 0
    for entry in stage:
        groups, outputs, inputs = entry.layer.matrix().shape
        cost = 2 * 4 * groups * inputs * (inputs + outputs)  # two halves of float32
        if parts[-1] and held + cost > _STAGE_BYTES:
            parts.append([])
            held = 0
        parts[-1].append(entry)
        held += cost
    return parts
