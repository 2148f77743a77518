"""Probes on a real Dask cluster: a scheduler and two workers, one of which is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import pytest

from slimctl.sensitivity.executors import DaskCluster
from slimctl.sensitivity.run import scan
from slimctl.sensitivity.scan import Finding, Scanner
from slimctl.sensitivity.setup import Setup, Task

pytest.importorskip("distributed")

_START_S = 60


def _free_port() -> int:
    with socket.socket() as open_socket:
        open_socket.bind(("127.0.0.1", 0))
        return int(open_socket.getsockname()[1])


@pytest.fixture
def cluster() -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """Address of the scheduler, and its workers."""
    address = f"127.0.0.1:{_free_port()}"
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--no-dashboard"]
    host, _, port = address.partition(":")
    worker = [
        sys.executable, "-m", "distributed.cli.dask_worker", address, "--nthreads", "1",
        "--no-nanny", "--no-dashboard",
    ]  # fmt: skip
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with ExitStack() as stack:

        def start(line: list[str]) -> subprocess.Popen[bytes]:
            process = stack.enter_context(subprocess.Popen(line, **quiet))  # type: ignore[call-overload]
            stack.callback(process.kill)
            return process  # type: ignore[no-any-return]

        start([*command, "--host", host, "--port", port])
        _wait_for(host, int(port))
        yield address, [start(worker), start(worker)]


def _wait_for(host: str, port: int) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        try:
            socket.create_connection((host, port), timeout=1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise TimeoutError(f"nothing listens at {host}:{port}")


class _Killing(DaskCluster):
    """Kills a worker when the first finding is there."""

    def __init__(self, address: str, victim: int) -> None:
        super().__init__(address)
        self._victim = victim

    def run(self, scanner: Scanner, tasks: Sequence[Task]) -> Iterator[Finding]:
        for count, found in enumerate(super().run(scanner, tasks)):
            if count == 0:
                os.kill(self._victim, signal.SIGKILL)
            yield found


def test_a_killed_worker_loses_nothing(
    setup: Setup, cluster: tuple[str, list[subprocess.Popen[bytes]]]
) -> None:
    address, workers = cluster
    many = replace(setup, changes=("int8", "fp16"), directions=("alone", "except"))
    found = scan(many, executor=_Killing(address, workers[0].pid), resume=False)
    assert workers[0].wait(timeout=_START_S) == -signal.SIGKILL
    assert workers[1].poll() is None
    assert found.findings == scan(many, resume=False).findings
