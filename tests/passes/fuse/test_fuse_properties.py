"""Random graphs: every check of ``fuse_model`` holds for each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Shape = tuple[int, int, int, int]
Draw = Callable[..., int]


@dataclass
class Builder:
    """Grows a graph of four-dimensional tensors, one random node after the other."""

    draw: Draw
    nodes: list[ir.Node] = field(default_factory=list)
    constants: list[ir.Value] = field(default_factory=list)
    values: list[tuple[ir.Value, Shape]] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(3))

    def pick(self, *options: object) -> object:
        return options[self.draw(len(options))]

    def constant(self, array: np.ndarray) -> ir.Value:
        """A new constant, or one of the same shape and type that others read as well."""
        alike = [
            value
            for value in self.constants
            if value.const_value.dtype == ir.DataType.from_numpy(array.dtype)
            and tuple(value.const_value.shape) == array.shape
            and array.dtype.kind == "f"
        ]
        if alike and self.draw(3) == 0:
            return alike[self.draw(len(alike))]
        name = f"k{len(self.constants)}"
        tensor = ir.Tensor(array, name=name)
        value = ir.Value(
            name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=tensor.shape
        )
        self.constants.append(value)
        return value

    def floats(self, *shape: int) -> ir.Value:
        array = self.rng.uniform(0.5, 1.5, shape) * self.rng.choice([-1, 1], shape)
        return self.constant(np.asarray(array, np.float32))

    def integers(self, *numbers: int) -> ir.Value:
        return self.constant(np.array(numbers, np.int64))

    def node(self, op_type: str, inputs: list, shape: Shape, **attributes: object) -> None:
        name = f"n{len(self.nodes)}"
        node = ir.node(op_type, inputs, attributes, name=name)
        node.outputs[0].name = f"v{len(self.nodes)}"
        self.nodes.append(node)
        self.values.append((node.outputs[0], shape))

    def step(self) -> None:
        """Appends one node to the latest tensor, or now and then to an earlier one."""
        value, shape = self.values[-1 if self.draw(5) else self.draw(len(self.values))]
        steps = (
            self.convolve, self.convolve, self.convolve_up, self.normalize, self.normalize,
            self.calculate, self.calculate, self.pad, self.pass_on, self.pass_on, self.turn,
            self.activate, self.pool, self.join, self.derive,
        )  # fmt: skip
        steps[self.draw(len(steps))](value, shape)

    def convolve(self, value: ir.Value, shape: Shape) -> None:
        n, c, h, w = shape
        group, outputs = int(self.pick(1, 1, c)), c * int(self.pick(1, 2))
        size = 3 if min(h, w) >= 3 and self.draw(2) else 1
        around = self.draw(2)
        inputs = [value, self.floats(outputs, c // group, size, size)]
        if self.draw(2):
            inputs.append(self.floats(outputs))
        grow = 2 * around - size + 1
        result = (n, outputs, h + grow, w + grow)
        self.node("Conv", inputs, result, group=group, pads=[around] * 4)

    def convolve_up(self, value: ir.Value, shape: Shape) -> None:
        n, c, h, w = shape
        if h > 12:
            return
        group = int(self.pick(1, c))
        inputs = [value, self.floats(c, 2, 2, 2)]
        self.node(
            "ConvTranspose", inputs, (n, 2 * group, 2 * h, 2 * w), group=group, strides=[2, 2]
        )

    def normalize(self, value: ir.Value, shape: Shape) -> None:
        gamma, beta, mean = (self.floats(shape[1]) for _ in range(3))
        variance = self.constant(self.rng.uniform(0.5, 2, shape[1]).astype(np.float32))
        if (variance.const_value.numpy() <= 0).any():  # shared with another constant
            return
        self.node("BatchNormalization", [value, gamma, beta, mean, variance], shape)

    def calculate(self, value: ir.Value, shape: Shape) -> None:
        _, c, h, w = shape
        forms = ((), (1,), (c, 1, 1), (1, c, 1, 1), (1, 1, h, w), (w,))
        form = forms[self.draw(len(forms))]
        pair = [value, self.floats(*form)]
        if self.draw(3) == 0:
            pair.reverse()
        op_type = str(self.pick("Mul", "Add", "Sub", "Div" if pair[0] is value else "Mul"))
        self.node(op_type, pair, shape)

    def pad(self, value: ir.Value, shape: Shape) -> None:
        n, c, h, w = shape
        amounts = [self.draw(3) if self.draw(3) else 0 for _ in range(4)]
        number = self.constant(np.array(self.pick(0, 0, 0, 1), np.float32))
        top, left, bottom, right = amounts
        inputs = [value, self.integers(0, 0, top, left, 0, 0, bottom, right), number]
        self.node("Pad", inputs, (n, c, h + top + bottom, w + left + right))

    def pass_on(self, value: ir.Value, shape: Shape) -> None:
        zero, whole = self.integers(0), self.integers(2**62)
        match self.draw(8):
            case 0:
                self.node("Identity", [value], shape)
            case 1:
                self.node("Dropout", [value], shape)
            case 2:
                self.node("Cast", [value], shape, to=1)
            case 3:
                self.node("Concat", [value], shape, axis=1)
            case 4:
                self.node("Slice", [value, zero, whole, self.integers(2)], shape)
            case 5:
                self.node("Reshape", [value, self.integers(0, *shape[1:])], shape)
            case 6:
                self.node("Expand", [value, self.integers(1, *shape[2:])], shape)
            case _:
                one = self.constant(np.ones((), np.float32))
                self.node("Mul", [value, one], shape)

    def turn(self, value: ir.Value, shape: Shape) -> None:
        n, c, h, w = shape
        self.node("Transpose", [value], (n, c, w, h), perm=[0, 1, 3, 2])

    def activate(self, value: ir.Value, shape: Shape) -> None:
        self.node(str(self.pick("Relu", "Sigmoid", "Tanh")), [value], shape)

    def pool(self, value: ir.Value, shape: Shape) -> None:
        n, c, h, w = shape
        if min(h, w) < 2:
            return
        self.node(
            "AveragePool", [value], (n, c, h - 1, w - 1),
            kernel_shape=[2, 2], count_include_pad=self.draw(2),
        )  # fmt: skip

    def join(self, value: ir.Value, shape: Shape) -> None:
        alike = [other for other, its in self.values if its == shape]
        self.node("Add", [value, alike[self.draw(len(alike))]], shape)

    def derive(self, value: ir.Value, shape: Shape) -> None:
        """Arithmetic with a number that is calculated from constants."""
        self.node("Tanh", [self.floats(shape[1], 1, 1)], (1, 1, 1, 1))
        number, _ = self.values.pop()
        self.node(str(self.pick("Mul", "Add")), [value, number], shape)

    def model(self, extra: int) -> ir.Model:
        outputs = dict.fromkeys([self.values[-1][0], *(v for v, _ in self.values[1 : 1 + extra])])
        for value, shape in self.values:
            if value in outputs:
                value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
        graph = ir.Graph(
            [self.values[0][0]],
            list(outputs),
            nodes=self.nodes,
            initializers=self.constants,
            opset_imports={"": 17},
            name="random",
        )
        return ir.Model(graph, ir_version=10)


@st.composite
def models(draw: st.DrawFn) -> ir.Model:
    builder = Builder(lambda count: draw(st.integers(0, count - 1)))
    shape = (2, draw(st.integers(1, 3)), 6, 6)
    start = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
    builder.values.append((start, shape))
    for _ in range(draw(st.integers(1, 8))):
        builder.step()
    if not builder.nodes:
        builder.activate(start, shape)
    return builder.model(extra=draw(st.integers(0, 2)))


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(model=models())
def test_random_graphs(model: ir.Model, fuse_model: Callable) -> None:
    fused = fuse_model(model)
    assert fused.after.graph.num_nodes() <= model.graph.num_nodes()
    assert "BatchNormalization" not in {
        node.op_type for node in fused.after.graph if node.name not in fused.reasons
    }
