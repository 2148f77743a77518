from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from slimctl.passes.fuse import Fuse
from slimctl.passes.quantize import Quantize
from slimctl.recipe.run import run_passes
from slimctl.recipe.schema import DataSpec
from tests.cli.models import classifier, images

Made = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Makes an artifact of a model, by default of a small classifier; its path."""
    monkeypatch.setenv("SLIMCTL_CACHE", str(tmp_path / "cache"))

    def make(
        model: onnx.ModelProto | None = None, output: str = "net", *, target: str = "cpu"
    ) -> Path:
        source = tmp_path / f"{output}.source.onnx"
        onnx.save(model or classifier(), source)
        run_passes(source, [Fuse()], output=tmp_path / output, target=target)
        return tmp_path / output

    return make


@pytest.fixture
def quantized(tmp_path: Path, made: Made) -> Path:
    """An int8 artifact's folder, calibrated."""
    onnx.save(classifier(), tmp_path / "model.onnx")
    np.savez(tmp_path / "calib.npz", image=images(16))
    data = DataSpec(source=str(tmp_path / "calib.npz"))
    run_passes(
        tmp_path / "model.onnx", [Quantize()], output=tmp_path / "int8", calibration=data, threads=1
    )
    return tmp_path / "int8"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A folder for results."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"
