"""A small network and samples for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from slimctl.recipe.schema import DataSpec
from slimctl.sensitivity.setup import Setup
from tests.sensitivity.network import small_network


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """The network's file."""
    path = tmp_path / "small.onnx"
    onnx.save(small_network(), path)
    return path


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """24 samples with labels."""
    random = np.random.default_rng(5)
    path = tmp_path / "samples.npz"
    x = random.standard_normal((24, 3, 8, 8)).astype(np.float32)
    np.savez(path, allow_pickle=False, x=x, labels=random.integers(0, 4, 24))
    return path


@pytest.fixture
def setup(network: Path, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """A scan for int8, with a cache of its own."""
    monkeypatch.setenv("SLIMCTL_CACHE", str(tmp_path / "cache"))
    return Setup(network, DataSpec(source=str(samples)), threads=1)
