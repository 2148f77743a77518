"""The user's own metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from slimctl.core.errors import SourceError
from slimctl.data.callables import load_function, user_code_error
from slimctl.evaluate.metric import Observed, SumMetric


class FunctionMetric(SumMetric):
    """The user's own metric: ``function(outputs, labels)``, called once per batch.

    ``outputs`` is a dictionary of arrays by output name, ``labels`` an array or None. It returns
    the mean over the batch's samples, which is weighted by their number, or ``(sum, count)`` where
    the number of cases is another, for example for words. More is better, unless the function has
    an attribute ``higher_is_better = False``.

    A record is the sum and the count of one batch: intervals are made by drawing batches. With
    ``--batch-size 1`` these are samples.
    """

    name = "module:function"
    summary = "The user's own function of outputs and labels"
    reads = (
        "`function(outputs, labels)` gets a dictionary of arrays by output name, and an array or "
        "None, of one batch. It returns the mean over the batch's samples, or `(sum, count)`. Less "
        "is better where it has an attribute `higher_is_better = False`. The interval is made by "
        "drawing batches, so give it many: with `--batch-size 1` they are samples."
    )
    needs: ClassVar[Literal["labels", "reference", "nothing"]] = "nothing"
    unit: ClassVar[Literal["samples", "batches"]] = "batches"

    spec: str
    function: Callable[..., Any]

    @classmethod
    def load(cls, spec: str) -> FunctionMetric:
        """Imports the function.

        Raises:
            SourceError: It cannot be imported.
        """
        return cls(spec=spec, function=load_function(spec))

    @property
    def higher_is_better(self) -> bool:
        """What the function says."""
        return bool(getattr(self.function, "higher_is_better", True))

    def records(self, batch: Observed) -> Sequence[Any]:
        """Sum and count of the batch.

        Raises:
            SourceError: The function failed, or returned no number.
        """
        try:
            result = self.function(batch.outputs, batch.labels)
        except Exception as error:  # the user's code may raise anything
            raise user_code_error(self.spec, error) from error
        return [self._numbers(result, batch.size)]

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
            self.spec,
            f"The metric returned {result!r:.80}",
            fix="return the mean over the batch as a finite number, or (sum, count)",
        )
