from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slimctl.core.errors import MissingExtraError

NETWORKS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        print("noise")
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


class Frozen(nn.Module):
    def forward(self, x):
        return x.reshape(-1)[: int(x.shape[0]) * 2].reshape(int(x.shape[0]), 2) * 2
"""
IMAGE = ("--input", "x:Nx3x8x8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with networks in a file."""
    pytest.importorskip("torch")
    (tmp_path / "nets.py").write_text(NETWORKS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_network_becomes_a_model_that_other_commands_take(folder: Path, slimctl) -> None:
    ended = slimctl("import", "nets.py:Net", "-o", "m.onnx", *IMAGE, "--no-dynamo")
    assert (ended.code, ended.stderr) == (0, "")
    assert "m.onnx (" in ended.stdout
    assert "module, by TorchScript trace" in ended.stdout
    assert "output  float  [N,2]" in ended.stdout
    assert "random, seed 2  N=2" in ended.stdout
    assert "random, seed 0  N=4" in ended.stdout
    assert "noise" not in ended.stdout
    assert slimctl("fuse", "m.onnx", "-o", "fused.onnx", "-q").code == 0


def test_json_is_one_document(folder: Path, slimctl) -> None:
    ended = slimctl(
        *("import", "nets.py:Net", "-o", "m.onnx", *IMAGE, "--no-dynamo", "--json"),
        *("--output-name", "logits", "--seed", "5", "--opset", "17"),
    )
    assert ended.code == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["passed"] is True
    assert told["files"] == ["m.onnx"]
    assert told["opset"] == 17
    assert told["outputs"] == [{"name": "logits", "dtype": "FLOAT", "shape": ["N", 2]}]
    assert [check["inputs"][-1] for check in told["checks"]] == ["5", "6", "7", "5", "5"]
    assert told["largest_difference"] < 1e-5
    assert told["size_bytes"] == Path("m.onnx").stat().st_size
    assert (told["named_weights"], told["renamed_weights"]) == (4, 0)


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_difference_ends_with_1_and_leaves_nothing(extra, folder: Path, slimctl) -> None:
    ended = slimctl(
        "import", "nets.py:Frozen", "-o", "m.onnx", "--input", "x:Nx4", "--no-dynamo", *extra
    )
    assert ended.code == 1
    assert "does not compute what the network does" in ended.stderr
    assert "N=4" in ended.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["nets.py"]
    if extra:
        told = json.loads(ended.stdout)
        assert (told["passed"], told["output"], told["largest_difference"]) == (False, None, "inf")


def test_a_tolerance_that_rounding_breaks(folder: Path, slimctl) -> None:
    ended = slimctl(
        *("import", "nets.py:Net", "-o", "m.onnx", *IMAGE, "--no-dynamo", "--tolerance", "0")
    )
    assert ended.code == 1
    assert "raise --tolerance above 0" in ended.stderr
    assert not Path("m.onnx").exists()


def test_an_output_is_replaced_when_forced(folder: Path, slimctl) -> None:
    Path("m.onnx").write_bytes(b"old")
    arguments = ("import", "nets.py:Net", "-o", "m.onnx", *IMAGE, "--no-dynamo")
    refused = slimctl(*arguments)
    assert refused.code == 2
    assert "--force" in refused.stderr
    assert Path("m.onnx").read_bytes() == b"old"
    assert slimctl(*arguments, "--force").code == 0
    assert Path("m.onnx").stat().st_size > 100


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nets.py:Net", "-o", "m.onnx"], "input"),
        (["nets.py:Net", *IMAGE], "output"),
        (["nets.py:Net", "-o", "m.onnx", "--input", "x"], "NAME:SHAPE"),
        (["nets.py:Net", "-o", "none/m.onnx", *IMAGE], "does not exist"),
        (["nets.py:Net", "-o", ".", "--force", *IMAGE], "is a folder"),
        (["nets.py:Net", "-o", "m.onnx", *IMAGE, "--tolerance", "inf"], "no tolerance"),
        (["nets.py:Net", "-o", "m.onnx", "--input", "x:Nx5x8x8"], "to have 3 channels"),
        (["state.pth", "-o", "m.onnx", *IMAGE], "--weights state.pth"),
        (["pickled.pth", "-o", "m.onnx", *IMAGE], "add --trust"),
    ],
)
def test_mistakes_are_the_users_and_leave_nothing(
    arguments: list[str], says: str, folder: Path, slimctl
) -> None:
    import torch

    torch.save(torch.nn.Linear(3, 2).state_dict(), "state.pth")
    torch.save(torch.nn.Linear(3, 2), "pickled.pth")
    before = sorted(folder.iterdir())
    ended = slimctl("import", *arguments)
    assert ended.code == 2, ended.stderr
    assert says in ended.stderr
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before


def test_without_torch_it_says_what_to_install(tmp_path: Path, slimctl, monkeypatch) -> None:
    monkeypatch.setattr("slimctl.training.find_spec", lambda name: None)
    ended = slimctl("import", "nets:Net", "-o", tmp_path / "m.onnx", *IMAGE)
    assert ended.code == MissingExtraError.exit_code == 2
    assert 'pip install "slimctl[torch]"' in ended.stderr


def test_help_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "from slimctl.cli.main import run\n"
        "run(['import', '--help'])\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)


def test_defaults_that_help_shows_are_those_of_the_code() -> None:
    pytest.importorskip("torch")
    from slimctl.cli import import_command
    from slimctl.training.import_export import DEFAULT_OPSET
    from slimctl.training.importing import DEFAULT_TOLERANCE

    assert import_command._OPSET == DEFAULT_OPSET
    assert import_command._TOLERANCE == DEFAULT_TOLERANCE
