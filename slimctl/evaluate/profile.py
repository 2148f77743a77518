"""Where the time of a run goes: onnxruntime's profile, matched to nodes.

The profiler names operators of the graph that onnxruntime made, not of the model. That graph is
saved by the same session; it runs its nodes in the order in which it stores them, so the k-th
entry of a run belongs to the k-th node. Where the kinds do not agree in every place (bodies of If,
Loop and Scan have entries of their own) names decide instead, and what has no counterpart is left
out of the list, its time being named.

Profiling itself costs about a microsecond per node: sums of small nodes exceed the latency that is
measured without it.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from slimctl.core.contract import Feeds
from slimctl.graph.cost import NodeCost, stated_costs
from slimctl.graph.load import load_model
from slimctl.graph.session import Level, Recording, record

RUNS = 20
WARM_UP = 5
"""First runs, which fill caches and memory pools and are not counted."""

_SUFFIX = "_kernel_time"
_RUN = "model_run"


class Event(NamedTuple):
    """One operator at work.

    Attributes:
        name: Of the node, or its kind and number where it has no name.
        op_type: Operator.
        seconds: Time in its kernel.
        outputs: Type, as onnxruntime writes it, and shape of each output.
    """

    name: str
    op_type: str
    seconds: float
    outputs: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class NodeTime:
    """One node of the graph that runs.

    Attributes:
        name: Its name; its kind and number where it has none.
        seconds: Median time in its kernel.
        share: Of the sum of these medians over all nodes.
        cost: What it computes and moves.
        covers: Nodes of the model that it computes, as far as tensor names tell.
        node: The node itself, with its neighbors.
    """

    name: str
    seconds: float
    share: float
    cost: NodeCost
    covers: tuple[str, ...]
    node: ir.Node

    @property
    def op_type(self) -> str:
        """Operator."""
        return self.node.op_type

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "name": self.name,
            "op_type": self.op_type,
            "domain": self.node.domain,
            "seconds": self.seconds,
            "share": self.share,
            "macs": self.cost.macs,
            "weight_bytes": self.cost.weight_bytes,
            "activation_bytes": self.cost.activation_bytes,
            "covers": list(self.covers),
        }


@dataclass(frozen=True)
class Profile:
    """A model's profile.

    Attributes:
        nodes: In the order in which they run.
        runs: Runs that the medians are of.
        kernels: Seconds in all kernels of one run.
        run: Seconds of one run from call to return, median; the rest is what the runtime needs
            around its kernels.
        unmatched: Seconds per run of operators that no node was found for.
    """

    nodes: tuple[NodeTime, ...]
    runs: int
    kernels: float
    run: float
    unmatched: float


def profile(
    model: ir.Model | Path,
    feeds: Feeds,
    *,
    threads: int = 0,
    runs: int = RUNS,
    level: Level = Level.ALL,
) -> Profile:
    """Measures every operator of a model.

    Args:
        model: A model in memory, or a file.
        feeds: Inputs of a run.
        threads: Threads of onnxruntime; 0 for all cores.
        runs: Runs that count; :data:`WARM_UP` more come before.
        level: Graph optimizations of onnxruntime.

    Raises:
        ModelExecutionError: onnxruntime refuses the model or the inputs.
    """
    original = load_model(model) if isinstance(model, Path) else model
    recording = _recorded(model, feeds, WARM_UP + runs, threads, level)
    return read_profile(recording, original, skip=WARM_UP)


def _recorded(
    model: ir.Model | Path, feeds: Feeds, runs: int, threads: int, level: Level = Level.ALL
) -> Recording:
    recording = record(model, feeds, runs=runs, threads=threads, level=level)
    for value in recording.model.graph.inputs:
        value.shape = ir.Shape(feeds[value.name or ""].shape)
    return recording


class Turns(NamedTuple):
    """The profile of one of several models that took turns.

    Attributes:
        whole: Of all runs.
        halves: Of those before and behind the other models' runs.
    """

    whole: Profile
    halves: tuple[Profile, Profile]


def profile_in_turns(
    models: Sequence[Path], feeds: Feeds, *, threads: int = 0, runs: int = RUNS
) -> list[Turns]:
    """Measures every operator of several models in the order A B B A, against the machine's drift.

    Args:
        models: Files.
        feeds: Inputs of a run of each.
        threads: Threads of onnxruntime; 0 for all cores.
        runs: Runs of each that count, one half in each turn.

    Raises:
        ModelExecutionError: onnxruntime refuses a model or the inputs.
    """
    half = max(runs // 2, 1)

    def turn(model: Path) -> Recording:
        recording = _recorded(model, feeds, WARM_UP + half, threads)
        return recording._replace(events=_behind_runs(recording.events, WARM_UP))

    first = [turn(model) for model in models]
    second = [turn(model) for model in reversed(models)][::-1]
    return [
        _joined(load_model(model), *pair)
        for model, *pair in zip(models, first, second, strict=True)
    ]


def _joined(original: ir.Model, first: Recording, second: Recording) -> Turns:
    both = first._replace(events=[*first.events, *second.events])
    halves = read_profile(first, original), read_profile(second, original)
    return Turns(read_profile(both, original), halves)


def _behind_runs(entries: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The entries without those of the first runs."""
    ends = [index for index, entry in enumerate(entries) if entry["name"] == _RUN]
    return list(entries[ends[count - 1] + 1 :])


