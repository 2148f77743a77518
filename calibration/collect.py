"""One pass of the data through the model: histograms of activations, means and squares.

Memory is a constant in the number of samples: activations are looked at one tensor at a time and
dropped. Each worker runs onnxruntime on one thread and counts what came out, since onnxruntime and
most of the counting let other threads work meanwhile. Neither the order of the samples nor the
number of workers changes the result, and neither does the way samples are put into batches, as far
as onnxruntime computes the same for a sample whatever stands beside it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.calibration.channels import ChannelAxis, SquareAccumulator
from slimctl.calibration.histogram import FloatHistogram
from slimctl.calibration.means import MeanAccumulator
from slimctl.core.contract import Feeds, InputMean, LinearInput, Progress, SilentProgress
from slimctl.core.cpu import available_cores
from slimctl.core.errors import ModelExecutionError
from slimctl.graph.session import Level, open_session, run, tapped

if TYPE_CHECKING:
    import onnxruntime as ort

_MOST_WORKERS: Final = 4
"""Every worker holds the activations of one run."""

_RUN_VALUES: Final = 1 << 20
"""Values of all tensors together that one run should give, 4 MiB: samples are run one by one when
they are large, and many together when running them one by one would cost more than counting."""

_SAME: Final = 1e-3
"""Rows of a batch count as independent samples when they differ by less, relative to the largest
value, from what they give alone: far more than rounding, far less than a mixed-in neighbor."""


@dataclass(frozen=True)
class Statistics:
    """What one pass over the data found out.

    Attributes:
        histograms: Of the tensors asked for, by name.
        layers: The layers asked for.
        means: By node name; absent where nothing finite was seen.
        squares: Mean squares of the channels asked for; None where nothing finite was seen.
    """

    histograms: dict[str, FloatHistogram]
    layers: tuple[LinearInput, ...]
    means: dict[str, InputMean]
    squares: dict[ChannelAxis, NDArray[np.float64] | None] = field(default_factory=dict)


def collect(
    model: ir.Model,
    tensors: Sequence[str],
    layers: Sequence[LinearInput],
    batches: Iterable[Feeds],
    *,
    channels: Sequence[ChannelAxis] = (),
    threads: int = 0,
    progress: Progress | None = None,
    total: int | None = None,
) -> Statistics:
    """Runs the data through the model once.

    Args:
        model: Stays as it is.
        tensors: Names of tensors whose values are counted.
        layers: Linear layers whose mean inputs are wanted.
        batches: Inputs of the model; shapes may differ between batches. Batches of several samples
            are taken apart where the model treats samples independently.
        channels: Axes of tensors along which mean squares are wanted.
        threads: Threads of all workers together; 0 takes one per core.
        progress: Where to say how far the work is.
        total: Number of batches, if known.

    Raises:
        ModelExecutionError: onnxruntime cannot run the model on a batch.
    """
    cores = threads or available_cores()
    workers = min(cores, _MOST_WORKERS)
    collector = _Collector(model, tensors, layers, channels, threads=cores // workers)
    shown = (progress or SilentProgress()).track(iter(batches), total=total, label="calibrating")
    pieces = (piece for feeds in shown for piece in collector.pieces(feeds))
    with ThreadPoolExecutor(workers) as pool:
        _spread(pool, workers, collector, pieces)
    return collector.statistics()


def _spread(
    pool: ThreadPoolExecutor, workers: int, collector: _Collector, pieces: Iterator[_Piece]
) -> None:
    """Keeps every worker busy without reading further ahead than needed."""
    pending: set[Future[None]] = set()
    try:
        for piece in pieces:
            pending.add(pool.submit(collector.take, piece))
            if len(pending) > workers:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
        for future in pending:
            future.result()
    finally:
        for future in pending:
            future.cancel()


@dataclass(frozen=True)
class _Piece:
    """What one run gets.

    Attributes:
        feeds: Inputs of the model.
        hashes: One number per sample, made from its content.
    """

    feeds: Feeds
    hashes: NDArray[np.uint32]


class _Collector:
    def __init__(
        self,
        model: ir.Model,
        tensors: Sequence[str],
        layers: Sequence[LinearInput],
        channels: Sequence[ChannelAxis],
        *,
        threads: int,
    ) -> None:
        self._layers = tuple(layers)
        self._inputs = {value.name for value in model.graph.inputs}
        self._histograms = {name: FloatHistogram() for name in dict.fromkeys(tensors)}
        # Layers that read the same tensor in the same way share their sums.
        self._means = {key: MeanAccumulator(key) for key in map(_shared, layers)}
        self._squares = {key: SquareAccumulator(key.axis) for key in channels}
        read = [key.tensor for key in self._means] + [key.tensor for key in self._squares]
        self._wanted = list(dict.fromkeys([*tensors, *read]))
        inner = [name for name in self._wanted if name not in self._inputs]
        self._session = _open(model, inner, threads) if inner else None
        self._rows_per_run: int | None = None  # 0: batches must not be taken apart

    def pieces(self, feeds: Feeds) -> Iterator[_Piece]:
        """A batch in portions that are run one at a time."""
        samples = _samples(feeds)
        if samples > 1 and self._rows_per_run is None:
            self._rows_per_run = self._choose_rows(feeds)
        if samples <= 1 or not self._rows_per_run:
            yield _Piece(feeds, np.array([_checksum(feeds)], np.uint32))
            return
        for start in range(0, samples, self._rows_per_run):
            part = _rows(feeds, start, min(start + self._rows_per_run, samples))
            singles = (_rows(part, row, row + 1) for row in range(_samples(part)))
            yield _Piece(part, np.array([_checksum(single) for single in singles], np.uint32))

    def _choose_rows(self, feeds: Feeds) -> int:
        """Samples per run, or 0 when the model does not treat the rows of a batch as samples."""
        try:
            first, second = (self._run(_rows(feeds, row, row + 1)) for row in range(2))
            both = self._run(_rows(feeds, 0, 2))
        except ModelExecutionError:
            return 0  # the model fixes the batch
        if not all(_independent(both[name], first[name], second[name]) for name in both):
            return 0
        return max(_RUN_VALUES // max(sum(array.size for array in first.values()), 1), 1)

    def _run(self, feeds: Feeds) -> Feeds:
        if self._session is None:
            return {}
        # Dead branches of the tapped graph may have taken inputs with them.
        asked = {item.name: feeds[item.name] for item in self._session.get_inputs()}
        return run(self._session, asked)

    def take(self, piece: _Piece) -> None:
        """Runs and counts one piece."""
        results = self._run(piece.feeds)
        for name in self._wanted:
            array = piece.feeds[name] if name in self._inputs else results.pop(name)
            if not _is_float(array):
                continue
            if name in self._histograms:
                self._histograms[name].update(array)
            for layer, mean in self._means.items():
                if layer.tensor == name:
                    mean.update(array, piece.hashes)
            for channels, square in self._squares.items():
                if channels.tensor == name:
                    square.update(array)

    def statistics(self) -> Statistics:
        found = {layer.node: self._means[_shared(layer)].mean() for layer in self._layers}
        means = {node: mean for node, mean in found.items() if mean is not None}
        squares = {key: square.mean() for key, square in self._squares.items()}
        return Statistics(self._histograms, self._layers, means, squares)


def _open(model: ir.Model, tensors: Sequence[str], threads: int) -> ort.InferenceSession:
    return open_session(
        tapped(model, tensors, only=True),
        level=_level(model),
        threads=threads,
        # Workers run at the same time: a tenth less memory, and no more of it with more samples.
        memory_pattern=False,
    )


def _shared(layer: LinearInput) -> LinearInput:
    return replace(layer, node="")


def _level(model: ir.Model) -> Level:
    """How far onnxruntime may optimize.

    Between Q/DQ pairs it quantizes float weights by itself, so that such a model must be run as it
    stands.
    """
    quantized = {"QuantizeLinear", "DequantizeLinear"}
    operators = {node.op_type for node in model.graph.all_nodes()}
    return Level.DISABLED if operators & quantized else Level.ALL


def _is_float(array: Any) -> bool:
    # bfloat16 is a type of its own to NumPy, of kind V.
    return isinstance(array, np.ndarray) and (
        array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    )


def _samples(feeds: Feeds) -> int:
    """Length of axis 0 if all inputs agree on it, else 1; scalars serve all samples."""
    lengths = {array.shape[0] for array in feeds.values() if array.ndim}
    return lengths.pop() if len(lengths) == 1 else 1


def _rows(feeds: Feeds, start: int, stop: int) -> Feeds:
    return {name: array[start:stop] if array.ndim else array for name, array in feeds.items()}


def _independent(both: NDArray[Any], first: NDArray[Any], second: NDArray[Any]) -> bool:
    """Whether two samples run together give what they give alone, or the same constant."""
    if not _is_float(both) or both.shape == first.shape == second.shape:
        return True
    if both.ndim == 0 or first.shape[1:] != second.shape[1:]:
        return False
    alone = np.concatenate([first, second])
    if alone.shape != both.shape:
        return False
    largest = float(np.max(np.abs(alone), initial=0.0, where=np.isfinite(alone)))
    return np.allclose(both, alone, rtol=0.0, atol=_SAME * largest, equal_nan=True)


def _checksum(feeds: Feeds) -> int:
    """A number made from the content of a sample."""
    checksum = 0
    for name in sorted(feeds):
        content = np.ascontiguousarray(feeds[name]).reshape(-1).view(np.uint8)
        checksum = zlib.crc32(content.data, checksum)
    return checksum
