"""Work in portions that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_portions(items: Sequence[T], size: Callable[[T], int], budget: int) -> Iterator[list[T]]:
    """Items, in order, so many at a time that their sizes together fit; at least one each time."""
    portion: list[T] = []
    used = 0
    for item in items:
        wanted = size(item)
        if portion and used + wanted > budget:
            yield portion
            portion, used = [], 0
        portion.append(item)
        used += wanted
    if portion:
        yield portion
