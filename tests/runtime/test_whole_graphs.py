"""Whole graphs in both runtimes: random ones and those of public bug reports, in every mode."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.core.contract import Feeds
from slimctl.core.errors import PassFailedError, SampleError
from slimctl.evaluate.replay import replay
from slimctl.graph.load import load_model
from slimctl.graph.session import Level, Products, open_session, run
from slimctl.passes.quantize import Quantize
from slimctl.runtime.device import host_device
from slimctl.runtime.session import Runtime
from tests.cases.actions import act, output_in
from tests.cases.oracle import Case
from tests.cases.test_channels_on_cases import ALL
from tests.modes.networks import build
from tests.modes.promises import placed
from tests.modes.test_random_graphs import MODES, compressed

NARROW = 1e-2
"""Relative to the largest value. float16 keeps 11 bits, and onnxruntime's products of float16
matrices accumulate in float16, or in float32 where it computes several nodes without rounding in
between; which of both depends on the processor."""
SINGLE = 2e-5
"""The same for float32 with sums in another order."""


_LEVELS = (Level.DISABLED, Level.ALL)

AS_WRITTEN = {
    "int8 qdq": "onnxruntime makes MatMulNBits of it, which quantizes activations (accuracy_level)",
}
"""Modes that are compared without graph optimizations only, with the reason."""

UNROUNDED = {
    ("B41", "fp16"): "onnxruntime leaves out the rounding to float16 between Add and Softmax: a "
    "row that is masked by -32752 everywhere is uniform when it is rounded, and not when it is not",
}
"""Cases in which onnxruntime computes something else than is written, with the reason."""


def _tolerance(model: ir.Model) -> float:
    values = (value for node in model.graph.all_nodes() for value in (*node.inputs, *node.outputs))
    kinds = {value.dtype for value in values if value is not None}
    narrow = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16} & kinds
    return NARROW if narrow else SINGLE


def assert_same(path: Path, samples: list[Feeds], levels: Sequence[Level] = _LEVELS) -> None:
    """Outputs are the same; where there are codes, each node's are, on the same inputs."""
    model = load_model(path)
    for level in levels:
        found = replay(model, samples, level=level, device=host_device())
        wrong = [node for node in found.nodes if node.is_codes and not node.only_ties]
        assert not wrong, (level, wrong)
        apart = [node for node in found.nodes if node.relative > _tolerance(model)]
        assert not apart, (level, apart)
        if not found.codes:
            _assert_close(model, samples, level)


def _assert_close(model: ir.Model, samples: list[Feeds], level: Level) -> None:
    ours = Runtime(model, device=host_device())
    # Several threads would share a batch of a quantized LSTM, each with a range of its own.
    session = open_session(model, level=level, threads=1, products=Products.NATIVE)
    for feeds in samples:
        found = ours.run(feeds)
        for name, expected in run(session, feeds).items():
            _assert_equal(found[name], expected, _tolerance(model))


def _assert_equal(found: Any, expected: Any, tolerance: float) -> None:
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _assert_equal(one, other, tolerance)
        return
    assert found.dtype == expected.dtype
    if expected.dtype.kind != "f":
        np.testing.assert_array_equal(found, expected)
        return
    finite = np.where(np.isfinite(expected), np.abs(expected), 0)
    largest = float(finite.max(initial=0.0))
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("seed", range(80))
def test_random_float_graph(seed: int) -> None:
    network = build(random.Random(seed).randrange)
    with tempfile.TemporaryDirectory() as folder:
        case = placed(network, Path(folder))
        assert_same(case.model, case.feeds("evaluation")[:2])


@pytest.mark.parametrize("mode", ["static, all", "dynamic, all", "int4", "int8 qdq", "fp16"])
@pytest.mark.parametrize("seed", range(100, 112))
def test_random_quantized_graph(seed: int, mode: str) -> None:
    network = build(random.Random(seed).randrange)
    with tempfile.TemporaryDirectory() as folder:
        case = placed(network, Path(folder))
        output = compressed(case, MODES[mode], "made.onnx")
        if output is not None:
            levels = _LEVELS[:1] if mode in AS_WRITTEN else _LEVELS
            assert_same(output, case.feeds("evaluation")[:2], levels)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_case(case: Case) -> None:
    assert_same(case.model, case.feeds("evaluation")[:2])


@pytest.mark.parametrize("mode", ["static", "dynamic", "weight-only", "fp16"])
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_quantized_case(case: Case, mode: str, tmp_path: Path) -> None:
    options = {"min_sqnr": 0.0} if mode in ("static", "dynamic") else {}
    try:
        act(case, Quantize.model_validate({"mode": mode, **options}), tmp_path)
    except (PassFailedError, SampleError) as error:  # nothing to quantize, or bad data on purpose
        assert error.fix
        return
    if (case.id, mode) in UNROUNDED:
        pytest.skip(UNROUNDED[case.id, mode])
    assert_same(output_in(tmp_path), case.feeds("evaluation")[:2])
