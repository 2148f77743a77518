"""Fine-tuning as a pass: alone, behind pruning, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

pytest.importorskip("torch")

from slimctl.core.contract import Pass
from slimctl.core.errors import OptionError, RecipeError, SampleError, UnsupportedModelError
from slimctl.passes.finetune import Finetune
from slimctl.passes.prune import Prune
from slimctl.passes.quantize import Quantize
from slimctl.recipe.parse import parse_recipe
from slimctl.recipe.resolve import check_complete, resolve_recipe
from slimctl.recipe.run import RunResult, run_passes
from slimctl.recipe.schema import DataSpec, EvaluationSpec

TEXT = """
<ir_version: 8, opset_import: ["": 17]>
net (float[N,12] x) => (float[N,3] y)
{
    a = Gemm<transB=1>(x, w1, b1)
    b = Relu(a)
    c = Gemm<transB=1>(b, w2, b2)
    d = Relu(c)
    y = Gemm<transB=1>(d, w3, b3)
}
"""
SHAPES = {"w1": (32, 12), "b1": (32,), "w2": (24, 32), "b2": (24,), "w3": (3, 24), "b3": (3,)}
QUICK: dict[str, Any] = {"epochs": 3, "batch_size": 32, "learning_rate": 0.01}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """net.onnx, which knows nothing yet, and three clusters of points."""
    monkeypatch.setenv("SLIMCTL_CACHE", str(tmp_path / "cache"))
    random = np.random.default_rng(0)
    model = onnx.parser.parse_model(TEXT)
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    for name, shape in SHAPES.items():
        array = random.standard_normal(shape) / np.sqrt(shape[-1]) * (len(shape) > 1)
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    onnx.save(model, tmp_path / "net.onnx")
    centers = random.standard_normal((3, 12))
    for name, count in (("train", 240), ("test", 90)):
        labels = np.arange(count) % 3
        x = (centers[labels] + random.standard_normal((count, 12))).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x=x, labels=labels)
    np.savez(tmp_path / "unlabeled.npz", x=x)
    yield tmp_path
    assert not list((tmp_path / "cache").rglob("*.pt")), "a run that ends leaves no checkpoint"


def run(folder: Path, *steps: Pass, data: str = "train.npz", **more: Any) -> RunResult:
    return run_passes(
        folder / "net.onnx",
        steps,
        output=folder / "out.onnx",
        force=True,
        calibration=DataSpec(source=str(folder / data)),
        evaluation=EvaluationSpec(source=str(folder / "test.npz"), metric="top1"),
        threads=1,
        **more,
    )


def test_a_model_learns(folder: Path) -> None:
    (record,) = run(folder, Finetune(**QUICK)).records
    assert record.metric is not None and record.metric > 0.8
    facts = record.report.facts
    assert len(facts["loss"]) == 3 and len(facts["metric"]) == 4
    assert facts["metric"][facts["kept_epoch"]] == max(facts["metric"])
    assert record.report.changed == {"weight": 6}


def test_only_values_change(folder: Path) -> None:
    run(folder, Finetune(include=("Gemm_4",), **QUICK))
    before, after = (onnx.load(folder / name) for name in ("net.onnx", "out.onnx"))
    arrays = [
        {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        for model in (before, after)
    ]
    changed = {name for name in SHAPES if not np.array_equal(arrays[0][name], arrays[1][name])}
    assert changed == {"w3", "b3"}
    assert [node.op_type for node in before.graph.node] == [
        node.op_type for node in after.graph.node
    ]


def test_it_repeats(folder: Path) -> None:
    models = [run(folder, Finetune(**QUICK), seed=seed).manifest.model for seed in (0, 0, 1)]
    assert models[0] == models[1] != models[2]


def test_labels_are_asked_for(folder: Path) -> None:
    with pytest.raises(SampleError, match="no labels"):
        run(folder, Finetune(**QUICK), data="unlabeled.npz")


def test_a_quantized_model_is_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="quantized"):
        run(folder, Quantize(), Finetune(**QUICK))


@pytest.mark.parametrize("options", [{"loss": "hinge"}, {"augment": "spin"}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Finetune(**options)


# behind pruning

PRUNE = Prune(sparsity=0.5, round_to=1, finetune=2)


def test_pruning_with_training_is_two_steps() -> None:
    prune, finetune = PRUNE.expand()
    assert prune == Prune(sparsity=0.5, round_to=1) and finetune == Finetune(epochs=2)
    assert prune.expand() == (prune,)
    assert PRUNE.requires_training() and not prune.requires_training()


def test_pruning_trains(folder: Path) -> None:
    training = DataSpec(source=str(folder / "train.npz"))
    result = run(folder, PRUNE, data="test.npz", training=training)
    assert [record.step.name for record in result.records] == ["prune", "finetune"]
    report = result.records[1].report
    assert report.facts["samples"] == 240 and len(report.facts["loss"]) == 2
    assert result.manifest.training is not None


def test_without_training_data_it_learns_from_the_calibration_data(folder: Path) -> None:
    assert run(folder, PRUNE).records[1].report.facts["samples"] == 240


def test_single_weights_that_were_pruned_stay_zero(folder: Path) -> None:
    run(folder, Prune(structure="unstructured", sparsity=0.6, finetune=2))
    arrays = [numpy_helper.to_array(t) for t in onnx.load(folder / "out.onnx").graph.initializer]
    shares = [float((array == 0).mean()) for array in arrays if array.ndim == 2]
    assert shares and all(share == pytest.approx(0.6, abs=0.05) for share in shares)


def test_a_recipe_that_trains_needs_data(tmp_path: Path) -> None:
    text = "version: 1\nname: a\nmodel: net.onnx\nsteps:\n  - prune: {sparsity: 0.5, finetune: 2}\n"
    parsed = parse_recipe(text, tmp_path / "recipe.yaml")
    assert [step.name for step in resolve_recipe(parsed).steps] == ["prune", "finetune"]
    with pytest.raises(RecipeError, match="Step 'prune' needs training data"):
        check_complete(parsed)
