"""Biases for what layers read in the quantized model, one layer after another.

What is quantized in front of a layer shifts its mean output as well, and a bias can take that back
(Nagel et al. 2019, appendix D, correct one layer after another). Two things keep that from helping:
a threshold that cuts rare large values off lowers the mean, and a bias would give what is missing
there to all the other values; and below a Relu an error counts for nothing. So each channel takes
what brings the values behind its activation closest to those of the float model: nothing, the
error of its own weights, or that with some of what comes from in front of it; the smaller one where
the halves of the samples do not agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Context
from slimctl.graph.edit import const_array
from slimctl.passes._linear_samples import LinearLayer, linear_layer
from slimctl.passes._linear_write import Bias
from slimctl.passes._portions import in_portions
from slimctl.passes._quantized_layers import QuantizedLayer
from slimctl.passes._weights_walk import Walk

_ROWS: Final = 4096
"""Positions per layer, of all samples together."""

_BUDGET_BYTES: Final = 1 << 27
"""Of outputs of the float model that are held at once."""

_SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the shift that comes from in front of a layer."""

Array = NDArray[np.float64]


class Bounds(NamedTuple):
    """Values below ``low`` and above ``high`` are cut off."""

    low: float
    high: float

    def cut(self, values: Array) -> Array:
        """Values within the bounds."""
        return np.clip(values, self.low, self.high)


_OPEN: Final = Bounds(-np.inf, np.inf)


class Site(NamedTuple):
    """A layer whose outputs are compared.

    Attributes:
        quantized: In the quantized model.
        linear: The float layer as matrices.
        expected: What the float layer writes, with its bias.
        output: The same in the quantized model.
    """

    quantized: QuantizedLayer
    linear: LinearLayer
    expected: ir.Value
    output: ir.Value

    @property
    def bytes(self) -> int:
        """Of the rows that are held."""
        groups, outputs, _ = map(int, self.linear.matrix().shape)
        return 4 * _ROWS * groups * outputs


class Rows(NamedTuple):
    """What a layer writes at some positions.

    Attributes:
        values: [rows, outputs].
        odd: Rows of every other sample, [rows].
    """

    values: NDArray[np.float32]
    odd: NDArray[np.bool_]


class Shift(NamedTuple):
    """By how much a bias is to fall.

    Attributes:
        amount: [outputs]
        gain: Share of the squared error behind the activation that goes.
    """

    amount: Array
    gain: float


