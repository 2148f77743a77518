from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from slimctl.runtime.kernels.pooling import max_pool
from tests.runtime.kernels.one_node import assert_agrees, ours

_RNG = np.random.default_rng(13)

_SHAPES = [((11,), (3,)), ((9, 8), (3, 2)), ((5, 6, 7), (2, 3, 1))]
_STRIDES = [1, 2, 3]


def _floats(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape, dtype=np.float32)


def _pads(kernel: tuple[int, ...]) -> list[list[int]]:
    """None, before each axis, after each axis; a pool takes less than its kernel."""
    some = [min(size - 1, 1) for size in kernel]
    none = [0] * len(kernel)
    return [none + none, some + none, none + some]


@pytest.mark.parametrize(("size", "kernel"), _SHAPES)
@pytest.mark.parametrize("stride", _STRIDES)
@pytest.mark.parametrize("opset", [9, 10, 12, 22])
def test_max_pool_as_onnxruntime(
    size: tuple[int, ...], kernel: tuple[int, ...], stride: int, opset: int
) -> None:
    x, rank = _floats(2, 3, *size), len(size)
    node: dict[str, Any] = {"opset": opset, "kernel_shape": kernel, "strides": [stride] * rank}
    forms = product((0, 1), (1, 2)) if opset >= 10 else [(0, 1)]
    for (ceil_mode, dilation), pads in product(forms, _pads(kernel)):
        more = {"ceil_mode": ceil_mode, "dilations": [dilation] * rank} if opset >= 10 else {}
        for order in (0, 1):
            assert_agrees("MaxPool", [x], pads=pads, outputs=2, storage_order=order, **node, **more)
        assert_agrees("MaxPool", [x], pads=pads, **node, **more)
    for auto_pad in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        assert_agrees("MaxPool", [x], auto_pad=auto_pad, outputs=2, **node)


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_max_pool_of_bytes_as_onnxruntime(kind: Any) -> None:
    limits = np.iinfo(kind)
    x = _RNG.integers(limits.min, limits.max, (2, 3, 9, 8), kind, endpoint=True)
    node = {"opset": 12, "kernel_shape": (3, 2), "pads": [1, 1, 1, 0], "strides": [2, 2]}
    assert_agrees("MaxPool", [x], outputs=2, **node)
    assert_agrees("MaxPool", [np.full_like(x, limits.min)], **node)


def test_the_index_is_that_of_the_first_largest_element() -> None:
    x = np.full((1, 2, 4), -np.inf, np.float32)
    y, index = max_pool(x, kernel_shape=(3,), pads=(2, 2), outputs=2)
    np.testing.assert_array_equal(y, np.full((1, 2, 6), -np.inf))
    # padding is no element, however small the elements are
    np.testing.assert_array_equal(index, [[[0, 0, 0, 1, 2, 3], [4, 4, 4, 5, 6, 7]]])


@pytest.mark.parametrize(("size", "kernel"), _SHAPES)
@pytest.mark.parametrize("stride", _STRIDES)
@pytest.mark.parametrize("with_padding", [0, 1])
@pytest.mark.parametrize("opset", [9, 10, 11, 19])
def test_average_pool_as_onnxruntime(
    size: tuple[int, ...], kernel: tuple[int, ...], stride: int, with_padding: int, opset: int
) -> None:
    x, rank = _floats(2, 3, *size), len(size)
    node: dict[str, Any] = {
        "opset": opset,
        "kernel_shape": kernel,
        "strides": [stride] * rank,
        "count_include_pad": with_padding,
    }
    ceil_modes = (0, 1) if opset >= 10 else (0,)
    dilations = (1, 2) if opset >= 19 else (1,)
    for ceil_mode, dilation, pads in product(ceil_modes, dilations, _pads(kernel)):
        more: dict[str, Any] = {"ceil_mode": ceil_mode} if opset >= 10 else {}
        if opset >= 19:
            more["dilations"] = [dilation] * rank
        assert_agrees("AveragePool", [x], pads=pads, **node, **more)
    for auto_pad in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        assert_agrees("AveragePool", [x], auto_pad=auto_pad, **node)


@pytest.mark.parametrize(("size", "kernel"), _SHAPES)
@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("opset", [9, 11, 18])
def test_lp_pool_as_onnxruntime(
    size: tuple[int, ...], kernel: tuple[int, ...], p: int, opset: int
) -> None:
    x, rank = _floats(2, 3, *size), len(size)
    node: dict[str, Any] = {"opset": opset, "kernel_shape": kernel, "p": p}
    for stride, pads in product(_STRIDES, _pads(kernel)):
        assert_agrees("LpPool", [x], strides=[stride] * rank, pads=pads, **node)
    if opset >= 18:
        for ceil_mode, dilation in product((0, 1), (1, 2)):
            more = {"ceil_mode": ceil_mode, "dilations": [dilation] * rank}
            assert_agrees("LpPool", [x], strides=[2] * rank, **node, **more)


@pytest.mark.parametrize("size", [(11,), (9, 8), (5, 6, 7)])
def test_global_pools_as_onnxruntime(size: tuple[int, ...]) -> None:
    x = _floats(2, 3, *size)
    for op_type in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"):
        assert_agrees(op_type, [x], opset=12)
    for p in (1, 3):
        assert_agrees("GlobalLpPool", [x], opset=12, p=p)


@pytest.mark.parametrize("size", [8, 9])
def test_max_unpool_as_onnxruntime(size: int) -> None:
    x = _floats(2, 3, size, size)
    node: dict[str, Any] = {"opset": 12, "kernel_shape": [2, 2], "strides": [2, 2]}
    y, index = ours("MaxPool", [x], outputs=2, **node)
    if size == 8:
        assert_agrees("MaxUnpool", [y, index], **node)
    assert_agrees("MaxUnpool", [y, index, np.array([2, 3, size, size])], **node)


def test_narrow_floats_keep_their_type() -> None:
    x = _floats(1, 2, 5, 6).astype(np.float16)
    for op_type in ("MaxPool", "AveragePool", "LpPool"):
        (found,) = ours(op_type, [x], opset=22, kernel_shape=(2, 2))
        (wide,) = ours(op_type, [x.astype(np.float32)], opset=22, kernel_shape=(2, 2))
        np.testing.assert_array_equal(found, wide.astype(np.float16))
        assert found.dtype == np.float16
