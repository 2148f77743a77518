"""Strings, which are str or bytes; against onnxruntime and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slimctl.core.errors import ModelExecutionError
from slimctl.runtime.kernels import text as kernels
from tests.runtime.kernels.one_node import Array, assert_agrees, ours, theirs


def _strings(*values: Any) -> Array:
    return np.array(values, object)


def _bytes(x: Array) -> Array:
    result = np.empty(x.shape, object)
    result.ravel()[:] = [item.encode() for item in x.ravel()]
    return result


def test_concat() -> None:
    x, y = _strings(["ab", "ä"], ["", "d"]), _strings("1", "")
    found, expected = (f("StringConcat", [x, y], opset=20)[0] for f in (ours, theirs))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(kernels.string_concat(_bytes(x), y), _bytes(expected))


@pytest.mark.parametrize("delimiter", [",", ", ", None, ""])
@pytest.mark.parametrize("maxsplit", [None, 1])
def test_split(maxsplit: int | None, delimiter: str | None) -> None:
    x = _strings("a,b,, c", "x", "d, e  f")
    given: dict[str, Any] = {} if maxsplit is None else {"maxsplit": maxsplit}
    given |= {} if delimiter is None else {"delimiter": delimiter}
    node = {"opset": 20, "outputs": 2, **given}
    (parts, counts), (other_parts, other_counts) = (
        f("StringSplit", [x], **node) for f in (ours, theirs)
    )
    np.testing.assert_array_equal(parts, other_parts)
    np.testing.assert_array_equal(counts, other_counts)
    assert counts.dtype == np.int64
    as_bytes, _ = kernels.string_split(_bytes(x), **given)
    np.testing.assert_array_equal(as_bytes, _bytes(parts))


def test_split_of_nothing() -> None:
    parts, counts = kernels.string_split(np.empty((2, 0), object))
    assert (parts.shape, counts.shape) == ((2, 0, 0), (2, 0))


def test_regex() -> None:
    x = _strings("abc", "xabc", "ABC", "")
    node = {"opset": 20, "pattern": "[a-c]+"}
    found, expected = (f("RegexFullMatch", [x], **node)[0] for f in (ours, theirs))
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == bool
    with pytest.raises(ModelExecutionError, match="is not a regular expression"):
        ours("RegexFullMatch", [x], opset=20, pattern="(")


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, ["Ab", "cD", "straße"]),
        ({"case_change_action": "UPPER"}, ["AB", "CD", "STRAßE"]),
        ({"case_change_action": "LOWER", "stopwords": ["AB"]}, ["cd", "straße"]),
        ({"stopwords": ["AB"], "is_case_sensitive": 1}, ["Ab", "cD", "straße"]),
        ({"stopwords": ["Ab"], "is_case_sensitive": 1}, ["cD", "straße"]),
        ({"stopwords": ["ab", "cd", "STRAßE"]}, [""]),
    ],
)
def test_normalizer(attributes: dict[str, Any], expected: list[str]) -> None:
    x = _strings("Ab", "cD", "straße")
    np.testing.assert_array_equal(kernels.string_normalizer(x, **attributes), _strings(*expected))
    row = kernels.string_normalizer(_bytes(x)[None], **attributes)
    np.testing.assert_array_equal(row, _bytes(_strings(*expected))[None])


def test_normalizer_refuses() -> None:
    with pytest.raises(ValueError, match="no action 'TITLE'"):
        kernels.string_normalizer(_strings("a"), case_change_action="TITLE")
    with pytest.raises(ValueError, match="must have the shape"):
        kernels.string_normalizer(_strings(["a"], ["b"]))


_POOL = {"ngram_counts": [0, 4], "ngram_indexes": [0, 1, 2, 3, 4, 5, 6]}
_WEIGHTS = [0.5, 0.25, 2.0, 1.0, 4.0, 0.125, 3.0]


@pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
@pytest.mark.parametrize(
    ("shortest", "longest", "skips"), [(1, 1, 0), (1, 2, 0), (2, 2, 5), (1, 2, 5)]
)
def test_tfidf(shortest: int, longest: int, skips: int, mode: str) -> None:
    node: dict[str, Any] = {"mode": mode, "min_gram_length": shortest, "opset": 9}
    node |= {"max_gram_length": longest, "max_skip_count": skips, "weights": _WEIGHTS, **_POOL}
    numbers = np.array([[1, 1, 3, 3, 3, 7], [8, 6, 7, 5, 6, 8]], np.int64)
    pool = [2, 3, 5, 4, 5, 6, 7, 8, 6, 7]
    assert_agrees("TfIdfVectorizer", [numbers], pool_int64s=pool, **node)
    assert_agrees("TfIdfVectorizer", [numbers[0]], pool_int64s=pool, **node)
    words = np.array(numbers.astype(str), object)
    assert_agrees("TfIdfVectorizer", [words], pool_strings=[str(item) for item in pool], **node)
