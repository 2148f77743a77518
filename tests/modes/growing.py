"""Grows random ONNX graphs, operator set by operator set. Nothing here uses slimctl."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = tuple[int, ...]
Value = tuple[str, Shape]
BATCH = 2
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


@dataclass
class Weights:
    """The constants of a model, shared by all its graphs.

    Attributes:
        rng: Of the values.
        arrays: By name.
        homes: Graphs whose initializers they are; the rest are the main graph's.
    """

    rng: np.random.Generator
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)
    count: int = 0

    def name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"


@dataclass
class Grower:
    """One graph that grows, a main graph or a body.

    Attributes:
        draw: A number below the one given.
        opset: Version of the default operator set.
        weights: Of the whole model.
        values: Float tensors that may be read: name and shape with a batch of two.
        nodes: So far.
        title: Name of the graph.
    """

    draw: Callable[[int], int]
    opset: int
    weights: Weights
    values: list[Value]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    title: str = "main"

    def chance(self, one_in: int) -> bool:
        return self.draw(one_in) == 0

    def pick(self, *options: object) -> object:
        return options[self.draw(len(options))]

    def constant(self, array: np.ndarray | float, kind: str = "c") -> str:
        """A new constant, now and then one that belongs to a body."""
        name = self.weights.name(kind)
        array = np.asarray(array)
        self.weights.arrays[name] = array.astype(np.float32) if array.dtype == float else array
        if self.title != "main" and self.chance(2):
            self.weights.homes[name] = self.title
        return name

    def integers(self, *numbers: int) -> str:
        return self.constant(np.array(numbers, np.int64), "i")

    def weight(self, *shape: int, inputs: int) -> str:
        """Random weights, now and then those that another layer has already.

        Args:
            shape: Of the weight.
            inputs: Values that each output adds up; outputs are as large as inputs then.
        """
        alike = [
            name
            for name, array in self.weights.arrays.items()
            if array.shape == shape and name[0] == "w" and self._sees(name)
        ]
        if alike and self.chance(3):
            return alike[self.draw(len(alike))]
        array = self.weights.rng.normal(size=shape) / np.sqrt(inputs)
        return self.constant(array, "w")

    def _sees(self, name: str) -> bool:
        return self.weights.homes.get(name, self.title) == self.title

    def vector(self, count: int, *, center: float = 0.0, spread: float = 0.2) -> str:
        return self.constant(self.weights.rng.normal(center, spread, count), "b")

    def node(self, op_type: str, inputs: Sequence[str], outputs: int = 1, **attributes: object):
        """Appends a node; its first output."""
        names = [self.weights.name("v") for _ in range(outputs)]
        label = self.weights.name(f"{op_type}_") if self.draw(8) else ""
        domain = str(attributes.pop("domain", ""))
        self.nodes.append(
            helper.make_node(op_type, inputs, names, name=label, domain=domain, **attributes)
        )
        return names[0]

    def give(self, name: str, *shape: int) -> None:
        """A float tensor that later nodes may read."""
        self.values.append((name, shape))

    # operators whose form depends on the operator set

    def squeeze(self, name: str, *axes: int, op_type: str = "Squeeze") -> str:
        if self.opset < 13:
            return self.node(op_type, [name], axes=axes)
        return self.node(op_type, [name, self.integers(*axes)])

    def reduce(self, op_type: str, name: str, *axes: int, keep: bool) -> str:
        if self.opset < (13 if op_type == "ReduceSum" else 18):
            return self.node(op_type, [name], axes=axes, keepdims=int(keep))
        return self.node(op_type, [name, self.integers(*axes)], keepdims=int(keep))

    def clip(self, name: str, low: float | None, high: float | None) -> str:
        if self.opset < 11:
            bounds = {"min": low, "max": high}
            given = {key: value for key, value in bounds.items() if value is not None}
            return self.node("Clip", [name], **given)
        inputs = ["" if bound is None else self.constant(bound) for bound in (low, high)]
        return self.node("Clip", [name, *inputs])

    def pad(self, name: str, amounts: Sequence[int], mode: str) -> str:
        if self.opset < 11:
            return self.node("Pad", [name], pads=amounts, mode=mode)
        return self.node("Pad", [name, self.integers(*amounts)], mode=mode)

    def slice(self, name: str, start: int, end: int, axis: int) -> str:
        if self.opset < 10:
            return self.node("Slice", [name], starts=[start], ends=[end], axes=[axis])
        inputs = [self.integers(number) for number in (start, end, axis)]
        return self.node("Slice", [name, *inputs])

    def split(self, name: str, axis: int, *sizes: int) -> list[str]:
        attributes = {"split": sizes} if self.opset < 13 else {}
        inputs = [name] if self.opset < 13 else [name, self.integers(*sizes)]
        self.node("Split", inputs, len(sizes), axis=axis, **attributes)
        return list(self.nodes[-1].output)

    def resize(self, name: str, scales: Sequence[float], mode: str) -> str:
        factors = self.constant(np.array(scales))
        if self.opset < 10:
            return self.node("Upsample", [name, factors], mode=mode)
        inputs = [name, factors]
        if self.opset >= 11:
            inputs = [name, self.constant(np.zeros(0)) if self.opset < 13 else "", factors]
        return self.node("Resize", inputs, mode=mode)

    def flat(self, name: str, *shape: int) -> str:
        """Reshape; 0 copies a size and -1 takes the rest, so that any batch fits."""
        return self.node("Reshape", [name, self.integers(*shape)])

    def body(self, title: str, *, inputs: Sequence[Value] = ()) -> Grower:
        """A graph within this one, which sees what this one sees."""
        label = self.weights.name(title)
        return Grower(self.draw, self.opset, self.weights, [*self.values, *inputs], [], label)

    def graph(
        self, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]
    ) -> onnx.GraphProto:
        """What was grown."""
        stored = [
            numpy_helper.from_array(array, name)
            for name, array in self.weights.arrays.items()
            if self.weights.homes.get(name, "main") == self.title
        ]
        return helper.make_graph(self.nodes, self.title, inputs, outputs, stored)


def info(name: str, shape: Shape | None, batch: str = "", kind: int = FLOAT) -> onnx.ValueInfoProto:
    """Type and shape of a tensor; the batch may have a name instead of a size."""
    dims = None if shape is None else [batch or shape[0], *shape[1:]] if shape else []
    return helper.make_tensor_value_info(name, kind, dims)


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and all within it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs(attribute.g)
