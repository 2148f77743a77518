"""Random networks: whatever the analysis lets go can go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.channels.exactness import assert_exact
from tests.graph.channels.table import Weight, ints, parsed

_Shape = tuple[int, int, int]


@dataclass
class Network:
    """Grows a network of images, one random step after the other.

    Attributes:
        draw: A number below the one given.
        nodes: ONNX text.
        weights: Initializers.
        values: Images so far: name and channels, height, width.
        read: Names of everything that a node reads.
        count: Of names that were given.
    """

    draw: Callable[[int], int]
    nodes: list[str] = field(default_factory=list)
    weights: dict[str, Weight] = field(default_factory=dict)
    values: list[tuple[str, _Shape]] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    count: int = 0

    def name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def weight(self, value: Weight) -> str:
        """A new constant, or one of the same shape that others read as well."""
        if isinstance(value, tuple):
            tuples = {k: v for k, v in self.weights.items() if isinstance(v, tuple)}
            alike = [name for name, shape in tuples.items() if shape == value]
            if alike and self.draw(5) == 0:
                return alike[self.draw(len(alike))]
        name = self.name("w")
        self.weights[name] = value
        return name

    def node(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        """Appends a node and gives its first output; others are called ``<first>_1`` and so on."""
        name = self.name("v")
        names = [name, *(f"{name}_{index}" for index in range(1, outputs))]
        listed = ", ".join(
            f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}"
            for key, value in attributes.items()
        )
        given = f"<{listed}>" if listed else ""
        self.read.update(inputs)
        self.nodes.append(
            f"[n{self.count}] {', '.join(names)} = {op_type}{given}({', '.join(inputs)})"
        )
        return name

    def keep(self, name: str, shape: _Shape) -> None:
        self.values.append((name, shape))

    def pick(self) -> tuple[str, _Shape]:
        """The latest image, or now and then an earlier one."""
        return self.values[-1 if self.draw(4) else self.draw(len(self.values))]

    def like(self, shape: _Shape) -> list[str]:
        return [name for name, other in self.values if other == shape]

    def step(self) -> None:
        steps = (
            self.convolve, self.convolve, self.convolve, self.convolve, self.convolve_up,
            self.convolve_up, self.normalize, self.activate, self.activate, self.calculate,
            self.combine, self.combine, self.join, self.divide, self.select, self.weigh,
            self.split, self.slice, self.slice, self.gather, self.shuffle, self.blocks,
            self.excite, self.attend, self.pool, self.pad, self.rearrange, self.flatten,
            self.project,
        )  # fmt: skip
        name, shape = self.pick()
        steps[self.draw(len(steps))](name, shape)

    def convolve(self, name: str, shape: _Shape) -> None:
        c, h, w = shape
        group = (1, 1, 2, c)[self.draw(4)]
        group = group if c % group == 0 else 1
        outputs = group * (1 + self.draw(3)) if group > 2 else group * (2 + self.draw(5))
        size = 3 if min(h, w) >= 3 and self.draw(2) else 1
        pad = self.draw(2)
        inputs = [name, self.weight((outputs, c // group, size, size))]
        if self.draw(2):
            inputs.append(self.weight((outputs,)))
        made = self.node("Conv", *inputs, group=group, pads=[pad] * 4)
        grown = 2 * pad - size + 1
        self.keep(made, (outputs, h + grown, w + grown))

    def convolve_up(self, name: str, shape: _Shape) -> None:
        c, h, w = shape
        group = (1, 2, c)[self.draw(3)]
        group = group if c % group == 0 else 1
        each = 1 + self.draw(4)
        inputs = [name, self.weight((c, each, 2, 2)), self.weight((group * each,))]
        made = self.node("ConvTranspose", *inputs, group=group)
        self.keep(made, (group * each, h + 1, w + 1))

    def normalize(self, name: str, shape: _Shape) -> None:
        c = shape[0]
        vectors = [self.weight((c,)) for _ in range(3)]
        if self.draw(3):
            spread = self.weight(np.linspace(0.5, 1.5, c, dtype=np.float32))
            made = self.node("BatchNormalization", name, *vectors, spread)
        else:
            made = self.node("InstanceNormalization", name, *vectors[:2], epsilon=0.1)
        self.keep(made, shape)

    def activate(self, name: str, shape: _Shape) -> None:
        kinds = ("Relu", "Sigmoid", "Tanh", "HardSigmoid", "HardSwish", "Softplus", "Cos", "Abs")
        self.keep(self.node(kinds[self.draw(len(kinds))], name), shape)

    def calculate(self, name: str, shape: _Shape) -> None:
        """With a constant: one number, one for each channel, one for each place, or for all."""
        c, h, w = shape
        forms = ((), (1,), (c, 1, 1), (1, c, 1, 1), (h, w), (c, h, w))
        op_type = ("Add", "Sub", "Mul", "Max", "Min")[self.draw(5)]
        operands = [name, self.weight(forms[self.draw(len(forms))])]
        if self.draw(2):
            operands.reverse()
        self.keep(self.node(op_type, *operands), shape)

    def divide(self, name: str, shape: _Shape) -> None:
        """By what is never zero."""
        others = self.like(shape)
        size = self.node("Abs", others[self.draw(len(others))])
        if self.draw(2):
            size = self.node("ReduceMean", size, axes=[1 + self.draw(3)])
        below = self.node("Add", size, self.weight(np.array(1, np.float32)))
        self.keep(self.node("Div", name, below), shape)

    def select(self, name: str, shape: _Shape) -> None:
        others = self.like(shape)
        other = others[self.draw(len(others))]
        number = self.weight(np.array(0.1 * self.draw(3), np.float32))
        mask = self.node("Greater", other, (name, number)[self.draw(2)])
        operands = (name, number) if self.draw(2) else (other, name)
        self.keep(self.node("Where", mask, *operands), shape)

    def weigh(self, name: str, shape: _Shape) -> None:
        """With something that is computed over one of the axes."""
        kind = self.draw(4)
        axis = 1 + self.draw(3)
        if kind == 0:
            factor = self.node("Softmax", name, axis=axis)
        elif kind == 1:
            factor = self.node("ReduceMean", name, axes=[axis])
        elif kind == 2:
            factor = self.node("ReduceL2", self.node("Tanh", name), axes=[1], keepdims=1)
        else:
            slope = self.weight(((shape[0], 1, 1), (1,))[self.draw(2)])
            factor = self.node("PRelu", name, slope)
        made = self.node(("Mul", "Sub")[self.draw(2)], name, factor)
        self.keep(self.node("Tanh", made), shape)

    def combine(self, name: str, shape: _Shape) -> None:
        """With another image of the same shape, perhaps itself, or with a convolution to it."""
        others = self.like(shape)
        other = others[self.draw(len(others))]
        if self.draw(2):
            source, (c, h, w) = self.values[self.draw(len(self.values))]
            if (h, w) == shape[1:]:
                other = self.node("Conv", source, self.weight((shape[0], c, 1, 1)))
        op_type = ("Add", "Add", "Mul", "Max", "Sub")[self.draw(5)]
        made = self.node(op_type, name, other)
        self.keep(self.node("Tanh", made) if op_type == "Mul" else made, shape)

    def join(self, name: str, shape: _Shape) -> None:
        parts = [(name, shape)]
        for _ in range(1 + self.draw(2)):
            fitting = [value for value in self.values if value[1][1:] == shape[1:]]
            parts.append(fitting[self.draw(len(fitting))])
        made = self.node("Concat", *(part for part, _ in parts), axis=(1, -3)[self.draw(2)])
        channels = sum(part[0] for _, part in parts)
        if channels <= 24:
            self.keep(made, (channels, *shape[1:]))

    def split(self, name: str, shape: _Shape) -> None:
        first = 1 + self.draw(shape[0])
        if first == shape[0]:
            return
        sizes = self.weight(ints(first, shape[0] - first))
        made = self.node("Split", name, sizes, outputs=2, axis=1)
        if self.draw(2):
            back = self.node("Concat", f"{made}_1", self.node("Relu", made), axis=1)
            self.keep(back, shape)
        else:
            self.keep(made, (first, *shape[1:]))
            self.keep(f"{made}_1", (shape[0] - first, *shape[1:]))

    def slice(self, name: str, shape: _Shape) -> None:
        c = shape[0]
        step = (1, 2, -1, -2, 3)[self.draw(5)]
        low, high = sorted((self.draw(c), self.draw(c)))
        start, end = (low, high + 1) if step > 0 else (high, low - 1 if low else -c - 1)
        count = len(range(low, high + 1, abs(step)))
        bounds = [self.weight(ints(number)) for number in (start, end, 1, step)]
        self.keep(self.node("Slice", name, *bounds), (count, *shape[1:]))

    def gather(self, name: str, shape: _Shape) -> None:
        c = shape[0]
        chosen = [self.draw(2 * c) - c for _ in range(1 + self.draw(c))]
        made = self.node("Gather", name, self.weight(ints(*chosen)), axis=1)
        self.keep(made, (len(chosen), *shape[1:]))

    def shuffle(self, name: str, shape: _Shape) -> None:
        c, h, w = shape
        group = (2, 3, 4)[self.draw(3)]
        if c % group:
            return
        apart = self.node("Reshape", name, self.weight(ints(-1, group, c // group, h, w)))
        turned = self.node("Transpose", apart, perm=[0, 2, 1, 3, 4])
        self.keep(self.node("Reshape", turned, self.weight(ints(-1, c, h, w))), shape)

    def blocks(self, name: str, shape: _Shape) -> None:
        c, h, w = shape
        group = (2, 3)[self.draw(2)]
        if c % group:
            return
        apart = self.node("Reshape", name, self.weight(ints(0, group, c // group, h, w)))
        axis = 1 + self.draw(2)
        made = self.node("ReduceSum", apart, self.weight(ints(axis)), keepdims=0)
        self.keep(made, (c // group if axis == 1 else group, h, w))

    def excite(self, name: str, shape: _Shape) -> None:
        c = shape[0]
        pooled = self.node("GlobalAveragePool", name)
        less = self.node("Relu", self.node("Conv", pooled, self.weight((3, c, 1, 1))))
        more = self.node("Conv", less, self.weight((c, 3, 1, 1)))
        gate = self.node(("Sigmoid", "HardSigmoid")[self.draw(2)], more)
        self.keep(self.node("Mul", name, gate), shape)

    def attend(self, name: str, shape: _Shape) -> None:
        """Over all places, with two heads of width 3."""
        c, h, w = shape
        row = self.node("Reshape", name, self.weight(ints(0, c, -1)))
        seen = self.node("Transpose", row, perm=[0, 2, 1])
        heads = []
        for turn in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
            flat = self.node("MatMul", seen, self.weight((c, 6)))
            apart = self.node("Reshape", flat, self.weight(ints(0, 0, 2, 3)))
            heads.append(self.node("Transpose", apart, perm=turn))
        scores = self.node("Softmax", self.node("MatMul", heads[0], heads[1]))
        mixed = self.node("Transpose", self.node("MatMul", scores, heads[2]), perm=[0, 2, 1, 3])
        merged = self.node("Reshape", mixed, self.weight(ints(0, 0, 6)))
        back = self.node("Transpose", self.node("MatMul", merged, self.weight((6, c))),
                         perm=[0, 2, 1])  # fmt: skip
        self.keep(self.node("Reshape", back, self.weight(ints(-1, c, h, w))), shape)

    def pool(self, name: str, shape: _Shape) -> None:
        c, h, w = shape
        if min(h, w) < 2:
            return
        kind = ("MaxPool", "AveragePool")[self.draw(2)]
        self.keep(self.node(kind, name, kernel_shape=[2, 2]), (c, h - 1, w - 1))

    def pad(self, name: str, shape: _Shape) -> None:
        c, h, w = shape
        front, back, around = self.draw(3), self.draw(2), self.draw(2)
        pads = self.weight(ints(0, front, around, 0, 0, back, 0, around))
        made = self.node("Pad", name, pads)
        self.keep(made, (c + front + back, h + around, w + around))

    def rearrange(self, name: str, shape: _Shape) -> None:
        c, h, w = shape
        if c % 4 == 0 and self.draw(2):
            mode = ("DCR", "CRD")[self.draw(2)]
            made = self.node("DepthToSpace", name, blocksize=2, mode=mode)
            self.keep(made, (c // 4, 2 * h, 2 * w))
        elif h % 2 == w % 2 == 0 and c <= 6:
            self.keep(self.node("SpaceToDepth", name, blocksize=2), (4 * c, h // 2, w // 2))

    def flatten(self, name: str, shape: _Shape) -> None:
        """To a vector, through a layer, and as a factor for each channel."""
        c, h, w = shape
        flat = self.node("Flatten", name)
        inputs = [flat, self.weight((c * h * w, c))]
        form = self.draw(5)
        if form == 4:
            pooled = self.node("GlobalAveragePool", name)
            inputs.append(self.node("Squeeze", pooled, self.weight(ints(2, 3))))
        elif form:
            inputs.append(self.weight(((), (c,), (1, c))[form - 1]))
        made = self.node("Gemm", *inputs, alpha=0.25)
        factor = self.node("Unsqueeze", self.node("Tanh", made), self.weight(ints(2, 3)))
        self.keep(self.node("Mul", name, factor), shape)

    def project(self, name: str, shape: _Shape) -> None:
        """Through a matrix, channels last."""
        c, h, w = shape
        outputs = 2 + self.draw(6)
        last = self.node("Transpose", name, perm=[0, 2, 3, 1])
        made = self.node("MatMul", last, self.weight((c, outputs)))
        if self.draw(2):
            made = self.node("Add", made, self.weight((outputs,)))
        self.keep(self.node("Transpose", made, perm=[0, 3, 1, 2]), (outputs, h, w))

    def finish(self) -> str:
        """The model's text: what nothing reads goes through a last layer, the latest as it is."""
        results = []
        for name, (c, _, _) in dict(self.values[:-1]).items():
            if name not in self.read:
                pad = self.draw(2)
                last = self.node("Conv", name, self.weight((3, c, 1, 1)), pads=[pad] * 4)
                results.append(self.node("GlobalAveragePool", last))
        name, (c, _, _) = self.values[-1]
        results.append(
            name if self.draw(4) == 0 else self.node("Conv", name, self.weight((3, c, 1, 1)))
        )
        listed = ", ".join(f"float[a,b,c,d] {name}" for name in dict.fromkeys(results))
        return f"(float[N,4,4,6] x) => ({listed}) {{ {' '.join(self.nodes)} }}"


@settings(max_examples=250, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(2, 12))
def test_whatever_may_go_can_go(seed: int, steps: int) -> None:
    """Fewer steps give the beginning of the same network, so that a failure can be made small."""
    rng = np.random.default_rng(seed)
    network = Network(lambda below: int(rng.integers(below)))
    network.keep("x", (4, 4, 6))
    network.convolve("x", (4, 4, 6))
    for _ in range(steps):
        network.step()
    assert_exact(
        parsed(network.finish(), network.weights),
        ratio=(0.25, 0.5, 0.9)[seed % 3],
        whole_blocks=bool(seed % 2),
        seed=seed,
        silent_outputs=True,
    )
