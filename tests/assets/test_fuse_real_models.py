"""Real models through ``fuse``: nothing but rounding changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from benchmarks.samples import SAMPLES, Feeds, take
from slimctl.core.contract import PassReport
from slimctl.graph.edit import interface
from slimctl.graph.load import load_model
from slimctl.graph.session import Level, open_session, run
from slimctl.passes.fuse import Fuse

TOLERANCE = 1e-4
"""Of the largest output value: the single-precision rounding of some fifty layers."""


def fuse(model: ir.Model) -> PassReport:
    return Fuse().apply(model, None)  # type: ignore[arg-type]  # the pass asks its context for nothing


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.all_nodes())


@pytest.fixture(scope="module", params=SAMPLES)
def case(
    request: pytest.FixtureRequest, asset: Callable[[str], Path], fonts: list[Path]
) -> tuple[Path, list[Feeds]]:
    """A model file and samples for it."""
    path = asset(request.param)
    return path, take(request.param, path, fonts, count=2, seed=3)


def test_fused_model_computes_the_same(case: tuple[Path, list[Feeds]]) -> None:
    path, samples = case
    model = load_model(path)
    before = interface(model)
    fuse(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert interface(model) == before
    original = open_session(path, level=Level.DISABLED, threads=1)
    for level in (Level.DISABLED, Level.ALL):
        result = open_session(model, level=level, threads=1)
        for feeds in samples:
            wanted, found = run(original, feeds), run(result, feeds)
            for name, array in wanted.items():
                bound = TOLERANCE * np.abs(array).max()
                np.testing.assert_allclose(found[name], array, rtol=0, atol=bound)


def test_twice_equals_once(case: tuple[Path, list[Feeds]]) -> None:
    model = load_model(case[0])
    again = model.clone()
    report = fuse(model)
    fuse(again)
    once = ir.to_proto(model).SerializeToString(deterministic=True)
    assert ir.to_proto(again).SerializeToString(deterministic=True) == once
    assert not fuse(model).changed
    assert ir.to_proto(model).SerializeToString(deterministic=True) == once
    assert report.changed


def test_layers_keep_their_names(case: tuple[Path, list[Feeds]]) -> None:
    model = load_model(case[0])
    layers = {"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM"}
    before = {node.name for node in model.graph if node.op_type in layers}
    fuse(model)
    assert {node.name for node in model.graph if node.op_type in layers} == before


@pytest.mark.parametrize(("name", "count"), [("orientation", 27), ("ocr-cls", 35)])
def test_every_normalization_is_folded(asset: Callable[[str], Path], name: str, count: int) -> None:
    model = load_model(asset(name))
    assert operators(model)["BatchNormalization"] == count
    report = fuse(model)
    assert operators(model)["BatchNormalization"] == 0
    assert report.changed["BatchNormalization folded into Conv"] == count


def test_subgraphs_are_cleaned_up(asset: Callable[[str], Path]) -> None:
    """Half of the branches of this model hang on shapes that are known."""
    model = load_model(asset("silero-vad"))
    before = operators(model)
    fuse(model)
    after = operators(model)
    assert after["Cast"] == 0
    assert after["If"] < before["If"]
    assert after.total() < before.total() / 2
