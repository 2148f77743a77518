"""The proof that a removal is exact: onnxruntime gives the same for two models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from slimctl.core.contract import Feeds
from slimctl.graph.channels import (
    Channels,
    Groups,
    analyze,
    group_units,
    remove_channels,
    silence_channels,
)
from slimctl.graph.edit import (
    all_graphs,
    all_nodes,
    clone_model,
    const_array,
    interface,
    remove_dead,
)
from slimctl.graph.shapes import infer_shapes

_BATCHES = (1, 3)
_EXTENTS = (9, 12)
"""Sizes of open dimensions in the first and in the second run: batches, and everything else."""

_RELATIVE = {np.dtype(np.float64): 1e-9, np.dtype(np.float32): 2e-4, np.dtype(np.float16): 2e-2}
"""Rounding only: sums over fewer terms run in another order. float32 has 6e-8, float16 1e-3 per
operation, and a few hundred of them follow one another. Of the largest value of an output."""


@dataclass(frozen=True)
class Exactness:
    """What was removed from a model that then computed what it should.

    Attributes:
        groups: Of the original.
        gone: Units that were removed.
        before: Numbers in floating-point constants of the original.
        after: The same for the result.
        model: The result.
    """

    groups: Groups
    gone: np.ndarray
    before: int
    after: int
    model: ir.Model

    @property
    def removed(self) -> int:
        """How many units were removed."""
        return len(self.gone)

    @property
    def free(self) -> int:
        """How many units could have gone."""
        return sum(len(group.free) for group in self.groups)

    @property
    def blocked(self) -> int:
        """How many units must stay."""
        return sum(len(group.blocked) for group in self.groups)

    @property
    def reasons(self) -> set[str]:
        """Why units must stay, with the node in front."""
        return {
            f"{block.node}: {block.reason}"
            for group in self.groups
            for block in group.blocked.values()
        }

    def free_of(self, layer: str) -> int:
        """How many units of one layer could have gone."""
        return sum(len(g.free) for g in self.groups if any(n.name == layer for n in g.layers))


AssertExact = Callable[..., Exactness]


def assert_exact(
    model: onnx.ModelProto | ir.Model,
    *,
    ratio: float = 0.5,
    whole_blocks: bool = False,
    feeds: Feeds | Sequence[Feeds] | None = None,
    seed: int = 0,
    silent_outputs: bool = False,
) -> Exactness:
    """Removes channels and compares with the original in which they are silenced.

    Args:
        model: Not changed.
        ratio: Share of each group that goes, chosen at random.
        whole_blocks: See ``analyze``.
        feeds: Inputs, by default two sets of random ones, of different sizes.
        seed: Of the choice and of the inputs.
        silent_outputs: Whether outputs may be zero throughout, which proves little.
    """
    original = ir.from_proto(model) if isinstance(model, onnx.ModelProto) else model
    original = clone_model(original)
    remove_dead(original)
    pruned, silenced = clone_model(original), clone_model(original)
    channels = _analyzed(pruned, whole_blocks)
    groups = group_units(channels)
    gone = _chosen(groups, ratio, seed)
    before = _floats(original)
    remove_channels(pruned, channels, gone)
    silence_channels(_analyzed(silenced, whole_blocks), gone)
    after = _floats(pruned)
    assert interface(pruned) == interface(original)
    # Biases that constants were moved into are new; what was there before is less.
    stayed = sum(count for name, count in after.items() if name in before)
    assert (stayed < sum(before.values())) if len(gone) else (after == before), "nothing shrank"
    if _is_standard(pruned):
        onnx.checker.check_model(_proto(pruned))
    for given in [feeds] if isinstance(feeds, Mapping) else feeds or _random(original, seed):
        _compare(pruned, silenced, given, silent_outputs)
    return Exactness(groups, gone, sum(before.values()), sum(after.values()), pruned)


def _analyzed(model: ir.Model, whole_blocks: bool) -> Channels:
    infer_shapes(model)
    return analyze(model, whole_blocks=whole_blocks)


def _chosen(groups: Groups, ratio: float, seed: int) -> np.ndarray:
    """A share of each group, at random; one unit of each stays."""
    rng = np.random.default_rng(seed)
    chosen = [np.zeros(0, np.int64)]
    for group in groups:
        count = min(int(len(group.units) * ratio), len(group.units) - 1)
        chosen.append(rng.permutation(group.free)[:count])
    return np.concatenate(chosen)


def _floats(model: ir.Model) -> dict[str, int]:
    """How many numbers the constants of floating point hold, those of Constant nodes included."""
    values = [v for graph in all_graphs(model) for v in graph.initializers.values()]
    values += [v for node in all_nodes(model) if node.op_type == "Constant" for v in node.outputs]
    arrays = {value.name or "": const_array(value) for value in values}
    return {
        name: array.size
        for name, array in arrays.items()
        if array is not None and array.dtype.kind == "f" and array.size > 1
    }


def _is_standard(model: ir.Model) -> bool:
    return all(onnx.defs.has(node.op_type, node.domain) for node in all_nodes(model))


def _proto(model: ir.Model) -> onnx.ModelProto:
    return ir.to_proto(model)


def _random(model: ir.Model, seed: int) -> list[Feeds]:
    return [_feeds(model, seed + run, _BATCHES[run], _EXTENTS[run]) for run in range(2)]


def _feeds(model: ir.Model, seed: int, batch: int, extent: int) -> Feeds:
    """Random inputs; a symbol is of one size everywhere."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, np.ndarray] = {}
    sizes: dict[str, int] = {}
    for port in interface(model).inputs:
        assert port.shape is not None and port.dtype is not None, "a test states its inputs"
        shape = [
            size
            if isinstance(size, int)
            else sizes.setdefault(size or f"{port.name} {axis}", extent if axis else batch)
            for axis, size in enumerate(port.shape)
        ]
        kind = port.dtype.numpy()
        if kind.kind == "f":
            feeds[port.name] = rng.standard_normal(shape).astype(kind)
        else:
            feeds[port.name] = rng.integers(0, 2, shape).astype(kind)
    return feeds


def _compare(pruned: ir.Model, silenced: ir.Model, feeds: Feeds, silent_outputs: bool) -> None:
    for optimize in (True, False):
        ours, theirs = (_run(model, feeds, optimize) for model in (pruned, silenced))
        for name, expected in theirs.items():
            assert silent_outputs or np.any(expected), f"{name} is zero: that proves nothing"
            _assert_close(ours[name], expected, f"{name}, optimized: {optimize}")


def _assert_close(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    assert actual.shape == expected.shape, what
    if expected.dtype.kind != "f":
        np.testing.assert_array_equal(actual, expected, err_msg=what)
        return
    assert np.all(np.isfinite(expected)), f"{what}: the reference is not finite"
    rtol = _RELATIVE[expected.dtype]
    scale = float(np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rtol * scale, err_msg=what)


def _run(model: ir.Model, feeds: Feeds, optimize: bool) -> Feeds:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(
        _proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))
