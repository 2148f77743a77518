"""What this machine can do at best, through onnxruntime and with its threads.

- Bytes per second: ``c = a + b`` of float32 arrays, 12 bytes per element, as STREAM counts
  (McCalpin 1995: a written line that the cache fetches first is not counted). A model whose tensors
  fit into a cache sees that cache's bandwidth, so it is measured at several sizes; a node is judged
  by that of its own (the cache-aware roofline of Ilic, Pratas, Sousa 2014).
- Multiply-accumulates per second: MatMul of float32, and MatMulInteger of uint8 by int8. Depthwise
  convolutions have kernels of their own, far below that peak, so they are measured beside it.
- Seconds per call: an Add of one element, whose work is nothing.

Each is the best of many runs: a peak is what nothing has disturbed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from slimctl.core.contract import Feeds
from slimctl.graph.session import Level, Products, open_session

SIZES = (250_000, 1_000_000, 4_000_000, 16_000_000, 64_000_000, 256_000_000)
"""Bytes of three arrays together: from what fits a core's cache to what fits none."""

SECONDS = 0.25
"""Time for each number."""

_ADDED = 12
"""Bytes per element of an addition."""

_TRAFFIC = 64_000_000
"""Bytes moved in one run at least, so that what surrounds the kernels does not show."""

_LINKS = 64
_SIDES = (256, 512)
"""Sides of the matrices: the smaller ones stay in a cache, the larger ones fill all threads."""

_IMAGE = (1, 128, 28, 28)
_KERNEL = (3, 3)
_LAYERS = 8
"""Convolutions in a row: onnxruntime changes the layout once before and once behind all of them."""

_DEPTHWISE_MACS = math.prod(_IMAGE) * math.prod(_KERNEL) * _LAYERS

_OPSET = 17


@dataclass(frozen=True)
class Machine:
    """Peaks of a machine at a number of threads.

    Attributes:
        threads: Of onnxruntime; 0 for all cores.
        bandwidth: Bytes per second by the number of bytes that an operator touches.
        float_macs: Multiply-accumulates of float32 per second.
        integer_macs: Multiply-accumulates of 8-bit integers per second.
        float_depthwise: The same for depthwise convolutions in float32.
        integer_depthwise: The same for depthwise convolutions in 8 bits.
        call: Seconds that an operator takes whatever it does.
    """

    threads: int
    bandwidth: Mapping[int, float]
    float_macs: float
    integer_macs: float
    float_depthwise: float
    integer_depthwise: float
    call: float

    def bytes_per_second(self, touched: int) -> float:
        """Bandwidth for an operator that touches some bytes, between the sizes that were measured.

        Interpolated over the logarithm of the size; the first and the last hold beyond the ends.
        """
        sizes = sorted(self.bandwidth)
        speeds = [self.bandwidth[size] for size in sizes]
        return float(np.interp(np.log(max(touched, 1)), np.log(sizes), speeds))


def measure_machine(threads: int = 0, *, seconds: float = SECONDS) -> Machine:
    """Measures this machine; takes about fifteen times ``seconds`` and 300 MB.

    Args:
        threads: Of onnxruntime; 0 for all cores.
        seconds: Time for each number.
    """

    def best(model: ir.Model, feeds: Feeds) -> float:
        return _least_time(model, feeds, threads, seconds)

    products = [best(*_float_product(side)) / side**3 for side in _SIDES]
    integers = [best(*_integer_product(side)) / side**3 for side in _SIDES]
    return Machine(
        threads=threads,
        bandwidth={size: size / (best(*_sums(size)) / _links(size)) for size in SIZES},
        float_macs=1 / min(products),
        integer_macs=1 / min(integers),
        float_depthwise=_DEPTHWISE_MACS / best(*_float_depthwise()),
        integer_depthwise=_DEPTHWISE_MACS / best(*_integer_depthwise()),
        call=best(*_sums(_ADDED)) / _links(_ADDED),
    )


def _least_time(model: ir.Model, feeds: Feeds, threads: int, seconds: float) -> float:
    session = open_session(model, level=Level.ALL, threads=threads, products=Products.NATIVE)
    session.run(None, feeds)
    return least(lambda: session.run(None, feeds), seconds)


