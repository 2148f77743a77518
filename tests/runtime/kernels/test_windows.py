from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from slimctl.runtime.windows import (
    Windows,
    columns,
    padded,
    place_spread,
    place_windows,
    reduce_windows,
    run_view,
    tap_coordinates,
    tap_view,
    taps,
    window_view,
)

_CASES: list[dict[str, Any]] = [
    {"kernel": (3, 2)},
    {"kernel": (1, 1)},
    {"kernel": (3, 2), "pads": (1, 0, 2, 1)},
    {"kernel": (2, 3), "strides": (2, 3), "pads": (1, 1, 0, 0)},
    {"kernel": (2, 2), "dilations": (2, 3), "pads": (1, 2, 1, 2)},
    {"kernel": (3, 3), "strides": (2, 2), "auto_pad": "SAME_UPPER"},
    {"kernel": (2, 4), "strides": (1, 3), "auto_pad": "SAME_LOWER"},
    {"kernel": (3, 2), "strides": (3, 3), "auto_pad": "VALID", "pads": (9, 9, 9, 9)},
    {"kernel": (2, 2), "strides": (3, 3), "ceil_mode": 1},
    {"kernel": (3, 3), "strides": (2, 3), "ceil_mode": 1, "pads": (1, 1, 1, 1)},
    {"kernel": (1, 1), "strides": (4, 4)},
]

_SIZES = (6, 7)
_FILL = -7


def _case(number: int) -> tuple[Windows, np.ndarray]:
    x = np.arange(2 * 3 * 42, dtype=np.int32).reshape(2, 3, *_SIZES)
    return place_windows(_SIZES, **_CASES[number]), x


def _seen(x: np.ndarray, windows: Windows) -> np.ndarray:
    """What every tap of every window reads, one element at a time: [2, 3, *kernel, *counts]."""
    result = np.full((2, 3, *windows.kernel, *windows.counts), _FILL, x.dtype)
    for tap in product(*map(range, windows.kernel)):
        for window in product(*map(range, windows.counts)):
            spot = tuple(
                w * s + t * d - b
                for w, s, t, d, b in zip(
                    window, windows.strides, tap, windows.dilations, windows.begins, strict=True
                )
            )
            if all(0 <= at < size for at, size in zip(spot, windows.sizes, strict=True)):
                result[(slice(None), slice(None), *tap, *window)] = x[(..., *spot)]
    return result


@pytest.mark.parametrize(
    ("size", "options", "count", "begin", "end"),
    [
        (7, {"kernel": (3,)}, 5, 0, 0),
        (7, {"kernel": (3,), "strides": (2,)}, 3, 0, 0),
        (8, {"kernel": (3,), "strides": (2,)}, 3, 0, 0),
        (8, {"kernel": (3,), "strides": (2,), "ceil_mode": 1}, 4, 0, 0),
        (7, {"kernel": (3,), "dilations": (3,)}, 1, 0, 0),
        (7, {"kernel": (3,), "pads": (1, 2)}, 8, 1, 2),
        (7, {"kernel": (4,), "auto_pad": "SAME_UPPER"}, 7, 1, 2),
        (7, {"kernel": (4,), "auto_pad": "SAME_LOWER"}, 7, 2, 1),
        (8, {"kernel": (3,), "strides": (2,), "auto_pad": "SAME_UPPER"}, 4, 0, 1),
        (8, {"kernel": (3,), "strides": (2,), "auto_pad": "SAME_LOWER"}, 4, 1, 0),
        (8, {"kernel": (1,), "strides": (3,), "auto_pad": "SAME_UPPER"}, 3, 0, 0),
        (7, {"kernel": (3,), "pads": (1, 2), "auto_pad": "VALID"}, 5, 0, 0),
        # the last window would begin in the padding after the input: it does not count
        (5, {"kernel": (2,), "strides": (3,), "pads": (0, 1), "ceil_mode": 1}, 2, 0, 1),
        (4, {"kernel": (1,), "strides": (3,), "pads": (0, 1), "ceil_mode": 1}, 2, 0, 1),
    ],
)
def test_counts_and_padding(
    size: int, options: dict[str, Any], count: int, begin: int, end: int
) -> None:
    windows = place_windows((size,), **options)
    assert (windows.counts, windows.begins, windows.ends) == ((count,), (begin,), (end,))


