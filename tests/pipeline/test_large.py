"""Models whose weights lie in a file of their own, from end to end. The threshold is lowered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from slimctl.core.contract import Pass
from slimctl.graph import save
from slimctl.graph.session import open_session, run
from slimctl.pipeline.artifact import read_artifact
from slimctl.recipe.run import run_passes

MakePass = Callable[..., Pass]


@pytest.fixture(autouse=True)
def low_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "EXTERNAL_THRESHOLD", 1024)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """y = x w, w [600,600] in weights.bin."""
    folder = tmp_path / "in"
    folder.mkdir()
    w = np.random.default_rng(0).standard_normal((600, 600)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="matmul")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 600])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 600])],
        [numpy_helper.from_array(w, "w")],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(
        helper.make_model(graph, opset_imports=opsets, ir_version=8),
        folder / "model.onnx",
        save_as_external_data=True,
        location="weights.bin",
    )
    return folder / "model.onnx"


@pytest.mark.parametrize("name", ["x.onnx", "out"])
@pytest.mark.parametrize("changed", [{}, {"nothing": 1}], ids=["untouched", "rewritten"])
def test_the_result_stands_alone(
    tmp_path: Path, model: Path, make_pass: MakePass, name: str, changed: dict[str, int]
) -> None:
    x = np.random.default_rng(1).standard_normal((2, 600)).astype(np.float32)
    expected = run(open_session(model, threads=1), {"x": x})["y"]
    place = tmp_path / "place"
    place.mkdir()
    steps = [make_pass(changed=changed), make_pass(changed=changed)]
    result = run_passes(model, steps, output=place / name)
    assert result.artifact is not None
    assert result.manifest.source.size_bytes > 4 * 600 * 600
    assert [entry.name for entry in result.manifest.source.files] == ["model.onnx", "weights.bin"]
    assert len(result.manifest.files) == 2
    assert result.manifest.results.size_ratio == pytest.approx(1.0, abs=1e-3)
    assert not list(tmp_path.rglob(".slimctl-*"))

    (model.parent / "weights.bin").unlink()
    read_artifact(result.artifact.path)
    moved = place.rename(tmp_path / "moved")
    found = run(open_session(moved / result.artifact.model.relative_to(place), threads=1), {"x": x})
    np.testing.assert_allclose(found["y"], expected, rtol=1e-5, atol=1e-5)
