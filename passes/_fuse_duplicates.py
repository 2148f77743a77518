"""Stores equal constants once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from hashlib import sha256
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from slimctl.graph.edit import all_graphs, const_array
from slimctl.passes._fuse_graph import Workbench

_ACROSS_GRAPHS_BYTES = 1024
"""Below, equal constants of different subgraphs stay where they are: a graph of which shapes and
axes are constants of its own is easier to optimize for onnxruntime."""

_SAMPLES = 16
"""Elements compared before whole tensors are."""

Key: TypeAlias = Callable[[ir.Value], Hashable]


def merge_duplicates(bench: Workbench) -> None:
    """Merges initializers with equal type, shape and bytes, first one wins."""
    for graph in all_graphs(bench.model):
        for group in _equal(graph.initializers.values()):
            _merge(bench, group)
    initializers = [v for graph in all_graphs(bench.model) for v in graph.initializers.values()]
    for group in _equal(value for value in initializers if _is_large(value)):
        _hoist(bench, group[0])
        _merge(bench, group)


def _is_large(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.nbytes >= _ACROSS_GRAPHS_BYTES


def _equal(values: Iterable[ir.Value]) -> Iterator[list[ir.Value]]:
    """Groups of two and more equal constants; the cheapest comparison comes first."""
    groups = [[value for value in values if _is_candidate(value)]]
    for key in (_kind, _sample, _digest):
        groups = [part for group in groups for part in _split(group, key)]
    yield from groups


def _is_candidate(value: ir.Value) -> bool:
    return (
        value.const_value is not None
        and value.const_value.dtype != ir.DataType.STRING
        and not value.is_graph_input()
        and not value.is_graph_output()
        and bool(value.uses())
    )


def _split(group: list[ir.Value], key: Key) -> Iterator[list[ir.Value]]:
    parts: dict[Hashable, list[ir.Value]] = defaultdict(list)
    for value in group:
        parts[key(value)].append(value)
    return (part for part in parts.values() if len(part) > 1)


def _kind(value: ir.Value) -> Hashable:
    tensor = value.const_value
    assert tensor is not None, "candidates have one"
    return tensor.dtype, tuple(tensor.shape)


def _sample(value: ir.Value) -> Hashable:
    array = const_array(value)
    assert array is not None, "candidates are no strings"
    flat = array.reshape(-1)
    return flat[:: max(1, flat.size // _SAMPLES)].tobytes()


def _digest(value: ir.Value) -> Hashable:
    array = const_array(value)
    assert array is not None, "candidates are no strings"
    return sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).digest()


def _hoist(bench: Workbench, value: ir.Value) -> None:
    """Moves an initializer of a subgraph to the main graph, where all subgraphs see it."""
    graph = value.graph
    if graph is None or graph is bench.model.graph:
        return
    del graph.initializers[value.name or ""]
    value.name = bench.names.fresh(value.name or "constant")
    bench.model.graph.register_initializer(value)


def _merge(bench: Workbench, group: list[ir.Value]) -> None:
    kept, *others = group
    for other in others:
        graph = other.graph
        assert graph is not None, "an initializer has a graph"
        other.replace_all_uses_with(kept)
        del graph.initializers[other.name or ""]
    bench.count("Duplicate initializer merged", len(others))