def least(
    call: Callable[[], object], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> float:
    """The shortest time of a call, among as many as fit into some seconds; three at least."""
    times: list[float] = []
    start = clock()
    while len(times) < 3 or clock() - start < seconds:
        before = clock()
        call()
        times.append(clock() - before)
    return min(times)


def _links(size: int) -> int:
    """Additions in a row, each of which waits for the one before."""
    return min(max(_TRAFFIC // size, 2), _LINKS)


def _sums(size: int) -> tuple[ir.Model, Feeds]:
    """A chain of additions whose arrays have some bytes together; its output is one element."""
    count = max(size // _ADDED, 1)
    left, right = _input("a", ir.DataType.FLOAT, (count,)), _input("b", ir.DataType.FLOAT, (count,))
    nodes, last = [], left
    for _ in range(_links(size)):
        nodes.append(ir.node("Add", [last, right]))
        last = nodes[-1].outputs[0]
    nodes.append(ir.node("Slice", [last, *_constants(np.array([0]), np.array([1]))]))
    ones = np.ones(count, np.float32)
    return _model(nodes, [left, right], ir.DataType.FLOAT, (1,)), {"a": ones, "b": ones}


def _float_product(side: int) -> tuple[ir.Model, Feeds]:
    values = np.random.default_rng(0).normal(size=(side, side)).astype(np.float32)
    return _product("MatMul", values, values, ir.DataType.FLOAT)


def _integer_product(side: int) -> tuple[ir.Model, Feeds]:
    codes = np.random.default_rng(0).integers(-127, 128, (side, side)).astype(np.int8)
    return _product("MatMulInteger", codes.view(np.uint8), codes, ir.DataType.INT32)


def _product(
    operator: str, left: np.ndarray, right: np.ndarray, kind: ir.DataType
) -> tuple[ir.Model, Feeds]:
    """A product with constant weights, reduced to one element: what is copied out is small."""
    data = _input("a", ir.DataType.from_numpy(left.dtype), left.shape)
    product = ir.node(operator, [data, *_constants(right)])
    largest = ir.node("ReduceMax", [product.outputs[0]], {"keepdims": 1})
    return _model([product, largest], [data], kind, (1, 1)), {"a": left}


def _float_depthwise() -> tuple[ir.Model, Feeds]:
    data = _input("a", ir.DataType.FLOAT, _IMAGE)
    (weight,) = _constants(np.full((_IMAGE[1], 1, *_KERNEL), 0.1, np.float32))
    nodes, last = [], data
    for _ in range(_LAYERS):
        nodes.append(ir.node("Conv", [last, weight], _DEPTHWISE))
        last = nodes[-1].outputs[0]
    nodes.append(ir.node("ReduceMax", [last], {"keepdims": 1}))
    feeds = {"a": np.ones(_IMAGE, np.float32)}
    return _model(nodes, [data], ir.DataType.FLOAT, (1, 1, 1, 1)), feeds


_DEPTHWISE: Mapping[str, int | Sequence[int]] = {"group": _IMAGE[1], "pads": [1, 1, 1, 1]}


def _integer_depthwise() -> tuple[ir.Model, Feeds]:
    data = _input("a", ir.DataType.UINT8, _IMAGE)
    scale, zero, weight, weight_zero = _constants(
        np.array(0.1, np.float32),
        np.array(128, np.uint8),
        np.ones((_IMAGE[1], 1, *_KERNEL), np.int8),
        np.array(0, np.int8),
    )
    nodes, last = [], data
    for _ in range(_LAYERS):
        operands = [last, scale, zero, weight, scale, weight_zero, scale, zero]
        nodes.append(ir.node("QLinearConv", operands, _DEPTHWISE))
        last = nodes[-1].outputs[0]
    nodes.append(ir.node("ReduceMax", [last], {"keepdims": 1}))
    feeds = {"a": np.full(_IMAGE, 130, np.uint8)}
    return _model(nodes, [data], ir.DataType.UINT8, (1, 1, 1, 1)), feeds


def _input(name: str, kind: ir.DataType, shape: Sequence[int]) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind))


def _constants(*arrays: np.ndarray) -> Iterator[ir.Value]:
    for index, array in enumerate(arrays):
        tensor = ir.tensor(array, name=f"constant_{index}")
        yield ir.Value(name=tensor.name, const_value=tensor)


def _model(
    nodes: Sequence[ir.Node], inputs: Sequence[ir.Value], kind: ir.DataType, shape: Sequence[int]
) -> ir.Model:
    output = nodes[-1].outputs[0]
    output.shape, output.type = ir.Shape(shape), ir.TensorType(kind)
    read = [v for node in nodes for v in node.inputs if v is not None]
    weights = list(dict.fromkeys(v for v in read if v.const_value is not None))
    graph = ir.Graph(
        inputs,
        [output],
        nodes=nodes,
        initializers=weights,
        opset_imports={"": _OPSET},
        name="machine",
    )
    return ir.Model(graph, ir_version=8)
