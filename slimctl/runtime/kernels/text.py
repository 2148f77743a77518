"""Strings: arrays of objects, each a str or, as in a model's own tensors, UTF-8 bytes.

Results hold what the first input holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

import numpy as np

from slimctl.runtime.registry import Array, operator

_CASES: dict[str, Callable[[str], str]] = {
    "NONE": lambda text: text,
    "LOWER": lambda text: _by_character(text, str.lower),
    "UPPER": lambda text: _by_character(text, str.upper),
}


def _texts(x: Array) -> list[str]:
    """All strings, flat."""
    return [item.decode() if isinstance(item, bytes) else str(item) for item in x.ravel()]


def _like(texts: Sequence[str], x: Array, shape: Sequence[int] | None = None) -> Array:
    """Strings of another array's kind, in its shape by default."""
    as_bytes = x.size > 0 and isinstance(x.flat[0], bytes)
    result = np.empty(len(texts), object)
    result[:] = [text.encode() for text in texts] if as_bytes else texts
    return result.reshape(x.shape if shape is None else shape)


def _by_character(text: str, change: Callable[[str], str]) -> str:
    """Characters that stay single ones are changed, as C does it: no SS of a sharp s."""
    return "".join(new if len(new := change(old)) == 1 else old for old in text)


@operator("StringConcat", since=20)
def string_concat(x: Array, y: Array) -> Array:
    """Each string of x followed by that of y."""
    left, right = np.broadcast_arrays(x, y)
    texts = [a + b for a, b in zip(_texts(left), _texts(right), strict=True)]
    return _like(texts, left)


@operator("StringSplit", since=20)
def string_split(
    x: Array, *, delimiter: str | None = None, maxsplit: int | None = None
) -> tuple[Array, Array]:
    """Parts of each string, filled up with empty ones, and how many there are."""
    most = -1 if maxsplit is None else maxsplit
    rows = [text.split(delimiter or None, most) for text in _texts(x)]
    counts = np.array([len(row) for row in rows], np.int64).reshape(x.shape)
    longest = int(counts.max(initial=0))
    padded = [text for row in rows for text in (*row, *[""] * (longest - len(row)))]
    return _like(padded, x, (*x.shape, longest)), counts


@operator("RegexFullMatch", since=20)
def regex_full_match(x: Array, *, pattern: str | None = None) -> Array:
    """Whether the whole string matches; the syntax asked for, re2's, is part of Python's."""
    if pattern is None:
        raise ValueError("there is no pattern")
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"the pattern '{pattern}' is not a regular expression: {error}") from error
    matches = [regex.fullmatch(text) is not None for text in _texts(x)]
    return np.array(matches, bool).reshape(x.shape)


@operator("StringNormalizer", since=10)
def string_normalizer(
    x: Array,
    *,
    case_change_action: str = "NONE",
    is_case_sensitive: int = 0,
    locale: str | None = None,
    stopwords: Sequence[str] | None = None,
) -> Array:
    """Strings without stopwords, in one case. Without a string left, one that is empty.

    The case is Unicode's, in every locale.
    """
    if case_change_action not in _CASES:
        raise ValueError(f"there is no action '{case_change_action}'")
    if x.ndim > 2 or (x.ndim == 2 and len(x) != 1):
        raise ValueError(f"strings must have the shape [n] or [1, n], not {list(x.shape)}")
    compared = _CASES["NONE" if is_case_sensitive else "LOWER"]
    stops = {compared(word) for word in stopwords or ()}
    kept = [text for text in _texts(x) if compared(text) not in stops]
    changed = [_CASES[case_change_action](text) for text in kept] or [""]
    return _like(changed, x, (*x.shape[:-1], len(changed)))


@operator("TfIdfVectorizer", since=9)
def tfidf_vectorizer(
    x: Array,
    *,
    max_gram_length: int,
    max_skip_count: int,
    min_gram_length: int,
    mode: str,
    ngram_counts: Sequence[int],
    ngram_indexes: Sequence[int],
    pool_int64s: Sequence[int] | None = None,
    pool_strings: Sequence[str] | None = None,
    weights: Sequence[float] | None = None,
) -> Array:
    """How often n-grams of a pool occur in each row, whether they do, or with weights."""
    pool: Sequence[object] = pool_int64s if pool_int64s is not None else pool_strings or ()
    places = dict(zip(_pooled(pool, ngram_counts), ngram_indexes, strict=True))
    rows = x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)
    counts = np.zeros((len(rows), max(ngram_indexes) + 1), np.float32)
    for row, found in zip(rows, counts, strict=True):
        items = row.tolist() if pool_int64s is not None else _texts(row)
        for size in range(min_gram_length, max_gram_length + 1):
            for gram in _grams(items, size, max_skip_count):
                if gram in places:
                    found[places[gram]] += 1
    return _weighted(counts, mode, weights, ngram_indexes).reshape(*x.shape[:-1], -1)


def _pooled(pool: Sequence[object], starts: Sequence[int]) -> Iterator[tuple[object, ...]]:
    """N-grams of the pool, which holds those of one element, then those of two and so on."""
    for size, (start, end) in enumerate(zip_longest(starts, starts[1:], fillvalue=len(pool)), 1):
        for first in range(start, end, size):
            yield tuple(pool[first : first + size])


def _grams(items: Sequence[object], size: int, skips: int) -> Iterator[tuple[object, ...]]:
    """Sequences of items with equal gaps; of single items there is only one kind."""
    for step in range(1, 2 if size == 1 else skips + 2):
        for first in range(len(items) - step * (size - 1)):
            yield tuple(items[first : first + step * (size - 1) + 1 : step])


def _weighted(
    counts: Array, mode: str, weights: Sequence[float] | None, indexes: Sequence[int]
) -> Array:
    factors = np.ones(counts.shape[1], np.float32)
    if weights is not None:
        factors[list(indexes)] = weights
    if mode == "TF":
        return counts
    if mode == "IDF":
        return (counts > 0) * factors
    if mode == "TFIDF":
        return counts * factors
    raise ValueError(f"there is no mode '{mode}'")
