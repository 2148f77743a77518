"""Channels taken out of every model of a public bug report."""

from __future__ import annotations

import json

import pytest

from slimctl.graph.edit import const_array
from slimctl.graph.load import load_model
from tests.cases.oracle import HERE, Case
from tests.graph.channels.exactness import Exactness, assert_exact

ALL = [
    Case(entry["id"], entry["check"], entry)
    for entry in json.loads((HERE / "manifest.json").read_text(encoding="utf-8"))
]
FREE = {
    "B03": 24, "B18": 16, "B22": 16, "B24": 8, "B28": 8, "B30": 8, "B32": 16, "B34": 8, "B36": 8,
    "B37": 8, "B45": 48, "B49": 4, "B51": 8,
}  # fmt: skip
"""Units that may go; the others have one layer only, whose channels are the output."""


def _pruned(case: Case, *, whole_blocks: bool = False) -> Exactness:
    return assert_exact(
        load_model(case.model), whole_blocks=whole_blocks, feeds=case.feeds("evaluation")
    )


def _named(name: str) -> Case:
    return next(case for case in ALL if case.id == name)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_removal_is_exact(case: Case) -> None:
    found = _pruned(case)
    assert found.free == FREE.get(case.id, 0), found.reasons
    assert found.removed * 2 == found.free


def test_features_that_become_an_image_go_as_whole_channels() -> None:
    found = _pruned(_named("B49"))
    (reshape,) = [node for node in found.model.graph if node.op_type == "Reshape"]
    shape = const_array(reshape.inputs[1])
    assert shape is not None
    assert shape.tolist() == [-1, 2, 4, 4]


@pytest.mark.parametrize(("whole_blocks", "heads", "width"), [(True, 2, 4), (False, 4, 2)])
def test_heads_and_their_width(whole_blocks: bool, heads: int, width: int) -> None:
    found = _pruned(_named("B51"), whole_blocks=whole_blocks)
    nodes = list(found.model.graph)
    shapes = [const_array(n.inputs[1]) for n in nodes if n.op_type == "Reshape"]
    assert [s.tolist()[2:] for s in shapes if s is not None] == [[heads, width]] * 3 + [[8]]
    (split,) = [node for node in nodes if node.op_type == "Split"]
    sizes = const_array(split.inputs[1])
    assert sizes is not None
    assert sizes.tolist() == [8, 8, 8]
