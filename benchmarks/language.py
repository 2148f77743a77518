"""A small language model with few bits per weight: size, error, perplexity, speed and effort.

SmolLM2-135M reads English prose: one novel calibrates, windows of another are judged. Every result
is made by a command in a process of its own.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from benchmarks.artifacts import Artifacts
from benchmarks.assets import fetch_one
from benchmarks.byte_pairs import Tokenizer, tokenizer
from benchmarks.gguf import load_gguf
from benchmarks.harness import CommandFailedError, Measurement, Report, measure
from benchmarks.novels import load_novels
from benchmarks.smollm2 import from_gguf
from benchmarks.workload import open_session
from slimctl.evaluate.benchmark import BenchResult, benchmark, speedup

WINDOW = 512
CALIBRATION_WINDOWS = 16
EVALUATION_WINDOWS = 2
CALIBRATION_NOVEL = "emma"
EVALUATION_NOVEL = "persuasion"

BLOCK = 32
"""onnxruntime's rtn and k_quant fail where an output has an odd number of blocks, or a part of one:
576 inputs are 9 blocks of 64 and four and a half of 128."""

ALGORITHMS = ("rtn", "hqq", "gptq", "awq")
_WITH_DATA = ("gptq", "awq")
RIVALS = ("rtn", "hqq", "k_quant")

ROUNDS = 12
PROMPT = 128
CPU_LIMIT_S = 120.0
MEMORY_LIMIT_MB = 1000.0

_CHARACTERS = 8 * WINDOW  # a token of English is four to five characters
_LOGITS = "output"
"""The product with the table of words; onnxruntime's tool leaves it alone."""

FLOAT = "float32"


@dataclass(frozen=True)
class Score:
    """How the next tokens are predicted.

    Attributes:
        perplexity: ``exp`` of the mean negative logarithm of the probability of what follows.
        sqnr_db: Of the logits, against the float model.
        same: Share of positions with the same most likely token.
    """

    perplexity: float
    sqnr_db: float
    same: float


@dataclass(frozen=True)
class Made:
    """A model and how good it is; ``taken`` is what making it took, nothing for the float model."""

    path: Path
    score: Score
    taken: Measurement | None = None

    @property
    def size_mb(self) -> float:
        return self.path.stat().st_size / 1e6


def windows(text: str, of: Tokenizer, count: int) -> NDArray[np.int64]:
    """Windows [count, WINDOW] of tokens, evenly spaced; title and end of the book left out."""
    starts = np.linspace(0.02, 0.95, count) * len(text)
    rows = [of.encode(text[int(start) : int(start) + _CHARACTERS])[:WINDOW] for start in starts]
    return np.array(rows, np.int64)


def negative_log_likelihood(
    logits: NDArray[np.float32], tokens: NDArray[np.int64]
) -> NDArray[np.float64]:
    """``log sum exp(l) - l[next]`` at every position but the last; [S, words], [S] -> [S - 1]."""
    before = logits[:-1].astype(np.float64)
    largest = before.max(axis=-1)
    total = np.log(np.exp(before - largest[:, None]).sum(axis=-1)) + largest
    return np.asarray(total - before[np.arange(len(before)), tokens[1:]])


