from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import yaml

from slimctl.core import registry
from slimctl.core.contract import Context, Effect, Pass, PassReport
from slimctl.core.errors import (
    GateFailedError,
    OutputError,
    RecipeError,
    SampleError,
    UnsupportedModelError,
)
from slimctl.core.registry import find_pass
from slimctl.evaluate.metrics import Similarity
from slimctl.evaluate.verification import verify_model
from slimctl.graph.session import open_session, run
from slimctl.pipeline.artifact import read_artifact
from slimctl.recipe.resolve import lock
from slimctl.recipe.run import plan_recipe, run_passes, run_recipe
from slimctl.recipe.schema import DataSpec

WriteRecipe = Callable[[str], Path]

RECIPE = """\
version: 1
name: result
model: model.onnx
data:
  calibration: {source: calib.npz}
  evaluation: {source: val.npz, metric: top1}
steps:
  - shrink: {grid: 0.01}
gates:
  accuracy: {max_drop: 0.1}
  sqnr: {min_db: 20}
  size: {max_ratio: 3}
output: {store: artifacts}
"""


def test_a_recipe_makes_an_artifact(write_recipe: WriteRecipe, folder: Path) -> None:
    (folder / "artifacts").mkdir()
    result = run_recipe(write_recipe(RECIPE))
    result.raise_for_gates()
    assert result.artifact is not None
    assert result.artifact.path == folder / "artifacts" / "result"
    manifest = read_artifact(result.artifact.path).manifest
    assert manifest == result.manifest
    assert [step.name for step in manifest.steps] == ["tidy", "shrink", "repair"]
    assert manifest.steps[0].skipped[0].reason == "nothing to tidy"
    assert manifest.calibration is not None and manifest.evaluation is not None
    assert (manifest.calibration["source"], manifest.calibration["samples"]) == ("calib.npz", 8)
    assert (manifest.evaluation["source"], manifest.evaluation["samples"]) == ("val.npz", 20)
    assert manifest.results.metric_original == 1.0
    assert [gate.gate for gate in manifest.results.gates] == ["accuracy", "sqnr", "size"]
    assert all(gate.passed for gate in manifest.results.gates)


def test_sqnr_is_that_of_all_evaluation_samples(write_recipe: WriteRecipe, folder: Path) -> None:
    (folder / "artifacts").mkdir()
    result = run_recipe(write_recipe(RECIPE))
    assert result.artifact is not None
    totals = Similarity()
    x = np.load(folder / "val.npz")["x"]
    for sample in x:
        expected, found = (
            run(open_session(path, threads=1), {"x": sample[None]})["scores"]
            for path in (folder / "model.onnx", result.artifact.model)
        )
        totals.update(expected, found)
    assert result.manifest.results.sqnr_db == pytest.approx(totals.sqnr_db, abs=1e-3)
    assert result.manifest.results.sqnr_samples == 20


def test_the_store_is_made_when_it_is_missing(write_recipe: WriteRecipe, folder: Path) -> None:
    assert run_recipe(write_recipe(RECIPE)).artifact is not None
    assert (folder / "artifacts" / "result" / "manifest.json").is_file()


def test_the_same_again_has_the_same_bytes(write_recipe: WriteRecipe, folder: Path) -> None:
    recipe = write_recipe(RECIPE)
    made = [run_recipe(recipe, output=folder / name).artifact for name in ("one", "two")]
    first, second = (item for item in made if item is not None)
    assert first.model.read_bytes() == second.model.read_bytes()
    documents = [item.manifest.document() for item in (first, second)]
    for document in documents:
        document.pop("run")
    assert documents[0] == documents[1]


def test_the_lock_of_an_artifact_repeats_it(write_recipe: WriteRecipe, folder: Path) -> None:
    first = run_recipe(write_recipe(RECIPE), output=folder / "one").artifact
    assert first is not None
    again = run_recipe(folder / "one" / "recipe.lock.yaml", output=folder / "two").artifact
    assert again is not None
    assert again.manifest.manifest_hash == first.manifest.manifest_hash


BROKEN = RECIPE.replace("grid: 0.01", "grid: 5")


