"""Every mode of ``slimctl quantize`` on real models, and the int8 of rivals: bytes, error, time.

``--calib`` and the compared data come from different seeds. SQNR is that of the worst float output
over all compared samples. P50 is measured at one thread in one interleaved run per model.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.artifacts import Artifacts, peer_versions
from benchmarks.harness import ROOT, Report
from benchmarks.onnxruntime_quantize import prepare
from benchmarks.peers import PEERS
from benchmarks.speech import save_samples
from benchmarks.zoo import CALIBRATION, MODELS, accuracy, agreement
from slimctl.core.errors import ModelExecutionError
from slimctl.evaluate.benchmark import benchmark, speedup
from slimctl.evaluate.metrics import Similarity
from slimctl.graph.session import open_session
from slimctl.graph.session import run as run_session

Mode = tuple[str, ...]

MODES: dict[str, Mode] = {
    "int8": ("--min-sqnr", "0"),
    "int8, accurate": ("--min-sqnr", "22", "--rounding", "second-order"),
    "dynamic": ("--mode", "dynamic", "--min-sqnr", "0"),
    "dynamic, smooth": ("--mode", "dynamic", "--min-sqnr", "0", "--smooth", "0.7"),
    "dynamic, split": ("--mode", "dynamic", "--min-sqnr", "0", "--split-outliers", "16"),
    "int8 weights": ("--activation-type", "none"),
    "int4 weights": ("--mode", "weight-only"),
    "int4 weights, gptq": ("--mode", "weight-only", "--algorithm", "gptq"),
    "fp16": ("--mode", "fp16"),
}
_WITHOUT_DATA = ("int8 weights", "int4 weights")
_MATRICES = ("dynamic", "dynamic, smooth", "dynamic, split", "int4 weights", "int4 weights, gptq")
"""Modes that leave convolutions alone: shown where they make the model smaller by a tenth."""

RIVALS = ("MinMax", "Percentile", "dynamic")
_RIVAL_PEERS = ("nncf", "quark percentile", "aimet")
AHEAD_DB = 4.0
METRIC_LOSS = 0.01
ROUNDS = 20


@dataclass(frozen=True)
class Made:
    """A quantized model and how it compares.

    Attributes:
        path: Its file.
        sqnr_db: Of the worst output; None without a float output.
        agreement: Share of decisions that stay.
        accuracy: Of the decisions; None where the right ones are not known.
    """

    path: Path
    sqnr_db: float | None
    agreement: float
    accuracy: float | None


class Bench:
    """One model: its files and what the float model computes.

    Attributes:
        model: The model.
        source: Its file.
        accuracy: Of the float model; None where the right decisions are not known.
    """

    def __init__(self, key: str, folder: Path) -> None:
        self.key, self.model = key, MODELS[key]
        self.folder = folder
        self.source = self.model.build(folder)
        self._prepared = folder / f"{key}-prepared.onnx"
        samples = [sample.feeds for sample in self.model.take(0, CALIBRATION)]
        self.calibration = save_samples(samples, folder / f"{key}-calibration")
        self.samples = self.model.take(1, self.model.evaluated)
        session = open_session(self.source)
        self._reference = [run_session(session, sample.feeds) for sample in self.samples]
        self._decisions = [self.model.decide(outputs) for outputs in self._reference]
        self.accuracy = accuracy(self.samples, self._decisions, self.model.what)

    def compared(self, path: Path) -> Made:
        """A result beside the float model."""
        session = open_session(path)
        totals = {name: Similarity() for name in self._reference[0]}
        decisions = []
        for sample, expected in zip(self.samples, self._reference, strict=True):
            outputs = run_session(session, sample.feeds).values()
            found = dict(zip(expected, outputs, strict=True))
            decisions.append(self.model.decide(found))
            for name, array in expected.items():
                if array.dtype.kind == "f":
                    totals[name].update(array, found[name])
        known = [total.sqnr_db for total in totals.values() if total.elements]
        what = self.model.what
        same = agreement(np.concatenate(self._decisions), np.concatenate(decisions), what)
        right = accuracy(self.samples, decisions, what)
        return Made(path, min(known, default=None), same, right)

    def ours(self, mode: str) -> Made | str:
        """What ``slimctl quantize`` makes, or why nothing."""
        output = self.folder / f"{self.key}-{mode.replace(', ', '-').replace(' ', '-')}.onnx"
        data = () if mode in _WITHOUT_DATA else ("--calib", str(self.calibration))
        command = [sys.executable, "-m", "slimctl", "quantize", str(self.source), *data]
        return self._made([*command, *MODES[mode], "--force", "-q", "-o", str(output)], output)

    def rival(self, name: str) -> Made | str:
        """What another quantizer makes of the same data and the prepared model, or why nothing."""
        output = self.folder / f"{self.key}-rival-{name.replace(' ', '-')}.onnx"
        if not self._prepared.exists():
            prepare(self.source, self._prepared)
        files = [str(self._prepared), str(self.calibration), str(output)]
        if name in RIVALS:
            module, python = "benchmarks.onnxruntime_quantize", sys.executable
        else:
            module, python = "benchmarks.peers", os.environ["PEERS_PYTHON"]
        return self._made([python, "-m", module, name, *files], output)

    def _made(self, command: list[str], output: Path) -> Made | str:
        with tempfile.TemporaryDirectory() as cache:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "SLIMCTL_CACHE": cache},
                capture_output=True,
                text=True,
                check=False,
                timeout=_LIMIT_S,
            )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("error")] or lines[-1:]
            return errors[0][:90] if errors else "failed"
        try:
            return self.compared(output)
        except ModelExecutionError as error:
            return f"does not run: {error.what}"[:90]


_LIMIT_S = 600


def _size(path: Path) -> int:
    data = path.with_name(path.name + ".data")
    return path.stat().st_size + (data.stat().st_size if data.exists() else 0)


def _shown(name: str, made: Made | str, source: Path) -> bool:
    """Modes for matrices say nothing about a model that has none to speak of."""
    if name not in _MATRICES:
        return True
    return not isinstance(made, str) and _size(made.path) < 0.9 * _size(source)


def _table(report: Report, bench: Bench, found: dict[str, Made | str]) -> None:
    made = {name: one for name, one in found.items() if isinstance(one, Made)}
    paths = [bench.source, *(one.path for one in made.values())]
    timed = benchmark(paths, bench.samples[0].feeds, threads=1, rounds=ROUNDS, memory=False)
    times = dict(zip(made, timed[1:], strict=True))
    full = _size(bench.source)
    right = _percent(bench.accuracy)
    rows = [
        ("float32", f"{full / 1e6:.2f}", "100%", "", "", right, f"{timed[0].p50:.2f}", "1.00x", "")
    ]
    for name, one in found.items():
        if isinstance(one, str):
            rows.append((name, "", "", "", "", "", "", "", one))
            continue
        size, result = _size(one.path), times[name]
        rows.append(
            (
                name,
                f"{size / 1e6:.2f}",
                f"{size / full:.0%}",
                "" if one.sqnr_db is None else f"{one.sqnr_db:.1f}",
                f"{one.agreement:.1%}",
                _percent(one.accuracy),
                f"{result.p50:.2f}",
                f"{speedup(timed[0], result).value:.2f}x",
                "",
            )
        )
    same, right = f"same {bench.model.what}", "right" if right else ""
    columns = ("mode", "MB", "of float", "SQNR dB", same, right, "P50 ms", "speed", "")
    report.table(bench.model.title, columns, rows)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _check(report: Report, bench: Bench, found: dict[str, Made | str]) -> None:
    title = f"{bench.model.title}, int8, accurate"
    accurate = found["int8, accurate"]
    if isinstance(accurate, str):
        report.check(title, accurate, kept=False)
        return
    rivals = {
        name: one.sqnr_db
        for name, one in found.items()
        if name not in MODES and isinstance(one, Made) and one.sqnr_db is not None
    }
    if bench.accuracy is None or accurate.accuracy is None:
        loss, promise = 1.0 - accurate.agreement, f"at most 1 % of the {bench.model.what} changes"
    else:
        loss, promise = bench.accuracy - accurate.accuracy, "at most 1 % less right than float"
    report.check(f"{title}: {promise}", f"{loss:.1%}", kept=loss <= METRIC_LOSS)
    if rivals and accurate.sqnr_db is not None:
        best = max(rivals, key=rivals.__getitem__)
        gain = accurate.sqnr_db - rivals[best]
        promise = f"{AHEAD_DB:g} dB above the best rival ({best})"
        report.check(f"{title}: {promise}", f"{gain:+.1f} dB", kept=gain >= AHEAD_DB)


def _measure(report: Report, key: str, folder: Path) -> None:
    bench = Bench(key, folder)
    ours = {mode: bench.ours(mode) for mode in MODES}
    found = {n: one for n, one in ours.items() if _shown(n, one, bench.source)}
    if bench.model.rivals:
        names = [f"onnxruntime {name}" for name in RIVALS]
        found |= {n: bench.rival(n.removeprefix("onnxruntime ")) for n in names}
        peers = peer_versions()
        found |= {n: bench.rival(n) for n in _RIVAL_PEERS if PEERS[n][0] in peers}
    _table(report, bench, found)
    if bench.model.rivals:
        _check(report, bench, found)
        report.text()


def run(artifacts: Artifacts, only: str = "") -> Iterator[Report]:
    """Every mode on every model of the zoo, one report for each: all take more than an hour.

    Args:
        artifacts: Networks and data.
        only: Key of the only model to look at.
    """
    folder = artifacts.workload.folder / "modes"
    folder.mkdir(exist_ok=True)
    for key in [only] if only else MODELS:
        yield _report(key, folder)


def _report(key: str, folder: Path) -> Report:
    report = Report(f"modes/{key}", "Modes of quantization on a real model")
    report.text(
        f"{CALIBRATION} samples calibrate; 64 others are compared, 512 of pictures. Decisions",
        "(class, letters, mask ...) are those of the float model, and masks are compared by",
        "intersection over union. Where the truth is known, `right` compares them with it in the",
        "same way. Modes for matrices are listed where the model has any to speak of.",
    )
    _measure(report, key, folder)
    return report
