"""Where probes run: here, in processes of this machine, or on a Dask cluster.

Probes do not depend on each other and give the same wherever they run. A worker opens the setup
once and keeps it. One that dies takes its probes with it, and they are run again by another.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from typing import Final, Protocol

from slimctl.core.errors import MissingExtraError, ModelExecutionError, OptionError
from slimctl.sensitivity.scan import Finding, Scanner
from slimctl.sensitivity.setup import Setup, Task

_OPTION: Final = "--executor"

_LIVES: Final = 5
"""How often workers may die: a probe that kills whoever runs it must not run forever."""


class Executor(Protocol):
    """Runs probes."""

    def run(self, scanner: Scanner, tasks: Sequence[Task]) -> Iterator[Finding]:
        """Findings as they come, in any order.

        Raises:
            ModelExecutionError: A variant cannot be run, or workers keep dying.
        """
        ...


def open_executor(text: str) -> Executor:
    """An executor as users spell it: ``local``, ``processes:N``, or ``dask:ADDRESS``.

    Raises:
        OptionError: It is none of these.
    """
    kind, _, rest = text.partition(":")
    if text == "local":
        return Local()
    if kind == "processes" and rest.isdecimal() and int(rest) > 0:
        return Processes(int(rest))
    if kind == "dask" and rest:
        return DaskCluster(rest)
    raise OptionError(
        _OPTION, f"'{text}' is no executor", fix="use local, processes:N or dask:HOST:PORT"
    )


class Local:
    """In this process, one after the other."""

    def run(self, scanner: Scanner, tasks: Sequence[Task]) -> Iterator[Finding]:
        """See :class:`Executor`."""
        return map(scanner.run, tasks)


@lru_cache(maxsize=1)
def _scanner(setup: Setup) -> Scanner:
    return Scanner(setup)


def probe(setup: Setup, task: Task) -> Finding:
    """One probe in a worker, which opens the setup when it sees it first."""
    return _scanner(setup).run(task)


class Processes:
    """In processes of this machine; they share its cores with each other.

    Args:
        count: How many.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def run(self, scanner: Scanner, tasks: Sequence[Task]) -> Iterator[Finding]:
        """See :class:`Executor`."""
        left = dict.fromkeys(tasks)
        for _ in range(_LIVES):
            try:
                for found in self._round(scanner.setup, list(left)):
                    del left[found.task]
                    yield found
            except BrokenProcessPool:
                continue
            return
        raise _dying(f"{_LIVES} times", next(iter(left)))

    def _round(self, setup: Setup, tasks: Sequence[Task]) -> Iterator[Finding]:
        """Until all are done or a worker dies; what others had finished by then is not lost."""
        # Forked children would inherit the threads of onnxruntime in whatever state they are.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(self._count, mp_context=context)
        try:
            waiting: set[Future[Finding]] = {pool.submit(probe, setup, task) for task in tasks}
            broken: BrokenProcessPool | None = None
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    error = future.exception()
                    if isinstance(error, BrokenProcessPool):
                        broken = error
                    else:
                        yield future.result()
            if broken is not None:
                raise broken
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class DaskCluster:
    """On the workers of a running Dask scheduler, which must see the same files.

    Args:
        address: Of the scheduler, ``HOST:PORT`` or ``tcp://HOST:PORT``.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    def run(self, scanner: Scanner, tasks: Sequence[Task]) -> Iterator[Finding]:
        """See :class:`Executor`."""
        try:
            from distributed import Client, as_completed
            from distributed.scheduler import KilledWorker
        except ImportError as error:
            raise MissingExtraError("dask", f"{_OPTION} dask:{self._address}") from error
        try:
            client = Client(self._address, timeout=_CONNECT_S, set_as_default=False)
        except OSError as error:
            raise OptionError(
                _OPTION,
                f"No Dask scheduler answers at {self._address}",
                fix="start one with 'dask scheduler', or name another address",
            ) from error
        with client:
            futures = client.map(
                probe, [scanner.setup] * len(tasks), tasks, retries=_LIVES, pure=False
            )
            with client.as_current():
                completed = as_completed(futures)
            try:
                for future in completed:
                    try:
                        yield future.result()
                    except KilledWorker as error:
                        raise _dying("too often", tasks[futures.index(future)]) from error
            finally:
                client.cancel(futures)


_CONNECT_S: Final = 10


def _dying(how: str, task: Task) -> ModelExecutionError:
    return ModelExecutionError(
        f"Workers died {how}",
        where=f"probes from {task.change} of '{task.group}' on",
        fix="give them more memory or run fewer of them; what was found by now is kept",
    )
