"""Where two models part: intermediate tensors of the same name, compared in topological order.

Passes keep the names of intermediate tensors, so that a name stands for the same quantity in both
models. In a Q/DQ model a tensor is compared as its readers see it, after DequantizeLinear: before
QuantizeLinear it may still hold values that saturation is going to cut off, where a Relu was left
to it. onnxruntime runs both models without graph optimizations here, as its fusions would remove
the tensors; what its optimizer changes on top is noticed on the outputs.

A tensor has diverged when its SQNR is below a bound and the error stays: at least one of the next
common tensors that depend on it is below the bound too. A tensor that was merely given another
meaning, as a convolution's output before and after the normalization behind it was folded in, does
not count then. Where a pass scaled channels, the tensor has a record of it (``graph.scaled``), and
the reference's is multiplied with the factors.

Memory: tensors are tapped in chunks of at most :data:`CHUNK_BYTES` per model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from slimctl.core.contract import Feeds
from slimctl.evaluate.metrics import LIMIT_DB, Similarity
from slimctl.graph.load import load_model
from slimctl.graph.scaled import recorded_scaling
from slimctl.graph.session import Level, open_session, run, tapped
from slimctl.graph.shapes import infer_shapes

BOUND_DB = 15.0
"""Default bound: an error of 3 % of the signal's power. Tensors inside sound int8 networks lie
between 15 and 40 dB; broken ones fall to a few dB or below zero."""

SAMPLES = 8
"""Samples that are looked at inside: a defect that shows in the outputs shows in these."""

CHUNK_BYTES = 64 << 20
"""Tapped values per model held at a time."""

_UNKNOWN_SHARE = 16  # a tensor of unknown size counts as this part of a chunk

_OPTIMIZER_DB = 3.0  # half the signal-to-noise ratio gone is no rounding matter


@dataclass(frozen=True)
class TensorDifference:
    """One tensor of both models.

    Attributes:
        tensor: Name of the tensor.
        node: Name of the node of the reference that makes it.
        op_type: That node's operator.
        sqnr_db: SQNR over the samples looked at.
        drop_db: How far below the worst of the nearest common tensors before it; None when there
            are none.
    """

    tensor: str
    node: str
    op_type: str
    sqnr_db: float
    drop_db: float | None


@dataclass(frozen=True)
class Divergence:
    """Where two models part.

    Attributes:
        bound_db: The bound.
        tensors: Number of tensors compared.
        first: The first tensor in topological order from which on they differ; None if none does.
        largest_drop: The tensor at which the SQNR falls most; None without an earlier tensor.
        optimizer: onnxruntime's graph optimizations change the outputs of one of the models by
            themselves, so that the cause does not lie in the graph; None when they do not.
    """

    bound_db: float
    tensors: int
    first: TensorDifference | None
    largest_drop: TensorDifference | None
    optimizer: str | None = None


def locate(
    reference: ir.Model | Path,
    other: ir.Model | Path,
    feeds: Sequence[Feeds],
    *,
    bound_db: float = BOUND_DB,
    threads: int = 0,
    outputs_db: float | None = None,
) -> Divergence:
    """Compares all common float tensors.

    Args:
        reference: The original.
        other: The other model; neither is changed.
        feeds: A few runs' inputs.
        bound_db: A tensor below this SQNR has diverged.
        threads: Threads of onnxruntime.
        outputs_db: The outputs' worst SQNR with graph optimizations, to compare with.

    Raises:
        ModelLoadError: A file is no readable model.
        ModelExecutionError: onnxruntime refuses one of the models.
    """
    models = [_prepared(reference), _prepared(other)]
    pairs = common_tensors(*models)
    sqnr = _measure(models[0], models[1], pairs, feeds, threads)
    values = {value.name or "": value for value in _node_outputs(models[0])}
    differences = [_difference(values[name], sqnr) for name in pairs if name in sqnr]
    followers = _followers([values[item.tensor] for item in differences])
    first = next((item for item in differences if _stays(item, followers, sqnr, bound_db)), None)
    dropped = [item for item in differences if item.drop_db is not None]
    return Divergence(
        bound_db,
        len(differences),
        first,
        max(dropped, key=lambda item: item.drop_db or 0.0, default=None),
        _optimizer_note(models[0], sqnr, outputs_db),
    )


def _prepared(model: ir.Model | Path) -> ir.Model:
    prepared = load_model(model) if isinstance(model, Path) else model.clone()
    infer_shapes(prepared)
    return prepared


def _node_outputs(model: ir.Model) -> Iterator[ir.Value]:
    for node in model.graph:
        yield from (value for value in node.outputs if value.name)


def common_tensors(reference: ir.Model, other: ir.Model) -> dict[str, str]:
    """Float tensors of both main graphs: the reference's name to the tensor to tap in the other.

    In the reference's topological order.
    """
    found = {value.name or "": value for value in _node_outputs(other) if _may_be_float(value)}
    names = [value.name or "" for value in _node_outputs(reference) if _may_be_float(value)]
    return {name: _as_read(found[name]).name or "" for name in names if name in found}


def _may_be_float(value: ir.Value) -> bool:
    if value.type is None:
        return True  # running it tells
    return isinstance(value.type, ir.TensorType) and value.type.dtype.is_floating_point()


def _as_read(value: ir.Value) -> ir.Value:
    """The tensor behind a Q/DQ pair on this one, or the tensor itself."""
    if value.is_graph_output():
        return value
    for quantize in value.consumers():
        if quantize.op_type == "QuantizeLinear" and quantize.inputs[0] is value:
            for restore in quantize.outputs[0].consumers():
                if restore.op_type == "DequantizeLinear":
                    return restore.outputs[0]
    return value


def _measure(
    reference: ir.Model,
    other: ir.Model,
    pairs: Mapping[str, str],
    feeds: Sequence[Feeds],
    threads: int,
) -> dict[str, float]:
    """SQNR by name of the reference's tensor."""
    sizes = _sizes_bytes(reference, feeds)
    result: dict[str, float] = {}
    for chunk in _chunks({name: sizes[name] for name in pairs}):
        result |= _measure_chunk(reference, other, {n: pairs[n] for n in chunk}, feeds, threads)
    return result


