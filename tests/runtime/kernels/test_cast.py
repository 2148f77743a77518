"""Cast, CastLike and BitCast between all types, against onnxruntime, which has most of them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from slimctl.core.errors import ModelExecutionError
from slimctl.graph._normalize import normalize
from slimctl.runtime.casting import converted
from slimctl.runtime.kernels.cast import bit_cast, cast, cast_like
from slimctl.runtime.session import Runtime
from tests.runtime.kernels.one_node import Array, ours, theirs

INTEGERS = ["INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64"]
FLOAT8 = ["FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"]
SHORT = ["INT4", "UINT4", "INT2", "UINT2"]
WRONG_IN_ONNXRUNTIME = {"FLOAT8E4M3FN": [480.0], "FLOAT8E5M2": [61440.0, 65504.0]}
"""These round beyond the largest value: ONNX wants NaN and infinity, it says 448 and NaN."""
SOURCES = ["float32", "float64", "float16", "int8", "uint8", "int32", "uint32", "int64", "bool"]

_FLOATS = [
    *(np.nan, np.inf, -np.inf, -0.0, 0.0, 0.3, -0.7, 0.5, 1.5, 2.5, -2.5, 7.5, -8.5, 15.5, 17.0),
    *(100.0, -129.5, 240.0, 249.0, 300.0, 448.0, 464.0, 480.0, -500.0, 57344.0, 61440.0, 65504.0),
    *(-70000.0, 3e9, -3e9, 1e10, 1e20, 1e-3, 2.0**-9, 2.0**-10, 3 * 2.0**-11, 1e-7, 1.0625, 1.1875),
]


def _values(kind: str) -> Array:
    if kind == "bool":
        return np.array([True, False])
    if kind.startswith("float"):
        with np.errstate(over="ignore"):
            return np.array(_FLOATS).astype(kind)
    ends = np.iinfo(kind)
    return np.array([0, 1, 2, 3, 7, 8, 15, 16, 100, ends.max, ends.min, ends.max - 1], kind)


def _there_and_back(x: Array, kind: str, back: str, **attributes: Any) -> tuple[Array, Array]:
    """Ours and onnxruntime's; numpy arrays of onnxruntime do not hold the narrow types."""
    nodes = [
        helper.make_node("Cast", ["x"], ["narrow"], to=getattr(TensorProto, kind), **attributes),
        helper.make_node("Cast", ["narrow"], ["y"], to=getattr(TensorProto, back)),
    ]
    source = helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
    # onnxruntime makes one cast of two, unless what is between them is an output
    outputs = [onnx.ValueInfoProto(name=name) for name in ("narrow", "y")]
    graph = helper.make_graph(nodes, "casts", [source], outputs)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=11)
    model = ir.serde.deserialize_model(proto)
    normalize(model)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options)
    return Runtime(model).run({"x": x})["y"], session.run(["y"], {"x": x})[0]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", [*INTEGERS, "BOOL", "FLOAT", "DOUBLE", "FLOAT16"])
def test_between_types_of_numpy(source: str, kind: str) -> None:
    node = {"opset": 21, "to": getattr(TensorProto, kind)}
    for x in (_values(source), _values(source)[1], _values(source)[:0].reshape(2, 0)):
        (found,), (expected,) = (
            ours("Cast", [np.asarray(x)], **node),
            theirs("Cast", [np.asarray(x)], **node),
        )
        np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", ["BFLOAT16", *FLOAT8])
@pytest.mark.parametrize("saturate", [0, 1])
def test_to_narrow_floats(source: str, kind: str, saturate: int) -> None:
    attributes = {"saturate": saturate} if kind != "BFLOAT16" else {}
    x = _values(source)
    if not saturate:
        x = x[~np.isin(x, WRONG_IN_ONNXRUNTIME.get(kind, []))]
    found, expected = _there_and_back(x, kind, "FLOAT", **attributes)
    np.testing.assert_array_equal(found, expected, strict=True)


