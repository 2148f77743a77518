"""Einsum: the axes of one letter go together; a letter that is summed over is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from slimctl.graph.channels.coupling import Axis, Role
from slimctl.graph.channels.rule import Rule
from slimctl.graph.channels.site import Site


class _Place(NamedTuple):
    """Where a letter stands: an operand and its axis."""

    operand: int
    axis: int


def _terms(equation: str) -> tuple[list[str], str] | None:
    """Letters of the operands and of the output; None where they do not name each axis once.

    The dots of an ellipsis do not either.
    """
    compact = equation.replace(" ", "")
    inputs, arrow, output = compact.partition("->")
    terms = inputs.split(",")
    if not arrow:  # as in Einstein's notation: what occurs once stays, in alphabetical order
        joined = "".join(terms)
        output = "".join(sorted(letter for letter in joined if joined.count(letter) == 1))
    once = all(len(set(term)) == len(term) for term in (*terms, output))
    return (terms, output) if once else None


def _einsum(site: Site) -> None:
    found = _terms(site.attribute("equation", ""))
    if found is None:
        site.block_inputs("its equation has an ellipsis or a diagonal")
        return
    terms, output = found
    letters: dict[str, list[_Place]] = defaultdict(list)
    for operand, term in enumerate(terms):
        for axis, letter in enumerate(term):
            letters[letter].append(_Place(operand, axis))
    for letter, places in letters.items():
        target = output.index(letter) if letter in output else None
        if any(place.axis in site.axes(place.operand) for place in places):
            _passed(site, places, target)
        elif target is not None:
            _computed(site, places, target)


def _passed(site: Site, places: Sequence[_Place], target: int | None) -> None:
    """A letter that channels come in with."""
    sides = [
        site.axes(place.operand)[place.axis]
        for place in places
        if place.axis in site.axes(place.operand)
    ]
    ids = sides[0].ids
    for side in sides[1:]:
        ids = site.tie(ids, side.ids)
    for operand, axis in places:
        shape = site.shape(operand)
        if axis in site.axes(operand) or (shape is not None and shape[axis] == 1):
            continue
        if site.is_constant(operand):
            site.member(operand, axis, ids, Role.CONSUME if target is None else Role.CARRY)
        else:
            site.block(ids, "what it is multiplied with does not change")
    rests = np.stack([side.rest for side in sides])
    zero = np.any(rests == 0.0, axis=0) & ~np.any(np.isinf(rests), axis=0)
    alive = next((side.alive for side in sides if side.alive), "") or site.name
    product = Axis(ids, np.where(zero, 0.0, np.nan), alive)
    if target is None:
        site.consume(product)
    else:
        site.label(target, product)


def _computed(site: Site, places: Sequence[_Place], target: int) -> None:
    """A letter of weights only: the node computes channels on it."""
    arrays = [site.constant(place.operand) for place in places]
    sizes = {
        array.shape[p.axis] for array, p in zip(arrays, places, strict=True) if array is not None
    }
    count = max(sizes, default=1)
    if any(array is None or array.dtype.kind not in "fV" for array in arrays) or count == 1:
        return
    ids = site.fresh(int(count))
    for array, (operand, axis) in zip(arrays, places, strict=True):
        if array is not None and array.shape[axis] == count:
            site.member(operand, axis, ids, Role.PRODUCE)
    site.label(target, site.computed(ids))


RULES = {"Einsum": Rule(_einsum, computes=True)}
