"""Runs data through a model whose layers are changed from front to back, each part of it once.

Layers are changed a portion at a time, and the next portion is to see what those before really
compute. What every batch holds just in front of a portion is kept: from there the data run through
the portion, which is changed by then, up to the inputs of the next one. Starting anew each time
would run the first layers as often as there are portions. Where no layer of a portion reads what
another one computes, the inputs of all are known before any of them has run, and each runs once;
else they run twice, unchanged and changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import onnx_ir as ir

from slimctl.core.contract import Context, Feeds
from slimctl.graph.cuts import values_read
from slimctl.graph.edit import const_tensor
from slimctl.graph.restart import cut_out

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
        self.resumes = True
        """Whether every run so far left something to begin the next one at."""

    def activations(self, tensors: Sequence[str], nodes: Sequence[ir.Node]) -> Iterator[Feeds]:
        """What tensors hold, for one batch after another.

        Args:
            tensors: Names, as :meth:`Context.activations` takes them.
            nodes: Those that are changed next; nothing in front of all of them will be.
        """
        front = frontier(self._model, nodes)
        kept, size = [], 0
        for given, made in self._runs(list(dict.fromkeys((*tensors, *front)))):
            seen = given | made
            yield {name: seen[name] for name in tensors}
            size += sum(seen[name].nbytes for name in front)
            if size <= _MOST_KEPT:
                # A copy: an output keeps all memory of the session that made it.
                kept.append({n: given[n] if n in given else made[n].copy() for n in front})
        self._kept = kept if front and size <= _MOST_KEPT else []
        self.resumes = self.resumes and bool(self._kept)

    def _runs(self, tensors: Sequence[str]) -> Iterator[tuple[Feeds, Feeds]]:
        """What was kept of each batch, and what is computed from it."""
        values = ir.convenience.create_value_mapping(self._model.graph, include_subgraphs=False)
        kept = self._kept if all(name in values for name in tensors) else []
        if not kept:
            for made in self._context.activations(self._model, tensors):
                yield {}, made
            return
        computed = [name for name in tensors if name not in kept[0]]
        if not computed:
            for batch in kept:
                yield batch, {}
            return
        inputs = {value.name for value in self._model.graph.inputs}
        kinds = {
            name: ir.DataType.from_numpy(array.dtype)
            for name, array in kept[0].items()
            if name not in inputs
        }
        part = cut_out(self._model, kinds, computed)
        read = [value.name or "" for value in part.graph.inputs]
        feeds = ({name: batch[name] for name in read} for batch in kept)
        yield from zip(kept, self._context.activations(part, computed, feeds), strict=True)


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
    # Restored weights and the like are computed again: they are changed, and large.
    varying = dict.fromkeys(graph.inputs)
    for node in ordered[:first]:
        read = list(values_read(node))
        if any(value in varying for value in read) or not (read or _constant(node)):
            varying |= dict.fromkeys(node.outputs)
    return [value.name or "" for value in varying if value in behind]


def _constant(node: ir.Node) -> bool:
    return const_tensor(node.outputs[0]) is not None


def depths(model: ir.Model, groups: Sequence[Sequence[ir.Node]]) -> list[int]:
    """How many nodes of any group the data have passed at most when they reach each group.

    Groups of equal depth do not read what one another compute. Nodes in bodies do not count.

    Args:
        model: Its nodes are in topological order.
        groups: Of nodes; the first one of each tells.
    """
    counted = {node for group in groups for node in group}
    behind: dict[ir.Value, int] = {}
    found: dict[ir.Node, int] = {}
    for node in model.graph:
        found[node] = max((behind.get(value, 0) for value in values_read(node)), default=0)
        behind |= dict.fromkeys(node.outputs, found[node] + (node in counted))
    return [found.get(group[0], 0) for group in groups]