def test_what_rounds_beyond_the_largest_value_is_infinite_or_nan() -> None:
    x = np.array([464, 480, 57344, 61440, 65504], np.float32)
    found = cast(x, to=TensorProto.FLOAT8E4M3FN, saturate=0).astype(np.float32)
    np.testing.assert_array_equal(found, [448, np.nan, np.nan, np.nan, np.nan])
    found = cast(x, to=TensorProto.FLOAT8E5M2, saturate=0).astype(np.float32)
    np.testing.assert_array_equal(found, [448, 512, 57344, np.inf, np.inf])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("back", ["FLOAT", "INT32", "INT8"])
def test_to_and_from_integers_of_4_and_2_bits(source: str, kind: str, back: str) -> None:
    found, expected = _there_and_back(_values(source), kind, back)
    np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize("kind", ["BFLOAT16", *FLOAT8])
@pytest.mark.parametrize("back", ["FLOAT16", "DOUBLE", "INT32", "UINT8", "BOOL", "STRING"])
def test_from_narrow_floats(kind: str, back: str) -> None:
    # -0 in 8 bits is true for onnxruntime, and false for ONNX
    x = _values("float32")[4:20]
    found, expected = _there_and_back(x, kind, back)
    np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize(
    ("round_mode", "found"), [("up", np.nan), ("nearest", np.nan), ("down", 2.0**127)]
)
def test_beyond_the_largest_power_of_two(saturate: int, round_mode: str, found: float) -> None:
    # rounded down it is in range, which onnxruntime does not wait for
    x = np.array([1.5 * 2.0**127], np.float32)
    power = cast(x, to=TensorProto.FLOAT8E8M0, saturate=saturate, round_mode=round_mode)
    expected = 2.0**127 if saturate else found
    np.testing.assert_array_equal(power.astype(np.float32), np.array([expected], np.float32))


@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("round_mode", ["up", "down", "nearest"])
def test_to_powers_of_two(saturate: int, round_mode: str) -> None:
    edges = [2.0**-127, 2.0**-126, 2.0**-149, 1.25, 1.75, 1.0, 2.0, 3.0, 2.0**127]
    x = np.array([*_FLOATS, *edges], np.float32)
    found, expected = _there_and_back(
        x, "FLOAT8E8M0", "FLOAT", saturate=saturate, round_mode=round_mode
    )
    np.testing.assert_array_equal(found, expected, strict=True)


def test_negative_zero_is_false() -> None:
    for kind in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16, np.float16):
        assert cast(np.array([-0.0, 0.5], kind), to=TensorProto.BOOL).tolist() == [False, True]


def test_knows_its_rounding_modes() -> None:
    with pytest.raises(ValueError, match="no rounding mode 'odd'"):
        cast(np.ones(2), to=TensorProto.FLOAT8E8M0, round_mode="odd")


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, np.bool_, np.uint8])
def test_to_strings(kind: type) -> None:
    x = np.array([[0, 1, 7], [100, 3, 5]], kind)
    if kind in (np.float32, np.float64):
        x = np.array([[0.1, 1 / 3, 1e20], [1e-7, 123456789, -0.0], [np.nan, np.inf, -np.inf]], kind)
    node = {"opset": 21, "to": TensorProto.STRING}
    (found,), (expected,) = ours("Cast", [x], **node), theirs("Cast", [x], **node)
    np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize("kind", ["FLOAT", "DOUBLE", "FLOAT16"])
def test_strings_to_floats(kind: str) -> None:
    x = np.array(["1.5", "+INF", "-inf", "NaN", "1e-5", "Inf", " 3 ", "0.1"], object)
    node = {"opset": 21, "to": getattr(TensorProto, kind)}
    (found,), (expected,) = ours("Cast", [x], **node), theirs("Cast", [x], **node)
    np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize("kind", [*INTEGERS, "BOOL"])
def test_strings_to_integers(kind: str) -> None:
    x = np.array(["0", "1", "100.5", "-7", "300", " 5 ", "-0.7"], object)
    if kind == "BOOL":
        x = x[:2]
    node = {"opset": 21, "to": getattr(TensorProto, kind)}
    (found,), (expected,) = ours("Cast", [x], **node), theirs("Cast", [x], **node)
    np.testing.assert_array_equal(found, expected, strict=True)


