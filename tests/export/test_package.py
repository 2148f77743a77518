from __future__ import annotations

import hashlib
import json
import stat
import subprocess
import zipfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import onnx
import pytest
from jsonschema import Draft7Validator
from referencing import Registry, Resource

from slimctl.core.errors import OutputError
from slimctl.export.common import export_artifact
from slimctl.export.package import Zip
from slimctl.export.sbom import bill_of_materials
from slimctl.pipeline.artifact import read_artifact
from slimctl.pipeline.manifest import GateFacts, read_manifest


def validator() -> Draft7Validator:
    """Of CycloneDX 1.6, from the schemas that cyclonedx-python-lib ships."""
    folder = resources.files("cyclonedx.schema") / "_res"
    parts = {
        name: json.loads((folder / f"{name}.SNAPSHOT.schema.json").read_text(encoding="utf-8"))
        for name in ("bom-1.6", "spdx", "jsf-0.82", "cryptography-defs")
    }
    registry = Registry().with_resources(
        (part["$id"], Resource.from_contents(part)) for part in parts.values()
    )
    return Draft7Validator(parts["bom-1.6"], registry=registry)


def unpacked(path: Path, target: Path) -> Path:
    export_artifact(path, Zip(), target / "net.zip")
    zipfile.ZipFile(target / "net.zip").extractall(target)
    (folder,) = (item for item in target.iterdir() if item.is_dir())
    return folder


@pytest.mark.parametrize("form", ["net", "net.onnx"])
def test_what_is_unpacked_is_the_artifact(form: str, made, target: Path) -> None:
    path = made(output=form)
    folder = unpacked(path, target)
    again = read_artifact(folder if form == "net" else folder / form)
    assert again.manifest == read_artifact(path).manifest
    if form == "net":
        assert (folder / "report.html").read_bytes() == (path / "report.html").read_bytes()


def test_sha256sum_accepts_the_sums_and_covers_every_file(quantized: Path, target: Path) -> None:
    folder = unpacked(quantized, target)
    done = subprocess.run(
        ["sha256sum", "--strict", "-c", "SHA256SUMS"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = f"{hashed(folder / 'model.onnx')}  model.onnx\n"  # two spaces: the form of every tool
    assert line in (folder / "SHA256SUMS").read_text()
    checked = {line.split(":")[0] for line in done.stdout.splitlines()}
    assert checked | {"SHA256SUMS"} == {file.name for file in folder.iterdir()}


def test_the_same_artifact_gives_the_same_bytes(made, target: Path) -> None:
    path = made()
    first = export_artifact(path, Zip(), target / "a.zip").files[0]
    for file in path.iterdir():
        file.touch()  # another time, and with it another order of what is newest
    assert export_artifact(path, Zip(), target / "b.zip").files[0].sha256 == first.sha256


def test_entries_have_fixed_times_and_are_readable(made, target: Path) -> None:
    export_artifact(made(), Zip(), target / "net.zip")
    entries = zipfile.ZipFile(target / "net.zip").infolist()
    assert {entry.date_time for entry in entries} == {(1980, 1, 1, 0, 0, 0)}
    assert {entry.compress_type for entry in entries} == {zipfile.ZIP_STORED}
    assert {stat.S_IMODE(entry.external_attr >> 16) for entry in entries} == {0o644}


def test_weights_apart_are_packed(made, target: Path, tmp_path: Path) -> None:
    from slimctl.pipeline.artifact import write_artifact

    manifest = read_artifact(made()).manifest
    work = tmp_path / "work"
    work.mkdir()
    model = onnx.load(tmp_path / "net" / "model.onnx")
    onnx.save(
        model,
        work / "model.onnx",
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=16,
    )
    write_artifact(sorted(work.iterdir()), manifest, tmp_path / "apart", work)
    folder = unpacked(tmp_path / "apart", target)
    assert (folder / "model.onnx.data").stat().st_size > 0
    read_artifact(folder)
    bill = json.loads((folder / "sbom.cdx.json").read_text())
    assert [part["name"] for part in bill["metadata"]["component"]["components"]] == [
        "model.onnx",
        "model.onnx.data",
    ]


def test_a_changed_page_is_refused(made, target: Path) -> None:
    path = made()
    with (path / "report.html").open("a") as page:
        page.write("<!-- all is well -->")
    with pytest.raises(OutputError, match=r"not the one that the manifest describes"):
        export_artifact(path, Zip(), target / "net.zip")


def test_a_page_that_was_removed_is_not_missed(made, target: Path) -> None:
    path = made()
    (path / "report.html").unlink()
    assert not (unpacked(path, target) / "report.html").exists()


def test_the_bill_holds_to_the_schema(quantized: Path, target: Path) -> None:
    bill = json.loads((unpacked(quantized, target) / "sbom.cdx.json").read_text())
    assert [error.message for error in validator().iter_errors(bill)] == []
    references = list(bom_references(bill))
    assert len(references) == len(set(references))
    for entry in bill["dependencies"]:
        assert {entry["ref"], *entry.get("dependsOn", [])} <= set(references)


def test_the_schema_sees_mistakes(made) -> None:
    bill = bill_of_materials(read_manifest(made() / "manifest.json"))
    bill["metadata"]["component"]["type"] = "neural-network"
    bill["serialNumber"] = "1"
    assert len(list(validator().iter_errors(bill))) >= 2


def bom_references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if "bom-ref" in part:
            yield part["bom-ref"]
        part = list(part.values())
    if isinstance(part, list):
        for item in part:
            yield from bom_references(item)


def test_the_bill_names_model_original_data_and_packages(quantized: Path, tmp_path: Path) -> None:
    manifest = read_manifest(quantized / "manifest.json")
    bill = bill_of_materials(manifest)
    model = bill["metadata"]["component"]
    assert model["type"] == "machine-learning-model"
    assert sha256_of(model) == hashed(quantized / "model.onnx")
    (original,) = model["pedigree"]["ancestors"]
    assert sha256_of(original) == hashed(tmp_path / "model.onnx")
    (data,) = bill["components"]
    assert data["type"] == "data"
    assert sha256_of(data) == manifest.calibration["sha256"]
    packages = bill["formulation"][0]["components"]
    assert {one["name"]: one["version"] for one in packages} == manifest.versions
    measured = model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    assert measured[0]["type"] == "SQNR (dB)"


def sha256_of(component: dict[str, Any]) -> str:
    (entry,) = component["hashes"]
    assert entry["alg"] == "SHA-256"
    return str(entry["content"])


def hashed(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_gates_and_metrics_stand_in_the_bill(made) -> None:
    manifest = read_manifest(made() / "manifest.json")
    gates = (
        GateFacts(gate="size", bound=0.3, found=0.25, passed=True, message="fine"),
        GateFacts(gate="latency", bound=1.5, found=None, passed=False, message="not measured"),
    )
    results = manifest.results.model_copy(
        update={"gates": gates, "metric": "top1", "metric_original": 0.9, "metric_result": 0.89}
    )
    bill = bill_of_materials(manifest.model_copy(update={"results": results}))
    properties = {one["name"]: one["value"] for one in bill["metadata"]["component"]["properties"]}
    assert properties["slimctl:gate:size"] == "passed, found 0.25, bound 0.3"
    assert properties["slimctl:gate:latency"] == "failed, found not measured, bound 1.5"
    card = bill["metadata"]["component"]["modelCard"]["quantitativeAnalysis"]
    assert {"type": "top1", "value": "0.89", "slice": "result"} in card["performanceMetrics"]
    assert list(validator().iter_errors(bill)) == []
