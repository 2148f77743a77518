"""What all benchmarks share: measured commands, tables, checks and the text file of results."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("numpy", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "pydantic", "typer")

Result = TypeVar("Result")


class CommandFailedError(Exception):
    """A measured command did not end with exit code 0."""


@dataclass(frozen=True)
class Measurement:
    """What one process took: seconds of wall and of CPU time, MiB of peak resident memory."""

    wall_s: float
    cpu_s: float
    peak_mb: float


def measure(command: Sequence[str | Path], environment: Mapping[str, str] = {}) -> Measurement:
    """Runs a command to its end, in a folder of its own because some leave files behind.

    Raises:
        CommandFailedError: It failed; the message ends with what it said last.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "taken.json"
        launcher = [sys.executable, "-I", "-S", str(Path(__file__).with_name("measure.py"))]
        done = subprocess.run(
            [*launcher, str(output), *map(str, command)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
            raise CommandFailedError(f"{' '.join(map(str, command))}\n{said}")
        return Measurement(**json.loads(output.read_text(encoding="utf-8")))


def interleaved(
    subjects: Mapping[str, Callable[[], Result]], rounds: int
) -> dict[str, list[Result]]:
    """Calls every subject once per round, so that a slow minute hits all of them."""
    results: dict[str, list[Result]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            results[name].append(subject())
    return results


def ratio(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """The median of the ratios of one round each."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


@dataclass
class Report:
    """The text of one benchmark."""

    name: str
    title: str
    lines: list[str] = field(default_factory=list)

    def text(self, *lines: str) -> None:
        self.lines += [*lines, ""]

    def table(self, heading: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Adds a table; the first column is aligned left, the others right."""
        cells = [list(columns), *(list(row) for row in rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]
        rule = ["-" * width for width in widths]
        self.lines.append(heading)
        for row in [cells[0], rule, *cells[1:]]:
            padded = [row[0].ljust(widths[0])]
            padded += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            self.lines.append("  ".join(padded).rstrip())
        self.lines.append("")

    def check(self, promise: str, found: str, *, kept: bool) -> None:
        """Adds one line that says whether what the project promises was measured."""
        self.lines.append(f"{'kept  ' if kept else 'MISSED'}  {promise}: {found}")

    def write(self, *, quiet: bool = False) -> Path:
        """Writes the report to ``results/NAME.txt`` and prints it."""
        body = "\n".join(self.lines).rstrip()
        text = f"{self.title}\n{'=' * len(self.title)}\n\n{machine()}\n\n{body}\n"
        path = RESULTS / f"{self.name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if not quiet:
            print(text, flush=True)
        return path


def machine() -> str:
    """Date, processor and versions, two lines."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    versions = [f"{name} {version(name)}" for name in PACKAGES]
    cores = len(os.sched_getaffinity(0))
    return (
        f"{date}, {_processor()}, {cores} cores, {_memory_gib():.0f} GiB, {platform.system()}\n"
        f"Python {platform.python_version()}, {', '.join(versions)}"
    )


def version(package: str) -> str:
    """The installed version of a package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    """Model and the instruction set that decides how fast int8 is."""
    information = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    lines = [line.split(":", 1) for line in information.splitlines() if ":" in line]
    fields = {name.strip(): value.strip() for name, value in lines}
    model = f"{fields['model name']} (family {fields['cpu family']}, model {fields['model']})"
    flags = fields["flags"].split()
    vnni = "VNNI" if {"avx512_vnni", "avx_vnni"} & set(flags) else "no VNNI"
    return f"{model}, {vnni}"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
