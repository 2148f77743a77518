"""Every kind of page in a real browser: phone and desk, light and dark."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from slimctl.report.additions import chapter_from
from slimctl.report.benchmark import benchmark_page
from slimctl.report.html import full_page, render
from slimctl.report.sensitivity import sensitivity_page
from slimctl.report.verification import render as verification_page
from tests.report import documents
from tests.report.browser import find_browser, look
from tests.report.test_verification_report import LONG, layer, nodes
from tests.report.test_verification_report import document as verification

BROWSER = find_browser() or ""
HEIGHT = 900

pytestmark = pytest.mark.skipif(
    not BROWSER, reason="no browser: install chromium, or name one in SLIMCTL_BROWSER"
)


def verified() -> dict[str, object]:
    layers = [layer(LONG), layer("/backbone/stage1/conv/Conv", own_db=30.0), layer("head")]
    found = verification(nodes=nodes(layers=layers), model="artifacts/net", reference="net.onnx")
    return {**found, "sha256": documents.RESULT}


def everything(folder: Path) -> str:
    manifest = documents.manifest()
    given = {
        "--verify": verified(),
        "--sensitivity": documents.sensitivity(),
        "--bench": documents.bench(),
    }
    chapters = []
    for option, document in given.items():
        path = folder / f"{option[2:]}.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        chapters.append(chapter_from(option, path, manifest))
    return full_page(manifest, documents.history(), chapters, [])


PAGES = {
    "artifact": lambda _: render(documents.manifest(name="a-long-name-" * 8)),
    "verification": lambda _: verification_page(verified()),
    "sensitivity": lambda _: sensitivity_page(documents.sensitivity()),
    "benchmark": lambda _: benchmark_page(documents.bench()),
    "everything": everything,
}


def is_dark(picture: Path) -> bool:
    """Whether most of a picture is: the paper is what there is most of."""
    pixels = np.asarray(Image.open(picture).convert("L"))
    return float(np.median(pixels)) < 128


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("kind", PAGES)
def test_page_is_drawn_and_fits(kind: str, width: int, dark: bool, tmp_path: Path) -> None:
    page = PAGES[kind](tmp_path)
    seen = look(BROWSER, page, (width, HEIGHT), tmp_path, dark=dark)
    assert seen.said == []
    assert seen.wide == ""
    assert (seen.width, seen.dark) == (width, dark)
    picture = Image.open(seen.picture)
    assert picture.size == (width, HEIGHT)
    assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 20
    assert is_dark(seen.picture) is dark


def spoiled(body: str) -> str:
    return f"<!doctype html><html><body style='margin:0'>{body}</body></html>"


@pytest.mark.parametrize(
    ("body", "said", "wide"),
    [
        ("fine", False, ""),
        ("<script>nothing.here()</script>", True, ""),
        ("<div class='broad' style='width:500px'>x</div>", False, "DIV.broad"),
        (
            "<div class='scroll' style='overflow:auto'><b style='padding:300px'>x</b></div>",
            False,
            "",
        ),
    ],
)
def test_what_is_wrong_is_seen(body: str, said: bool, wide: str, tmp_path: Path) -> None:
    seen = look(BROWSER, spoiled(body), (390, HEIGHT), tmp_path, dark=False)
    assert (seen.said != [], seen.wide) == (said, wide)
