"""Recipes with ``output.store``: every run is a version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slimctl.core.errors import DamagedError, GateFailedError, OutputError, StoreError
from slimctl.pipeline.artifact import read_artifact
from slimctl.recipe import measure
from slimctl.recipe.resolve import Job
from slimctl.recipe.run import plan_recipe, run_recipe
from slimctl.recipe.stored import last_accepted
from slimctl.store.ledger import Ledger, open_ledger
from slimctl.store.sweep import check_ledger
from tests.recipe.test_run_recipe import BROKEN, RECIPE

WriteRecipe = Callable[[str], Path]


@pytest.fixture
def ledger(folder: Path) -> Ledger:
    return open_ledger(str(folder / "artifacts"))


def test_a_run_is_a_version(write_recipe: WriteRecipe, folder: Path, ledger: Ledger) -> None:
    result = run_recipe(write_recipe(RECIPE))
    assert result.stored is not None and result.artifact is not None
    assert (result.stored.version.reference, result.stored.new) == ("result@1", True)
    assert result.artifact.path == folder / "artifacts" / "result"
    assert read_artifact(result.artifact.path).manifest == result.manifest
    assert ledger.document(ledger.find("result@1")) == result.manifest.document()
    assert check_ledger(ledger) == []


def test_the_same_run_again_adds_no_version(write_recipe: WriteRecipe, ledger: Ledger) -> None:
    recipe = write_recipe(RECIPE)
    run_recipe(recipe)
    again = run_recipe(recipe)
    assert again.stored is not None and not again.stored.new
    assert again.artifact is not None
    assert len(ledger.known("result").versions) == 1


def test_another_run_replaces_the_folder_without_force(
    write_recipe: WriteRecipe, ledger: Ledger
) -> None:
    run_recipe(write_recipe(RECIPE))
    second = run_recipe(write_recipe(RECIPE.replace("0.01", "0.02")))
    assert second.artifact is not None
    assert read_artifact(second.artifact.path).manifest == second.manifest
    changes = ledger.find("result@2").entry.summary.changes
    assert changes is not None and changes[0] == "steps.1.grid 0.01 -> 0.02"


def test_a_rejected_run_is_a_version_too(
    write_recipe: WriteRecipe, folder: Path, ledger: Ledger
) -> None:
    run_recipe(write_recipe(RECIPE))
    result = run_recipe(write_recipe(BROKEN))
    assert result.artifact is None
    version = ledger.find("result@2")
    assert not version.entry.accepted and not version.has_files
    assert version.entry.summary.failed_gates == ("accuracy", "sqnr")
    assert ledger.find("result").number == 1
    with pytest.raises(GateFailedError) as caught:
        result.raise_for_gates()
    assert "not published" in caught.value.where


def test_a_rejected_run_can_be_kept_beside(
    write_recipe: WriteRecipe, folder: Path, ledger: Ledger
) -> None:
    good = run_recipe(write_recipe(RECIPE)).artifact
    kept = run_recipe(write_recipe(BROKEN), keep_failed=True).artifact
    assert good is not None and kept is not None
    assert kept.path == folder / "artifacts" / "result@2"
    assert read_artifact(kept.path).manifest == kept.manifest
    assert read_artifact(good.path).manifest == good.manifest
    assert ledger.find("result@2").has_files


def test_an_artifact_from_before_the_ledger_needs_force(
    write_recipe: WriteRecipe, folder: Path
) -> None:
    recipe = write_recipe(RECIPE)
    (folder / "artifacts").mkdir()
    run_recipe(recipe, output=folder / "artifacts" / "result")
    with pytest.raises(OutputError, match="exists already"):
        run_recipe(write_recipe(RECIPE))
    assert run_recipe(write_recipe(RECIPE), force=True).stored is not None


def test_a_folder_changed_by_hand_is_named_before_any_work(
    write_recipe: WriteRecipe, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(RECIPE)
    run_recipe(recipe)
    (folder / "artifacts" / "result" / "notes.txt").write_text("mine")
    monkeypatch.setattr("slimctl.recipe.run.run_steps", None)
    for force in (False, True):
        with pytest.raises(OutputError):
            run_recipe(recipe, force=force)


def test_a_damaged_log_is_named_before_any_work(
    write_recipe: WriteRecipe, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(RECIPE)
    run_recipe(recipe)
    (folder / "artifacts" / ".slimctl" / "log" / "result" / "000001.json").write_text("{}")
    monkeypatch.setattr("slimctl.recipe.run.run_steps", None)
    with pytest.raises(DamagedError):
        run_recipe(recipe)


def test_the_last_accepted_version(
    write_recipe: WriteRecipe, folder: Path, ledger: Ledger, tmp_path: Path
) -> None:
    job = plan_recipe(write_recipe(RECIPE))
    assert last_accepted(job) is None
    first = run_recipe(write_recipe(RECIPE))
    second = run_recipe(write_recipe(RECIPE.replace("0.01", "0.02")))
    run_recipe(write_recipe(BROKEN))
    assert first.artifact is not None and second.artifact is not None
    found = last_accepted(job)
    assert found is not None
    assert (found.version.number, found.manifest) == (2, second.manifest)
    assert found.model(tmp_path / "out").read_bytes() == second.artifact.model.read_bytes()
    ledger.rollback("result", "1")
    found = last_accepted(job)
    assert found is not None and found.manifest == first.manifest
    assert last_accepted(Job("x", None, job.target, "cpu", ())) is None


def test_the_lock_of_a_version_repeats_it(write_recipe: WriteRecipe, folder: Path) -> None:
    first = run_recipe(write_recipe(RECIPE))
    again = run_recipe(folder / "artifacts" / "result" / "recipe.lock.yaml", output=folder / "two")
    assert again.manifest.manifest_hash == first.manifest.manifest_hash


def test_a_store_that_is_a_url_stays_one(write_recipe: WriteRecipe, folder: Path) -> None:
    text = RECIPE.replace("{store: artifacts}", "{store: s3://bucket/models}")
    job = plan_recipe(write_recipe(text))
    assert (job.store, job.output) == ("s3://bucket/models", None)
    job = plan_recipe(write_recipe(RECIPE), ["output.store=s3://bucket/models"])
    assert (job.store, job.output) == ("s3://bucket/models", None)


def test_a_store_that_does_not_answer_is_named_before_any_work(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slimctl.recipe.run.run_steps", None)
    text = RECIPE.replace("{store: artifacts}", "{store: nothing://bucket}")
    with pytest.raises(StoreError, match="Not a store"):
        run_recipe(write_recipe(text))


def test_changed_evaluation_data_are_a_new_version(
    write_recipe: WriteRecipe, folder: Path, ledger: Ledger
) -> None:
    run_recipe(write_recipe(RECIPE))
    with np.load(folder / "val.npz") as data:
        np.savez(folder / "val.npz", x=data["x"][:10], labels=data["labels"][:10])
    assert (stored := run_recipe(write_recipe(RECIPE)).stored) is not None and stored.new
    assert stored.written_bytes > 0
    changes = ledger.find("result").entry.summary.changes
    assert changes is not None and any("data.evaluation.samples 20 -> 10" in x for x in changes)


SINCE = """
  accuracy: {max_drop_from_last: 0.5}
  sqnr: {max_loss_from_last_db: 3.0}
  size: {max_ratio_to_last: 1.01}
  latency: {min_speedup_over_last: 0.01}
  memory: {max_ratio_to_last: 100.0}
  placement: {max_more_than_last: 0}
"""


def _since(recipe: str) -> str:
    """The recipe with bounds against the last accepted version."""
    head, _, rest = recipe.partition("gates:")
    _, _, tail = rest.partition("\noutput:")
    return f"{head}gates:{SINCE}output:{tail}"


def test_gates_compare_with_the_last_accepted_version(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "LATENCY_SECONDS", 0.5)
    first = run_recipe(write_recipe(_since(RECIPE)))
    assert {gate.gate for gate in first.gates} == {
        f"{name}.last" for name in ("accuracy", "sqnr", "size", "latency", "memory", "placement")
    }
    assert all(gate.passed and gate.found is None for gate in first.gates)
    second = run_recipe(write_recipe(_since(RECIPE.replace("0.01", "0.011"))))
    assert all(gate.passed and gate.found is not None for gate in second.gates)
    assert all("result@1" in gate.message for gate in second.gates)
    worse = run_recipe(write_recipe(_since(RECIPE.replace("0.01", "0.3"))))
    assert "sqnr.last" in {gate.gate for gate in worse.failed_gates}
