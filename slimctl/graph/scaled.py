"""A record on a tensor that its channels stand for those of the original, times factors.

Equalization and smoothing scale channels of intermediate tensors and take it back in the layers
behind. Whoever compares such a tensor with the original's needs the factors. They are kept in the
tensor's metadata, so that they are saved with the model; models of other tools have none.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

KEY = "slimctl.scaled"
"""In ``metadata_props``: the axis, and float32 factors (little-endian, base64), per record."""


def record_scaling(value: ir.Value, axis: int, factors: NDArray[Any]) -> None:
    """Notes that a tensor is the original's times factors along an axis; records multiply.

    Args:
        value: The tensor.
        axis: Of the channels; may be negative.
        factors: One per channel.
    """
    known = dict(_records(value))
    merged = factors.astype(np.float64) * known.get(axis, 1.0)
    known[axis] = merged
    kept = {place: array for place, array in known.items() if np.any(array != 1.0)}
    if kept:
        value.metadata_props[KEY] = ";".join(f"{a} {_text(array)}" for a, array in kept.items())
    else:
        value.metadata_props.pop(KEY, None)


def recorded_scaling(value: ir.Value, rank: int) -> NDArray[np.float32] | None:
    """The factors of a tensor, so that they broadcast; None for a tensor like the original's.

    Args:
        value: The tensor.
        rank: Its number of axes.
    """
    result: NDArray[np.float32] | None = None
    for axis, factors in _records(value):
        shape = [1] * rank
        shape[axis % rank] = factors.size
        wide = factors.astype(np.float32).reshape(shape)
        result = wide if result is None else result * wide
    return result


def _records(value: ir.Value) -> list[tuple[int, NDArray[Any]]]:
    text = value.metadata_props.get(KEY, "")
    pairs = [record.split(" ", 1) for record in text.split(";") if record]
    return [(int(axis), _array(code)) for axis, code in pairs]


def _text(factors: NDArray[Any]) -> str:
    return base64.b64encode(factors.astype("<f4").tobytes()).decode("ascii")


def _array(code: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(code), "<f4").astype(np.float64)
