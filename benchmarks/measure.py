"""Runs one command and writes what it took, as JSON: ``measure.py OUTPUT COMMAND [ARGUMENT ...]``.

A child's peak memory, as the kernel counts it, is never below the memory of the process that
started it. This one is started bare (``python -I -S``) and imports next to nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main(output: str, command: list[str]) -> int:
    start = time.perf_counter()
    process = os.posix_spawnp(command[0], command, os.environ)
    _, status, usage = os.wait4(process, 0)
    taken = {
        "wall_s": time.perf_counter() - start,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_mb": usage.ru_maxrss / 1024,  # Linux counts KiB
    }
    with open(output, "w", encoding="utf-8") as file:
        json.dump(taken, file)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
