"""Random models with samples, as hypothesis draws them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import helper

from tests.modes.growing import BATCH, BOOL, FLOAT, INT64, Grower, Shape, Weights, graphs, info
from tests.modes.steps import connect, convolve, grow, project

SAMPLES = 4
STARTS: tuple[Shape, ...] = ((BATCH, 4, 8, 8), (BATCH, 6, 12), (BATCH, 24))
LAYERS = {4: convolve, 3: project, 2: connect}


@dataclass(frozen=True)
class Network:
    """A random model.

    Attributes:
        proto: The model.
        feeds: Samples; both ways of every branch are taken.
    """

    proto: onnx.ModelProto = field(repr=False)
    feeds: list[dict[str, np.ndarray]] = field(repr=False)

    def __repr__(self) -> str:
        nodes = [node.op_type for graph in graphs(self.proto.graph) for node in graph.node]
        opset = self.proto.opset_import[0].version
        return f"Network of opset {opset}: {' '.join(nodes)}"


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Models of one to ten steps, operator sets 9 to 23."""
    return build(lambda count: draw(st.integers(0, count - 1)))


def build(draw: Callable[[int], int]) -> Network:
    """A model from numbers below those that are asked for."""
    weights = Weights(np.random.default_rng(draw(1000)))
    main = Grower(draw, 9 + draw(15), weights, [])
    batch = str(main.pick("", "N"))
    start = STARTS[draw(len(STARTS))]
    inputs = [info("x", start, batch)]
    main.give("x", *start)
    if main.chance(4):
        inputs.append(info("ids", (BATCH, 6), batch, INT64))
        table = main.weight(20, 12, inputs=1)
        main.give(main.node("Gather", [table, "ids"]), BATCH, 6, 12)
    LAYERS[len(main.values[-1][1])](main, *main.values[-1])
    grow(main, *main.values[-1], 1 + draw(10))
    if any(node.op_type == "If" for node in main.nodes):
        inputs.append(info("choice", (), kind=BOOL))
    proto = _model(main, inputs, batch)
    return Network(proto, [_sample(proto, weights.rng, index) for index in range(SAMPLES)])


def _model(main: Grower, inputs: list[onnx.ValueInfoProto], batch: str) -> onnx.ModelProto:
    made = [(name, shape) for name, shape in main.values if name not in ("x", "ids")]
    chosen = dict([made[-1], *(made[main.draw(len(made))] for _ in range(main.draw(3)))])
    graph = main.graph(inputs, [info(name, shape, batch) for name, shape in chosen.items()])
    if main.chance(3):
        _into_nodes(graph, main)
    oldest = helper.find_min_ir_version_for([helper.make_opsetid("", main.opset)])
    if main.chance(5):  # what exporters of old wrote
        for item in graph.initializer:
            graph.input.append(info(item.name, tuple(item.dims), kind=item.data_type))
    imports = [helper.make_opsetid("", main.opset)]
    return helper.make_model(graph, opset_imports=imports, ir_version=max(oldest, 4))


def _into_nodes(graph: onnx.GraphProto, main: Grower) -> None:
    """Half of the weights of every graph become Constant nodes."""
    for each in graphs(graph):
        for item in list(each.initializer):
            if main.draw(2):
                each.initializer.remove(item)
                each.node.insert(0, helper.make_node("Constant", [], [item.name], value=item))


def _sample(proto: onnx.ModelProto, rng: np.random.Generator, index: int) -> dict[str, np.ndarray]:
    stored = {item.name for item in proto.graph.initializer}
    feeds: dict[str, np.ndarray] = {}
    for item in proto.graph.input:
        kind, shape = item.type.tensor_type.elem_type, item.type.tensor_type.shape
        sizes = [dim.dim_value or BATCH for dim in shape.dim]
        if item.name in stored:
            continue
        if kind == BOOL:
            feeds[item.name] = np.array(index % 2 == 0)
        elif kind == INT64:
            feeds[item.name] = rng.integers(0, 20, sizes)
        elif kind == FLOAT:
            feeds[item.name] = rng.normal(size=sizes).astype(np.float32)
    return feeds
