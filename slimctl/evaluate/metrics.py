"""How far outputs are from a reference, and how good they are on labeled data.

Everything here accumulates over batches; outputs are never kept.

Metrics of ``slimctl eval``, by name:

- ``top1``, ``top5``: share of samples whose label is among the highest scores;
- ``agreement``: share of samples for which a reference model has the same highest score;
- each with ``:NAME`` behind it when the model has several outputs that hold class scores;
- ``module:function``: the user's own, see :class:`FunctionMetric`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from slimctl.core.contract import Feeds
from slimctl.core.errors import DataError, OptionError, SampleError, SourceError, nearest
from slimctl.data.callables import load_function, user_code_error

LIMIT_DB = 200.0
"""SQNR of identical tensors, a finite number so that JSON can hold it; float64 reaches 320 dB."""

_BLOCK = 1 << 13
# Values compared at a time. The blocks stay in the first-level cache, and OpenBLAS computes dot
# products of more than 10,000 values in several threads, which on a busy machine wait for each
# other far longer than they compute.

OPTION = "--metric"


class Similarity:
    """Distance of a tensor from its reference over any number of batches.

    Values that are not finite in the reference do not count if the other has the same there. A
    non-finite value anywhere else is counted in ``non_finite`` and makes the SQNR -200 dB.

    Attributes:
        elements: Number of values compared.
        non_finite: Number of values that are not finite in one of the two and not the same.
        max_abs_error: Largest absolute difference of finite values.
    """

    def __init__(self) -> None:
        self.elements = 0
        self.non_finite = 0
        self.max_abs_error = 0.0
        self._signal = 0.0
        self._noise = 0.0
        self._other = 0.0
        self._dot = 0.0

    def update(self, reference: NDArray[Any], other: NDArray[Any]) -> None:
        """Adds one pair of arrays.

        Raises:
            DataError: The shapes differ.
        """
        if reference.shape != other.shape:
            raise DataError(
                f"Shapes differ: the reference has {list(reference.shape)},"
                f" the other {list(other.shape)}",
                fix="compare models with the same interface",
            )
        self.elements += reference.size
        for start in range(0, reference.size, _BLOCK):
            stop = start + _BLOCK
            self._add(
                reference.reshape(-1)[start:stop].astype(np.float64),
                other.reshape(-1)[start:stop].astype(np.float64),
            )

    def _add(self, reference: NDArray[np.float64], other: NDArray[np.float64]) -> None:
        signal = float(np.dot(reference, reference))
        energy = float(np.dot(other, other))
        if not math.isfinite(signal) or not math.isfinite(energy):
            reference, other = self._finite(reference, other)
            signal, energy = float(np.dot(reference, reference)), float(np.dot(other, other))
        difference = reference - other
        self._signal += signal
        self._other += energy
        self._dot += float(np.dot(reference, other))
        self._noise += float(np.dot(difference, difference))
        if difference.size:
            largest = float(np.abs(difference, out=difference).max())
            self.max_abs_error = max(self.max_abs_error, largest)

    def _finite(
        self, reference: NDArray[np.float64], other: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        finite = np.isfinite(reference) & np.isfinite(other)
        same = (reference == other) | (np.isnan(reference) & np.isnan(other))
        self.non_finite += int((~finite & ~same).sum())
        return reference[finite], other[finite]

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio in dB, ``10 log10(sum r^2 / sum (r - o)^2)``.

        200 for identical values, -200 for a reference of zeros that is not met or for values that
        are not finite; always within these bounds.
        """
        if self.non_finite:
            return -LIMIT_DB
        if self._noise == 0.0:
            return LIMIT_DB
        if self._signal == 0.0:
            return -LIMIT_DB
        if not math.isfinite(self._signal + self._noise):
            return -LIMIT_DB  # squares of float64 values beyond 1e154
        ratio = 10.0 * (math.log10(self._signal) - math.log10(self._noise))
        return min(max(ratio, -LIMIT_DB), LIMIT_DB)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two; 1 when both are zero, 0 when one is."""
        if self._signal == 0.0 or self._other == 0.0:
            return 1.0 if self._signal == self._other else 0.0
        return self._dot / math.sqrt(self._signal) / math.sqrt(self._other)


def _similarity(reference: NDArray[Any], other: NDArray[Any]) -> Similarity:
    result = Similarity()
    result.update(reference, other)
    return result


def sqnr_db(reference: NDArray[Any], other: NDArray[Any]) -> float:
    """See :attr:`Similarity.sqnr_db`."""
    return _similarity(reference, other).sqnr_db


def cosine(reference: NDArray[Any], other: NDArray[Any]) -> float:
    """See :attr:`Similarity.cosine`."""
    return _similarity(reference, other).cosine


def max_abs_error(reference: NDArray[Any], other: NDArray[Any]) -> float:
    """Largest absolute difference of finite values."""
    return _similarity(reference, other).max_abs_error


class Share:
    """A share of something, accumulated.

    Attributes:
        total: Number of cases.
    """

    def __init__(self) -> None:
        self._hits = 0
        self.total = 0

    def update(self, hits: NDArray[np.bool_]) -> None:
        """Adds one truth value per case."""
        self._hits += int(hits.sum())
        self.total += hits.size

    @property
    def value(self) -> float | None:
        """The share, or None without a single case."""
        return self._hits / self.total if self.total else None


def class_scores(output: Any) -> NDArray[Any] | None:
    """An output as scores over classes along the last axis, None when it cannot be that.

    Floats of shape [N, C] or [N, T, C] with at least two classes; trailing axes of length one are
    dropped, [N, C, 1, 1] being what fully convolutional classifiers give.
    """
    if not isinstance(output, np.ndarray) or output.dtype.kind != "f":
        return None
    while output.ndim > 2 and output.shape[-1] == 1:
        output = output[..., 0]
    return output if output.ndim in (2, 3) and output.shape[-1] > 1 else None


def in_top_k(scores: NDArray[Any], labels: NDArray[Any], k: int) -> NDArray[np.bool_]:
    """Whether each label is among the k highest scores; ties count for the lower class.

    Args:
        scores: [..., C]
        labels: Integers [...]
        k: At least 1.
    """
    own = np.take_along_axis(scores, labels[..., None], axis=-1)  # [..., 1]
    earlier = np.arange(scores.shape[-1]) < labels[..., None]
    above = (scores > own) | ((scores == own) & earlier)
    # A NaN score is above nothing and below nothing; it must not pass for a hit.
    return np.asarray((above.sum(axis=-1) < k) & np.isfinite(own[..., 0]))


def top_k_accuracy(scores: NDArray[Any], labels: NDArray[Any], k: int) -> float:
    """Share of labels among the k highest scores; see :func:`in_top_k`."""
    return float(in_top_k(scores, labels, k).mean())


class Metric(Protocol):
    """A number for a model, accumulated over batches.

    Attributes:
        name: As the user spells it.
        labels_from: What labels are: those of the data, the highest scores of a reference model,
            or nothing needed.
        higher_is_better: Which direction is an improvement.
    """

    name: str
    labels_from: Literal["data", "reference", "nowhere"]
    higher_is_better: bool

    def update(self, outputs: Feeds, labels: NDArray[Any] | None, size: int) -> None:
        """Adds one batch of ``size`` samples."""
        ...

    def value(self) -> float:
        """The metric over all batches so far."""
        ...


class TopK:
    """``top1``, ``top5`` and ``agreement``."""

    higher_is_better = True

    def __init__(
        self, name: str, k: int, *, output: str, labels_from: Literal["data", "reference"]
    ) -> None:
        self.name = name
        self.labels_from: Literal["data", "reference", "nowhere"] = labels_from
        self._k = k
        self._output = output
        self._share = Share()
        self._seen = 0

    def scores(self, outputs: Feeds) -> NDArray[Any]:
        """The output that holds class scores.

        Raises:
            OptionError: There is none, several, or not enough classes.
        """
        name = self._output or self._only_scores(outputs)
        if name not in outputs:
            raise OptionError(
                OPTION, f"The model has no output '{name}'", fix=nearest(name, outputs)
            )
        scores = class_scores(outputs[name])
        if scores is None or scores.shape[-1] <= self._k:
            shape = list(getattr(outputs[name], "shape", []))
            raise OptionError(
                OPTION,
                f"{self.name} needs scores of more than {self._k} classes, output '{name}' has"
                f" the shape {shape}",
                fix="name another output behind a colon, or give module:function",
            )
        return scores

    def _only_scores(self, outputs: Feeds) -> str:
        names = [name for name, output in outputs.items() if class_scores(output) is not None]
        if len(names) != 1:
            several = ", ".join(f"'{name}'" for name in names or outputs)
            raise OptionError(
                OPTION,
                f"{self.name} cannot tell which output holds class scores: {several}",
                fix=f"name one, for example {self.name}:{(names or list(outputs))[0]}",
            )
        return names[0]

    def update(self, outputs: Feeds, labels: NDArray[Any] | None, size: int) -> None:
        """Adds one batch.

        Raises:
            SampleError: Labels are missing, no class numbers, or not one per sample.
        """
        scores = self.scores(outputs)
        found = "no labels" if labels is None else _label_fault(labels, scores)
        if found or labels is None:
            raise SampleError(
                f"samples {self._seen} to {self._seen + size - 1}",
                "labels",
                found=found,
                wanted=f"class numbers 0 to {scores.shape[-1] - 1} of shape"
                f" {list(scores.shape[:-1])}",
                fix="give one integer per sample; np.argmax(one_hot, axis=1) makes them",
            )
        self._seen += size
        self._share.update(in_top_k(scores, labels.reshape(scores.shape[:-1]), self._k))

    def value(self) -> float:
        """The share of hits; 0 without a sample."""
        return self._share.value or 0.0


def _label_fault(labels: NDArray[Any], scores: NDArray[Any]) -> str:
    """What is wrong with labels, nothing when they are right."""
    if labels.dtype.kind not in "iu":
        return f"dtype {labels.dtype.name}"
    if labels.size != math.prod(scores.shape[:-1]):
        return f"shape {list(labels.shape)}"
    if labels.size and not (labels.min() >= 0 and labels.max() < scores.shape[-1]):
        return f"numbers from {labels.min()} to {labels.max()}"
    return ""


class FunctionMetric:
    """The user's own metric: ``function(outputs, labels)``, called once per batch.

    ``outputs`` is a dictionary of arrays by output name, ``labels`` an array or None. It returns
    the mean over the batch's samples, which is weighted by their number, or ``(sum, count)`` where
    the number of cases is another, for example for words. More is better, unless the function has
    an attribute ``higher_is_better = False``.
    """

    labels_from: Literal["data", "reference", "nowhere"] = "nowhere"

    def __init__(self, name: str) -> None:
        self.name = name
        self._function: Callable[..., Any] = load_function(name)
        self.higher_is_better = bool(getattr(self._function, "higher_is_better", True))
        self._sum = 0.0
        self._count = 0.0

    def update(self, outputs: Feeds, labels: NDArray[Any] | None, size: int) -> None:
        """Adds one batch.

        Raises:
            SourceError: The function failed, or returned no number.
        """
        try:
            result = self._function(outputs, labels)
        except Exception as error:  # the user's code may raise anything
            raise user_code_error(self.name, error) from error
        total, count = self._numbers(result, size)
        self._sum += total
        self._count += count

    def _numbers(self, result: Any, size: int) -> tuple[float, float]:
        try:
            total, count = result if isinstance(result, tuple) else (float(result) * size, size)
            numbers = float(total), float(count)
        except (TypeError, ValueError) as error:
            raise self._no_number(result) from error
        if not all(map(math.isfinite, numbers)):
            raise self._no_number(result)
        return numbers

    def _no_number(self, result: Any) -> SourceError:
        return SourceError(
            self.name,
            f"The metric returned {result!r:.80}",
            fix="return the mean over the batch as a finite number, or (sum, count)",
        )

    def value(self) -> float:
        """Sum over count; 0 without a case."""
        return self._sum / self._count if self._count else 0.0


_TOP_K: dict[str, tuple[int, Literal["data", "reference"]]] = {
    "top1": (1, "data"),
    "top5": (5, "data"),
    "agreement": (1, "reference"),
}


def metric_names() -> Iterator[str]:
    """The built-in metrics."""
    yield from _TOP_K


def open_metric(name: str) -> Metric:
    """A metric that has seen nothing yet.

    Raises:
        OptionError: There is no such metric.
        SourceError: The user's function cannot be imported.
    """
    kind, _, output = name.partition(":")
    if kind in _TOP_K:
        k, labels_from = _TOP_K[kind]
        return TopK(kind, k, output=output, labels_from=labels_from)
    if output:
        return FunctionMetric(name)
    raise OptionError(
        OPTION,
        f"Unknown metric '{name}'",
        fix=f"{nearest(name, _TOP_K)}; valid: {', '.join(_TOP_K)}, module:function",
    )
