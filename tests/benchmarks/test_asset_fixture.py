"""Tests on real models where no registry can be reached: skipped with the reason, or failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ONE_TEST = "tests/assets/test_demo_pages.py::test_same_seed_draws_the_same_pages"


@pytest.mark.parametrize(("required", "word"), [("0", "SKIPPED"), ("1", "ERROR")])
def test_unreachable_registry(required: str, word: str, tmp_path: Path) -> None:
    offline = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "SLIMCTL_ASSETS": str(tmp_path / "cache"),
        "SLIMCTL_REQUIRE_ASSETS": required,
        "COLUMNS": "300",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", ONE_TEST],
        cwd=ROOT,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == int(required), done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(word)]
    assert "font-caladea 0.0.2" in line
