"""Interfaces and files that tests of data sources start from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.graph.edit import Interface, Port

Shape = tuple[int | str | None, ...]


def make_interface(*inputs: tuple[str, ir.DataType, Shape | None]) -> Interface:
    return Interface(tuple(Port(*port) for port in inputs), ())


@pytest.fixture
def interface() -> Callable[..., Interface]:
    return make_interface


@pytest.fixture
def image_input() -> Interface:
    """A dynamic batch of 3 x 4 x 4 floats called ``x``."""
    return make_interface(("x", ir.DataType.FLOAT, ("N", 3, 4, 4)))


@pytest.fixture
def samples() -> np.ndarray:
    """Ten different samples for ``image_input``."""
    return np.arange(10 * 48, dtype=np.float32).reshape(10, 3, 4, 4)


@pytest.fixture
def npz(tmp_path: Path) -> Callable[..., str]:
    """Writes arrays to a new file and gives its path."""

    def write(name: str = "x.npz", *, compressed: bool = False, **arrays: np.ndarray) -> str:
        save = np.savez_compressed if compressed else np.savez
        save(tmp_path / name, **arrays)
        return str(tmp_path / name)

    return write