def _sizes_bytes(model: ir.Model, feeds: Sequence[Feeds]) -> dict[str, int]:
    """About how large each tensor of the main graph is, for the largest of some inputs."""
    largest = max(feeds, key=lambda feed: sum(array.size for array in feed.values()), default={})
    sized = model.clone()
    for value in sized.graph.inputs:
        if value.name in largest:
            value.shape = ir.Shape(largest[value.name].shape)
    infer_shapes(sized)
    return {value.name or "": _size_bytes(value) for value in _node_outputs(sized)}


def _size_bytes(value: ir.Value) -> int:
    dims = value.shape.dims if value.shape is not None else (None,)
    sizes = [size for size in dims if isinstance(size, int)]
    if len(sizes) < len(dims):
        return CHUNK_BYTES // _UNKNOWN_SHARE
    return 4 * math.prod(sizes)


def _chunks(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    chunk: list[str] = []
    held = 0
    for name, size in sizes.items():
        if chunk and held + size > CHUNK_BYTES:
            yield chunk
            chunk, held = [], 0
        chunk.append(name)
        held += size
    if chunk:
        yield chunk


def _measure_chunk(
    reference: ir.Model,
    other: ir.Model,
    pairs: Mapping[str, str],
    feeds: Sequence[Feeds],
    threads: int,
) -> dict[str, float]:
    sessions = [
        open_session(
            tapped(model, list(dict.fromkeys(names)), only=True),
            level=Level.DISABLED,
            threads=threads,
        )
        for model, names in ((reference, pairs.keys()), (other, pairs.values()))
    ]
    totals = {name: Similarity() for name in pairs}
    values = {value.name or "": value for value in _node_outputs(other) if value.name in pairs}
    for feed in feeds:
        _add_run(totals, pairs, values, *(run(session, feed) for session in sessions))
    return {name: total.sqnr_db for name, total in totals.items() if total.elements}


def _add_run(
    totals: Mapping[str, Similarity],
    pairs: Mapping[str, str],
    values: Mapping[str, ir.Value],
    expected: Feeds,
    found: Feeds,
) -> None:
    # A function of its own, so that one run's tensors are gone before the next run.
    for name, tap in pairs.items():
        if _comparable(expected[name], found[tap]):
            factors = recorded_scaling(values[name], expected[name].ndim)
            meant = expected[name] if factors is None else expected[name] * factors
            totals[name].update(meant, found[tap])


def _comparable(expected: object, found: object) -> bool:
    """Whether two values are float arrays of one shape; else the name means two things."""
    return (
        isinstance(expected, np.ndarray)
        and isinstance(found, np.ndarray)
        and expected.shape == found.shape
        and expected.dtype.kind in "fV"
        and found.dtype.kind in "fV"
    )


def _difference(value: ir.Value, sqnr: Mapping[str, float]) -> TensorDifference:
    node = value.producer()
    assert node is not None, "only outputs of nodes are compared"
    own = sqnr[value.name or ""]
    before = [sqnr[name] for name in _nearest_before(value, sqnr)]
    return TensorDifference(
        value.name or "",
        node.name or "",
        node.op_type,
        own,
        min(before) - own if before else None,
    )


def _nearest_before(value: ir.Value, known: Mapping[str, float]) -> set[str]:
    """Names of the nearest tensors before this one that were compared."""
    found: set[str] = set()
    seen: set[ir.Value] = set()
    waiting = _inputs(value)
    while waiting:
        earlier = waiting.pop()
        if earlier in seen:
            continue
        seen.add(earlier)
        if earlier.name in known:
            found.add(earlier.name or "")
        else:
            waiting.extend(_inputs(earlier))
    return found


def _inputs(value: ir.Value) -> list[ir.Value]:
    node = value.producer()
    return [] if node is None else [given for given in node.inputs if given is not None]


def _followers(values: Sequence[ir.Value]) -> dict[str, set[str]]:
    """For each compared tensor, the nearest compared tensors that depend on it."""
    known = {value.name or "": 0.0 for value in values}
    followers: dict[str, set[str]] = {name: set() for name in known}
    for value in values:
        for name in _nearest_before(value, known):
            followers[name].add(value.name or "")
    return followers


def _stays(
    item: TensorDifference,
    followers: Mapping[str, set[str]],
    sqnr: Mapping[str, float],
    bound_db: float,
) -> bool:
    after = followers[item.tensor]
    below = not after or any(sqnr[name] < bound_db for name in after)
    return item.sqnr_db < bound_db and below


def _optimizer_note(
    reference: ir.Model, sqnr: Mapping[str, float], outputs_db: float | None
) -> str | None:
    own = [sqnr[name] for output in reference.graph.outputs if (name := output.name or "") in sqnr]
    if outputs_db is None or not own or min(own) - outputs_db < _OPTIMIZER_DB:
        return None
    if outputs_db >= LIMIT_DB / 2:
        return None  # float rounding, reordered
    return (
        f"with onnxruntime's graph optimizations the outputs have {outputs_db:.1f} dB, without"
        f" them {min(own):.1f} dB: the optimizer changes the result"
    )
