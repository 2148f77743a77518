"""The built wheel: what it holds, and that it works where nothing of the repository is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "out")

pytestmark = pytest.mark.xdist_group("wheel")  # built once


def call(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source archive, which is built from a copy: both are tested."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=NOT_SOURCE)
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, cwd=folder / "source")
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; dependencies are seen, an editable install is not."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    call(
        *[sys.executable, "-m", "pip", "--python", python, "install", "--quiet"],
        *["--no-deps", "--no-index", wheel],
        cwd=folder,
    )
    (site,) = folder.glob("lib/python*/site-packages")
    # A path file adds the folder, but not the path files and import hooks that lie in it.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def source_files() -> set[str]:
    """Modules and data as the repository shows them, through the three links."""
    found = set()
    for folder, _, names in os.walk(ROOT / "slimctl", followlinks=True):
        for name in names:
            if Path(name).suffix in {".py", ".yaml", ".typed"}:
                found.add((Path(folder) / name).relative_to(ROOT).as_posix())
    return found


def packed_files(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_wheel_holds_slimctl_alone(wheel: Path) -> None:
    top = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"slimctl"}


def test_wheel_holds_every_module_and_data_file_and_nothing_else(wheel: Path) -> None:
    assert packed_files(wheel) == source_files()


def test_wheel_carries_license_and_entry_point(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    named = {name.partition(".dist-info/")[2]: name for name in archive.namelist()}
    assert archive.read(named["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes()
    assert b"slimctl = slimctl.cli.main:main" in archive.read(named["entry_points.txt"])


def test_installed_package_is_the_wheels(environment: Path) -> None:
    code = "import slimctl, slimctl.passes.fuse as fuse; print(slimctl.__file__, fuse.__file__)"
    for place in call(environment / "bin" / "python", "-c", code, cwd=environment).split():
        assert place.startswith(str(environment))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--help", "quantize"),
        ("recipe list", "int8-cpu"),
        ("target list", "cpu-avx2"),
        ("quantize --help", "--calibration"),
    ],
)
def test_installed_command_works(environment: Path, arguments: str, expected: str) -> None:
    said = call(environment / "bin" / "slimctl", *arguments.split(), cwd=environment)
    assert expected in said
