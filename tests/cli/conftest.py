from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from slimctl.cli.main import run
from tests.cli.models import write_inputs


class Ended(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def slimctl(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Runs a command line in this process."""

    def call(*arguments: object) -> Ended:
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return call


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model and data in it."""
    folder = tmp_path / "work"
    folder.mkdir()
    write_inputs(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SLIMCTL_CACHE", str(tmp_path / "cache"))
    return folder
