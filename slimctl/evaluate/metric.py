"""What a metric is: it turns each sample into a small record, and records into one value.

Outputs are never kept. Because the value is a function of the records and of a weight for each, the
bootstrap (:mod:`slimctl.evaluate.resampling`) works for all metrics alike: a resample in which a
sample was drawn twice has the weight 2 there.

A metric is a frozen pydantic model whose fields are its options; its file lies in
``slimctl/evaluate/metrics/``, where it is found by itself::

    @register
    class Top1(HitMetric):
        name = "top1"
        summary = "Share of samples whose label has the highest score"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from slimctl.core.contract import Feeds
from slimctl.core.errors import OptionError, UnsupportedModelError, nearest

OPTION = "--metric"

Weights: TypeAlias = NDArray[np.float64]
"""[B, N]: how often each of N records counts in each of B resamples."""

Values: TypeAlias = NDArray[np.float64]
"""[B]: the metric of each resample."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Observed:
    """One batch as a metric sees it.

    Attributes:
        outputs: The model's outputs by name.
        labels: Those of the data, None without.
        reference: Outputs of the reference model, None without.
        first: Index of the first sample.
        size: Number of samples.
    """

    outputs: Feeds
    labels: NDArray[Any] | None
    reference: Feeds | None = None
    first: int = 0
    size: int = 1

    def place(self, index: int | None = None) -> str:
        """One sample of the batch, or all of them, in words."""
        if index is not None:
            return f"sample {self.first + index}"
        return f"samples {self.first} to {self.first + self.size - 1}"


