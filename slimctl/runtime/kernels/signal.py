"""Fourier transforms; the last axis of a signal is real, or real and imaginary part."""

from __future__ import annotations

import numpy as np

from slimctl.runtime.floats import in_float32
from slimctl.runtime.registry import Array, operator


@operator("DFT", since=17)
@in_float32
def dft_17(
    input: Array,
    dft_length: Array | None = None,
    *,
    axis: int = 1,
    inverse: int = 0,
    onesided: int = 0,
) -> Array:
    """The discrete Fourier transform along an axis."""
    return _dft(input, dft_length, axis, bool(inverse), bool(onesided))


@operator("DFT", since=20)
@in_float32
def dft_20(
    input: Array,
    dft_length: Array | None = None,
    axis: Array | None = None,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> Array:
    """The discrete Fourier transform along an axis, the last of the signal by default."""
    place = -2 if axis is None else int(axis.item())
    return _dft(input, dft_length, place, bool(inverse), bool(onesided))


def _dft(x: Array, dft_length: Array | None, axis: int, inverse: bool, onesided: bool) -> Array:
    axis %= x.ndim
    if axis == x.ndim - 1:
        raise ValueError("the last axis holds real and imaginary parts and is not transformed")
    length = None if dft_length is None else int(dft_length.item())
    signal = _complex(x)
    if inverse and onesided:  # from half a spectrum to a real signal
        return np.fft.irfft(signal, length, axis)[..., None].astype(x.dtype)
    if inverse:
        return _parts(np.fft.ifft(signal, length, axis), x)
    return _parts(_spectrum(signal, length, axis, onesided), x)


def _spectrum(signal: Array, length: int | None, axis: int, onesided: bool) -> Array:
    """The spectrum, or the half that is enough for a real signal."""
    if not onesided:
        return np.fft.fft(signal, length, axis)
    if np.iscomplexobj(signal):
        raise ValueError("a complex signal has no onesided spectrum")
    return np.fft.rfft(signal, length, axis)


def _complex(x: Array) -> Array:
    """[..., 1] stays real, [..., 2] becomes complex."""
    if x.shape[-1] not in (1, 2):
        raise ValueError(f"the last axis must have 1 or 2 elements, not {x.shape[-1]}")
    return x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]


def _parts(x: Array, like: Array) -> Array:
    """[..., 2]: real and imaginary part, of another array's type."""
    return np.stack([x.real, x.imag], axis=-1).astype(like.dtype, copy=False)


@operator("STFT", since=17)
@in_float32
def stft(
    signal: Array,
    frame_step: Array,
    window: Array | None = None,
    frame_length: Array | None = None,
    *,
    onesided: int = 1,
) -> Array:
    """The Fourier transforms of frames that follow each other by a step: [batch, frames, f, 2]."""
    x = signal if signal.ndim == 2 else _complex(signal)  # [batch, time]
    length = _frame_length(x, window, frame_length)
    if length > x.shape[1]:
        raise ValueError(f"a signal of {x.shape[1]} has no frame of {length}")
    frames = np.lib.stride_tricks.sliding_window_view(x, length, axis=1)
    frames = frames[:, :: int(frame_step.item())]  # [batch, frames, length]
    if window is not None:
        frames = frames * window
    return _parts(_spectrum(frames, None, 2, bool(onesided)), signal)


def _frame_length(x: Array, window: Array | None, frame_length: Array | None) -> int:
    if frame_length is None:
        return x.shape[1] if window is None else len(window)
    length = int(frame_length.item())
    if window is not None and len(window) != length:
        raise ValueError(f"a window of {len(window)} does not fit frames of {length}")
    return length
