"""Nodes of every operator that runs in torch, with inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import helper, numpy_helper

RANDOM = np.random.default_rng(0)


class Case(NamedTuple):
    """One node.

    Attributes:
        op_type: Its operator.
        inputs: Arrays; None for an input that is left out.
        attributes: Of the node.
        outputs: How many it has.
        opset: Of the model.
    """

    op_type: str
    inputs: Sequence[NDArray[Any] | None]
    attributes: dict[str, Any]
    outputs: int
    opset: int

    @property
    def id(self) -> str:
        """A short name for messages."""
        given = ",".join(f"{key}={value}" for key, value in self.attributes.items())
        return f"{self.op_type}-{self.opset}({given})".replace(" ", "")

    @property
    def feeds(self) -> dict[str, NDArray[Any]]:
        """The inputs by name."""
        return {f"x{i}": array for i, array in enumerate(self.inputs) if array is not None}

    def model(self, *, constants: bool = False) -> ir.Model:
        """The node alone.

        Args:
            constants: All inputs but the first are constants, and not inputs of the model.
        """
        names = ["" if array is None else f"x{i}" for i, array in enumerate(self.inputs)]
        outputs = [f"y{i}" for i in range(self.outputs)]
        node = helper.make_node(self.op_type, names, outputs, "node", **self.attributes)
        stored = {k: a for k, a in self.feeds.items() if constants and k != "x0"}
        graph = helper.make_graph(
            [node],
            "case",
            [_info(name, array) for name, array in self.feeds.items() if name not in stored],
            [onnx.ValueInfoProto(name=name) for name in outputs],
            [numpy_helper.from_array(array, name) for name, array in stored.items()],
        )
        opsets = [helper.make_opsetid("", self.opset)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        return ir.from_proto(onnx.shape_inference.infer_shapes(model))


def _info(name: str, array: NDArray[Any]) -> onnx.ValueInfoProto:
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor_value_info(name, kind, array.shape)


def case(op_type: str, *inputs: Any, outputs: int = 1, opset: int = 20, **attributes: Any) -> Case:
    """A node; a list is an int64 tensor, a number a float32 scalar."""
    arrays = [None if given is None else _array(given) for given in inputs]
    return Case(op_type, arrays, attributes, outputs, opset)


def _array(given: Any) -> NDArray[Any]:
    if isinstance(given, np.ndarray):
        return given
    return np.array(given, np.float32 if isinstance(given, float) else np.int64)


def normal(*shape: int) -> NDArray[np.float32]:
    """Standard normal numbers."""
    return RANDOM.standard_normal(shape).astype(np.float32)


def positive(*shape: int) -> NDArray[np.float32]:
    """Numbers from 0.5 to 2."""
    return RANDOM.uniform(0.5, 2.0, shape).astype(np.float32)


def truth(*shape: int) -> NDArray[np.bool_]:
    """Booleans."""
    return RANDOM.random(shape) < 0.5


X, Y = normal(2, 3, 4), normal(3, 1)
INTEGERS = np.array([7, -7, 6, 0]), np.array([2, 2, -4, 5])
IMAGE = normal(1, 3, 7, 8)

ELEMENTWISE = [
    *(
        case(name, X)
        for name in (
            *("Abs", "Ceil", "Celu", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid"),
            *("HardSwish", "LeakyRelu", "Mish", "Neg", "Relu", "Round", "Selu", "Sigmoid"),
            *("Sign", "Sin", "Softplus", "Softsign", "Tanh", "ThresholdedRelu"),
        )
    ),
    case("Round", np.array([0.5, 1.5, 2.5, -0.5, -1.5], np.float32)),
    *(case(name, positive(2, 3)) for name in ("Log", "Reciprocal", "Sqrt")),
    case("IsNaN", np.array([1.0, np.nan], np.float32)),
    *(case(name, X, alpha=0.3) for name in ("Celu", "Elu", "LeakyRelu", "ThresholdedRelu")),
    case("Selu", X, alpha=1.2, gamma=0.7),
    case("Gelu", X, approximate="tanh"),
    case("HardSigmoid", X, alpha=0.25, beta=0.4),
    case("PRelu", X, np.abs(Y)),
    *(case(name, X, Y) for name in ("Add", "Div", "Mul", "Sub", "Max", "Min", "Sum", "Mean")),
    *(case(name, X, Y, normal(1, 4)) for name in ("Max", "Min", "Sum", "Mean")),
    *(case(name, X) for name in ("Max", "Min", "Sum", "Mean")),
    case("Div", *INTEGERS),
    case("Mod", *INTEGERS),
    case("Mod", *INTEGERS, fmod=1),
    case("Mod", X, Y, fmod=1),
    case("Pow", positive(2, 3), normal(3)),
    case("Pow", X, np.array(2)),
    case("Clip", X, -0.5, 0.7),
    case("Clip", X, None, 0.7),
    case("Clip", X),
    *(
        case(name, np.round(X), np.round(Y))
        for name in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
    ),
    *(case(name, truth(2, 3), truth(3)) for name in ("And", "Or", "Xor")),
    case("Not", truth(2, 3)),
    case("Where", truth(3, 4), X, Y),
]

LINEAR = [
    case("Conv", IMAGE, normal(4, 3, 3, 3), normal(4), pads=[1, 1, 1, 1]),
    case("Conv", IMAGE, normal(4, 3, 3, 2), pads=[0, 1, 2, 0], strides=[2, 1]),
    case("Conv", IMAGE, normal(6, 1, 3, 3), group=3, dilations=[1, 2]),
    case("Conv", IMAGE, normal(4, 3, 2, 3), auto_pad="SAME_UPPER", strides=[2, 2]),
    case("Conv", IMAGE, normal(4, 3, 2, 3), auto_pad="SAME_LOWER", strides=[1, 2]),
    case("Conv", IMAGE, normal(4, 3, 2, 3), auto_pad="VALID"),
    case("Conv", normal(1, 2, 9), normal(3, 2, 4)),
    case("Conv", normal(1, 2, 4, 4, 4), normal(2, 2, 2, 2, 2), normal(2)),
    case("ConvTranspose", IMAGE, normal(3, 2, 3, 3), normal(2), strides=[2, 2]),
    case("ConvTranspose", IMAGE, normal(3, 2, 3, 3), pads=[1, 0, 0, 2], strides=[2, 1]),
    case(
        *("ConvTranspose", IMAGE, normal(3, 2, 3, 3), normal(2)),
        strides=[2, 3],
        pads=[1, 1, 1, 1],
        output_padding=[1, 2],
    ),
    case("ConvTranspose", IMAGE, normal(3, 2, 2, 2), group=3, dilations=[2, 1]),
    case("ConvTranspose", IMAGE, normal(3, 2, 3, 3), auto_pad="SAME_UPPER", strides=[2, 2]),
    case("ConvTranspose", IMAGE, normal(3, 2, 3, 3), auto_pad="SAME_LOWER", strides=[2, 2]),
    case("ConvTranspose", IMAGE, normal(3, 2, 3, 3), output_shape=[14, 15], strides=[2, 2]),
    case("ConvTranspose", normal(1, 2, 5), normal(2, 3, 3), strides=[2]),
    case("Einsum", normal(2, 3, 4), normal(2, 4, 5), equation="bij, bjk -> bik"),
    case("Gemm", normal(2, 3), normal(3, 4), normal(4)),
    case("Gemm", normal(3, 2), normal(4, 3), normal(2, 1), transA=1, transB=1, alpha=0.5, beta=2.0),
    case("Gemm", normal(2, 3), normal(3, 4)),
    case("MatMul", normal(2, 3, 4), normal(4, 5)),
    case("MatMul", normal(4), normal(2, 4, 5)),
]

POOLS = [
    case("AveragePool", IMAGE, kernel_shape=[3, 2]),
    case("AveragePool", IMAGE, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
    case(
        *("AveragePool", IMAGE),
        kernel_shape=[3, 3],
        pads=[1, 0, 2, 1],
        strides=[2, 2],
        count_include_pad=1,
    ),
    case("AveragePool", IMAGE, kernel_shape=[2, 2], strides=[3, 3], ceil_mode=1),
    case(
        *("AveragePool", IMAGE),
        kernel_shape=[3, 3],
        pads=[1, 1, 1, 1],
        strides=[2, 2],
        ceil_mode=1,
        count_include_pad=1,
    ),
    case("AveragePool", IMAGE, kernel_shape=[3, 2], auto_pad="SAME_UPPER", strides=[2, 2]),
    case("AveragePool", normal(1, 2, 9), kernel_shape=[2]),
    case("MaxPool", IMAGE, kernel_shape=[3, 2]),
    case("MaxPool", IMAGE, kernel_shape=[3, 3], pads=[2, 0, 1, 1], strides=[2, 2]),
    case("MaxPool", IMAGE, kernel_shape=[2, 2], strides=[3, 3], ceil_mode=1),
    case("MaxPool", IMAGE, kernel_shape=[2, 2], pads=[1, 1, 1, 1], strides=[2, 2], ceil_mode=1),
    case("MaxPool", IMAGE, kernel_shape=[2, 3], dilations=[2, 2]),
    case("MaxPool", IMAGE, kernel_shape=[2, 2], auto_pad="SAME_LOWER"),
    case("MaxPool", normal(1, 2, 4, 4, 4), kernel_shape=[2, 2, 2]),
    case("GlobalAveragePool", IMAGE),
    case("GlobalMaxPool", IMAGE),
]

NORMALIZATIONS = [
    case("BatchNormalization", IMAGE, normal(3), normal(3), normal(3), positive(3), epsilon=1e-2),
    case("InstanceNormalization", IMAGE, normal(3), normal(3)),
    case("InstanceNormalization", normal(2, 3, 1), normal(3), normal(3), epsilon=1e-2),
    case("LayerNormalization", X, normal(4), normal(4)),
    case("LayerNormalization", X, normal(3, 4), axis=1, epsilon=1e-2),
    case("LogSoftmax", X, axis=1),
    case("LpNormalization", X, axis=1),
    case("LpNormalization", np.zeros((2, 3), np.float32), p=1),
    case("RMSNormalization", X, normal(3, 4), axis=-2, opset=23),
    case("Softmax", X),
    case("Softmax", X, axis=0),
]

MOVEMENTS = [
    case("Concat", X, normal(2, 1, 4), axis=1),
    case("Concat", X, X, axis=-1),
    case("DepthToSpace", normal(2, 12, 2, 3), blocksize=2),
    case("DepthToSpace", normal(2, 12, 2, 3), blocksize=2, mode="CRD"),
    case("Dropout", X),
    case("Dropout", X, 0.5),
    case("Expand", normal(3, 1), [2, 1, 4]),
    case("Flatten", X),
    case("Flatten", X, axis=0),
    case("Flatten", X, axis=-1),
    case("Identity", X),
    case("Pad", X, [0, 1, 2, 0, 0, 1], 0.5),
    case("Pad", X, [1, -1, 0, 2], None, [2, 1]),
    case("Pad", X, [0, 1, 2, 0, 2, 3], mode="reflect"),
    case("Pad", X, [0, 1, 2, 1, 0, 1], mode="edge"),
    case("Pad", X, [0, 1, 2, 1, 0, 1], mode="wrap"),
    case("Reshape", X, [0, -1]),
    case("Reshape", X, [4, 6]),
    case("Reshape", normal(0, 3), [3, 0], allowzero=1),
    case("SpaceToDepth", normal(2, 3, 4, 6), blocksize=2),
    case("Split", X, [1, 2], axis=1, outputs=2),
    case("Split", X, axis=-1, num_outputs=3, outputs=3),
    case("Squeeze", normal(1, 3, 1), [0, -1]),
    case("Squeeze", normal(1, 3, 1)),
    case("Tile", X, [1, 2, 3]),
    case("Transpose", X),
    case("Transpose", X, perm=[1, 2, 0]),
    case("Unsqueeze", X, [0, -1]),
    case("Unsqueeze", X, [3, 1]),
]

INDICES = [
    case("CumSum", X, np.array(1)),
    case("CumSum", X, np.array(-1), exclusive=1, reverse=1),
    case("Gather", X, np.array([[0, -1], [2, 1]]), axis=1),
    case("Gather", X, np.array(-2), axis=2),
    case("Gather", normal(5, 3), np.array([[4, 0, 0]])),
    case("GatherElements", X, np.array([[[0, -1]], [[2, 1]]]), axis=2),
    case("GatherND", X, np.array([[1, 2], [0, -1]])),
    case("ScatterElements", X, np.array([[[0, -1]], [[2, 1]]]), normal(2, 1, 2), axis=2),
    case("ScatterElements", X, np.array([[[0, 0]]]), normal(1, 1, 2), axis=1, reduction="add"),
    case("ScatterND", X, np.array([[1, 2], [0, -1]]), normal(2, 4)),
    case("ScatterND", X, np.array([[1], [1]]), normal(2, 3, 4), reduction="add"),
    case("Slice", X, [1, 0], [3, -1], [1, 2]),
    case("Slice", X, [0], [2]),
    case("Slice", X, [-1, 0], [np.iinfo(np.int64).min, 1000], [2, 0], [-2, 1]),
    case("Slice", X, [1], [-1], [2], [2]),
    case("Trilu", normal(3, 4)),
    case("Trilu", normal(2, 3, 4), np.array(-1), upper=0),
]

REDUCTIONS = [
    *(
        case(name, positive(2, 3, 4), *inputs, **attributes)
        for name in (
            *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax"),
            *("ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"),
        )
        for inputs, attributes in (
            (([1],), {}),
            (([0, -1],), {"keepdims": 0}),
            ((), {}),
            ((None,), {"noop_with_empty_axes": 1}),
        )
    ),
    case("ReduceSum", np.array([[1, 2], [3, 4]], np.int32), [0]),
    case("ArgMax", X, axis=1),
    case("ArgMin", X, axis=-1, keepdims=0),
    case("TopK", X, [2], outputs=2),
    case("TopK", X, [2], axis=1, largest=0, outputs=2),
]

SHAPES = [
    case("Cast", np.array([-1.7, 0.0, 2.9], np.float32), to=onnx.TensorProto.INT64),
    case("Cast", np.array([-1, 0, 2]), to=onnx.TensorProto.FLOAT),
    case("Cast", np.array([-1.5, 0.0, np.nan], np.float32), to=onnx.TensorProto.BOOL),
    case("Cast", X, to=onnx.TensorProto.DOUBLE),
    case("CastLike", X, np.array([1], np.int32)),
    case("CastLike", X, np.array([1], np.float64)),
    case("ConstantOfShape", [2, 3]),
    case("ConstantOfShape", [2], value=helper.make_tensor("v", onnx.TensorProto.INT64, [1], [7])),
    case("Range", np.array(2), np.array(11), np.array(3)),
    case("Range", 1.0, 0.0, -0.25),
    case("Shape", X),
    case("Shape", X, start=-2, end=-1),
    case("Size", X),
]

_T, _B, _I, _H = 4, 2, 3, 2


def recurrent(op_type: str, gates: int, directions: int, states: int, **attributes: Any) -> Case:
    """A recurrent layer with all the inputs that are known."""
    given: list[Any] = [
        normal(_T, _B, _I),
        normal(directions, gates * _H, _I),
        normal(directions, gates * _H, _H),
        normal(directions, 2 * gates * _H),
        None,
        *(normal(directions, _B, _H) for _ in range(states)),
    ]
    attributes |= {"hidden_size": _H}
    return case(op_type, *given, outputs=1 + states, **attributes)


RECURRENT = [
    recurrent("LSTM", 4, 1, 2),
    recurrent("LSTM", 4, 2, 2, direction="bidirectional"),
    recurrent("GRU", 3, 1, 1, direction="reverse"),
    recurrent("GRU", 3, 2, 1, direction="bidirectional", linear_before_reset=1),
    recurrent("GRU", 3, 1, 1, activations=["sigmoid", "Tanh"]),
    recurrent("RNN", 1, 2, 1, direction="bidirectional"),
    case("LSTM", normal(_T, _B, _I), normal(1, 8, _I), normal(1, 8, _H), hidden_size=_H),
    case("GRU", normal(_T, _B, _I), normal(1, 6, _I), normal(1, 6, _H), hidden_size=_H),
    case("RNN", normal(_T, _B, _I), normal(1, 2, _I), normal(1, 2, _H), hidden_size=_H),
]

_SCALES = np.array([1, 1, 2, 1.5], np.float32), np.array([1, 1, 0.7, 3], np.float32)
_PLACES = ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel")

RESIZES = [
    *(
        case(*("Resize", IMAGE, None, scales), mode=mode, coordinate_transformation_mode=place)
        for mode in ("nearest", "linear", "cubic")
        for place in (*_PLACES, "half_pixel_symmetric")
        for scales in _SCALES
    ),
    *(
        case(*("Resize", IMAGE, None, _SCALES[0]), nearest_mode=mode)
        for mode in ("round_prefer_ceil", "floor", "ceil")
    ),
    case("Resize", IMAGE, None, None, [1, 3, 5, 11], mode="linear"),
    case("Resize", IMAGE, None, None, [5, 11], mode="nearest", axes=[2, 3]),
    case("Resize", IMAGE, None, _SCALES[0], mode="cubic", cubic_coeff_a=-0.5, exclude_outside=1),
]

CASES = [
    *ELEMENTWISE,
    *LINEAR,
    *POOLS,
    *NORMALIZATIONS,
    *MOVEMENTS,
    *INDICES,
    *REDUCTIONS,
    *SHAPES,
    *RECURRENT,
    *RESIZES,
]

OLDER = [
    case("Softmax", X, opset=9),
    case("LogSoftmax", X, opset=11, axis=1),
    case("Squeeze", normal(1, 3, 1), opset=11, axes=[0]),
    case("Unsqueeze", X, opset=11, axes=[0, 2]),
    case("Clip", X, opset=9, min=-0.5, max=0.7),
    case("Pad", X, opset=9, pads=[0, 1, 2, 0, 0, 1], value=0.5),
    case("Slice", X, opset=9, starts=[1], ends=[3], axes=[1]),
    case("ReduceSum", X, opset=11, axes=[1]),
    case("ReduceMean", X, opset=13, axes=[1], keepdims=0),
    case("Split", X, opset=11, split=[1, 2], axis=1, outputs=2),
    case("Resize", IMAGE, _SCALES[0], opset=10),
    case("Upsample", IMAGE, np.array([1, 1, 2, 2], np.float32), opset=9),
    case("BatchNormalization", IMAGE, normal(3), normal(3), normal(3), positive(3), opset=9),
]
"""Forms of older operator sets."""
