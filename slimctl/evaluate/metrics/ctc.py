"""Text that a CTC network reads: greedy decoding, exact matches, character error rate.

Graves, Fernández, Gomez and Schmidhuber, Connectionist Temporal Classification, ICML 2006, "best
path decoding": the best class of each frame, repeats collapsed, blanks dropped. Distances are
Levenshtein's: the fewest insertions, deletions and substitutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from slimctl.core.errors import OptionError
from slimctl.evaluate.labels import label_error, padded_rows
from slimctl.evaluate.metric import OPTION, HitMetric, Observed, SumMetric, hit_records, register


def greedy(scores: NDArray[Any], blank: int) -> NDArray[np.int64]:
    """The symbols that scores [T, C] spell."""
    best = np.argmax(scores, axis=-1)
    first = np.ones(len(best), bool)
    first[1:] = best[1:] != best[:-1]
    spelled: NDArray[np.int64] = best[first & (best != blank)]
    return spelled


def edit_distance(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Levenshtein distance of two sequences.

    One row of the table at a time: with ``m`` the best of deletion and substitution, insertions
    give ``row[j] = min over i <= j of m[i] + (j - i)``, a running minimum of ``m[j] - j``.
    """
    steps = np.arange(len(other) + 1)
    row = steps
    for symbol in one:
        best = row + 1
        best[1:] = np.minimum(best[1:], row[:-1] + (other != symbol))
        row = np.minimum.accumulate(best - steps) + steps
    return int(row[-1])


class CtcMetric(SumMetric):
    """What both have in common: options, and pairs of read and right texts."""

    blank: int = Field(0, ge=-1, description="Class that means no symbol; -1 for the last one.")
    layout: Literal["ntc", "tnc"] = Field(
        "ntc", description="Axes of the scores: samples N, frames T, classes C."
    )

    def texts(self, batch: Observed) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """What was read and what is right, for each sample.

        Raises:
            OptionError: No output holds scores of frames.
            SampleError: Labels are no rows of symbols.
        """
        name, scores = self.choose(batch.outputs, _frames, f"scores [{self._axes()}]")
        if self.layout == "tnc":
            scores = scores.swapaxes(0, 1)  # [N, T, C]
        blank = scores.shape[-1] - 1 if self.blank < 0 else self.blank
        if len(scores) != batch.size or blank >= scores.shape[-1]:
            raise OptionError(
                OPTION,
                f"Output '{name}' has the shape {list(batch.outputs[name].shape)}, wanted"
                f" [{self._axes()}] with {batch.size} samples and a blank class {blank}",
                fix=f"{self.name}?layout=tnc&blank=-1 is for frames first and the blank last",
            )
        wanted = f"rows of class numbers below {scores.shape[-1]} other than the blank {blank}"
        rows = padded_rows(batch, wanted=f"{wanted}, padded with -1 at their ends", fix=_FIX)
        for index, row in enumerate(rows):
            if ((row == blank) | (row >= scores.shape[-1])).any():
                found = f"the row {row[:12].tolist()}"
                raise label_error(batch, found=found, wanted=wanted, fix=_FIX, index=index)
        return [(greedy(frames, blank), row) for frames, row in zip(scores, rows, strict=True)]

    def _axes(self) -> str:
        return ", ".join(self.layout.upper())


_READS = (
    "Scores of classes for each frame, [N, T, C] or [T, N, C]. Labels are rows of class numbers, "
    "padded with -1 at their ends. Both sums of the error rate are over all samples."
)
_FIX = "give one row of integers per sample, the classes of its symbols, and fill it up with -1"


def _frames(output: Any) -> NDArray[Any] | None:
    floats = isinstance(output, np.ndarray) and output.dtype.kind == "f"
    return output if floats and output.ndim == 3 and output.shape[-1] > 1 else None


@register
class CtcExact(CtcMetric, HitMetric):
    """``ctc-exact``."""

    name = "ctc-exact"
    summary = "Share of samples whose greedily decoded text is exactly the label"
    reads = _READS

    def records(self, batch: Observed) -> Sequence[Any]:
        """Hit or miss of each sample."""
        hits = [np.array_equal(read, right) for read, right in self.texts(batch)]
        return hit_records(np.array(hits), batch.size)


@register
class CtcCer(CtcMetric):
    """``ctc-cer``."""

    name = "ctc-cer"
    summary = "Character error rate of greedily decoded text: edit distances over label lengths"
    reads = _READS
    direction: ClassVar[Literal["higher", "lower"]] = "lower"

    def records(self, batch: Observed) -> Sequence[Any]:
        """Edit distance and length of the label, of each sample."""
        return [(edit_distance(read, right), len(right)) for read, right in self.texts(batch)]

    def from_sums(self, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """Errors per symbol; labels without any symbol count as one."""
        rates: NDArray[np.float64] = sums[:, 0] / np.maximum(sums[:, 1], 1)
        return rates