def test_a_broken_gate_says_by_how_much_and_publishes_nothing(
    write_recipe: WriteRecipe, folder: Path
) -> None:
    result = run_recipe(write_recipe(BROKEN))
    assert result.artifact is None
    assert not (folder / "artifacts" / "result").exists()
    assert {gate.gate for gate in result.failed_gates} == {"accuracy", "sqnr"}
    with pytest.raises(GateFailedError, match="too little") as caught:
        result.raise_for_gates()
    assert caught.value.exit_code == 1
    assert "not published" in caught.value.where


def test_a_broken_gate_leaves_the_last_good_artifact(
    write_recipe: WriteRecipe, folder: Path
) -> None:
    good = run_recipe(write_recipe(RECIPE)).artifact
    assert good is not None
    run_recipe(write_recipe(BROKEN), force=True)
    assert read_artifact(good.path).manifest == good.manifest


def test_a_failed_result_is_kept_when_asked_for(write_recipe: WriteRecipe, folder: Path) -> None:
    result = run_recipe(write_recipe(BROKEN), keep_failed=True)
    assert result.artifact is not None
    manifest = read_artifact(result.artifact.path).manifest
    assert [gate.passed for gate in manifest.results.gates] == [False, False, True]
    with pytest.raises(GateFailedError) as caught:
        result.raise_for_gates()
    assert str(result.artifact.path) in caught.value.where


def test_the_latency_gate_is_measured_and_not_hashed(write_recipe: WriteRecipe) -> None:
    text = RECIPE.replace("gates:\n", "gates:\n  latency: {min_speedup: 0.0001}\n")
    result = run_recipe(write_recipe(text))
    assert result.latency is not None
    assert [gate.gate for gate in result.manifest.run.gates] == ["latency"]
    assert "latency" not in [gate.gate for gate in result.manifest.results.gates]
    assert result.manifest.run.latency is not None
    assert result.manifest.run.latency["original"]["p50_ms"] > 0


QUANTIZED = """\
version: 1
name: result
model: model.onnx
data:
  calibration: {source: calib.npz}
  evaluation: {source: calib.npz, metric: top1, batch_size: 3}
steps:
  - quantize-static: {calibration: minmax, min_sqnr: 0}
gates:
  verify: {max_step_difference: 1, min_sqnr: 10, max_metric_drop: 0.5}
output: {store: artifacts}
"""


class Spoil(Pass):
    """Reads codes with another scale than they were made with."""

    name: ClassVar[str] = "spoil"
    summary: ClassVar[str] = "Doubles a scale"
    effect: ClassVar[Effect] = Effect.APPROXIMATE

    def apply(self, model: ir.Model, context: Context) -> PassReport:
        restorer = next(use.node for n in model.graph if (use := _codes_read(n)) is not None)
        scale = restorer.inputs[1]
        assert scale is not None and scale.const_value is not None
        doubled = ir.Tensor(2 * scale.const_value.numpy(), name="doubled")
        value = ir.Value(name="doubled", type=scale.type, shape=scale.shape, const_value=doubled)
        model.graph.register_initializer(value)
        restorer.replace_input_with(1, value)
        return PassReport(changed={"scales": 1})


def _codes_read(node: ir.Node) -> Any:
    """The use of a QuantizeLinear's codes."""
    return next(iter(node.outputs[0].uses()), None) if node.op_type == "QuantizeLinear" else None


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("passes_of_verify_tests")
    module.Spoil = Spoil  # type: ignore[attr-defined]  # made here
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entry = registry.Entry(f"{module.__name__}:Spoil", Spoil.summary)
    monkeypatch.setitem(registry.BUILT_IN, Spoil.name, entry)


def test_the_gate_verify_looks_inside(write_recipe: WriteRecipe) -> None:
    result = run_recipe(write_recipe(QUANTIZED))
    result.raise_for_gates()
    names = [gate.gate.removeprefix("verify.") for gate in result.gates]
    assert names == ["max_faults", "max_step_difference", "min_sqnr", "max_metric_drop"]
    hashed = [gate.gate for gate in result.manifest.results.gates]
    assert hashed == ["verify.max_faults", "verify.min_sqnr", "verify.max_metric_drop"]
    assert [gate.gate for gate in result.manifest.run.gates] == ["verify.max_step_difference"]


