"""Real models in float16: half the size, the same answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from benchmarks.minilm import load_safetensors, minilm
from benchmarks.pruning_models import SUBJECTS, tokens
from benchmarks.samples import SAMPLES, Feeds, take
from slimctl.evaluate.metrics import sqnr_db
from slimctl.graph.edit import interface
from slimctl.graph.load import load_model
from slimctl.graph.session import Level, open_session, run
from slimctl.passes.convert_float import ConvertFloat

FLOOR_DB = 40.0
UNSHRUNK = {"basic-pitch": 1.02, "ocr-cls": 0.6, "silero-vad": 0.6}
"""Of the size before. Basic-pitch's weights are the filters of its spectrum, of which it takes
logarithms: they stay. The others are small enough that names of nodes count."""


class Case(NamedTuple):
    """A model file, samples to look at and samples to judge by."""

    name: str
    path: Path
    data: list[Feeds]
    judges: list[Feeds]


def _with_samples(name: str, path: Path, fonts: list[Path]) -> Case:
    seen, held_out = (take(name, path, fonts, count=2, seed=seed) for seed in (1, 7))
    return Case(name, path, seen, held_out)


def _random(name: str, path: Path) -> Case:
    seen, held_out = (SUBJECTS[name].feeds(np.random.default_rng(seed)) for seed in (1, 7))
    return Case(name, path, seen, held_out)


@pytest.fixture(scope="module", params=[*SAMPLES, "ocr-rec-v6", "captcha-det", "nsnet2", "minilm"])
def case(
    request: pytest.FixtureRequest,
    asset: Callable[[str], Path],
    fonts: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Case:
    name = request.param
    if name in SAMPLES:
        return _with_samples(name, asset(name), fonts)
    if name != "minilm":
        return _random(name, asset(name))
    path = tmp_path_factory.mktemp("minilm") / "minilm.onnx"
    onnx.save(minilm(load_safetensors(asset("minilm"))), path)
    seen, held_out = (tokens(np.random.default_rng(seed)) for seed in (1, 7))
    return Case(name, path, seen, held_out)


@pytest.mark.parametrize("with_data", [True, False], ids=["data", "no data"])
def test_float16(case: Case, with_data: bool, plain_context: Callable[..., Any]) -> None:
    original = load_model(case.path)
    result = original.clone()
    context = plain_context(case.data, original)
    context.has_data = with_data
    report = ConvertFloat().apply(result, context)
    assert report.changed
    assert interface(result) == interface(original)
    proto = ir.to_proto(result)
    onnx.checker.check_model(proto, full_check=True)
    share = len(proto.SerializeToString()) / case.path.stat().st_size
    assert share < UNSHRUNK.get(case.name, 0.53)
    assert _worst_db(original, result, case.judges) > FLOOR_DB


def _worst_db(original: ir.Model, result: ir.Model, judges: list[Feeds]) -> float:
    reference = open_session(original, threads=1)
    wanted = [run(reference, feeds) for feeds in judges]
    found = []
    for level in (Level.DISABLED, Level.ALL):
        session = open_session(result, level=level, threads=1)
        outputs = [run(session, feeds) for feeds in judges]
        for name in wanted[0]:
            ours, theirs = (
                np.concatenate([item[name].ravel() for item in side]) for side in (wanted, outputs)
            )
            found.append(sqnr_db(ours, theirs))
    return min(found)
