"""Two models on the same data: how far apart their outputs are, and where they part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Feeds, Progress, SilentProgress, Skipped
from slimctl.core.errors import UnsupportedModelError, nearest
from slimctl.data.batch import Batch
from slimctl.evaluate.divergence import BOUND_DB, SAMPLES, Divergence, locate
from slimctl.evaluate.metrics import Share, Similarity, class_scores
from slimctl.graph.session import Level, Products, open_session, run


@dataclass(frozen=True)
class OutputComparison:
    """One output of two models over all samples.

    Attributes:
        name: Name of the output.
        elements: Number of values compared.
        equal: Share of equal values, for outputs that are no floats; the floats' measures are None
            then.
        sqnr_db: Signal-to-quantization-noise ratio, from -200 to 200 (identical).
        cosine: Cosine similarity.
        max_abs_error: Largest absolute difference.
        top1_agreement: Share of cases with the same highest score, for outputs that look like
            class scores (:func:`likely_scores`).
        non_finite: NaN and infinite values that only one of the models has.
    """

    name: str
    elements: int
    equal: float | None = None
    sqnr_db: float | None = None
    cosine: float | None = None
    max_abs_error: float | None = None
    top1_agreement: float | None = None
    non_finite: int = 0


@dataclass(frozen=True)
class Comparison:
    """Two models compared.

    Attributes:
        samples: Number of samples.
        outputs: One entry per output, in the model's order.
        skipped: Outputs that cannot be compared, with the reason.
        divergence: Where the models part; None when it was not asked for.
    """

    samples: int
    outputs: tuple[OutputComparison, ...]
    skipped: tuple[Skipped, ...] = ()
    divergence: Divergence | None = None

    @property
    def worst_sqnr_db(self) -> float | None:
        """The lowest SQNR of all float outputs; None without a float output."""
        return min((out.sqnr_db for out in self.outputs if out.sqnr_db is not None), default=None)

    @property
    def worst_agreement(self) -> float | None:
        """The lowest top-1 agreement; None without an output that holds class scores."""
        found = (out.top1_agreement for out in self.outputs)
        return min((share for share in found if share is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """All of it, JSON types only."""
        values = asdict(self)
        values["skipped"] = [skip._asdict() for skip in self.skipped]
        return {"worst_sqnr_db": self.worst_sqnr_db, **values}


class _OutputTotals:
    """What accumulates for one output."""

    def __init__(self) -> None:
        self._similarity = Similarity()
        self._agreement = Share()
        self._equal = Share()

    def update(self, reference: NDArray[Any], other: NDArray[Any]) -> None:
        if not is_float(reference):
            self._equal.update(np.equal(reference, other))
            return
        self._similarity.update(reference, other)
        expected, found = likely_scores(reference), class_scores(other)
        if expected is not None and found is not None:
            self._agreement.update(np.argmax(expected, axis=-1) == np.argmax(found, axis=-1))

    def result(self, name: str) -> OutputComparison:
        if self._equal.total:
            return OutputComparison(name, self._equal.total, equal=self._equal.value)
        return OutputComparison(
            name,
            self._similarity.elements,
            sqnr_db=self._similarity.sqnr_db,
            cosine=self._similarity.cosine,
            max_abs_error=self._similarity.max_abs_error,
            top1_agreement=self._agreement.value,
            non_finite=self._similarity.non_finite,
        )


class _Totals:
    """What accumulates for all outputs."""

    def __init__(self) -> None:
        self._outputs: dict[str, _OutputTotals] = {}
        self._skipped: dict[str, Skipped] = {}

    def add(self, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Adds one run of both models. Sequences and maps come as lists and are left out."""
        for name, value in expected.items():
            if isinstance(value, np.ndarray):
                _check_same_shape(name, value, found[name])
                self._outputs.setdefault(name, _OutputTotals()).update(value, found[name])
            else:
                self._skipped[name] = Skipped(name, f"a {type(value).__name__} is no tensor")

    def results(self) -> tuple[OutputComparison, ...]:
        return tuple(totals.result(name) for name, totals in self._outputs.items())

    def skipped(self) -> tuple[Skipped, ...]:
        return tuple(self._skipped.values())


