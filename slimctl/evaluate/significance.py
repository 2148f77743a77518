"""Whether a score, or the difference of two, is more than chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slimctl.core.errors import DataError
from slimctl.evaluate.accuracy import Score
from slimctl.evaluate.metric import Measured
from slimctl.evaluate.resampling import (
    CONFIDENCE,
    RESAMPLES,
    bootstrap,
    bootstrap_p,
    bounds,
    mcnemar_p,
)

Verdict: TypeAlias = Literal["within noise", "significant", "unknown"]
Test: TypeAlias = Literal["exact McNemar test", "paired bootstrap"]


@dataclass(frozen=True)
class Interval:
    """Where the value on all samples of this kind probably is.

    Attributes:
        low: Lower end.
        high: Upper end.
        confidence: Share of such intervals that hold the true value.
        resamples: Draws of the bootstrap.
        unit: What was drawn: samples, or batches for ``module:function``.
    """

    low: float
    high: float
    confidence: float
    resamples: int
    unit: str


@dataclass(frozen=True)
class Difference:
    """Two models on the same samples.

    Attributes:
        metric: As the user spelled it.
        reference: Value of the first model.
        model: Value of the second.
        drop: How much worse the second is, in the metric's unit; negative when it is better.
        low: Lower end of the drop's 95 % interval; None when there is one record only.
        high: Its upper end.
        p_value: Probability of a difference as large without a true one; None as above.
        test: Where the p-value comes from; None as above.
        within_noise: The p-value is at least 5 %; None when nothing can be told.
    """

    metric: str
    reference: float
    model: float
    drop: float
    low: float | None
    high: float | None
    p_value: float | None
    test: Test | None
    within_noise: bool | None

    @property
    def verdict(self) -> Verdict:
        """In words."""
        if self.within_noise is None:
            return "unknown"
        return "within noise" if self.within_noise else "significant"


def interval(score: Score, *, seed: int = 0, resamples: int = RESAMPLES) -> Interval | None:
    """The 95 % interval of a score; None when there are not two records to draw from."""
    measured = score.measured
    if measured is None or len(measured.records) < 2:
        return None
    values = bootstrap(measured.weighted(), len(measured.records), resamples=resamples, seed=seed)
    return Interval(*bounds(values), CONFIDENCE, resamples, measured.metric.unit)


def paired(
    reference: Score, model: Score, *, seed: int = 0, resamples: int = RESAMPLES
) -> Difference:
    """Compares two models that were measured with one metric on the same data.

    The interval is that of the paired bootstrap. So is the p-value, except for metrics of which a
    sample is a hit or a miss: they have an exact test, and it decides.

    Raises:
        DataError: The scores are of different metrics or data.
    """
    first, second = _records(reference, model)
    sign = 1.0 if reference.higher_is_better else -1.0
    count = len(first.records)
    low = high = p_value = test = None
    if count > 1:
        before, after = (
            bootstrap(side.weighted(), count, resamples=resamples, seed=seed)
            for side in (first, second)
        )
        drops = sign * (before - after)
        low, high = bounds(drops)
        p_value, test = _test(first, second, drops)
    return Difference(
        reference.metric,
        reference.value,
        model.value,
        sign * (reference.value - model.value),
        low,
        high,
        p_value,
        test,
        None if p_value is None else p_value >= 1 - CONFIDENCE,
    )


def _test(first: Measured, second: Measured, drops: NDArray[np.float64]) -> tuple[float, Test]:
    """The p-value, and where it comes from."""
    one, other = first.outcomes(), second.outcomes()
    if one is None or other is None:
        return bootstrap_p(drops), "paired bootstrap"
    return mcnemar_p(one, other), "exact McNemar test"


def _records(reference: Score, model: Score) -> tuple[Measured, Measured]:
    first, second = reference.measured, model.measured
    counts = [0 if side is None else len(side.records) for side in (first, second)]
    same = reference.metric == model.metric and counts[0] == counts[1]
    if first is None or second is None or not same:
        raise DataError(
            f"{reference.metric} of {counts[0]} records cannot be paired with {model.metric} of"
            f" {counts[1]}",
            fix="measure both models with one metric on the same data",
        )
    return first, second