def read_profile(recording: Recording, original: ir.Model, *, skip: int = 0) -> Profile:
    """Makes sense of a recording.

    Args:
        recording: From :func:`slimctl.graph.session.record`. Its tensors get the shapes of the run;
            those of its inputs are to be set.
        original: The model as it was before onnxruntime rewrote it.
        skip: Runs at the beginning that do not count.
    """
    nodes = list(recording.model.graph)
    runs = list(_runs(recording.events))[skip:]
    places = _places(nodes, runs[0].events)
    found = sorted(set(places.values()))
    times = np.array([_by_place(run.events, places, len(nodes)) for run in runs])
    medians = np.median(times, axis=0) if len(times) else np.zeros(len(nodes))
    _state_shapes(nodes, runs[0].events, places)
    costs = stated_costs(recording.model)
    covered = _covered(original, nodes)
    total = float(medians.sum())
    everything = float(np.median([sum(e.seconds for e in run.events) for run in runs]))
    return Profile(
        nodes=tuple(
            NodeTime(
                name=nodes[place].name or f"{nodes[place].op_type}_{place}",
                seconds=float(medians[place]),
                share=float(medians[place] / total) if total > 0 else 0.0,
                cost=costs[place],
                covers=covered[place],
                node=nodes[place],
            )
            for place in found
        ),
        runs=len(runs),
        kernels=everything,
        run=float(np.median([run.seconds for run in runs])),
        unmatched=max(everything - total, 0.0) if len(found) < len(nodes) else 0.0,
    )


class _Run(NamedTuple):
    events: list[Event]
    seconds: float


def _runs(entries: Sequence[Mapping[str, Any]]) -> Iterator[_Run]:
    """Entries by run: the entry of a run comes behind those of its operators."""
    events: list[Event] = []
    for entry in entries:
        if entry["name"].endswith(_SUFFIX):
            events.append(_event(entry))
        elif entry["name"] == _RUN:
            yield _Run(events, entry["dur"] * 1e-6)
            events = []


def _event(entry: Mapping[str, Any]) -> Event:
    listed = entry["args"].get("output_type_shape", [])
    return Event(
        name=entry["name"].removesuffix(_SUFFIX),
        op_type=entry["args"]["op_name"],
        seconds=entry["dur"] * 1e-6,
        outputs=tuple((kind, tuple(shape)) for item in listed for kind, shape in item.items()),
    )


