"""Refits the layers of a pruned model so that they compute what the original computed.

Layer by layer, in the order of the graph, weights and bias become the least-squares solution

    min ||Y - X W' - b'||^2 + ridge ||W' - W||^2,

with ``Y`` what the layer writes in the original model and ``X`` what it reads in the pruned one
(He et al., "Channel Pruning for Accelerating Very Deep Neural Networks", ICCV 2017, equation 5 and
section 3.2). Errors of the layers before are in ``X``, so each layer also makes good for them.
Where a layer's output is only added to something, the sum is what is fitted (section 3.2.2 there).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Context, Feeds, Skipped
from slimctl.graph.edit import NameScope, const_array, const_tensor, remove_dead
from slimctl.passes._frontier import BUDGET, Frontier, alive
from slimctl.passes._layers import is_linear
from slimctl.passes._linear_samples import LinearLayer, linear_layer
from slimctl.passes._linear_write import Bias, Solution, Writer

_ROWS = 4096
"""Positions per layer, at least: enough for 1,000 inputs, and 10 MB for as many channels."""

_ROWS_PER_INPUT = 4
_MOST_ROWS = 16384
_MOST_INPUTS = 4608
"""A 3 x 3 kernel over 512 channels; its normal equations take 170 MB."""

_FEWEST_ROWS = 8

_GROWTH = 2
"""The frontier may grow by about this factor on its way through a network."""

_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Tried strengths of the ridge, relative to the mean variance of the inputs."""


class Kept(NamedTuple):
    """What is left of a layer's output.

    Attributes:
        output: Name of the tensor in the original model.
        channels: Indices of the channels that stayed.
    """

    output: str
    channels: NDArray[np.int64]


@dataclass
class Reconstruction:
    """What came of it.

    Attributes:
        explained: By layer, the share of the squared error of its output that went, on positions
            that the solution had not seen.
        skipped: Layers left as they were.
    """

    explained: dict[str, float] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)


@dataclass
class _Job:
    """One layer to refit."""

    layer: LinearLayer
    position: int
    kept: Kept
    partner: ir.Value | None
    """What is added to the output, if the output is used for nothing else."""
    total: str
    """Name of the sum, in the original."""


def reconstruct(
    model: ir.Model, original: ir.Model, kept: Mapping[str, Kept], context: Context
) -> Reconstruction:
    """Refits every layer that a removal changed, or that reads what changed.

    Args:
        model: Pruned; changed in place.
        original: The model before.
        kept: By node name.
        context: Gives the data.
    """
    result = Reconstruction()
    jobs = _jobs(model, original, kept, result)
    if not jobs:
        return result
    frontier = _start(model, jobs[0], context)
    samples = _original_rows(original, jobs, len(frontier.batches), context)
    writer = Writer(NameScope(model))
    progress = context.progress.track(iter(jobs), total=len(jobs), label="refitting layers")
    for job in progress:
        frontier.move(job.position)
        x, y = _paired(job, samples[job.layer.name], frontier)
        _refit(job, x, y, writer, result)
    remove_dead(model)  # the weights before
    return result


def _start(model: ir.Model, job: _Job, context: Context) -> Frontier:
    """The frontier in front of the first layer, with as many samples as may be kept."""
    batches: list[Feeds] = []
    size = 0
    for found in context.activations(model, alive(model, job.position)):
        batches.append(found)
        size += sum(array.nbytes for array in found.values())
        if size * _GROWTH > BUDGET:
            break
    return Frontier(model, job.position, batches)


def _jobs(
    model: ir.Model, original: ir.Model, kept: Mapping[str, Kept], result: Reconstruction
) -> list[_Job]:
    """Layers behind the first removal, in order."""
    known = {value.name for node in original.graph for value in node.outputs}
    shapes = _widths(original)
    changed: set[ir.Value] = set()
    jobs: list[_Job] = []
    computed = {value.name for value in model.graph.inputs}
    before = {node.name: _computed_inputs(node) for node in original.graph}
    for position, node in enumerate(model.graph):
        computed.update(value.name for value in node.outputs)
        name = node.name or ""
        rewired = _computed_inputs(node) != before.get(node.name, _computed_inputs(node))
        touched = rewired or any(value in changed for value in node.inputs if value is not None)
        array = const_array(node.inputs[1]) if name in kept else None
        if touched or (array is not None and array.shape != shapes.get(name)):
            changed.update(node.outputs)
        if not touched or name not in kept:
            continue
        job = _job((position, node), kept[name], known, computed)
        if isinstance(job, str):
            result.skipped.append(Skipped(name, f"not refitted: {job}"))
        else:
            jobs.append(job)
    return jobs


