"""Reads GGUF, the container of llama.cpp: metadata, and tensors exactly as they are meant.

The format (ggml, ``docs/gguf.md``): magic, version, number of tensors, number of metadata entries;
the entries; of each tensor its name, sizes (the fastest axis first), type and place; padding; the
blocks. Everything is little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAGIC = b"GGUF"
VERSIONS = (2, 3)

_BLOCK = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class GgufError(Exception):
    """The file is no GGUF, or holds what no benchmark needs."""


# blocks, as struct block_* of ggml-common.h lays them out


def from_f32(blocks: Bytes) -> Floats:
    """[blocks, 4] -> [blocks, 1]."""
    return blocks.view("<f4").astype(np.float32, copy=False)


def from_f16(blocks: Bytes) -> Floats:
    """[blocks, 2] -> [blocks, 1]."""
    return blocks.view("<f2").astype(np.float32)


def from_q4_1(blocks: Bytes) -> Floats:
    """``x = d q + m``: float16 d, float16 m, 16 bytes of 4-bit q. [blocks, 20] -> [blocks, 32].

    The low halves of the bytes are the first 16 codes, the high halves the others.
    """
    scale, least = (blocks[:, start : start + 2].view("<f2").astype(np.float32) for start in (0, 2))
    packed = blocks[:, 4:]
    codes = np.concatenate([packed & 15, packed >> 4], axis=1)
    return codes.astype(np.float32) * scale + least


def from_q8_0(blocks: Bytes) -> Floats:
    """``x = d q``: float16 d, 32 int8 q. [blocks, 34] -> [blocks, 32]."""
    scale = blocks[:, :2].view("<f2").astype(np.float32)
    return blocks[:, 2:].view(np.int8).astype(np.float32) * scale


class _Kind(NamedTuple):
    """How a type of tensors is stored: values and bytes per block, and what restores them."""

    values: int
    size: int
    restore: Callable[[Bytes], Floats]


_KINDS = {
    0: _Kind(1, 4, from_f32),
    1: _Kind(1, 2, from_f16),
    3: _Kind(_BLOCK, 20, from_q4_1),
    8: _Kind(_BLOCK, 34, from_q8_0),
}
"""By the number that ``enum ggml_type`` gives them."""


# the container


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies, from the end of the header on."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Gguf:
    """An opened file.

    Attributes:
        metadata: Its entries.
    """

    metadata: dict[str, Any]
    _places: dict[str, _Place]
    _content: Bytes

    def tensor(self, name: str) -> Floats:
        """A tensor in numpy's order of axes: a matrix is [outputs, inputs].

        Raises:
            GgufError: It is of a type that no benchmark needs.
        """
        place = self._places[name]
        if place.kind not in _KINDS:
            raise GgufError(f"tensor {name} has the ggml type {place.kind}, which is not read here")
        kind = _KINDS[place.kind]
        count = math.prod(place.shape) // kind.values
        stored = self._content[place.offset : place.offset + count * kind.size]
        return kind.restore(stored.reshape(count, kind.size)).reshape(place.shape)

    def tensors(self) -> dict[str, Floats]:
        """All of them."""
        return {name: self.tensor(name) for name in self._places}


class _Reader:
    """Takes values from the front of a file."""

    def __init__(self, content: Bytes) -> None:
        self.content = content
        self.position = 0

    def take(self, count: int) -> bytes:
        self.position += count
        return self.content[self.position - count : self.position].tobytes()

    def number(self, letter: str) -> Any:
        (value,) = struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}")))
        return value

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.number("I"), self.number("Q")
            return [self.value(inner) for _ in range(count)]
        return self.number(_SCALARS[kind])

    def place(self) -> tuple[str, _Place]:
        name = self.string()
        sizes = [self.number("Q") for _ in range(self.number("I"))]
        kind, offset = self.number("I"), self.number("Q")
        return name, _Place(tuple(reversed(sizes)), kind, offset)


def load_gguf(path: Path) -> Gguf:
    """Opens a file; its tensors are mapped and restored one at a time.

    Raises:
        GgufError: It is no GGUF of a known version.
    """
    content = np.memmap(path, np.uint8, "r")
    reader = _Reader(content)
    if reader.take(len(MAGIC)) != MAGIC:
        raise GgufError(f"{path.name} does not start with {MAGIC.decode()}")
    version = reader.number("I")
    if version not in VERSIONS:
        raise GgufError(f"{path.name} is GGUF {version}; {VERSIONS} are read here")
    tensors, entries = reader.number("Q"), reader.number("Q")
    metadata = dict(_entry(reader) for _ in range(entries))
    places = dict(reader.place() for _ in range(tensors))
    alignment = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    start = -(-reader.position // alignment) * alignment
    return Gguf(metadata, places, np.asarray(content[start:]))


def _entry(reader: _Reader) -> tuple[str, Any]:
    name = reader.string()
    return name, reader.value(reader.number("I"))
