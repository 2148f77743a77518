"""What a quantized model may lose at most: what the float model loses when it is rounded plainly.

Every float weight is rounded to even steps of the whole tensor, and every activation that the mode
rounds to even steps of its own range, by operators of the graph itself. What comes out is how much
of such errors this network lets through, which for random networks can be anything: 50 dB where
they average out, 0 dB behind a difference of large numbers. Real rounding is finer (scales per
channel, per block) but falls on other numbers: the steps are tried in three sizes that differ by a
few percent, the worst counts, and ``MARGIN_DB``, twice the error, is for the luck that is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper, shape_inference

from tests.modes.growing import FLOAT, graphs

Rounded = Literal["all", "layers", "none"]
LAYERS = ("MatMul", "Gemm", "LSTM", "Attention", "Conv")
MARGIN_DB = 6.0
SIZES = (1.0, 0.93, 1.06)
Array = np.ndarray
Feeds = dict[str, Array]


@dataclass(frozen=True)
class Steps:
    """How coarse a mode is.

    Attributes:
        weights: Steps from zero to the largest weight of a tensor.
        activations: Steps of the range of an activation.
        rounded: Which activations are rounded.
        relative: A step is a share of each number, as for floats, and not of the range.
    """

    weights: int
    activations: int = 0
    rounded: Rounded = "none"
    relative: bool = False


def floors_db(
    proto: onnx.ModelProto,
    feeds: Sequence[Feeds],
    reference: Sequence[Sequence[Array]],
    steps: Steps,
) -> list[float]:
    """The least SQNR of each output on some samples."""
    found = []
    for size in SIZES:
        session = ort.InferenceSession(rounded(proto, steps, size).SerializeToString())
        runs = [session.run(None, feed) for feed in feeds]
        pairs = zip(joined(reference), joined(runs), strict=True)
        found.append([_floor_db(ours, theirs, steps) for ours, theirs in pairs])
    return [min(each) for each in zip(*found, strict=True)]


def joined(runs: Sequence[Sequence[Array]]) -> list[Array]:
    """One array per output."""
    return [np.concatenate([a.ravel() for a in each]) for each in zip(*runs, strict=True)]


def _floor_db(ours: Array, theirs: Array, steps: Steps) -> float:
    """The output itself is rounded where activations are."""
    signal = float(np.mean(ours.astype(np.float64) ** 2))
    noise = float(np.mean((ours.astype(np.float64) - theirs) ** 2))
    if steps.rounded == "all":
        size = ours if steps.relative else max(ours.max(), 0.0) - min(ours.min(), 0.0)
        noise += float(np.mean((size / steps.activations) ** 2)) / 12
    return 10 * np.log10(max(signal, 1e-30) / max(noise, 1e-30)) - MARGIN_DB


def rounded(proto: onnx.ModelProto, steps: Steps, size: float) -> onnx.ModelProto:
    """A copy with rounded weights, and operators that round activations."""
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    for graph in graphs(model.graph):
        for tensor in _tensors(graph):
            _round_weight(tensor, steps, size)
    if steps.rounded != "none":
        floats = _floats(model)
        for graph in list(graphs(model.graph)):
            _round_activations(graph, floats, steps, size)
    return model


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        if node.op_type == "Constant":
            yield from (attribute.t for attribute in node.attribute if attribute.HasField("t"))


def _round_weight(tensor: onnx.TensorProto, steps: Steps, size: float) -> None:
    """Integers leave the vectors ("b") in float or in 32 bits, all leave plain numbers ("c")."""
    if tensor.name[0] not in ("wb" if steps.relative else "w"):
        return
    array = numpy_helper.to_array(tensor)
    largest = np.abs(array) if steps.relative else np.abs(array).max(initial=1e-30)
    step = np.maximum(largest, 1e-30) * size / steps.weights
    if steps.relative:
        result = array + step * _fractions(array, size)
    else:
        result = step * np.rint(array / step)
    tensor.CopyFrom(numpy_helper.from_array(result.astype(np.float32), tensor.name))


def _fractions(array: Array, size: float) -> Array:
    """Something within one half that any two numbers have different."""
    turned = 977.0 * size * array
    return turned - np.floor(turned) - 0.5


def _floats(model: onnx.ModelProto) -> set[str]:
    """Names of all tensors that are known to hold floats."""
    inferred = shape_inference.infer_shapes(model)
    return {
        value.name
        for graph in graphs(inferred.graph)
        for value in (*graph.value_info, *graph.input, *graph.output)
        if value.type.tensor_type.elem_type == FLOAT
    }


def _round_activations(graph: onnx.GraphProto, floats: set[str], steps: Steps, size: float) -> None:
    """Nodes of the graph read rounded tensors; outputs and what bodies capture stay."""
    stored = {item.name for item in graph.initializer}
    made = [item.name for item in graph.input if item.name not in stored]
    made += [name for node in graph.node if node.op_type != "Constant" for name in node.output]
    wanted = {
        name
        for node in graph.node
        for index, name in enumerate(node.input)
        if steps.rounded == "all" or (node.op_type in LAYERS and index < 2)
    }
    make = _relative if steps.relative else _even
    added = {n: list(make(n, steps.activations, size)) for n in made if n in floats & wanted}
    result = [new for item in graph.input for new in added.get(item.name, ())]
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name in added:
                node.input[index] = added[name][-1].output[0]
        result.append(node)
        result += [new for name in node.output for new in added.get(name, ())]
    copies = [_copied(node) for node in result]
    del graph.node[:]
    graph.node.extend(copies)


def _copied(node: onnx.NodeProto) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


def _even(name: str, count: int, size: float) -> Iterator[onnx.NodeProto]:
    """``step * floor(x / step + 1/2)``, a step being the range with zero divided by their count."""

    def made(kind: str, *inputs: str, op_type: str = "", **attributes: int) -> onnx.NodeProto:
        return helper.make_node(op_type or kind, inputs, [f"{name}~{kind}"], **attributes)

    yield _number(f"{name}~count", count / size)
    yield _number(f"{name}~half", 0.5)
    yield _number(f"{name}~least", 1e-30)
    yield made("zero", name, name, op_type="Sub")
    yield made("over", name, f"{name}~zero", op_type="Max")
    yield made("under", name, f"{name}~zero", op_type="Min")
    yield made("top", f"{name}~over", op_type="ReduceMax", keepdims=0)
    yield made("bottom", f"{name}~under", op_type="ReduceMin", keepdims=0)
    yield made("range", f"{name}~top", f"{name}~bottom", op_type="Sub")
    yield made("positive", f"{name}~range", f"{name}~least", op_type="Add")
    yield made("step", f"{name}~positive", f"{name}~count", op_type="Div")
    yield made("steps", name, f"{name}~step", op_type="Div")
    yield made("shifted", f"{name}~steps", f"{name}~half", op_type="Add")
    yield made("Floor", f"{name}~shifted")
    yield made("result", f"{name}~Floor", f"{name}~step", op_type="Mul")


def _relative(name: str, count: int, size: float) -> Iterator[onnx.NodeProto]:
    """``x + x * fraction(x) / count``."""

    def made(kind: str, *inputs: str, op_type: str = "") -> onnx.NodeProto:
        return helper.make_node(op_type or kind, inputs, [f"{name}~{kind}"])

    yield _number(f"{name}~count", float(count))
    yield _number(f"{name}~half", 0.5)
    yield _number(f"{name}~factor", 977.0 * size)
    yield made("turned", name, f"{name}~factor", op_type="Mul")
    yield made("Floor", f"{name}~turned")
    yield made("part", f"{name}~turned", f"{name}~Floor", op_type="Sub")
    yield made("fraction", f"{name}~part", f"{name}~half", op_type="Sub")
    yield made("share", f"{name}~fraction", f"{name}~count", op_type="Div")
    yield made("error", name, f"{name}~share", op_type="Mul")
    yield made("result", name, f"{name}~error", op_type="Add")


def _number(name: str, value: float) -> onnx.NodeProto:
    tensor = numpy_helper.from_array(np.array(value, np.float32))
    return helper.make_node("Constant", [], [name], value=tensor)