def _computed_inputs(node: ir.Node) -> list[str | None]:
    """Names of what a node reads, but for constants."""
    return [value.name for value in node.inputs if value is not None and not _is_constant(value)]


def _is_constant(value: ir.Value) -> bool:
    return const_tensor(value) is not None


def _widths(original: ir.Model) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of linear layers, by node name."""
    found: dict[str, tuple[int, ...]] = {}
    for node in original.graph:
        array = const_array(node.inputs[1]) if is_linear(node) and len(node.inputs) > 1 else None
        if array is not None:
            found[node.name or ""] = array.shape
    return found


def _job(
    place: tuple[int, ir.Node], kept: Kept, known: set[str | None], computed: set[str | None]
) -> _Job | str:
    """How to refit a layer, or why not."""
    position, node = place
    layer = linear_layer(node)
    if isinstance(layer, str):
        return layer
    if layer.matrix().shape[2] > _MOST_INPUTS:
        return "too many inputs for normal equations"
    if kept.output not in known:
        return "the original has no such output"
    output = Bias(layer).output
    uses = list(output.uses())
    if len(uses) == 1 and uses[0].node.op_type == "Add" and not output.is_graph_output():
        partner = uses[0].node.inputs[1 - uses[0].idx]
        total = uses[0].node.outputs[0].name or ""
        there = partner is not None and partner.name in computed
        same = there and partner is not None and partner.shape == output.shape
        if same and const_array(partner) is None and total in known:
            return _Job(layer, position, kept, partner, total)
    # The Add of a bias that the removal itself put there has no counterpart in the original.
    own = output.name if output.name in known else kept.output
    return _Job(layer, position, kept, None, own or "")


# rows


class _Rows(NamedTuple):
    positions: list[NDArray[np.int64]]
    targets: list[NDArray[np.float32]]


def _original_rows(
    original: ir.Model, jobs: Sequence[_Job], batches: int, context: Context
) -> dict[str, _Rows]:
    """What the original computes at the positions that are looked at; one pass over the data."""
    rows = {job.layer.name: _Rows([], []) for job in jobs}
    tensors = list(dict.fromkeys(job.total for job in jobs))
    for index, found in enumerate(islice(context.activations(original, tensors), batches)):
        for job in jobs:
            y = found[job.total]
            inputs = job.layer.matrix().shape[2]
            wanted = min(max(_ROWS, _ROWS_PER_INPUT * inputs), _MOST_ROWS)
            places = job.layer.positions(y.shape, -(-wanted // batches), (context.seed, index))
            rows[job.layer.name].positions.append(places)
            written = _all_channels(job.layer, y, places)
            rows[job.layer.name].targets.append(written[:, job.kept.channels])
    return rows


def _all_channels(
    layer: LinearLayer, y: NDArray[np.float32], places: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Outputs at positions over all channels, [positions, channels]."""
    last = layer.layer.node.op_type != "Conv"
    rows: NDArray[np.float32] = (y if last else np.moveaxis(y, 1, -1))[tuple(places.T)]
    return rows.astype(np.float32, copy=False)


def _refit(
    job: _Job,
    x: NDArray[np.float32],
    y: NDArray[np.float32],
    writer: Writer,
    result: Reconstruction,
) -> None:
    """Solves for one layer; x [rows, groups, inputs], y [rows, groups, outputs]."""
    bias = Bias(job.layer)
    finite = np.isfinite(x).all(axis=(1, 2)) & np.isfinite(y).all(axis=(1, 2))
    if np.count_nonzero(finite) < _FEWEST_ROWS:
        result.skipped.append(Skipped(job.layer.name, "not refitted: too few finite values"))
        return
    before = job.layer.matrix()
    solution, gain = _solve(
        (x[finite], y[finite]), before, bias.current(before.shape[:2]), free=bias.free
    )
    if gain <= 0:
        result.skipped.append(Skipped(job.layer.name, "not refitted: it does not help"))
        return
    result.explained[job.layer.name] = gain
    writer.write(job.layer, solution, bias)


