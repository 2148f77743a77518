"""A training step of a graph beside one of the network that it was exported from (needs torch).

``python -m benchmarks.training_step SUBJECT NETWORK`` takes some steps with one of them and prints
how many bytes they added to the process at most.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.artifacts import Artifacts
from benchmarks.harness import ROOT, CommandFailedError, Report, interleaved, ratio
from slimctl.evaluate.memory_probe import reset_peak, resident_bytes

NAMES = ("fashion-resnet", "fashion-mobilenet")
GRAPH, PLAIN = "graph", "plain"
ROUNDS = 9
WARM_UP = 3
BATCH = 64
THREADS = 1
SLOWER = 1.5
MORE_MEMORY = 1.3

Step = Callable[[], float]
"""One step; gives the seconds that it took."""


def step_of(subject: str, name: str) -> Step:
    """A step of the network itself, or of its graph: forward, backward, AdamW."""
    import torch
    from torch.nn import functional

    from benchmarks.fashion import CLASSES, NETWORKS, export
    from slimctl.graph.load import load_model
    from slimctl.training.learnable import separate_statistics
    from slimctl.training.module import TrainableGraph

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    images, labels = torch.randn(BATCH, 1, 28, 28), torch.randint(0, CLASSES, (BATCH,))
    network = NETWORKS[name]()
    with tempfile.TemporaryDirectory() as folder:  # both leave the same free memory behind
        path = Path(folder) / "network.onnx"
        export(network, path)
        model = load_model(path)
    if subject == GRAPH:
        separate_statistics(model)  # equal before training, and stored once
        graph = TrainableGraph(model)
        module: torch.nn.Module = graph

        def forward() -> torch.Tensor:
            scores: torch.Tensor = graph({"image": images}, ["logits"])["logits"]
            return scores

    else:
        module = network

        def forward() -> torch.Tensor:
            scores: torch.Tensor = network(images)
            return scores

    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(forward(), labels).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        return time.perf_counter() - start

    return step


def added(subject: str, name: str) -> int:
    """Bytes that some steps add at most to a process that holds the network."""
    step = step_of(subject, name)
    reset_peak()
    before = resident_bytes("VmRSS")
    for _ in range(WARM_UP):
        step()
    return resident_bytes("VmHWM") - before


def _memory(subject: str, name: str) -> int:
    """What :func:`added` finds in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.training_step", subject, name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise CommandFailedError(f"{name}, {subject}: {said[-1] if said else 'no message'}")
    return int(done.stdout)


def run(artifacts: Artifacts) -> Report:
    """Time and memory of a training step."""
    del artifacts  # networks with random weights take as long as trained ones
    report = Report("training_step", f"A training step: batch of {BATCH}, AdamW, {THREADS} thread")
    report.text(
        "The networks of benchmarks/fashion.py, exported as ONNX and trained by slimctl, beside",
        f"themselves in plain PyTorch. Medians of {ROUNDS} interleaved rounds in one process; the",
        "ratio is the median over rounds. Memory is what steps add at most to a fresh process that",
        "holds the network.",
    )
    rows, checks = [], []
    for name in NAMES:
        steps = {subject: step_of(subject, name) for subject in (GRAPH, PLAIN)}
        interleaved(steps, WARM_UP)
        taken = interleaved(steps, ROUNDS)
        slower = ratio(taken[GRAPH], taken[PLAIN])
        size = {subject: _memory(subject, name) for subject in (GRAPH, PLAIN)}
        more = size[GRAPH] / size[PLAIN]
        rows.append(
            (
                name,
                *(f"{median(taken[subject]) * 1e3:.1f}" for subject in (GRAPH, PLAIN)),
                f"{slower:.2f}x",
                *(f"{size[subject] / 2**20:.0f}" for subject in (GRAPH, PLAIN)),
                f"{more:.2f}x",
            )
        )
        checks.append((f"{name}: at most {SLOWER:g}x the time", slower, SLOWER))
        checks.append((f"{name}: at most {MORE_MEMORY:g}x the memory", more, MORE_MEMORY))
    columns = ("", "graph ms", "plain ms", "ratio", "graph MiB", "plain MiB", "ratio")
    report.table("One step", columns, rows)
    for promise, found, most in checks:
        report.check(promise, f"{found:.2f}x", kept=found <= most)
    return report


if __name__ == "__main__":
    print(added(*sys.argv[1:]))
