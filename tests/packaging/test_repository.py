"""Agreements between the repository's own files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required_names(project: dict[str, Any]) -> set[str]:
    table = project["project"]
    groups = [table["dependencies"], *table["optional-dependencies"].values()]
    lines = [line for group in groups for line in group]
    names = {canonical(re.split(r"[\[<>=!~ ;]", line)[0]) for line in lines}
    return names - {"slimctl"}


@pytest.mark.parametrize("name", ["passes", "calibration", "recipes"])
def test_links_are_relative(name: str) -> None:
    assert os.readlink(ROOT / "slimctl" / name) == f"../{name}"


def test_every_requirement_has_a_tested_version(project: dict[str, Any]) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonical(line.split("==")[0]) for line in lines if "==" in line}
    assert required_names(project) <= pinned


def test_constraints_are_exact() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line)] == []


def test_core_install_is_light(project: dict[str, Any]) -> None:
    core = {re.split(r"[<>=]", line)[0] for line in project["project"]["dependencies"]}
    assert core.isdisjoint({"torch", "datasets", "matplotlib", "pandas", "pillow", "scipy"})


@pytest.mark.parametrize("statement", ["import passes", "from calibration import collect"])
def test_top_level_folders_cannot_be_imported_by_their_own_name(statement: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "TID251", "-"]
    done = subprocess.run(
        command, input=statement + "\n", cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "TID251" in done.stdout


@pytest.mark.parametrize("target", ["demo", "test", "check", "bench"])
def test_targets_install_what_they_need(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}: \$\(INSTALLED\) ## ", makefile, re.MULTILINE)
