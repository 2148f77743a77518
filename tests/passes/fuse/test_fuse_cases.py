"""The models of public bug reports, fused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slimctl.graph.load import load_model
from slimctl.graph.save import save_model
from slimctl.graph.session import Level, open_session, run
from tests.cases.oracle import HERE, Case, cases, sqnr, violations

ALL = sorted(path.stem for path in (HERE / "data").glob("*.onnx"))


@pytest.mark.parametrize("name", ALL)
def test_fused_model_computes_the_same(name: str, fuse_model: Callable, tmp_path: Path) -> None:
    case = Case(name, {}, {})
    fused = fuse_model(load_model(case.model), run=False)
    (path,) = save_model(fused.after, tmp_path / "fused.onnx")
    original = open_session(case.model, level=Level.DISABLED, threads=1)
    result = open_session(path, level=Level.DISABLED, threads=1)
    known = {node.name for node in original.get_inputs()}
    for feeds in case.feeds("evaluation"):
        given = {key: array for key, array in feeds.items() if key in known}
        wanted, found = run(original, given), run(result, given)
        half = any(array.dtype == "float16" for array in wanted.values())
        assert all(sqnr(wanted[key], found[key]) > (50 if half else 110) for key in wanted)


@pytest.mark.parametrize("case", cases("fuse"), ids=lambda case: case.id)
def test_fuse_case(case: Case, fuse_model: Callable, tmp_path: Path) -> None:
    fused = fuse_model(load_model(case.model))
    (path,) = save_model(fused.after, tmp_path / "fused.onnx")
    assert violations(case, path, "fuse") == []


def test_a_concat_of_one_tensor_goes(fuse_model: Callable) -> None:
    fused = fuse_model(load_model(HERE / "data" / "B26.onnx"))
    assert fused.op_types == ["Conv", "MatMul"]
    assert fused.report.changed["Concat removed"] == 1


def test_training_mode_is_reported(fuse_model: Callable) -> None:
    fused = fuse_model(load_model(HERE / "data" / "B43.onnx"))
    (node,) = (node for node in fused.after.graph if node.op_type == "BatchNormalization")
    assert fused.reasons[node.name] == (
        "it is in training mode: it normalizes by the statistics of each batch"
    )
