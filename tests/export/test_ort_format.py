from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slimctl.core.errors import ModelExecutionError
from slimctl.export import ort_format
from slimctl.export.common import export_artifact
from slimctl.export.ort_format import OrtFormat
from slimctl.graph.session import Level, Platform, Products, open_session, run
from tests.cli.models import images


def test_the_file_computes_what_the_artifact_does(quantized: Path, target: Path) -> None:
    export_artifact(quantized, OrtFormat(), target / "ort")
    feeds = {"image": images(3, seed=5)}
    expected = run(open_session(quantized / "model.onnx", products=Products.NATIVE), feeds)
    found = run(open_session(target / "ort" / "int8.ort", products=Products.NATIVE), feeds)
    # Layouts differ (no NCHWc in the file), so float sums do; a step of the outputs is 1e-2.
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=1e-4)


def test_the_operators_are_those_of_the_optimized_graph(quantized: Path, target: Path) -> None:
    export_artifact(quantized, OrtFormat(), target / "ort")
    lines = (target / "ort" / "int8.required_operators.config").read_text().splitlines()
    assert lines[:2] == ["# Generated from model/s:", "# - int8.ort"]
    listed = {name for line in lines[2:] for name in line.split(";")[2].split(",")}
    assert {"QLinearConv", "QGemm"} <= listed
    assert "Conv" not in listed


def test_without_optimization_the_operators_are_the_models(quantized: Path, target: Path) -> None:
    export_artifact(quantized, OrtFormat(level=Level.DISABLED), target / "ort")
    text = (target / "ort" / "int8.required_operators.config").read_text()
    assert "DequantizeLinear" in text
    assert "QLinearConv" not in text


@pytest.mark.parametrize(
    ("chosen", "made_for", "platform"),
    [(None, "cpu", "any"), (None, "xnnpack", "arm"), (Platform.AMD64, "xnnpack", "amd64")],
)
def test_the_platform_follows_the_target(chosen, made_for, platform, made, target: Path) -> None:
    notes = export_artifact(made(target=made_for), OrtFormat(platform=chosen), target / "ort").notes
    assert f"the graph is optimized for processors: {platform}" in notes


def test_a_file_that_computes_something_else_is_not_published(
    made, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ort_format.run
    monkeypatch.setattr(
        ort_format, "run", lambda *given: {k: v + 1 for k, v in real(*given).items()}
    )
    with pytest.raises(ModelExecutionError, match="differs from the artifact's"):
        export_artifact(made(), OrtFormat(), target / "ort")
    assert list(target.iterdir()) == []
