"""Scale-invariant signal-to-distortion ratio of separated or denoised sound.

Le Roux, Wisdom, Erdogan and Hershey, SDR - half-baked or well done?, ICASSP 2019: with the estimate
e, the clean signal s and ``a = <e, s> / |s|^2``, it is ``10 log10(|a s|^2 / |a s - e|^2)`` in dB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from slimctl.evaluate.labels import describe, label_error
from slimctl.evaluate.metric import Observed, SumMetric, register
from slimctl.evaluate.similarity import LIMIT_DB

_FIX = "save the clean signals as an array 'labels' of the output's shape"


def si_sdr_db(estimate: NDArray[Any], clean: NDArray[Any]) -> NDArray[np.float64]:
    """SI-SDR of each row, from -200 (nothing of the signal) to 200 dB (the signal, scaled).

    Args:
        estimate: [R, T], finite.
        clean: [R, T], no row of zeros.
    """
    other, signal = estimate.astype(np.float64), clean.astype(np.float64)
    scale = (other * signal).sum(axis=1) / np.square(signal).sum(axis=1)  # [R]
    target = scale[:, None] * signal
    kept, lost = np.square(target).sum(axis=1), np.square(target - other).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):  # log of 0, and silence: both are bounded
        decibels = 10 * (np.log10(kept) - np.log10(lost))
    bounded: NDArray[np.float64] = np.nan_to_num(decibels, nan=-LIMIT_DB)
    return bounded.clip(-LIMIT_DB, LIMIT_DB)


@register
class SiSdr(SumMetric):
    """``si-sdr``."""

    name = "si-sdr"
    summary = "Mean scale-invariant signal-to-distortion ratio in dB"
    reads = (
        "Signals [N, T], or [N, ..., T] for several sources or channels. Labels are the clean "
        "signals, of the same shape; sources are compared in their order."
    )

    zero_mean: bool = Field(False, description="Take the mean off both signals first.")

    def records(self, batch: Observed) -> Sequence[Any]:
        """Sum of decibels and number of signals, of each sample."""
        name, signals = self.choose(batch.outputs, _signals, "signals [N, T]")
        clean = self._clean(batch, signals)
        records = []
        for index, (estimate, right) in enumerate(zip(signals, clean, strict=True)):
            rows = [array.reshape(-1, array.shape[-1]) for array in (estimate, right)]
            if not np.isfinite(rows[0]).all():
                raise self.not_finite(name, batch.place(index))
            decibels = si_sdr_db(*(self._centered(array) for array in rows))
            records.append((decibels.sum(), len(decibels)))
        return records

    def _centered(self, signals: NDArray[Any]) -> NDArray[np.float64]:
        wide = signals.astype(np.float64)
        return wide - wide.mean(axis=1, keepdims=True) if self.zero_mean else wide

    def _clean(self, batch: Observed, signals: NDArray[Any]) -> NDArray[Any]:
        labels = batch.labels
        wanted = f"clean signals of shape {list(signals.shape)}"
        if labels is None or labels.size != signals.size or labels.dtype.kind not in "fiu":
            raise label_error(batch, found=describe(labels), wanted=wanted, fix=_FIX)
        clean = labels.reshape(signals.shape)
        for index, right in enumerate(clean):
            rows = self._centered(right.reshape(-1, right.shape[-1]))
            if not np.isfinite(rows).all() or not np.square(rows).sum(axis=1).all():
                raise label_error(
                    batch,
                    found="silence, or values that are not finite",
                    wanted="signals with some energy: the ratio of silence is not defined",
                    fix="leave such samples out",
                    index=index,
                )
        return clean


def _signals(output: Any) -> NDArray[Any] | None:
    floats = isinstance(output, np.ndarray) and output.dtype.kind == "f"
    return output if floats and output.ndim >= 2 and output.shape[-1] > 1 else None
