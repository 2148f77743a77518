from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from slimctl.recipe.parse import load_recipe, parse_recipe
from slimctl.recipe.resolve import Job, lock, resolve_recipe

HEAD = "version: 1\nname: a\n"


def resolve(text: str, path: Path = Path("/folder/recipe.yaml")) -> Job:
    return resolve_recipe(parse_recipe(HEAD + text, path))


def test_steps_are_expanded_and_every_option_is_explicit() -> None:
    job = resolve("steps:\n  - tidy\n  - shrink: {mode: down}\n")
    assert [(step.name, step.model_dump()) for step in job.steps] == [
        ("tidy", {}),
        ("shrink", {"grid": 0.01, "mode": "down", "tidy": False}),
        ("repair", {}),
    ]


@pytest.mark.parametrize(
    ("source", "resolved"),
    [
        ("calib.npz", "/folder/calib.npz"),
        ("data/images", "/folder/data/images"),
        ("/abs/calib.npz", "/abs/calib.npz"),
        ("../calib", "/folder/../calib"),
        ("random", "random"),
        ("random:x=1x3", "random:x=1x3"),
        ("my.module:batches", "my.module:batches"),
        ("loader.py:batches", "/folder/loader.py:batches"),
        ("randomized.npz", "/folder/randomized.npz"),
    ],
)
def test_sources_are_relative_to_the_recipe(source: str, resolved: str) -> None:
    job = resolve(f"steps: [tidy]\ndata:\n  calibration: {{source: '{source}'}}\n")
    assert job.calibration is not None
    assert job.calibration.source == resolved


def test_a_folder_may_be_called_random(tmp_path: Path) -> None:
    (tmp_path / "random").mkdir()
    job = resolve(
        "steps: [tidy]\ndata:\n  calibration: {source: random}\n", tmp_path / "recipe.yaml"
    )
    assert job.calibration is not None
    assert job.calibration.source == str(tmp_path / "random")


def test_preprocessing_is_a_preset_or_a_file_beside_the_recipe() -> None:
    text = "steps: [tidy]\ndata:\n  calibration: {{source: x, preprocess: {}}}\n"
    for written, resolved in (("imagenet", "imagenet"), ("own.yaml", "/folder/own.yaml")):
        job = resolve(text.format(written))
        assert job.calibration is not None
        assert job.calibration.preprocess == resolved


@pytest.mark.parametrize(
    ("written", "output"),
    [
        ("output: {store: artifacts}\n", Path("/folder/artifacts/a")),
        ("output: {path: out/x.onnx}\n", Path("/folder/out/x.onnx")),
        ("", None),
    ],
)
def test_output(written: str, output: Path | None) -> None:
    assert resolve("steps: [tidy]\n" + written).output == output


WHOLE = """\
description: "Ein Versuch: ünïcode"
model: model.onnx
seed: 3
threads: 2
data:
  calibration: {source: calib.npz, samples: 4}
  evaluation: {source: val.npz, metric: top1}
steps:
  - shrink: {grid: 0.5}
gates: {size: {max_ratio: 2}, latency: {min_speedup: 1}, verify: {min_sqnr: 9}}
output: {store: artifacts}
"""


def test_a_lock_repeats_the_job(write_recipe: Callable[[str], Path], folder: Path) -> None:
    job = resolve_recipe(load_recipe(write_recipe(HEAD + WHOLE)))
    place = folder / "artifacts" / "a"
    place.mkdir(parents=True)
    locked = place / "recipe.lock.yaml"
    locked.write_text(lock(job, place), encoding="utf-8")
    again = resolve_recipe(load_recipe(locked))

    assert again.steps == job.steps
    assert again.gates == job.gates
    assert (again.seed, again.threads, again.description) == (3, 2, job.description)
    assert again.model is not None and again.calibration is not None
    assert again.model.resolve() == (folder / "model.onnx").resolve()
    assert Path(again.calibration.source).resolve() == (folder / "calib.npz").resolve()
    assert again.output is None
    assert lock(replace(again, output=job.output), place) == lock(job, place)


def test_a_lock_moves_with_its_folder(write_recipe: Callable[[str], Path], folder: Path) -> None:
    job = resolve_recipe(load_recipe(write_recipe(HEAD + WHOLE)))
    document = yaml.safe_load(lock(job, folder / "artifacts" / "a"))
    assert document["model"] == "../../model.onnx"
    assert document["data"]["calibration"] == {
        "source": "../../calib.npz",
        "samples": 4,
        "skip_bad_samples": False,
    }
    assert document["steps"][1] == {"shrink": {"grid": 0.5, "mode": "near", "tidy": False}}
