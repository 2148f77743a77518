"""How long ``slimctl --help`` takes, next to Python alone and to Python with typer."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.artifacts import Artifacts
from benchmarks.harness import Measurement, Report, interleaved, measure, ratio

ROUNDS = 15
LIMIT = 2.5

OURS = "slimctl --help"
TYPER = 'python -c "import typer"'


def _our_command() -> list[str]:
    """The console script beside this Python, or the module where it is not installed."""
    script = shutil.which("slimctl", path=str(Path(sys.executable).parent))
    return [script or sys.executable, *([] if script else ["-m", "slimctl"]), "--help"]


def run(artifacts: Artifacts) -> Report:
    """Start-up needs no network; it takes the argument that all benchmarks take."""
    del artifacts

    def command(*arguments: str) -> Callable[[], Measurement]:
        return lambda: measure(arguments)

    subjects = {
        "python -c pass": command(sys.executable, "-c", "pass"),
        TYPER: command(sys.executable, "-c", "import typer"),
        OURS: command(*_our_command()),
    }
    interleaved(subjects, 1)  # compiles and reads everything once
    taken = interleaved(subjects, ROUNDS)
    report = Report("startup", "Start-up of the command line")
    rows = [
        (
            name,
            f"{median(one.wall_s for one in results) * 1000:.0f}",
            f"{median(one.cpu_s for one in results) * 1000:.0f}",
            f"{max(one.peak_mb for one in results):.0f}",
        )
        for name, results in taken.items()
    ]
    heading = f"Median of {ROUNDS} interleaved rounds"
    report.table(heading, ("command", "wall ms", "CPU ms", "peak MiB"), rows)
    wall = {name: [one.wall_s for one in results] for name, results in taken.items()}
    found = ratio(wall[OURS], wall[TYPER])
    report.check(f"at most {LIMIT}x {TYPER}", f"{found:.2f}x", kept=found <= LIMIT)
    return report