def test_the_gate_verify_names_the_wrong_node(write_recipe: WriteRecipe, spoil: None) -> None:
    result = run_recipe(write_recipe(QUANTIZED.replace("gates:", "  - spoil\ngates:")))
    faults = next(gate for gate in result.gates if gate.gate == "verify.max_faults")
    assert not faults.passed
    assert faults.found == 1
    assert "first 'x_dq'" in faults.message
    assert "codes are made with the scale" in faults.message
    assert result.artifact is None
    with pytest.raises(GateFailedError, match=r"verify\.max_faults"):
        result.raise_for_gates()


def test_the_gate_verify_looks_at_few_samples(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def watching(model: Any, samples: Any, **options: Any) -> Any:
        seen.extend(len(feeds["x"]) for feeds in samples)
        return verify_model(model, samples, **options)

    monkeypatch.setattr("slimctl.recipe.measure.verify_model", watching)
    run_recipe(write_recipe(QUANTIZED))
    assert seen == [3, 1]


def test_an_operator_that_cannot_be_verified_is_named_before_any_work(
    write_recipe: WriteRecipe, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = onnx.load(folder / "model.onnx")
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    model.graph.node[0].output[0] = "raw"
    model.graph.node.append(
        onnx.helper.make_node("Inverse", ["raw"], ["scores"], name="odd", domain="com.microsoft")
    )
    onnx.save(model, folder / "model.onnx")
    monkeypatch.setattr("slimctl.recipe.run.run_steps", None)
    with pytest.raises(UnsupportedModelError, match="Inverse") as caught:
        run_recipe(write_recipe(QUANTIZED))
    assert "odd" in caught.value.where
    assert not (folder / "artifacts" / "result").exists()


def test_each_step_has_its_own_metric_and_sqnr(write_recipe: WriteRecipe) -> None:
    tidy, shrink, repair = run_recipe(write_recipe(BROKEN)).records
    assert (tidy.metric, tidy.sqnr_db) == (1.0, 200.0)
    assert shrink.metric is not None and shrink.metric < 1.0
    assert shrink.sqnr_db is not None and shrink.sqnr_db < 20.0
    assert (repair.metric, repair.sqnr_db) == (shrink.metric, shrink.sqnr_db)


def test_agreement_needs_no_labels(write_recipe: WriteRecipe, folder: Path) -> None:
    x = np.load(folder / "val.npz")["x"]
    np.savez(folder / "bare.npz", x=x)
    text = RECIPE.replace("val.npz, metric: top1", "bare.npz, metric: agreement")
    result = run_recipe(write_recipe(text))
    assert result.manifest.results.metric_original == 1.0


def test_random_data_make_an_uncalibrated_artifact(write_recipe: WriteRecipe) -> None:
    result = run_recipe(write_recipe(RECIPE.replace("calib.npz", "random")))
    assert result.manifest.uncalibrated
    assert result.artifact is not None
    assert "Uncalibrated" in (result.artifact.path / "report.html").read_text()


def test_without_an_output_the_gates_are_judged_all_the_same(
    write_recipe: WriteRecipe, folder: Path
) -> None:
    before = set(folder.iterdir())
    result = run_recipe(write_recipe(BROKEN.replace("output: {store: artifacts}\n", "")))
    assert result.artifact is None
    assert len(result.failed_gates) == 2
    assert set(folder.iterdir()) - before == {folder / "recipe.yaml"}


def test_an_existing_output_needs_force(write_recipe: WriteRecipe, folder: Path) -> None:
    recipe, output = write_recipe(RECIPE), folder / "out"
    run_recipe(recipe, output=output)
    with pytest.raises(OutputError, match="exists already"):
        run_recipe(recipe, output=output)
    assert run_recipe(recipe, output=output, force=True).artifact is not None


def test_data_that_do_not_fit_leave_nothing(write_recipe: WriteRecipe, folder: Path) -> None:
    np.savez(folder / "calib.npz", x=np.zeros((4, 9), np.float32))
    with pytest.raises(SampleError):
        run_recipe(write_recipe(RECIPE))
    assert not (folder / "artifacts" / "result").exists()
    assert not list(folder.rglob(".slimctl-*"))


def test_overrides(write_recipe: WriteRecipe) -> None:
    result = run_recipe(write_recipe(BROKEN), ["steps.0.grid=0.01"])
    assert not result.failed_gates


def test_a_preset_needs_a_model() -> None:
    with pytest.raises(RecipeError, match="names no model"):
        run_recipe("fuse-only")


def test_a_plan_runs_nothing_and_can_be_printed(write_recipe: WriteRecipe, folder: Path) -> None:
    job = plan_recipe(write_recipe(RECIPE.replace("model.onnx", "missing.onnx")))
    document = yaml.safe_load(lock(job, folder))
    assert [next(iter(step)) for step in document["steps"]] == ["tidy", "shrink", "repair"]


def test_files_that_options_name_lie_beside_the_recipe(
    write_recipe: WriteRecipe, folder: Path
) -> None:
    steps = "steps:\n  - quantize-static: {plan: my.plan.yaml}\n"
    recipe = RECIPE[: RECIPE.index("steps:")] + steps
    job = plan_recipe(write_recipe(recipe))
    plans = [getattr(step, "plan", None) for step in job.steps]
    assert str(folder / "my.plan.yaml") in plans
    locked = yaml.safe_load(lock(job, folder / "elsewhere"))["steps"]
    assert [step["quantize-static"]["plan"] for step in locked] == ["../my.plan.yaml"]
    # What goes into the manifest does not say where that was.
    static = next(step for step in job.steps if step.name == "quantize-static")
    assert static.model_dump(mode="json")["plan"] == "my.plan.yaml"


class TestPasses:
    """The path of single commands."""

    def test_a_file_comes_with_its_manifest(self, folder: Path) -> None:
        result = run_passes(
            folder / "model.onnx",
            [find_pass("shrink")()],
            output=folder / "small.onnx",
            calibration=DataSpec(source=str(folder / "calib.npz")),
        )
        assert result.artifact is not None
        assert (folder / "small.manifest.json").is_file()
        assert result.manifest.name == "small"
        assert [step.name for step in result.manifest.steps] == ["tidy", "shrink", "repair"]
        assert result.manifest.results.sqnr_samples == 8
        assert result.manifest.results.sqnr_db is not None

    def test_a_folder_can_be_run_again(self, folder: Path) -> None:
        run_passes(
            folder / "model.onnx",
            [find_pass("shrink").model_validate({"mode": "down"})],
            output=folder / "small",
            calibration=DataSpec(source=str(folder / "calib.npz"), samples=6),
        )
        again = run_recipe(folder / "small" / "recipe.lock.yaml", output=folder / "again")
        first = json.loads((folder / "small" / "manifest.json").read_bytes())
        second = again.manifest.document()
        assert first["steps"] == second["steps"]
        assert first["files"] == second["files"]

    def test_a_model_that_no_step_changes_is_written_all_the_same(self, folder: Path) -> None:
        result = run_passes(
            folder / "model.onnx", [find_pass("tidy")()], output=folder / "same.onnx"
        )
        onnx.checker.check_model(str(folder / "same.onnx"), full_check=True)
        assert result.manifest.model.content_hash == result.manifest.source.content_hash
        assert (folder / "model.onnx").is_file()

    def test_the_input_may_be_the_output(self, folder: Path) -> None:
        model = folder / "model.onnx"
        before = model.read_bytes()
        with pytest.raises(OutputError, match="exists"):
            run_passes(model, [find_pass("tidy")()], output=model)
        assert model.read_bytes() == before
        run_passes(model, [find_pass("tidy")()], output=model, force=True)
        onnx.checker.check_model(str(model), full_check=True)

    @pytest.mark.parametrize(
        ("output", "name"),
        [("my out", "my-out"), ("x y.onnx", "x-y"), ("--.onnx", "result"), ("v1.2", "v1.2")],
    )
    def test_the_name_is_one_that_recipes_allow(self, folder: Path, output: str, name: str) -> None:
        result = run_passes(folder / "model.onnx", [find_pass("tidy")()], output=folder / output)
        assert result.manifest.name == name

    def test_relative_paths_are_those_of_the_shell(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(folder)
        run_passes(
            Path("model.onnx"),
            [find_pass("shrink")()],
            output=Path("out"),
            calibration=DataSpec(source="calib.npz"),
        )
        document = yaml.safe_load((folder / "out" / "recipe.lock.yaml").read_text())
        assert document["model"] == "../model.onnx"
        assert document["data"]["calibration"]["source"] == "../calib.npz"
