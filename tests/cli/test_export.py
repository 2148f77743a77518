from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def artifact(inputs: Path, slimctl) -> Path:
    assert slimctl("fuse", "model.onnx", "-o", "net", "-q").code == 0
    return inputs / "net"


@pytest.mark.parametrize(
    ("kind", "output", "file"),
    [
        ("ort-format", "out", "out/net.ort"),
        ("triton", "out", "out/net/config.pbtxt"),
        ("zip", "out.zip", "out.zip"),
    ],
)
def test_every_kind_is_written_and_told(kind, output, file, artifact: Path, slimctl) -> None:
    ended = slimctl("export", artifact, "--for", kind, "-o", output, "--json")
    assert ended.code == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert (told["kind"], told["output"]) == (kind, output)
    assert Path(file).is_file()
    assert all({"name", "sha256", "size_bytes"} == set(entry) for entry in told["files"])


def test_the_table_names_files_and_notes(artifact: Path, slimctl) -> None:
    ended = slimctl("export", artifact, "--for", "triton", "-o", "out")
    assert "net/1/model.onnx" in ended.stdout
    assert "note: max_batch_size is 4" in ended.stdout
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--for", "triton"], "output"),
        (["-o", "out"], "for"),
        (["--for", "tritn", "-o", "out"], "did you mean 'triton'?"),
        (["--for", "zip", "-o", "out"], "-o out.zip"),
        (["--for", "zip", "-o", "out.zip", "--instances", "2"], "an option of --for triton"),
        (["--for", "ort-format", "-o", "out", "--serving", "s.json"], "an option of --for triton"),
        (["--for", "triton", "-o", "out", "--instances", "0"], "1 <= x"),
        (["--for", "triton", "-o", "out", "--serving", "none.json"], "slimctl bench"),
        (["--for", "ort-format", "-o", "out", "--level", "most"], "--level"),
        (["--for", "genai", "-o", "out"], "lacks input input_ids"),
        (["--for", "triton", "-o", "none/out"], "does not exist"),
    ],
)
def test_mistakes_are_the_users_and_leave_nothing(
    arguments: list[str], says: str, artifact: Path, slimctl
) -> None:
    before = sorted(artifact.parent.iterdir())
    ended = slimctl("export", artifact, *arguments)
    assert ended.code == 2, ended.stderr
    assert says in ended.stderr
    assert sorted(artifact.parent.iterdir()) == before


def test_a_plain_model_is_no_artifact(inputs: Path, slimctl) -> None:
    ended = slimctl("export", "model.onnx", "--for", "zip", "-o", "out.zip")
    assert ended.code == 2
    assert "there is no manifest" in ended.stderr
    assert "fix:" in ended.stderr


def test_options_of_all_kinds_are_in_the_help(slimctl) -> None:
    said = slimctl("export", "--help").stdout
    for option in ("--serving", "--platform", "--huggingface", "--level", "--name", "--instances"):
        assert option in said
