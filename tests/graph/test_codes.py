"""Types of codes, read off what made them and held against onnx's own inference."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from slimctl.graph.codes import code_rank, code_type

BODIES = {
    "q = QuantizeLinear(x, s)": "uint8",
    "q = QuantizeLinear(x, s, i)": "int8",
    "q = QuantizeLinear<output_dtype = 5>(x, s)": "int16",
    "p = QuantizeLinear(x, s, i) q = Transpose(p)": "int8",
    "p = QuantizeLinear(x, s, i) m = MaxPool<kernel_shape = [1]>(p) q = Identity(m)": "int8",
    "p = QuantizeLinear(x, s, i) m, q = MaxPool<kernel_shape = [1]>(p)": "int64",
    "q, a, z = DynamicQuantizeLinear(x)": "uint8",
    "a, q, z = DynamicQuantizeLinear(x)": "float",
    "q = Cast<to = 3>(w)": "int8",
}


@pytest.mark.parametrize("body", BODIES)
def test_types(body: str) -> None:
    text = (
        '<ir_version: 10, opset_import: ["": 21]> g (float[2,3,4] x) => (float y) '
        f"<float s = {{0.5}}, int8 i = {{0}}, int4[2,3] w = {{1, 2, 3, 4, 5, 6}}> "
        f"{{ {body} y = Size(x) }}"
    )
    proto = onnx.parser.parse_model(text)
    value = next(v for n in ir.from_proto(proto).graph for v in n.outputs if v.name == "q")
    assert value.dtype is None
    found = code_type(value)
    inferred = onnx.shape_inference.infer_shapes(proto)
    (kind,) = {i.type.tensor_type.elem_type for i in inferred.graph.value_info if i.name == "q"}
    assert found is not None and found == ir.DataType(kind)
    assert found.name.lower() == BODIES[body]
    assert code_rank(value) == (2 if "Cast" in body else None)


def test_nothing_is_known_of_what_computes() -> None:
    node = ir.node("Mul", [ir.Value(name="a"), ir.Value(name="b")])
    assert code_type(node.outputs[0]) is None
