"""Operators of onnxruntime: their signatures, products, convolutions and normalizations."""

from __future__ import annotations

import inspect
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as state

from slimctl.runtime.kernels.contrib_bits import gather_block_quantized, matmul_n_bits
from slimctl.runtime.kernels.contrib_normalization import simplified_layer_normalization
from slimctl.runtime.registry import ENGINE, MICROSOFT, Kernel, registered
from tests.runtime.kernels.one_node import Inputs, assert_agrees, assert_close, theirs

_RNG = np.random.default_rng(17)
_FAMILIES = ("attention", "bits", "decoder", "fused", "nhwc", "normalization", "recurrent")
_OURS = {f"slimctl.runtime.kernels.contrib_{family}" for family in _FAMILIES}
_KERNELS = [kernel for kernel in registered() if kernel.run.__module__ in _OURS]
_COMMON: dict[str, Any] = {"opset": 21, "domain": MICROSOFT}


def _floats(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape, dtype=np.float32)


def _bytes(*shape: int) -> np.ndarray:
    return _RNG.integers(0, 256, shape, np.uint8)


def _default(attribute: Any) -> Any:
    if attribute.required:
        return inspect.Parameter.empty
    stored = onnx.AttributeProto.FromString(attribute._default_value)
    if not stored.name:
        return None
    value = onnx.helper.get_attribute_value(stored)
    return value.decode() if isinstance(value, bytes) else value


@pytest.mark.parametrize("kernel", _KERNELS, ids=lambda kernel: kernel.op_type)
def test_signatures_are_those_of_onnxruntime(kernel: Kernel) -> None:
    assert kernel.domain == MICROSOFT
    # onnxruntime itself has this one in the domain of ONNX
    domain = "" if kernel.op_type == "SimplifiedLayerNormalization" else MICROSOFT
    schemas = [s for s in state.get_all_operator_schema() if s.domain == domain]
    (schema,) = (s for s in schemas if s.name == kernel.op_type)
    parameters = inspect.signature(kernel.run).parameters.values()
    inputs = [p for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in inputs] == [i.name.lower() for i in schema.inputs]
    optional = state.schemadef.OpSchema.FormalParameterOption.Optional
    needed = [i.name.lower() for i in schema.inputs if i.option != optional]
    assert [p.name for p in inputs if p.default is p.empty and "None" not in p.annotation] == needed
    found = {p.name: p.default for p in parameters if p.kind == p.KEYWORD_ONLY and p.name != ENGINE}
    expected = {name.lower(): _default(a) for name, a in schema.attributes.items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = np.float32(found[name]) == np.float32(value) if isinstance(value, float) else None
        assert found[name] == value if same is None else same, name


def _turned(x: np.ndarray, *, last: int, first: int) -> np.ndarray:
    """What FusedMatMul turns back."""
    x = x.swapaxes(-1, -2) if last else x
    return np.ascontiguousarray(np.moveaxis(x, -2, 0) if first else x)


@pytest.mark.parametrize(("last_a", "last_b", "first_a", "first_b"), [*product((0, 1), repeat=4)])
def test_fused_matmul_as_onnxruntime(last_a: int, last_b: int, first_a: int, first_b: int) -> None:
    a = _turned(_floats(2, 3, 4, 5), last=last_a, first=first_a)
    b = _turned(_floats(2, 3, 5, 6), last=last_b, first=first_b)
    node = {"transA": last_a, "transB": last_b, "alpha": 0.5, **_COMMON}
    assert_agrees("FusedMatMul", [a, b], transBatchA=first_a, transBatchB=first_b, **node)
    if not first_a and not first_b:
        assert_agrees("TransposeMatMul", [a, b], **node)


@pytest.mark.parametrize(("a", "b"), [((5,), (2, 5, 6)), ((5,), (5,)), ((2, 3, 5), (5,))])
def test_fused_matmul_does_not_turn_vectors(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    node = {"transA": len(a) == 1, "transB": len(b) == 1}
    assert_agrees("FusedMatMul", [_floats(*a), _floats(*b)], **node, **_COMMON)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Relu", []),
        ("Tanh", []),
        ("Sigmoid", []),
        ("LeakyRelu", [0.2]),
        ("HardSigmoid", [0.3, 0.4]),
        ("Clip", [-0.5, 0.7]),
        ("", []),
    ],
)
def test_fused_activations_as_onnxruntime(name: str, parameters: list[float]) -> None:
    more: dict[str, Any] = {"activation": name} if name else {}
    more |= {"activation_params": parameters} if parameters else {}
    inputs: list[Any] = [_floats(1, 3, 6, 7), _floats(4, 3, 3, 3), _floats(4)]
    assert_agrees("FusedConv", inputs, strides=[2, 1], pads=[1] * 4, **more, **_COMMON)
    inputs.append(_floats(1, 4, 6, 7))
    assert_agrees("FusedConv", inputs, pads=[1] * 4, **more, **_COMMON)
    if name not in ("", "Clip"):  # onnxruntime's FusedGemm has none without activation
        names = ("activation_alpha", "activation_beta")
        more = {"activation": name, **dict(zip(names, parameters, strict=False))}
        inputs = [_floats(4, 3), _floats(4, 5), _floats(5)]
        assert_agrees("FusedGemm", inputs, transA=1, alpha=0.5, beta=2.0, **more, **_COMMON)


