"""Affine quantization against onnxruntime and hand computation."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from slimctl.numerics.affine import (
    INT8,
    INT8_NARROW,
    UINT8,
    QuantizedType,
    affine_from_range,
    dequantize,
    fake_quantize,
    quantize,
    symmetric_scales,
)

KINDS = [
    pytest.param(UINT8, TensorProto.UINT8, id="uint8"),
    pytest.param(INT8, TensorProto.INT8, id="int8"),
]
finite = st.floats(-(2.0**100), 2.0**100, width=32)


def _ort_quantize(
    x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, kind: int
) -> np.ndarray:
    graph = helper.make_graph(
        [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"])],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [None]),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, []),
            helper.make_tensor_value_info("z", kind, []),
        ],
        [helper.make_tensor_value_info("y", kind, [None])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x, "s": scale, "z": zero_point})[0]


@pytest.mark.parametrize(("kind", "onnx_type"), KINDS)
@pytest.mark.parametrize("zero_point", [0, 1, 3, 101])
def test_ties_round_to_even_before_the_zero_point_is_added(
    kind: QuantizedType, onnx_type: int, zero_point: int
) -> None:
    scale = np.asarray(0.25, np.float32)  # exact, so that x / scale has exact ties
    x = (np.arange(-60, 60) + 0.5).astype(np.float32) * scale
    zero = np.asarray(zero_point, kind.dtype)
    ours = quantize(x, scale, zero, kind)
    np.testing.assert_array_equal(ours, _ort_quantize(x, scale, zero, onnx_type))
    # By hand: 0.5 -> 0, 1.5 -> 2, then the zero point.
    hand = quantize(np.float32([0.125, 0.375]), scale, zero, kind)
    assert hand.tolist() == [zero_point, zero_point + 2]


@pytest.mark.parametrize(("kind", "onnx_type"), KINDS)
def test_random_values_equal_onnxruntime(kind: QuantizedType, onnx_type: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        x = rng.normal(0, 10.0 ** rng.uniform(-6, 6), 5000).astype(np.float32)
        affine = affine_from_range(
            float(x.min()) * 0.7, float(x.max()) * 0.7, kind, symmetric=False
        )
        np.testing.assert_array_equal(
            quantize(x, affine.scale, affine.zero_point, kind),
            _ort_quantize(x, affine.scale, affine.zero_point, onnx_type),
        )


@given(low=finite, high=finite, symmetric=st.booleans(), kind=st.sampled_from([UINT8, INT8]))
def test_every_range_gives_a_usable_scale_and_an_exact_zero(
    low: float, high: float, symmetric: bool, kind: QuantizedType
) -> None:
    affine = affine_from_range(min(low, high), max(low, high), kind, symmetric=symmetric)
    assert np.isfinite(affine.scale) and affine.scale > 0
    assert kind.low <= int(affine.zero_point) <= kind.high
    zero = fake_quantize(np.zeros(1, np.float32), affine)
    assert zero[0] == 0.0


@given(low=st.floats(-1e6, 0, width=32), high=st.floats(0, 1e6, width=32))
def test_values_inside_the_range_are_off_by_at_most_half_a_step(low: float, high: float) -> None:
    affine = affine_from_range(low, high, UINT8, symmetric=False)
    x = np.linspace(low, high, 257, dtype=np.float32)
    # The zero point is rounded, which shifts the ends by up to half a step on top.
    error = np.abs(fake_quantize(x, affine).astype(np.float64) - x)
    assert error.max() <= float(affine.scale) * 1.0001


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 0.0), (1e-45, 1e-45), (0.0, 1e-44), (-1e-40, 0.0), (-0.0, 0.0)]
)
def test_constant_zero_and_subnormal_ranges_count_as_one(low: float, high: float) -> None:
    assert affine_from_range(low, high, UINT8, symmetric=False).scale == np.float32(1 / 255)
    assert affine_from_range(low, high, INT8, symmetric=True).scale == np.float32(1 / 127)


def test_constant_positive_range_starts_at_zero() -> None:
    affine = affine_from_range(5.0, 5.0, UINT8, symmetric=False)
    assert int(affine.zero_point) == 0
    assert affine.scale == pytest.approx(5.0 / 255)


def test_range_wider_than_float32_does_not_overflow() -> None:
    largest = float(np.finfo(np.float32).max)
    affine = affine_from_range(-largest, largest, UINT8, symmetric=False)
    assert np.isfinite(affine.scale) and affine.scale == pytest.approx(2 * largest / 255)


def test_symmetric_has_its_zero_point_in_the_middle() -> None:
    signed = affine_from_range(-1.0, 3.0, INT8, symmetric=True)
    unsigned = affine_from_range(-1.0, 3.0, UINT8, symmetric=True)
    assert (int(signed.zero_point), int(unsigned.zero_point)) == (0, 128)
    assert signed.scale == unsigned.scale == pytest.approx(3.0 / 127)


def test_weight_scales_by_hand() -> None:
    weight = np.float32([[1.27, -0.5], [0.0, 0.0], [-2.54, 2.0]])
    np.testing.assert_allclose(
        symmetric_scales(weight, 0, INT8_NARROW), [0.01, 0.02, 0.02], rtol=1e-6
    )
    np.testing.assert_allclose(
        symmetric_scales(weight, 1, INT8_NARROW), [0.02, 2.0 / 127], rtol=1e-6
    )
    assert symmetric_scales(weight, None, INT8_NARROW).shape == ()
    np.testing.assert_array_equal(symmetric_scales(0 * weight, 0, INT8_NARROW), [1.0, 1.0, 1.0])


def test_channels_broadcast_along_their_axis() -> None:
    x = np.ones((2, 3, 2), np.float32)
    scale = np.float32([1.0, 0.5, 0.25])
    q = quantize(x, scale, np.zeros(3, np.int8), INT8, axis=1)
    assert q[0, :, 0].tolist() == [1, 2, 4]
    np.testing.assert_array_equal(dequantize(q, scale, np.zeros(3, np.int8), axis=1), x)


def test_dequantize_equals_onnx() -> None:
    q = np.arange(-128, 128).astype(np.int8)
    graph = helper.make_graph(
        [helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"])],
        "g",
        [
            helper.make_tensor_value_info("q", TensorProto.INT8, [256]),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, []),
            helper.make_tensor_value_info("z", TensorProto.INT8, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [256])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    scale, zero = np.asarray(0.037, np.float32), np.asarray(-11, np.int8)
    expected = session.run(None, {"q": q, "s": scale, "z": zero})[0]
    np.testing.assert_array_equal(dequantize(q, scale, zero), expected)
