"""Runs many variants of one model at a fraction of the price of running each from end to end.

Variants differ from the model in a small part of the graph. The model runs once per sample, and
what its tensors hold at a few cuts is kept. A variant starts from the last cut in front of the part
that differs, is run up to the first cut behind it, and from there the session of the model's rest
goes on, which all variants share. Samples are looked at one after the other until the error is
known well enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Feeds
from slimctl.evaluate.compare import is_float
from slimctl.evaluate.parts import OutputParts, in_parts, output_parts
from slimctl.evaluate.scores import View, seen_through
from slimctl.evaluate.similarity import LIMIT_DB
from slimctl.graph.cost import node_costs
from slimctl.graph.cuts import Cut, Differ, Part, choose_cuts, find_cuts
from slimctl.graph.restart import cut_out
from slimctl.graph.session import open_session, run, tapped

_CUTS = 12
"""More make the part between two cuts shorter, and the sessions that are opened more."""

_BUDGET = 1 << 30
"""Bytes of tensors kept for all samples; wide cuts are given up for it."""

_HELD = 2 * _BUDGET
"""Bytes of those tensors and of outputs that are kept. What the model makes of samples beyond is
computed again for each variant that looks at them."""

_LEAST = 4
"""Samples before an interval means anything."""

_STUDENT = (
    math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
    2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060,
    2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""0.975 quantiles of Student's t by degrees of freedom."""


class Level(NamedTuple):
    """SQNR of one output with its 95 % confidence interval, in dB."""

    db: float
    low: float
    high: float


@dataclass(frozen=True)
class Loss:
    """What a variant costs.

    Attributes:
        outputs: By name, float outputs only; by part where an output has several.
        samples: How many were looked at.
    """

    outputs: Mapping[str, Level]
    samples: int

    @property
    def worst(self) -> Level:
        """Of the output that suffers most; that of identical outputs where none holds floats."""
        best = Level(LIMIT_DB, LIMIT_DB, LIMIT_DB)
        return min(self.outputs.values(), key=lambda level: level.db, default=best)


class Errors:
    """Signal and noise of the outputs of one variant, sample by sample.

    Args:
        parts: Outputs whose parts count each by itself.
        views: Outputs that are seen by the scores behind them.
    """

    def __init__(
        self,
        parts: OutputParts = MappingProxyType({}),
        views: Mapping[str, View] = MappingProxyType({}),
    ) -> None:
        self._parts = parts
        self._views = views
        self._sums: dict[str, list[tuple[float, float]]] = {}
        self._samples = 0

    def add(self, reference: Feeds, found: Feeds) -> None:
        """Adds one sample."""
        self._samples += 1
        seen = self._seen(found)
        for name, expected in self._seen(reference).items():
            if is_float(expected):
                self._sums.setdefault(name, []).append(_energies(expected, seen[name]))

    def _seen(self, outputs: Feeds) -> Feeds:
        return seen_through(self._views, in_parts(self._parts, outputs))

    def loss(self) -> Loss:
        """What is known by now."""
        return Loss({name: _level(sums) for name, sums in self._sums.items()}, self._samples)

    def is_known(self, tolerance_db: float) -> bool:
        """Whether every interval is at most this wide on either side."""
        if self._samples < _LEAST:
            return False
        levels = map(_level, self._sums.values())
        return all(max(x.high - x.db, x.db - x.low) <= tolerance_db for x in levels)


def _energies(expected: NDArray[Any], found: NDArray[Any]) -> tuple[float, float]:
    """Signal and noise; what is not finite in both alike does not count."""
    wanted = expected.astype(np.float64).reshape(-1)
    given = found.astype(np.float64).reshape(-1)
    same = (wanted == given) | (np.isnan(wanted) & np.isnan(given))
    counted = np.isfinite(wanted) | ~same
    noise = np.subtract(given, wanted, out=np.zeros_like(wanted), where=~same)[counted]
    if not np.isfinite(noise).all():
        return float(np.sum(wanted[np.isfinite(wanted)] ** 2)), math.inf
    return float(np.dot(wanted[counted], wanted[counted])), float(np.dot(noise, noise))


