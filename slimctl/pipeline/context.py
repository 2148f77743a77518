"""What passes may use: target, data and what calibration finds out about a model.

Calibration is lazy: the data are run through a model when a pass first asks for something about it,
and what was found is kept, in memory and in the cache on disk. When a later step is going to ask
for mean inputs of the same model (:meth:`slimctl.core.contract.Pass.anticipates`), the pass over
the data that collects ranges gathers them as well.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl import __version__
from slimctl.calibration.cache import StatisticsCache, statistics_key
from slimctl.calibration.channels import ChannelAxis
from slimctl.calibration.collect import Statistics, collect
from slimctl.calibration.thresholds import choose
from slimctl.core.contract import (
    Effect,
    Feeds,
    InputMean,
    LinearInput,
    Outlook,
    Pass,
    Progress,
    Range,
    RangeRequest,
    SampleSet,
    SilentProgress,
    TrainingData,
)
from slimctl.core.cpu import available_cores
from slimctl.core.errors import SourceError
from slimctl.core.memory import return_freed_memory
from slimctl.core.target import Target
from slimctl.data.sources import DataSource
from slimctl.evaluate.accuracy import Score
from slimctl.evaluate.parts import OutputParts, in_parts, output_parts
from slimctl.evaluate.scores import View, score_views, seen_through
from slimctl.graph.save import content_hash
from slimctl.graph.session import onnxruntime_version, open_session, run, tapped
from slimctl.pipeline.fidelity import sqnr_by_output
from slimctl.training import require_torch

_T = TypeVar("_T")

_AHEAD = 2
"""Batches that are run at a time: each holds its activations."""


class _Known:
    """What is known about one model by now.

    Attributes:
        statistics: What passes over the data found out.
        ranges: What was chosen from that, by tensor and request.
    """

    def __init__(self) -> None:
        self.statistics = Statistics({}, (), {})
        self.ranges: dict[tuple[str, RangeRequest], Range | None] = {}

    def missing_tensors(self, wanted: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in wanted if name not in self.statistics.histograms)

    def missing_layers(self, wanted: Sequence[LinearInput]) -> tuple[LinearInput, ...]:
        return tuple(layer for layer in wanted if layer not in self.statistics.layers)

    def missing_channels(self, wanted: Sequence[ChannelAxis]) -> tuple[ChannelAxis, ...]:
        return tuple(channels for channels in wanted if channels not in self.statistics.squares)

    def add(self, more: Statistics) -> None:
        self.statistics = Statistics(
            {**self.statistics.histograms, **more.histograms},
            (*self.statistics.layers, *more.layers),
            {**self.statistics.means, **more.means},
            {**self.statistics.squares, **more.squares},
        )

    def without(self, changed: Collection[str]) -> _Known:
        """What is known about tensors other than these."""
        found, gone = _Known(), frozenset(changed)
        old = self.statistics
        layers = tuple(layer for layer in old.layers if layer.tensor not in gone)
        nodes = {layer.node for layer in layers}
        found.statistics = Statistics(
            {name: item for name, item in old.histograms.items() if name not in gone},
            layers,
            {node: mean for node, mean in old.means.items() if node in nodes},
            {key: square for key, square in old.squares.items() if key.tensor not in gone},
        )
        found.ranges = {key: chosen for key, chosen in self.ranges.items() if key[0] not in gone}
        return found

    def range(self, tensor: str, request: RangeRequest) -> Range | None:
        """The range of a tensor whose histogram is there; searched once."""
        key = (tensor, replace(request, tensors=()))
        if key not in self.ranges:
            self.ranges[key] = choose(
                self.statistics.histograms[tensor],
                request.method,
                percentile=request.percentile,
                levels=request.levels,
                symmetric=request.symmetric,
                exponent=request.exponent,
            )
        return self.ranges[key]


class _Missing(NamedTuple):
    """What a pass over the data is for."""

    tensors: tuple[str, ...]
    layers: tuple[LinearInput, ...]
    channels: tuple[ChannelAxis, ...]

    def text(self) -> str:
        """The same for equal wishes."""
        layers = [asdict(layer) for layer in self.layers]
        return json.dumps([sorted(self.tensors), layers, sorted(self.channels)])


@dataclass
class PipelineContext:
    """Implements :class:`slimctl.core.contract.Context`.

    Attributes:
        target: The execution provider to compress for.
        seed: Seed of everything random.
        progress: Where to say how far the work is.
        data: Calibration data, None when none were given.
        training: Data that models learn from, None when none were given.
        threads: Threads of onnxruntime; 0 lets it decide.
        use_cache: Whether the calibration cache is read and filled.
        measure: Measures the metric that the run is judged by, None when there is none.
        random: Random inputs that the model takes, None while unknown.
        calibration_seconds: Time spent on collecting statistics and choosing ranges.
        notes: What the user should know about calibration, in sentences.
    """

    target: Target
    seed: int = 0
    progress: Progress = field(default_factory=SilentProgress)
    data: DataSource | None = None
    training: DataSource | None = None
    threads: int = 0
    use_cache: bool = True
    measure: Callable[[ir.Model], Score] | None = None
    random: Feeds | None = field(default=None, init=False)
    calibration_seconds: float = field(default=0.0, init=False)
    notes: list[str] = field(default_factory=list, init=False)
    _step: Pass | None = field(default=None, init=False, repr=False)
    _later: Sequence[Pass] = field(default=(), init=False, repr=False)
    _reference: ir.Model | None = field(default=None, init=False, repr=False)
    _measured: dict[tuple[str, str], Mapping[str, float]] = field(
        default_factory=dict, init=False, repr=False
    )
    _judges: dict[str, tuple[tuple[Feeds, Feeds], ...]] = field(
        default_factory=dict, init=False, repr=False
    )
    _latest: tuple[str, tuple[Feeds, ...]] = field(default=("", ()), init=False, repr=False)
    _original: Path | None = field(default=None, init=False, repr=False)
    _more: tuple[Feeds, ...] = field(default=(), init=False, repr=False)
    _views: Mapping[str, View] = field(default_factory=dict, init=False, repr=False)
    _parts: OutputParts = field(default_factory=dict, init=False, repr=False)
    _known: dict[str, _Known] = field(default_factory=dict, init=False, repr=False)
    _remembered: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def enter(self, step: Pass, later: Sequence[Pass], reference: ir.Model) -> None:
        """Tells which step begins.

        Args:
            step: The step.
            later: The steps after it.
            reference: The float model that it may compare with.
        """
        self._step = step
        self._later = later
        self._reference = reference

    def judge_by(
        self,
        original: Path,
        model: ir.Model,
        samples: Sequence[Feeds],
        outputs: Sequence[Feeds],
        more: Sequence[Feeds],
    ) -> None:
        """Says what the original computes on a few samples; :meth:`fidelity` compares with it.

        Args:
            original: Its file, for running it on more samples when asked for.
            model: The same in memory; what its outputs are made by is read off it.
            samples: A few samples.
            outputs: What the original computes on each.
            more: Further samples.
        """
        self._original = original
        self._views, self._parts = score_views(model), output_parts(model)
        self._judges = {"few": tuple(zip(samples, outputs, strict=True))}
        self._more = tuple(more)
        self._measured.clear()

    @property
    def later(self) -> Sequence[str]:
        """Names of the passes that run after the current one."""
        return [step.name for step in self._later]

    def fidelity(self, model: ir.Model, samples: SampleSet = "few") -> Mapping[str, float]:
        """SQNR in dB of each float output against the original, on some calibration samples.

        As ``many`` and ``scores``, an output that is put together of parts has one for each; as
        ``scores``, probabilities are compared by what they were made from.
        """
        judges = self._judges_of("few" if samples == "few" else "many")
        if not judges:
            return {}
        key = (content_hash(model), samples)
        if key not in self._measured:
            session = open_session(model, threads=self.threads)
            found = tuple(run(session, feeds) for feeds, _ in judges)
            expected = [outputs for _, outputs in judges]
            self._latest = (key[0], found[: len(self._judges["few"])])
            if samples == "few":
                self._measured[key] = sqnr_by_output(expected, found)
            else:
                wanted = [in_parts(self._parts, outputs) for outputs in expected]
                given = [in_parts(self._parts, outputs) for outputs in found]
                self._measured[key[0], "many"] = sqnr_by_output(wanted, given)
                self._measured[key[0], "scores"] = sqnr_by_output(
                    [seen_through(self._views, outputs) for outputs in wanted],
                    [seen_through(self._views, outputs) for outputs in given],
                )
        return self._measured[key]

    def known_outputs(self, model: ir.Model) -> tuple[Feeds, ...]:
        """What the model computes on the few samples, if it was just measured; else nothing."""
        digest, outputs = self._latest
        return outputs if digest and digest == content_hash(model) else ()

    def _judges_of(self, samples: SampleSet) -> tuple[tuple[Feeds, Feeds], ...]:
        """Samples, and what the original computes on them."""
        few = self._judges.get("few", ())
        if samples == "many" and few and "many" not in self._judges and self._original is not None:
            session = open_session(self._original, threads=self.threads)
            self._judges["many"] = (*few, *((feeds, run(session, feeds)) for feeds in self._more))
        return self._judges.get(samples, few)

    @property
    def has_data(self) -> bool:
        """Whether calibration data were given."""
        return self.data is not None

    @property
    def reference(self) -> ir.Model:
        """The float model that the current step may compare with; it must not be changed."""
        assert self._reference is not None, "the pipeline enters a step before it runs it"
        return self._reference

    def ranges(self, model: ir.Model, request: RangeRequest) -> Mapping[str, Range]:
        """Ranges of tensors of a model on the calibration data.

        A tensor that has no range which represents it has no entry.

        Raises:
            SourceError: There are no calibration data.
            ModelExecutionError: onnxruntime cannot run the model on the data.
        """
        started = time.perf_counter()
        layers = _anticipated(self._step, self._later, model, self.target)
        known = self._observed(model, request.tensors, layers)
        ranges = {name: known.range(name, request) for name in request.tensors}
        self.calibration_seconds += time.perf_counter() - started
        return {name: chosen for name, chosen in ranges.items() if chosen is not None}

    def input_means(
        self, model: ir.Model, layers: Sequence[LinearInput]
    ) -> Mapping[str, InputMean]:
        """Mean inputs of linear layers of a model on the calibration data, by node name.

        A layer that never read a finite value has no entry.

        Raises:
            SourceError: There are no calibration data.
            ModelExecutionError: onnxruntime cannot run the model on the data.
        """
        started = time.perf_counter()
        means = self._observed(model, (), layers).statistics.means
        self.calibration_seconds += time.perf_counter() - started
        return {layer.node: means[layer.node] for layer in layers if layer.node in means}

    def channel_rms(
        self, model: ir.Model, axes: Mapping[str, int]
    ) -> Mapping[str, NDArray[np.float64]]:
        """Root mean squares of the channels of tensors of a model on the calibration data.

        What the next step that loses accuracy will ask about the same model is collected as well.

        Raises:
            SourceError: There are no calibration data.
            ModelExecutionError: onnxruntime cannot run the model on the data.
        """
        started = time.perf_counter()
        wanted = [ChannelAxis(name, axis) for name, axis in axes.items()]
        step, later = self._next_lossy()
        tensors = () if step is None else step.anticipates_ranges(model, self.target)
        layers = _anticipated(step, later, model, self.target)
        squares = self._observed(model, tensors, layers, wanted).statistics.squares
        self.calibration_seconds += time.perf_counter() - started
        found = {key.tensor: squares[key] for key in wanted}
        return {name: np.sqrt(square) for name, square in found.items() if square is not None}

    def outlook(self, model: ir.Model, other: ir.Model, changed: Collection[str]) -> Outlook | None:
        """What the next step that loses accuracy would make of either of two models.

        What is known about tensors that hold the same in both is not collected again.
        """
        step, later = self._next_lossy()
        if step is None:
            return None
        known = self._known.get(content_hash(model))
        if known is not None:
            self._known.setdefault(content_hash(other), known.without(changed))
        entered = self._step, self._later, self._reference
        self._step, self._later, self._reference = step, later, model
        try:
            return step.outlook(model, other, self)
        finally:
            self._step, self._later, self._reference = entered

    def remembered(self, key: Hashable, compute: Callable[[], _T]) -> _T:
        """What was computed under this key earlier in the run; computes it the first time."""
        if key not in self._remembered:
            self._remembered[key] = compute()
        found: _T = self._remembered[key]
        return found

    def _next_lossy(self) -> tuple[Pass | None, Sequence[Pass]]:
        """The next step that loses accuracy, and those after it."""
        for index, step in enumerate(self._later):
            if step.actual_effect() is Effect.APPROXIMATE:
                return step, self._later[index + 1 :]
        return None, ()

    def example(self) -> Feeds | None:
        """The first calibration batch, or random inputs that fit."""
        batches = self.data.batches() if self.data is not None else ()
        return next((batch.feeds for batch in batches), self.random)

    def training_data(self) -> TrainingData:
        """The training data, or the calibration data without.

        Raises:
            SourceError: There are neither.
        """
        found = self.training or self.data
        if found is None:
            raise SourceError("none", "There are no training data", fix="give --data SOURCE")
        return found

    def metric(self, model: ir.Model) -> float | None:
        """The metric of the run, such that more is better; None when the run has none."""
        if self.measure is None:
            return None
        score = self.measure(model)
        return score.value if score.higher_is_better else -score.value

    def activations(
        self, model: ir.Model, tensors: Sequence[str], feeds: Iterable[Feeds] | None = None
    ) -> Iterator[Feeds]:
        """What tensors of a model's main graph hold, for one calibration batch after another.

        Args:
            model: Stays as it is.
            tensors: Names.
            feeds: Inputs instead of the calibration data.

        Raises:
            SourceError: There are no calibration data.
            ModelExecutionError: onnxruntime cannot run the model on the data.
        """
        if feeds is None:
            if self.data is None:
                raise _no_data()
            feeds = _feeds(self.data)
        given = {value.name for value in model.graph.inputs}
        computed = [name for name in tensors if name not in given]
        runs = self._runs(model, computed, feeds) if computed else ((one, {}) for one in feeds)
        for batch, found in runs:
            yield {name: batch[name] if name in given else found[name] for name in tensors}
        return_freed_memory()  # the session, and what it computed

    def _runs(
        self, model: ir.Model, tensors: Sequence[str], feeds: Iterable[Feeds]
    ) -> Iterator[tuple[Feeds, Feeds]]:
        """Batches and what tensors hold, in order; the next batch runs meanwhile.

        Each worker runs onnxruntime with its share of the threads: threads within an operator wait
        for each other, which costs half as much again as one thread computes in all.
        """
        cores = self.threads or available_cores()
        workers = min(cores, _AHEAD)
        session = open_session(
            tapped(model, tensors, only=True), threads=cores // workers, memory_pattern=False
        )
        pending: deque[tuple[Feeds, Future[Feeds]]] = deque()
        with ThreadPoolExecutor(workers) as pool:
            for batch in feeds:
                pending.append((batch, pool.submit(run, session, batch)))
                if len(pending) == _AHEAD:
                    latest, found = pending.popleft()
                    yield latest, found.result()
            while pending:
                latest, found = pending.popleft()
                yield latest, found.result()

    def taylor_terms(self, model: ir.Model, tensors: Sequence[str]) -> Iterator[Feeds]:
        """What each element of some tensors contributes to the outputs, to first order.

        Raises:
            SourceError: There are no calibration data.
            MissingExtraError: torch is not installed.
            UnsupportedModelError: torch cannot run the model; names the node.
        """
        if self.data is None:
            raise _no_data()
        require_torch("--importance taylor")
        from slimctl.training.taylor import taylor_terms

        batches = self.progress.track(
            _feeds(self.data), total=_batch_count(self.data), label="computing gradients"
        )
        return taylor_terms(model, tensors, batches, seed=self.seed, threads=self.threads)

    def _observed(
        self,
        model: ir.Model,
        tensors: Sequence[str],
        layers: Sequence[LinearInput],
        channels: Sequence[ChannelAxis] = (),
    ) -> _Known:
        """At least what was asked for; data are run through the model if anything is missing."""
        if self.data is None:
            raise _no_data()
        digest = content_hash(model)
        known = self._known.setdefault(digest, _Known())
        missing = _Missing(
            known.missing_tensors(tensors),
            known.missing_layers(layers),
            known.missing_channels(channels),
        )
        if any(missing):
            known.add(self._cached(model, digest, self.data, missing))
        return known

    def _cached(
        self, model: ir.Model, digest: str, data: DataSource, missing: _Missing
    ) -> Statistics:
        if not self.use_cache:
            return self._collected(model, data, missing)
        cache = StatisticsCache()
        key = statistics_key(
            digest,
            data.content_hash(),
            __version__,  # what is measured, and how, may change with a release
            onnxruntime_version(),
            missing.text(),
        )
        found = cache.load(key)
        if found is None:
            found = self._collected(model, data, missing)
            cache.store(key, found)
        if cache.problem:
            self.notes.append(cache.problem)
        return found

    def _collected(self, model: ir.Model, data: DataSource, missing: _Missing) -> Statistics:
        return collect(
            model,
            missing.tensors,
            missing.layers,
            _feeds(data),
            channels=missing.channels,
            threads=self.threads,
            progress=self.progress,
            total=_batch_count(data),
        )


def _anticipated(
    step: Pass | None, later: Sequence[Pass], model: ir.Model, target: Target
) -> Sequence[LinearInput]:
    """Layers whose means a step after this one is going to ask for."""
    if step is None or not any(step.name in other.after for other in later):
        return ()
    return step.anticipates(model, target)


def _no_data() -> SourceError:
    return SourceError("none", "There are no calibration data", fix="give --calib SOURCE")


def _feeds(data: DataSource) -> Iterator[Feeds]:
    for batch in data.batches():
        yield batch.feeds


def _batch_count(data: DataSource) -> int | None:
    """How many batches there are, judged by the first; None when the samples are not counted."""
    if data.sample_count is None:
        return None
    first = next(data.batches())
    return -(-data.sample_count // max(first.size, 1))
