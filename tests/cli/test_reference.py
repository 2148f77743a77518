from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slimctl.cli.group import root_command

ROOT = Path(__file__).parents[2]


def _generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_reference_is_in_step_with_the_code() -> None:
    done = _generate("--check")
    assert done.returncode == 0, done.stdout


def _paths(command, path: str):
    yield path
    for name, listed in getattr(command, "commands", {}).items():
        child = listed.load() if hasattr(listed, "load") else listed
        yield from _paths(child, f"{path} {name}")


@pytest.mark.parametrize("path", list(_paths(root_command(), "slimctl"))[1:])
def test_every_command_is_documented(path: str) -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    assert f"# {path}\n" in page
