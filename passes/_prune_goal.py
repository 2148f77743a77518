"""How far to prune: as far as a target asks, or as the metric allows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Context, Feeds
from slimctl.core.errors import OptionError
from slimctl.evaluate.benchmark import benchmark
from slimctl.graph.channels import Channels
from slimctl.graph.cost import ModelCost, model_cost, node_costs
from slimctl.graph.edit import const_tensor, dimensions
from slimctl.graph.save import initializer_values

Goal = Literal["macs", "size", "latency", "metric"]
Ids = NDArray[np.int64]

TRIES = 12
"""Halvings of the interval of shares: less than one channel of a few thousand."""

_LATENCY_ROUNDS = 12
_LATENCY_SECONDS = 3.0

MEASURED_TRIES = 7
"""Halvings where every try builds and measures a model: 1 % of all channels."""

_OPEN_SIZE = 64
"""What an open dimension other than the batch counts as. It scales the multiply-accumulates of most
layers alike, so that their ratio hardly depends on it."""


def cost_of(model: ir.Model) -> ModelCost:
    """Cost at one sample; open dimensions count as :data:`_OPEN_SIZE`."""
    return model_cost(model, open_sizes(model))


def open_sizes(model: ir.Model) -> dict[str, int]:
    """Sizes for the open dimensions of the inputs."""
    sizes: dict[str, int] = {}
    for value in model.graph.inputs:
        for axis, size in enumerate(dimensions(value.shape) or ()):
            if not isinstance(size, int):
                sizes[size or f"{value.name}[{axis}]"] = _OPEN_SIZE if axis else 1
    return sizes


class _Part(NamedTuple):
    """Something that costs in proportion to the lengths of some axes.

    Attributes:
        cost: Of all of it.
        axes: The units along each axis that can shrink.
    """

    cost: float
    axes: tuple[Ids, ...]


class Costs:
    """What a model costs when units are removed, without removing them.

    A layer's multiply-accumulates are proportional to the length of each axis of its weight, and so
    are the weight's bytes.
    """

    def __init__(self, model: ir.Model, channels: Channels, goal: Goal) -> None:
        self._channels = channels
        axes: dict[ir.Value, dict[int, Ids]] = defaultdict(dict)
        layers: dict[str, ir.Value] = {}
        for member in channels.members:
            axes[member.value][member.axis] = channels.units.find(member.ids)
            if member.place == 1:
                layers[member.node.name or ""] = member.value
        if goal != "size":
            costs = {
                cost.name: float(cost.macs or 0) for cost in node_costs(model, open_sizes(model))
            }
            self._parts = [
                _Part(costs[name], tuple(axes[value].values()))
                for name, value in layers.items()
                if costs.get(name)
            ]
            self.total = sum(costs.values())
        else:
            self._parts = [_Part(_bytes(v), tuple(along.values())) for v, along in axes.items()]
            self.total = float(sum(_bytes(value) for value in initializer_values(model)))
        self._fixed = self.total - sum(part.cost for part in self._parts)

    def without(self, gone: Ids) -> float:
        """Cost once these units are gone."""
        removed = np.zeros(len(self._channels.units) + 1, bool)  # the last stands for FIXED
        removed[self._channels.units.find(gone)] = True
        left = self._fixed
        for part in self._parts:
            shares = [1.0 - float(np.mean(removed[ids])) for ids in part.axes]
            left += part.cost * float(np.prod(shares))
        return left

    def saved_by_each(self) -> NDArray[np.float64]:
        """What removing each unit alone saves, by unit."""
        saved = np.zeros(len(self._channels.units) + 1)
        for part in self._parts:
            for ids in part.axes:
                np.add.at(saved, ids, part.cost / ids.size)
        return saved[:-1]


def _bytes(value: ir.Value) -> float:
    tensor = const_tensor(value)
    return 0.0 if tensor is None else float(tensor.nbytes)


def least_share(
    choose: Callable[[float], Mapping[int, Ids]],
    cost: Callable[[Ids], float],
    wanted: float,
    tries: int = TRIES,
) -> float | None:
    """The smallest share of units whose removal brings the cost down to ``wanted``.

    Args:
        choose: The units to remove for a share, in parts.
        cost: What is left without these units.
        wanted: In the unit of the cost.
        tries: How often the interval of shares is halved.

    Returns:
        None when removing all that can go does not suffice.
    """

    def left(share: float) -> float:
        return cost(joined(choose(share)))

    if left(1.0) > wanted:
        return None
    low, high = 0.0, 1.0
    for _ in range(tries):
        middle = (low + high) / 2
        low, high = (low, middle) if left(middle) <= wanted else (middle, high)
    return high


def most_share(
    choose: Callable[[float], Mapping[int, Ids]],
    drop: Callable[[Ids], float],
    allowed: float,
    tries: int,
) -> float:
    """The largest share of units whose removal costs no more than ``allowed``.

    Args:
        choose: The units to remove for a share, in parts.
        drop: What removing these units costs.
        allowed: In the unit of ``drop``.
        tries: How often that may be measured.

    Returns:
        0 when nothing can go.
    """
    low, high = 0.0, 1.0
    tried: dict[int, float] = {}  # neighboring shares often round to the same channels
    for _ in range(tries):
        middle = (low + high) / 2
        gone = joined(choose(middle))
        if gone.size not in tried:
            tried[gone.size] = drop(gone)
        low, high = (middle, high) if tried[gone.size] <= allowed else (low, middle)
    return low


def example_of(context: Context) -> Feeds:
    """Inputs to measure time with.

    Raises:
        OptionError: There are no data, and no random inputs were found that the model takes.
    """
    feeds = context.example()
    if feeds is None:
        raise OptionError(
            "--target-latency",
            "No random inputs were found that this model takes",
            fix="give --calib SOURCE",
        )
    return feeds


class Latency:
    """Time of one run in onnxruntime, one thread, in turns with the original."""

    def __init__(self, original: ir.Model, feeds: Feeds) -> None:
        self._original = original
        self._feeds = feeds

    def __call__(self, model: ir.Model) -> float:
        """Median time relative to the original's."""
        before, after = self.both(model)
        return after / before

    def both(self, model: ir.Model) -> tuple[float, float]:
        """Median milliseconds of the original and of a model."""
        before, after = benchmark(
            [self._original, model],
            self._feeds,
            threads=1,
            rounds=_LATENCY_ROUNDS,
            max_seconds=_LATENCY_SECONDS,
            memory=False,
        )
        return before.p50, after.p50


def joined(chosen: Mapping[int, Ids]) -> Ids:
    """All units of a choice."""
    return np.concatenate([*chosen.values(), np.zeros(0, np.int64)])
