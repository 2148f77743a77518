"""Runs a model piece by piece, so that its layers can be changed one after the other.

What is alive at one place in the order of the nodes (the frontier) is kept for all samples; the
next place is computed from it. A model is run once in all, however many places are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from slimctl.core.contract import Feeds
from slimctl.graph.edit import clone_model, remove_dead
from slimctl.graph.session import open_session, run

BUDGET = 384 << 20
"""Bytes that the frontier of all samples may take."""


class Frontier:
    """Values that are alive in front of one node, for every batch.

    Args:
        model: Its nodes stay where they are; their weights may change between moves, as far as
            they lie behind the frontier.
        position: Index of the node.
        batches: The values of :func:`alive` there, one batch after another.
    """

    def __init__(self, model: ir.Model, position: int, batches: Iterable[Feeds]) -> None:
        self._model = model
        self._nodes = list(model.graph)
        self._readers = _last_readers(model)
        self.position = position
        self.batches = list(batches)

    def move(self, position: int) -> None:
        """Computes what is alive in front of a later node."""
        wanted = alive(self._model, position, self._readers)
        have = set(self.batches[0]) if self.batches else set()
        missing = [name for name in wanted if name not in have]
        if missing and self.batches:
            session = open_session(_between(self._model, sorted(have), missing))
            needed = {value.name for value in session.get_inputs()}
            for index, batch in enumerate(self.batches):
                found = run(session, {k: v for k, v in batch.items() if k in needed})
                self.batches[index] = {n: found[n] if n in found else batch[n] for n in wanted}
        else:
            self.batches = [{name: batch[name] for name in wanted} for batch in self.batches]
        self.position = position


def alive(model: ir.Model, position: int, readers: dict[str, int] | None = None) -> list[str]:
    """Names of values that are computed before a node of the main graph and read by it or later.

    Args:
        model: Sorted topologically.
        position: Index of the node.
        readers: Last reader of each value, if known already.
    """
    last = _last_readers(model) if readers is None else readers
    before = [value.name or "" for value in model.graph.inputs]
    for node in list(model.graph)[:position]:
        before.extend(value.name or "" for value in node.outputs)
    return [name for name in before if last.get(name, -1) >= position]


def _last_readers(model: ir.Model) -> dict[str, int]:
    """Index of the last node of the main graph that reads a value, itself or in its bodies."""
    last: dict[str, int] = {}
    for index, node in enumerate(model.graph):
        for value in _reads(node):
            last[value.name or ""] = index
    return last


def _reads(node: ir.Node) -> list[ir.Value]:
    found = [value for value in node.inputs if value is not None]
    for attribute in node.attributes.values():
        if not attribute.is_ref() and attribute.type == ir.AttributeType.GRAPH:
            for inner in attribute.as_graph().all_nodes():
                found.extend(value for value in inner.inputs if value is not None)
    return found


def _between(model: ir.Model, given: Sequence[str], wanted: Sequence[str]) -> ir.Model:
    """A clone that computes some values from others."""
    clone = clone_model(model)
    values = ir.convenience.create_value_mapping(clone.graph, include_subgraphs=False)
    graph = clone.graph
    graph.outputs.clear()
    graph.outputs.extend(values[name] for name in wanted)
    inputs: list[ir.Value] = []
    for name in given:
        old = values[name]
        new = ir.Value(name=name, type=old.type, shape=None)
        old.name = f"{name}:computed"
        for use in list(old.uses()):
            use.node.replace_input_with(use.idx, new)
        inputs.append(new)
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    remove_dead(clone)
    read = {value.name for node in clone.graph.all_nodes() for value in node.inputs if value}
    kept = [value for value in inputs if value.name in read]
    graph.inputs.clear()
    graph.inputs.extend(kept)
    return clone