class Predecessors:
    """Says how far each layer's bias is to move, given those in front of it that moved already.

    Args:
        model: Quantized. Its layers are corrected in order, each before the next is asked for.
        reference: The float model that it was made from.
        layers: Of the quantized model, in graph order.
        context: Gives data and the seed.
    """

    def __init__(
        self,
        model: ir.Model,
        reference: ir.Model,
        layers: Sequence[QuantizedLayer],
        context: Context,
    ) -> None:
        self._reference, self._context = reference, context
        self._walk = Walk(model, context)
        sites = [site for layer in layers if (site := _site(layer)) is not None]
        self._batches = _count(reference, sites, context)
        self._expected = self._float_rows(sites)

    def shift(self, layer: QuantizedLayer, own: Array) -> Shift | None:
        """What is to be taken off the bias of the next layer.

        Args:
            layer: The layer.
            own: Mean error that its own weights make, [outputs].

        Returns:
            None for a layer whose outputs cannot be compared.
        """
        site = _site(layer)
        if site is None:
            return None
        name = site.output.name or ""
        runs = self._walk.activations([name], [layer.node])
        found = [self._take(site, seen[name], index) for index, seen in enumerate(runs)]
        # Layers in between were not asked for.
        expected = next(rows for one, rows in self._expected if one.quantized.node is layer.node)
        return closest_shift(expected, _joined(found), own, _activation(site), _saturation(site))

    def _float_rows(self, sites: Sequence[Site]) -> Iterator[tuple[Site, Rows]]:
        """Rows of the float model, site after site, in as few runs as memory allows."""
        for portion in in_portions(sites, lambda site: site.bytes, _BUDGET_BYTES):
            names = list(dict.fromkeys(site.expected.name or "" for site in portion))
            taken: list[list[Rows]] = [[] for _ in portion]
            for index, seen in enumerate(self._context.activations(self._reference, names)):
                for site, found in zip(portion, taken, strict=True):
                    found.append(self._take(site, seen[site.expected.name or ""], index))
            yield from zip(portion, map(_joined, taken), strict=True)

    def _take(self, site: Site, written: NDArray[np.float32], batch: int) -> Rows:
        """The same positions of a batch for the float and for the quantized layer."""
        count = -(-_ROWS // self._batches)
        places = site.linear.positions(written.shape, count, (self._context.seed, batch))
        rows = site.linear.written(written, places).reshape(len(places), -1)
        return Rows(rows, (batch + places[:, 0]) % 2 == 1)


def closest_shift(
    expected: Rows, found: Rows, own: Array, activation: Bounds, saturation: Bounds
) -> Shift:
    """What, taken off the outputs, brings them closest behind the activation.

    Args:
        expected: Of the float layer, before its activation.
        found: Of the quantized layer at the same positions.
        own: Mean error of the layer's own weights, [outputs].
        activation: What it lets through.
        saturation: What the codes of the output can hold.
    """
    finite = np.isfinite(expected.values).all(axis=1) & np.isfinite(found.values).all(axis=1)
    wanted, values = (rows.values[finite].astype(np.float64) for rows in (expected, found))
    if not len(values):
        return Shift(own, 0.0)
    whole = (values - wanted).mean(axis=0)
    shifts = np.stack([np.zeros_like(own), *(own + share * (whole - own) for share in _SHARES)])
    aims = activation.cut(wanted)

    def errors(rows: NDArray[np.bool_]) -> Array:  # [shifts, outputs]
        moved = (saturation.cut(activation.cut(values[rows] - shift)) for shift in shifts)
        return np.stack([np.square(each - aims[rows]).mean(axis=0) for each in moved])

    odd = expected.odd[finite]
    halves = [errors(rows) for rows in (odd, ~odd) if rows.any()]
    chosen = np.min([half.argmin(axis=0) for half in halves], axis=0)[None]  # [1, outputs]
    before, after = (
        sum(float(np.take_along_axis(half, which, axis=0).sum()) for half in halves)
        for which in (np.zeros_like(chosen), chosen)
    )
    gain = 1.0 - after / before if before > 0.0 else 0.0
    return Shift(np.take_along_axis(shifts, chosen, axis=0)[0], gain)


def _count(reference: ir.Model, sites: Sequence[Site], context: Context) -> int:
    names = [site.expected.name or "" for site in sites[:1]]
    return sum(1 for _ in context.activations(reference, names)) if names else 1


def _joined(rows: Sequence[Rows]) -> Rows:
    return Rows(*map(np.concatenate, zip(*rows, strict=True)))


def _site(layer: QuantizedLayer) -> Site | None:
    linear = linear_layer(layer.original.node)
    if isinstance(linear, str):
        return None
    bias, output = Bias(linear), layer.node.outputs[0]
    if layer.node.op_type == "MatMul":
        uses = list(output.uses())
        if not bias.free or len(uses) != 1:
            return None
        output = uses[0].node.outputs[0]
    return Site(layer, linear, bias.output, output)


def _activation(site: Site) -> Bounds:
    """What the Relu or Clip behind the float layer lets through."""
    uses = list(site.expected.uses())
    node = uses[0].node if len(uses) == 1 else None
    if node is None or site.expected.is_graph_output():
        return _OPEN
    if node.op_type == "Relu":
        return Bounds(0.0, np.inf)
    if node.op_type != "Clip":
        return _OPEN
    bounds = [const_array(value) for value in (*node.inputs, None, None)[1:3]]
    return Bounds(
        *(
            open_end if bound is None else float(bound.reshape(-1)[0])
            for bound, open_end in zip(bounds, _OPEN, strict=True)
        )
    )


def _saturation(site: Site) -> Bounds:
    """Smallest and largest value of the codes that the output, or its activation, becomes."""
    value = site.output
    for _ in range(2):
        uses = list(value.uses())
        if len(uses) != 1 or value.is_graph_output():
            return _OPEN
        node = uses[0].node
        if node.op_type == "QuantizeLinear":
            return _range_of(node)
        value = node.outputs[0]
    return _OPEN


def _range_of(quantizer: ir.Node) -> Bounds:
    scale, zero_point = (const_array(value) for value in (*quantizer.inputs, None)[1:3])
    if scale is None or zero_point is None or scale.size > 1:
        return _OPEN
    codes = np.iinfo(zero_point.dtype)
    return Bounds(
        *(
            (float(end) - float(zero_point.reshape(-1)[0])) * float(scale.reshape(-1)[0])
            for end in (codes.min, codes.max)
        )
    )
