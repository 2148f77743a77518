from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from slimctl.runtime.kernels.normalization import (
    batch_normalization,
    layer_normalization,
    lp_normalization,
    lrn,
    rms_normalization,
)
from tests.runtime.kernels.one_node import assert_agrees, assert_close

_RNG = np.random.default_rng(14)


def _floats(*shape: int, kind: Any = np.float32) -> np.ndarray:
    return _RNG.standard_normal(shape).astype(kind)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 4, 5)])
@pytest.mark.parametrize("opset", [9, 14, 15])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_batch_normalization_as_onnxruntime(shape: tuple[int, ...], opset: int, kind: Any) -> None:
    channels = [_floats(3, kind=kind) for _ in range(3)]
    inputs = [_floats(*shape, kind=kind), *channels, np.abs(_floats(3, kind=kind))]
    assert_agrees("BatchNormalization", inputs, opset=opset, epsilon=1e-3)


@pytest.mark.parametrize("opset", [14, 15])
def test_batch_normalization_in_training_as_onnxruntime(opset: int) -> None:
    inputs = [_floats(4, 3, 5), *(_floats(3) for _ in range(3)), np.abs(_floats(3))]
    node = {"opset": opset, "training_mode": 1, "momentum": 0.8}
    assert_agrees("BatchNormalization", inputs, outputs=3, **node)


def test_batch_normalization_keeps_the_type_of_its_input() -> None:
    x = _floats(2, 3, 4, kind=np.float16)
    found = batch_normalization(x, *(np.ones(3, np.float32) for _ in range(4)))
    assert found.dtype == np.float16


@pytest.mark.parametrize("shape", [(2, 6, 4), (2, 6, 4, 5)])
def test_normalizations_of_images_as_onnxruntime(shape: tuple[int, ...]) -> None:
    x = _floats(*shape)
    assert_agrees("InstanceNormalization", [x, _floats(6), _floats(6)], opset=9, epsilon=1e-2)
    by_group = [x, _floats(3), _floats(3)]
    assert_agrees("GroupNormalization", by_group, opset=18, num_groups=3, epsilon=1e-2)
    by_channel = [x, _floats(6), _floats(6)]
    assert_agrees("GroupNormalization", by_channel, opset=21, num_groups=3, epsilon=1e-2)


@pytest.mark.parametrize("axis", [-1, 1, 2, -2])
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16])
def test_layer_normalization_as_onnxruntime(axis: int, kind: Any) -> None:
    x = _floats(2, 3, 4, 5, kind=kind)
    scale, bias = (_floats(*x.shape[axis:], kind=kind) for _ in range(2))
    # half a unit in the last place of float16, where float32 sums differ
    rtol = 1e-3 if kind == np.float16 else 1e-5
    assert_agrees("LayerNormalization", [x, scale, bias], opset=17, axis=axis, outputs=3, rtol=rtol)
    assert_agrees("LayerNormalization", [x, scale], opset=17, axis=axis, rtol=rtol)
    assert_agrees("RMSNormalization", [x, scale], opset=23, axis=axis, rtol=rtol)


def test_layer_normalization_of_large_values_is_accurate() -> None:
    x = 1000 + _floats(4, 512)
    wide = x.astype(np.float64)
    exact = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    found, _, _ = layer_normalization(x, np.ones(512, np.float32))
    # the mean is a float32: its error is half a unit in the last place of 1000
    np.testing.assert_allclose(found, exact, atol=1e-4)


def test_stash_types_and_types_of_results() -> None:
    x, scale = _floats(2, 8, kind=ml_dtypes.bfloat16), np.ones(8, ml_dtypes.bfloat16)
    found = layer_normalization(x, scale, stash_type=1)
    assert [value.dtype for value in found] == [x.dtype, np.float32, np.float32]
    found = layer_normalization(x, scale, stash_type=16)
    assert {value.dtype for value in found} == {x.dtype}
    # the result of RMSNormalization has the type of the scale
    assert rms_normalization(x, scale.astype(np.float32)).dtype == np.float32
    assert rms_normalization(x.astype(np.float32), scale).dtype == x.dtype


@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_lrn_as_onnxruntime(size: int) -> None:
    node: dict[str, Any] = {"size": size, "alpha": 0.1, "beta": 0.6, "bias": 1.5}
    for opset in (9, 13):
        assert_agrees("LRN", [_floats(2, 5, 3, 4)], opset=opset, **node)


def test_lrn_of_an_even_size_has_more_channels_after() -> None:
    # onnxruntime takes odd sizes only
    x = np.array([[1.0, 2.0, 3.0]], np.float32)
    found = lrn(x, size=2, alpha=2.0, beta=1.0, bias=0.0)
    np.testing.assert_allclose(found, [[1 / 5, 2 / 13, 3 / 9]], rtol=1e-6)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_lp_normalization_as_onnxruntime(p: int, axis: int) -> None:
    assert_agrees("LpNormalization", [_floats(3, 4, 5)], opset=9, p=p, axis=axis)


def test_lp_normalization_of_nothing_is_0() -> None:
    x = np.array([[0, 0], [3, 4]], np.float32)
    np.testing.assert_allclose(lp_normalization(x), [[0, 0], [0.6, 0.8]], rtol=1e-6)


@pytest.mark.parametrize("opset", [9, 13])
def test_mean_variance_normalization_as_onnxruntime(opset: int) -> None:
    x = _floats(2, 3, 4, 5)
    assert_agrees("MeanVarianceNormalization", [x], opset=opset)
    assert_agrees("MeanVarianceNormalization", [x], opset=opset, axes=[1, 2])


def test_batch_normalization_is_accurate() -> None:
    x, scale, bias, mean = _floats(2, 3, 50), _floats(3), _floats(3), _floats(3)
    variance = np.abs(_floats(3)) + 0.1
    wide = [value.astype(np.float64) for value in (x, scale, bias, mean, variance)]
    deviation = np.sqrt(wide[4] + 1e-5)
    exact = (wide[0] - wide[3][:, None]) * (wide[1] / deviation)[:, None] + wide[2][:, None]
    found = batch_normalization(x, scale, bias, mean, variance)
    assert_close(found.astype(np.float64), exact, rtol=3e-7)
