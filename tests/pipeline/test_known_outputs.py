"""A model that a pass measured is not run again by the checks, and only then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from slimctl.graph.session import Level
from slimctl.passes.quantize import Quantize
from slimctl.pipeline import stage
from slimctl.recipe.run import run_passes
from slimctl.recipe.schema import DataSpec


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N,4,6,6] x) => (float[N,4,6,6] y) '
        "{ a = Conv(x, w) r = Relu(a) y = Conv(r, w) }"
    )
    rng = np.random.default_rng(0)
    weight = rng.normal(0, 0.5, (4, 4, 1, 1)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    ir.save(ir.from_proto(model), tmp_path / "m.onnx")
    np.savez(tmp_path / "c.npz", x=rng.normal(0, 1, (16, 4, 6, 6)).astype(np.float32))
    return tmp_path / "m.onnx", tmp_path / "c.npz"


def _opened(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, quantize: Quantize
) -> list[str]:
    """Step folders of the files that the checks loaded with all optimizations."""
    opened: list[str] = []
    original = stage.open_session

    def watched(model: Any, *, level: Level = Level.ALL, threads: int = 0) -> Any:
        if level is Level.ALL:
            opened.append(Path(model).parent.name)
        return original(model, level=level, threads=threads)

    monkeypatch.setattr(stage, "open_session", watched)
    model, data = files
    output = model.with_name("out.onnx")
    run_passes(
        model, [quantize], output=output, calibration=DataSpec(source=str(data)), use_cache=False
    )
    return opened


def test_measured_models_are_not_run_again(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = _opened(files, monkeypatch, Quantize(calibration="kl", equalize=False))
    assert not {"step2", "step3"} & set(opened)


def test_models_that_nobody_measured_are_run(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize = Quantize(calibration="kl", min_sqnr=0, equalize=False, bias_correction=False)
    assert "step2" in _opened(files, monkeypatch, quantize)