@pytest.mark.parametrize("shape", [(2, 3, 8), (3, 8)])
def test_skip_normalizations_as_onnxruntime(shape: tuple[int, ...]) -> None:
    x, skip, gamma, beta, bias = _floats(*shape), _floats(*shape), *(_floats(8) for _ in range(3))
    both = {"outputs": ["y", "", "", "sum"], "epsilon": 1e-3, **_COMMON}
    assert_agrees("SkipLayerNormalization", [x, skip, gamma, beta, bias], **both)
    assert_agrees("SkipLayerNormalization", [x, skip, gamma], **_COMMON)
    assert_agrees("SkipSimplifiedLayerNormalization", [x, skip, gamma, bias], **both)
    assert_agrees("SkipSimplifiedLayerNormalization", [x, skip, gamma], **_COMMON)


def test_the_skip_may_lack_the_batch() -> None:
    for skip in (_floats(3, 8), _floats(1, 3, 8)):
        inputs = [_floats(2, 3, 8), skip, _floats(8), _floats(8)]
        assert_agrees("SkipLayerNormalization", inputs, **_COMMON)


def test_skip_normalization_in_half_precision() -> None:
    inputs = [
        value.astype(np.float16) for value in (_floats(2, 3, 8), _floats(2, 3, 8), _floats(8))
    ]
    # a unit in the last place of float16
    outputs = ["y", "", "", "sum"]
    assert_agrees("SkipLayerNormalization", inputs, outputs=outputs, rtol=1e-3, **_COMMON)


@pytest.mark.parametrize("axis", [-1, 1])
def test_simplified_layer_normalization_as_onnxruntime(axis: int) -> None:
    x = _floats(2, 3, 8)
    scale = _floats(*x.shape[axis:])
    node: dict[str, Any] = {"opset": 17, "axis": axis, "outputs": 2}
    expected = theirs("SimplifiedLayerNormalization", [x, scale], **node)
    found = simplified_layer_normalization(x, scale, axis=axis)
    for mine, other in zip(found, expected, strict=True):
        assert_close(mine, other)


@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("mask", [None, [[1, 1, 1, 0], [1, 0, 2, 1]]])
@pytest.mark.parametrize("positions", [None, [[3, 2, 1, 0]], [[0, 1, 2, 3], [5, 4, 3, 2]]])
def test_embed_layer_normalization_as_onnxruntime(
    segments: bool, mask: Any, positions: Any
) -> None:
    words, kinds = (_RNG.integers(0, high, (2, 4), np.int32) for high in (10, 2))
    inputs = [
        words,
        kinds if segments else None,
        _floats(10, 8),
        _floats(6, 8),
        _floats(2, 8) if segments else None,
        _floats(8),
        _floats(8),
        None if mask is None else np.array(mask, np.int32),
        None if positions is None else np.array(positions, np.int32),
    ]
    assert_agrees("EmbedLayerNormalization", inputs, outputs=3, **_COMMON)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block_size", [16, 32, 128, 256])
