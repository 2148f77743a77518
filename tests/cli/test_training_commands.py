"""``finetune``, ``distill`` and ``prune --finetune`` as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

pytest.importorskip("torch")

QUICK = ("--epochs", "1", "--batch-size", "8", "--threads", "1", "--quiet")


@pytest.fixture
def labeled(inputs: Path) -> Path:
    """As ``inputs``, with labels for the calibration images in train.npz."""
    with np.load(inputs / "calib.npz") as arrays:
        images = arrays["image"]
    np.savez(inputs / "train.npz", image=images, labels=np.arange(len(images)) % 2)
    return inputs


def test_finetune(labeled: Path, slimctl) -> None:
    ended = slimctl(
        *("finetune", "model.onnx", "--data", "train.npz", "--eval-data", "train.npz"),
        *("-o", "tuned.onnx", "--json", *QUICK),
    )
    assert ended.code == 0
    (step,) = json.loads(ended.stdout)["manifest"]["steps"]
    assert step["name"] == "finetune" and len(step["facts"]["loss"]) == 1
    assert onnx.load(labeled / "tuned.onnx").graph.node


def test_distill_from_a_file(labeled: Path, slimctl) -> None:
    small = ("--sparsity", "0.5", "--min-channels", "1", "--round-to", "1")
    assert slimctl("prune", "model.onnx", *small, "-o", "small.onnx").code == 0
    ended = slimctl(
        *("distill", "small.onnx", "--teacher", "model.onnx", "--data", "calib.npz"),
        *("-o", "out.onnx", "--json", *QUICK),
    )
    assert ended.code == 0
    (step,) = json.loads(ended.stdout)["manifest"]["steps"]
    assert step["options"]["teacher"] == "model.onnx"


def test_distill_without_a_teacher(labeled: Path, slimctl) -> None:
    ended = slimctl("distill", "model.onnx", "--data", "train.npz", "-o", "out.onnx", *QUICK)
    assert ended.code == 2
    assert "There is no teacher" in ended.stderr
    assert "give --teacher MODEL or --shrink 0.5" in ended.stderr
    assert not (labeled / "out.onnx").exists()


def test_a_teacher_that_is_not_there(labeled: Path, slimctl) -> None:
    ended = slimctl(
        *("distill", "model.onnx", "--teacher", "none.onnx", "--data", "train.npz"),
        *("-o", "out.onnx", *QUICK),
    )
    assert ended.code == 2 and "none.onnx" in ended.stderr


def test_an_unknown_pair_of_features(labeled: Path, slimctl) -> None:
    ended = slimctl(
        *("distill", "model.onnx", "--teacher", "model.onnx", "--feature", "a"),
        *("--data", "train.npz", "-o", "out.onnx", *QUICK),
    )
    assert ended.code == 2 and "--feature" in ended.stderr and "STUDENT=TEACHER" in ended.stderr


def test_prune_and_finetune(labeled: Path, slimctl) -> None:
    ended = slimctl(
        *("prune", "model.onnx", "--sparsity", "0.5", "--min-channels", "1", "--round-to", "1"),
        *("--finetune", "2", "--train-data", "train.npz", "-o", "out.onnx", "--json", "--quiet"),
    )
    assert ended.code == 0, ended.stderr
    steps = json.loads(ended.stdout)["manifest"]["steps"]
    assert [step["name"] for step in steps] == ["prune", "finetune"]
    assert len(steps[1]["facts"]["loss"]) == 2
