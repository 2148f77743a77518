"""Labels as metrics need them, or an error that says what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimctl.core.errors import SampleError
from slimctl.evaluate.metric import Observed

PADDING = -1
"""Fills up rows of labels that are shorter than others."""


def label_error(
    batch: Observed, *, found: str, wanted: str, fix: str, index: int | None = None
) -> SampleError:
    """The error of labels that do not fit, of one sample or of the whole batch."""
    return SampleError(batch.place(index), "labels", found=found, wanted=wanted, fix=fix)


def class_numbers(
    batch: Observed, shape: Sequence[int], classes: int | None, ignore: int | None = None
) -> NDArray[np.int64]:
    """Labels as class numbers.

    Args:
        batch: Where they are.
        shape: What they are reshaped to.
        classes: Number of classes, None for any.
        ignore: A number that is no class and is allowed nevertheless.

    Raises:
        SampleError: They are missing, no integers, too few or too many, or out of range.
    """
    labels = batch.labels
    found = "no labels" if labels is None else _fault(labels, shape, classes, ignore)
    if found or labels is None:
        last = "" if classes is None else f" to {classes - 1}"
        also = "" if ignore is None else f" (or {ignore}, which is left out)"
        raise label_error(
            batch,
            found=found,
            wanted=f"class numbers 0{last}{also} of shape {list(shape)}",
            fix=_FIX if len(shape) == 1 else _FIX_MAP,
        )
    return labels.reshape(shape).astype(np.int64)


_FIX = "give one integer per sample; np.argmax(one_hot, axis=1) makes them"
_FIX_MAP = "give one integer for each position, resized to the output's size"


def _fault(
    labels: NDArray[Any], shape: Sequence[int], classes: int | None, ignore: int | None
) -> str:
    """What is wrong with labels, nothing when they are right."""
    if labels.dtype.kind not in "iu":
        return f"dtype {labels.dtype.name}"
    if labels.size != math.prod(shape):
        return f"shape {list(labels.shape)}"
    known = labels if ignore is None else labels[labels != ignore]
    if known.size and (known.min() < 0 or (classes is not None and known.max() >= classes)):
        return f"numbers from {known.min()} to {known.max()}"
    return ""


def padded_rows(batch: Observed, *, wanted: str, fix: str) -> list[NDArray[np.int64]]:
    """Integer labels [N, L] of each sample, without the padding of -1 at the end of the rows.

    Raises:
        SampleError: They are missing, no integers, have another shape, or padding within a row.
    """
    labels = batch.labels
    if labels is None or labels.dtype.kind not in "iu" or labels.ndim != 2:
        raise label_error(batch, found=describe(labels), wanted=wanted, fix=fix)
    if len(labels) != batch.size:
        raise label_error(batch, found=f"{len(labels)} rows", wanted=f"{batch.size}", fix=fix)
    return [_unpadded(batch, index, row, wanted, fix) for index, row in enumerate(labels)]


def _unpadded(
    batch: Observed, index: int, row: NDArray[Any], wanted: str, fix: str
) -> NDArray[np.int64]:
    kept: NDArray[np.int64] = row[row != PADDING].astype(np.int64)
    if (row[: len(kept)] == PADDING).any() or (kept < 0).any():
        found = f"the row {row[:12].tolist()}"
        raise label_error(batch, found=found, wanted=wanted, fix=fix, index=index)
    return kept


def describe(labels: NDArray[Any] | None) -> str:
    """Labels in a few words."""
    return "no labels" if labels is None else f"{labels.dtype.name} of shape {list(labels.shape)}"
