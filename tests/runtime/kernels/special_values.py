"""Values, types and shapes at which element-by-element operators go wrong, and their comparison."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.runtime.kernels.one_node import Array, Inputs, ours, theirs

FLOATS = ("float32", "float64")
WIDE_INTEGERS = ("int32", "int64", "uint32", "uint64")
INTEGERS = (*WIDE_INTEGERS, "int8", "int16", "uint8", "uint16")

BROADCASTS = {
    "equal": ((3, 4), (3, 4)),
    "row": ((2, 3, 4), (4,)),
    "both ways": ((2, 1, 4), (3, 1)),
    "scalar left": ((), (2, 3)),
    "scalar right": ((2, 3), ()),
    "scalars": ((), ()),
    "one element": ((1,), (1, 1)),
    "empty": ((0, 3), (1, 3)),
    "empty and one": ((2, 0), (1,)),
}
"""Shapes of two inputs."""

SHAPES = {"list": (13,), "scalar": (), "empty": (0,), "empty matrix": (2, 0), "cube": (2, 3, 4)}
"""Shapes of one input."""

_SPECIAL = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1, -1, 0.5, -0.5, 2.5, -3.5, 1e-40, -30]


def special(kind: str) -> Array:
    """NaN, infinities, zeros, halves, a subnormal; the ends of an integer type."""
    if kind == "bool":
        return np.array([True, False, True])
    if kind.startswith("float"):
        return np.array(_SPECIAL, np.float64).astype(kind)
    ends = np.iinfo(kind)
    return np.array([0, 1, 2, 3, 7, ends.max, ends.max - 1, ends.min, ends.min + 1], kind)


def values(kind: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Moderate random values of a type; no integer is 0."""
    rng = np.random.default_rng(seed)
    if kind == "bool":
        return np.asarray(rng.integers(0, 2, shape).astype(bool))
    if kind.startswith("float"):
        return np.asarray(rng.normal(0, 2, shape)).astype(kind)
    numbers = rng.integers(1, 11, shape)
    signs = rng.choice([1, -1], shape) if kind.startswith("i") else 1
    return np.asarray(numbers * signs).astype(kind)


def pairs(kind: str) -> tuple[Array, Array]:
    """Every special value with every other."""
    one = special(kind)
    return one[:, None], one[None]


def assert_same(
    op_type: str, inputs: Inputs, *, rtol: float | None = None, atol: float = 0, **node: Any
) -> None:
    """Each element of each output is onnxruntime's; NaN is NaN, and infinity infinity.

    The tolerance is a few units in the last place: formulas differ, types do not.
    """
    for found, expected in zip(
        ours(op_type, inputs, **node), theirs(op_type, inputs, **node), strict=True
    ):
        assert type(found) is np.ndarray
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        if expected.dtype.kind != "f":
            np.testing.assert_array_equal(found, expected)
        else:
            np.testing.assert_allclose(found, expected, rtol=rtol or _rtol(expected), atol=atol)


def _rtol(expected: Array) -> float:
    return {2: 1e-3, 4: 1e-6, 8: 1e-14}[expected.dtype.itemsize]