class Bench:
    """The float model, the data, and the logits that all others are compared with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = load_gguf(fetch_one("smollm2"))
        self.source = folder / "smollm2.onnx"
        if not self.source.exists():
            onnx.save(from_gguf(file), self.source)
        known, novels = tokenizer(file.metadata), load_novels(fetch_one("novels"))
        self.calibration = folder / "smollm2-calibration.npz"
        calibration = windows(novels[CALIBRATION_NOVEL], known, CALIBRATION_WINDOWS)
        np.savez(self.calibration, input_ids=calibration)
        self.windows = windows(novels[EVALUATION_NOVEL], known, EVALUATION_WINDOWS)
        self.reference = self._logits(self.source)

    def _logits(self, path: Path) -> list[NDArray[np.float32]]:
        """[S, words] of each window."""
        session = open_session(path)
        return [session.run(None, {"input_ids": row[None]})[0][0] for row in self.windows]

    def score(self, path: Path) -> Score:
        """How a model predicts the windows."""
        found = self.reference if path == self.source else self._logits(path)
        losses, same, signal, noise = [], [], 0.0, 0.0
        for tokens, expected, logits in zip(self.windows, self.reference, found, strict=True):
            losses.append(negative_log_likelihood(logits, tokens))
            same.append(logits.argmax(axis=-1) == expected.argmax(axis=-1))
            signal += float(np.vdot(expected, expected))
            noise += float(np.sum((logits - expected) ** 2, dtype=np.float64))
        decibels = float(10 * np.log10(signal / noise)) if noise else np.inf
        return Score(float(np.exp(np.mean(losses))), decibels, float(np.mean(same)))

    def made(self, name: str, command: list[str]) -> Made | str:
        """What a command makes of the model, or why nothing."""
        output = self.folder / f"{name.replace(', ', '-').replace(' ', '-')}.onnx"
        try:
            with tempfile.TemporaryDirectory() as cache:
                taken = measure([*command, str(output)], {"SLIMCTL_CACHE": cache})
        except CommandFailedError as error:
            return _reason(str(error))
        return Made(output, self.score(output), taken)

    def quantize(self, *options: str, data: bool = False) -> list[str]:
        """``slimctl quantize``; the output is added."""
        calibration = ["--calib", str(self.calibration)] if data else []
        command = [sys.executable, "-m", "slimctl", "quantize", str(self.source), *calibration]
        return [*command, *options, "--force", "-q", "-o"]

    def rival(self, algorithm: str) -> list[str]:
        """onnxruntime's quantizer; the output is added."""
        module = "benchmarks.onnxruntime_weights"
        return [sys.executable, "-m", module, algorithm, str(BLOCK), str(self.source)]


def _reason(said: str) -> str:
    """What a failed command says of why: slimctl begins that line with "error"."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("error")), lines[-1])[:90]


def _four_bits(bench: Bench, *options: str) -> dict[str, list[str]]:
    """Commands of all algorithms."""
    return {
        algorithm: bench.quantize(
            "--mode", "weight-only", "--algorithm", algorithm, "--block-size", str(BLOCK), *options,
            data=algorithm in _WITH_DATA,
        )
        for algorithm in ALGORITHMS
    }  # fmt: skip


def _whole(bench: Bench) -> dict[str, list[str]]:
    """Modes that make everything small, the table of words included."""
    commands = {
        "int8 dynamic": bench.quantize("--mode", "dynamic"),
        "int8 weights": bench.quantize("--mode", "weight-only", "--weight-type", "uint8"),
    }
    found = _four_bits(bench)
    return commands | {f"int4 {name}": command for name, command in found.items()}


def _layers(bench: Bench) -> dict[str, list[str]]:
    """What onnxruntime's tool quantizes, by it and by slimctl: all layers and no table."""
    ours = _four_bits(bench, "--no-embeddings", "--exclude", _LOGITS)
    theirs = {name: bench.rival(name) for name in RIVALS}
    return {f"slimctl {name}": command for name, command in ours.items()} | {
        f"onnxruntime {name}": command for name, command in theirs.items()
    }


# tables

_COLUMNS = ("model", "MB", "SQNR dB", "perplexity", "same token", "CPU s", "peak MB")


def _row(name: str, made: Made | str) -> tuple[str, ...]:
    if isinstance(made, str):
        return (name, made, "", "", "", "", "")
    score, taken = made.score, made.taken
    return (
        name,
        f"{made.size_mb:.1f}",
        "" if np.isinf(score.sqnr_db) else f"{score.sqnr_db:.1f}",
        f"{score.perplexity:.2f}",
        f"{score.same:.1%}",
        f"{taken.cpu_s:.0f}" if taken else "",
        f"{taken.peak_mb:.0f}" if taken else "",
    )


def _speed(bench: Bench, found: dict[str, Made]) -> dict[int, dict[str, tuple[BenchResult, float]]]:
    """P50 and how often faster than float, by number of tokens, at one thread."""
    measured = {}
    for length in (1, PROMPT):
        feeds = {"input_ids": bench.windows[:1, :length]}
        paths = [one.path for one in found.values()]
        results = benchmark(paths, feeds, threads=1, rounds=ROUNDS, memory=False)
        base = results[0]
        measured[length] = {
            name: (result, speedup(base, result).value)
            for name, result in zip(found, results, strict=True)
        }
    return measured


