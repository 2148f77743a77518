from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gguf import GgufError, from_f16, from_q4_1, from_q8_0, load_gguf

Q4_1, F32, Q2_K = 3, 0, 10
STRING, UINT32, ARRAY = 8, 4, 9


def block(*parts: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(b"".join(parts), np.uint8)[np.newaxis]


def test_q4_1_by_hand() -> None:
    # d = 0.5, m = -2; byte i holds code i in its low half and 15 - i in its high half
    packed = bytes(i | (15 - i) << 4 for i in range(16))
    found = from_q4_1(block(struct.pack("<ee", 0.5, -2), packed))
    low = [i / 2 - 2 for i in range(16)]
    np.testing.assert_array_equal(found, [[*low, *reversed(low)]])


def test_q8_0_by_hand() -> None:
    codes = [-128, 127, *range(30)]
    found = from_q8_0(block(struct.pack("<e", 0.25), struct.pack("<32b", *codes)))
    np.testing.assert_array_equal(found, [[code / 4 for code in codes]])


def test_f16_by_hand() -> None:
    np.testing.assert_array_equal(from_f16(block(struct.pack("<e", 1.5))), [[1.5]])


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def entry(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def place(name: str, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    sized = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return string(name) + sized + struct.pack("<IQ", kind, offset)


def write(path: Path, entries: list[bytes], places: list[bytes], content: bytes) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(places), len(entries))
    head += b"".join([*entries, *places])
    path.write_bytes(head + bytes(-len(head) % 32) + content)
    return path


def test_file_by_hand(tmp_path: Path) -> None:
    words = struct.pack("<IQ", STRING, 2) + string("ab") + string("Ġ")
    entries = [entry("count", UINT32, struct.pack("<I", 7)), entry("words", ARRAY, words)]
    places = [place("matrix", (32, 2), Q4_1, 0), place("vector", (3,), F32, 64)]
    rows = [struct.pack("<ee", 1, row) + bytes([0x21] * 16) for row in (0, 10)]
    content = b"".join(rows) + bytes(24) + struct.pack("<3f", 1, 2, 3)

    file = load_gguf(write(tmp_path / "x.gguf", entries, places, content))

    assert file.metadata == {"count": 7, "words": ["ab", "Ġ"]}
    row = [1.0] * 16 + [2.0] * 16
    np.testing.assert_array_equal(file.tensor("matrix"), [row, [10 + value for value in row]])
    np.testing.assert_array_equal(file.tensors()["vector"], [1, 2, 3])


def test_unknown_types_and_files_are_refused(tmp_path: Path) -> None:
    file = load_gguf(write(tmp_path / "x.gguf", [], [place("w", (256,), Q2_K, 0)], bytes(84)))
    with pytest.raises(GgufError, match="tensor w has the ggml type 10"):
        file.tensor("w")
    (tmp_path / "y.gguf").write_bytes(b"not this")
    with pytest.raises(GgufError, match="does not start with GGUF"):
        load_gguf(tmp_path / "y.gguf")
