"""Sequences of tensors: Python lists, never changed in place."""

from __future__ import annotations

import numpy as np

from slimctl.runtime.registry import Array, operator


@operator("SequenceConstruct", since=11)
def sequence_construct(*inputs: Array) -> list[Array]:
    """A sequence of the inputs."""
    return list(inputs)


@operator("SequenceEmpty", since=11)
def sequence_empty(*, dtype: int | None = None) -> list[Array]:
    """A sequence without elements."""
    return []


@operator("SequenceAt", since=11)
def sequence_at(input_sequence: list[Array], position: Array) -> Array:
    """One element; negative positions count from the back."""
    return input_sequence[_place(position, input_sequence)]


@operator("SequenceInsert", since=11)
def sequence_insert(
    input_sequence: list[Array], tensor: Array, position: Array | None = None
) -> list[Array]:
    """The sequence with one element more, at its end by default."""
    length = len(input_sequence)
    place = length if position is None else int(position.item())
    if not -length <= place <= length:
        raise ValueError(f"there is no position {place} in a sequence of {length}")
    place += length if place < 0 else 0
    return [*input_sequence[:place], tensor, *input_sequence[place:]]


@operator("SequenceErase", since=11)
def sequence_erase(input_sequence: list[Array], position: Array | None = None) -> list[Array]:
    """The sequence without one element, the last by default."""
    place = _place(np.asarray(-1) if position is None else position, input_sequence)
    return [*input_sequence[:place], *input_sequence[place + 1 :]]


def _place(position: Array, sequence: list[Array]) -> int:
    """A position counted from the front."""
    place, length = int(position.item()), len(sequence)
    if not -length <= place < length:
        raise ValueError(f"there is no element {place} in a sequence of {length}")
    return place + length if place < 0 else place


@operator("SequenceLength", since=11)
def sequence_length(input_sequence: list[Array]) -> Array:
    """How many elements there are."""
    return np.asarray(len(input_sequence), np.int64)


@operator("SplitToSequence", since=11)
def split_to_sequence(
    input: Array, split: Array | None = None, *, axis: int = 0, keepdims: int = 1
) -> list[Array]:
    """Parts along an axis: of given sizes, of one size (the last may be smaller), or single ones.

    Only single ones lose the axis, if ``keepdims`` is 0.
    """
    length = input.shape[axis]
    if split is None:
        parts = np.split(input, range(1, length), axis) if length else []
        return parts if keepdims else [part.squeeze(axis) for part in parts]
    if split.ndim == 0:
        size = int(split.item())
        return np.split(input, range(size, length, size), axis)
    if split.sum() != length:
        raise ValueError(f"parts of {split.tolist()} elements do not make {length}")
    return np.split(input, np.cumsum(split)[:-1], axis)


@operator("ConcatFromSequence", since=11)
def concat_from_sequence(input_sequence: list[Array], *, axis: int, new_axis: int = 0) -> Array:
    """The elements one after another along an axis, or along a new one."""
    if new_axis:
        return np.stack(input_sequence, axis)
    return np.concatenate(input_sequence, axis)