class Metric(BaseModel):
    """Base of all metrics.

    A subclass sets the class attributes, declares its options as fields with a description, and
    implements :meth:`records` and :meth:`weighted`.

    Attributes:
        name: What users type.
        summary: One line without a period.
        reads: The forms of outputs and labels, and what else users must know, in full sentences.
        needs: Labels of the data, a reference model, or neither.
        direction: Which values are better.
        unit: What a record stands for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    name: ClassVar[str]
    summary: ClassVar[str]
    reads: ClassVar[str] = ""
    needs: ClassVar[Literal["labels", "reference", "nothing"]] = "labels"
    direction: ClassVar[Literal["higher", "lower"]] = "higher"
    unit: ClassVar[Literal["samples", "batches"]] = "samples"

    output: str = Field("", description="Output to read; the only one that fits by default.")

    @property
    def higher_is_better(self) -> bool:
        """Which direction is an improvement."""
        return self.direction == "higher"

    def records(self, batch: Observed) -> Sequence[Any]:
        """One record per sample of a batch.

        Raises:
            OptionError: The model has no output that the metric can read.
            SampleError: Labels are missing or not what the metric needs.
        """
        raise NotImplementedError

    def weighted(self, records: Sequence[Any]) -> Callable[[Weights], Values]:
        """The metric as a function of the weights [B, N] of N records, N at least 1."""
        raise NotImplementedError

    def outcomes(self, records: Sequence[Any]) -> NDArray[np.bool_] | None:
        """Hit or miss of each record [N], where that is all that records say; else None."""
        del records
        return None

    def choose(
        self, outputs: Feeds, fits: Callable[[Any], _T | None], wanted: str
    ) -> tuple[str, _T]:
        """Name and form of the output that the metric reads: the named one, or all that fits.

        Args:
            outputs: The model's outputs.
            fits: An output in the form that the metric reads, None when it has another.
            wanted: What that is, in words.

        Raises:
            OptionError: There is none, or several.
        """
        name = self.output or self._only(outputs, fits, wanted)
        if name not in outputs:
            raise OptionError(
                OPTION, f"The model has no output '{name}'", fix=nearest(name, outputs)
            )
        found = fits(outputs[name])
        if found is None:
            raise self.misfit(name, outputs[name], wanted)
        return name, found

    def _only(self, outputs: Feeds, fits: Callable[[Any], Any], wanted: str) -> str:
        names = [name for name, output in outputs.items() if fits(output) is not None]
        if len(names) == 1 or len(outputs) == 1:
            return (names or list(outputs))[0]
        several = ", ".join(f"'{name}'" for name in names or outputs)
        raise OptionError(
            OPTION,
            f"{self.name} cannot tell which output holds {wanted}: {several}",
            fix=f"name one, for example {self.name}:{(names or list(outputs))[0]}",
        )

    def misfit(self, name: str, output: Any, wanted: str) -> OptionError:
        """The error of an output that has another form."""
        shape = list(getattr(output, "shape", []))
        kind = getattr(output, "dtype", type(output).__name__)
        return OptionError(
            OPTION,
            f"{self.name} needs {wanted}, output '{name}' has the shape {shape} ({kind})",
            fix="name another output behind a colon, or give module:function",
        )

    def not_finite(self, name: str, place: str) -> UnsupportedModelError:
        """The error of an output with NaN or infinite values, which have no meaning here."""
        return UnsupportedModelError(
            f"{self.name} cannot be computed: output '{name}' is not finite",
            where=place,
            fix="find the layer with 'slimctl verify MODEL --against ORIGINAL --data SOURCE'",
        )


class SumMetric(Metric):
    """A metric of sums: a record is a row of K numbers, and the value a function of their sums."""

    def from_sums(self, sums: NDArray[np.float64]) -> Values:
        """Values [B] of the sums [B, K]; the first column over the second unless overridden."""
        return ratio(sums[:, 0], sums[:, 1])

    def weighted(self, records: Sequence[Any]) -> Callable[[Weights], Values]:
        """See :meth:`Metric.weighted`."""
        rows = np.stack(records).astype(np.float64)  # [N, K]
        return lambda weights: self.from_sums(weights @ rows)


class HitMetric(SumMetric):
    """A share: a record is the number of hits and the number of cases."""

    def outcomes(self, records: Sequence[Any]) -> NDArray[np.bool_] | None:
        """See :meth:`Metric.outcomes`."""
        rows = np.stack(records)  # [N, 2]
        return rows[:, 0] > 0 if bool((rows[:, 1] == 1).all()) else None


def hit_records(hits: NDArray[np.bool_], size: int) -> list[NDArray[np.float64]]:
    """Hits and cases of each sample; of all of them together where they cannot be told apart.

    Args:
        hits: [N], or [N, T] for T cases in each sample.
        size: N.
    """
    rows = hits.reshape(size, -1) if size and hits.size % size == 0 else hits.reshape(1, -1)
    return [np.array([row.sum(), row.size], np.float64) for row in rows]


def ratio(top: NDArray[np.float64], bottom: NDArray[np.float64]) -> NDArray[np.float64]:
    """Quotients, 0 where the denominator is 0: there is no case to speak of."""
    return np.divide(top, bottom, out=np.zeros_like(top, np.float64), where=bottom != 0)


class Measured:
    """A metric with the records of the samples that it has seen.

    Attributes:
        metric: What is measured.
        records: One per sample, or per batch.
    """

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.records: list[Any] = []
        self._seen = 0

    @property
    def name(self) -> str:
        """The metric's name, without output and options."""
        return self.metric.name

    @property
    def needs(self) -> Literal["labels", "reference", "nothing"]:
        """See :class:`Metric`."""
        return self.metric.needs

    @property
    def higher_is_better(self) -> bool:
        """See :class:`Metric`."""
        return self.metric.higher_is_better

    def update(
        self,
        outputs: Feeds,
        labels: NDArray[Any] | None,
        size: int,
        *,
        reference: Feeds | None = None,
    ) -> None:
        """Adds one batch of ``size`` samples.

        Raises:
            OptionError: The model has no output that the metric can read.
            SampleError: Labels are missing or not what the metric needs.
            SourceError: The user's function failed.
        """
        batch = Observed(outputs, labels, reference, self._seen, size)
        self.records.extend(self.metric.records(batch))
        self._seen += size

    def weighted(self) -> Callable[[Weights], Values]:
        """The value as a function of the records' weights [B, N]."""
        return self.metric.weighted(self.records)

    def value(self) -> float:
        """The metric over all batches so far; 0 without a sample."""
        if not self.records:
            return 0.0
        return float(self.weighted()(np.ones((1, len(self.records))))[0])

    def outcomes(self) -> NDArray[np.bool_] | None:
        """See :meth:`Metric.outcomes`."""
        return self.metric.outcomes(self.records) if self.records else None


_METRICS: dict[str, type[Metric]] = {}
_M = TypeVar("_M", bound=type[Metric])


def register(kind: _M) -> _M:
    """Makes a metric known by its name."""
    assert kind.name not in _METRICS, f"there are two metrics called {kind.name}"
    _METRICS[kind.name] = kind
    return kind


def registered() -> Mapping[str, type[Metric]]:
    """The metrics whose modules have been imported, by name."""
    return _METRICS
