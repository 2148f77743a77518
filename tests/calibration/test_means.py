"""Means of what weights see, against runs of the layer in onnxruntime with one-hot weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from slimctl.calibration.means import MeanAccumulator
from slimctl.core.contract import LinearInput

FIRST, SECOND = np.array([0]), np.array([1])  # hashes of a sample in one half and the other

# Geometry of a layer: operator, input shape, kernel and attributes.
GEOMETRIES: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ("Conv", (2, 3, 6, 7), (3, 3), {}),
    "padded": ("Conv", (2, 3, 6, 7), (3, 3), {"pads": [1, 2, 0, 1]}),
    "strided": ("Conv", (2, 3, 9, 8), (3, 2), {"strides": [2, 3], "pads": [1, 0, 1, 1]}),
    "dilated": ("Conv", (2, 3, 9, 9), (3, 3), {"dilations": [2, 3], "pads": [2, 2, 1, 3]}),
    "pointwise": ("Conv", (2, 3, 5, 5), (1, 1), {}),
    "pointwise_strided": ("Conv", (2, 3, 5, 6), (1, 1), {"strides": [2, 2]}),
    "one_dimension": ("Conv", (2, 3, 12), (4,), {"strides": [2], "pads": [1, 2]}),
    "three_dimensions": ("Conv", (1, 2, 4, 5, 4), (2, 3, 2), {"pads": [1, 0, 1, 0, 1, 0]}),
    "same_upper": ("Conv", (2, 3, 7, 8), (3, 4), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "same_lower": ("Conv", (2, 3, 7, 8), (3, 4), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    "valid": ("Conv", (2, 3, 7, 8), (3, 4), {"auto_pad": "VALID", "strides": [2, 1]}),
    "transposed": ("ConvTranspose", (2, 3, 5, 6), (3, 3), {"strides": [2, 2]}),
    "transposed_padded": (
        "ConvTranspose",
        (2, 3, 5, 6),
        (4, 3),
        {"strides": [2, 2], "pads": [1, 1, 0, 1], "output_padding": [1, 0]},
    ),
    "transposed_dilated": ("ConvTranspose", (1, 3, 5, 4), (3, 2), {"dilations": [2, 2]}),
}


def _layer(name: str) -> LinearInput:
    operator, _, kernel, attributes = GEOMETRIES[name]
    rank = len(kernel)
    return LinearInput(
        node=name,
        tensor="x",
        kernel=kernel,
        strides=tuple(attributes.get("strides", [1] * rank)),
        dilations=tuple(attributes.get("dilations", [1] * rank)),
        pads=tuple(attributes.get("pads", [0] * 2 * rank)),
        auto_pad=attributes.get("auto_pad", "NOTSET"),
        transposed=operator == "ConvTranspose",
        output_padding=tuple(attributes.get("output_padding", [0] * rank)),
    )


def _by_one_hot_weights(name: str, x: np.ndarray) -> np.ndarray:
    """The mean output of the layer whose only weight that is not zero is the one asked for."""
    operator, _, kernel, attributes = GEOMETRIES[name]
    channels = x.shape[1]
    one_hot = np.eye(channels * int(np.prod(kernel)), dtype=np.float32)
    weight = one_hot.reshape(-1, channels, *kernel)  # Conv [O, I, *k]
    if operator == "ConvTranspose":
        weight = weight.swapaxes(0, 1)  # [I, O, *k]
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", "w"], ["y"], **attributes)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.ascontiguousarray(weight), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x})
    return y.astype(np.float64).mean(axis=(0, *range(2, y.ndim))).reshape(channels, *kernel)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_means_equal_a_run_with_one_hot_weights(name: str) -> None:
    x = np.random.default_rng(0).normal(1, 1, GEOMETRIES[name][1]).astype(np.float32)
    accumulator = MeanAccumulator(_layer(name))
    accumulator.update(x, FIRST)
    mean = accumulator.mean()
    assert mean is not None
    np.testing.assert_allclose(mean.both, _by_one_hot_weights(name, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("axis", "shape"), [(1, (5, 4)), (0, (4, 5)), (-1, (2, 3, 4))])
def test_products_average_over_all_other_axes(axis: int, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(1, 1, shape).astype(np.float32)
    accumulator = MeanAccumulator(LinearInput("n", "x", channel_axis=axis))
    accumulator.update(x, SECOND)
    mean = accumulator.mean()
    assert mean is not None
    others = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    np.testing.assert_allclose(mean.both, x.mean(axis=others), rtol=1e-6)


def _batches(count: int, scale: float) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    # Sums of very different size: plain float64 addition would depend on the order.
    return [
        (rng.normal(0, 1, (1, 3, 6, 7)) * scale ** rng.uniform(-1, 1)).astype(np.float32)
        for _ in range(count)
    ]


def test_order_does_not_matter() -> None:
    batches = _batches(40, 1e9)
    results = []
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(len(batches))
        accumulator = MeanAccumulator(_layer("padded"))
        for index in order:
            accumulator.update(batches[index], np.array([index % 2]))
        results.append(accumulator.mean())
    for mean in results[1:]:
        for ours, theirs in zip(results[0], mean, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_batches_of_different_shapes_weigh_by_their_positions() -> None:
    rng = np.random.default_rng(0)
    small, large = (rng.normal(size=(1, 3, 4, n)).astype(np.float32) for n in (4, 9))
    accumulator = MeanAccumulator(_layer("pointwise"))
    accumulator.update(small, FIRST)
    accumulator.update(large, SECOND)
    mean = accumulator.mean()
    assert mean is not None and mean.second is not None
    pixels = np.concatenate([small.reshape(3, -1), large.reshape(3, -1)], axis=1)
    np.testing.assert_allclose(mean.both[:, 0, 0], pixels.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(mean.first[:, 0, 0], small.mean(axis=(0, 2, 3)), rtol=1e-5)


def test_samples_with_nan_or_infinity_do_not_count() -> None:
    clean, broken = np.ones((1, 3, 5, 5), np.float32), np.ones((1, 3, 5, 5), np.float32)
    broken[0, 1, 2, 2] = np.nan
    accumulator = MeanAccumulator(_layer("pointwise"))
    accumulator.update(broken, FIRST)
    assert accumulator.mean() is None
    accumulator.update(clean, FIRST)
    mean = accumulator.mean()
    assert mean is not None and mean.second is None
    np.testing.assert_array_equal(mean.both, np.ones((3, 1, 1)))


def test_empty_batch_does_not_count() -> None:
    accumulator = MeanAccumulator(_layer("pointwise"))
    accumulator.update(np.zeros((0, 3, 5, 5), np.float32), FIRST)
    assert accumulator.mean() is None
