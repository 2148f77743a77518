"""The steps by which random graphs grow: layers, arithmetic, movement, branches and loops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import helper

from tests.modes.growing import BOOL, FLOAT, INT64, Grower, Shape, Value, info

Step = Callable[[Grower, str, Shape], None]

# images: batch, channels, height, width


def convolve(g: Grower, name: str, shape: Shape) -> None:
    n, c, h, w = shape
    group = int(g.pick(1, 1, c))
    outputs = c if group == c else int(g.pick(4, 8, 12))
    size = 3 if min(h, w) >= 3 and g.draw(2) else 1
    stride = 2 if g.chance(4) and min(h, w) > 3 else 1
    inputs = [name, g.weight(outputs, c // group, size, size, inputs=c // group * size**2)]
    if g.draw(3):
        inputs.append(g.vector(outputs))
    around = g.draw(2) * (size // 2)
    after = [(length + 2 * around - size) // stride + 1 for length in (h, w)]
    made = g.node(
        "Conv", inputs, group=group, pads=[around] * 4, strides=[stride, stride],
        kernel_shape=[size, size],
    )  # fmt: skip
    g.give(made, n, outputs, *after)


def convolve_up(g: Grower, name: str, shape: Shape) -> None:
    n, c, h, w = shape
    group = int(g.pick(1, c))
    outputs = int(g.pick(2, 4))
    inputs = [name, g.weight(c, outputs, 2, 2, inputs=c // group)]
    if g.draw(2):
        inputs.append(g.vector(outputs * group))
    made = g.node("ConvTranspose", inputs, group=group, strides=[2, 2])
    g.give(made, n, outputs * group, 2 * h, 2 * w)


def normalize(g: Grower, name: str, shape: Shape) -> None:
    c = shape[1]
    scale, bias = g.vector(c, center=1.0), g.vector(c)
    if g.draw(3):
        variance = g.constant(g.weights.rng.uniform(0.5, 2.0, c), "b")
        inputs = [name, scale, bias, g.vector(c), variance]
        g.give(g.node("BatchNormalization", inputs), *shape)
    elif shape[2] * shape[3] >= 9:  # the fewer, the more it enlarges noise
        g.give(g.node("InstanceNormalization", [name, scale, bias]), *shape)


def pool(g: Grower, name: str, shape: Shape) -> None:
    n, c, h, w = shape
    if min(h, w) < 2 or g.chance(4):
        g.give(g.node(str(g.pick("GlobalAveragePool", "GlobalMaxPool")), [name]), n, c, 1, 1)
        return
    op_type = str(g.pick("MaxPool", "AveragePool"))
    stride = 1 + g.draw(2)
    made = g.node(op_type, [name], kernel_shape=[2, 2], strides=[stride, stride])
    g.give(made, n, c, (h - 2) // stride + 1, (w - 2) // stride + 1)


def resize(g: Grower, name: str, shape: Shape) -> None:
    n, c, h, w = shape
    if max(h, w) <= 8:
        made = g.resize(name, [1.0, 1.0, 2.0, 2.0], str(g.pick("nearest", "linear")))
        g.give(made, n, c, 2 * h, 2 * w)


def pad(g: Grower, name: str, shape: Shape) -> None:
    n, c, h, w = shape
    mode = str(g.pick("constant", "edge"))
    g.give(g.pad(name, [0, 0, 1, 0, 0, 0, 0, 2], mode), n, c, h + 1, w + 2)


def depth(g: Grower, name: str, shape: Shape) -> None:
    n, c, h, w = shape
    if c % 4 == 0:
        g.give(g.node("DepthToSpace", [name], blocksize=2), n, c // 4, 2 * h, 2 * w)
    elif h % 2 == 0 and w % 2 == 0:
        g.give(g.node("SpaceToDepth", [name], blocksize=2), n, 4 * c, h // 2, w // 2)


def slope(g: Grower, name: str, shape: Shape) -> None:
    array = g.weights.rng.uniform(0.1, 0.5, (shape[1], 1, 1))
    g.give(g.node("PRelu", [name, g.constant(array, "b")]), *shape)


def image_to_rows(g: Grower, name: str, shape: Shape) -> None:
    n, c, h, w = shape
    if c * h * w <= 512:
        if g.draw(2):
            g.give(g.node("Flatten", [name]), n, c * h * w)
        else:
            g.give(g.flat(name, 0, -1), n, c * h * w)


def image_to_sequence(g: Grower, name: str, shape: Shape) -> None:
    n, c, h, w = shape
    flat = g.flat(name, 0, 0, -1)
    g.give(g.node("Transpose", [flat], perm=[0, 2, 1]), n, h * w, c)


# sequences: batch, time, features


def project(g: Grower, name: str, shape: Shape) -> None:
    n, t, d = shape
    outputs = int(g.pick(8, 16, 32))
    made = g.node("MatMul", [name, g.weight(d, outputs, inputs=d)])
    if g.draw(2):
        made = g.node("Add", [made, g.vector(outputs)] if g.draw(2) else [g.vector(outputs), made])
    g.give(made, n, t, outputs)


def standardize(g: Grower, name: str, shape: Shape) -> None:
    d = shape[-1]
    if d < 8:
        return
    scale, bias = g.vector(d, center=1.0), g.vector(d)
    if g.opset >= 23 and g.draw(2):
        g.give(g.node("RMSNormalization", [name, scale]), *shape)
    elif g.opset >= 17 and g.draw(2):
        g.give(g.node("LayerNormalization", [name, scale, bias], axis=-1), *shape)
    else:
        centered = g.node("Sub", [name, g.reduce("ReduceMean", name, -1, keep=True)])
        square = g.node("Mul", [centered, centered])
        variance = g.reduce("ReduceMean", square, -1, keep=True)
        deviation = g.node("Sqrt", [g.node("Add", [variance, g.constant(1e-5)])])
        even = g.node("Div", [centered, deviation])
        g.give(g.node("Add", [g.node("Mul", [even, scale]), bias]), *shape)


def attend(g: Grower, name: str, shape: Shape) -> None:
    n, t, d = shape
    q, k, v = (g.node("MatMul", [name, g.weight(d, 8, inputs=d)]) for _ in range(3))
    if g.opset >= 23 and g.draw(2):
        made = g.node("Attention", [q, k, v], q_num_heads=2, kv_num_heads=2)
    else:
        turned = g.node("Transpose", [k], perm=[0, 2, 1])
        scores = g.node("Mul", [g.node("MatMul", [q, turned]), g.constant(8**-0.5)])
        made = g.node("MatMul", [g.node("Softmax", [scores], axis=2), v])
    g.give(made, n, t, 8)


def recur(g: Grower, name: str, shape: Shape) -> None:
    n, t, d = shape
    kind, gates = [("LSTM", 4), ("GRU", 3), ("RNN", 1)][g.draw(3)]
    ways = 1 + g.draw(2)
    turned = g.node("Transpose", [name], perm=[1, 0, 2])
    inputs = [
        turned,
        g.weight(ways, gates * 6, d, inputs=d),
        g.weight(ways, gates * 6, 6, inputs=6),
    ]
    if g.draw(2):
        inputs.append(g.constant(g.weights.rng.normal(0, 0.2, (ways, 2 * gates * 6)), "b"))
    direction = "bidirectional" if ways == 2 else "forward"
    made = g.node(kind, inputs, hidden_size=6, direction=direction)  # [T, ways, N, 6]
    across = g.node("Transpose", [made], perm=[2, 0, 1, 3])
    g.give(g.flat(across, 0, 0, -1), n, t, ways * 6)


def sequence_to_rows(g: Grower, name: str, shape: Shape) -> None:
    n, t, d = shape
    match g.draw(3):
        case 0:
            op_type = str(g.pick("ReduceMean", "ReduceMax", "ReduceSum"))
            g.give(g.reduce(op_type, name, 1, keep=False), n, d)
        case 1:
            last = g.constant(np.array(t - 1, np.int64), "i")
            g.give(g.node("Gather", [name, last], axis=1), n, d)
        case _ if t * d <= 512:
            g.give(g.node("Flatten", [name]), n, t * d)


def contract(g: Grower, name: str, shape: Shape) -> None:
    n, t, d = shape
    if g.opset >= 12:
        made = g.node("Einsum", [name, g.weight(d, 8, inputs=d)], equation="ntd,de->nte")
        g.give(made, n, t, 8)


# rows: batch, features


def connect(g: Grower, name: str, shape: Shape) -> None:
    n, d = shape
    outputs = int(g.pick(8, 16, 32))
    turned = g.draw(2)
    weight = g.weight(*((outputs, d) if turned else (d, outputs)), inputs=d)
    bias = [g.vector(outputs)] if g.draw(3) or g.opset < 11 else []
    factors = {"alpha": 0.5, "beta": 2.0} if g.chance(4) else {}
    g.give(g.node("Gemm", [name, weight, *bias], transB=turned, **factors), n, outputs)


def rows_to_sequence(g: Grower, name: str, shape: Shape) -> None:
    n, d = shape
    if d % 4 == 0:
        g.give(g.flat(name, 0, 4, -1), n, 4, d // 4)
    else:
        g.give(g.squeeze(name, 1, op_type="Unsqueeze"), n, 1, d)


# any rank


def activate(g: Grower, name: str, shape: Shape) -> None:
    names = ["Relu", "Sigmoid", "Tanh", "LeakyRelu", "Elu", "HardSigmoid", "Softplus", "Abs", "Neg"]
    names += ["HardSwish"] * (g.opset >= 14) + ["Mish"] * (g.opset >= 18)
    names += ["Gelu"] * (g.opset >= 20) + ["Selu", "Identity", "Dropout"]
    g.give(g.node(str(g.pick(*names)), [name]), *shape)


def gelu(g: Grower, name: str, shape: Shape) -> None:
    erf = g.node("Erf", [g.node("Div", [name, g.constant(np.sqrt(2.0))])])
    gate = g.node("Add", [erf, g.constant(1.0)])
    half = g.node("Mul", [g.node("Mul", [name, gate]), g.constant(0.5)])
    g.give(half, *shape)


def bound(g: Grower, name: str, shape: Shape) -> None:
    low, high = [(0.0, 6.0), (-1.0, 1.0), (None, 2.0), (-2.0, None)][g.draw(4)]
    g.give(g.clip(name, low, high), *shape)


def calculate(g: Grower, name: str, shape: Shape) -> None:
    forms: list[Shape] = [(), (1,), shape[-1:], (shape[1], *(1 for _ in shape[2:]))]
    form = forms[g.draw(4)]
    array = g.weights.rng.uniform(0.5, 1.5, form) * g.weights.rng.choice([-1, 1], form)
    pair = [name, g.constant(np.asarray(array, np.float32), "b")]
    op_type = str(g.pick("Mul", "Add", "Sub", "Div"))
    if op_type != "Div" and g.chance(3):
        pair.reverse()
    g.give(g.node(op_type, pair), *shape)


def join(g: Grower, name: str, shape: Shape) -> None:
    alike = [other for other, its in g.values if its == shape]
    other = alike[g.draw(len(alike))]
    if g.chance(4):
        g.give(g.node("Mul", [name, g.node("Sigmoid", [other])]), *shape)
    else:
        g.give(g.node(str(g.pick("Add", "Sum", "Max", "Min", "Sub")), [name, other]), *shape)


def concatenate(g: Grower, name: str, shape: Shape) -> None:
    alike = [value for value in g.values if value[1][2:] == shape[2:] and len(value[1]) > 1]
    chosen: list[Value] = [(name, shape), *(alike[g.draw(len(alike))] for _ in range(g.draw(3)))]
    channels = sum(its[1] for _, its in chosen)
    if channels <= 128:
        made = g.node("Concat", [each for each, _ in chosen], axis=1)
        g.give(made, shape[0], channels, *shape[2:])


def divide(g: Grower, name: str, shape: Shape) -> None:
    n, c, *rest = shape
    if c < 2:
        return
    if g.draw(2):
        first, second = g.split(name, 1, c // 2, c - c // 2)
        g.give(first, n, c // 2, *rest)
        g.give(second, n, c - c // 2, *rest)
    else:
        g.give(g.slice(name, 0, c - 1, 1), n, c - 1, *rest)


def choose(g: Grower, name: str, shape: Shape) -> None:
    positive = g.node("Greater", [name, g.constant(0.0)])
    if g.draw(2):
        small = g.node("Mul", [name, g.constant(0.2)])
        g.give(g.node("Where", [positive, name, small]), *shape)
    else:
        g.give(g.node("Mul", [name, g.node("Cast", [positive], to=FLOAT)]), *shape)


def reorder(g: Grower, name: str, shape: Shape) -> None:
    order = g.weights.rng.permutation(shape[1])
    g.give(g.node("Gather", [name, g.integers(*map(int, order))], axis=1), *shape)


def score(g: Grower, name: str, shape: Shape) -> None:
    g.give(g.node("Softmax", [name], axis=len(shape) - 1), *shape)


def squash(g: Grower, name: str, shape: Shape) -> None:
    """Attention over channels, as in squeeze and excitation."""
    axes = range(2, len(shape))
    mean = g.reduce("ReduceMean", name, *axes, keep=True) if len(shape) > 2 else name
    g.give(g.node("Mul", [name, g.node("HardSigmoid", [mean])]), *shape)


def branch(g: Grower, name: str, shape: Shape) -> None:
    """Two bodies of a few steps each, brought to the shape that both have to give."""
    bodies = []
    for title in ("then", "else"):
        body = g.body(title)
        grow(body, name, shape, 1 + g.draw(2))
        last, its = body.values[-1]
        result = last if its == shape and last != name else body.node("Tanh", [name])
        if result not in {output for node in body.nodes for output in node.output}:
            result = body.node("Identity", [result])
        bodies.append(body.graph([], [info(result, None)]))
    made = g.node("If", ["choice"], then_branch=bodies[0], else_branch=bodies[1])
    g.give(made, *shape)


def loop(g: Grower, name: str, shape: Shape) -> None:
    """Two rounds of the same layer."""
    body = g.body("body")
    count, go, carried = (g.weights.name(kind) for kind in ("n", "k", "s"))
    on = body.node("Identity", [go])
    d = shape[-1]
    made = body.node("MatMul", [carried, body.weight(d, d, inputs=d)])
    result = body.node("Tanh", [made])
    inputs = [info(count, (), kind=INT64), info(go, (), kind=BOOL), info(carried, None)]
    graph = body.graph(inputs, [info(on, (), kind=BOOL), info(result, None)])
    rounds = g.constant(np.array(2, np.int64), "i")
    g.nodes.append(helper.make_node("Loop", [rounds, "", name], [g.weights.name("v")], body=graph))
    g.give(g.nodes[-1].output[0], *shape)


ANYWHERE: tuple[Step, ...] = (
    *(activate, activate, gelu, bound, calculate, calculate, join, join, concatenate),
    *(divide, choose, reorder, score, squash),
)
STEPS: dict[int, tuple[Step, ...]] = {
    4: (
        *(convolve,) * 7, convolve_up, convolve_up, normalize, normalize, pool, resize, pad, depth,
        slope, image_to_rows, image_to_rows, image_to_sequence, image_to_sequence, *ANYWHERE,
    ),
    3: (
        *(project,) * 6, standardize, standardize, attend, attend, recur, recur, contract,
        sequence_to_rows, *ANYWHERE,
    ),
    2: (*(connect,) * 8, rows_to_sequence, rows_to_sequence, *ANYWHERE),
}  # fmt: skip


def grow(g: Grower, name: str, shape: Shape, count: int) -> None:
    """Appends steps, most of them to the latest tensor."""
    for index in range(count):
        if index:
            name, shape = g.values[-1 if g.draw(5) else g.draw(len(g.values))]
        inner = (branch, *((loop,) if len(shape) < 4 else ())) if g.title == "main" else ()
        steps = (*STEPS[len(shape)], *inner, *inner)
        steps[g.draw(len(steps))](g, name, shape)