def _level(sums: Sequence[tuple[float, float]]) -> Level:
    """Ratio of sums with the interval of the ratio estimator (Cochran, Sampling Techniques, 6.4).

    On the scale of the logarithm, where the estimate is closer to normal.
    """
    signal, noise = np.array(sums, np.float64).T
    count = len(sums)
    if not math.isfinite(noise.sum()) or (signal.sum() == 0 and noise.sum() > 0):
        return Level(-LIMIT_DB, -LIMIT_DB, -LIMIT_DB)
    if noise.sum() == 0:
        return Level(LIMIT_DB, LIMIT_DB, LIMIT_DB)
    ratio = noise.sum() / signal.sum()
    value = float(np.clip(-10 * math.log10(ratio), -LIMIT_DB, LIMIT_DB))
    if count < 2:
        return Level(value, -LIMIT_DB, LIMIT_DB)
    residuals = noise - ratio * signal
    error = math.sqrt(np.dot(residuals, residuals) / (count - 1) / count) / signal.mean() / ratio
    student = _STUDENT[min(count - 1, len(_STUDENT) - 1)]
    width = 10 / math.log(10) * student * error
    return Level(value, max(value - width, -LIMIT_DB), min(value + width, LIMIT_DB))


@dataclass(frozen=True)
class _Kept:
    """What the model makes of one sample: its outputs, and tensors at cuts."""

    outputs: Feeds
    tensors: Feeds

    @property
    def size_bytes(self) -> int:
        """Of all its arrays; those that are both count once."""
        return sum(_size(array) for array in {**self.outputs, **self.tensors}.values())