@pytest.mark.parametrize("terms", [32, 48, 256, 300])
def test_matmul_n_bits_as_onnxruntime(bits: int, block_size: int, terms: int) -> None:
    n, blocks = 5, -(-terms // block_size)
    zeros = [None, _bytes(n, -(-blocks * bits // 8))]
    if bits < 8:  # onnxruntime takes no zero points of 8 bits that are floats
        zeros.append(8 * _floats(n, blocks))
    node = {"K": terms, "N": n, "bits": bits, "block_size": block_size, **_COMMON}
    for zero, shape in product(zeros, [(3,), (2, 3)]):
        codes = _bytes(n, blocks, block_size * bits // 8)
        inputs: Inputs = [_floats(*shape, terms), codes, _floats(n, blocks), zero]
        assert_agrees("MatMulNBits", inputs, **node)
        assert_agrees("MatMulNBits", [*inputs, None, _floats(n)], **node)


def test_matmul_n_bits_with_flat_parameters_and_without_weights() -> None:
    node = {"K": 64, "N": 5, "block_size": 32, **_COMMON}
    a = _floats(3, 64)
    assert_agrees("MatMulNBits", [a, _bytes(5, 2, 16), _floats(10), _bytes(5)], **node)
    none = np.zeros((0, 2, 16), np.uint8)
    assert_agrees("MatMulNBits", [a, none, _floats(5, 2), None, None, _floats(5)], **node)


def test_matmul_n_bits_works_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    a, codes, scales = _floats(3, 64), _bytes(7, 2, 16), _floats(7, 2)
    whole = matmul_n_bits(a, codes, scales, k=64, n=7, block_size=32)
    monkeypatch.setattr("slimctl.numerics.blocks._AT_ONCE", 128)  # two rows
    assert_close(matmul_n_bits(a, codes, scales, k=64, n=7, block_size=32), whole, rtol=1e-6)


def test_matmul_n_bits_in_another_order_is_refused() -> None:
    inputs = (_floats(3, 32), _bytes(5, 1, 16), _floats(5, 1))
    with pytest.raises(ValueError, match="g_idx"):
        matmul_n_bits(*inputs, None, np.zeros(32, np.int32), k=32, n=5, block_size=32)
    with pytest.raises(ValueError, match="weight_prepacked"):
        matmul_n_bits(*inputs, k=32, n=5, block_size=32, weight_prepacked=1)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("length", [64, 96])
@pytest.mark.parametrize("indices", [[0, 3, 6, -1, 9, -8], [[1, 2], [3, 4]], 5])
def test_gather_from_bytes_as_onnxruntime(bits: int, length: int, indices: Any) -> None:
    blocks = -(-length // 32)
    for zeros in (None, _bytes(7, -(-blocks * bits // 8))):
        inputs = [_bytes(7, length * bits // 8), np.array(indices), _floats(7, blocks), zeros]
        assert_agrees("GatherBlockQuantized", inputs, bits=bits, block_size=32, **_COMMON)


@pytest.mark.parametrize("kind", [ml_dtypes.int4, ml_dtypes.uint4])
@pytest.mark.parametrize(
    ("along", "across"), [(0, 1), (1, 0), (0, 0), (1, 1), (-1, 0), (0, 2), (2, -2)]
)
def test_gather_from_nibbles_as_onnxruntime(kind: Any, along: int, across: int) -> None:
    limits, shape = ml_dtypes.iinfo(kind), [6, 32, 34]
    blocks = list(shape)
    blocks[across] = -(-blocks[across] // 16)
    data, zeros = (
        _RNG.integers(limits.min, limits.max + 1, s).astype(kind) for s in (shape, blocks)
    )
    node = {"block_size": 16, "gather_axis": along, "quantize_axis": across, **_COMMON}
    for zero in (None, zeros):
        inputs = [data, _RNG.integers(0, 6, (2, 3)), _floats(*blocks), zero]
        assert_agrees("GatherBlockQuantized", inputs, **node)


def test_gather_from_small_floats_with_one_scale() -> None:
    data = _floats(6, 32).astype(ml_dtypes.float8_e4m3fn)
    found = gather_block_quantized(
        data, np.array([4, 1]), np.full((1, 1), 0.5, np.float32), block_size=0
    )
    np.testing.assert_array_equal(found, data[[4, 1]].astype(np.float32) / 2)


def test_bytes_cannot_be_gathered_along_their_bits() -> None:
    with pytest.raises(ValueError, match="cannot be gathered along"):
        gather_block_quantized(
            _bytes(7, 16),
            np.array([0]),
            _floats(1, 32),
            gather_axis=1,
            quantize_axis=0,
            block_size=16,
        )
