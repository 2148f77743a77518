from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slimctl.core.errors import OptionError
from slimctl.report.additions import ASKED, chapter_from
from slimctl.report.html import HISTORY, full_page, render
from tests.report import documents
from tests.report.reader import read
from tests.report.test_verification_report import document as verification


def given(option: str, **changes: Any) -> dict[str, Any]:
    made = {
        "--verify": lambda: (
            verification(model="artifacts/net", reference="net.onnx") | {"sha256": documents.RESULT}
        ),
        "--sensitivity": documents.sensitivity,
        "--bench": documents.bench,
    }
    return {**made[option](), **changes}


def chapter(option: str, document: Any, folder: Path) -> str:
    path = folder / "found.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(chapter_from(option, path, documents.manifest()))


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--verify", ["SQNR along the graph", "against net.onnx, on calib.npz"]),
        ("--sensitivity", ["Only this changed", "measured on calib.npz", "Cannot be changed"]),
        ("--bench", ["% of runs", "it computes in float"]),
    ],
)
def test_each_document_is_a_chapter(option: str, expected: list[str], tmp_path: Path) -> None:
    text = read(chapter(option, given(option), tmp_path)).text
    assert all(part in text for part in [ASKED[option].what, *expected])


def test_a_verification_without_nodes(tmp_path: Path) -> None:
    text = read(chapter("--verify", given("--verify", nodes=None), tmp_path)).text
    assert "Outputs against the reference" in text and "along the graph" not in text


def test_infinities_are_numbers_again(tmp_path: Path) -> None:
    outputs = [{**given("--verify")["outputs"][0], "sqnr_db": "-inf", "name": "inf"}]
    assert "-inf dB" in chapter("--verify", given("--verify", outputs=outputs), tmp_path)


@pytest.mark.parametrize("option", list(ASKED))
def test_another_model_is_refused(option: str, tmp_path: Path) -> None:
    document = given(option, sha256="dd" * 32)
    if option == "--bench":
        document = documents.bench("dd" * 32)
    with pytest.raises(OptionError, match="is about another model than"):
        chapter(option, document, tmp_path)


def test_a_scan_of_the_artifact_is_not_one_of_the_original(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"the original, net\.onnx"):
        chapter("--sensitivity", documents.sensitivity(documents.RESULT), tmp_path)


@pytest.mark.parametrize("option", list(ASKED))
@pytest.mark.parametrize(
    "document", [{}, {"error": {"type": "OptionError"}}, {"models": 3, "sha256": "x"}]
)
def test_something_else_is_refused(option: str, document: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"is not what 'slimctl \w+ --json' prints"):
        chapter(option, document, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "is no JSON"), (b"[]", "no JSON object"), (b"\xff", "no JSON")]
)
def test_no_document_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_bytes(content)
    with pytest.raises(OptionError, match=message):
        chapter_from("--bench", path, documents.manifest())


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="Cannot read"):
        chapter_from("--bench", tmp_path / "none.json", documents.manifest())


def test_the_artifacts_own_page_says_what_is_not_there() -> None:
    text = read(render(documents.manifest())).text
    assert all(asked.what in text for asked in (HISTORY, *ASKED.values()))
    assert "Not on this page" not in full_page(documents.manifest(), None, [], [])


def test_changes_of_the_same_groups_share_a_plot(tmp_path: Path) -> None:
    text = read(chapter("--sensitivity", given("--sensitivity"), tmp_path)).text
    assert "Only this changed: SQNR along the graph, int8" in text
    assert "Only this changed: SQNR along the graph, int4" in text
