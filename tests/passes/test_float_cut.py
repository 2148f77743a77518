"""The minimum cut against trying every assignment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from slimctl.passes._float_cut import CAST_COST, Traffic, full_sites

SITES = 7


def cost(label: Sequence[bool], costs: Sequence[int], values: Sequence[Traffic]) -> int:
    casts = sum(
        any(label[reader] != label[value.producer] for reader in value.readers) for value in values
    )
    return CAST_COST * casts + sum(c for c, full in zip(costs, label, strict=True) if full)


@settings(max_examples=120, deadline=None)
@given(
    full=st.lists(st.booleans(), min_size=SITES, max_size=SITES),
    costs=st.lists(st.sampled_from([0, 1, 1, 3, 1 << 20]), min_size=SITES, max_size=SITES),
    readers=st.lists(st.sets(st.integers(0, SITES - 1)), min_size=SITES, max_size=SITES),
)
def test_no_assignment_is_cheaper(
    full: list[bool], costs: list[int], readers: list[set[int]]
) -> None:
    values = [Traffic(site, sorted(users)) for site, users in enumerate(readers)]
    charged = [0 if must else price for must, price in zip(full, costs, strict=True)]
    found = full_sites(full, costs, values)
    assert all(label or not must for label, must in zip(found, full, strict=True))
    allowed = (
        labels
        for labels in product((False, True), repeat=SITES)
        if all(label or not must for label, must in zip(labels, full, strict=True))
    )
    best = min(cost(labels, charged, values) for labels in allowed)
    assert cost(found, charged, values) == best


def test_ties_go_to_the_narrow_type() -> None:
    """full -> site -> narrow: one Cast wherever it stands."""
    values = [Traffic(0, [1]), Traffic(1, [2])]
    assert full_sites([True, False, False], [0, 0, 1 << 20], values) == [True, False, False]
