"""The program of the fresh process in which runtimes are measured: a job in, numbers out.

``python -m benchmarks.runtime_probe WHAT MODEL FEEDS ROUNDS`` prints JSON. The numpy runtimes
compute with one thread of OpenBLAS, as onnxruntime does: the number must be set in the environment
before numpy is imported.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from slimctl.evaluate.memory_probe import RUNS, reset_peak, resident_bytes
from slimctl.graph.load import load_model
from slimctl.graph.opset import raise_opset
from slimctl.graph.session import Products, installed_providers, open_session, run
from slimctl.runtime.registry import registered
from slimctl.runtime.session import Runtime

THREADS = "OPENBLAS_NUM_THREADS"
SPEED = "speed"
MEMORY = "memory"
OURS, ONNXRUNTIME, REFERENCE = "slimctl", "onnxruntime", "reference"
REFERENCE_ROUNDS = 3
_SHORT_S = 0.2
"""A round runs a subject again until this time is over, and takes the median."""

_REFERENCE_OPSET = 21
"""onnx.reference has QuantizeLinear and DequantizeLinear from operator set 19 on only."""

Run = Callable[[], Any]


def _subjects(model: Path, feeds: dict[str, Any]) -> dict[str, Run]:
    from onnx.reference import ReferenceEvaluator

    loaded = load_model(model)
    runtime, session = Runtime(loaded), _session(model)
    raised = ir.to_proto(raise_opset(loaded, _REFERENCE_OPSET))
    reference = ReferenceEvaluator(raised)
    return {
        OURS: lambda: runtime.run(feeds),
        ONNXRUNTIME: lambda: run(session, feeds),
        REFERENCE: lambda: reference.run(None, feeds),
    }


def _session(model: Path) -> Any:
    return open_session(model, threads=1, products=Products.NATIVE)


def _once(subject: Run) -> float:
    times: list[float] = []
    while sum(times) < _SHORT_S:
        start = time.perf_counter()
        subject()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def speed(model: Path, feeds: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of a run of each subject, round by round; the reference stops after a few."""
    subjects = _subjects(model, feeds)
    for name in (OURS, ONNXRUNTIME):  # prepares constants, and the memory
        subjects[name]()
    taken: dict[str, list[float]] = {name: [] for name in subjects}
    for index in range(rounds):
        for name, subject in subjects.items():
            if name != REFERENCE or index < REFERENCE_ROUNDS:
                taken[name].append(_once(subject))
    return taken


def memory(model: Path, feeds: dict[str, Any], name: str) -> int:
    """Bytes that loading a model and running it add at most."""
    installed_providers(), registered()  # imports what is needed before the baseline is taken
    reset_peak()
    before = resident_bytes("VmRSS")
    if name == OURS:
        runtime = Runtime(load_model(model))
        subject: Run = lambda: runtime.run(feeds)  # noqa: E731  # one of two
    else:
        session = _session(model)
        subject = lambda: run(session, feeds)  # noqa: E731
    for _ in range(RUNS):
        subject()
    return max(resident_bytes("VmHWM") - before, 0)


def main(what: str, model: str, feeds: str, rounds: str) -> None:
    """Prints what was measured."""
    assert os.environ.get(THREADS) == "1", f"{THREADS} must be 1 before numpy is imported"
    with np.load(feeds, allow_pickle=False) as arrays:
        given = {name: arrays[name] for name in arrays.files}
    if what == SPEED:
        print(json.dumps(speed(Path(model), given, int(rounds))))
    else:
        print(json.dumps(memory(Path(model), given, what.removeprefix(MEMORY))))


if __name__ == "__main__":
    main(*sys.argv[1:])
