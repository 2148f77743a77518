"""How far long work is: a bar on a terminal, plain lines elsewhere. Always on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, TextIO, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

    from slimctl.core.contract import Label, Progress

_T = TypeVar("_T")

SECONDS_BETWEEN_LINES = 10.0
"""A log of a one-hour run stays readable, and a continuous-integration job shows signs of life."""


class LineProgress:
    """One line when work ends, and one every few seconds while it runs."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock

    def track(self, items: Iterator[_T], *, total: int | None, label: Label) -> Iterator[_T]:
        """Yields the items and reports how many have passed."""
        start = last = self._clock()
        done = 0
        for item in items:
            yield item
            done += 1
            if self._clock() - last >= SECONDS_BETWEEN_LINES:
                last = self._clock()
                self._say(f"{_text(label)}: {done}{_of(total, done, last - start)}")
        self._say(f"{_text(label)}: done, {done} in {self._clock() - start:.1f} s")

    def _say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def _text(label: Label) -> str:
    return label if isinstance(label, str) else label()


def _of(total: int | None, done: int, seconds: float) -> str:
    """How much there is in all, and how long the rest takes at this pace."""
    if not total:
        return ""
    left = timedelta(seconds=round(seconds / done * (total - done)))
    return f"/{total}, {left} left"


class BarProgress:
    """Bars that disappear when their work is done. Nested work shares one display."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bars: Bars | None = None

    def track(self, items: Iterator[_T], *, total: int | None, label: Label) -> Iterator[_T]:
        """Yields the items and moves a bar."""
        if self._bars is not None:
            yield from self._advance(self._bars, items, total, label)
            return
        self._bars = _display(self._stream)
        try:
            with self._bars as bars:
                yield from self._advance(bars, items, total, label)
        finally:
            self._bars = None

    @staticmethod
    def _advance(bars: Bars, items: Iterator[_T], total: int | None, label: Label) -> Iterator[_T]:
        task = bars.add_task(_text(label), total=total)
        for item in items:
            yield item
            bars.update(task, advance=1, description=_text(label))
        bars.remove_task(task)


def _display(stream: TextIO) -> Bars:
    from rich import progress

    from slimctl.cli.table import terminal

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=terminal(stream),
        transient=True,
    )


def progress_on(stream: TextIO, *, quiet: bool) -> Progress:
    """Progress that fits the stream."""
    if quiet:
        from slimctl.core.contract import SilentProgress

        return SilentProgress()
    return BarProgress(stream) if stream.isatty() else LineProgress(stream)
