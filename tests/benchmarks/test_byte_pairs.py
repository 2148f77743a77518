from __future__ import annotations

import pytest

from benchmarks.byte_pairs import Tokenizer, byte_letters, split

MERGES = ["h e", "l l", "he ll", "Ġ he", "l o"]


def toy() -> Tokenizer:
    letters = [letter for _, letter in sorted(byte_letters().items())]
    return Tokenizer([*letters, *(merge.replace(" ", "") for merge in MERGES)], MERGES)


def test_bytes_have_letters_of_their_own() -> None:
    letters = byte_letters()
    assert len(set(letters.values())) == 256
    assert letters[ord("a")] == "a"
    assert letters[ord(" ")] == "Ġ"  # what every GPT-2 vocabulary shows
    assert letters[ord("\n")] == "Ċ"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello world", ["Hello", " world"]),
        ("don't", ["don", "'t"]),
        ("in 1818", ["in", " ", "1", "8", "1", "8"]),
        ("a  b\n\nc", ["a", " ", " b", "\n", "\n", "c"]),
        ('she said, "no"', ["she", " said", ",", ' "', "no", '"']),
        ("a_b café ", ["a", "_", "b", " café", " "]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert split(text) == words
    assert "".join(split(text)) == text


def test_merges_go_by_rank() -> None:
    known = toy()
    pieces = [known.decode([number]) for number in known.encode("hello hehe")]
    # "he" and "ll" come before "he ll"; "lo" would need the second l, which is taken by then
    assert pieces == ["hell", "o", " he", "he"]


def test_whatever_is_encoded_comes_back() -> None:
    known, text = toy(), "héllo —  ½ 42\n\ttab 漢"
    assert known.decode(known.encode(text)) == text


def test_part_of_a_letter_does_not_fail() -> None:
    known = toy()
    assert known.decode(known.encode("é")[:1]) == "\ufffd"
