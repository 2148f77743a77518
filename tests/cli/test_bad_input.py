"""What is wrong with the input is said by name, with the remedy, and nothing is written."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cli.models import classifier, images

ROOT = Path(__file__).parents[2]


def listing(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        if file.is_file()
        else ""
        for file in folder.rglob("*")
    }


def quantize(*changes: str) -> list[str]:
    return ["quantize", "model.onnx", "--calib", "calib.npz", "-o", "out.onnx", *changes]


Spoil = Callable[[Path], None]


def text_file(folder: Path) -> None:
    (folder / "model.onnx").write_text("this is no model\n" * 10)


def empty_file(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"")


def pickled_file(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(pickle.dumps({"weight": [1.0]}))


def no_file(folder: Path) -> None:
    (folder / "model.onnx").unlink()


def truncated(folder: Path) -> None:
    file = folder / "model.onnx"
    file.write_bytes(file.read_bytes()[:-200])


def missing_external_data(folder: Path) -> None:
    onnx.save(
        classifier(),
        folder / "model.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    (folder / "weights.bin").unlink()


def external_data_elsewhere(folder: Path) -> None:
    model = classifier()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "../../etc/passwd"), ("offset", "0"), ("length", "864")):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def calibration(**arrays: np.ndarray) -> Spoil:
    def write(folder: Path) -> None:
        np.savez(folder / "calib.npz", **arrays)

    return write


def nan_in_a_sample(folder: Path) -> None:
    bad = images(16)
    bad[5, 0, 2, 2] = np.nan
    np.savez(folder / "calib.npz", image=bad)


def calibration_gone(folder: Path) -> None:
    (folder / "calib.npz").unlink()


def empty_folder(folder: Path) -> None:
    (folder / "calib.npz").unlink()
    (folder / "calib.npz").mkdir()


def custom_operator(folder: Path) -> None:
    onnx.save(classifier(custom_operator=True), folder / "model.onnx")


def output_exists(folder: Path) -> None:
    (folder / "out.onnx").write_bytes(b"precious")


def nothing(folder: Path) -> None:
    del folder


CASES: dict[str, tuple[Spoil, list[str], tuple[str, ...]]] = {
    "not a model: text": (text_file, quantize(), ("model.onnx",)),
    "not a model: empty": (empty_file, quantize(), ("model.onnx",)),
    "not a model: pickle": (pickled_file, quantize(), ("model.onnx",)),
    "no such model": (no_file, quantize(), ("model.onnx",)),
    "truncated": (truncated, quantize(), ("model.onnx", "truncated")),
    "missing external data": (missing_external_data, quantize(), ("weights.bin",)),
    "external data elsewhere": (external_data_elsewhere, quantize(), ("etc/passwd",)),
    "wrong input name": (calibration(imge=images(4)), quantize(), ("imge", "image")),
    "wrong shape": (
        calibration(image=images(4)[:, :, :, :7]),
        quantize(),
        ("calib.npz", "image", "7", "8"),
    ),
    "wrong rank": (calibration(image=np.zeros(4, np.float32)), quantize(), ("image", "8")),
    "wrong dtype": (
        calibration(image=images(4).astype(np.int64)),
        quantize(),
        ("image", "int64", "float32"),
    ),
    "empty calibration": (calibration(image=images(0)), quantize(), ("calib.npz",)),
    "empty folder": (empty_folder, quantize(), ("calib.npz",)),
    "no calibration file": (calibration_gone, quantize(), ("calib.npz",)),
    "NaN in a sample": (
        nan_in_a_sample,
        quantize(),
        ("calib.npz[5]", "image", "NaN", "--skip-bad-samples"),
    ),
    "unknown method": (
        nothing,
        quantize("--calibration", "klm"),
        ("--calibration", "'klm'", "did you mean 'kl'?"),
    ),
    "unknown target": (nothing, quantize("--target", "cpu-avx3"), ("cpu-avx3", "'cpu-avx2'?")),
    "unknown option": (nothing, quantize("--calibraton", "kl"), ("'--calibration'",)),
    "bad number": (nothing, quantize("--percentile", "0"), ("--percentile", "50.0 < x <= 100.0")),
    "bad count": (nothing, quantize("--samples", "0"), ("--samples", "1")),
    "bad pattern": (nothing, quantize("--exclude", "re:("), ("--exclude", "'('")),
    "output exists": (output_exists, quantize(), ("out.onnx", "--force")),
    "no output folder": (nothing, quantize("-o", "no/where/x.onnx"), ("no/where",)),
    "custom operator without a kernel": (custom_operator, quantize(), ("frob", "Frobnicate")),
    "no calibration": (
        nothing,
        ["quantize", "model.onnx", "-o", "out.onnx"],
        ("--calib",),
    ),
    "fuse: not a model": (text_file, ["fuse", "model.onnx", "-o", "out.onnx"], ("model.onnx",)),
    "inspect: truncated": (truncated, ["inspect", "model.onnx"], ("model.onnx", "truncated")),
    "verify: no reference": (
        nothing,
        ["verify", "model.onnx", "--against", "no.onnx", "--data", "calib.npz"],
        ("no.onnx",),
    ),
    "eval: no labels": (
        nothing,
        ["eval", "model.onnx", "--data", "calib.npz", "--metric", "top1"],
        ("calib.npz", "labels"),
    ),
    "eval: unknown metric": (
        nothing,
        ["eval", "model.onnx", "--data", "val.npz", "--metric", "top2"],
        ("top2", "top1"),
    ),
    "eval: unknown option of a metric": (
        nothing,
        ["eval", "model.onnx", "--data", "val.npz", "--metric", "f1?avrage=micro"],
        ("avrage", "'average'?"),
    ),
    "eval: bad value of a metric's option": (
        nothing,
        ["eval", "model.onnx", "--data", "val.npz", "--metric", "f1?average=best"],
        ("average", "macro"),
    ),
    "eval: labels of another kind": (
        nothing,
        ["eval", "model.onnx", "--data", "val.npz", "--metric", "ctc-cer"],
        ("ctc-cer", "[N, T, C]"),
    ),
    "bench: not a model": (text_file, ["bench", "model.onnx"], ("model.onnx",)),
    "run: no recipe": (nothing, ["run", "no.yaml"], ("no.yaml",)),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str, inputs: Path, slimctl) -> None:
    spoil, arguments, parts = CASES[name]
    spoil(inputs)
    before = listing(inputs)
    ended = slimctl(*arguments)
    assert (ended.code, ended.stdout) == (2, ""), ended.stderr
    message = ended.stderr[ended.stderr.index("error: ") :]
    assert "  fix:   " in message
    for part in parts:
        assert part in message
    assert listing(inputs) == before


def test_bad_samples_can_be_skipped(inputs: Path, slimctl) -> None:
    nan_in_a_sample(inputs)
    ended = slimctl(*quantize("--skip-bad-samples"))
    assert ended.code == 0, ended.stderr
    assert (inputs / "out.onnx").is_file()


def test_force_replaces_the_output(inputs: Path, slimctl) -> None:
    output_exists(inputs)
    assert slimctl(*quantize("--force")).code == 0
    onnx.checker.check_model(onnx.load(inputs / "out.onnx"))


def test_disk_full_when_flushing(inputs: Path, slimctl, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = listing(inputs)
    monkeypatch.setattr("os.fsync", full)
    ended = slimctl(*quantize())
    assert ended.code == 2
    assert "No space left on device" in ended.stderr
    assert "out.onnx" in ended.stderr
    assert "free some space" in ended.stderr
    assert listing(inputs) == before


LIMITED = """
import resource, signal, sys
from slimctl.cli.main import run
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
sys.exit(run(sys.argv[1:]))
"""


def test_disk_full_while_writing(inputs: Path) -> None:
    """The kernel refuses to let the file grow, which is what a full disk looks like."""
    before = listing(inputs)
    done = _subprocess(["-c", LIMITED, "fuse", "model.onnx", "-o", "out.onnx"], inputs)
    assert done.returncode == 2, done.stderr
    assert "Cannot write" in done.stderr
    assert "  fix:   " in done.stderr
    assert listing(inputs) == before


def _subprocess(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


# The superuser may read and write everything: give up the two capabilities that allow it.
ORDINARY = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; lower and upper 32 bits
assert libc.capget(header, sets) == 0
for index in (0, 1, 2):
    sets[index] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
assert libc.capset(header, sets) == 0
from slimctl.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("locked", "arguments"),
    [
        ("data", ["quantize", "model.onnx", "--calib", "data", "-o", "x.onnx"]),
        ("calib.npz", ["quantize", "model.onnx", "--calib", "calib.npz", "-o", "x.onnx"]),
        ("out", ["fuse", "model.onnx", "-o", "out/x.onnx"]),
        ("model.onnx", ["fuse", "model.onnx", "-o", "x.onnx"]),
        ("data", ["fuse", "data/model.onnx", "-o", "x.onnx"]),
        ("data", ["verify", "model.onnx", "--against", "data/model.onnx", "--data", "random"]),
        ("recipe.yaml", ["run", "recipe.yaml"]),
    ],
)
def test_no_permission(locked: str, arguments: list[str], inputs: Path) -> None:
    for name in ("data", "out"):
        (inputs / name).mkdir()
    for name in ("calib.npz", "model.onnx"):
        shutil.copy(name, "data")
    (inputs / "recipe.yaml").write_text("version: 1\nname: x\nsteps: [fuse]\n")
    before = listing(inputs)
    (inputs / locked).chmod(0)
    done = _subprocess(["-c", ORDINARY, *arguments], inputs)
    (inputs / locked).chmod(0o755)
    assert done.returncode == 2, done.stderr
    assert locked in done.stderr
    assert "ermission" in done.stderr or "not writable" in done.stderr
    assert "  fix:   " in done.stderr
    assert listing(inputs) == before


SLOW_DATA = """
import sys, time
import numpy as np

def samples():
    yield {"image": np.ones((1, 3, 8, 8), np.float32)}
    print("calibrating", file=sys.stderr, flush=True)
    time.sleep(60)
"""


def test_interrupted_calibration(inputs: Path) -> None:
    (inputs / "slow.py").write_text(SLOW_DATA)
    before = listing(inputs)
    process = subprocess.Popen(
        [sys.executable, "-m", "slimctl", *quantize("--calib", "slow:samples")],
        cwd=inputs,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        assert "calibrating\n" in iter(process.stderr.readline, "")
        process.send_signal(signal.SIGINT)
        stderr = process.stderr.read()
    assert process.returncode == 130
    assert stderr.endswith("interrupted: no partial output was left\n")
    assert "Traceback" not in stderr
    assert listing(inputs) == before
