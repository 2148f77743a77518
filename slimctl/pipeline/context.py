"""What passes may use: target, data and what calibration finds out about a model.

Calibration is lazy: the data are run through a model when a pass first asks for something about it,
and what was found is kept, in memory and in the cache on disk. When a later step is going to ask
for mean inputs of the same model (:meth:`slimctl.core.contract.Pass.anticipates`), the pass over
the data that collects ranges gathers them as well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import onnx_ir as ir

from slimctl import __version__
from slimctl.calibration.cache import StatisticsCache, cache_key
from slimctl.calibration.collect import Statistics, collect
from slimctl.calibration.thresholds import choose
from slimctl.core.contract import (
    Feeds,
    InputMean,
    LinearInput,
    Pass,
    Progress,
    Range,
    RangeRequest,
    SampleSet,
    SilentProgress,
)
from slimctl.core.errors import SourceError
from slimctl.core.target import Target
from slimctl.data.sources import DataSource
from slimctl.graph.save import content_hash
from slimctl.graph.session import onnxruntime_version, open_session, run
from slimctl.pipeline.fidelity import sqnr_by_output


class _Known:
    """What is known about one model by now."""

    def __init__(self) -> None:
        self.statistics = Statistics({}, (), {})

    def missing_tensors(self, wanted: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in wanted if name not in self.statistics.histograms)

    def missing_layers(self, wanted: Sequence[LinearInput]) -> tuple[LinearInput, ...]:
        return tuple(layer for layer in wanted if layer not in self.statistics.layers)

    def add(self, more: Statistics) -> None:
        self.statistics = Statistics(
            {**self.statistics.histograms, **more.histograms},
            (*self.statistics.layers, *more.layers),
            {**self.statistics.means, **more.means},
        )


@dataclass
class PipelineContext:
    """Implements :class:`slimctl.core.contract.Context`.

    Attributes:
        target: The execution provider to compress for.
        seed: Seed of everything random.
        progress: Where to say how far the work is.
        data: Calibration data, None when none were given.
        threads: Threads of onnxruntime; 0 lets it decide.
        use_cache: Whether the calibration cache is read and filled.
        calibration_seconds: Time spent on collecting statistics and choosing ranges.
        notes: What the user should know about calibration, in sentences.
    """

    target: Target
    seed: int = 0
    progress: Progress = field(default_factory=SilentProgress)
    data: DataSource | None = None
    threads: int = 0
    use_cache: bool = True
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
    _known: dict[str, _Known] = field(default_factory=dict, init=False, repr=False)

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
        samples: Sequence[Feeds],
        outputs: Sequence[Feeds],
        more: Sequence[Feeds],
    ) -> None:
        """Says what the original computes on a few samples; :meth:`fidelity` compares with it.

        Args:
            original: Its file, for running it on more samples when asked for.
            samples: A few samples.
            outputs: What the original computes on each.
            more: Further samples.
        """
        self._original = original
        self._judges = {"few": tuple(zip(samples, outputs, strict=True))}
        self._more = tuple(more)
        self._measured.clear()

    @property
    def later(self) -> Sequence[str]:
        """Names of the passes that run after the current one."""
        return [step.name for step in self._later]

    def fidelity(self, model: ir.Model, samples: SampleSet = "few") -> Mapping[str, float]:
        """SQNR in dB of each float output against the original, on some calibration samples."""
        judges = self._judges_of(samples)
        if not judges:
            return {}
        key = (content_hash(model), samples)
        if key not in self._measured:
            session = open_session(model, threads=self.threads)
            found = tuple(run(session, feeds) for feeds, _ in judges)
            self._measured[key] = sqnr_by_output([outputs for _, outputs in judges], found)
            if samples == "few":
                self._latest = (key[0], found)
        return self._measured[key]

    def known_outputs(self, model: ir.Model) -> tuple[Feeds, ...]:
        """What the model computes on the few samples, if it was just measured; else nothing."""
        return self._latest[1] if self._latest[0] == content_hash(model) else ()

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
        found = self._statistics(model, request.tensors, self._anticipated(model))
        ranges = {
            name: choose(
                found.histograms[name],
                request.method,
                percentile=request.percentile,
                levels=request.levels,
                symmetric=request.symmetric,
                exponent=request.exponent,
            )
            for name in request.tensors
        }
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
        means = self._statistics(model, (), layers).means
        self.calibration_seconds += time.perf_counter() - started
        return {layer.node: means[layer.node] for layer in layers if layer.node in means}

    def _anticipated(self, model: ir.Model) -> Sequence[LinearInput]:
        """Layers whose means a later step is going to ask for."""
        step = self._step
        if step is None or not any(step.name in later.after for later in self._later):
            return ()
        return step.anticipates(model, self.target)

    def _statistics(
        self, model: ir.Model, tensors: Sequence[str], layers: Sequence[LinearInput]
    ) -> Statistics:
        """At least what was asked for; data are run through the model if anything is missing."""
        if self.data is None:
            raise SourceError("none", "There are no calibration data", fix="give --calib SOURCE")
        digest = content_hash(model)
        known = self._known.setdefault(digest, _Known())
        new_tensors, new_layers = known.missing_tensors(tensors), known.missing_layers(layers)
        if new_tensors or new_layers:
            known.add(self._cached(model, digest, self.data, new_tensors, new_layers))
        return known.statistics

    def _cached(
        self,
        model: ir.Model,
        digest: str,
        data: DataSource,
        tensors: Sequence[str],
        layers: Sequence[LinearInput],
    ) -> Statistics:
        if not self.use_cache:
            return self._collected(model, data, tensors, layers)
        cache = StatisticsCache()
        key = cache_key(
            digest,
            data.content_hash(),
            __version__,  # what is measured, and how, may change with a release
            onnxruntime_version(),
            json.dumps([sorted(tensors), [asdict(layer) for layer in layers]]),
        )
        found = cache.load(key)
        if found is None:
            found = self._collected(model, data, tensors, layers)
            cache.store(key, found)
        if cache.problem:
            self.notes.append(cache.problem)
        return found

    def _collected(
        self,
        model: ir.Model,
        data: DataSource,
        tensors: Sequence[str],
        layers: Sequence[LinearInput],
    ) -> Statistics:
        return collect(
            model,
            tensors,
            layers,
            _feeds(data),
            threads=self.threads,
            progress=self.progress,
            total=_batch_count(data),
        )


def _feeds(data: DataSource) -> Iterator[Feeds]:
    for batch in data.batches():
        yield batch.feeds


def _batch_count(data: DataSource) -> int | None:
    """How many batches there are, judged by the first; None when the samples are not counted."""
    if data.sample_count is None:
        return None
    first = next(data.batches())
    return -(-data.sample_count // max(first.size, 1))
