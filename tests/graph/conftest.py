"""Small models as ONNX text, and what onnxruntime itself says about them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from slimctl.core.contract import Feeds

Write = Callable[..., Path]
RunRaw = Callable[..., Feeds]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a model, given as text or as a message, without slimctl's help."""

    def write_model(source: str | onnx.ModelProto, name: str = "model.onnx") -> Path:
        proto = onnx.parser.parse_model(source) if isinstance(source, str) else source
        path = tmp_path / name
        path.write_bytes(proto.SerializeToString())
        return path

    return write_model


@pytest.fixture
def run_raw() -> RunRaw:
    """Runs a file or a message in onnxruntime, without slimctl's help."""

    def run_model(source: Path | onnx.ModelProto, feeds: Feeds, *, optimize: bool = False) -> Feeds:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        if not optimize:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        given = str(source) if isinstance(source, Path) else source.SerializeToString()
        session = ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, feeds), strict=True))

    return run_model


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
