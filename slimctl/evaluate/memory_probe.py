"""The program of the fresh process that measures a model's memory: a job in, bytes out."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path

import numpy as np

from slimctl.graph.session import Level, Products, installed_providers, open_session, run

RUNS = 3  # onnxruntime's arena has its final size after the second


def resident_bytes(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (peak) of this process.

    Not getrusage: its maximum is inherited from the parent process.
    """
    status = Path("/proc/self/status").read_text("ascii")
    match = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def reset_peak() -> None:
    """Makes the peak start from what is resident now, where the kernel allows it."""
    # The imports' own peak would hide what a small model adds.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "ascii")


def main() -> None:
    """Reads the job from standard input and prints the bytes that running the model adds."""
    job = json.load(sys.stdin)
    with np.load(job["feeds"], allow_pickle=False) as arrays:
        feeds = {name: arrays[f"arr_{index}"] for index, name in enumerate(job["names"])}
    installed_providers()  # imports onnxruntime before the baseline is taken
    reset_peak()
    before = resident_bytes("VmRSS")
    session = open_session(
        Path(job["model"]),
        level=Level(job["level"]),
        threads=int(job["threads"]),
        products=Products.NATIVE,
    )
    for _ in range(RUNS):
        run(session, feeds)
    print(max(resident_bytes("VmHWM") - before, 0))


if __name__ == "__main__":
    main()
