"""A bill of materials of an artifact: CycloneDX 1.6 as JSON.

https://cyclonedx.org/docs/1.6/json/. The model is the component that the bill is about; the
original is its ancestor, data are components of their own, and the packages that decided the result
stand in ``formulation``, since they are not in it. All of it comes from the manifest, so the same
artifact has the same bill.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID, uuid5

from slimctl.pipeline.manifest import FileEntry, GateFacts, Manifest

_SERIALS = UUID("7a4c1f0e-5f0b-5d0c-9b57-0f6a3f1d2c11")
"""Namespace of our serial numbers (RFC 9562, version 5): an arbitrary constant."""

_MODEL, _ORIGINAL = "model", "original"


def bill_of_materials(manifest: Manifest) -> dict[str, Any]:
    """The bill of one artifact."""
    data = list(_data(manifest))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid5(_SERIALS, manifest.manifest_hash).urn,
        "version": 1,
        "metadata": {
            "timestamp": manifest.run.started,
            "tools": {"components": [_package("slimctl", manifest.versions, kind="application")]},
            "component": _model(manifest, [component["bom-ref"] for component in data]),
        },
        "components": data,
        "dependencies": [
            {"ref": _MODEL, "dependsOn": [component["bom-ref"] for component in data]},
            *({"ref": component["bom-ref"]} for component in data),
        ],
        "formulation": [
            {
                "bom-ref": "formula",
                "components": [
                    _package(name, manifest.versions, kind="library")
                    for name in sorted(manifest.versions)
                ],
            }
        ],
    }


def _package(name: str, versions: Mapping[str, str], *, kind: str) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{versions[name]}"
    reference = purl if kind == "library" else f"tool:{name}"
    return {
        "type": kind,
        "bom-ref": reference,
        "name": name,
        "version": versions[name],
        "purl": purl,
    }


def _model(manifest: Manifest, datasets: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "machine-learning-model",
        "bom-ref": _MODEL,
        "name": manifest.name,
        "version": manifest.manifest_hash[:12],
        "hashes": _hashes(manifest.files[0].sha256),
        "components": [_file(entry) for entry in manifest.files],
        "pedigree": {"ancestors": [_original(manifest)], "notes": _steps(manifest)},
        "modelCard": _card(manifest, datasets),
        "properties": list(_properties(manifest)),
    }


def _hashes(sha256: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": sha256}]


def _file(entry: FileEntry, owner: str = _MODEL) -> dict[str, Any]:
    return {
        "type": "file",
        "bom-ref": f"{owner}/{entry.name}",
        "name": entry.name,
        "hashes": _hashes(entry.sha256),
        "properties": [_property("size_bytes", entry.size_bytes)],
    }


def _original(manifest: Manifest) -> dict[str, Any]:
    source = manifest.source
    return {
        "type": "machine-learning-model",
        "bom-ref": _ORIGINAL,
        "name": source.files[0].name if source.files else "original",
        "version": source.content_hash[:12],
        "hashes": _hashes(source.files[0].sha256) if source.files else [],
        "components": [_file(entry, _ORIGINAL) for entry in source.files],
        "properties": [_property("content_hash", source.content_hash)],
    }


def _steps(manifest: Manifest) -> str:
    return "slimctl: " + ", ".join(step.name for step in manifest.steps)


def _card(manifest: Manifest, datasets: Sequence[str]) -> dict[str, Any]:
    card: dict[str, Any] = {
        "modelParameters": {"datasets": [{"ref": reference} for reference in datasets]}
    }
    if measured := list(_metrics(manifest)):
        card["quantitativeAnalysis"] = {"performanceMetrics": measured}
    return card


def _metrics(manifest: Manifest) -> Iterator[dict[str, str]]:
    results = manifest.results
    if results.sqnr_db is not None:
        yield {"type": "SQNR (dB)", "value": f"{results.sqnr_db:g}"}
    for slice_, value in (
        ("result", results.metric_result),
        ("original", results.metric_original),
    ):
        if results.metric is not None and value is not None:
            yield {"type": results.metric, "value": f"{value:g}", "slice": slice_}


def _data(manifest: Manifest) -> Iterator[dict[str, Any]]:
    data = {
        "calibration": manifest.calibration,
        "training": manifest.training,
        "evaluation": manifest.evaluation,
    }
    for role, facts in data.items():
        if facts is not None:
            yield {
                "type": "data",
                "bom-ref": f"data:{role}",
                "name": str(facts.get("source", role)),
                "hashes": _hashes(facts["sha256"]) if facts.get("sha256") else [],
                "data": [{"type": "dataset", "name": role}],
                "properties": [
                    _property(name, facts[name])
                    for name in ("kind", "samples", "labeled", "uncalibrated")
                    if facts.get(name) is not None
                ],
            }


def _properties(manifest: Manifest) -> Iterator[dict[str, str]]:
    yield _property("manifest_hash", manifest.manifest_hash)
    yield _property("content_hash", manifest.model.content_hash)
    yield _property("target", manifest.target)
    yield _property("uncalibrated", manifest.uncalibrated)
    yield _property("size_ratio", manifest.results.size_ratio)
    for gate in (*manifest.results.gates, *manifest.run.gates):
        yield _property(f"gate:{gate.gate}", _verdict(gate))


def _verdict(gate: GateFacts) -> str:
    found = "not measured" if gate.found is None else f"{gate.found:g}"
    return f"{'passed' if gate.passed else 'failed'}, found {found}, bound {gate.bound:g}"


def _property(name: str, value: object) -> dict[str, str]:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return {"name": f"slimctl:{name}", "value": text}
