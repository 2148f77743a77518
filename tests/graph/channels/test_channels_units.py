"""Ties and groups against implementations that take one unit at a time."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import onnx_ir as ir
from hypothesis import given, settings
from hypothesis import strategies as st

from slimctl.graph.channels.coupling import Channels, Family
from slimctl.graph.channels.groups import group_units
from slimctl.graph.channels.units import FIXED, Units

_Pairs = list[tuple[int, int]]


def _naive_roots(count: int, pairs: _Pairs) -> list[int]:
    """The smallest unit that can be reached from each."""
    reach = {unit: {unit} for unit in range(count)}
    for first, second in pairs:
        joined = reach[first] | reach[second]
        for unit in joined:
            reach[unit] = joined
    return [min(reach[unit]) for unit in range(count)]


def _array(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, np.int64)


def _pairs(most: int) -> st.SearchStrategy[list[_Pairs]]:
    unit = st.integers(0, most - 1)
    return st.lists(st.lists(st.tuples(unit, unit), max_size=12), max_size=6)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(rounds=_pairs(24))
def test_ties_are_those_of_a_naive_union(rounds: list[_Pairs]) -> None:
    units = Units()
    ids = units.fresh(24)
    done: _Pairs = []
    for pairs in rounds:
        units.tie(*(_array([pair[side] for pair in pairs]) for side in (0, 1)))
        done += pairs
        assert units.find(ids).tolist() == _naive_roots(24, done)


def test_units_keep_their_ties_when_more_arrive() -> None:
    units = Units()
    first = units.fresh(3)
    units.tie(first[:1], first[2:])
    more = units.fresh(5000)
    units.tie(more[4990:], more[:10])
    assert len(units) == 5003
    assert units.find(first).tolist() == [0, 1, 0]
    assert units.find(more[4990:]).tolist() == more[:10].tolist()
    assert np.unique(units.find(np.arange(5003))).size == 5003 - 11


def test_a_unit_may_be_tied_to_several_in_one_call() -> None:
    units = Units()
    ids = units.fresh(6)
    units.tie(_array([5, 5, 5, 2]), _array([1, 3, 4, 3]))
    assert units.find(ids).tolist() == [0, 1, 1, 1, 1, 1]


def test_fixed_stays_fixed() -> None:
    units = Units()
    assert units.find(_array([FIXED, FIXED])).tolist() == [FIXED, FIXED]
    units.fresh(2)
    assert units.find(_array([FIXED, 1])).tolist() == [FIXED, 1]


def test_what_is_tied_to_something_fixed_must_stay() -> None:
    channels = Channels()
    first, second = channels.units.fresh(3), channels.units.fresh(3)
    result = channels.tie(
        np.array([first[0], FIXED, first[2]]), np.array([FIXED, second[1], second[2]]), "node"
    )
    assert result.tolist() == [FIXED, FIXED, first[2]]
    assert sorted(channels.blocked()) == [first[0], second[1]]
    channels.tie(first[:1], second[2:], "later")  # ties count whenever they come
    roots = channels.units.find(np.concatenate([first, second]))
    assert [unit in channels.blocked() for unit in roots] == [True, False, True, False, True, True]


@st.composite
def _families(draw: st.DrawFn) -> tuple[list[tuple[list[int], bool]], _Pairs, list[int]]:
    unit = st.integers(0, 15)
    families = draw(
        st.lists(st.tuples(st.lists(st.integers(-1, 15), max_size=8), st.booleans()), max_size=6)
    )
    pairs = draw(st.lists(st.tuples(unit, unit), max_size=6))
    return families, pairs, draw(st.lists(unit, max_size=3))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(drawn=_families())
def test_groups_are_those_of_naive_sets(
    drawn: tuple[list[tuple[list[int], bool]], _Pairs, list[int]],
) -> None:
    families, pairs, blocked = drawn
    channels = Channels()
    channels.units.fresh(16)
    nodes = [ir.Node("", "Conv", [], name=f"n{index}") for index in range(len(families))]
    for node, (members, computed) in zip(nodes, families, strict=True):
        channels.families.append(Family(node, _array(members), computed))
    for first, second in pairs:
        channels.tie(_array([first]), _array([second]), "tie")
    channels.block(_array(blocked), "node", "reason")

    roots = _naive_roots(16, pairs)
    counts = [Counter(roots[unit] for unit in members if unit >= 0) for members, _ in families]
    expected: dict[frozenset[int], list[int]] = defaultdict(list)
    for root in sorted(set(roots)):
        expected[frozenset(i for i, count in enumerate(counts) if root in count)].append(root)

    groups = group_units(channels)
    assert [group.units.tolist() for group in groups] == list(expected.values())
    for group, touched in zip(groups, expected, strict=True):
        computing = [index for index in sorted(touched) if families[index][1]]
        assert [node.name for node in group.layers] == [f"n{index}" for index in computing]
        widths = [counts[index][unit] for index in computing for unit in group.units.tolist()]
        assert group.width == max([1, *widths])
        stay = {roots[unit] for unit in blocked}
        assert set(group.blocked) == stay & set(group.units.tolist())
        assert group.free.tolist() == [u for u in group.units.tolist() if u not in stay]


def test_no_units_no_groups() -> None:
    assert group_units(Channels()) == []
