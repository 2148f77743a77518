"""Dropout outside of training, in all forms."""

from __future__ import annotations

import numpy as np
import pytest

from slimctl.core.errors import ModelExecutionError
from slimctl.runtime.kernels.dropout import dropout_7
from tests.runtime.kernels.one_node import ours
from tests.runtime.kernels.special_values import assert_same, values

X = values("float32", (2, 3))


@pytest.mark.parametrize("opset", [7, 10, 12, 13, 22])
def test_drops_nothing(opset: int) -> None:
    assert_same("Dropout", [X], opset=opset)
    (found,) = ours("Dropout", [X], opset=opset)
    np.testing.assert_array_equal(found, X, strict=True)


@pytest.mark.parametrize("opset", [12, 13, 22])
def test_the_mask_is_of_booleans(opset: int) -> None:
    assert_same("Dropout", [X], opset=opset, outputs=2)


def test_the_mask_of_operator_set_10() -> None:
    # ONNX's reference says true, onnxruntime says false
    (_, mask) = ours("Dropout", [X], opset=10, outputs=2)
    np.testing.assert_array_equal(mask, np.ones((2, 3), bool), strict=True)


def test_the_mask_of_operator_set_7_has_the_type_of_the_data() -> None:
    _, mask = dropout_7(X, outputs=2)
    np.testing.assert_array_equal(mask, np.ones_like(X), strict=True)


@pytest.mark.parametrize("ratio", [None, 0.0, 0.5])
def test_a_ratio_means_nothing_outside_of_training(ratio: float | None) -> None:
    given = None if ratio is None else np.array(ratio, np.float32)
    for inputs in ([X, given], [X, given, np.array(False)]):
        assert_same("Dropout", inputs, opset=13, outputs=2)


def test_training_that_drops_nothing() -> None:
    assert_same("Dropout", [X, np.array(0, np.float32), np.array(True)], opset=13, outputs=2)


@pytest.mark.parametrize("ratio", [None, np.array(0.25, np.float32)])
def test_training_is_random(ratio: np.ndarray | None) -> None:
    with pytest.raises(ModelExecutionError, match="training is random"):
        ours("Dropout", [X, ratio, np.array(True)], opset=13)
