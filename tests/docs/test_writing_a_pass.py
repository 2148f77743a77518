"""Follows docs/writing-a-pass.md in a copy of the repository: what the page says must work."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "out")
TABLE = "BUILT_IN: dict[str, Entry] = {\n"
RECIPE = "{version: 1, name: docs, model: m.onnx, steps: [{strip-docs: {longer_than: 80}}]}\n"

pytestmark = pytest.mark.xdist_group("writing a pass")  # copied once


def blocks() -> dict[str, str]:
    """Python blocks of the page by the file that their first line names."""
    page = (ROOT / "docs" / "writing-a-pass.md").read_text()
    found = re.findall(r"^```python\n# (\S+\.py)[^\n]*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return dict(found)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with the page's pass, registry line and test in their places."""
    folder = tmp_path_factory.mktemp("docs") / "slimctl"
    shutil.copytree(ROOT, folder, symlinks=True, ignore=NOT_SOURCE)
    for place, text in blocks().items():
        path = folder / place
        if path.exists():
            text = path.read_text().replace(TABLE, TABLE + text)  # noqa: PLW2901 # the line's place
        path.write_text(text)
    return folder


def run_python(copy: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=copy, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_has_three_files() -> None:
    assert sorted(blocks()) == [
        "passes/strip_docs.py",
        "slimctl/core/registry.py",
        "tests/passes/test_strip_docs.py",
    ]


def test_its_test_passes(copy: Path) -> None:
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    assert "2 passed" in run_python(copy, *arguments, "tests/passes/test_strip_docs.py")


def test_its_code_is_clean(copy: Path) -> None:
    run_python(copy, "-m", "ruff", "check", "--no-cache", *blocks())
    run_python(copy, "-m", "ruff", "format", "--no-cache", "--check", *blocks())


def test_it_is_a_recipe_step(copy: Path) -> None:
    (copy / "docs.yaml").write_text(RECIPE)
    run_python(copy, "-m", "slimctl", "recipe", "check", "docs.yaml")
