"""Tensors that linear layers read along their last axis, and how strong their channels are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Context, Skipped
from slimctl.graph.edit import const_tensor
from slimctl.graph.select import Selection
from slimctl.passes._layers import is_linear
from slimctl.passes._linear_samples import LinearLayer, linear_layer

_ROWS: Final = 512
"""Rows on which errors are measured, of the first samples; ranges are those of all samples."""

_ROWS_PER_SAMPLE: Final = 16

_BUDGET_BYTES: Final = 128 * 2**20
"""Rows of so many tensors are held at once; more tensors take another pass over the data."""


@dataclass(frozen=True)
class SharedInput:
    """A tensor and the Gemm and MatMul nodes with constant weights that read it.

    Attributes:
        value: The tensor; channels lie along its last axis.
        layers: At least one.
    """

    value: ir.Value
    layers: tuple[LinearLayer, ...]

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
        return int(self.layers[0].matrix().shape[2])

    def matrices(self) -> list[NDArray[np.float64]]:
        """Weights as [channels, outputs]."""
        return [layer.matrix()[0].T for layer in self.layers]


class Strength(NamedTuple):
    """What a tensor holds.

    Attributes:
        low: Smallest value by channel, at most 0; [channels].
        high: Largest value by channel, at least 0.
        rows: Some positions, [rows, channels].
    """

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    rows: NDArray[np.float32]

    @property
    def peak(self) -> NDArray[np.float64]:
        """Largest magnitude by channel."""
        return np.maximum(-self.low, self.high)


def shared_inputs(model: ir.Model, selection: Selection) -> tuple[list[SharedInput], list[Skipped]]:
    """Inputs of the main graph's linear layers, in graph order, and layers left alone."""
    by_value: dict[ir.Value, list[LinearLayer]] = {}
    skipped: list[Skipped] = []
    for node in model.graph:
        if not is_linear(node) or node.op_type not in ("Gemm", "MatMul"):
            continue
        if all(const_tensor(value) is None for value in node.inputs[:2]):
            continue  # two activations: an attention's products
        layer = selection.reason_against(node) or _usable(node)
        if isinstance(layer, str):
            skipped.append(Skipped(node.name or "", layer))
        else:
            by_value.setdefault(layer.layer.data, []).append(layer)
    return [SharedInput(value, tuple(layers)) for value, layers in by_value.items()], skipped


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
            size += shared.channels * _ROWS * 4
            if count and size > _BUDGET_BYTES:
                break
            count += 1
        part, waiting = waiting[:count], waiting[count:]
        yield from zip(part, _observe(model, part, context), strict=True)


class _Collector:
    """What one tensor holds, over all batches."""

    def __init__(self, channels: int) -> None:
        self._low = np.zeros(channels)
        self._high = np.zeros(channels)
        self._rows: list[NDArray[np.float32]] = []
        self._left = _ROWS

    def add(self, array: NDArray[Any], seed: Sequence[int]) -> None:
        rows = array.reshape(-1, array.shape[-1])
        rows = rows[np.isfinite(rows).all(axis=1)]
        if not len(rows):
            return
        np.minimum(self._low, rows.min(axis=0), out=self._low)
        np.maximum(self._high, rows.max(axis=0), out=self._high)
        share = min(_ROWS_PER_SAMPLE * array.shape[0], self._left)
        taken = np.random.default_rng(seed).permutation(len(rows))[:share]
        self._left -= len(taken)
        self._rows.append(rows[np.sort(taken)].astype(np.float32, copy=True))

    def strength(self) -> Strength:
        rows = self._rows or [np.zeros((0, self._low.size), np.float32)]
        return Strength(self._low, self._high, np.concatenate(rows))


def _observe(model: ir.Model, found: Sequence[SharedInput], context: Context) -> list[Strength]:
    names = [shared.name for shared in found]
    collectors = [_Collector(shared.channels) for shared in found]
    for index, seen in enumerate(context.activations(model, names)):
        for name, collector in zip(names, collectors, strict=True):
            collector.add(seen[name], (context.seed, index))
    return [collector.strength() for collector in collectors]
