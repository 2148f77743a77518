from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from slimctl.pipeline.exactness import relative_error, rounding_tolerance, unit


def test_relative_error_is_relative_to_the_largest_value() -> None:
    assert relative_error(np.float32([1, -4]), np.float32([1.5, -4])) == pytest.approx(0.125)


def test_relative_error_of_zeros_is_absolute() -> None:
    assert relative_error(np.zeros(3, np.float32), np.float32([0, 0.25, 0])) == 0.25


@pytest.mark.parametrize(
    ("expected", "found", "error"),
    [
        (np.array([1, 2, 3, 4]), np.array([1, 2, 0, 4]), 0.25),
        (np.array([True, False]), np.array([True, False]), 0.0),
        (np.zeros((2, 0), np.float32), np.zeros((2, 0), np.float32), 0.0),
        (np.zeros((2, 1), np.float32), np.zeros((1, 2), np.float32), math.inf),
        (np.float32([np.nan, 2]), np.float32([7, 2]), 0.0),
        (np.float32([np.nan]), np.float32([7]), 0.0),
        (["a"], ["b"], math.inf),
        ([1], [1], 0.0),
    ],
)
def test_relative_error_of_other_outputs(expected: object, found: object, error: float) -> None:
    assert relative_error(expected, found) == error


def test_relative_error_knows_bfloat16() -> None:
    wide = np.array([1.0, 2.0], ml_dtypes.bfloat16)
    assert relative_error(wide, wide + np.array([0.0, 0.5], ml_dtypes.bfloat16)) == 0.25


def model_of(dtype: ir.DataType, nodes: int) -> ir.Model:
    value = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape([1]))
    chain, last = [], value
    for _ in range(nodes):
        chain.append(ir.node("Neg", [last]))
        last = chain[-1].outputs[0]
    graph = ir.Graph([value], [last], nodes=chain, opset_imports={"": 17}, name="g")
    return ir.Model(graph, ir_version=8)


def test_tolerance_grows_with_the_root_of_the_number_of_nodes() -> None:
    one = rounding_tolerance(model_of(ir.DataType.FLOAT, 1))
    assert one == pytest.approx(32 * np.finfo(np.float32).eps)
    assert rounding_tolerance(model_of(ir.DataType.FLOAT, 16)) == pytest.approx(4 * one)


@pytest.mark.parametrize(
    ("dtype", "eps"),
    [
        (ir.DataType.FLOAT, np.finfo(np.float32).eps),
        (ir.DataType.FLOAT16, np.finfo(np.float16).eps),
        (ir.DataType.BFLOAT16, ml_dtypes.finfo(ml_dtypes.bfloat16).eps),
    ],
)
def test_the_unit_is_that_of_the_type(dtype: ir.DataType, eps: float) -> None:
    assert unit(model_of(dtype, 1)) == float(eps)


def test_a_few_units_of_one_never_count() -> None:
    # A saturated Sigmoid gives 3e-8 here and 6e-8 there; that is what it can resolve.
    eps = float(np.finfo(np.float32).eps)
    assert relative_error(np.float32([3e-8]), np.float32([6e-8]), eps) == 0.0
    assert relative_error(np.float32([0.5]), np.float32([0.5 + 8 * eps]), eps) == pytest.approx(
        8 * eps, rel=1e-3
    )
