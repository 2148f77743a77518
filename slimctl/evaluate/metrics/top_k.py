"""Shares of right classes, and of classes that a reference model finds as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from slimctl.core.contract import Feeds
from slimctl.core.errors import UnsupportedModelError
from slimctl.evaluate.class_scores import class_scores, in_top_k
from slimctl.evaluate.labels import class_numbers
from slimctl.evaluate.metric import HitMetric, Observed, hit_records, register


class TopK(HitMetric):
    """What the three have in common. A record: hits and cases of a sample."""

    reads = (
        "Scores of classes [N, C] or [N, T, C]. Labels are class numbers [N] or [N, T]. Of equal "
        "scores the lower class comes first."
    )
    k: ClassVar[int] = 1

    def scores(self, outputs: Feeds) -> NDArray[Any]:
        """The output that holds class scores, [N, C] or [N, T, C].

        Raises:
            OptionError: There is none, several, or not enough classes.
        """
        name, scores = self.choose(outputs, class_scores, "class scores")
        if scores.shape[-1] <= self.k:
            raise self.misfit(name, outputs[name], f"scores of more than {self.k} classes")
        return scores

    def wanted(self, batch: Observed, scores: NDArray[Any]) -> NDArray[np.int64]:
        """The class [N] or [N, T] that should be among the best."""
        return class_numbers(batch, scores.shape[:-1], scores.shape[-1])

    def records(self, batch: Observed) -> Sequence[Any]:
        """See :meth:`slimctl.evaluate.metric.Metric.records`."""
        scores = self.scores(batch.outputs)
        return hit_records(in_top_k(scores, self.wanted(batch, scores), self.k), batch.size)


@register
class Top1(TopK):
    """``top1``."""

    name = "top1"
    summary = "Share of samples whose label has the highest score"


@register
class Top5(TopK):
    """``top5``."""

    name = "top5"
    summary = "Share of samples whose label is among the five highest scores"
    k = 5


@register
class Agreement(TopK):
    """``agreement``."""

    name = "agreement"
    summary = "Share of samples for which the reference model has the same highest score"
    reads = "Scores of classes [N, C] or [N, T, C] of both models."
    needs: ClassVar[Literal["labels", "reference", "nothing"]] = "reference"

    def wanted(self, batch: Observed, scores: NDArray[Any]) -> NDArray[np.int64]:
        """What the reference finds.

        Raises:
            UnsupportedModelError: Its scores have another shape.
        """
        assert batch.reference is not None, "the caller runs it"
        expected = self.scores(batch.reference)
        if expected.shape != scores.shape:
            raise UnsupportedModelError(
                f"The scores have the shape {list(scores.shape)}, those of the reference"
                f" {list(expected.shape)}",
                where=batch.place(),
                fix="give a reference that has the same classes",
            )
        best: NDArray[np.int64] = np.argmax(expected, axis=-1)
        return best
