from __future__ import annotations

from pathlib import Path

import pytest

from slimctl.core.errors import OptionError, OutputError
from slimctl.export import find_kind, kinds
from slimctl.export.common import export_artifact, plain_name
from slimctl.pipeline.manifest import GateFacts, Manifest, read_manifest

EVERY_FOLDER_KIND = [name for name, kind in kinds().items() if not kind.suffix and name != "genai"]


def test_kinds_are_those_of_the_contract() -> None:
    assert list(kinds()) == ["genai", "ort-format", "triton", "zip"]


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="did you mean 'triton'"):
        find_kind("tritn")


@pytest.mark.parametrize("form", ["net", "net.onnx"])
@pytest.mark.parametrize("name", ["ort-format", "triton", "zip"])
def test_folders_and_files_are_artifacts(name: str, form: str, made, target: Path) -> None:
    kind = find_kind(name)
    result = export_artifact(made(output=form), kind(), target / f"out{kind.suffix}")
    assert result.files
    assert all(entry.size_bytes for entry in result.files)


@pytest.mark.parametrize("name", ["genai", "ort-format", "triton", "zip"])
def test_a_changed_model_is_refused(name: str, made, target: Path) -> None:
    path = made()
    model = bytearray((path / "model.onnx").read_bytes())
    model[-20] ^= 1
    (path / "model.onnx").write_bytes(model)
    kind = find_kind(name)
    with pytest.raises(OutputError, match="not the one that the manifest describes"):
        export_artifact(path, kind(), target / f"out{kind.suffix}")
    assert list(target.iterdir()) == []


def test_a_changed_manifest_is_refused(made, target: Path) -> None:
    path = made()
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"target": "cpu"', '"target": "cuda"'))
    with pytest.raises(OutputError, match="manifest was changed"):
        export_artifact(path, find_kind("triton")(), target / "out")


def test_a_model_without_manifest_is_refused_with_the_way_to_one(made, target: Path) -> None:
    path = made()
    (path / "manifest.json").unlink()
    with pytest.raises(OutputError, match="there is no manifest") as caught:
        export_artifact(path, find_kind("zip")(), target / "out.zip")
    assert "slimctl fuse" in caught.value.fix


def rewritten(path: Path, change) -> None:
    """The artifact with another manifest, sealed again: as someone would who means harm."""
    document = change(read_manifest(path / "manifest.json").model_dump(mode="json"))
    manifest = Manifest.model_validate(document)
    sealed = manifest.model_copy(update={"manifest_hash": manifest.computed_hash()})
    (path / "manifest.json").write_text(sealed.to_json())


def test_a_manifest_cannot_name_files_elsewhere(made, target: Path) -> None:
    path = made()
    (path.parent / "secret").write_bytes((path / "model.onnx").read_bytes())

    def point_outside(document):
        document["files"][0]["name"] = "../secret"
        return document

    rewritten(path, point_outside)
    with pytest.raises(OutputError, match=r"names '\.\./secret'"):
        export_artifact(path, find_kind("zip")(), target / "out.zip")


@pytest.mark.parametrize("name", ["ort-format", "triton", "zip"])
def test_an_existing_output_needs_force(name: str, made, target: Path) -> None:
    path, kind = made(), find_kind(name)
    output = target / f"out{kind.suffix}"
    first = export_artifact(path, kind(), output)
    with pytest.raises(OutputError, match="exists already"):
        export_artifact(path, kind(), output)
    again = export_artifact(path, kind(), output, force=True)
    assert [entry.name for entry in again.files] == [entry.name for entry in first.files]


@pytest.mark.parametrize("name", EVERY_FOLDER_KIND)
def test_force_removes_nothing_of_the_users(name: str, made, target: Path) -> None:
    path, kind = made(), find_kind(name)
    output = target / "out"
    export_artifact(path, kind(), output)
    place = output / "net" if name == "triton" else output
    (place / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="no part of an export"):
        export_artifact(path, kind(), output, force=True)
    assert (place / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "output", "fix"),
    [
        ("zip", "out", "-o out.zip"),
        ("zip", "out.tar", "-o out.zip"),
        ("ort-format", "net.ort", "-o net/"),
        ("triton", "net.onnx", "-o net/"),
    ],
)
def test_the_wrong_form_of_output_is_a_slip(name, output, fix, made, target: Path) -> None:
    with pytest.raises(OutputError) as caught:
        export_artifact(made(), find_kind(name)(), target / output)
    assert fix in caught.value.fix
    assert list(target.iterdir()) == []


def test_failed_gates_and_random_data_are_said(made, target: Path) -> None:
    path = made()
    gate = GateFacts(gate="size", bound=0.3, found=0.4, passed=False, message="too large")

    def spoil(document):
        document["uncalibrated"] = True
        document["results"]["gates"] = [gate.model_dump()]
        return document

    rewritten(path, spoil)
    notes = "\n".join(export_artifact(path, find_kind("zip")(), target / "out.zip").notes)
    assert "uncalibrated" in notes
    assert "too large" in notes


@pytest.mark.parametrize(
    ("text", "plain"), [("net-1.2", "net-1.2"), ("a b/c", "a_b_c"), ("..", "model"), ("ä", "model")]
)
def test_names_are_plain(text: str, plain: str) -> None:
    assert plain_name(text) == plain