def test_large_integers_are_read_from_strings_exactly() -> None:
    x = np.array([str(2**53 + 1), str(-(2**63)), "1e3"], object)
    (found,) = ours("Cast", [x], opset=21, to=TensorProto.INT64)
    assert found.tolist() == [2**53 + 1, -(2**63), 1000]
    assert cast(np.array([str(2**64 - 1)], object), to=TensorProto.UINT64).tolist() == [2**64 - 1]


def test_strings_to_narrow_types() -> None:
    x = np.array(["-3", "7"], object)
    assert cast(x, to=TensorProto.INT4).astype(np.int8).tolist() == [-3, 7]
    assert cast(x, to=TensorProto.FLOAT8E5M2).astype(np.float32).tolist() == [-3, 7]
    assert (
        cast(np.array(["1e9"], object), to=TensorProto.FLOAT8E4M3FN).astype(np.float32).item()
        == 448
    )


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.INT32, TensorProto.BOOL])
@pytest.mark.parametrize("text", ["abc", ""])
def test_what_spells_no_number_is_an_error(kind: int, text: str) -> None:
    with pytest.raises(ModelExecutionError, match=f"'{text}' is not"):
        ours("Cast", [np.array([text], object)], opset=21, to=kind)


def test_strings_of_initializers_are_bytes() -> None:
    x = np.array(["ä".encode(), b"1"])
    assert cast(x, to=TensorProto.STRING).tolist() == ["ä", "1"]
    assert cast(x[1:], to=TensorProto.INT64).tolist() == [1]


def test_the_same_type_is_not_copied() -> None:
    x = np.ones(3, np.float32)
    assert cast(x, to=TensorProto.FLOAT) is x


@pytest.mark.parametrize("target", ["float16", "int8", "bfloat16", "int4", "float8_e4m3fn"])
def test_cast_like_has_the_type_of_the_other(target: str) -> None:
    x = np.array([1.5, -2, 1000], np.float32)
    other = np.zeros(1, getattr(ml_dtypes, target, target))
    found = cast_like(x, other)
    assert found.dtype == other.dtype
    np.testing.assert_array_equal(
        found.astype(np.float32), converted(x, other.dtype).astype(np.float32)
    )


def test_cast_like_passes_its_attributes_on() -> None:
    x, other = np.array([1000.0, 1.5], np.float32), np.zeros(1, ml_dtypes.float8_e4m3fn)
    assert np.isnan(cast_like(x, other, saturate=0).astype(np.float32)[0])
    assert cast_like(x, other).astype(np.float32).tolist() == [448, 1.5]
    powers = np.zeros(1, ml_dtypes.float8_e8m0fnu)
    assert cast_like(x, powers, round_mode="down").astype(np.float32).tolist() == [512, 1]


@pytest.mark.parametrize("strings", [np.array([b"a"]), np.array(["a"], object)])
def test_cast_like_strings(strings: Array) -> None:
    assert cast_like(np.array([1, 2]), strings).tolist() == ["1", "2"]


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("float32", "INT32"),
        ("float64", "UINT64"),
        ("int64", "DOUBLE"),
        ("float16", "UINT16"),
        ("int8", "UINT8"),
    ],
)
def test_bit_cast(source: str, kind: str) -> None:
    node = {"opset": 26, "to": getattr(TensorProto, kind)}
    for x in (
        _values(source),
        _values(source)[:1].reshape(()),
        _values(source)[:10].reshape(2, 5).T,
    ):
        (found,), (expected,) = ours("BitCast", [x], **node), theirs("BitCast", [x], **node)
        np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize("kind", [TensorProto.UINT4, TensorProto.FLOAT4E2M1])
def test_bit_cast_of_4_bits(kind: int) -> None:
    x = np.arange(-8, 8).astype(ml_dtypes.int4)
    there = bit_cast(x, to=kind)
    assert there.view(np.uint8).tolist() == [*range(8, 16), *range(8)]
    np.testing.assert_array_equal(
        bit_cast(there, to=TensorProto.INT4).astype(np.int8), x.astype(np.int8)
    )


def test_bit_cast_keeps_the_width() -> None:
    with pytest.raises(ModelExecutionError, match="32 bits cannot be read as a type of 16 bits"):
        ours("BitCast", [np.ones(2, np.float32)], opset=26, to=TensorProto.FLOAT16)
