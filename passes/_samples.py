"""A few calibration samples, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import onnx_ir as ir

from slimctl.core.contract import Context, Feeds

_LOOK: Final = 64
"""Samples from which some are taken, evenly: the first ones of a recording may be silence."""


def spread_singles(model: ir.Model, context: Context, count: int) -> list[Feeds]:
    """Some samples out of the first ones, evenly spread; memory is that of twice as many.

    Args:
        model: Whose inputs they are.
        context: Has data.
        count: How many at most.
    """
    kept: list[Feeds] = []
    stride = 1
    for index, sample in zip(range(_LOOK), _singles(model, context), strict=False):
        if index % stride == 0:
            kept.append(sample)
        if len(kept) == 2 * count:
            kept, stride = kept[::2], 2 * stride
    return kept[:: max(len(kept) // count, 1)][:count]


def _singles(model: ir.Model, context: Context) -> Iterator[Feeds]:
    """Calibration samples one by one; whole batches where they cannot be cut."""
    names = [value.name or "" for value in model.graph.inputs]
    for feeds in context.activations(model, names):
        sizes = {array.shape[0] if array.ndim else 0 for array in feeds.values()}
        if len(sizes) == 1 and all(map(_is_open, model.graph.inputs)):
            for start in range(*sizes):
                # Copies: a view of one sample would keep its whole batch in memory.
                yield {name: array[start : start + 1].copy() for name, array in feeds.items()}
        else:
            yield feeds


def _is_open(value: ir.Value) -> bool:
    """Whether an input takes any number of samples."""
    return value.shape is not None and value.shape.rank() > 0 and not value.shape.is_static(0)
