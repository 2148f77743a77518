"""Bits of integers."""

from __future__ import annotations

import numpy as np
import pytest

from slimctl.core.errors import ModelExecutionError
from tests.runtime.kernels.one_node import ours
from tests.runtime.kernels.special_values import BROADCASTS, INTEGERS, assert_same, pairs, values

UNSIGNED = [kind for kind in INTEGERS if kind.startswith("u")]


@pytest.mark.parametrize("op_type", ["BitwiseAnd", "BitwiseOr", "BitwiseXor"])
@pytest.mark.parametrize("kind", INTEGERS)
def test_two_integers(op_type: str, kind: str) -> None:
    assert_same(op_type, [*pairs(kind)], opset=18)
    for left, right in BROADCASTS.values():
        assert_same(op_type, [values(kind, left), values(kind, right, seed=1)], opset=18)


@pytest.mark.parametrize("kind", INTEGERS)
def test_complement(kind: str) -> None:
    for x in (pairs(kind)[0], values(kind, ()), values(kind, (0, 2))):
        assert_same("BitwiseNot", [x], opset=18)


@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
@pytest.mark.parametrize("kind", ["uint8", "uint32", "uint64"])
def test_shifts_of_unsigned_integers(direction: str, kind: str) -> None:
    assert_same("BitShift", [*pairs(kind)], opset=11, direction=direction)
    for left, right in BROADCASTS.values():
        inputs = [values(kind, left), values(kind, right, seed=1)]
        assert_same("BitShift", inputs, opset=11, direction=direction)


def test_shifts_of_signed_integers_keep_the_sign() -> None:
    x = np.array([-4, -4, 4, 4, -4, 4, -128], np.int8)
    y = np.array([1, 7, 1, -1, 8, 100, 1], np.int8)
    (right,) = ours("BitShift", [x, y], opset=28, direction="RIGHT")
    np.testing.assert_array_equal(right, np.array([-2, -1, 2, 0, -1, 0, -64], np.int8), strict=True)
    (left,) = ours("BitShift", [x, y], opset=28, direction="LEFT")
    np.testing.assert_array_equal(left, np.array([-8, 0, 8, 0, 0, 0, 0], np.int8), strict=True)


def test_knows_its_directions() -> None:
    one = np.array([1], np.uint8)
    with pytest.raises(ModelExecutionError, match="no direction 'UP'"):
        ours("BitShift", [one, one], opset=11, direction="UP")
