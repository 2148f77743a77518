"""Tensors that linear layers read, and how strong their channels are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Context, Skipped
from slimctl.graph.edit import const_tensor
from slimctl.graph.select import Selection
from slimctl.passes._input_moments import written_shape
from slimctl.passes._layers import is_linear
from slimctl.passes._linear_samples import LinearLayer, linear_layer

_ROWS: Final = 512
"""Rows on which errors are measured, of the first samples; ranges are those of all samples."""

_ROWS_PER_SAMPLE: Final = 16

_BUDGET_BYTES: Final = 128 * 2**20
"""Rows of so many tensors are held at once; more tensors take another pass over the data."""


@dataclass(frozen=True)
class SharedInput:
    """A tensor and the nodes with constant weights that read it along one axis.

    Attributes:
        value: The tensor.
        layers: Conv nodes, or Gemm and MatMul nodes; at least one.
        axis: Of the channels: 1, or the last one, -1.
    """

    value: ir.Value
    layers: tuple[LinearLayer, ...]
    axis: int

    @property
    def name(self) -> str:
        """Of the tensor."""
        return self.value.name or ""

    @property
    def names(self) -> list[str]:
        """Of the layers."""
        return [layer.name for layer in self.layers]

    @property
    def channels(self) -> int:
        """Number of them."""
        return self.layers[0].groups * inputs_of(self.layers[0])

    def weight_peaks(self) -> NDArray[np.float64]:
        """Largest magnitude of the weights that read each channel, [channels]."""
        peaks = []
        for layer in self.layers:
            matrix = np.abs(layer.matrix())
            by_input = matrix.reshape(*matrix.shape[:2], inputs_of(layer), -1)
            peaks.append(by_input.max(axis=(1, 3)).reshape(-1))  # [groups, inputs] -> [channels]
        return np.asarray(np.max(peaks, axis=0))


def inputs_of(layer: LinearLayer) -> int:
    """Channels that each group of a layer reads."""
    return int(layer.matrix().shape[2]) // math.prod(layer.kernel)


def by_weight(layer: LinearLayer, factors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Factors of channels as those of the columns of the layer's matrix, [groups, 1, columns]."""
    each = factors.reshape(layer.groups, 1, inputs_of(layer), 1)
    taps = (layer.groups, 1, inputs_of(layer), math.prod(layer.kernel))
    return np.broadcast_to(each, taps).reshape(layer.groups, 1, -1)


class Strength(NamedTuple):
    """What a tensor holds.

    Attributes:
        low: Smallest value by channel, at most 0; [channels].
        high: Largest value by channel, at least 0.
        rows: For each layer what it sees at some positions, [rows, groups, columns].
    """

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    rows: tuple[NDArray[np.float32], ...]

    @property
    def peak(self) -> NDArray[np.float64]:
        """Largest magnitude by channel."""
        return np.maximum(-self.low, self.high)


def shared_inputs(model: ir.Model, selection: Selection) -> tuple[list[SharedInput], list[Skipped]]:
    """Inputs of the main graph's linear layers, in graph order, and layers left alone."""
    by_value: dict[tuple[ir.Value, int], list[LinearLayer]] = {}
    skipped: list[Skipped] = []
    for node in model.graph:
        if not is_linear(node):
            continue
        if all(const_tensor(value) is None for value in node.inputs[:2]):
            continue  # two activations: an attention's products
        layer = selection.reason_against(node) or _usable(node)
        if isinstance(layer, str):
            skipped.append(Skipped(node.name or "", layer))
        else:
            axis = 1 if node.op_type == "Conv" else -1
            by_value.setdefault((layer.layer.data, axis), []).append(layer)
    return [SharedInput(value, tuple(v), axis) for (value, axis), v in by_value.items()], skipped


def _usable(node: ir.Node) -> LinearLayer | str:
    layer = linear_layer(node)
    if isinstance(layer, str):
        return layer
    transposed = node.attributes.get("transA")
    if transposed is not None and transposed.as_int():
        return "its channels are not the last axis of its input"
    if layer.layer.weight().dtype != np.float32:
        return "its weights are not float32"
    if layer.layer.data.is_graph_input():
        return "its input comes from outside"
    return layer


def strengths(
    model: ir.Model, found: Sequence[SharedInput], context: Context
) -> Iterator[tuple[SharedInput, Strength]]:
    """Looks at the data, as often as memory asks for it."""
    waiting = list(found)
    while waiting:
        size = 0
        count = 0
        for shared in waiting:
            size += sum(layer.matrix()[:, 0].size * _ROWS * 4 for layer in shared.layers)
            if count and size > _BUDGET_BYTES:
                break
            count += 1
        part, waiting = waiting[:count], waiting[count:]
        yield from zip(part, _observe(model, part, context), strict=True)


class _Collector:
    """What one tensor holds, over all batches."""

    def __init__(self, shared: SharedInput) -> None:
        self._shared = shared
        self._low = np.zeros(shared.channels)
        self._high = np.zeros(shared.channels)
        self._rows: list[list[NDArray[np.float32]]] = [[] for _ in shared.layers]
        self._left = _ROWS

    def add(self, array: NDArray[Any], seed: Sequence[int]) -> None:
        if array.size == 0 or not np.isfinite(array).all():
            return
        other = tuple(
            index for index in range(array.ndim) if index != self._shared.axis % array.ndim
        )
        np.minimum(self._low, array.min(axis=other), out=self._low)
        np.maximum(self._high, array.max(axis=other), out=self._high)
        share = min(_ROWS_PER_SAMPLE * array.shape[0], self._left)
        if not share:
            return
        for layer, rows in zip(self._shared.layers, self._rows, strict=True):
            places = layer.positions(written_shape(layer, array), share, seed)
            rows.append(layer.read(array, places))
        self._left -= len(self._rows[0][-1])

    def strength(self) -> Strength:
        rows = tuple(
            np.concatenate(found) if found else np.zeros((0, 1, 1), np.float32)
            for found in self._rows
        )
        return Strength(self._low, self._high, rows)


def _observe(model: ir.Model, found: Sequence[SharedInput], context: Context) -> list[Strength]:
    names = [shared.name for shared in found]
    collectors = [_Collector(shared) for shared in found]
    for index, seen in enumerate(context.activations(model, list(dict.fromkeys(names)))):
        for name, collector in zip(names, collectors, strict=True):
            collector.add(seen[name], (context.seed, index))
    return [collector.strength() for collector in collectors]
