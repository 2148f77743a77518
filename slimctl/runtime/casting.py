"""Conversions between element types, by the rules of ONNX's operator Cast."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from slimctl.runtime.registry import Array

_SHORT_INTEGERS = tuple(
    np.dtype(kind) for kind in (ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.uint2)
)
_FLOAT8 = {
    np.dtype(ml_dtypes.float8_e4m3fn): 448.0,
    np.dtype(ml_dtypes.float8_e4m3fnuz): 240.0,
    np.dtype(ml_dtypes.float8_e5m2): 57344.0,
    np.dtype(ml_dtypes.float8_e5m2fnuz): 57344.0,
}
"""With their largest values."""
_POWER_OF_TWO = np.dtype(ml_dtypes.float8_e8m0fnu)
_BIAS = 127  # of the exponents that float8e8m0 consists of
_FOREIGN_FLOATS = (
    *_FLOAT8,
    _POWER_OF_TWO,
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(ml_dtypes.float4_e2m1fn),
    np.dtype(ml_dtypes.float6_e2m3fn),
    np.dtype(ml_dtypes.float6_e3m2fn),
)
_TEXT = np.dtype(object)


def element_type(number: int) -> np.dtype[Any]:
    """The numpy type of a number of ONNX's DataType; strings are objects."""
    return np.dtype(ir.DataType(number).numpy())


def is_text(x: Array) -> bool:
    """Whether an array holds strings: str as numpy objects, or bytes as an initializer has them."""
    return x.dtype.kind in "OSU"


def as_text(x: Array) -> Array:
    """Strings as str in an array of objects."""
    texts = [s.decode() if isinstance(s, bytes) else str(s) for s in x.reshape(-1).tolist()]
    return np.array(texts, _TEXT).reshape(x.shape)


def converted(
    x: Array, kind: np.dtype[Any], *, saturate: bool = True, round_mode: str = "up"
) -> Array:
    """The elements in another type.

    Args:
        x: Any shape.
        kind: The type; objects stand for strings.
        saturate: What is too large for a float of 8 bits becomes its largest value.
        round_mode: Toward which power of two float8e8m0 rounds: up, down or nearest.
    """
    if is_text(x):
        return as_text(x) if kind == _TEXT else _from_text(as_text(x), kind, saturate, round_mode)
    if kind == _TEXT:
        return _to_text(x)
    return x if x.dtype == kind else _converted_number(x, kind, saturate, round_mode)


def _converted_number(x: Array, kind: np.dtype[Any], saturate: bool, round_mode: str) -> Array:
    x = _native(x)
    if kind == _POWER_OF_TWO:
        return _power_of_two(x, saturate, round_mode)
    if kind in _FLOAT8 and saturate:
        return _saturated(x, kind)
    if kind in _SHORT_INTEGERS and x.dtype.kind == "f":
        x = _rounded(x)
    # Out of range, integers lose their high bits. Floats become integers as C++ does it in
    # onnxruntime: what ONNX leaves undefined is then the same in both.
    return x.astype(kind)


def _native(x: Array) -> Array:
    """A type that numpy itself has: those of ml_dtypes do not convert to each other."""
    if x.dtype in _SHORT_INTEGERS:
        return x.astype(np.int8)
    return x.astype(np.float32) if x.dtype in _FOREIGN_FLOATS else x


def _saturated(x: Array, kind: np.dtype[Any]) -> Array:
    largest = _FLOAT8[kind]
    x = x if x.dtype.kind == "f" else x.astype(np.float32)
    return np.asarray(np.clip(x, -largest, largest).astype(kind))


def _rounded(x: Array) -> Array:
    """Halves away from zero: so onnxruntime makes 4 and 2 bits of floats, others it truncates."""
    whole = np.trunc(x)
    whole += np.copysign(np.abs(x - whole) >= 0.5, x)
    return whole.astype(np.int64)


def _power_of_two(x: Array, saturate: bool, round_mode: str) -> Array:
    """The exponent of a power of two; negative values count as too small, as in onnxruntime.

    | value             | saturate | otherwise |
    | ----------------- | -------- | --------- |
    | NaN               | NaN      | NaN       |
    | 0, below 2**-127  | 2**-127  | NaN       |
    | above 2**127, inf | 2**127   | NaN       |
    """
    # x = fraction * 2**exponent with a fraction in [0.5, 1)
    fraction, exponent = np.frexp(x if x.dtype.kind == "f" else x.astype(np.float64))
    if round_mode == "up":
        up = fraction > 0.5
    elif round_mode == "nearest":
        up = fraction >= 0.75
    elif round_mode == "down":
        up = np.zeros_like(fraction, bool)
    else:
        raise ValueError(f"there is no rounding mode '{round_mode}'")
    code = exponent.astype(np.int32) - 1 + up + _BIAS
    code = np.where(x <= 0, -1, np.where(np.isinf(x), 2 * _BIAS + 1, code))
    inside = (code >= 0) & (code <= 2 * _BIAS)
    nan = np.isnan(x) if saturate else np.isnan(x) | ~inside
    code = np.where(nan, 0xFF, np.clip(code, 0, 2 * _BIAS))
    return code.astype(np.uint8).view(_POWER_OF_TWO)


def _to_text(x: Array) -> Array:
    """Numbers in onnxruntime's spelling: eight digits, booleans as 1 and 0, INF, -INF and NaN."""
    numbers = _native(x)
    spelled = _spelled_float if numbers.dtype.kind == "f" else _spelled_integer
    return np.array([spelled(v) for v in numbers.reshape(-1).tolist()], _TEXT).reshape(x.shape)


def _spelled_float(value: float) -> str:
    text = f"{value:.8g}"
    return {"inf": "INF", "-inf": "-INF", "nan": "NaN"}.get(text, text)


def _spelled_integer(value: int) -> str:
    return str(int(value))


def _from_text(x: Array, kind: np.dtype[Any], saturate: bool, round_mode: str) -> Array:
    """The numbers that strings spell; integers are read exactly, and wrap around."""
    texts = x.reshape(-1).tolist()
    if kind == np.bool_:
        return np.array([_read_integer(text) != 0 for text in texts], bool).reshape(x.shape)
    if kind.kind in "iu" or kind in _SHORT_INTEGERS:
        codes = [_read_integer(text) % 2**64 for text in texts]
        return _wrapped(np.array(codes, np.uint64), kind).reshape(x.shape)
    values = np.array([_read_float(text) for text in texts], np.float64).reshape(x.shape)
    return converted(values, kind, saturate=saturate, round_mode=round_mode)


def _wrapped(codes: Array, kind: np.dtype[Any]) -> Array:
    """The low bits of integers."""
    return codes.astype(kind) if kind.kind in "iu" else codes.astype(np.int8).astype(kind)


def _read_float(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"'{text}' is not a number") from error


def _read_integer(text: str) -> int:
    """Decimal fractions are cut off: int(float(text)) would lose digits of large integers."""
    try:
        return int(Decimal(text.strip()))
    except (InvalidOperation, OverflowError, ValueError) as error:
        raise ValueError(f"'{text}' is not an integer") from error
