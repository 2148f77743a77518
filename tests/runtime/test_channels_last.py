"""Convolutions of images whose channels lie side by side, against the usual order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slimctl.runtime import channels_last
from slimctl.runtime.channels_last import (
    along_rows,
    depthwise_blocks,
    depthwise_weights,
    empty_channels_last,
    is_channels_last,
    pointwise_blocks,
    suits_depthwise,
)
from slimctl.runtime.convolve import convolve, put_block
from slimctl.runtime.windows import Windows, padded, place_windows

Array = NDArray[Any]


def windows(sizes: tuple[int, int], kernel: tuple[int, int], **options: Any) -> Windows:
    return place_windows(sizes, kernel, **options)


def assembled(blocks: Any, shape: tuple[int, ...]) -> Array:
    result = np.full(shape, np.nan, np.float32)
    for place, sums in blocks:
        put_block(result, place, sums)
    return result


def image(shape: tuple[int, ...], *, last: bool, seed: int = 0) -> Array:
    codes = np.random.default_rng(seed).integers(0, 255, shape, np.uint8)
    if not last:
        return codes
    found = empty_channels_last(shape, codes.dtype)
    found[...] = codes
    return found


PLACES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"pads": (1, 1, 1, 1)},
    "uneven": {"pads": (0, 2, 1, 0)},
    "strided": {"strides": (2, 2), "pads": (1, 1, 1, 1)},
    "strided, uneven": {"strides": (2, 3), "pads": (0, 1, 2, 1)},
    "dilated": {"dilations": (2, 2), "pads": (2, 2, 2, 2)},
    "far outside": {"pads": (4, 4, 4, 4), "strides": (3, 1)},
}


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("small_blocks", [True, False])
@pytest.mark.parametrize("kernel", [(3, 3), (5, 2), (1, 3)])
@pytest.mark.parametrize("name", PLACES)
def test_depthwise(
    name: str, kernel: tuple[int, int], small_blocks: bool, last: bool, monkeypatch: Any
) -> None:
    if small_blocks:
        monkeypatch.setattr(channels_last, "_CACHED", 400)
    x = image((2, 9, 13, 12), last=last)
    weights = np.random.default_rng(1).integers(-127, 127, (9, 1, *kernel)).astype(np.float32)
    places = windows((13, 12), kernel, **PLACES[name])
    assert suits_depthwise(weights, places, 9)
    blocks = depthwise_blocks(x, depthwise_weights(weights, places), places, 7)
    found = assembled(blocks, (2, 9, *places.counts))
    surrounded = padded(np.ascontiguousarray(x).astype(np.float32), places, 7)
    inside = windows(
        surrounded.shape[2:], kernel, strides=places.strides, dilations=places.dilations
    )
    expected = convolve(surrounded, weights, inside, groups=9)
    np.testing.assert_array_equal(found, expected[:, :, : places.counts[0], : places.counts[1]])


@pytest.mark.parametrize("small_blocks", [True, False])
def test_single_elements_with_and_without_what_is_added(
    small_blocks: bool, monkeypatch: Any
) -> None:
    if small_blocks:
        monkeypatch.setattr(channels_last, "_CACHED", 300)
    x = image((2, 9, 7, 5), last=True)
    rng = np.random.default_rng(2)
    matrix = rng.integers(-127, 127, (10, 6)).astype(np.float32)
    plain = np.einsum("nchw,cm->nmhw", x.astype(np.float64), matrix[:9])
    np.testing.assert_array_equal(assembled(pointwise_blocks(x, matrix[:9]), plain.shape), plain)
    whole = plain + matrix[9].reshape(-1, 1, 1)
    np.testing.assert_array_equal(assembled(pointwise_blocks(x, matrix), whole.shape), whole)


def test_what_is_in_that_order() -> None:
    assert is_channels_last(image((1, 4, 3, 3), last=True))
    assert not is_channels_last(image((1, 4, 3, 3), last=False))
    assert not is_channels_last(image((1, 4, 1, 1), last=True))  # both orders at once
    assert not is_channels_last(np.zeros((4, 3)))


def test_values_along_rows_broadcast_to_each_channel() -> None:
    values = np.arange(4.0)
    rows = along_rows(values, 3)
    assert rows.shape == (4, 1, 3)
    np.testing.assert_array_equal(rows, np.broadcast_to(values.reshape(4, 1, 1), (4, 1, 3)))
    assert rows.transpose(1, 2, 0).flags.c_contiguous