def is_float(array: Any) -> bool:
    """Whether an output is an array of floats, those of ml_dtypes included."""
    return isinstance(array, np.ndarray) and array.dtype.kind in "fV"


def likely_scores(output: NDArray[Any]) -> NDArray[Any] | None:
    """An output as class scores, where it looks like them; see :func:`class_scores`.

    Three axes are also what recurrent states and feature sequences have, so rows of [N, T, C] must
    be probabilities: not negative, with the sum 1.
    """
    scores = class_scores(output)
    if scores is None or scores.ndim == 2:
        return scores
    sums = scores.sum(axis=-1, dtype=np.float64)
    # float16 rounds each probability by up to 2^-11 of it, and so their sum.
    probable = bool(np.all(np.abs(sums - 1.0) < 1e-3)) and bool(scores.min(initial=0.0) >= 0.0)
    return scores if probable else None


def outputs_of(
    model: ir.Model | Path, feeds: Feeds, *, level: Level = Level.ALL, threads: int = 0
) -> Feeds:
    """All outputs of one run.

    Raises:
        ModelExecutionError: onnxruntime refuses the model or the inputs.
    """
    return run(open_session(model, level=level, threads=threads), feeds)


def compare_models(
    reference: ir.Model | Path,
    other: ir.Model | Path,
    batches: Iterable[Batch],
    *,
    find_divergence: bool = False,
    bound_db: float = BOUND_DB,
    threads: int = 0,
    level: Level = Level.ALL,
    products: Products = Products.EXACT,
    progress: Progress | None = None,
    total: int | None = None,
) -> Comparison:
    """Compares two models on the same data in one pass; no output is kept.

    Args:
        reference: The original.
        other: The compressed one, with the same inputs and outputs.
        batches: Data; one pass over them is made.
        find_divergence: Also look inside, on the first few samples; see
            :mod:`slimctl.evaluate.divergence`.
        bound_db: A tensor below this SQNR has diverged.
        threads: Threads of onnxruntime, 0 for all cores.
        level: Graph optimizations of onnxruntime for the outputs.
        products: Arithmetic of its integer kernels.
        progress: Where to say how far the work is.
        total: Number of batches, where it is known.

    Raises:
        UnsupportedModelError: The models have different inputs or outputs.
        ModelExecutionError: onnxruntime refuses one of the models.
    """
    sessions = [
        open_session(model, level=level, threads=threads, products=products)
        for model in (reference, other)
    ]
    _check_interfaces(*sessions)
    totals = _Totals()
    first_feeds: list[Feeds] = []
    samples = 0
    tracked = (progress or SilentProgress()).track(iter(batches), total=total, label="compare")
    for batch in tracked:
        totals.add(*(run(session, batch.feeds) for session in sessions))
        if find_divergence and samples < SAMPLES:
            first_feeds.append(batch.feeds)
        samples += batch.size
    del sessions  # the search opens its own, and memory should not hold both
    comparison = Comparison(samples, totals.results(), totals.skipped())
    if not find_divergence:
        return comparison
    divergence = locate(
        reference,
        other,
        first_feeds,
        bound_db=bound_db,
        threads=threads,
        outputs_db=comparison.worst_sqnr_db,
    )
    return replace(comparison, divergence=divergence)


def _check_interfaces(reference: Any, other: Any) -> None:
    for kind, ports in (("input", "get_inputs"), ("output", "get_outputs")):
        expected = [port.name for port in getattr(reference, ports)()]
        found = [port.name for port in getattr(other, ports)()]
        missing = sorted(set(expected) ^ set(found))
        if missing:
            owner, rest = ("second", found) if missing[0] in expected else ("first", expected)
            raise UnsupportedModelError(
                f"The models have different {kind}s: '{missing[0]}' is missing in the {owner}",
                where=f"{kind} '{missing[0]}'",
                fix=f"compare models with the same {kind}s; {nearest(missing[0], rest)}",
            )


def _check_same_shape(name: str, expected: NDArray[Any], found: NDArray[Any]) -> None:
    if expected.shape != found.shape:
        raise UnsupportedModelError(
            f"Output '{name}' has the shape {list(expected.shape)} in the first model and"
            f" {list(found.shape)} in the second",
            where=f"output '{name}'",
            fix="compare models that compute the same function",
        )
