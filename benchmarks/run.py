"""Runs the benchmarks: ``python benchmarks/run.py [NAME ...]`` or ``python -m benchmarks``.

Each prints its tables and writes ``benchmarks/results/NAME.txt``; ``modes`` writes one for each
model, and ``modes:mobilenet-v2`` looks at that one alone. Models and data come out of
public packages (assets.py), everything else is made in a temporary folder. ``PEERS_PYTHON`` may
name a Python with other quantizers (peers.py); ``--slow`` runs those that take minutes as well.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

if __package__ in (None, ""):  # started as a file: only its own folder is on the path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import (
    accuracy,
    calibration_speed,
    faults,
    language,
    latency,
    learning,
    modes,
    pruning,
    runtime,
    sensitivity,
    startup,
    training_step,
)
from benchmarks.artifacts import Artifacts
from benchmarks.harness import CommandFailedError, Report
from benchmarks.workload import Workload
from benchmarks.zoo import MODELS

BENCHMARKS: dict[str, Callable[[Artifacts], Report | Iterable[Report]]] = {
    "startup": startup.run,
    "calibration_speed": calibration_speed.run,
    "accuracy": accuracy.run,
    "auto_calibration": accuracy.run_auto,
    "latency": latency.run,
    "modes": modes.run,
    "language": language.run,
    "learning": learning.run,
    "pruning": pruning.run,
    "faults": faults.run,
    "runtime": runtime.run,
    "sensitivity": sensitivity.run,
    "training_step": training_step.run,
}


def _reports(name: str, artifacts: Artifacts) -> Iterator[Report]:
    name, _, model = name.partition(":")
    found = modes.run(artifacts, model) if model else BENCHMARKS[name](artifacts)
    if isinstance(found, Report):
        yield found
    else:
        yield from found


def main(arguments: list[str] | None = None) -> int:
    """Runs the named benchmarks, or all; a promise that is missed does not fail the run."""
    parser = argparse.ArgumentParser(description="Measures slimctl side by side with others.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--slow", action="store_true", help="run peers that take minutes as well")
    options = parser.parse_args(arguments)
    known = {*BENCHMARKS, *(f"modes:{key}" for key in MODELS)}
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    failed = False
    with tempfile.TemporaryDirectory(prefix="slimctl-bench-") as folder:
        artifacts = Artifacts(Workload(Path(folder)), slow=options.slow)
        for name in options.names or BENCHMARKS:
            try:
                for report in _reports(name, artifacts):
                    report.write()
            except CommandFailedError as error:  # the others can still be measured
                failed = True
                print(f"{name}: {error}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