@pytest.mark.parametrize("number", range(len(_CASES)))
def test_every_view_shows_what_the_windows_read(number: int) -> None:
    windows, x = _case(number)
    expected = _seen(x, windows)
    read = padded(x, windows, _FILL)
    assert read.shape == (2, 3, *windows.extents)
    np.testing.assert_array_equal(tap_view(read, windows), expected)
    np.testing.assert_array_equal(window_view(read, windows), expected.transpose(0, 1, 4, 5, 2, 3))
    for position, index in taps(windows):
        np.testing.assert_array_equal(read[index], expected[(slice(None), slice(None), *position)])
    np.testing.assert_array_equal(
        columns(read, windows), expected.reshape(2, 3 * np.prod(windows.kernel), -1)
    )


@pytest.mark.parametrize(
    "number", [i for i, case in enumerate(_CASES) if set(case.get("strides", (1,))) == {1}]
)
def test_runs_hold_the_windows_of_all_rows(number: int) -> None:
    windows, x = _case(number)
    run = run_view(padded(x, windows, _FILL), windows)
    rows, width = windows.counts[0], windows.extents[1]
    spots = np.arange(rows)[:, None] * width + np.arange(windows.counts[1])
    np.testing.assert_array_equal(run[..., spots], _seen(x, windows))


@pytest.mark.parametrize("number", range(len(_CASES)))
def test_reducing_by_axes_reduces_windows(number: int) -> None:
    windows, x = _case(number)
    expected = _seen(x, windows).max(axis=(2, 3))
    before = x.copy()
    found = reduce_windows(x, windows, np.maximum, empty=_FILL)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(x, before)


def test_coordinates_count_on_the_input() -> None:
    windows = place_windows((5,), (3,), strides=(2,), dilations=(2,), pads=(1, 2))
    np.testing.assert_array_equal(tap_coordinates(windows, 0), [[-1, 1], [1, 3], [3, 5]])


def test_padding_that_is_not_needed_copies_nothing() -> None:
    x = np.zeros((1, 1, 6, 7), np.float32)
    assert np.shares_memory(padded(x, place_windows(_SIZES, (3, 2), strides=(3, 3))), x)


@pytest.mark.parametrize(
    ("options", "size", "begin"),
    [
        ({}, 9, 0),  # (4 - 1) * 2 + 3
        ({"pads": (1, 0)}, 8, 1),
        ({"extra": (1,)}, 10, 0),
        ({"wanted": (8,)}, 8, 1),
        ({"wanted": (6,)}, 6, 2),
        ({"wanted": (6,), "auto_pad": "SAME_UPPER"}, 6, 1),
        ({"auto_pad": "SAME_UPPER"}, 8, 0),
        ({"auto_pad": "SAME_LOWER"}, 8, 1),
        ({"wanted": (11,)}, 11, 0),
        ({"dilations": (2,)}, 11, 0),
    ],
)
def test_transposed_windows(options: dict[str, Any], size: int, begin: int) -> None:
    windows = place_spread((4,), (3,), strides=(2,), **options)
    assert (windows.sizes, windows.begins, windows.counts) == ((size,), (begin,), (4,))


@pytest.mark.parametrize(
    "options",
    [
        {"kernel": (3,)},
        {"kernel": (3, 3), "strides": (1, 0)},
        {"kernel": (3, 3), "pads": (1, 1)},
        {"kernel": (3, 3), "pads": (1, 1, -1, 0)},
        {"kernel": (3, 8)},
        {"kernel": (3, 3), "auto_pad": "SAME"},
    ],
)
def test_numbers_that_do_not_fit_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"kernel|positive|pads|window|auto_pad"):
        place_windows(_SIZES, **options)


def test_padding_that_cuts_off_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="cuts off more"):
        place_spread((2,), (2,), pads=(3, 3))
