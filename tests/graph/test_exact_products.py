"""Weights of int8 as uint8: the same products, which no processor saturates."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from slimctl.graph.exact_products import with_exact_products
from slimctl.graph.save import serialize

MOVES = {
    "nothing": ("", "q"),
    "Transpose": ("t = Transpose(q)", "t"),
    "Reshape and Identity": ("r = Reshape(q, sizes) t = Identity(r)", "t"),
}


def product(move: str, codes: str) -> onnx.ModelProto:
    """Codes of a square input times weights that saturate where pairs are added in 16 bits."""
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[4,4] x) => (int32[4,3] y) '
        f"{{ q, s, z = DynamicQuantizeLinear(x) {move} y = MatMulInteger({codes}, w, z) }}"
    )
    weights = np.full((4, 3), 127, np.int8) - np.arange(12, dtype=np.int8).reshape(4, 3)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([4, 4]), "sizes"))
    return proto


@pytest.mark.parametrize("move", MOVES)
def test_codes_are_known_where_no_type_is_stated(move: str) -> None:
    proto = product(*MOVES[move])
    assert not proto.graph.value_info
    exact = with_exact_products(ir.from_proto(proto))
    assert exact is not None
    x = np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)
    session = ort.InferenceSession(serialize(exact), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x})
    codes = np.rint(x / np.float32(1 / 255)).astype(np.int64)
    codes = codes.T if move == "Transpose" else codes
    weights = onnx.numpy_helper.to_array(proto.graph.initializer[0]).astype(np.int64)
    np.testing.assert_array_equal(found, codes @ weights)


def test_int8_codes_are_exact_already() -> None:
    proto = product("t = Cast<to = 3>(q)", "t")
    assert with_exact_products(ir.from_proto(proto)) is None
