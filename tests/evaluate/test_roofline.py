from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.evaluate import machine as module
from slimctl.evaluate.machine import Machine, least, measure_machine
from slimctl.evaluate.profile import NodeTime
from slimctl.evaluate.roofline import (
    Action,
    Bound,
    bound_of,
    heavy,
    place,
    summarize,
)
from slimctl.graph.cost import NodeCost

MACHINE = Machine(
    threads=1,
    bandwidth={1_000: 8e9, 1_000_000: 2e9},
    float_macs=10e9,
    integer_macs=20e9,
    float_depthwise=3e9,
    integer_depthwise=2e9,
    call=1e-6,
)


def value(kind: ir.DataType = ir.DataType.FLOAT, name: str = "t") -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape([1]))


def timed(
    node: ir.Node,
    *,
    macs: int | None = 0,
    weights: int = 0,
    activations: int | None = 0,
    seconds: float = 1.0,
    share: float = 0.5,
) -> NodeTime:
    cost = NodeCost("n", node.op_type, macs, 0, weights, activations, ())
    return NodeTime("n", seconds, share, cost, (), node)


def linear(kind: ir.DataType = ir.DataType.FLOAT, op_type: str = "MatMul") -> ir.Node:
    return ir.node(op_type, [value(kind), value(kind)])


# bounds


@pytest.mark.parametrize(
    ("macs", "size", "bound", "limit"),
    [
        (10_000_000, 1_000, Bound.COMPUTE, 1e-3),  # 10 M / 10 G/s
        (10_000, 1_000_000, Bound.MEMORY, 0.5e-3),  # 1 MB / 2 GB/s
        (10_000, 8_000, Bound.MEMORY, None),
        (100, 100, Bound.OVERHEAD, 1e-6),
        (0, 2_000_000, Bound.MEMORY, 1e-3),
    ],
)
def test_bound_is_the_slowest_of_three(macs, size, bound, limit):
    found, seconds = bound_of(timed(linear(), macs=macs, activations=size), MACHINE)
    assert found is bound
    if limit is not None:
        assert seconds == pytest.approx(limit)


def test_integers_have_their_own_peak():
    integer = linear(ir.DataType.UINT8, "MatMulInteger")
    _, seconds = bound_of(timed(integer, macs=10_000_000, activations=10), MACHINE)
    assert seconds == pytest.approx(0.5e-3)


@pytest.mark.parametrize(("macs", "size"), [(None, 10), (10, None)])
def test_what_is_unknown_has_no_bound(macs, size):
    placed = place(timed(linear(), macs=macs, activations=size), MACHINE)
    assert (placed.bound, placed.limit, placed.attained) == (Bound.UNKNOWN, None, None)
    assert placed.advice.action is Action.NOTHING


def test_attained_share():
    placed = place(timed(linear(), macs=10_000_000, seconds=4e-3), MACHINE)
    assert placed.attained == pytest.approx(0.25)
    assert placed.to_dict()["attained"] == placed.attained
    assert place(timed(linear(), macs=10, seconds=0.0), MACHINE).attained is None


def test_bandwidth_between_the_sizes_that_were_measured():
    assert MACHINE.bytes_per_second(10) == 8e9
    assert MACHINE.bytes_per_second(10**9) == 2e9
    middle = round((1_000 * 1_000_000) ** 0.5)
    assert MACHINE.bytes_per_second(middle) == pytest.approx(5e9, rel=1e-3)


# advice


def neighbors(*kinds: str) -> list[ir.Node]:
    """A chain of nodes, each of which reads what the one before gives."""
    nodes: list[ir.Node] = []
    last = value(name="x")
    for kind in kinds:
        nodes.append(ir.node(kind, [last]))
        last = nodes[-1].outputs[0]
        last.dtype = ir.DataType.FLOAT
    return nodes


def depthwise(op_type: str, kind: ir.DataType) -> ir.Node:
    weight = ir.Value(name="w", const_value=ir.tensor(np.ones((8, 1, 3, 3), np.int8)))
    others = [value(), value(kind)] if op_type == "QLinearConv" else []
    return ir.node(op_type, [value(kind), *others, weight])


COMPUTE = {"macs": 10**7, "activations": 100}
MEMORY = {"macs": 10, "activations": 10**6}
MOVES = {"activations": 10**6}
BY_WEIGHTS = {"macs": 10, "activations": 100, "weights": 10**6}

