"""The built-in runtime beside onnxruntime and ONNX's reference evaluator: speed and memory."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.artifacts import Artifacts
from benchmarks.harness import ROOT, CommandFailedError, Report, measure, ratio
from benchmarks.runtime_probe import (
    MEMORY,
    ONNXRUNTIME,
    OURS,
    REFERENCE,
    REFERENCE_ROUNDS,
    SPEED,
    THREADS,
)
from benchmarks.workload import NETWORKS
from benchmarks.zoo import CALIBRATION, MODELS

ROUNDS = 12
NAMES = ("efficientnet-lite0", "mobilenet-v2", "ocr-rec")
PROMISED = "efficientnet-lite0"
FASTER = 15.0
SLOWER = 12.0
MORE_MEMORY = 3.0


def _artifact(artifacts: Artifacts, name: str) -> Path:
    """slimctl's int8, by its defaults."""
    if name in NETWORKS:
        made = artifacts.ours(name).path
        assert made is not None
        return made
    folder = artifacts.workload.folder
    data, output = folder / f"{name}-calibration.npz", folder / f"{name}-int8.onnx"
    np.savez(data, allow_pickle=False, **MODELS[name].stacked(0, CALIBRATION))
    command = [sys.executable, "-m", "slimctl", "quantize", str(MODELS[name].build(folder))]
    command += ["--calib", str(data), "--force", "-q", "-o", str(output)]
    with tempfile.TemporaryDirectory() as cache:
        measure(command, {"SLIMCTL_CACHE": cache})
    return output


def _probe(what: str, model: Path, feeds: Path) -> Any:
    """What the fresh process finds; the number of threads is set before it imports numpy."""
    command = [sys.executable, "-m", "benchmarks.runtime_probe", what, model, feeds, ROUNDS]
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, THREADS: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise CommandFailedError(f"{model.name}, {what}: {said[-1] if said else 'no message'}")
    return json.loads(done.stdout)


class _Found:
    """What was measured of one model."""

    def __init__(self, model: Path, feeds: Path) -> None:
        self.taken: dict[str, list[float]] = _probe(SPEED, model, feeds)
        self.bytes: dict[str, int] = {
            name: _probe(MEMORY + name, model, feeds) for name in (OURS, ONNXRUNTIME)
        }

    @property
    def slower(self) -> float:
        """How many times longer the built-in runtime takes than onnxruntime."""
        return ratio(self.taken[OURS], self.taken[ONNXRUNTIME])

    @property
    def faster(self) -> float:
        """How many times longer the reference evaluator takes than the built-in runtime."""
        return ratio(self.taken[REFERENCE], self.taken[OURS][:REFERENCE_ROUNDS])

    @property
    def memory(self) -> float:
        """How many times the memory of onnxruntime the built-in runtime needs."""
        return self.bytes[OURS] / self.bytes[ONNXRUNTIME]

    def row(self, title: str) -> tuple[str, ...]:
        """One line of the table."""
        times = (statistics.median(self.taken[n]) for n in (OURS, ONNXRUNTIME, REFERENCE))
        sizes = (self.bytes[name] / 2**20 for name in (OURS, ONNXRUNTIME))
        return (
            title,
            *(f"{seconds * 1e3:.1f}" for seconds in times),
            f"{self.slower:.1f}x",
            f"{self.faster:.1f}x",
            *(f"{size:.0f}" for size in sizes),
            f"{self.memory:.1f}x",
        )


def _measure(artifacts: Artifacts, name: str) -> _Found:
    feeds = artifacts.workload.folder / f"{name}-one.npz"
    np.savez(feeds, allow_pickle=False, **MODELS[name].stacked(1, 1))
    return _Found(_artifact(artifacts, name), feeds)


def run(artifacts: Artifacts) -> Report:
    """Speed and memory of the built-in runtime on int8 networks."""
    report = Report("runtime", "The built-in runtime: int8, 1 thread, batch of 1")
    report.text(
        f"Medians of {ROUNDS} interleaved rounds ({REFERENCE_ROUNDS} of onnx.reference) in one",
        "process; ratios are medians over rounds. OpenBLAS has one thread, as onnxruntime (ort)",
        "has. onnx.reference computes Q/DQ nodes as they are written, in operator set 21: it has",
        "none of earlier ones. Memory is what loading a model and running it add to a fresh",
        "process at most.",
    )
    found = {name: _measure(artifacts, name) for name in NAMES}
    columns = ("", "ms", "ort ms", "reference ms", "of ort", "faster", "MiB", "ort MiB", "of ort")
    rows = [one.row(MODELS[name].title) for name, one in found.items()]
    report.table("slimctl's artifacts", columns, rows)
    one, title = found[PROMISED], MODELS[PROMISED].title
    report.check(
        f"{title}: at least {FASTER:g}x as fast as onnx.reference",
        f"{one.faster:.1f}x",
        kept=one.faster >= FASTER,
    )
    report.check(
        f"{title}: within {SLOWER:g}x of onnxruntime",
        f"{one.slower:.1f}x",
        kept=one.slower <= SLOWER,
    )
    report.check(
        f"{title}: within {MORE_MEMORY:g}x of onnxruntime's memory",
        f"{one.memory:.1f}x",
        kept=one.memory <= MORE_MEMORY,
    )
    return report
