"""Real models through the function behind ``slimctl quantize``, judged by onnxruntime alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from benchmarks.samples import SAMPLES, Feeds, take
from slimctl.passes.quantize import Quantize
from slimctl.recipe.run import RunResult, run_passes
from slimctl.recipe.schema import DataSpec
from tests.exact import exact_session

LEVELS = {
    "disabled": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
MINIMUM_DB = 15.0
COUNTS = {"ocr-rec": 8, "ocr-det": 8, "ocr-cls": 12, "basic-pitch": 8, "silero-vad": 96}
"""Calibration samples where they take long or say little; others have 32."""


def write_batches(folder: Path, batches: Sequence[Feeds]) -> Path:
    folder.mkdir()
    for index, feeds in enumerate(batches):
        np.savez(folder / f"{index}.npz", **feeds)
    return folder


def outputs_of(
    path: Path, batches: Sequence[Feeds], level: ort.GraphOptimizationLevel
) -> dict[str, np.ndarray]:
    """All values of each output over the batches, whatever their shapes."""
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    session = exact_session(path, options)
    names = [output.name for output in session.get_outputs()]
    runs = [session.run(names, feeds) for feeds in batches]
    return {
        name: np.concatenate([run[index].ravel() for run in runs]).astype(np.float64)
        for index, name in enumerate(names)
    }


def sqnr_db(reference: np.ndarray, other: np.ndarray) -> float:
    return float(10 * np.log10(np.sum(reference**2) / np.sum((reference - other) ** 2)))


def interface(path: Path) -> list[tuple[Any, ...]]:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [(p.name, p.type, p.shape) for p in (*session.get_inputs(), *session.get_outputs())]


def integer_weights(path: Path) -> int:
    graph = onnx.load(path).graph
    return sum(array.data_type == onnx.TensorProto.INT8 for array in graph.initializer)


@pytest.fixture(
    scope="module",
    # One worker per model: quantizing it is most of the work.
    params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in SAMPLES],
)
def case(
    request: pytest.FixtureRequest,
    asset: Callable[[str], Path],
    fonts: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[Feeds], RunResult]:
    """The original, samples that calibration did not see, and the quantized result."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    model = asset(name)
    count = COUNTS.get(name, 32)
    seen = take(name, model, fonts, count=count, seed=1)
    result = run_passes(
        model,
        [Quantize()],
        output=folder / "int8.onnx",
        calibration=DataSpec(source=str(write_batches(folder / "calib", seen))),
        use_cache=False,
    )
    return model, take(name, model, fonts, count=count // 2, seed=2), result


def quantized_file(result: RunResult) -> Path:
    assert result.artifact is not None
    return result.artifact.model


def test_interface_is_kept(case: tuple[Path, list[Feeds], RunResult]) -> None:
    model, _, result = case
    assert interface(quantized_file(result)) == interface(model)


def test_weights_are_integers_or_the_reason_is_given(
    case: tuple[Path, list[Feeds], RunResult],
) -> None:
    _, _, result = case
    skipped = [item for record in result.records for item in record.report.skipped]
    assert all(item.node and item.reason for item in skipped)
    assert integer_weights(quantized_file(result)) or skipped


@pytest.mark.parametrize("level", LEVELS)
def test_outputs_stay_close(case: tuple[Path, list[Feeds], RunResult], level: str) -> None:
    model, held_out, result = case
    before = outputs_of(model, held_out, LEVELS["all"])
    after = outputs_of(quantized_file(result), held_out, LEVELS[level])
    found = {name: sqnr_db(before[name], after[name]) for name in before}
    assert min(found.values()) >= MINIMUM_DB, found
