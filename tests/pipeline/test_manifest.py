from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimctl.core.errors import OutputError
from slimctl.pipeline.manifest import (
    FileEntry,
    Manifest,
    ModelFacts,
    Results,
    Run,
    SourceFacts,
    StepFacts,
    installed_versions,
    json_types,
    read_manifest,
)

MODEL = {"content_hash": "c", "size_bytes": 10, "weight_bytes": 8, "nodes": 2, "opset": 17}


def manifest(**changes: Any) -> Manifest:
    step = StepFacts(
        name="edit",
        effect="exact",
        options={"a": 1},
        changed={"Conv": 2},
        skipped=(),
        notes=("ä",),
        facts={"x": [1.5]},
        weight_bytes=8,
        nodes=2,
        sqnr_db=math.inf,
        metric=None,
        exact_error=None,
    )
    given: dict[str, Any] = {
        "name": "m",
        "versions": {"slimctl": "1"},
        "source": SourceFacts(**MODEL, files=()),
        "model": ModelFacts(**MODEL),
        "target": "cpu",
        "seed": 0,
        "steps": (step,),
        "results": Results(size_ratio=0.5),
        "run": Run(started="now", host="here", platform="p"),
    }
    return Manifest(**{**given, **changes})


FILE = FileEntry(name="m.onnx", sha256="s", size_bytes=10)


def test_the_block_run_is_not_hashed() -> None:
    other = Run(started="later", host="there", platform="q", seconds={"total": 3.0})
    assert (
        manifest().sealed([FILE]).manifest_hash == manifest(run=other).sealed([FILE]).manifest_hash
    )


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"target": "npu"}, {"versions": {"slimctl": "2"}}, {"steps": ()}]
)
def test_everything_else_is(change: dict[str, Any]) -> None:
    assert (
        manifest().sealed([FILE]).manifest_hash != manifest(**change).sealed([FILE]).manifest_hash
    )


def test_files_are_hashed_too() -> None:
    other = FILE.model_copy(update={"sha256": "t"})
    assert manifest().sealed([FILE]).manifest_hash != manifest().sealed([other]).manifest_hash


def test_equal_manifests_have_equal_bytes() -> None:
    assert manifest().sealed([FILE]).to_json() == manifest().sealed([FILE]).to_json()


def test_a_manifest_is_strict_json_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    sealed = manifest().sealed([FILE])
    path.write_text(sealed.to_json(), encoding="utf-8")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    document = json.loads(path.read_bytes(), parse_constant=refuse)
    assert document["steps"][0]["sqnr_db"] == "inf"
    assert document["steps"][0]["notes"] == ["ä"]
    assert read_manifest(path) == sealed


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text.replace('"seed": 0', '"seed": 1'), "changed after it was written"),
        (lambda text: text.replace('"seed"', '"sead"'), "Not a manifest"),
        (lambda text: text[: len(text) // 2], "Not a manifest"),
        (lambda text: "", "Not a manifest"),
    ],
)
def test_a_spoiled_manifest_is_refused(tmp_path: Path, spoil: Any, message: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(spoil(manifest().sealed([FILE]).to_json()), encoding="utf-8")
    with pytest.raises(OutputError, match=message):
        read_manifest(path)


def test_a_missing_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="Cannot read"):
        read_manifest(tmp_path / "none.json")


def test_run_may_change_without_breaking_the_seal(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    text = manifest().sealed([FILE]).to_json().replace('"here"', '"elsewhere"')
    path.write_text(text, encoding="utf-8")
    assert read_manifest(path).run.host == "elsewhere"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.arange(3), [0, 1, 2]),
        ((1, {"a": (2,)}), [1, {"a": [2]}]),
        ({1: None}, {"1": None}),
        (float("nan"), "nan"),
        (np.float32("inf"), "inf"),
        (-math.inf, "-inf"),
        (True, True),
        (np.bool_(True), True),
        (frozenset({"a"}), ["a"]),
    ],
)
def test_json_types(value: object, plain: object) -> None:
    assert json_types(value) == plain
    json.dumps(json_types(value), allow_nan=False)


def test_versions_name_what_decides_a_result() -> None:
    assert list(installed_versions()) == ["slimctl", "numpy", "onnx", "onnx-ir", "onnxruntime"]


def test_a_file_entry_describes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"abc")
    # SHA-256 of "abc", FIPS 180-2 appendix B.1.
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert FileEntry.of(path) == FileEntry(name="f", sha256=expected, size_bytes=3)


def test_what_older_manifests_lack_does_not_break_their_seal(tmp_path: Path) -> None:
    older, newer = manifest(), manifest(model=ModelFacts(**MODEL, dtype_bytes={"int8": 8}))
    assert "dtype_bytes" not in older.document()["model"]
    path = tmp_path / "m.json"
    path.write_text(newer.sealed([FILE]).to_json(), encoding="utf-8")
    assert read_manifest(path).model.dtype_bytes == {"int8": 8}
    assert newer.computed_hash() != older.computed_hash()
