"""Siblings of every public bug report, through every action of their case."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slimctl.passes.fuse import Fuse
from slimctl.passes.quantize import Quantize
from tests.cases.actions import act, output_in, pruning, static, weight_only
from tests.cases.oracle import cases, violations
from tests.cases.siblings import Sibling, all_siblings, siblings
from tests.cases.test_cases import ACTIONS

METHODS = ["auto", "minmax", "kl"]  # auto weighs all of them


def each(*actions: str) -> Any:
    """The siblings of some actions, as arguments of a test."""
    found = [one for action in actions for one in siblings(action)]
    return pytest.mark.parametrize("each", found, ids=lambda one: f"{one.id}-{one.name}")


def test_every_case_has_two() -> None:
    count = Counter(one.id for one in all_siblings())
    everything = {case.id for action in ACTIONS for case in cases(action)}
    assert len(everything) == 26
    assert {case: count[case] for case in everything if count[case] < 2} == {}
    assert len({(one.id, one.name) for one in all_siblings()}) == len(all_siblings())


@pytest.mark.parametrize("method", METHODS)
@each("quant_static")
def test_static(each: Sibling, method: str, tmp_path: Path) -> None:
    case = each.placed(tmp_path)
    act(case, static(method), tmp_path, skip_bad_samples=True)
    assert violations(case, output_in(tmp_path), "quant_static") == []


@pytest.mark.parametrize("data", [False, True], ids=["no data", "with data"])
@each("quant_dynamic")
def test_dynamic(each: Sibling, data: bool, tmp_path: Path) -> None:
    case = each.placed(tmp_path)
    act(case, Quantize(mode="dynamic"), tmp_path, data=data)
    assert violations(case, output_in(tmp_path), "quant_dynamic") == []


@each("quant_dynamic")
def test_dynamic_with_convolutions(each: Sibling, tmp_path: Path) -> None:
    case = each.placed(tmp_path)
    act(case, Quantize(mode="dynamic", conv=True), tmp_path, data=False)
    assert violations(case, output_in(tmp_path), "quant_dynamic_conv") == []


@pytest.mark.parametrize("kind", ["int4", "uint4", "int8"])
@pytest.mark.parametrize("form", ["nbits", "qdq"])
@each("weight_only")
def test_weight_only(each: Sibling, form: str, kind: str, tmp_path: Path) -> None:
    case = each.placed(tmp_path)
    act(case, weight_only(case, form, kind), tmp_path, data=False)
    assert violations(case, output_in(tmp_path), "weight_only") == []


@pytest.mark.parametrize("data", [False, True], ids=["no data", "with data"])
@each("fp16")
def test_float16(each: Sibling, data: bool, tmp_path: Path) -> None:
    case = each.placed(tmp_path)
    act(case, Quantize(mode="fp16"), tmp_path, data=data)
    assert violations(case, output_in(tmp_path), "fp16") == []


@each("fuse", "quant_static")
def test_fusion(each: Sibling, tmp_path: Path) -> None:
    case = each.placed(tmp_path)
    act(case, Fuse(), tmp_path, data=False)
    assert violations(case, output_in(tmp_path), "fuse") == []


@pytest.mark.parametrize("data", [False, True], ids=["weights only", "with data"])
@pytest.mark.parametrize("structure", ["channel", "head"])
@each("prune")
def test_pruning(each: Sibling, structure: str, data: bool, tmp_path: Path) -> None:
    if structure == "head" and each.id == "B49":
        pytest.skip("it has no attention")
    case = each.placed(tmp_path)
    act(case, pruning(structure), tmp_path, data=data)
    assert violations(case, output_in(tmp_path), "prune") == []