ADVICE = {
    "layout": (neighbors("Relu", "Transpose")[1], MOVES, Action.LAYOUT),
    "Q behind a float operator": (neighbors("Gelu", "QuantizeLinear")[1], MOVES, Action.FUSE),
    "DQ before a float operator": (neighbors("DequantizeLinear", "Gelu")[0], MOVES, Action.FUSE),
    "Q at the input": (neighbors("QuantizeLinear", "Gelu")[0], MOVES, Action.NOTHING),
    "DQ at the output": (neighbors("Gelu", "DequantizeLinear")[1], MOVES, Action.NOTHING),
    "float between pairs": (
        neighbors("DequantizeLinear", "HardSwish", "QuantizeLinear")[1],
        MOVES,
        Action.QUANTIZE,
    ),
    "elementwise behind a product": (neighbors("MatMul", "Gelu")[1], MOVES, Action.FUSE),
    "elementwise alone": (neighbors("Softmax", "Gelu")[1], MOVES, Action.NOTHING),
    "waits for float weights": (linear(), BY_WEIGHTS, Action.QUANTIZE),
    "waits for integer weights": (linear(ir.DataType.INT8), BY_WEIGHTS, Action.PRUNE),
    "waits for 4-bit weights": (
        linear(ir.DataType.UINT8, "MatMulNBits"),
        BY_WEIGHTS,
        Action.PRUNE,
    ),
    "waits for activations": (linear(), MEMORY, Action.QUANTIZE),
    "computes in float": (linear(), COMPUTE, Action.QUANTIZE),
    "computes in integers": (
        linear(ir.DataType.UINT8, "QLinearMatMul"),
        COMPUTE | {"seconds": 1e-3},
        Action.PRUNE,
    ),
    "integers slower than floats": (
        linear(ir.DataType.UINT8, "QLinearMatMul"),
        COMPUTE | {"seconds": 1e-2},
        Action.NOTHING,
    ),
    "depthwise": (depthwise("Conv", ir.DataType.FLOAT), COMPUTE, Action.NOTHING),
    "depthwise integers": (depthwise("QLinearConv", ir.DataType.UINT8), COMPUTE, Action.NOTHING),
    "near its bound": (linear(op_type="Softmax"), {"activations": 10**6}, Action.NOTHING),
    "too small": (linear(), {"macs": 1, "activations": 4}, Action.NOTHING),
}


@pytest.mark.parametrize("name", ADVICE)
def test_advice(name: str):
    node, numbers, action = ADVICE[name]
    advice = place(timed(node, **numbers), MACHINE).advice
    assert advice.action is action
    assert advice.reason


def test_advice_follows_the_machine():
    """Where integers are no faster, quantizing what computes is not advised."""
    slow = Machine(1, MACHINE.bandwidth, 10e9, 10.5e9, 2e9, 4e9, 1e-6)
    assert place(timed(linear(), **COMPUTE), slow).advice.action is Action.PRUNE
    assert place(timed(linear(), **MEMORY), slow).advice.action is Action.QUANTIZE
    small = depthwise("Conv", ir.DataType.FLOAT)
    assert place(timed(small, **COMPUTE), slow).advice.action is Action.QUANTIZE


def test_summary_and_heavy_nodes():
    placed = [
        place(timed(linear(), **COMPUTE, share=0.5, seconds=0.5), MACHINE),
        place(timed(linear(), **COMPUTE, share=0.3, seconds=0.3), MACHINE),
        place(timed(neighbors("Transpose")[0], share=0.195, seconds=0.195), MACHINE),
        place(timed(neighbors("Transpose")[0], share=0.005, seconds=0.005), MACHINE),
    ]
    assert [node.time.share for node in heavy(reversed(placed))] == [0.5, 0.3, 0.195]
    found = [(item.action, round(item.share, 9), item.nodes) for item in summarize(placed)]
    assert found == [(Action.QUANTIZE, 0.8, 2), (Action.LAYOUT, 0.2, 2)]


# the machine


def test_least_time_of_many():
    moments = iter([0.0, 0.0, 3.0, 3.0, 4.0, 4.0, 6.0, 6.5, 7.0, 9.0, 99.0])
    assert least(lambda: None, 6.4, lambda: next(moments)) == 1.0


def test_least_time_of_a_slow_call_is_of_three():
    moments = iter(range(0, 100, 10))
    calls = []
    least(lambda: calls.append(1), 0.0, lambda: next(moments))
    assert len(calls) == 3


def test_peaks_divide_work_by_time(monkeypatch):
    """Whatever runs takes a second; the work of each measurement is known."""
    seen = []

    def second(model, feeds, threads, seconds):
        seen.append((model.graph.node(0).op_type, len(list(model.graph)), threads))
        return 1.0

    monkeypatch.setattr(module, "_least_time", second)
    found = measure_machine(2)
    assert found.threads == 2 and {threads for _, _, threads in seen} == {2}
    assert found.float_macs == found.integer_macs == 512**3
    # As many additions as there are links in the chain, each moving ``size`` bytes.
    links = {kind: count - 1 for kind, count, _ in seen if kind == "Add"}
    assert links["Add"] == 64 and found.call == pytest.approx(1 / 64)
    assert found.bandwidth == {s: s * min(max(64_000_000 // s, 2), 64) for s in module.SIZES}
    assert found.float_depthwise == found.integer_depthwise == 128 * 28 * 28 * 9 * 8


def test_all_measurements_run(monkeypatch):
    monkeypatch.setattr(module, "SIZES", (1_200, 12_000))
    found = measure_machine(1, seconds=0.0)
    numbers = (*found.bandwidth.values(), found.float_macs, found.integer_macs, found.call)
    assert all(0 < number < float("inf") for number in numbers)
    assert found.float_depthwise > 0 and found.integer_depthwise > 0
