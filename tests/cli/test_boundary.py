from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slimctl.cli import group
from slimctl.cli.main import run
from slimctl.cli.options import Json
from slimctl.core.errors import GateFailedError, MissingExtraError, SampleError, SourceError

SAMPLE = SampleError(
    "calib.npz[17]", "image", found="float64 [3]", wanted="float32 [1, 3]", fix="cast it"
)


def _raising(error: BaseException):
    def doctor(json: Json = False) -> None:
        """Show versions, providers, CPU features and extras."""
        raise error

    return doctor


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch):
    """Makes `slimctl doctor` end with an error."""

    def install(error: BaseException) -> None:
        monkeypatch.setattr("slimctl.cli.doctor_command.doctor", _raising(error))

    return install


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        (
            SourceError("calib.npz", "The source is empty", fix="add samples"),
            2,
            "error: The source is empty\n  where: calib.npz\n  fix:   add samples\n",
        ),
        (
            SAMPLE,
            2,
            "error: Sample does not fit input 'image': found float64 [3], wanted float32 [1, 3]\n"
            "  where: calib.npz[17]\n  fix:   cast it\n",
        ),
        (
            MissingExtraError("torch", "Fine-tuning"),
            2,
            'error: Fine-tuning needs an extra\n  fix:   pip install "slimctl[torch]"\n',
        ),
        (GateFailedError("accuracy fell by 0.2"), 1, "error: accuracy fell by 0.2\n"),
        (KeyboardInterrupt(), 130, "interrupted: no partial output was left\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/y"),
            2,
            "error: No space left on device: /x/y\n"
            "  fix:   free some space; temporary files go to the folder named by TMPDIR\n",
        ),
        (
            MemoryError(),
            2,
            "error: Out of memory\n"
            "  fix:   free some memory, or use fewer samples or a smaller --batch-size\n",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_how_a_command_ends(error, code, stderr, broken, slimctl) -> None:
    broken(error)
    assert slimctl("doctor") == (code, "", stderr)


def test_an_error_is_one_json_document_with_its_fields(broken, slimctl) -> None:
    broken(SAMPLE)
    ended = slimctl("doctor", "--json")
    document = json.loads(ended.stdout)["error"]
    assert document["type"] == "SampleError"
    assert document["exit_code"] == ended.code == 2
    assert document["sample"] == "calib.npz[17]"
    assert document["input_name"] == "image"
    assert document["fix"] == "cast it"
    assert ended.stderr.startswith("error: Sample does not fit")


def test_an_internal_error_saves_its_traceback(broken, slimctl, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    broken(ZeroDivisionError("division by zero"))
    ended = slimctl("doctor")
    assert (ended.code, ended.stdout) == (3, "")
    (saved,) = tmp_path.iterdir()
    assert ended.stderr == (
        "error: Internal error: ZeroDivisionError: division by zero\n"
        f"  where: traceback saved to {saved}\n"
        "  fix:   report it together with the traceback\n"
    )
    text = saved.read_text()
    assert "arguments: ['doctor']" in text
    assert "raise error\nZeroDivisionError: division by zero" in text


def test_an_internal_error_without_a_place_for_its_traceback(
    broken, slimctl, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    broken(ZeroDivisionError("division by zero"))
    ended = slimctl("doctor")
    assert ended.code == 3
    assert "Traceback (most recent call last)" in ended.stderr
    assert "traceback above" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "stderr"),
    [
        (
            ["quantise"],
            "error: No such command 'quantise'\n"
            "  where: slimctl\n  fix:   did you mean 'quantize'?\n",
        ),
        (
            ["--verzion"],
            "error: No such option: --verzion\n  where: slimctl\n"
            "  fix:   did you mean '--version'?\n",
        ),
        (
            ["target", "shw"],
            "error: No such command 'shw'\n"
            "  where: slimctl target\n  fix:   did you mean 'show'?\n",
        ),
        (
            ["target", "show"],
            "error: Missing argument 'NAME'\n  where: slimctl target show\n"
            "  fix:   see 'slimctl target show --help'\n",
        ),
        (
            ["target", "show", "cpu-avx3"],
            "error: Unknown target 'cpu-avx3'\n"
            "  where: --target\n  fix:   did you mean 'cpu-avx2'?\n",
        ),
        (
            ["doctor", "--jsn"],
            "error: No such option: --jsn\n  where: slimctl doctor\n"
            "  fix:   did you mean '--json'?\n",
        ),
        (
            ["doctor", "extra"],
            "error: Got unexpected extra argument(s) (extra)\n  where: slimctl doctor\n"
            "  fix:   see 'slimctl doctor --help'\n",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_name_the_nearest(arguments: list[str], stderr: str, slimctl) -> None:
    assert slimctl(*arguments) == (2, "", stderr)


def test_a_usage_error_is_a_json_document_too(slimctl) -> None:
    ended = slimctl("doctor", "--json", "--jsn")
    assert ended.code == 2
    assert json.loads(ended.stdout)["error"]["fix"] == "did you mean '--json'?"


SLOW_DOCTOR = """
import sys, time
import slimctl.cli.doctor_command as module
def doctor() -> None:
    "Show versions."
    with open("partial", "w"):
        try:
            print("started", flush=True)
            time.sleep(60)
        finally:
            import os
            os.remove("partial")
module.doctor = doctor
sys.argv = ["slimctl", "doctor"]
from slimctl.cli.main import main
main()
"""


def test_interrupt(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_DOCTOR],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(group.__file__).parents[2])},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr == "interrupted: no partial output was left\n"
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m slimctl target show cpu | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(group.__file__).parents[2],
    )
    assert done.stderr == ""
    # The output may fit into the pipe before its reader is gone.
    assert done.returncode in (0, 141)


def test_a_closed_pipe_ends_as_shells_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import os, sys\n"
        "reading, writing = os.pipe()\n"
        "os.close(reading)\n"
        "os.dup2(writing, 1)\n"
        "from slimctl.cli.main import run\n"
        "sys.exit(run(['target', 'list']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(group.__file__).parents[2],
    )
    assert (done.returncode, done.stderr) == (141, "")


def test_module_and_function_agree() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slimctl", "target", "lst"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(group.__file__).parents[2],
    )
    assert done.returncode == run(["target", "lst"]) == 2