def _paired(
    job: _Job, rows: _Rows, frontier: Frontier
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Inputs in the pruned model and targets: [rows, groups, inputs], [rows, groups, outputs]."""
    partner = "" if job.partner is None else job.partner.name or ""
    inputs: list[NDArray[np.float32]] = []
    targets: list[NDArray[np.float32]] = []
    for index, found in enumerate(frontier.batches):
        places = rows.positions[index]
        inputs.append(job.layer.read(found[job.layer.data], places))
        target = rows.targets[index]
        if partner in found:
            target = target - _all_channels(job.layer, found[partner], places)
        targets.append(target.reshape(len(places), job.layer.groups, -1))
    return np.concatenate(inputs), np.concatenate(targets)


# solving


def _solve(
    rows: tuple[NDArray[np.float32], NDArray[np.float32]],
    weight: NDArray[np.float64],
    bias: NDArray[np.float64],
    *,
    free: bool,
) -> tuple[Solution, float]:
    """The best ridge by what one half of the rows says about the other; then both halves.

    Returns:
        The solution, and the share of the squared error that it removed on rows it did not see.
    """
    x, y = rows
    half = np.arange(len(x)) % 2 == 0
    seen, unseen = _Equations(x[half], y[half]), (x[~half], y[~half])
    base = _error(unseen, Solution(weight, bias))
    errors = {ridge: _error(unseen, seen.solve(weight, bias, ridge, free)) for ridge in _RIDGES}
    ridge = min(errors, key=lambda key: errors[key])
    gain = 1.0 - errors[ridge] / base if base > 0 else 0.0
    return _Equations(x, y).solve(weight, bias, ridge, free), gain


def _error(rows: tuple[NDArray[np.float32], NDArray[np.float32]], fit: Solution) -> float:
    x, y = rows
    found = np.einsum("pgi,goi->pgo", x, fit.matrix.astype(np.float32), optimize=True)
    return float(np.sum((y - found - fit.bias.astype(np.float32)) ** 2, dtype=np.float64))


class _Equations:
    """Normal equations of one layer, around the means."""

    def __init__(self, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        self.mean_x = x.mean(axis=0, dtype=np.float64)  # [groups, inputs]
        self.mean_y = y.mean(axis=0, dtype=np.float64)
        self.raw_x, self.raw_y, self.count = x, y, len(x)
        self._centered: dict[bool, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}

    def _moments(self, centered: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """E[x x^T] [groups, inputs, inputs] and E[x y^T] [groups, inputs, outputs]."""
        if centered not in self._centered:
            x = np.moveaxis(self.raw_x, 1, 0)  # [groups, rows, inputs]
            y = np.moveaxis(self.raw_y, 1, 0)
            if centered:
                x = x - self.mean_x[:, None].astype(np.float32)
                y = y - self.mean_y[:, None].astype(np.float32)
            across = np.swapaxes(x, 1, 2)
            self._centered[centered] = (
                (across @ x).astype(np.float64) / self.count,
                (across @ y).astype(np.float64) / self.count,
            )
        return self._centered[centered]

    def solve(
        self, weight: NDArray[np.float64], bias: NDArray[np.float64], ridge: float, free: bool
    ) -> Solution:
        """Weights and bias; the bias stays where the layer has none."""
        xx, xy = self._moments(free)
        if not free:
            xy = xy - self.mean_x[:, :, None] * bias[:, None, :]
        inputs = xx.shape[1]
        strength = ridge * np.trace(xx, axis1=1, axis2=2) / inputs + 1e-12
        system = xx + strength[:, None, None] * np.eye(inputs)
        rest = xy - xx @ np.swapaxes(weight, 1, 2)
        matrix = weight + np.swapaxes(np.linalg.solve(system, rest), 1, 2)
        if not free:
            return Solution(matrix, bias)
        return Solution(matrix, self.mean_y - np.einsum("goi,gi->go", matrix, self.mean_x))
