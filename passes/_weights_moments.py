"""Second moments of what products read, streamed: one array per tensor, a few tensors at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Feeds
from slimctl.graph.bodies import observable_graphs
from slimctl.numerics.blocks import Matrix
from slimctl.passes._weights_layers import Layer, Shared

_BUDGET: Final = 1 << 26
"""Bytes of moments that are held at once. Each time more do not fit, the data run through the model
once more; the weights that are quantized by then are seen by the layers behind them."""


class Moments:
    """``E[x x^T]`` of one tensor, [inputs, inputs].

    Rows wait until there are as many as inputs: of fewer, adding the products would take longer
    than computing them.
    """

    def __init__(self, inputs: int) -> None:
        self._sum: Matrix = np.zeros((inputs, inputs), np.float32)
        self._waiting: Matrix = np.empty((inputs, inputs), np.float32)
        self._count = 0
        self._rows = 0

    def add(self, x: NDArray[Any]) -> None:
        """Adds rows [..., inputs]; those that are not finite are left out."""
        rows = x.reshape(-1, x.shape[-1]).astype(np.float32, copy=False)
        finite = np.isfinite(rows).all(axis=1)
        rows = rows if finite.all() else rows[finite]
        self._rows += len(rows)
        while len(rows):
            some = rows[: len(self._waiting) - self._count]
            self._waiting[self._count : self._count + len(some)] = some
            self._count += len(some)
            rows = rows[len(some) :]
            if self._count == len(self._waiting):
                self._multiply()

    def _multiply(self) -> None:
        waiting = self._waiting[: self._count]
        self._sum += waiting.T @ waiting  # one array twice: half of the products are computed
        self._count = 0

    def mean(self) -> Matrix | None:
        """None when nothing finite was seen, or squares overflowed. Asked for only once."""
        self._multiply()
        if not self._rows or not np.isfinite(self._sum).all():
            return None
        self._sum /= np.float32(self._rows)
        return self._sum


def observable(model: ir.Model) -> set[ir.Node]:
    """Nodes whose inputs can be observed: outside loops."""
    return {node for place in observable_graphs(model) for node in place.graph}


def portions(
    matrices: Sequence[Shared], apart: Callable[[Shared, Shared], bool] = lambda one, other: False
) -> Iterator[list[Shared]]:
    """Matrices, in order, so many at a time that the moments of their inputs fit the budget.

    Args:
        matrices: In the order of the graph.
        apart: Whether a matrix has to come later than another one, the first of a portion.
    """
    portion: list[Shared] = []
    held: set[ir.Value] = set()
    used = 0
    for shared in matrices:
        new = {layer.data for layer in shared.products} - held
        size = len(new) * 4 * shared.storage.matrix().shape[1] ** 2
        if portion and (used + size > _BUDGET or apart(portion[0], shared)):
            yield portion
            portion, held, used = [], set(), 0
            new = {layer.data for layer in shared.products}
            size = len(new) * 4 * shared.storage.matrix().shape[1] ** 2
        portion.append(shared)
        held |= new
        used += size
    if portion:
        yield portion


def _turned(layer: Layer) -> bool:
    attribute = layer.node.attributes.get("transA")
    return attribute is not None and bool(attribute.as_int())


Observe = Callable[[Sequence[str]], Iterator[Feeds]]
"""Tells what tensors hold, by name, for one batch after another."""


def collect(matrices: Sequence[Shared], observe: Observe) -> list[Matrix | None]:
    """Moments of the inputs of each matrix; None where nothing finite was seen.

    Layers that read the same tensor share an array.

    Args:
        matrices: Their products stand outside loops.
        observe: Runs the data.
    """
    sources = [
        tuple(dict.fromkeys((x.data.name or "", _turned(x)) for x in shared.products))
        for shared in matrices
    ]
    found = {
        source: Moments(shared.storage.matrix().shape[1])
        for shared, source in zip(matrices, sources, strict=True)
    }
    tensors = list(dict.fromkeys(name for source in sources for name, _ in source))
    for seen in observe(tensors):
        for source, moments in found.items():
            for name, turned in source:
                if seen[name].size:  # empty in a run that takes another branch
                    moments.add(seen[name].T if turned else seen[name])
    means = {source: moments.mean() for source, moments in found.items()}
    return [means[source] for source in sources]
