from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from benchmarks.novels import NOVELS, NovelsError, load_novels


def vector(lines: list[str], kind: int = 16) -> bytes:
    """A vector of strings as R serializes it, behind the length of the whole and compressed."""
    head = b"X\n" + struct.pack(">iiii", 3, 0x00040201, 0x00030500, 5) + b"UTF-8"
    body = struct.pack(">ii", kind, len(lines))
    body += b"".join(struct.pack(">ii", 0x00040009, len(s)) + s for s in map(str.encode, lines))
    return struct.pack(">i", len(head + body)) + zlib.compress(head + body)


def test_lines_become_paragraphs(tmp_path: Path) -> None:
    lines = ["TITLE", "", " ", "One line", " and its second.", "", "Another."]
    path = tmp_path / "Rdata.rdb"
    path.write_bytes(vector(lines) + vector(["x"]) * (len(NOVELS) - 1))

    novels = load_novels(path)

    assert list(novels) == list(NOVELS)
    assert novels["emma"] == "TITLE\n\nOne line and its second.\n\nAnother."
    assert novels["persuasion"] == "x"


def test_other_data_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "Rdata.rdb"
    path.write_bytes(vector(["x"], kind=14))
    with pytest.raises(NovelsError, match="found kind 14"):
        load_novels(path)
