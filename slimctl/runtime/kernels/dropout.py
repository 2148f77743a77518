"""Dropout, which drops nothing outside of training."""

from __future__ import annotations

from typing import Any

import numpy as np

from slimctl.runtime.registry import Array, operator


@operator("Dropout", since=7)
def dropout_7(data: Array, *, ratio: float = 0.5, outputs: int) -> tuple[Array, ...]:
    """The data, and a mask of ones in their type"""
    del ratio
    return _kept(data, data.dtype, outputs)


@operator("Dropout", since=10)
def dropout_10(data: Array, *, ratio: float = 0.5, outputs: int) -> tuple[Array, ...]:
    """The data, and a mask of booleans"""
    del ratio
    return _kept(data, np.bool_, outputs)


@operator("Dropout", since=12)
def dropout(
    data: Array,
    ratio: Array | None = None,
    training_mode: Array | None = None,
    *,
    seed: int | None = None,
    outputs: int,
) -> tuple[Array, ...]:
    """The data, and a mask of booleans; what training drops at random is not computed"""
    del seed
    training = training_mode is not None and bool(training_mode.item())
    if training and (ratio is None or ratio.item() != 0):  # without a ratio it is 0.5
        raise ValueError("dropout of training is random")
    return _kept(data, np.bool_, outputs)


def _kept(data: Array, mask: Any, outputs: int) -> tuple[Array, ...]:
    return (data,) if outputs < 2 else (data, np.ones(data.shape, mask))
