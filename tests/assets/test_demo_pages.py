"""The demo's pages: the same seed draws the same, labels are right, and the original reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort

from benchmarks.samples import take
from demo.pages import ANGLES, HEIGHT, WIDTH, draw_pages, write_pages


def test_same_seed_draws_the_same_pages(fonts: list[Path]) -> None:
    first, again, other = (
        [page.tobytes() for page, _ in draw_pages(8, seed, fonts)] for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other
    assert len(set(first)) == 8


def test_labels_take_turns_and_pages_are_turned(fonts: list[Path]) -> None:
    drawn = list(draw_pages(8, 3, fonts))
    assert [label for _, label in drawn] == [0, 1, 2, 3] * 2
    upright, turned = (WIDTH, HEIGHT), (HEIGHT, WIDTH)
    assert [page.size for page, _ in drawn] == [upright, turned] * 4


def test_folders_are_labels(fonts: list[Path], tmp_path: Path) -> None:
    write_pages(tmp_path / "pages", 10, 3, fonts)
    found = Counter(path.parent.name for path in tmp_path.rglob("*.png"))
    assert found == {"0": 3, "1": 3, "2": 2, "3": 2}


def test_the_original_model_reads_every_page(
    asset: Callable[[str], Path], fonts: list[Path]
) -> None:
    session = ort.InferenceSession(asset("orientation"))
    names = session.get_modelmeta().custom_metadata_map["character"].split()
    assert names == [str(angle) for angle in ANGLES]
    feeds = take("orientation", asset("orientation"), fonts, count=40, seed=2)
    found = [int(np.argmax(session.run(None, feed)[0])) for feed in feeds]
    assert found == [0, 1, 2, 3] * 10
