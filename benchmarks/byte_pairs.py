"""The byte-level BPE of GPT-2 with single digits, as SmolLM2 takes it, from the metadata of a GGUF.

Radford et al. 2019, section 2.2; ``encoder.py`` of their code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

_LETTER = r"[^\W\d_]"
_WORDS = re.compile(
    r"'(?:s|t|re|ve|m|ll|d)"  # English contractions
    rf"| ?{_LETTER}+"
    rf"| ?(?:(?!{_LETTER})[^\s\d])+"  # signs
    r"|\s+(?!\S)|\s+"  # the last space before a word belongs to the word
)
"""``\\p{L}`` is written with what the standard library's expressions have. Fractions and
superscripts are letters here and numbers there."""

_DIGITS = re.compile(r"(\d)")


def byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in tokens: itself where it can be seen."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    letters = {byte: chr(byte) for byte in seen}
    hidden = (byte for byte in range(256) if byte not in letters)
    return letters | {byte: chr(256 + index) for index, byte in enumerate(hidden)}


def split(text: str) -> list[str]:
    """Digits one by one, and between them what GPT-2 takes for words; nothing is lost."""
    parts = _DIGITS.split(text)
    return [
        word
        for part in parts
        for word in ([part] if _DIGITS.fullmatch(part) else _WORDS.findall(part))
    ]


class Tokenizer:
    """Text to numbers of tokens and back. Special tokens in a text are text like any other."""

    def __init__(self, tokens: Sequence[str], merges: Sequence[str]) -> None:
        self._tokens = tokens
        self._numbers = {token: number for number, token in enumerate(tokens)}
        self._ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(merges)}
        self._letters = byte_letters()
        self._bytes = {letter: byte for byte, letter in self._letters.items()}
        self._known = lru_cache(maxsize=None)(self._word)

    def encode(self, text: str) -> list[int]:
        """Numbers of the tokens of a text."""
        return [number for word in split(text) for number in self._known(word)]

    def decode(self, numbers: Iterable[int]) -> str:
        """The text of tokens; of a letter cut in two, what UTF-8 replaces it with."""
        joined = "".join(self._tokens[number] for number in numbers)
        return bytes(self._bytes[letter] for letter in joined).decode("utf-8", "replace")

    def _word(self, word: str) -> tuple[int, ...]:
        """Merges neighbors, always the pair that was learned first."""
        pieces = [self._letters[byte] for byte in word.encode("utf-8")]
        while len(pieces) > 1:
            pairs = list(pairwise(pieces))
            first = min(pairs, key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if first not in self._ranks:
                break
            pieces = _merged(pieces, first)
        return tuple(self._numbers[piece] for piece in pieces)


def _merged(pieces: Sequence[str], pair: tuple[str, str]) -> list[str]:
    """Every occurrence of the pair as one piece, from the left."""
    found: list[str] = []
    index = 0
    while index < len(pieces):
        width = 2 if tuple(pieces[index : index + 2]) == pair else 1
        found.append("".join(pieces[index : index + width]))
        index += width
    return found


def tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF."""
    return Tokenizer(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"])
