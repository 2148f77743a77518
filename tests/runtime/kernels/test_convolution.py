from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from slimctl.runtime import convolve as module
from slimctl.runtime.convolve import convolve, convolved_blocks, put_block, spread
from slimctl.runtime.kernels.convolution import Numbers, conv, conv_transpose, deform_conv
from slimctl.runtime.windows import padded, place_windows, taps
from tests.runtime.kernels.one_node import assert_agrees, assert_close

_RNG = np.random.default_rng(11)

_SHAPES = [
    ((11,), (3,)),
    ((9, 8), (3, 2)),
    ((9, 8), (1, 1)),
    ((5, 6, 7), (2, 3, 1)),
]
_GROUPS = [(1, 3, 5), (2, 4, 6), (4, 4, 4), (3, 3, 6)]
"""Groups, channels, outputs."""


def _floats(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(("size", "kernel"), _SHAPES)
@pytest.mark.parametrize("groups", _GROUPS)
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_conv_as_onnxruntime(size: Numbers, kernel: Numbers, groups: Numbers, stride: int) -> None:
    rank, (group, channels, outputs) = len(size), groups
    x, w = _floats(2, channels, *size), _floats(outputs, channels // group, *kernel)
    common = {"opset": 11, "group": group, "strides": [stride] * rank}
    for dilation, pads in product((1, 2), ([0] * 2 * rank, [1] * rank + [2] * rank)):
        inputs = [x, w, _floats(outputs)]
        assert_agrees("Conv", inputs, dilations=[dilation] * rank, pads=pads, **common)
    for auto_pad in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        assert_agrees("Conv", [x, w], auto_pad=auto_pad, kernel_shape=kernel, **common)


@pytest.mark.parametrize(("size", "kernel"), _SHAPES)
@pytest.mark.parametrize("groups", _GROUPS)
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_conv_transpose_as_onnxruntime(
    size: Numbers, kernel: Numbers, groups: Numbers, stride: int
) -> None:
    rank, (group, channels, inputs) = len(size), groups
    x, w = _floats(2, inputs, *size), _floats(inputs, channels // group, *kernel)
    common: dict[str, Any] = {"opset": 11, "group": group, "strides": [stride] * rank}
    for dilation, pads, extra in product(
        (1, 2), ([0] * 2 * rank, [1] * rank + [0] * rank), {0, stride - 1}
    ):
        assert_agrees(
            "ConvTranspose",
            [x, w, _floats(channels)],
            dilations=[dilation] * rank,
            pads=pads,
            output_padding=[extra] * rank,
            **common,
        )
    for auto_pad, less in product(("NOTSET", "SAME_UPPER", "SAME_LOWER"), (0, 1)):
        # larger sizes are refused by onnxruntime
        wanted = [(s - 1) * stride + k - less for s, k in zip(size, kernel, strict=True)]
        assert_agrees("ConvTranspose", [x, w], auto_pad=auto_pad, output_shape=wanted, **common)
    if min(kernel) >= stride:  # onnxruntime makes the output of SAME smaller otherwise
        for auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            assert_agrees("ConvTranspose", [x, w], auto_pad=auto_pad, **common)


@pytest.mark.parametrize(
    ("inputs", "attributes"),
    [
        (((1, 4, 5, 6), (6, 2, 3, 3), (1, 36, 3, 4), (6,), (1, 18, 3, 4)), {}),
        (
            ((2, 4, 7, 6), (6, 2, 3, 3), (2, 36, 4, 2), (6,), (2, 18, 4, 2)),
            {"strides": [2, 2], "pads": [1, 1, 2, 0], "dilations": [1, 2]},
        ),
        (((1, 4, 5, 6), (6, 2, 3, 2), (1, 24, 3, 5)), {}),
    ],
)
def test_deform_conv_as_onnxruntime(inputs: Any, attributes: dict[str, Any]) -> None:
    values = [2 * _floats(*shape) for shape in inputs]
    assert_agrees("DeformConv", values, opset=22, group=2, offset_group=2, **attributes)


def test_deform_conv_without_offsets_is_a_convolution() -> None:
    x, w, bias = _floats(2, 4, 7, 6), _floats(6, 4, 3, 3), _floats(6)
    found = deform_conv(
        x, w, np.zeros((2, 18, 4, 6), np.float32), bias, pads=(1,) * 4, strides=(2, 1)
    )
    assert_close(found, conv(x, w, bias, pads=(1,) * 4, strides=(2, 1)), rtol=1e-6)


@pytest.mark.parametrize("limit", [1, 40, 300, 5000])
@pytest.mark.parametrize("groups", [*_GROUPS, (1, 3, 20), (2, 4, 40)])
@pytest.mark.parametrize("stride", [1, 2])
def test_blocks_of_every_size_compute_the_same(
    limit: int, groups: Numbers, stride: int, monkeypatch: Any
) -> None:
    group, channels, outputs = groups
    x, w = _floats(2, channels, 9, 8), _floats(outputs, channels // group, 3, 2)
    windows = place_windows((9, 8), (3, 2), strides=(stride, stride), pads=(1, 1, 1, 0))
    whole = convolve(x, w, windows, groups=group)
    monkeypatch.setattr(module, "_CACHED", limit)
    monkeypatch.setattr(module, "_LARGE", limit)
    # the products of blocks may be added in another order
    assert_close(convolve(x, w, windows, groups=group), whole, rtol=1e-6)


@pytest.mark.parametrize("limit", [1, 200, 10**6])
@pytest.mark.parametrize("groups", [*_GROUPS, (2, 4, 40)])
@pytest.mark.parametrize("shapes", [*_SHAPES, ((5, 40), (3, 5))])
@pytest.mark.parametrize("steps", [(1, 1), (1, 2), (2, 1), (3, 2), (2, 3)])
def test_codes_as_sums_of_taps(
    shapes: tuple[Numbers, Numbers],
    groups: Numbers,
    steps: Numbers,
    limit: int,
    monkeypatch: Any,
) -> None:
    """Codes of 8 bits, cast where they are copied, beside a padding that is not 0."""
    (size, kernel), (stride, dilation) = shapes, steps
    monkeypatch.setattr(module, "_CACHED", limit)
    monkeypatch.setattr(module, "_LARGE", limit)
    rank, (group, channels, outputs) = len(size), groups
    x = _RNG.integers(0, 256, (2, channels, *(n + 4 for n in size)), np.uint8)
    w = _RNG.integers(-9, 10, (outputs, channels // group, *kernel)).astype(np.float32)
    strides = (*[1] * (rank - 1), stride) if stride == 3 else (stride,) * rank
    windows = place_windows(
        x.shape[2:], kernel, strides=strides, dilations=(dilation,) * rank, pads=(2,) * 2 * rank
    )
    read = padded(x, windows, 77).astype(np.int64).reshape(2, group, -1, *windows.extents)
    expected = np.zeros((2, group, outputs // group, *windows.counts), np.int64)
    grouped = w.astype(np.int64).reshape(group, outputs // group, -1, *kernel)
    for tap, index in taps(windows):
        expected += np.einsum("goc,ngc...->ngo...", grouped[(..., *tap)], read[index])
    result = np.full((2, outputs, *windows.counts), np.nan, np.float32)
    for place, sums in convolved_blocks(x, w, windows, groups=group, fill=77):
        put_block(result, place, sums)
    np.testing.assert_array_equal(result, expected.reshape(result.shape))


def test_integers_that_float32_holds_are_summed_exactly() -> None:
    x = _RNG.integers(-8, 9, (2, 6, 9, 8)).astype(np.float32)
    w = _RNG.integers(-8, 9, (4, 3, 3, 3)).astype(np.float32)
    windows = place_windows((9, 8), (3, 3), pads=(1,) * 4)
    exact = convolve(x.astype(np.float64), w.astype(np.float64), windows, groups=2)
    np.testing.assert_array_equal(convolve(x, w, windows, groups=2), exact)


def test_a_transposed_input_is_read_right() -> None:
    x, w = _floats(2, 9, 8, 6), _floats(6, 1, 3, 3)
    turned = x.transpose(0, 3, 1, 2)  # [2, 6, 9, 8], not contiguous
    for kernel in (w, _floats(6, 1, 1, 1)):
        expected = conv(np.ascontiguousarray(turned), kernel, group=6)
        assert_close(conv(turned, kernel, group=6), expected, rtol=1e-6)


def test_spread_is_the_transpose_of_convolve() -> None:
    x, w = _floats(1, 4, 9, 8), _floats(6, 2, 3, 2)
    y = conv(x, w, group=2, strides=(2, 3), pads=(1, 0, 1, 1))
    back = _floats(*y.shape)
    # <conv(x), back> = <x, conv_transpose(back)>, where the sizes are the same
    spread_back = conv_transpose(
        back,
        w,
        group=2,
        strides=(2, 3),
        pads=(1, 0, 1, 1),
        output_shape=None,
        output_padding=(0, 1),
    )
    assert spread_back.shape == x.shape
    np.testing.assert_allclose(np.vdot(y, back), np.vdot(x, spread_back), rtol=1e-5)


def test_sizes_beyond_the_windows_are_zero() -> None:
    x, w = np.ones((1, 1, 2), np.float32), np.ones((1, 1, 1), np.float32)
    found = conv_transpose(x, w, strides=(3,), output_shape=(6,))
    np.testing.assert_array_equal(found, [[[1, 0, 0, 1, 0, 0]]])
    found = conv_transpose(x, w, strides=(3,), auto_pad="SAME_UPPER")
    np.testing.assert_array_equal(found, [[[1, 0, 0, 1, 0, 0]]])


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_types_are_kept(kind: Any) -> None:
    x, w, bias = (_floats(*s).astype(kind) for s in ((1, 4, 5, 6), (4, 4, 3, 3), (4,)))
    wide = [value.astype(np.float64) for value in (x, w, bias)]
    for function in (conv, conv_transpose):
        found, exact = function(x, w, bias), function(*wide)
        # one rounding of the result, after sums in float32
        assert_close(found, exact.astype(kind), rtol=1e-3 if kind == np.float16 else 1e-14)


@pytest.mark.parametrize(
    ("x", "w", "options"),
    [
        ((1, 4, 5, 5), (6, 3, 3, 3), {}),
        ((1, 4, 5, 5), (6, 2, 3, 3), {"group": 4}),
        ((1, 4, 5, 5), (5, 2, 3, 3), {"group": 2}),
        ((1, 4, 5, 5), (6, 4, 3, 3), {"kernel_shape": (3, 2)}),
        ((1, 4, 5, 5), (6, 4, 3, 7), {}),
        ((1, 4, 5, 5), (6, 4, 3), {}),
    ],
)
def test_shapes_that_do_not_fit_are_refused(x: Any, w: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"fit|kernel"):
        conv(_floats(*x), _floats(*w), **options)


def test_transposed_channels_must_fit() -> None:
    windows = place_windows((5,), (3,))
    with pytest.raises(ValueError, match="do not fit"):
        spread(_floats(1, 4, 3), _floats(6, 2, 3), windows)


def test_deformed_windows_have_two_axes() -> None:
    with pytest.raises(ValueError, match="two spatial axes"):
        deform_conv(_floats(1, 4, 5), _floats(4, 4, 3), _floats(1, 6, 3))
