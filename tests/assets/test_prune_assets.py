"""Real models through ``prune``: smaller, of the same interface, and exact.

Exact: what the pruned model computes is what the fused original computes with zeros in whatever
makes the channels that went.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from benchmarks.minilm import LAYERS, WORDS, load_safetensors, minilm
from benchmarks.pruning_models import (
    EXACT,
    SHARES,
    SUBJECTS,
    Feeds,
    Pruned,
    difference,
    largest_left,
    most_frequent,
    outputs,
    prune,
    tokens,
)
from slimctl.core.errors import OptionError, PassFailedError
from slimctl.graph.channels import analyze
from slimctl.graph.edit import interface
from slimctl.graph.load import load_model
from slimctl.graph.session import open_session, run
from slimctl.graph.shapes import infer_shapes
from slimctl.passes._prune_goal import cost_of
from slimctl.passes.fuse import Fuse
from slimctl.passes.prune import Prune
from slimctl.recipe.run import run_passes

MODELS = ("orientation", "ocr-rec", "ocr-det", "ocr-cls", "silero-vad", "basic-pitch")
WORD_COUNT = 500
"""Rows of the table of words: all of them are 47 MB that pruning does not touch."""


def fused(path: Path) -> ir.Model:
    model = load_model(path)
    Fuse().apply(model, None)  # type: ignore[arg-type]  # the pass asks its context for nothing
    infer_shapes(model)
    return model


@pytest.fixture(
    scope="module",
    # One worker per model: its result serves several tests.
    params=[
        pytest.param((name, share), marks=pytest.mark.xdist_group(f"prune-{name}"))
        for name in MODELS
        for share in SHARES
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def case(
    request: pytest.FixtureRequest,
    asset: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Pruned, list[Feeds]]:
    """The original, what came out, and inputs of two shapes."""
    name, share = request.param
    model = asset(name)
    done = prune(model, share, tmp_path_factory.mktemp(name) / "pruned.onnx")
    return model, done, SUBJECTS[name].feeds(np.random.default_rng(0))


def test_smaller_with_the_same_interface(case: tuple[Path, Pruned, list[Feeds]]) -> None:
    path, done, _ = case
    before, after = done.report.facts["parameters"]
    assert after < before
    assert done.path.stat().st_size < path.stat().st_size
    assert interface(load_model(done.path)) == interface(load_model(path))


def test_runs_at_two_shapes(case: tuple[Path, Pruned, list[Feeds]]) -> None:
    path, done, feeds = case
    original, pruned = (open_session(file, threads=1) for file in (path, done.path))
    for feed in feeds:
        wanted, found = run(original, feed), run(pruned, feed)
        assert {name: array.shape for name, array in found.items()} == {
            name: array.shape for name, array in wanted.items()
        }
        assert all(np.all(np.isfinite(array)) for array in found.values())


def test_equals_the_silenced_original(case: tuple[Path, Pruned, list[Feeds]]) -> None:
    path, done, feeds = case
    found = outputs(load_model(done.path), feeds)
    assert difference(found, outputs(done.silenced, feeds)) <= EXACT
    # What went did matter, or the comparison above would say nothing.
    assert difference(found, outputs(fused(path), feeds)) > 100 * EXACT


def test_costs_stay_known(case: tuple[Path, Pruned, list[Feeds]]) -> None:
    """Sizes that are computed in the graph can be followed as before."""
    path, done, _ = case
    assert cost_of(load_model(done.path)).unknown <= cost_of(load_model(path)).unknown


# what must stay, and why


def test_states_of_a_stream_stay(asset: Callable[[str], Path], tmp_path: Path) -> None:
    """silero-vad takes and gives the state of its LSTM; it has one for each rate."""
    done = prune(asset("silero-vad"), SHARES[0], tmp_path / "pruned.onnx")
    recurrent = [entry for entry in done.report.skipped if "LSTM" in entry.node]
    assert len(recurrent) == 2
    assert all("its initial state" in entry.reason for entry in recurrent)


def test_unknown_costs_are_no_goal(asset: Callable[[str], Path], tmp_path: Path) -> None:
    """In silero-vad the rank of a tensor hangs on the length of the input."""
    with pytest.raises(OptionError, match="What this model costs cannot be told"):
        run_passes(asset("silero-vad"), [Prune(target_macs=0.5)], output=tmp_path / "pruned.onnx")


def test_nothing_of_magika_can_go(asset: Callable[[str], Path], tmp_path: Path) -> None:
    """Each of its three layers computes what a normalization needs all of."""
    with pytest.raises(PassFailedError, match="Nothing in this model can be pruned") as caught:
        prune(asset("magika"), SHARES[0], tmp_path / "pruned.onnx")
    assert "3 layers must stay" in caught.value.fix
    assert "LayerNorm_0" in caught.value.fix


def test_classifier_behind_a_normalization(asset: Callable[[str], Path]) -> None:
    """PP-OCRv6 reads 120 channels that a normalization needs all of, and computes scores."""
    left = largest_left(analyze(fused(asset("ocr-rec-v6"))))
    assert left.startswith("MatMul.12 (120 x 18710) stays whole: at ReduceMean.")
    assert "and Softmax.2, it normalizes over these channels" in left


# attention


@pytest.fixture(scope="module")
def encoder(asset: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM with a few words."""
    tensors = load_safetensors(asset("minilm"))
    path = tmp_path_factory.mktemp("minilm") / "minilm.onnx"
    onnx.save(minilm({**tensors, WORDS: tensors[WORDS][:WORD_COUNT]}), path)
    return path


@pytest.mark.xdist_group("prune-minilm")
def test_heads_of_minilm(encoder: Path, tmp_path: Path) -> None:
    done = prune(encoder, 0.5, tmp_path / "pruned.onnx", "head")
    groups = done.report.facts["groups"]
    assert [group["total"] for group in groups] == [12] * LAYERS
    assert sum(group["kept"] for group in groups) == 6 * LAYERS
    check_encoder(done)


@pytest.mark.xdist_group("prune-minilm")
def test_channels_of_minilm(encoder: Path, tmp_path: Path) -> None:
    """Width of query and key, of value, and of the feed-forward part; the residual stays."""
    done = prune(encoder, 0.5, tmp_path / "pruned.onnx")
    groups = done.report.facts["groups"]
    assert [group["total"] for group in groups] == [32, 32, 1536] * LAYERS
    assert done.report.facts["considered"] == 1.0
    embedding = {entry.node: entry.reason for entry in done.report.skipped}["word_embeddings"]
    assert embedding.startswith("at 'embeddings.LayerNorm': it normalizes over these channels")
    assert "residual" in most_frequent(done.report.skipped)
    check_encoder(done)


def check_encoder(done: Pruned) -> None:
    feeds = tokens(np.random.default_rng(0), WORD_COUNT)
    assert difference(outputs(load_model(done.path), feeds), outputs(done.silenced, feeds)) <= EXACT
