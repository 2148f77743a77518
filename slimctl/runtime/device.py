"""How processors add products of 8-bit integers, where that differs from exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slimctl.core.cpu import products_saturate
from slimctl.core.errors import OptionError, nearest
from slimctl.numerics.integer import Round, half_away

Codes: TypeAlias = NDArray[Any]
Matrix: TypeAlias = NDArray[np.float64]

Sums: TypeAlias = Callable[[Codes, Codes, int, int], Matrix]
"""From left codes [m, terms], right codes [terms, n] and the zero points of both to [m, n]."""

_LOW, _HIGH = -32768, 32767
_BLOCK = 1 << 22  # elements of a temporary array


def paired_sums(a: Codes, b: Codes, a_zero: int, b_zero: int) -> Matrix:
    """Products of unsigned and signed bytes are added in pairs that saturate at 16 bits.

    This is ``vpmaddubsw`` (Intel 64 and IA-32 Architectures Software Developer's Manual,
    PMADDUBSW), which onnxruntime's matrix kernels for AVX2 and AVX-512 without VNNI use.
    Neighbors along the reduction form a pair. The zero points are accounted for afterwards from the
    sums of rows and columns.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)  # exact, and faster than integers
    terms = a.shape[1]
    if terms % 2:
        a, b = np.pad(a, ((0, 0), (0, 1))), np.pad(b, ((0, 1), (0, 0)))
    total = a @ b
    high = a.max(axis=0, initial=0)  # [terms]
    # Only pairs whose weights are large enough can saturate: most never do.
    reach = high[0::2, None] * np.abs(b[0::2]) + high[1::2, None] * np.abs(b[1::2])  # [pairs, n]
    for pair in np.flatnonzero((reach > _HIGH).any(axis=1)):
        columns = np.flatnonzero(reach[pair] > _HIGH)
        sums = a[:, 2 * pair : 2 * pair + 2] @ b[2 * pair : 2 * pair + 2, columns]  # [m, columns]
        total[:, columns] += np.clip(sums, _LOW, _HIGH) - sums
    row_sums, column_sums = a.sum(axis=1, keepdims=True), b.sum(axis=0, keepdims=True)
    total += terms * a_zero * b_zero - a_zero * column_sums - b_zero * row_sums
    return np.asarray(total)


def narrow_sums(a: Codes, b: Codes, a_zero: int, b_zero: int) -> Matrix:
    """The running sum saturates at 16 bits after each product, in the order of the reduction."""
    left, right = a.astype(np.float64) - a_zero, b.astype(np.float64) - b_zero
    total = left @ right  # exact: below 2^53
    # A sum whose magnitudes add up to less cannot have left the range on the way.
    rows, columns = np.nonzero(np.abs(left) @ np.abs(right) > _HIGH)
    step = max(_BLOCK // max(a.shape[1], 1), 1)
    for start in range(0, rows.size, step):
        r, c = rows[start : start + step], columns[start : start + step]
        running = np.zeros(r.size)
        for term in range(a.shape[1]):
            running += left[r, term] * right[term, c]
            np.clip(running, _LOW, _HIGH, out=running)
        total[r, c] = running
    return np.asarray(total)


def unshifted_sums(a: Codes, b: Codes, a_zero: int, b_zero: int) -> Matrix:
    """Zero points are ignored: the hardware knows symmetric types alone."""
    del a_zero, b_zero
    return np.asarray(a.astype(np.float64) @ b.astype(np.float64))  # exact below 2^53


@dataclass(frozen=True)
class Device:
    """An arithmetic.

    Attributes:
        name: By which it is asked for.
        summary: What it does, in a line.
        sums: How products are added; None for exact sums.
        rounding: How real values become codes.
        zero_points: Whether the output's zero point is added.
        only_mixed: Products are exact unless unsigned codes meet signed weights.
        direct_depthwise: Depthwise convolutions do not pass through the matrix kernel.
    """

    name: str
    summary: str
    sums: Sums | None = None
    rounding: Round = np.rint
    zero_points: bool = True
    only_mixed: bool = False
    direct_depthwise: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether it computes what exact arithmetic does."""
        return self.sums is None and self.rounding is np.rint


EXACT = Device("x86-vnni", "exact int32 sums, ties to even (also ARM with dot product)")

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        EXACT,
        Device(
            "x86-avx2",
            "pairs of uint8 x int8 products saturate at 16 bits",
            paired_sums,
            only_mixed=True,
            direct_depthwise=True,  # onnxruntime adds their products in 32 bits
        ),
        Device("int16-accumulator", "running sums saturate at 16 bits", narrow_sums),
        Device(
            "symmetric-only",
            "zero points of inputs, weights and outputs are ignored",
            unshifted_sums,
            zero_points=False,
        ),
        Device("half-away", "ties are rounded away from zero", rounding=half_away),
    )
}


def find_device(name: str) -> Device:
    """A device by name.

    Raises:
        OptionError: There is none of this name; the error names the nearest.
    """
    if name not in DEVICES:
        raise OptionError("--device", f"Unknown device '{name}'", fix=nearest(name, list(DEVICES)))
    return DEVICES[name]


def host_device() -> Device:
    """The arithmetic of onnxruntime's integer kernels on this processor.

    Where nothing is known about the processor, that is exact arithmetic: all but x86 processors
    without VNNI have it.
    """
    return DEVICES["x86-avx2"] if products_saturate() else EXACT
