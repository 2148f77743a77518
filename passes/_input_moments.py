"""What calibration data say about the inputs of linear layers: energies, second moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Context
from slimctl.passes._linear_samples import LinearLayer, Rows
from slimctl.passes._linear_write import Bias
from slimctl.passes._obs import Moments

_ROWS = 4096
"""Rows per layer, at least: errors of second moments below two percent."""

_ROWS_PER_INPUT = 2
_MOST_ROWS = 16384


class Energy:
    """Mean squares of inputs."""

    def __init__(self) -> None:
        self._sum: NDArray[np.float64] | None = None
        self._count = 0

    def add(self, rows: Rows) -> None:
        """Adds rows [rows, groups, inputs]."""
        total = np.sum(rows.astype(np.float64) ** 2, axis=0)
        self._sum = total if self._sum is None else self._sum + total
        self._count += len(rows)

    def mean(self) -> NDArray[np.float64] | None:
        """``E[x^2]`` [groups, inputs]; None when no finite value was seen."""
        return None if self._sum is None or not self._count else self._sum / self._count


class Aim(NamedTuple):
    """What a layer is to compute.

    Attributes:
        total: Name of a tensor of the original: the layer's output, or the sum of it and a partner.
        partner: What is added to the output, by name, if the output is used for nothing else.
    """

    total: str
    partner: str


def aim_of(layer: LinearLayer) -> Aim:
    """The sum, if a layer's output is only added to something (He et al. 2017, section 3.2.2)."""
    output = Bias(layer).output
    uses = list(output.uses())
    if len(uses) == 1 and uses[0].node.op_type == "Add" and not output.is_graph_output():
        partner = uses[0].node.inputs[1 - uses[0].idx]
        same = partner is not None and partner.shape == output.shape and output.shape is not None
        if same and partner is not None and partner.producer() is not None:
            return Aim(uses[0].node.outputs[0].name or "", partner.name or "")
    return Aim(output.name or "", "")


@dataclass(frozen=True)
class Reader:
    """A layer of which the inputs are looked at.

    Attributes:
        layer: The layer.
        order: Columns of its matrix in the order in which they are handed over.
    """

    layer: LinearLayer
    order: NDArray[np.int64]

    def places(
        self, x: NDArray[Any], batches: int, seed: Sequence[int]
    ) -> NDArray[np.int64] | None:
        """Some positions of what it writes; None if there are none."""
        written = written_shape(self.layer, x)
        if x.ndim < 2 or 0 in written:
            return None
        wanted = min(max(_ROWS, _ROWS_PER_INPUT * len(self.order)), _MOST_ROWS)
        return self.layer.positions(written, -(-wanted // batches), seed)

    def rows(self, x: NDArray[Any], places: NDArray[np.int64]) -> Rows:
        """Inputs at positions, [positions, groups, inputs]."""
        return self.layer.read(x, places)[:, :, self.order]


def count_batches(model: ir.Model, layer: LinearLayer, context: Context) -> int:
    """How many batches the data have; runs the model up to a layer."""
    return sum(1 for _ in context.activations(model, [layer.data]))


def energies(
    model: ir.Model, readers: Sequence[Reader], context: Context
) -> list[NDArray[np.float64] | None]:
    """``E[x^2]`` of what each layer reads, [groups, inputs]; None where nothing finite was seen."""
    found = [Energy() for _ in readers]
    if not readers:
        return []
    batches = count_batches(model, readers[0].layer, context)
    tensors = list(dict.fromkeys(reader.layer.data for reader in readers))
    for index, seen in enumerate(context.activations(model, tensors)):
        for reader, energy in zip(readers, found, strict=True):
            x = seen[reader.layer.data]
            places = reader.places(x, batches, (context.seed, index))
            if places is not None:
                rows = reader.rows(x, places)
                energy.add(rows[np.isfinite(rows).all(axis=(1, 2))])
    return [energy.mean() for energy in found]


def second_moments(
    model: ir.Model,
    original: ir.Model,
    readers: Sequence[Reader],
    context: Context,
    batches: int,
) -> list[Moments]:
    """What layers read in a model, and what they are to compute: what the original does.

    Args:
        model: On its way; not changed.
        original: With the same data, position by position.
        readers: Layers of the model.
        context: Gives data and the seed.
        batches: How many there are.
    """
    aims = [aim_of(reader.layer) for reader in readers]
    found = [Moments(*reader.layer.matrix().shape) for reader in readers]
    read = [reader.layer.data for reader in readers]
    partners = [aim.partner for aim in aims if aim.partner]
    samples = [0] * len(readers)
    both = zip(
        context.activations(model, list(dict.fromkeys([*read, *partners]))),
        context.activations(original, list(dict.fromkeys(aim.total for aim in aims))),
        strict=True,
    )
    for index, (ours, theirs) in enumerate(both):
        for place, (reader, aim, moments) in enumerate(zip(readers, aims, found, strict=True)):
            x = ours[reader.layer.data]
            places = reader.places(x, batches, (context.seed, index))
            if places is None:
                continue
            rows = reader.rows(x, places)
            y = reader.layer.written(theirs[aim.total], places)
            if aim.partner:
                y = y - reader.layer.written(ours[aim.partner], places)
            finite = np.isfinite(rows).all(axis=(1, 2)) & np.isfinite(y).all(axis=(1, 2))
            half = (samples[place] + places[:, 0]) % 2 == 1  # whole samples: they are independent
            moments.add(rows[finite], y[finite], half[finite])
            samples[place] += len(x)
    return found


def written_shape(layer: LinearLayer, x: NDArray[Any]) -> tuple[int, ...]:
    """Shape of what the layer writes, up to the number of channels."""
    if layer.layer.node.op_type != "Conv":
        rows = x.shape[:-1]
        transposed = layer.layer.node.attributes.get("transA")
        if transposed is not None and transposed.as_int():
            rows = x.shape[1:]
        return (*rows, 1)
    rank = len(layer.kernel)
    axes = [
        (x.shape[2 + axis] + layer.pads[axis] + layer.pads[rank + axis] - d * (k - 1) - 1) // s + 1
        for axis, (k, s, d) in enumerate(
            zip(layer.kernel, layer.strides, layer.dilations, strict=True)
        )
    ]
    return (x.shape[0], 1, *axes)
