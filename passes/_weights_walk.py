"""Runs data through a model whose layers are changed from front to back, each part of it twice.

Layers are changed a portion at a time, and the next portion is to see what those before really
compute. What every batch holds just in front of a portion is kept: from there the data run through
the portion, which is changed by then, up to the inputs of the next one. Starting anew each time
would run the first layers as often as there are portions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import onnx_ir as ir

from slimctl.core.contract import Context, Feeds
from slimctl.graph.cuts import values_read
from slimctl.graph.edit import const_tensor
from slimctl.graph.restart import restarted

_MOST_KEPT: Final = 1 << 28
"""Bytes that are kept of all batches together; with more the data run from the start again."""


class Walk:
    """State between two portions.

    Args:
        model: Is changed between two calls, but only behind the nodes of the latest call.
        context: Gives data.
    """

    def __init__(self, model: ir.Model, context: Context) -> None:
        self._model, self._context = model, context
        self._kept: list[Feeds] = []  # empty: from the start

    def activations(self, tensors: Sequence[str], nodes: Sequence[ir.Node]) -> Iterator[Feeds]:
        """What tensors hold, for one batch after another.

        Args:
            tensors: Names, as :meth:`Context.activations` takes them.
            nodes: Those that are changed next; nothing in front of all of them will be.
        """
        front = frontier(self._model, nodes)
        kept, size = [], 0
        for seen in self._runs(list(dict.fromkeys((*tensors, *front)))):
            yield {name: seen[name] for name in tensors}
            size += sum(seen[name].nbytes for name in front)
            if size <= _MOST_KEPT:
                # A copy: an output keeps all memory of the session that made it.
                kept.append({name: seen[name].copy() for name in front})
        self._kept = kept if front and size <= _MOST_KEPT else []

    def _runs(self, tensors: Sequence[str]) -> Iterator[Feeds]:
        values = ir.convenience.create_value_mapping(self._model.graph, include_subgraphs=False)
        kept = self._kept if all(name in values for name in tensors) else []
        if not kept:
            yield from self._context.activations(self._model, tensors)
            return
        kinds = {name: ir.DataType.from_numpy(array.dtype) for name, array in kept[0].items()}
        computed = [name for name in tensors if name not in kinds]
        if not computed:
            yield from kept
            return
        begun = restarted(self._model, kinds, computed)
        feeds = [{given: batch[name] for name, given in begun.inputs.items()} for batch in kept]
        found = self._context.activations(begun.model, computed, feeds)
        for batch, made in zip(kept, found, strict=True):
            yield {**batch, **made}


def frontier(model: ir.Model, nodes: Sequence[ir.Node]) -> list[str]:
    """Tensors in front of the first of some nodes from which everything behind can be computed.

    Args:
        model: Its nodes are in topological order.
        nodes: Of its main graph.

    Returns:
        Names, inputs of the model included; none when a node stands in a body.
    """
    graph = model.graph
    if any(node.graph is not graph for node in nodes):
        return []
    ordered = list(graph)
    first = min(map(ordered.index, nodes))
    behind = {value for node in ordered[first:] for value in values_read(node)}
    made = (value for node in ordered[:first] for value in node.outputs)
    front = [value for value in (*graph.inputs, *made) if value in behind]
    return [value.name or "" for value in front if const_tensor(value) is None]