def _speed_table(report: Report, bench: Bench, found: dict[str, Made]) -> None:
    measured = _speed(bench, found)
    rows = []
    for name in found:
        cells = [measured[length][name] for length in measured]
        rows.append((name, *(c for r, gain in cells for c in (f"{r.p50:.1f}", f"{gain:.2f}x"))))
    columns = ("model", "1 token ms", "speed", f"{PROMPT} tokens ms", "speed")
    report.table("Latency, P50 at one thread", columns, rows)


def _check_layers(report: Report, found: dict[str, Made | str]) -> None:
    made = {name: one for name, one in found.items() if isinstance(one, Made)}
    ours = {name: one for name, one in made.items() if name.startswith("slimctl")}
    if not ours:
        report.check("layers only", "nothing was made", kept=False)
        return
    best = max(ours, key=lambda name: ours[name].score.sqnr_db)
    for name in RIVALS:
        rival = made.get(f"onnxruntime {name}")
        if rival is not None:
            gain = ours[best].score.sqnr_db - rival.score.sqnr_db
            promise = f"layers only: {best} has less error than onnxruntime {name}"
            report.check(promise, f"{gain:+.1f} dB", kept=gain > 0)


def _check_effort(report: Report, bench: Bench, made: Made | str) -> None:
    promise = f"GPTQ with {CALIBRATION_WINDOWS} x {WINDOW} tokens: at most"
    if isinstance(made, str) or made.taken is None:
        report.check(f"{promise} {CPU_LIMIT_S:.0f} s of CPU", str(made), kept=False)
        return
    cpu_s, peak_mb = made.taken.cpu_s, made.taken.peak_mb
    limit_mb = bench.source.stat().st_size / 2**20 + MEMORY_LIMIT_MB
    report.check(
        f"{promise} {CPU_LIMIT_S:.0f} s of CPU", f"{cpu_s:.0f} s", kept=cpu_s <= CPU_LIMIT_S
    )
    report.check(
        f"{promise} {limit_mb:.0f} MB, the float model and {MEMORY_LIMIT_MB:.0f} MB",
        f"{peak_mb:.0f} MB",
        kept=peak_mb <= limit_mb,
    )


def _introduction(report: Report) -> None:
    report.text(
        f"SmolLM2-135M-Instruct; {CALIBRATION_WINDOWS} windows of {WINDOW} tokens from one novel",
        f"calibrate, {EVALUATION_WINDOWS} from another are compared (Emma, Persuasion).",
        "The published weights are themselves restored from 4 bits in blocks of 32 (Q4_1, a scale",
        "and a smallest value each; the table of words from 8 bits). Errors here are those of",
        "rounding once more: compare rows with one another and with nothing else.",
        "CPU and memory are those of the whole command: reading, quantizing, comparing, writing.",
    )


def run(artifacts: Artifacts) -> Report:
    """Few bits per weight on a decoder."""
    report = Report("language", "Weights of a small language model")
    folder = artifacts.workload.folder / "language"
    folder.mkdir(exist_ok=True)
    bench = Bench(folder)
    _introduction(report)
    full = Made(bench.source, bench.score(bench.source))
    whole = {name: bench.made(name, command) for name, command in _whole(bench).items()}
    rows = [_row(name, one) for name, one in {FLOAT: full, **whole}.items()]
    heading = f"Everything, the table of words included; 4 bits in blocks of {BLOCK}"
    report.table(heading, _COLUMNS, rows)
    _check_effort(report, bench, whole["int4 gptq"])
    report.text()
    report.write(quiet=True)  # what is known by now is kept
    found = {name: bench.made(f"{name} layers", c) for name, c in _layers(bench).items()}
    heading = f"Layers only, 4 bits in blocks of {BLOCK}: what onnxruntime's tool quantizes"
    report.table(heading, _COLUMNS, [_row(name, one) for name, one in found.items()])
    _check_layers(report, found)
    report.text()
    report.write(quiet=True)
    timed = {name: one for name, one in whole.items() if isinstance(one, Made)}
    _speed_table(report, bench, {FLOAT: full, **timed})
    return report
