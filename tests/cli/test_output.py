from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from slimctl.cli.output import Output, plain, to_json
from slimctl.cli.progress import BarProgress, LineProgress, progress_on
from slimctl.cli.table import Facts, Table, Warned, write_blocks
from slimctl.core.contract import PassReport, SilentProgress, Skipped

ROOT = Path(__file__).parents[2]


class Pair(NamedTuple):
    low: float
    high: float


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (True, True),
        (None, None),
        ("text", "text"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (-float("inf"), "-inf"),
        (np.float32(0.5), 0.5),
        (np.float64("inf"), "inf"),
        (np.int64(3), 3),
        (np.array([1, 2]), [1, 2]),
        (Path("a/b"), "a/b"),
        ((1, (2, 3)), [1, [2, 3]]),
        (Pair(0.0, 1.0), {"low": 0.0, "high": 1.0}),
        ({1: float("nan")}, {"1": "nan"}),
        (
            PassReport(skipped=(Skipped("a", "why"),)),
            {
                "changed": {},
                "skipped": [{"node": "a", "reason": "why"}],
                "notes": [],
                "warnings": [],
                "tables": [],
                "timings": [],
                "facts": {},
            },
        ),
    ],
)
def test_values_become_json_types(value: object, expected: object) -> None:
    assert plain(value) == expected
    assert type(plain(value)) is type(expected)
    assert json.loads(to_json({"x": value})) == {"x": expected}


BLOCKS = [
    "before",
    Table(("name", ">size"), [("a", "1"), ("long name", "1000")], title="Sizes"),
    Facts({"method": "kl", "samples": "64"}),
    Warned("random data"),
]


def test_plain_text_is_aligned_and_complete() -> None:
    stream = io.StringIO()
    write_blocks(stream, BLOCKS)
    assert stream.getvalue() == (
        "before\n"
        "\n"
        "Sizes\n"
        "name       size\n"
        "a             1\n"
        "long name  1000\n"
        "\n"
        "method:   kl\n"
        "samples:  64\n"
        "\n"
        "WARNING: random data\n"
    )


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json=True).result({"a": 1}, BLOCKS)
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_notes_are_silent_when_quiet_and_warnings_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quiet = Output(quiet=True)
    quiet.note("by the way")
    quiet.warn("look out")
    assert capsys.readouterr() == ("", "warning: look out\n")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 4.0
        return self.now


def test_lines_come_every_ten_seconds_and_at_the_end() -> None:
    stream = io.StringIO()
    progress = LineProgress(stream, clock=Clock())
    assert list(progress.track(iter(range(7)), total=7, label="calibrate")) == list(range(7))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "calibrate: 3/7, 0:00:21 left"  # 4 of 7 at 16 s for 3
    assert lines[-1].startswith("calibrate: done, 7 in ")


def test_progress_fits_its_stream() -> None:
    assert isinstance(progress_on(io.StringIO(), quiet=False), LineProgress)
    assert isinstance(progress_on(io.StringIO(), quiet=True), SilentProgress)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_nest_and_pass_everything_on() -> None:
    progress = progress_on(Terminal(), quiet=False)
    assert isinstance(progress, BarProgress)
    inner = [
        list(progress.track(iter("ab"), total=2, label="inner"))
        for _ in progress.track(iter(range(2)), total=None, label="outer")
    ]
    assert inner == [["a", "b"], ["a", "b"]]


def _on_a_terminal(*arguments: str, **environment: str) -> str:
    """What a command writes when stdout is a terminal."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "slimctl", *arguments],
        stdout=child,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment},
    )
    os.close(child)
    written = bytearray()
    try:
        while block := os.read(parent, 65536):
            written += block
    except OSError:  # Linux: the other end is closed
        pass
    os.close(parent)
    assert process.wait() == 0
    return written.decode()


def test_a_terminal_gets_color_unless_told_otherwise() -> None:
    color = re.compile(r"\x1b\[(\d+;)*3\d")
    for arguments in (["--help"], ["doctor"]):
        assert color.search(_on_a_terminal(*arguments))
        assert not color.search(_on_a_terminal(*arguments, NO_COLOR="1"))


def test_json_has_no_color_on_a_terminal() -> None:
    assert json.loads(_on_a_terminal("target", "show", "cpu", "--json"))["name"] == "cpu"


def test_a_pipe_gets_plain_text() -> None:
    for arguments in (["--help"], ["doctor"], ["target", "list"]):
        done = subprocess.run(
            [sys.executable, "-m", "slimctl", *arguments],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        assert "\x1b" not in done.stdout + done.stderr
