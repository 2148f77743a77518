"""Six novels by Jane Austen out of Debian's package of R's janeaustenr.

R keeps the data of a package in one file of blocks (``lazyLoadDBfetch`` of R's ``serialize.c``):
4 bytes with the length of the content, big-endian, and a zlib stream. Here each holds one vector of
strings in R's binary serialization ("R Internals", section 1.8): one string per printed line.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path

NOVELS = (
    "emma",
    "mansfieldpark",
    "northangerabbey",
    "persuasion",
    "prideprejudice",
    "sensesensibility",
)
"""In the order of the file."""

_WORD = 4
_STRINGS = 16
"""STRSXP, a vector of strings; no attributes."""


class NovelsError(Exception):
    """The file holds something else than vectors of strings."""


def load_novels(path: Path) -> dict[str, str]:
    """The texts by name; paragraphs are one line each, an empty line between them."""
    texts = (_paragraphs(_strings(block)) for block in _blocks(path.read_bytes()))
    return dict(zip(NOVELS, texts, strict=True))


def _blocks(content: bytes) -> Iterator[bytes]:
    while content:
        stream = zlib.decompressobj()
        block = stream.decompress(content[_WORD:])
        if len(block) != _number(content, 0):
            raise NovelsError(f"a block of {len(block)} bytes says {_number(content, 0)}")
        yield block
        content = stream.unused_data


def _strings(block: bytes) -> list[str]:
    """Format, version, two versions of R, its encoding; then kind, length and the strings."""
    start = len(b"X\n") + 3 * _WORD
    start += _WORD + _number(block, start)
    if _number(block, start) != _STRINGS:
        raise NovelsError(f"expected a vector of strings, found kind {_number(block, start)}")
    count, position = _number(block, start + _WORD), start + 2 * _WORD
    lines = []
    for _ in range(count):  # flags, length, bytes
        first = position + 2 * _WORD
        position = first + _number(block, position + _WORD)
        lines.append(block[first:position].decode("utf-8"))
    return lines


def _number(content: bytes, start: int) -> int:
    return int.from_bytes(content[start : start + _WORD], "big")


def _paragraphs(lines: list[str]) -> str:
    parts = re.split(r"\n\s*\n", "\n".join(lines))
    return "\n\n".join(" ".join(part.split()) for part in parts if part.strip())
