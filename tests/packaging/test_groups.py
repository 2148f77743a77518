"""Tests of one ``xdist_group`` run in one process: what they share is made once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = """
import os
import pytest


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("group", [
    pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in "abcd"
])
def test_where(group, number):
    with open(f"{group}.txt", "a") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""


def test_groups_stay_together(tmp_path: Path) -> None:
    (tmp_path / "test_where.py").write_text(TESTS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup"]
    subprocess.run(
        [*command, "-p", "no:cacheprovider"], cwd=tmp_path, check=True, capture_output=True
    )
    workers = {path.stem: path.read_text().split() for path in tmp_path.glob("?.txt")}
    assert {name: len(found) for name, found in workers.items()} == dict.fromkeys("abcd", 8)
    assert all(len(set(found)) == 1 for found in workers.values())
    assert len({worker for found in workers.values() for worker in found}) == 2
