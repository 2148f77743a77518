"""Fourier transforms, against onnxruntime and against sums in float64."""

from __future__ import annotations

import numpy as np
import pytest

from slimctl.core.errors import ModelExecutionError
from tests.runtime.kernels.one_node import Array, assert_agrees, assert_close, ours

_RANDOM = np.random.default_rng(0)


def _normal(*shape: int) -> Array:
    return _RANDOM.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("length", [None, 4, 9, 16])
@pytest.mark.parametrize(
    ("inverse", "onesided", "parts"), [(0, 0, 1), (0, 0, 2), (0, 1, 1), (1, 0, 1), (1, 0, 2)]
)
def test_dft(inverse: int, onesided: int, parts: int, length: int | None) -> None:
    x = _normal(2, 9, 3, parts)
    given = None if length is None else np.array(length, np.int64)
    node = {"inverse": inverse, "onesided": onesided}
    old = [x] if given is None else [x, given]
    assert_agrees("DFT", old, opset=17, axis=1, **node)
    assert_agrees("DFT", [x, given, np.array(-3, np.int64)], opset=20, **node)


@pytest.mark.parametrize("inverse", [0, 1])
def test_dft_is_the_sum_that_defines_it(inverse: int) -> None:
    x = _normal(3, 7, 2)
    signal = x[..., 0].astype(np.float64) + 1j * x[..., 1]
    sign = 1 if inverse else -1
    wave = np.exp(sign * 2j * np.pi * np.outer(np.arange(7), np.arange(7)) / 7)
    spectrum = signal @ wave / (7 if inverse else 1)
    expected = np.stack([spectrum.real, spectrum.imag], axis=-1).astype(np.float32)
    assert_close(ours("DFT", [x], opset=20, inverse=inverse)[0], expected)


@pytest.mark.parametrize("length", [8, 9])
def test_half_a_spectrum_becomes_the_signal_again(length: int) -> None:
    x = _normal(2, length, 1)
    half = ours("DFT", [x], opset=20, onesided=1)[0]
    assert half.shape == (2, length // 2 + 1, 2)
    count = np.array(length, np.int64)
    back = ours("DFT", [half, count], opset=20, onesided=1, inverse=1)[0]
    assert_close(back, x)


def test_dft_keeps_float64_and_narrow_floats() -> None:
    x = _normal(1, 5, 1)
    assert ours("DFT", [x.astype(np.float64)], opset=20)[0].dtype == np.float64
    found = ours("DFT", [x.astype(np.float16)], opset=20)[0]
    wide = ours("DFT", [x.astype(np.float16).astype(np.float32)], opset=20)[0]
    np.testing.assert_array_equal(found, wide.astype(np.float16))


def test_dft_refuses_what_are_no_parts() -> None:
    with pytest.raises(ModelExecutionError, match="is not transformed"):
        ours("DFT", [_normal(1, 5, 2), None, np.array(-1, np.int64)], opset=20)
    with pytest.raises(ModelExecutionError, match="1 or 2 elements, not 3"):
        ours("DFT", [_normal(1, 5, 3)], opset=20)


def test_a_complex_signal_has_no_half_a_spectrum() -> None:
    with pytest.raises(ModelExecutionError, match="has no onesided spectrum"):
        ours("DFT", [_normal(1, 5, 2)], opset=20, onesided=1)
    with pytest.raises(ModelExecutionError, match="has no onesided spectrum"):
        ours("STFT", [_normal(1, 5, 2), np.array(1, np.int64), _normal(3)], opset=17)


@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize(("window", "length"), [(8, None), (None, 8), (8, 8)])
@pytest.mark.parametrize("shape", [(2, 33, 1), (2, 33)])
def test_stft(
    shape: tuple[int, ...], window: int | None, length: int | None, onesided: int
) -> None:
    inputs = [
        _normal(*shape),
        np.array(5, np.int64),
        None if window is None else _RANDOM.uniform(0, 1, window).astype(np.float32),
        None if length is None else np.array(length, np.int64),
    ]
    while inputs[-1] is None:
        inputs.pop()
    assert_agrees("STFT", inputs, opset=17, onesided=onesided)


def test_stft_of_a_complex_signal() -> None:
    inputs = [_normal(2, 33, 2), np.array(5, np.int64), _normal(8)]
    assert_agrees("STFT", inputs, opset=17, onesided=0)


def test_stft_refuses_frames_that_do_not_fit() -> None:
    signal, step = _normal(1, 6, 1), np.array(2, np.int64)
    with pytest.raises(ModelExecutionError, match="a signal of 6 has no frame of 8"):
        ours("STFT", [signal, step, _normal(8)], opset=17)
    with pytest.raises(ModelExecutionError, match="a window of 4 does not fit frames of 5"):
        ours("STFT", [signal, step, _normal(4), np.array(5, np.int64)], opset=17)