class Probing:
    """One model, some samples, and what it costs to change the model.

    Args:
        model: With inferred types; must not be changed afterwards.
        samples: Its inputs, one sample or batch each.
        threads: Threads of onnxruntime, 0 for all cores.
        cuts: How many places to start from at most; 0 runs every variant from end to end.
    """

    def __init__(
        self, model: ir.Model, samples: Sequence[Feeds], *, threads: int = 0, cuts: int = _CUTS
    ) -> None:
        self._model = model
        self._samples = samples
        self._threads = threads
        self._outputs = [value.name or "" for value in model.graph.outputs]
        self.parts = output_parts(model)
        self._kept: dict[int, _Kept] = {}
        self._held = 0
        self._latest: tuple[int, _Kept] | None = None
        self._tails: dict[int, _Piece] = {}
        self._cuts = self._affordable(_chosen(model, cuts)) if cuts else []
        self._differ = Differ(model, self._cuts)
        self._session: Any = None

    def __len__(self) -> int:
        return len(self._samples)

    def reference(self, index: int) -> Feeds:
        """What the model itself computes on a sample."""
        return self._known(index).outputs

    def loss(self, variant: ir.Model, tolerance_db: float = 0.0) -> Loss:
        """The error of a variant's outputs.

        Args:
            variant: Made of a clone of the model, with the same inputs and outputs.
            tolerance_db: Samples are looked at until the 95 % interval reaches so far to either
                side; 0 looks at all. Looking again after every sample makes intervals a little
                optimistic.

        Raises:
            ModelExecutionError: onnxruntime refuses the variant.
        """
        errors = Errors(self.parts)
        for index, outputs in enumerate(self.outputs(variant)):
            errors.add(self.reference(index), outputs)
            if tolerance_db and errors.is_known(tolerance_db):
                break
        return errors.loss()

    def outputs(self, variant: ir.Model) -> Iterator[Feeds]:
        """The outputs of a variant, sample after sample.

        Raises:
            ModelExecutionError: onnxruntime refuses the variant.
        """
        part = self._differ.part(variant)
        piece = self._piece(variant, part)
        for index in range(len(self._samples)):
            kept = self._known(index)
            feeds = self._samples[index]
            found = {**kept.tensors, **piece(feeds, kept.tensors)}
            if part.stop is not None:
                found |= self._tail(part.stop)(feeds, found)
            yield {name: found[name] for name in self._outputs}

    def _piece(self, variant: ir.Model, part: Part) -> _Piece:
        """The part of a variant that differs."""
        given = () if part.start is None else self._cuts[part.start].tensors
        wanted = self._outputs if part.stop is None else self._cuts[part.stop].tensors
        made = [name for name in wanted if name not in given]
        return _Piece(variant, self._types(given), made, self._threads)

    def _tail(self, index: int) -> _Piece:
        """The model from a cut to its end; outputs that are made before it are known then."""
        if index not in self._tails:
            given = self._cuts[index].tensors
            made = [name for name in self._outputs if name not in given]
            self._tails[index] = _Piece(self._model, self._types(given), made, self._threads)
        return self._tails[index]

    def _types(self, names: Sequence[str]) -> dict[str, ir.DataType]:
        tensors = self._known(0).tensors if names else {}
        return {name: ir.DataType.from_numpy(tensors[name].dtype) for name in names}

    def _known(self, index: int) -> _Kept:
        if index in self._kept:
            return self._kept[index]
        if self._latest is None or self._latest[0] != index:
            self._latest = None  # not two of them while the next is computed
            self._latest = index, self._computed(index)
        kept = self._latest[1]
        if index == 0 or self._held + kept.size_bytes <= _HELD:
            self._kept[index] = kept
            self._held += kept.size_bytes
        return kept

    def _computed(self, index: int) -> _Kept:
        names = dict.fromkeys(name for cut in self._cuts for name in cut.tensors)
        if self._session is None:
            self._session = open_session(tapped(self._model, list(names)), threads=self._threads)
        found = run(self._session, self._samples[index])
        outputs = {name: found[name] for name in self._outputs}
        return _Kept(outputs, {name: found[name] for name in names})

    def _affordable(self, cuts: list[Cut]) -> list[Cut]:
        """The cuts whose tensors can be kept for all samples."""
        if not cuts or not self._samples:
            return []
        names = list(dict.fromkeys(name for cut in cuts for name in cut.tensors))
        session = open_session(tapped(self._model, names, only=True), threads=self._threads)
        asked = {value.name for value in session.get_inputs()}
        feeds = {name: array for name, array in self._samples[0].items() if name in asked}
        found = run(session, feeds)
        # Sequences, optionals and strings cannot be given to a session as arrays of numbers.
        usable = [cut for cut in cuts if all(_is_numeric(found[name]) for name in cut.tensors)]
        sizes = {cut: sum(found[name].nbytes for name in cut.tensors) for cut in usable}
        chosen: list[Cut] = []
        left = _BUDGET / len(self._samples)
        for cut in sorted(usable, key=lambda cut: sizes[cut]):
            left -= sizes[cut]
            if left < 0:
                break
            chosen.append(cut)
        return sorted(chosen)


def _size(value: Any) -> int:
    """Bytes of an output; onnxruntime gives sequences as lists, optionals may be nothing."""
    if isinstance(value, list):
        return sum(map(_size, value))
    return int(value.nbytes) if isinstance(value, np.ndarray) else 0


def _is_numeric(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "biuf"


def _chosen(model: ir.Model, count: int) -> list[Cut]:
    costs = [float(cost.macs or 0) + 1 for cost in node_costs(model)]
    if len(costs) != len(model.graph):  # bodies are counted with the rest
        costs = [1.0] * len(model.graph)
    return choose_cuts(find_cuts(model), costs, count)


class _Piece:
    """A part of a model in a session of its own.

    Args:
        model: The whole.
        given: Tensors that it starts from, with their types.
        made: Tensors that it computes.
        threads: Threads of onnxruntime.
    """

    def __init__(
        self, model: ir.Model, given: Mapping[str, ir.DataType], made: Sequence[str], threads: int
    ) -> None:
        self._session: Any = None
        if made:
            part = cut_out(model, given, made)
            self._inputs = [value.name or "" for value in part.graph.inputs]
            self._session = open_session(part, threads=threads)

    def __call__(self, feeds: Feeds, tensors: Feeds) -> Feeds:
        """What it computes of the inputs of the whole and of the tensors that it starts from."""
        if self._session is None:
            return {}
        known = {**feeds, **tensors}
        return run(self._session, {name: known[name] for name in self._inputs if name in known})