def _places(nodes: Sequence[ir.Node], events: Sequence[Event]) -> dict[int, int]:
    """From the number of an event within a run to the number of its node."""
    if [event.op_type for event in events] == [node.op_type for node in nodes]:
        return {index: index for index in range(len(nodes))}
    named = {(node.name, node.op_type): place for place, node in enumerate(nodes) if node.name}
    keys = ((index, (event.name, event.op_type)) for index, event in enumerate(events))
    return {index: named[key] for index, key in keys if key in named}


def _by_place(events: Sequence[Event], places: Mapping[int, int], count: int) -> list[float]:
    """Seconds of each node; one that ran several times gets the sum."""
    seconds = [0.0] * count
    for index, event in enumerate(events):
        if index in places:
            seconds[places[index]] += event.seconds
    return seconds


def _state_shapes(
    nodes: Sequence[ir.Node], events: Sequence[Event], places: Mapping[int, int]
) -> None:
    """Writes types and shapes of the run onto the tensors."""
    for index, place in places.items():
        present = [value for value in nodes[place].outputs if value.name]
        for value, (kind, shape) in zip(present, events[index].outputs, strict=False):
            value.shape = ir.Shape(shape)
            if kind in _TYPES:
                value.dtype = _TYPES[kind]


_TYPES = {kind.name.lower(): kind for kind in ir.DataType if kind is not ir.DataType.UNDEFINED}
"""Element types as onnxruntime writes them."""


def _covered(original: ir.Model, nodes: Sequence[ir.Node]) -> list[tuple[str, ...]]:
    """For each node that runs, the nodes of the model whose work it does.

    They are what lies between the tensors that both graphs have: behind a tensor that the node
    makes, back to those that other nodes make. A node that only moves such a tensor into another
    layout covers nothing.
    """
    values = {value.name or "": value for node in original.graph for value in node.outputs}
    named = {node.name or "": node for node in original.graph}
    known: dict[ir.Value, int] = {}
    for place, node in enumerate(nodes):
        for value in _made(node, values, named):
            known.setdefault(value, place)
    made: list[list[ir.Value]] = [[] for _ in nodes]
    for value, place in known.items():
        made[place].append(value)
    return [_behind(tensors, known.keys()) for tensors in made]


_BLOCKED = "_nchwc"
_RENAMED = re.compile(r"_token_\d+$")


def _made(
    node: ir.Node, values: Mapping[str, ir.Value], named: Mapping[str, ir.Node]
) -> list[ir.Value]:
    """Tensors of the model that a node makes, perhaps in another layout.

    onnxruntime 1.32 names a blocked convolution by its output, and other nodes that it moves to
    another layout by their old name and a number; the outputs of both get new names.
    """
    direct = [values[v.name] for v in node.outputs if v.name and v.name in values]
    name = node.name or ""
    if direct or not name:
        return direct
    blocked = values.get(name.removesuffix(_BLOCKED))
    if blocked is not None:
        return [_behind_activation(node, blocked)]
    old = named.get(_RENAMED.sub("", name))
    return list(old.outputs) if old is not None else []


def _behind_activation(node: ir.Node, value: ir.Value) -> ir.Value:
    """The output of the activation that the node computes too; the tensor itself where none."""
    attribute = node.attributes.get("activation")
    wanted = attribute.as_string() if attribute is not None else ""
    found = [use.outputs[0] for use in value.consumers() if use.op_type == wanted]
    return found[0] if found else value


def _behind(values: Sequence[ir.Value], known: Container[ir.Value]) -> tuple[str, ...]:
    found: dict[ir.Node, None] = {}
    waiting = list(values)
    while waiting:
        maker = waiting.pop().producer()
        if maker is not None and maker not in found:
            found[maker] = None
            waiting += [value for value in maker.inputs if value is not None and value not in known]
    return tuple(node.name or node.op_type for node in reversed(found))
