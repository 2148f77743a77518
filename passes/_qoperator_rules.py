"""The integer operator of each float operator: one small function each, found by a table.

What the operators take is written in the schemas and kernels of onnxruntime
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md); the tests hold the
table against the registered kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.graph.edit import const_array
from slimctl.numerics.affine import INT8, UINT8, quantize
from slimctl.passes._qoperator_site import Codes, Site, Unfit

CONTRIB: Final = "com.microsoft"
_SOFTMAX_OPSET: Final = 13  # since then it runs along one axis

Inputs = list[ir.Value | None]


class Integer(NamedTuple):
    """An operator on integers.

    Attributes:
        op_type: Its name.
        inputs: What it reads.
        attributes: How it computes.
        domain: Of the operator.
        writes: The values that it gives in place of those that are there.
        codes: New constants among its inputs: place and number.
    """

    op_type: str
    inputs: Inputs
    attributes: Sequence[ir.Attr]
    writes: Sequence[ir.Value]
    domain: str = ""
    codes: Sequence[tuple[int, NDArray[Any]]] = ()


Rule = Callable[[Site], Integer]


def _kept(site: Site, *names: str) -> list[ir.Attr]:
    """Attributes that the integer operator has as well."""
    return [site.node.attributes[name] for name in names if name in site.node.attributes]


# layers


def _conv(site: Site) -> Integer:
    x, w, y = site.input(0), site.weight(1, axis=0), site.output()
    _types_of_product(x, w, y)
    inputs = [*x.triple, *w.triple, *y.parameters, site.bias(x, w)]
    return Integer("QLinearConv", inputs, list(site.node.attributes.values()), [y.values])


def _gemm(site: Site) -> Integer:
    names = ("alpha", "beta")
    if any(_float(site.node, name, 1.0) != 1.0 for name in names):
        raise Unfit("it has a factor that is not part of its weight")
    x, w = site.input(0), site.weight(1, axis=0 if _int(site.node, "transB", 0) else 1)
    attributes = _kept(site, "transA", "transB")
    inputs: Inputs = [*x.triple, *w.triple, site.bias(x, w)]
    if site.float_output():
        _types_of_product(x, w)
        return Integer("QGemm", inputs, attributes, [site.node.outputs[0]], CONTRIB)
    y = site.output()
    _types_of_product(x, w, y)
    return Integer("QGemm", [*inputs, *y.parameters], attributes, [y.values], CONTRIB)


def _matmul(site: Site) -> Integer:
    a, b = site.input(0), _right_factor(site)
    if not site.float_output():
        y = site.output()
        _types_of_product(a, b, y)
        return Integer("QLinearMatMul", [*a.triple, *b.triple, *y.parameters], [], [y.values])
    _types_of_product(a, b)
    inputs: Inputs = [a.values, b.values, a.scale, b.scale, a.zero_point, b.zero_point]
    added = _added_bias(site.node, b)
    if added is None:
        return Integer("MatMulIntegerToFloat", inputs, [], [site.node.outputs[0]], CONTRIB)
    bias, output = added
    return Integer("MatMulIntegerToFloat", [*inputs, bias], [], [output], CONTRIB)


def _right_factor(site: Site) -> Codes:
    """The right factor, which may have one scale per column where it is one matrix."""
    value = site.node.inputs[1]
    node = None if value is None else value.producer()
    stored = None if node is None or not node.inputs else const_array(node.inputs[0])
    if stored is None:
        return site.input(1)
    return site.weight(1, axis=1 if stored.ndim == 2 else None)


def _added_bias(node: ir.Node, weight: Codes) -> tuple[ir.Value, ir.Value] | None:
    """A vector over the columns that is added right behind a MatMul, and the sum."""
    output = node.outputs[0]
    users = list(output.uses())
    if len(users) != 1 or output.is_graph_output():
        return None
    add, columns = users[0].node, const_array(weight.values)
    if add.op_type not in ("Add", "Sum") or len(add.inputs) != 2 or add.graph is not node.graph:
        return None
    bias = add.inputs[1 - users[0].idx]
    array = const_array(bias)
    if bias is None or array is None or columns is None or array.dtype != np.float32:
        return None
    return (bias, add.outputs[0]) if array.shape == columns.shape[-1:] else None


def _types_of_product(a: Codes, b: Codes, y: Codes | None = None) -> None:
    """uint8 x int8, uint8 x uint8, int8 x int8; the result as the left factor."""
    if a.dtype == np.int8 and b.dtype == np.uint8:
        raise Unfit("there is no integer kernel for int8 x uint8")
    if y is not None and y.dtype != a.dtype:
        raise Unfit(f"integer kernels write the type they read, not {y.dtype} from {a.dtype}")


# operators of several activations


def _elementwise(name: str) -> Rule:
    def rule(site: Site) -> Integer:
        if len(site.node.inputs) != 2:
            raise Unfit("integer kernels take two inputs")
        a, b, y = site.input(0), site.input(1), site.output()
        site.same_type(a, b, y)
        return Integer(name, [*a.triple, *b.triple, *y.parameters], [], [y.values], CONTRIB)

    return rule


def _concat(site: Site) -> Integer:
    parts, y = list(site.inputs()), site.output()
    site.same_type(*parts, y)
    inputs = [*y.parameters, *(value for part in parts for value in part.triple)]
    return Integer("QLinearConcat", inputs, _kept(site, "axis"), [y.values], CONTRIB)


# operators of one activation


def _unary(name: str, *attributes: str) -> Rule:
    def rule(site: Site) -> Integer:
        return _one(site, name, _kept(site, *attributes))

    return rule


def _one(site: Site, name: str, attributes: Sequence[ir.Attr]) -> Integer:
    x, y = site.input(0), site.output()
    site.same_type(x, y)
    return Integer(name, [*x.triple, *y.parameters], attributes, [y.values], CONTRIB)


def _relu(site: Site) -> Integer:
    """A Relu that a Q behind it does not make redundant; the kernel looks codes up in a table."""
    return _one(site, "QLinearLeakyRelu", [ir.AttrFloat32("alpha", 0.0)])


def _average_pool(site: Site) -> Integer:
    if any(size != 1 for size in _ints(site.node, "dilations")):
        raise Unfit("the integer AveragePool has no dilations")
    if _int(site.node, "ceil_mode", 0) and _int(site.node, "count_include_pad", 0):
        raise Unfit("the integer AveragePool counts padding differently with ceil_mode")
    names = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
    return _one(site, "QLinearAveragePool", _kept(site, *names))


def _softmax(site: Site) -> Integer:
    axis = ir.AttrInt64("axis", _int(site.node, "axis", -1))
    return _one(site, "QLinearSoftmax", [axis, ir.AttrInt64("opset", _SOFTMAX_OPSET)])


# operators that move values


def _move(site: Site) -> Integer:
    x = site.input(0)
    written = [site.output(i) for i, v in enumerate(site.node.outputs) if not _unused(v)]
    if not all(x.same_grid(y) for y in written):
        raise Unfit("its input and its output have different scales, so values would change")
    codes = iter(y.values for y in written)
    return Integer(
        site.node.op_type,
        [x.values, *site.node.inputs[1:]],
        list(site.node.attributes.values()),
        [value if _unused(value) else next(codes) for value in site.node.outputs],
    )


def _max_pool(site: Site) -> Integer:
    if len(site.node.outputs) > 1 and not _unused(site.node.outputs[1]):
        raise Unfit("its indices are used")
    return _move(site)


def _resize(site: Site) -> Integer:
    if _text(site.node, "mode", "nearest") != "nearest":
        raise Unfit("it computes values between those that are there")
    if _text(site.node, "coordinate_transformation_mode", "") == "tf_crop_and_resize":
        raise Unfit("it fills in a number beside those that are there")
    return _move(site)


def _pad(site: Site) -> Integer:
    moved = _move(site)
    if _text(site.node, "mode", "constant") != "constant":
        return moved
    x = site.input(0)
    value = site.node.inputs[2] if len(site.node.inputs) > 2 else None
    filling = np.zeros((), np.float32) if value is None else const_array(value)
    scale, zero = const_array(x.scale), const_array(x.zero_point)
    if filling is None or scale is None or zero is None:
        raise Unfit("it fills in a number that is computed at run time")
    kind = UINT8 if x.dtype == np.uint8 else INT8
    code = quantize(filling.reshape(()), scale.reshape(()), zero.reshape(()), kind)
    inputs: Inputs = [*moved.inputs, None, None][: max(len(moved.inputs), 3)]
    return moved._replace(inputs=inputs, codes=[(2, code)])


def _unused(value: ir.Value) -> bool:
    return not value.uses() and not value.is_graph_output()


# attributes


def _int(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def _ints(node: ir.Node, name: str) -> Sequence[int]:
    attribute = node.attributes.get(name)
    return () if attribute is None else attribute.as_ints()


def _float(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_float()


def _text(node: ir.Node, name: str, default: str) -> str:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_string()


MOVEMENT: Final = (
    "DepthToSpace",
    "Expand",
    "Flatten",
    "Gather",
    "Identity",
    "ReduceMax",
    "ReduceMin",
    "Reshape",
    "Slice",
    "SpaceToDepth",
    "Split",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
)
"""Operators that hand on values of their first input as they are."""

LAYERS: Final[Mapping[str, Rule]] = {"Conv": _conv, "Gemm": _gemm, "MatMul": _matmul}
"""Operators of which the second input is a weight, or another factor."""

RULES: Final[Mapping[str, Rule]] = {
    **LAYERS,
    "Add": _elementwise("QLinearAdd"),
    "Mul": _elementwise("QLinearMul"),
    "Concat": _concat,
    "AveragePool": _average_pool,
    "GlobalAveragePool": _unary("QLinearGlobalAveragePool"),
    "LeakyRelu": _unary("QLinearLeakyRelu", "alpha"),
    "Relu": _relu,
    "Sigmoid": _unary("QLinearSigmoid"),
    "Softmax": _softmax,
    **dict.fromkeys(MOVEMENT, _move),
    "MaxPool": _max_pool,
    "Resize": _resize,
    "Pad": _pad,
}
"""By operator of the default domain."""
